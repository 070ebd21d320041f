"""Runs with a tokenizer: the same one on all ranks and in every start, encoded once, and losses that compare."""

import hashlib
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain import config
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.config import Config
from mpitrain.data import encoded
from mpitrain.data.corpus import load
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.replay.command import main as replay
from mpitrain.tokenizing import command, start
from mpitrain.tokenizing.start import read_words, tokenizer_of
from mpitrain.train import main

pytest.importorskip("tokenizers", reason="needs the tokenizers library: the extra hf")

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles; take {n % 7} down. Grüße!\n" for n in range(400))
TINY = "--model gpt-tiny --layers 1 --batch 4 --seq-len 8 --lr 0.01 --sample-length 12 --deterministic".split()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MPITRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


@pytest.fixture
def made(tmp_path, text):
    """A tokenizer.json in a folder of its own."""
    path = tmp_path / "made" / "tokenizer.json"
    path.parent.mkdir()
    Tokenizer.trained(encoded.training_pieces(load(text)), 290).save(path)
    return path


def train(ranks, run, text, *flags):
    LocalWorld(ranks).run(main, [*TINY, "--data", text, "--run", str(run), *flags])


def metrics(run):
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in records]


def state(run, step):
    folder = Path(run) / "checkpoints" / f"step-{step:08}"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.h5"))}


@pytest.mark.parametrize("asked", [pytest.param("bpe:300", marks=pytest.mark.slow), "a file"])
def test_a_run_that_stops_and_goes_on_elsewhere_is_the_uninterrupted_one(tmp_path, text, made, asked, capsys):
    asked = str(made) if asked == "a file" else asked
    more = ["--steps", "6", "--tokenizer", asked, "--eval-every", "3", "--save-every", "3", "--metrics", "csv"]
    train(2, tmp_path / "whole", text, *more)
    train(2, tmp_path / "parts", text, *more, "--stop-after", "3")
    shutil.move(tmp_path / "parts", tmp_path / "moved")
    shutil.rmtree(made.parent)  # the folder of the run is enough
    shutil.rmtree(tmp_path / "cache")
    LocalWorld(2).run(main, ["--run", str(tmp_path / "moved"), "--resume", "latest"])
    assert metrics(tmp_path / "moved") == metrics(tmp_path / "whole")
    assert state(tmp_path / "moved", 6) == state(tmp_path / "whole", 6)
    assert (tmp_path / "moved" / "sample.txt").read_text() == (tmp_path / "whole" / "sample.txt").read_text()
    tables = [(tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("moved", "whole")]
    assert [len(table) for table in tables] == [7, 7]
    words = Tokenizer.read(tmp_path / "moved")
    out = capsys.readouterr().out
    assert f"tokenizer    {asked}: {words}" in out
    assert f"vocabulary {words.vocab_size}, " in out


def test_losses_are_told_in_bits_a_byte_and_the_sample_is_text(tmp_path, text, made, capsys):
    train(1, tmp_path / "run", text, "--steps", "4", "--tokenizer", str(made.parent), "--eval-every", "4")
    as_words, as_bytes = encoded.load(text, Tokenizer.read(made)), load(text)
    first, *_, last = metrics(tmp_path / "run")
    a_byte = len(as_words.train) / len(as_bytes.train) / math.log(2)
    assert first["bits_per_byte"] == pytest.approx(first["loss"] * a_byte, rel=1e-12)
    of_val = len(as_words.val) / len(as_bytes.val) / math.log(2)
    assert last["val_bits_per_byte"] == pytest.approx(last["val_loss"] * of_val, rel=1e-12)
    assert (
        f"{last['val_loss']:.4f} nats a token, {last['val_bits_per_byte']:.4f} bits a byte" in capsys.readouterr().out
    )
    sample = (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")
    end = TEXT.encode()[-len(as_bytes.val) :].decode()
    begun = end.partition("\n")[2]
    assert sample.startswith(begun[:8])  # the first whole line of the validation text


def test_one_rank_encodes_and_all_map_what_it_wrote(tmp_path, text, made, monkeypatch):
    ranks, encode = [], Tokenizer.encode_all
    monkeypatch.setattr(Tokenizer, "encode_all", lambda *args: (ranks.append(world().rank), encode(*args))[1])
    train(3, tmp_path / "run", text, "--steps", "1", "--tokenizer", str(made), "--batch", "6")
    assert set(ranks) == {0}
    count = len(ranks)
    train(3, tmp_path / "again", text, "--steps", "1", "--tokenizer", str(made), "--batch", "6")
    assert len(ranks) == count


def test_what_takes_long_is_told_and_no_message_waits_for_it(tmp_path, text, made, monkeypatch, capsys):
    """Every round is a message, so ranks that only wait hear of those that encode; a replay hears the same."""
    monkeypatch.setattr(start, "SHARE", 0.0)
    monkeypatch.setattr(encoded, "PIECE", 2000)
    monkeypatch.setattr(encoded, "_AT_ONCE", 4000)
    train(2, tmp_path / "run", text, "--steps", "1", "--tokenizer", str(made), "--record", str(tmp_path / "rec"))
    told = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" % of the text is encoded")]
    shares = [int(line.split()[0]) for line in told]
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert max(shares) <= 100
    shutil.rmtree(tmp_path / "cache")
    assert replay([str(tmp_path / "rec"), "--rank", "1"]) == 0


