"""Modules in a row and in a list, how a module prints, and weights that two layers share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.autograd import no_grad, ops
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.buffer import Buffer
from mpitrain.nn.containers import ModuleList, Sequential
from mpitrain.nn.layers import Dropout, Embedding, Linear, Relu
from mpitrain.nn.module import Module, mark_recompute
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.parallel.vocabulary import VocabularyEmbedding
from mpitrain.rng import Draw, keep_mask

MESH = Mesh(world())


def net() -> Sequential:
    return Sequential("net", Linear("net.0", 4, 6), Relu(), ops.tanh, Linear("net.3", 6, 3))


# ------------------------------------------------------------------------------------------------------------- in a row


def test_a_sequence_calls_its_parts_in_their_order() -> None:
    model = net()
    model.materialize(MESH, seed=1, dtype=np.float64)
    x = Tensor(np.random.default_rng(0).standard_normal((5, 4)), requires_grad=True)
    with Tape() as tape:
        y = model(x)
    first, last = model[0], model[3]
    hidden = np.tanh(np.maximum(x.data @ first.weight.data + first.bias.data, 0))
    np.testing.assert_allclose(y.data, hidden @ last.weight.data + last.bias.data)
    assert [node.path for node in tape.nodes] == ["net.0", "net", "net", "net.3"]
    assert [p.name for p in model.parameters()] == ["net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"]
    assert len(model) == 4
    assert [*model] == model.layers
    assert model[1:].layers == model.layers[1:]
    assert Sequential("none")(x) is x


def test_a_draw_goes_to_the_parts_that_take_one() -> None:
    def with_dropout(p: float) -> Sequential:
        inner = Sequential("net.1", Dropout("net.1.0", p), ops.tanh)
        return Sequential("net", Linear("net.0", 4, 4), inner, lambda x, draw=None: x * (1.0 if draw is None else 2.0))

    model, plain = with_dropout(0.5), with_dropout(0.0)
    for one in (model, plain):
        one.materialize(MESH, seed=1, dtype=np.float64)
    x = Tensor(np.random.default_rng(0).standard_normal((2, 3, 4)), requires_grad=True)
    draw = Draw(seed=1, step=2, places=np.arange(2), positions=np.arange(3))
    whole = np.tanh(model[0](x).data)
    kept = keep_mask(draw.rows("net.1.0"), 4, 0.5)
    want = 2.0 * np.tanh(2.0 * kept * model[0](x).data)
    for recomputed in (False, True):
        model.recompute = recomputed
        with Tape() as tape:
            np.testing.assert_allclose(model(x, draw=draw).data, want)
            np.testing.assert_allclose(model(x, draw).data, want)
            assert (model(x, draw=None).data == whole).all()
            with pytest.raises(
                ConfigError, match=r"net has a dropout, net.1.0 with p=0.5.*\n.*draw=batch.draw\(seed\)"
            ):
                model(x)
        assert len(tape) == (3 if recomputed else 11)
    assert (plain(x).data == whole).all()
    with Tape():
        assert (plain(x).data == whole).all()
        with no_grad():
            assert (model(x).data == whole).all()
    assert (model(x).data == whole).all()


class Quiet(Module):
    """Decides of its dropout by itself."""

    def __init__(self) -> None:
        super().__init__("quiet")
        self.drop = Dropout("drop", 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x, None)


def test_a_part_that_takes_no_draw_is_given_none() -> None:
    x = Tensor(np.ones((2, 3, 4)), requires_grad=True)
    with Tape():
        assert (Sequential("net", Quiet(), abs)(x, draw=None).data == 1.0).all()
        assert Sequential("net", Quiet())(x) is x


def test_a_list_is_a_list_of_modules() -> None:
    layers = ModuleList("parts", (Linear(f"parts.{n}", 2, 2) for n in range(3)))
    layers.append(Linear("parts.3", 2, 2))
    layers[1] = Linear("parts.one", 2, 2)
    del layers[0]
    layers.insert(0, Relu())
    assert [layer.name for layer in layers] == ["", "parts.one", "parts.2", "parts.3"]
    assert [layer.name for layer in reversed(layers)] == ["parts.3", "parts.2", "parts.one", ""]
    assert (len(layers), layers[1:3], layers[-1].name) == (4, [layers[1], layers[2]], "parts.3")
    assert layers[2] in layers
    layers[1:] = [Linear("parts.new", 2, 2)]
    assert [p.name for p in layers.parameters()] == ["parts.new.weight", "parts.new.bias"]
    assert layers.pop().name == "parts.new"
    with pytest.raises(TypeError, match="ModuleList defines no forward"):
        layers(1)


LOOP = ModuleList("loop")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModuleList("list", [Relu(), 3]), "list: a int is no module"),
        (lambda: ModuleList("list").append(ops.tanh), "list: a function is no module"),
        (lambda: LOOP.append(LOOP), "loop: a list does not go into itself"),
        (lambda: LOOP.append(Sequential("net", ModuleList("inner", [LOOP]))), "loop: a list does not go into itself"),
        (lambda: Sequential("net", 3), "Sequential: a int has no place in it"),
        (lambda: Sequential(Relu(), Relu()), "Sequential: a Relu in the place of its name has no place in it"),
    ],
)
def test_what_has_no_place_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# -------------------------------------------------------------------------------------------------------- how it prints


class Norm(Module):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.mean = Buffer(f"{name}.mean", (3,))


class Model(Module):
    def __init__(self) -> None:
        super().__init__("model")
        self.net = net()
        self.list = ModuleList("list", [Linear(f"list.{n}", 3, 3) for n in range(3)])
        self.norms = [Norm("norms.0"), Norm("norms.1")]
        self.drop = Dropout("drop", 0.5)
        self.again = self.list
        self.out = Linear("out", 3, 6, bias=False)
        self.back = Linear("back", 6, 3, bias=False, tied=self.out.weight)
        self.scale = Parameter("scale", (3,), init=lambda name, shape, slab, seed: np.ones(3))


def test_a_module_prints_as_a_tree() -> None:
    model = Model()
    model.freeze("list.1")
    mark_recompute(model, "net.0")
    assert repr(model).splitlines() == [
        "Model model: 108 parameters, 12 frozen",
        "  scale (3,)",
        "  net        Sequential  with tanh",
        "    0  Linear  made again in backward, weight (4, 6), bias (6,)",
        "    1  Relu",
        "    3  Linear  weight (6, 3), bias (3,)",
        "  list       ModuleList",
        "    0  Linear  weight (3, 3), bias (3,)",
        "    1  Linear  weight (3, 3) [frozen], bias (3,) [frozen]",
        "    2  Linear  weight (3, 3), bias (3,)",
        "  norms.0-1  2 x Norm  mean (3,) [kept]",
        "  drop       Dropout  p=0.5",
        "  again      ModuleList  the same as list",
        "  out        Linear  weight (3, 6)",
        "  back       Linear  weight is out.weight",
    ]


def test_a_rank_prints_what_it_holds() -> None:
    def body() -> str:
        return repr(GPT(GPTConfig(layers=4, width=16, heads=2, seq_len=8, vocab=9), Mesh(world(), pp=2, tp=2)))

    first, _, third, _ = LocalWorld(4).run(body)
    assert first.splitlines()[0].endswith("elements here, stages 0 of 2")
    assert "  blocks.0-1  2 x Block" in first
    assert "  blocks.2-3  2 x Block" in third
    assert (
        "qkv   ColumnLinear  weight (16, 48) [tp: Shard(1); here (16, 24)], bias (48,) [tp: Shard(0); here (24,)]"
        in first
    )
    assert "head        VocabularyHead  weight (16, 9) [tp: Shard(1); here (16, 5)]" in third
    assert max(map(len, first.splitlines())) <= 120


# ------------------------------------------------------------------------------------------------------- shared weights


class Tied(Module):
    """A table that is the head too, a layer and its way back."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__("tied")
        self.table = Embedding("table", 7, 4)
        self.there = Linear("there", 4, 5)
        self.back = Linear("back", 5, 4, tied=self.there.weight if tied else None)
        self.head = Linear("head", 4, 7, bias=False, tied=self.table.weight if tied else None)

    def forward(self, ids: np.ndarray) -> Tensor:
        return self.head(self.back(ops.tanh(self.there(self.table(ids)))))


