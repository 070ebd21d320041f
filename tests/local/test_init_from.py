"""`--init`: a run begins with the weights of a checkpoint, whoever saved it, on any layout and in any precision."""

import json

import hf_models
import numpy as np
import pytest

from mpitrain.checkpoint.tools import command
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.local import LocalWorld
from mpitrain.data.tokenizer import Bytes
from mpitrain.errors import UserError
from mpitrain.generation.command import _ends
from mpitrain.interchange.command import TOOLS
from mpitrain.train import main

LLAMA = {**hf_models.LLAMA, "vocab_size": 256, "num_key_value_heads": 2}
STILL = ["--lr", "0", "--steps", "1", "--save-every", "1", "--batch", "4", "--sample-length", "0"]
"""One step that changes nothing."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A text, and an imported model of bytes."""
    place = tmp_path_factory.mktemp("init")
    (place / "text.txt").write_text("all work and no play makes a dull text. " * 60)
    hf_models.write(place / "theirs", LLAMA, hf_models.tensors(LLAMA, "float32"))
    command.main(["import", str(place / "theirs"), str(place / "origin")], TOOLS)
    return place


def train(place, run, *flags, ranks=1):
    words = ["--data", str(place / "text.txt"), "--run", str(place / run), *flags]
    return LocalWorld(ranks).run(lambda: main(words)) if ranks > 1 else main(words)


def weights_in(run):
    source = Source.of(str(run))
    names = [name for name in source.manifest.tensors if name.startswith("weight/")]
    whole = {name: tuple(slice(0, n) for n in source.manifest.tensors[name].shape) for name in names}
    return {name: source.read(name, whole[name]) for name in names}


@pytest.mark.parametrize(
    ("run", "ranks", "flags"),
    [
        ("alone", 1, ["--init", "origin"]),
        ("cut", 4, ["--init", "origin", "--tp", "2", "--pp", "2"]),
        ("dealt", 2, ["--init", "origin/checkpoints/step-00000000", "--zero", "3", "--dtype", "float16"]),
        ("double", 1, ["--init", "origin", "--dtype", "float64"]),
        ("frozen", 2, ["--init", "origin", "--freeze", "table.*,blocks.0.*", "--tp", "2"]),
        ("frozen-rows", 2, ["--init", "origin", "--freeze", "blocks.0.*", "--zero", "3", "--dtype", "float16"]),
        ("offloaded", 2, ["--init", "origin", "--offload", "parameters,optimizer"]),
    ],
)
def test_a_run_begins_with_the_weights(place, monkeypatch, run, ranks, flags):
    monkeypatch.chdir(place)
    train(place, run, *STILL, *flags, ranks=ranks)
    before, after = weights_in(place / "origin"), weights_in(place / run)
    assert before.keys() == after.keys()
    for name in before:
        if run == "frozen-rows" and ".blocks.0." in name.replace("/", "."):  # what is frozen is held in float16 only
            before[name] = before[name].astype(np.float16)
        assert np.array_equal(before[name], after[name]), name


