"""Layers: their parameters, their streams, what they compute."""

import copy

import numpy as np
import pytest

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn import init
from mpitrain.nn.buffer import Buffer
from mpitrain.nn.layers import Dropout, Embedding, Gelu, LayerNorm, Linear, Residual
from mpitrain.nn.loss import count, cross_entropy
from mpitrain.rng import Draw, keep_mask


class Alone:
    coords = dict.fromkeys(("pp", "edp", "ep", "cp", "tp"), 0)
    sizes = dict.fromkeys(coords, 1)


def made(layer, dtype=np.float64, seed=0):
    layer.materialize(Alone, seed=seed, dtype=dtype)
    return layer


def shapes(layer):
    return {p.name: (p.full_shape, p.decay) for p in layer.parameters()}


X = np.random.default_rng(0).standard_normal((2, 3, 4))


def test_a_parameter_without_values_says_what_is_missing():
    x = Tensor(X, requires_grad=True)
    late = made(Linear("early", 4, 4))
    late.added = Linear("late", 4, 4)
    assert "late.weight" not in repr(late.weight)
    assert "20 elements here" in repr(late)
    assert copy.deepcopy(late.added).weight.full_shape == (4, 4)
    table, statistics = Embedding("table", 7, 4), Buffer("mean", (4,))
    uses = {
        "late.weight": [
            lambda: late.added(late(x)),
            lambda: x @ late.added.weight,
            lambda: X * late.added.weight,
            lambda: X * late.added.weight.data,
            lambda: np.asarray(late.added.weight.data),
            lambda: late.added.weight.shape,
        ],
        "table.weight": [lambda: table(np.array([1, 2])), lambda: table.weight[1]],
        "norm.weight": [lambda: LayerNorm("norm", 4)(x)],
        "mean": [lambda: x - statistics.array],
    }
    for name, calls in uses.items():
        for call in calls:
            with pytest.raises(ConfigError, match=rf"^{name} has no values yet.\nCall self.materialize\(mesh\) at the"):
                call()


def test_parameters_have_the_layers_path_and_decay_where_they_are_matrices():
    assert shapes(Linear("a.up", 4, 5)) == {"a.up.weight": ((4, 5), True), "a.up.bias": ((5,), False)}
    assert shapes(Linear("a.up", 4, 5, bias=False)) == {"a.up.weight": ((4, 5), True)}
    assert shapes(Embedding("tok", 7, 4)) == {"tok.weight": ((7, 4), True)}
    assert shapes(LayerNorm("n", 4)) == {"n.weight": ((4,), False), "n.bias": ((4,), False)}
    assert shapes(Dropout("d", 0.1)) == shapes(Residual("r", 0.1)) == shapes(Gelu()) == {}


def test_linear_computes_x_w_plus_b():
    for bias in (True, False):
        layer = made(Linear("l", 4, 5, bias=bias, init=init.normal(0.3)))
        expected = X @ layer.weight.data
        if bias:
            assert not layer.bias.data.any()
            layer.bias.data[...] = np.arange(5)
            expected += np.arange(5)
        np.testing.assert_allclose(layer(Tensor(X)).data, expected, rtol=1e-14)


def test_initial_values_keep_the_size_of_activations_and_depend_on_name_and_seed_only():
    layer = made(Linear("l", 400, 300))
    assert layer.weight.data.std() == pytest.approx(400**-0.5, rel=0.02)
    again, other, seeded = made(Linear("l", 400, 300)), made(Linear("m", 400, 300)), made(Linear("l", 400, 300), seed=1)
    assert np.array_equal(layer.weight.data, again.weight.data)
    assert not np.array_equal(layer.weight.data, other.weight.data)
    assert not np.array_equal(layer.weight.data, seeded.weight.data)
    assert made(Embedding("e", 500, 40)).weight.data.std() == pytest.approx(0.02, rel=0.05)
    single = made(Linear("l", 400, 300), np.float32)
    assert np.array_equal(single.weight.data, layer.weight.data.astype(np.float32))


def test_embedding_takes_rows_and_its_gradient_adds_repeated_ids_into_the_buffer():
    layer = made(Embedding("e", 5, 2))
    ids = np.array([[3, 3, 3], [0, 4, 3]])
    layer.start_step()
    for times in (1, 2):
        with Tape() as tape:
            y = layer(ids)
        assert np.array_equal(y.data, layer.weight.data[ids])
        tape.run_backward([(y, np.ones((2, 3, 2)))])
        assert layer.weight.grad[:, 0].tolist() == [times, 0, 0, 4 * times, times]
    with pytest.raises(ShapeError, match="take: ids reach from 0 to 5"):
        layer(np.array([0, 5]))


def test_layer_norm_starts_as_a_plain_normalisation():
    y = made(LayerNorm("n", 4))(Tensor(X * 3 + 5)).data
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-12)
    np.testing.assert_allclose(y.var(-1), 1, rtol=1e-4)
    assert np.array_equal(made(LayerNorm("n", 4, eps=1.0))(Tensor(X)).data, ops.layer_norm(
        Tensor(X), Tensor(np.ones(4)), Tensor(np.zeros(4)), 1.0).data)  # fmt: skip


