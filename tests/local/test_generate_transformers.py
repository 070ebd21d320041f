"""Beside transformers itself: what its models write without sampling, on any layout, and which tokens it would draw."""

import json
from types import SimpleNamespace

import hf_models
import numpy as np
import pytest
from test_interchange import tool

from mpitrain.comm.local import LocalWorld
from mpitrain.generation.command import main
from mpitrain.models.sampling import Sampling

pytestmark = pytest.mark.slow

PROMPTS = [[5, 17, 3, 44], [9], [30, 31, 32, 33, 34, 35]]
LAYOUTS = {1: "", 2: "--tp 2", 4: "--tp 2 --pp 2"}


@pytest.fixture(scope="module")
def others():
    """What is not imported where these tests are left out."""
    libraries = {name: pytest.importorskip(name) for name in ("transformers", "torch")}
    import test_transformers

    return SimpleNamespace(**libraries, made=test_transformers.made, in_float64=test_transformers.in_float64)


def theirs(others, model, length, end):
    """The tokens that follow each prompt; `model.generate` knows no prompts of several lengths but padded ones."""
    model.generation_config.eos_token_id = end
    how = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    config, tensor = others.transformers.GenerationConfig(**how), others.torch.tensor
    with others.torch.no_grad():
        found = [model.generate(tensor([p]), generation_config=config)[0, len(p) :] for p in PROMPTS]
    return [tokens.tolist() for tokens in found]


def ours(capfd, run, tmp_path, ranks, *flags):
    (tmp_path / "prompts").write_text("\n".join(" ".join(map(str, prompt)) for prompt in PROMPTS))
    capfd.readouterr()
    how = [
        "--words",
        "numbers",
        "--prompt-file",
        str(tmp_path / "prompts"),
        "--by-line",
        "--temperature",
        "0",
        "--json",
    ]
    LocalWorld(ranks).run(main, [str(run), *how, *flags, *LAYOUTS[ranks].split()])
    return [text["words"] for text in json.loads(capfd.readouterr().out)["texts"]]


@pytest.mark.parametrize("name", hf_models.CASES)
def test_the_likeliest_tokens_are_those_of_transformers(tmp_path, capfd, others, name):
    model = others.made(hf_models.CASES[name], "float64")
    model.save_pretrained(tmp_path / "theirs")
    assert tool("import", tmp_path / "theirs", tmp_path / "run") == 0
    others.in_float64(model)
    length = model.config.max_position_embeddings - len(PROMPTS[2])
    flags = ["--length", str(length), "--dtype", "float64", "--past-end"]
    expected = theirs(others, model, length, None)
    assert {len(text) for text in expected} == {length}
    for ranks in LAYOUTS:
        assert ours(capfd, tmp_path / "run", tmp_path, ranks, *flags) == expected, ranks


def test_a_text_ends_where_theirs_does(tmp_path, capfd, others):
    name = next(iter(hf_models.CASES))
    config = {**hf_models.CASES[name]}
    model = others.made(config, "float64")
    whole = theirs(others, model, 6, None)
    ends = whole[0][3]
    model.config.eos_token_id = model.generation_config.eos_token_id = ends
    model.save_pretrained(tmp_path / "theirs")
    assert tool("import", tmp_path / "theirs", tmp_path / "run") == 0
    expected = [text[: text.index(ends)] if ends in text else text for text in theirs(others, model, 6, ends)]
    assert len(expected[0]) <= 3
    assert ours(capfd, tmp_path / "run", tmp_path, 1, "--length", "6", "--dtype", "float64") == expected


@pytest.mark.parametrize(
    "how", [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.9}, {"temperature": 0.4}], ids=str
)
def test_the_chances_are_those_of_transformers(others, how):
    scores = np.random.default_rng(3).normal(size=(5, 61)) * 2
    logits, kinds = others.torch.tensor(scores), others.transformers.generation.logits_process
    temperature = how.get("temperature", 1.0)
    if temperature != 1.0:
        logits = kinds.TemperatureLogitsWarper(temperature)(None, logits)
    if "top_k" in how:
        logits = kinds.TopKLogitsWarper(how["top_k"])(None, logits)
    if "top_p" in how:
        logits = kinds.TopPLogitsWarper(how["top_p"])(None, logits)
    weights = Sampling(**{"temperature": 1.0, **how}).weights(scores)
    np.testing.assert_allclose(weights / weights.sum(1, keepdims=True), logits.softmax(-1).numpy(), rtol=1e-12)