def test_a_tied_weight_is_one_parameter_with_the_sum_of_both_gradients() -> None:
    one, two = Tied(), Tied(tied=False)
    for model in (one, two):
        model.materialize(MESH, seed=1, dtype=np.float64)
    assert [p.name for p in one.parameters()] == ["table.weight", "there.weight", "there.bias", "back.bias"]
    assert sum(flat.weights.size for flat in one.flats) == one.num_parameters == 28 + 20 + 5 + 4
    two.back.weight.data[...] = one.there.weight.data.T
    two.head.weight.data[...] = one.table.weight.data.T
    ids, grad = np.array([1, 3, 3]), np.random.default_rng(0).standard_normal((3, 7))
    for model in (one, two):
        with Tape() as tape:
            y = model(ids)
        tape.run_backward([(y, grad)])
    np.testing.assert_allclose(one.there.weight.grad, two.there.weight.grad + two.back.weight.grad.T)
    np.testing.assert_allclose(one.table.weight.grad, two.table.weight.grad + two.head.weight.grad.T)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Linear("q", 5, 4, tied=Linear("z", 4, 4).weight),
            r"q \(Linear\): the weight z.weight \(4, 4\) cannot",
        ),
        (lambda: Linear("q", 4, 4, tied=Linear("z", 4, 4).weight), "is square: does the layer use it as it is"),
        (lambda: Embedding("t", 4, 5, tied=Linear("z", 5, 4).weight), r"t \(Embedding\): the weight z.weight \(5, 4\)"),
        (
            lambda: ColumnLinear("c", 4, 6, MESH.tp, tied=Linear("z", 4, 6).weight),
            "is whole, but the layer needs one that is cut over tp along dim 1",
        ),
        (
            lambda: ColumnLinear("c", 4, 6, MESH.tp, tied=ColumnLinear("z", 6, 4, MESH.tp).weight),
            "is cut over tp along its dim 1 and used transposed, but the layer needs one that is cut over tp along",
        ),
        (
            lambda: Linear("l", 4, 9, tied=VocabularyEmbedding("t", 9, 4, MESH.tp).weight),
            "is cut over tp along its dim 0 and used transposed, but the layer needs one that is whole",
        ),
    ],
)
def test_weights_that_cannot_be_tied_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message) as caught:
        make()
    assert len(str(caught.value).splitlines()) <= 5