def test_dropout_draws_from_the_stream_of_its_name_by_place_and_position():
    draw = Draw(seed=1, step=2, places=np.array([4, 9]), positions=np.arange(3))
    layer = Dropout("blocks.3.drop", 0.5)
    y = layer(Tensor(np.ones((2, 3, 8))), draw).data
    assert np.array_equal(y, 2.0 * keep_mask(draw.rows("blocks.3.drop"), 8, 0.5))
    second = layer(Tensor(np.ones((1, 3, 8))), draw.select(slice(1, 2))).data
    assert np.array_equal(second, y[1:])  # another split of the batch draws the same
    assert not np.array_equal(Dropout("blocks.4.drop", 0.5)(Tensor(np.ones((2, 3, 8))), draw).data, y)


def test_dropout_does_nothing_without_a_draw_or_a_probability():
    x = Tensor(X)
    draw = Draw(0, 0, np.arange(2), np.arange(3))
    assert Dropout("d", 0.5)(x) is x
    assert Dropout("d", 0.5)(x, None) is x
    assert Dropout("d", 0.0)(x, draw) is x
    for p in (-0.1, 1.0, 1.5):
        with pytest.raises(ConfigError, match=r"d: a dropout probability of"):
            Dropout("d", p)


def test_residual_draws_from_the_stream_of_its_name():
    draw = Draw(seed=1, step=2, places=np.array([4, 9]), positions=np.arange(3))
    x, y, bias = Tensor(X), Tensor(np.ones((2, 3, 4))), Tensor(np.arange(4.0))
    z = Residual("blocks.3.drop", 0.5)(x, y, bias, draw).data
    keep = keep_mask(draw.rows("blocks.3.drop"), 4, 0.5)
    np.testing.assert_allclose(z, X + 2.0 * keep * (1 + np.arange(4)), rtol=1e-14)
    plain = Residual("blocks.3.drop", 0.5)(x, y, None, draw).data
    np.testing.assert_allclose(plain, X + 2.0 * keep, rtol=1e-14)
    assert not np.array_equal(Residual("blocks.4.drop", 0.5)(x, y, None, draw).data, plain)


def test_residual_may_end_in_the_norm_of_the_next_branch():
    draw = Draw(seed=1, step=2, places=np.array([4, 9]), positions=np.arange(3))
    x, y, bias, norm = Tensor(X), Tensor(np.ones((2, 3, 4))), Tensor(np.arange(4.0)), made(LayerNorm("n", 4, eps=0.1))
    norm.weight.data[...], norm.bias.data[...] = np.arange(4), 7
    for given in (None, draw):
        layer = Residual("blocks.3.drop", 0.5)
        total, normed = layer.then(norm, x, y, bias, given)
        np.testing.assert_allclose(total.data, layer(x, y, bias, given).data, rtol=1e-14)
        np.testing.assert_allclose(normed.data, norm(total).data, rtol=1e-13)


def test_residual_drops_nothing_without_a_draw_or_a_probability():
    x, y, bias = Tensor(X), Tensor(np.ones((2, 3, 4))), Tensor(np.arange(4.0))
    draw = Draw(0, 0, np.arange(2), np.arange(3))
    for p, given in ((0.5, None), (0.0, draw), (0.0, None)):
        assert np.array_equal(Residual("r", p)(x, y, bias, given).data, X + (1 + np.arange(4)))
    assert np.array_equal(Residual("r", 0.5)(x, y, None).data, X + 1)
    for p in (-0.1, 1.0, 1.5):
        with pytest.raises(ConfigError, match=r"r: a dropout probability of"):
            Residual("r", p)


def test_gelu_has_two_kinds():
    x, bias = Tensor(X), Tensor(np.arange(4.0))
    assert np.array_equal(Gelu()(x).data, ops.gelu_tanh(x).data)
    assert np.array_equal(Gelu("erf")(x).data, ops.gelu_erf(x).data)
    assert np.array_equal(Gelu()(x, bias).data, ops.gelu_tanh(x, bias).data)
    assert np.array_equal(Gelu("erf")(x, bias).data, ops.gelu_erf(x, bias).data)
    with pytest.raises(ConfigError, match="gelu kind 'relu'; there are tanh and erf"):
        Gelu("relu")


def test_the_loss_is_a_sum_so_micro_batches_add_up_whatever_their_counts():
    """C24: the mean is taken once, over all targets that count."""
    targets = np.array([[1, 2, -100], [0, -100, -100]])
    logits = Tensor(X)
    whole = cross_entropy(logits, targets).item()
    parts = [cross_entropy(logits[i], targets[i]).item() for i in range(2)]
    assert whole == pytest.approx(sum(parts), rel=1e-14)
    assert (count(targets), [count(row) for row in targets]) == (3, [2, 1])
    p = np.exp(X) / np.exp(X).sum(-1, keepdims=True)
    assert whole == pytest.approx(-np.log(p[0, 0, 1] * p[0, 1, 2] * p[1, 0, 0]), rel=1e-13)


def test_modules_set_the_path_that_nodes_carry():
    layer = made(Linear("blocks.1.up", 4, 5))
    with Tape() as tape:
        layer(Tensor(X))
    assert [node.path for node in tape.nodes] == ["blocks.1.up"]