def test_one_rank_of_each_host_encodes(text, made, monkeypatch):
    """Which may be two at once into one home: either file is whole, and one of them stays."""
    ranks, encode = set(), Tokenizer.encode_all
    monkeypatch.setattr(Tokenizer, "encode_all", lambda *args: (ranks.add(world().rank), encode(*args))[1])

    def begin():
        world().host = f"host{world().rank // 2}"
        corpus = read_words(Config(data=text, tokenizer=str(made)), world(), Tokenizer.read(made))
        return corpus.train.tolist(), corpus.sha256

    found = LocalWorld(4).run(begin)
    assert ranks == {0, 2}
    assert found == [found[0]] * 4
    assert len(list(encoded.cache_folder().iterdir())) == 1


def test_a_recorded_rank_needs_neither_the_others_nor_the_cache(tmp_path, text, capsys):
    flags = ["--steps", "2", "--tokenizer", "bpe:300", "--record", str(tmp_path / "rec")]
    train(2, tmp_path / "run", text, *flags)
    made = Tokenizer.trained(encoded.training_pieces(load(text)), 300)
    assert (tmp_path / "run" / "tokenizer.json").read_text(encoding="utf-8") == made.text
    for rank in ("1", "0"):
        shutil.rmtree(tmp_path / "cache")
        assert replay([str(tmp_path / "rec"), "--rank", rank]) == 0
        assert "bit by bit the same" in capsys.readouterr().out


def test_other_words_than_those_of_the_run_are_refused(tmp_path, text, made):
    train(1, tmp_path / "run", text, "--steps", "2", "--save-every", "2", "--tokenizer", str(made))
    train(1, tmp_path / "bytes", text, "--steps", "2", "--save-every", "2")
    on = ["--resume", "latest", "--steps", "3"]
    with pytest.raises(CheckpointError, match="was trained with another tokenizer"):
        train(2, tmp_path / "run", text, *on, "--tokenizer", "bpe:300")
    with pytest.raises(CheckpointError, match="was trained without a tokenizer"):
        train(2, tmp_path / "bytes", text, *on, "--tokenizer", str(made))
    shutil.copy(made, tmp_path / "copy.json")
    train(1, tmp_path / "run", text, *on, "--tokenizer", str(tmp_path / "copy.json"))  # another place, the same words
    assert len(metrics(tmp_path / "run")) == 3
    other = made.read_text().replace("<|endoftext|>", "<|end|>")
    (tmp_path / "other.json").write_text(other)
    begin = ["--init", str(tmp_path / "run"), "--steps", "1", "--tokenizer"]
    with pytest.raises(CheckpointError, match=r"and the weights of --init know the words of .*run/tokenizer.json"):
        train(2, tmp_path / "new", text, *begin, str(tmp_path / "other.json"))
    assert not (tmp_path / "new").exists()
    train(2, tmp_path / "new", text, *begin, str(tmp_path / "copy.json"))
    (tmp_path / "run" / "tokenizer.json").write_text(other)
    with pytest.raises(CheckpointError, match="was trained with another tokenizer"):
        train(1, tmp_path / "run", text, "--resume", "latest", "--steps", "4")


