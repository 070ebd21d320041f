"""`mpitrain generate` as a user runs it: what it prints, on which ranks, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from reseal import rewrite

from mpitrain import cli
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.data.tokenizer import Bytes, Tokenizer
from mpitrain.errors import CheckpointDamaged, CheckpointError, ConfigError, DataError, ShapeError, UserError
from mpitrain.generation.command import _ends, main
from mpitrain.generation.output import Printer, Texts
from mpitrain.generation.prompts import Numbers
from mpitrain.train import main as train

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk.\n" for n in range(300))
TINY = "--model gpt-tiny --batch 4 --steps 2 --stop-after 1 --save-every 1 --sample-length 0 --eval-every 0".split()
HOW = ["--prompt", "10 bottles", "--length", "30"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run of each kind: two ranks have saved it, with optimizer state."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    for name, flags in {
        "gpt": [],
        "llama": ["--model", "llama-tiny", "--dtype", "float16", "--zero", "1"],
        "words": ["--vocab", "300"],
    }.items():
        LocalWorld(2).run(train, [*TINY, *flags, "--data", str(folder / "text.txt"), "--run", str(folder / name)])
    return folder


def said(capfd, *words, ranks=1):
    """What stands on standard output, and on standard error."""
    capfd.readouterr()
    codes = LocalWorld(ranks).run(main, list(map(str, words)))
    assert codes == [0] * ranks
    return capfd.readouterr()


def test_a_text_is_printed_as_it_comes_and_how_long_it_took(runs, capfd):
    out, err = said(capfd, runs / "gpt", *HOW)
    assert out.startswith("10 bottles")
    assert out.endswith("\n")
    assert err.startswith("30 words in ")
    assert "the first after" in err
    assert out == said(capfd, *HOW, runs / "gpt" / "checkpoints" / "step-00000001", "--seed", 0).out
    assert out != said(capfd, runs / "gpt", *HOW, "--seed", 1).out
    assert out != said(capfd, runs / "gpt", *HOW, "--temperature", 0).out


@pytest.mark.parametrize(
    ("run", "ranks", "layout"),
    [
        ("gpt", 2, "--tp 2 --sequence-parallel"),
        ("llama", 2, "--pp 2"),
        ("gpt", 3, "--zero 3"),
        *(
            pytest.param(run, ranks, layout, marks=pytest.mark.slow)
            for run in ("gpt", "llama")
            for ranks, layout in ((2, "--tp 2"), (2, "--dp 2"), (4, "--cp 2 --tp 2"), (4, "--pp 2 --tp 2 --zero 3"))
        ),
    ],
)
def test_any_layout_prints_the_same_once(runs, capfd, run, ranks, layout):
    how = [runs / run, *HOW, "--dtype", "float64"]  # no difference in the last digits moves a draw
    assert said(capfd, *how, *layout.split(), ranks=ranks).out == said(capfd, *how).out


def test_json_tells_all(runs, capfd):
    out, err = said(capfd, runs / "gpt", *HOW, "--json", "--samples", 2, "--top-k", 5, "--top-p", "0.9", "--seed", 7)
    told = json.loads(out)
    assert not err
    assert out.count("\n") == 1
    assert told["step"] == 1
    assert told["model"] == "gpt-tiny"
    assert told["sampling"] == {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 7}
    first, second = told["texts"]
    assert first["prompt"] == second["prompt"] == "10 bottles"
    assert len(first["words"]) == len(second["words"]) == 30
    assert first["words"] != second["words"]
    assert first["text"] == bytes(first["words"]).decode(errors="replace")
    assert not first["ended"]


def test_several_prompts_of_a_file_or_of_standard_input(runs, capfd, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("7 bottles\n\n1\n", encoding="utf-8")
    file = ["--prompt-file", str(tmp_path / "prompts.txt"), "--length", "5"]
    by_line = said(capfd, runs / "gpt", *file, "--by-line").out
    assert by_line.startswith("--- 1 of 2 ---\n7 bottles")
    assert "\n--- 2 of 2 ---\n1" in by_line
    whole = said(capfd, runs / "gpt", *file).out
    assert whole.startswith("7 bottles\n\n1\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"7 bottles\n\n1\n")))
    assert said(capfd, runs / "gpt", "--prompt-file", "-", "--length", 5).out == whole


def test_words_may_be_numbers(runs, capfd):
    out = said(capfd, runs / "words", "--words", "numbers", "--prompt", "48, 49 299", "--length", 4).out
    words = out.removeprefix("48, 49 299").split()
    assert len(words) == 4
    assert all(0 <= int(word) < 300 for word in words)
    assert said(capfd, runs / "words", "--words", "bytes", "--prompt", "a", "--length", 4).out.startswith("a")


def test_precision_may_be_another_one(runs, capfd):
    dtypes = ["float16", "float32", "float64"]
    texts = [json.loads(said(capfd, runs / "llama", *HOW, "--dtype", dtype, "--json").out) for dtype in dtypes]
    assert [text["dtype"] for text in texts] == dtypes
    assert len({tuple(text["texts"][0]["words"][:5]) for text in texts}) == 1


@pytest.mark.parametrize("kind", [lambda word: word, lambda word: [7, word]], ids=["number", "list"])
def test_a_text_ends_where_an_imported_model_ends_one(runs, capfd, tmp_path, kind):
    shutil.copytree(runs / "gpt" / "checkpoints" / "step-00000001", tmp_path / "step")
    whole = json.loads(said(capfd, tmp_path / "step", *HOW, "--json").out)["texts"][0]
    end = whole["words"][6]
    before = whole["words"][: whole["words"].index(end)]
    rewrite(tmp_path / "step", lambda manifest: manifest["scalars"].update(imported={"eos_token_id": kind(end)}))
    ended = json.loads(said(capfd, tmp_path / "step", *HOW, "--json").out)["texts"][0]
    assert ended["words"] == before
    assert ended["ended"]
    out, err = said(capfd, tmp_path / "step", *HOW, "--dp", 2, ranks=2)
    assert out == f"10 bottles{ended['text']}\n"
    assert err.rstrip().endswith("; it ended")
    beyond = json.loads(said(capfd, tmp_path / "step", *HOW, "--json", "--past-end").out)["texts"][0]
    assert beyond == whole


def test_a_tokenizer_that_was_trained_here_has_a_word_for_the_end():
    pytest.importorskip("tokenizers")
    words = Tokenizer.trained(["ab ab abc"], 260)
    source = SimpleNamespace(manifest=SimpleNamespace(scalars={"imported": {"eos_token_id": None}}))
    assert _ends(source, words) == [words.number("<|endoftext|>")]
    assert _ends(source, Bytes()) == []


def test_ranks_that_read_other_words_are_found(runs, monkeypatch):
    class Others(Bytes):
        def encode(self, text):
            return [1]

    monkeypatch.setattr("mpitrain.generation.command.words_of", lambda *_: (Bytes, Others)[world().rank]())
    with pytest.raises(DataError, match="rank 1 reads the prompt as other words than rank 0"):
        LocalWorld(2).run(main, [str(runs / "gpt"), *HOW, "--dp", "2"])


def test_help_lists_every_option(capsys):
    assert main(["--help"]) == main([]) == 0
    out = capsys.readouterr().out
    for (
        flag
    ) in "--prompt --prompt-file --length --temperature --top-k --top-p --seed --tp --zero --json --slide".split():
        assert f"  {flag} " in out or f"  {flag}," in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "error", "wrong"),
    [
        ([], ConfigError, "give either --prompt TEXT or --prompt-file"),
        (["--prompt", "a", "--prompt-file", "b"], ConfigError, "give either"),
        (["--prompt", "a", "another"], ConfigError, "takes one checkpoint or run, not 2"),
        (["--prompt", "a", "--lenght", "3"], ConfigError, "--lenght: no such option.  Did you mean --length"),
        (["--prompt", "a", "--temperature", "-1"], ConfigError, "--temperature -1: must be a number from 0 to 1000"),
        (["--prompt", "a", "--top-p", "0"], ConfigError, "--top-p 0: must be a number above 0 to 1"),
        (["--prompt-file", "/nowhere"], DataError, "--prompt-file /nowhere: cannot be read: No such file"),
        (["--prompt-file", "/dev/zero"], DataError, "--prompt-file /dev/zero: is not a regular file"),
        (["--prompt", "a", "--words", "numbers"], DataError, "--words numbers: a is no number of a word"),
        (["--prompt", "256", "--words", "numbers"], DataError, "token 256 of a prompt is none of the model's 256"),
        (["--prompt", "a", "--words", "/nowhere"], DataError, "/nowhere"),
        (["--prompt", "a", "--slide", "99"], ConfigError, "slide 99: of the 32 tokens"),
        (["--prompt", "a", "--tp", "3"], UserError, "--tp 3"),
    ],
)
def test_what_is_wrong_is_said(runs, words, error, wrong):
    with pytest.raises(error) as found:
        LocalWorld(1).run(main, [str(runs / "gpt"), *words])
    assert wrong in str(found.value)
    assert len(str(found.value).splitlines()) <= 5


def test_more_texts_than_memory_holds_are_refused(runs, monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 2**20 if name == "SC_PAGE_SIZE" else 1)
    some, many = ([str(runs / "gpt"), *HOW, "--samples", count] for count in ("16", "100"))
    assert LocalWorld(1).run(main, some) == [0]
    wrong = r"42,880 weights in float32 need 0.0 GiB on this host, keys and values of 3,200 words 0.0; it has 0.0"
    with pytest.raises(ConfigError, match=wrong):
        LocalWorld(1).run(main, many)


def test_too_many_texts_are_refused(runs, tmp_path):
    (tmp_path / "prompts").write_text("a\n" * 300)
    with pytest.raises(ConfigError, match="--samples 4: that makes 1,200 texts; at most 1,024 go together"):
        LocalWorld(1).run(
            main, [str(runs / "gpt"), "--prompt-file", str(tmp_path / "prompts"), "--by-line", "--samples", "4"]
        )


def test_a_layout_that_does_not_divide_is_refused_on_all_ranks(runs):
    with pytest.raises(ShapeError, match="2 heads are not divisible by axis tp of size 3"):
        LocalWorld(3).run(main, [str(runs / "gpt"), *HOW, "--tp", "3"])


def test_a_model_whose_words_nobody_knows_is_refused(runs):
    with pytest.raises(ConfigError, match=r"the model has 300 words, and no tokenizer.json lies with it.*\n.*--words"):
        LocalWorld(1).run(main, [str(runs / "words"), *HOW])


def settings(**changes):
    return lambda manifest: manifest["scalars"]["config"].update(changes)


def without_settings(manifest):
    del manifest["scalars"]["config"]


def another_name(manifest):
    tensors = manifest["tensors"]
    tensors["weight/blocks.0.norm3.weight"] = tensors.pop("weight/blocks.0.norm1.weight")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (without_settings, "holds no settings: it was not saved by training"),
        (settings(layers=3), "holds 42,880 weights, but a model of its settings (gpt-tiny, 3 layers, width 32) has"),
        (settings(layers=10**9), "holds settings that are none: --layers 1000000000: must be a whole number from 1 to"),
        (settings(width="../.."), "holds settings that are none: --width ../..: must be"),
        (settings(heads=3), "holds settings that are none: --width 32 is not divisible by --heads 3"),
        (settings(vocab=10), "holds settings that are none: --vocab 10"),
        (another_name, "missing in it: weight/blocks.0.norm1.weight\nunexpected in it: weight/blocks.0.norm3.weight"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_checkpoint_that_is_none_of_its_model_is_refused(runs, tmp_path, change, wrong):
    shutil.copytree(runs / "gpt" / "checkpoints" / "step-00000001", tmp_path / "step")
    rewrite(tmp_path / "step", change)
    with pytest.raises(CheckpointError) as found:
        LocalWorld(2).run(main, [str(tmp_path / "step"), *HOW])
    assert wrong in str(found.value)


def test_a_flipped_byte_is_found_before_a_word_is_written(runs, tmp_path, capfd):
    shutil.copytree(runs / "gpt" / "checkpoints" / "step-00000001", tmp_path / "step")
    slab = Source.of(str(tmp_path / "step")).manifest.tensors["weight/head.weight"].slabs[0]
    data = bytearray((tmp_path / "step" / slab.file).read_bytes())
    data[slab.offset + 5] ^= 1
    (tmp_path / "step" / slab.file).write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"weight/head\.weight"):
        LocalWorld(2).run(main, [str(tmp_path / "step"), *HOW])
    assert not capfd.readouterr().out


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        LocalWorld(1).run(main, [str(tmp_path / "none"), *HOW])


def test_local_runs_a_command_of_mpitrain(runs, capfd):
    assert cli.main(["local", "-n", "2", "generate", str(runs / "gpt"), *HOW, "--tp", "2"]) == 0
    assert capfd.readouterr().out.startswith("10 bottles")


# ----------------------------------------------------------------------------------------------- what is printed


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_text_ends_at_its_last_word():
    texts = Texts(["a", "b"], [9])
    for words in ([1, 2], [9, 3], [4, 9], [5, 5]):
        assert not texts.over or words == [5, 5]
        texts.add(np.array(words))
    assert texts.written == [[1], [2, 3]]
    assert texts.over
    assert not Texts(["a"], []).over


def test_nothing_that_steers_a_terminal_reaches_it():
    texts = Texts(["a\x1b[2Jb\tc\n"], [])
    out, err = Terminal(), io.StringIO()
    Printer(out, err, texts, Numbers(10), False).finish({})
    assert out.getvalue() == "a�[2Jb\tc\n\n"
    plain = io.StringIO()
    Printer(plain, err, texts, Numbers(10), False).finish({})
    assert plain.getvalue() == "a\x1b[2Jb\tc\n\n"


def test_a_launcher_has_time_to_hand_on_the_text(monkeypatch):
    said, out, err = [], io.StringIO(), io.StringIO()
    monkeypatch.setattr("time.sleep", lambda seconds: said.append((seconds, out.getvalue(), err.getvalue())))
    for launched in (False, True):
        Printer(out, err, Texts(["a"], []), Numbers(10), False, launched).finish({})
    ((seconds, text, before),) = said
    assert seconds > 0
    assert text == "a\na\n"
    assert before.count("words in") == 1


def test_an_output_that_nobody_reads_is_no_error(runs, capfd):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    texts = Texts(["a"], [])
    printer = Printer(Gone(), io.StringIO(), texts, Numbers(10), False)
    assert printer.unread
    texts.add(np.array([1]))
    printer.add()
    printer.finish({})


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_end_when_nobody_reads(runs, capfd, monkeypatch, ranks):
    monkeypatch.setattr("mpitrain.generation.turns.LONGEST", 1e-3)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        how = [str(runs / "gpt"), "--prompt", "1", "--length", "500", "--past-end", "--tp", str(ranks)]
        assert LocalWorld(ranks).run(main, how) == [141, 0][:ranks]
    assert re.match("[1-9] words in ", capfd.readouterr().err)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_output_that_is_full_is_one_message(runs, capfd, monkeypatch, flags):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(ConfigError, match="the output cannot be written: No space left on device"):
            LocalWorld(1).run(main, [str(runs / "gpt"), "--prompt", "1", "--length", "3", *flags])
    assert not capfd.readouterr().err


def test_a_newer_checkpoint_that_is_damaged_is_passed_over_and_said(runs, tmp_path, capfd):
    shutil.copytree(runs / "gpt", tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000009").mkdir()
    out, err = said(capfd, tmp_path / "run", *HOW)
    assert out == said(capfd, runs / "gpt", *HOW).out
    assert err.startswith("passed over: ")
    assert "step-00000009" in err