def test_what_training_saved_begins_another_run_with_its_settings(place):
    first = [
        "--model",
        "gpt-tiny",
        "--tied",
        "--gelu",
        "erf",
        "--dropout",
        "0.1",
        "--batch",
        "4",
        "--sample-length",
        "0",
    ]
    train(place, "first", *first, "--steps", "2", "--save-every", "2", "--optimizer", "sgd", "--lr", "0.5")
    train(place, "second", "--init", str(place / "first"), *STILL)
    before, after = weights_in(place / "first"), weights_in(place / "second")
    assert all(np.array_equal(before[name], after[name]) for name in before)
    settings = Source.of(str(place / "second")).manifest.scalars["config"]
    assert [settings[name] for name in ("model", "tied", "gelu", "dropout")] == ["gpt-tiny", True, "erf", 0.1]
    assert [settings[name] for name in ("optimizer", "steps", "vocab")] == ["adamw", 1, 256]
    # Any layout learns the same from there.
    more = [
        "--init",
        str(place / "first"),
        "--steps",
        "2",
        "--batch",
        "4",
        "--sample-length",
        "0",
        "--dtype",
        "float64",
    ]
    train(place, "one", *more)
    train(place, "four", *more, "--tp", "2", "--dp", "2", "--zero", "1", ranks=4)
    train(place, "half", *more, "--dtype", "float16")
    one, four, half = (
        [json.loads(line)["loss"] for line in (place / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("one", "four", "half")
    )
    assert np.allclose(one, four, rtol=1e-12, atol=0)
    assert np.allclose(one, half, rtol=1e-3, atol=0)


def test_what_does_not_fit_is_refused_before_anything_is_written(place):
    origin = str(place / "origin")
    for flags, words in (
        (["--init", origin, "--width", "32"], "weight/table.weight is (256, 16), the model wants (256, 32)"),
        (["--init", origin, "--layers", "3"], "missing in it: weight/blocks.2."),
        (["--init", origin, "--layers", "1"], "unexpected in it: weight/blocks.1."),
        (["--init", origin, "--tied"], "unexpected in it: weight/head.weight"),
        (["--init", origin, "--model", "gpt-tiny"], "missing in it: weight/positions.weight"),
        (["--init", str(place / "none")], "there is no such file or folder"),
        (["--init", str(place / "theirs")], f"mpitrain checkpoint import {place / 'theirs'} OUT"),
        (["--init", origin, "--resume", "latest"], "a run that goes on has weights"),
        (["--resume", origin], f"Begin a new run with them: --init {origin}"),
    ):
        for ranks in (1, 2):
            with pytest.raises(UserError) as caught:
                train(place, "new", *STILL, *flags, ranks=ranks)
            assert words in str(caught.value)
            assert len(str(caught.value).splitlines()) <= 5
            assert not (place / "new").exists()


def test_a_job_that_is_started_again_goes_on(place):
    again = ["--init", str(place / "origin"), "--resume", "auto", *STILL, "--lr", "0.1", "--steps", "2"]
    train(place, "job", *again, "--stop-after", "1")
    train(place, "job", *again)
    assert Source.of(str(place / "job")).manifest.step == 2
    train(place, "whole", *again)
    assert command.main(["diff", str(place / "job"), str(place / "whole"), "--tensors", "*"]) == 0
    assert command.main(["diff", str(place / "job"), str(place / "origin"), "--tensors", "weight/*"]) == 1
    steps = [json.loads(line)["step"] for line in (place / "job" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_the_words_of_the_weights_come_with_them(place):
    from test_interchange import WORDS

    words = {**WORDS["model"]["vocab"], **{letter: 3 + number for number, letter in enumerate("dekllmnoprstuwxy.")}}
    words["Ġ"] = 60
    theirs = hf_models.write(
        place / "worded", {**LLAMA, "vocab_size": 64}, hf_models.tensors({**LLAMA, "vocab_size": 64})
    )
    special = {"<end>": 61, "<begin>": 62}
    model = {**WORDS["model"], "vocab": {**words, **special}}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ends = [{"id": number, "content": word, "special": True, **plain} for word, number in special.items()]
    (theirs / "tokenizer.json").write_text(json.dumps({**WORDS, "model": model, "added_tokens": ends}))
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**config, "eos_token_id": [61, 5], "bos_token_id": 62}))
    assert command.main(["import", str(theirs), str(place / "worded-run")], TOOLS) == 0
    train(place, "with-words", "--init", str(place / "worded-run"), *STILL)
    assert (place / "with-words" / "tokenizer.json").is_file()
    source = Source.of(str(place / "with-words"))
    assert source.manifest.tensors["weight/table.weight"].shape == (64, 16)
    # What ends a text is known after training and after a resumed one, and comes back.
    train(place, "with-words", "--resume", "latest", "--run", str(place / "with-words"), "--steps", "2")
    assert [_ends(Source.of(str(place / run)), Bytes()) for run in ("worded-run", "with-words")] == [[61, 5]] * 2
    command.main(["export", str(place / "with-words"), str(place / "given-back")], TOOLS)
    for name, wanted in (
        ("config.json", {"eos_token_id": [61, 5], "bos_token_id": 62, "pad_token_id": None}),
        ("generation_config.json", {"eos_token_id": [61, 5], "bos_token_id": 62}),
        ("tokenizer_config.json", {"eos_token": "<end>", "bos_token": "<begin>"}),
    ):
        assert json.loads((place / "given-back" / name).read_text()).items() >= wanted.items()