def test_square_weights_are_tied_as_it_is_said() -> None:
    z = Linear("z", 4, 4)
    turned, straight = (Linear("q", 4, 4, bias=False, tied=z.weight, transposed=which) for which in (True, False))
    Sequential("all", z, turned, straight).materialize(MESH, seed=1, dtype=np.float64)
    x = np.eye(4)
    assert (turned(Tensor(x)).data == z.weight.data.T).all()
    assert (straight(Tensor(x)).data == z.weight.data).all()
    assert Linear("q", 4, 4).weight.name == "q.weight"


def test_layers_that_are_cut_may_share_a_weight_on_every_number_of_ranks() -> None:
    def body() -> tuple[np.ndarray, np.ndarray]:
        mesh = Mesh(world(), tp=world().size)
        up = ColumnLinear("up", 6, 8, mesh.tp)
        model = Sequential("both", up, RowLinear("down", 8, 6, mesh.tp, tied=up.weight))
        model.materialize(mesh, seed=3, dtype=np.float64)
        x = Tensor(np.random.default_rng(1).standard_normal((2, 3, 6)), requires_grad=True)
        with Tape() as tape:
            y = model(x)
        grads = tape.run_backward([(y, np.cos(y.data))])
        whole = mesh.tp.all_gather(np.ascontiguousarray(up.weight.grad), 1)
        return y.data, grads[x], whole

    alone = LocalWorld(1).run(body)[0]
    for rank in LocalWorld(2).run(body):
        for mine, theirs in zip(rank, alone, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-12)