def test_files_that_differ_between_ranks_are_refused_on_all(tmp_path, made):
    (tmp_path / "other").mkdir()
    Tokenizer.trained([TEXT], 280).save(tmp_path / "other" / "tokenizer.json")

    def begin():
        place = "made" if world().rank != 1 else "other"
        with pytest.raises(DataError, match="not the same file on all ranks: rank 1 reads") as caught:
            tokenizer_of(Config(tokenizer=str(tmp_path / place)), world())
        return str(caught.value).splitlines()[1]

    assert set(LocalWorld(3).run(begin)) == {"Give every host the same one."}


def test_mistakes_are_told_on_all_ranks_and_leave_no_folder(tmp_path, text, made, monkeypatch):
    np.arange(3000, dtype="<u2").tofile(tmp_path / "t.bin")
    run = tmp_path / "run"
    cases = (
        (DataError, "a tokenizer is made of text", str(tmp_path / "t.bin"), "bpe:300"),
        (DataError, "cannot be read: No such file", text, str(tmp_path / "nothing.json")),
        (DataError, "is not JSON", text, text),
        (ConfigError, "from 257 ", text, "bpe:256"),
        (ConfigError, "from 257 ", text, "bpe:many"),
    )
    for error, said, data, asked in cases:
        with pytest.raises(error, match=said):
            train(2, run, data, "--steps", "1", "--tokenizer", asked)
    with pytest.raises(ConfigError, match="must be one of csv, tensorboard"):
        train(2, run, text, "--steps", "1", "--metrics", "csv,wandb")
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match="needs tensorboardX"):
        train(2, run, text, "--steps", "1", "--metrics", "tensorboard")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="needs the tokenizers library"):
        train(2, run, text, "--steps", "1", "--tokenizer", str(made))
    assert not run.exists()


def test_settings_keep_both_options(tmp_path):
    kept = Config(tokenizer="bpe:500", metrics="tensorboard, csv", steps=1)
    assert kept.sinks == {"csv", "tensorboard"}
    config.write(kept, str(tmp_path / "config.toml"))
    assert config.load(str(tmp_path / "config.toml")) == kept


def test_the_command_makes_a_tokenizer_and_shows_it(tmp_path, text, capsys):
    out = tmp_path / "out"
    assert command.main(["train", text, str(out), "--vocab", "290"]) == 0
    assert "290 words, made of " in capsys.readouterr().out
    assert Tokenizer.read(out).text == Tokenizer.trained(encoded.training_pieces(load(text)), 290).text
    with pytest.raises(ConfigError, match="is there already; --force replaces it"):
        command.main(["train", text, str(out)])
    assert command.main(["train", text, str(out / "tokenizer.json"), "--force", "--vocab", "9000"]) == 0
    assert "not 9,000: no other pair of them occurs twice" in capsys.readouterr().out
    assert command.main(["show", str(out), "--text", "--x bottles Grüße", "--data", text, "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert "".join(about["text"]["words"]) == "--x bottles Grüße"
    assert about["text"]["comes_back"]
    assert about["special"] == {"<|endoftext|>": 0}
    words, val = Tokenizer.read(out), bytes(load(text).val)
    assert about["data"]["bytes_per_word"] == pytest.approx(len(val) / len(words.encode(val.decode())))
    run_of_bytes = tmp_path / "run"
    run_of_bytes.mkdir()
    (run_of_bytes / "config.toml").write_text("")
    for words, wrong in (
        (["train", text], f"Is it the text?  mpitrain tokenizer train {text} OUT"),
        (["train", text, text], "OUT must be a folder, or a file NAME.json."),
        (["show", str(run_of_bytes)], "its words are bytes"),
    ):
        with pytest.raises((ConfigError, DataError), match=re.escape(wrong)):
            command.main(words)
    assert command.main(["show", str(out), "--text", "two bottles"]) == 0
    assert "| bottles" in capsys.readouterr().out
    for wrong in (["show"], ["train"], ["draw"], ["show", str(out), "--vocab", "3"]):
        with pytest.raises(ConfigError):
            command.main(wrong)
