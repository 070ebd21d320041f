"""Texts that are written with a cache, on ranks that are threads: token by token what the model says without one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_generate as checks

from mpitrain import kernels
from mpitrain.autograd import Tape
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ConfigError, DataError, GraphError, NumericsError, ShapeError
from mpitrain.models.cache import Cache
from mpitrain.models.families import build
from mpitrain.models.generate import check_prompts, generate, write
from mpitrain.models.llama import LlamaConfig
from mpitrain.models.sampling import Sampling
from mpitrain.sample import continued


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_generate(check, ranks):
    LocalWorld(ranks).run(lambda: check(world()))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_model_writes_as_on_one_rank(ranks):
    LocalWorld(ranks).run(lambda: checks.every_model_writes_as_on_one_rank(world()))


@pytest.mark.parametrize("name", checks.CONFIGS)
def test_on_one_rank_a_text_is_that_of_the_rule(name):
    mesh = Mesh(world())
    model = checks.model_of(name, mesh)
    right = checks.expected(name)
    assert checks.written(model, mesh) == right
    how = checks.SAMPLING
    alone = generate(
        model, checks.PROMPTS[0], checks.LENGTH, seed=how.seed, temperature=0.9, top_k=how.top_k, top_p=how.top_p
    )
    assert list(alone) == right[0]
    if name == "gpt":
        kernels.select("numpy")
        assert checks.written(model, mesh) == right


@pytest.mark.parametrize("name", checks.CONFIGS)
def test_scores_are_those_of_a_pass_over_all_tokens(name):
    """At each step of texts of several lengths, up to the last one that fits."""
    model = checks.model_of(name, Mesh(world()))
    texts = [list(prompt) for prompt in checks.PROMPTS]
    cache = cache_of(model, list(map(len, texts)))
    inputs = np.zeros((3, 11), np.int64)
    for row, text in zip(inputs, texts, strict=True):
        row[: len(text)] = text
    inputs[0, 3:] = 13  # what stands behind a text changes nothing
    found = model.next_scores(inputs, cache, cache.coming - 1)
    draws = np.random.default_rng(0)
    for _ in range(6):
        for text, scores in zip(texts, found, strict=True):
            right = model.next_scores(np.array([text]))[0]
            np.testing.assert_allclose(scores, right, rtol=0, atol=1e-12 * np.abs(right).max())
        newest = draws.integers(19, size=3)
        for text, token in zip(texts, newest, strict=True):
            text.append(int(token))
        if len(texts[1]) > 16:
            break
        cache.advance()
        found = model.step_scores(newest, cache)


def cache_of(model, lengths, capacity=16):
    layers = {b.attention.name: (b.attention.kv_heads, model.config.head_width) for b in model.blocks}
    return Cache(np.array(lengths), capacity, layers, model.like, model.config.window)


def test_the_cache_has_room_for_the_heads_of_this_rank_and_for_the_window():
    def main(name, tp):
        cache = cache_of(checks.model_of(name, Mesh(world(), tp=tp)), [3, 1])
        return cache.nbytes

    numbers = 2 * 2 * 4 * 8 * 8  # keys and values, 2 texts, 4 layers, heads of 8, float64
    assert LocalWorld(2).run(main, "llama", 2) == [numbers * 16 * 2] * 2
    assert LocalWorld(2).run(main, "llama, one head", 2) == [numbers * 16 * 1] * 2
    assert LocalWorld(1).run(main, "llama, window", 1) == [numbers * 5 * 2]


def test_a_window_of_all_tokens_is_none():
    sizes = {**checks.SIZES, "kv_heads": 2}
    models = [build(LlamaConfig(**sizes, window=window), Mesh(world()), dtype=np.float64) for window in (None, 16)]
    first, second = (list(generate(model, [1, 2], 14)) for model in models)
    assert first == second


@pytest.mark.parametrize(("name", "slide"), [("gpt", 5), ("gpt", 16), ("llama, window", 3)])
def test_a_text_forgets_as_many_tokens_at_a_time_as_it_may(name, slide, monkeypatch):
    mesh = Mesh(world())
    model = checks.model_of(name, mesh)
    passes = []
    fill = model.next_scores
    monkeypatch.setattr(model, "next_scores", lambda *args: passes.append(args[0].shape) or fill(*args))
    found = list(generate(model, [1, 2, 3], 40, slide=slide))
    monkeypatch.undo()
    sampling, tokens = Sampling(), [1, 2, 3]
    for place, token in enumerate(found):
        start = -(-max(0, len(tokens) - 16) // slide) * slide
        scores = model.next_scores(np.array([tokens[start:]]))
        assert token == sampling.choose(scores, place)[0]
        tokens.append(token)
    assert passes == [(1, 3)] + [(1, 16 - slide + 1)] * (-(-(42 - 16) // slide))


def test_the_cache_spares_passes(monkeypatch):
    model = checks.model_of("gpt", Mesh(world()))
    monkeypatch.setattr(model, "next_scores", lambda *args: passes.append(args[0].shape) or fill(*args))
    fill, passes = type(model).next_scores.__get__(model), []
    list(write(model, [[1, 2, 3], [4]], 14, Sampling()))
    assert passes == [(2, 3)]  # the fourteenth comes after the sixteenth token of the longer one
    passes.clear()
    list(write(model, [[1, 2, 3], [4]], 17, Sampling()))
    assert passes == [(2, 3), (2, 16), (2, 16), (2, 16)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["gpt", "llama, window"])
def test_other_precisions_give_the_scores_of_their_own_whole_passes(name, dtype):
    model = build(checks.CONFIGS[name], Mesh(world()), dtype=np.dtype(dtype))
    cache = cache_of(model, [2])
    model.next_scores(np.array([[1, 2]]), cache)
    tokens = [1, 2]
    for token in (5, 9, 3, 11, 7):
        cache.advance()
        tokens.append(token)
        found = model.step_scores(np.array([token]), cache)
        right = model.next_scores(np.array([tokens]))
        bound = 2e-6 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(found, right, rtol=0, atol=bound * np.abs(right).max())


def test_a_run_whose_weights_are_no_numbers_any_more_comes_to_its_end():
    def main():
        mesh = Mesh(world(), dp=2)
        model = checks.model_of("gpt", mesh)
        model.blocks[2].attention.proj.bias.data[...] = np.nan
        with pytest.raises(NumericsError, match="the scores of token 0 are not finite"):
            next(generate(model, [1, 2], 5))
        return continued(model, mesh, [1, 2], 5, 0, 60.0)

    assert LocalWorld(2).run(main) == [[], []]


def test_no_gradient_goes_through_a_cache():
    model = checks.model_of("gpt", Mesh(world()))
    cache = cache_of(model, [2])
    model.next_scores(np.array([[1, 2]]), cache)
    cache.advance()
    with Tape() as tape:
        model.step_scores(np.array([3]), cache)
    node = next(node for node in tape.nodes if node.function.title() == "cached_attention")
    with pytest.raises(GraphError, match="written with a cache has no gradient"):
        node.function.backward(None, wanted=(True,))


@pytest.mark.parametrize(
    ("prompts", "slide", "error", "wrong"),
    [
        ([], 1, ShapeError, "a prompt has at least one token"),
        ([[1], []], 1, ShapeError, "a prompt has at least one token"),
        ([[1], [3, 19]], 1, DataError, "token 19 of a prompt is none of the model's 19, which are 0 to 18"),
        ([[-1]], 1, DataError, "token -1"),
        ([[1]], 0, ConfigError, "slide 0: of the 16 tokens"),
        ([[1]], 17, ConfigError, "slide 17"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(prompts, slide, error, wrong):
    with pytest.raises(error, match=wrong):
        check_prompts(prompts, checks.CONFIGS["gpt"], slide)
