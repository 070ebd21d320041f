"""A layer cut over the ranks of tp is the layer: its values, its gradients, its norm; and it sends what it says."""

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the layers are
import gpt_on_tp as gpt
import layers_on_tp as layers
from layers_on_tp import BATCH, LENGTH, WIDTH, Message, assert_same, evaluate

from mpitrain import collectives
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ShapeError
from mpitrain.events import listen
from mpitrain.nn import init
from mpitrain.nn.layers import Linear
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.grouped import GroupedColumns
from mpitrain.parallel.sequence import leave
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage
from mpitrain.spec import REPLICATE, Shard

STREAM = BATCH * LENGTH * WIDTH  # b s h


# ----------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("make", [layers.Mlp, layers.SelfAttention])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_a_cut_layer_is_the_serial_one(make, tp):
    """T11.1: values, gradient of the input and of every weight, against layers that know no rank."""
    (serial,) = evaluate(lambda axis, sp: make(axis, cut=False), 1)
    for found in evaluate(make, tp):
        assert_same(found, serial)


def test_a_chain_of_six_blocks_has_the_gradients_of_the_serial_chain():
    """T3.3: a factor of t a block would be 4096 at its beginning."""

    def chain(axis, sp, cut=True):
        return layers.Chain(*(layers.Mlp(axis, sp, name=f"blocks.{i}", cut=cut) for i in range(6)))

    (serial,) = evaluate(lambda axis, sp: chain(axis, sp, cut=False), 1)
    for found in evaluate(chain, 4):
        assert_same(found, serial)


def test_every_rank_starts_with_its_part_of_the_same_weights():
    def main():
        mesh = Mesh(world(), tp=world().size)
        layer = layers.Chain(layers.Mlp(mesh.tp), layers.SelfAttention(mesh.tp))
        layer.materialize(mesh, seed=3, dtype=np.float64)
        return layers.whole(mesh, layer.parameters(), [p.data for p in layer.parameters()])

    (serial,) = LocalWorld(1).run(main)
    for found in LocalWorld(4).run(main):
        assert all((found[name] == weight).all() for name, weight in serial.items())


# ----------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_makes_two_all_reduces_forward_and_two_backward(tp):
    """T11.2: of b s h elements each, 8 (t-1)/t of them sent by every rank; none where there is one rank."""

    def layer(axis, sp):
        return layers.Chain(layers.SelfAttention(axis), layers.Mlp(axis))

    for found in evaluate(layer, tp):
        twice = [Message("all_reduce", "tp", STREAM)] * 2 if tp > 1 else []
        assert found.forward == twice
        assert found.backward == twice
        assert found.sent == 8 * (tp - 1) * STREAM * 8 // tp


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_of_gpt_sends_what_its_two_blocks_do(tp, dtype):
    """T11.2 in the model: the messages of three layers without those of two."""
    stream = gpt.ROWS * gpt.SIZES.seq_len * gpt.SIZES.width
    for two, three in zip(*(gpt.run(tp=tp, layers=n, dtype=dtype) for n in (2, 3)), strict=True):
        assert three.forward - two.forward == {Message("all_reduce", "tp", stream): 2}
        assert three.backward - two.backward == {Message("all_reduce", "tp", stream): 2}
        assert three.sent - two.sent == 8 * (tp - 1) * stream * np.dtype(dtype).itemsize // tp


# --------------------------------------------------------------------------------------------------------------- bias


class BiasBeforeTheSum(RowLinear):
    """The mistake of C32: every rank adds the bias to its summand."""

    def forward(self, x):
        return collectives.all_reduce(ops.linear(x, self.weight, self.bias), self.axis)


def row_of_three(kind, sp):
    """A row-parallel layer onto three units, with the bias [100, 200, 300]: its result, on this rank."""
    mesh = Mesh(world(), tp=world().size)
    n, rank = mesh.tp.size, mesh.tp.rank
    layer = kind("row", 8, 3, mesh.tp, sequence_parallel=sp)
    layer.bias.init = lambda name, full, slab, seed: np.array([100.0, 200.0, 300.0])[slab]
    layer.materialize(mesh, seed=1, dtype=np.float64)
    x = np.random.default_rng(0).standard_normal((2, 4, 8))[..., rank * 8 // n : (rank + 1) * 8 // n]
    y = layer(Tensor(x)).data
    return mesh.tp.all_gather(y, 1) if sp else y


@pytest.mark.parametrize("sp", [False, True], ids=["plain", "sequence parallel"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_bias_is_added_once(tp, sp):
    """C32."""
    (serial,) = LocalWorld(1).run(row_of_three, RowLinear, False)
    assert (np.abs(serial) > 90).all()
    for y in LocalWorld(tp).run(row_of_three, RowLinear, sp):
        np.testing.assert_allclose(y, serial, rtol=1e-12)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_bias_before_the_sum_would_be_seen(tp):
    """T11.6: a test of the tests above; the error is (t - 1) biases."""
    (serial,) = LocalWorld(1).run(row_of_three, RowLinear, False)
    for y in LocalWorld(tp).run(row_of_three, BiasBeforeTheSum, False):
        error = y - serial
        np.testing.assert_allclose(error, np.broadcast_to((tp - 1) * np.array([100.0, 200.0, 300.0]), error.shape))


# ------------------------------------------------------------------------------------------------ grouped heads of keys


class WithCopies(Module):
    """The same attention where every head of queries has a copy of its head of keys and values: all serial."""

    def __init__(self, heads, kv_heads, width):
        super().__init__("grouped")
        self.heads, self.kv_heads = heads, kv_heads
        self.q = Linear("grouped.q", width, width)
        self.kv = Linear("grouped.kv", width, 2 * width * kv_heads // heads)
        self.proj = Linear("grouped.proj", width, width)

    def forward(self, x):
        b, s, width = x.shape
        served_by = np.arange(self.heads) // (self.heads // self.kv_heads)
        kv = ops.take(self.kv(x).reshape(b, s, self.kv_heads, -1), served_by, dim=2)
        qkv = ops.concat([self.q(x).reshape(b, s, self.heads, -1), kv], 3)
        return self.proj(ops.attention(qkv.reshape(b, s, 3 * width), self.heads))


@pytest.mark.parametrize("sp", [False, True], ids=["plain", "sequence parallel"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_of_keys_that_ranks_share_get_the_gradients_of_all_their_queries(tp, kv_heads, sp):
    shape = (2, 8, 16)
    (serial,) = evaluate(lambda axis, sp: WithCopies(8, kv_heads, 16), 1, shape=shape)
    for found in evaluate(lambda axis, sp: layers.GroupedAttention(axis, sp, 8, kv_heads, 16), tp, sp, shape):
        assert_same(found, serial)


def test_only_a_shared_matrix_of_keys_is_summed_over_the_ranks():
    def main():
        mesh = Mesh(world(), tp=4)
        columns = {n: GroupedColumns("grouped", 16, 8, n, mesh.tp) for n in (2, 4, 8)}
        return {n: layer.kv_weight.spec.state("tp") for n, layer in columns.items()}

    assert LocalWorld(4).run(main)[0] == {2: REPLICATE, 4: Shard(1), 8: Shard(1)}


def test_a_pick_counts_dims_and_bounds_as_other_ops_do():
    x = Tensor(np.arange(24.0).reshape(2, 3, 4), requires_grad=True)
    with Tape() as tape:
        y = collectives.pick(x, world(), -1, 1, 3)
    assert (y.data == x.data[..., 1:3]).all()
    grad = tape.run_backward([(y, np.ones(y.shape))])[x]
    assert (grad == np.array([0.0, 1.0, 1.0, 0.0])).all()
    with pytest.raises(ShapeError, match=r"pick: 1:5 is not within dim 2 of shape \(2, 3, 4\)"):
        collectives.pick(x, world(), -1, 1, 5)
    with pytest.raises(ShapeError, match=r"pick: an array of shape \(2, 3, 4\) has no dim 3"):
        collectives.pick(x, world(), 3, 0, 1)


# --------------------------------------------------------------------------------------------------------------- norm


@dataclass
class Nothing:
    """A batch without content, of one target."""

    count = 1

    def split(self, num_microbatches):
        return [self] * num_microbatches


class ThreeAndFour(Module):
    """A parameter that all ranks hold, whose gradient has norm 3, and one that is cut, of norm 4."""

    def __init__(self, mesh, spec):
        super().__init__("three-and-four")
        self.axis = mesh.tp
        self.held = Parameter("held", (9,), spec, init=init.ones)
        self.cut = Parameter("cut", (4,), {"tp": Shard(0)}, init=init.ones)
        self.materialize(mesh, dtype=np.float64)

    def forward(self, batch):
        mine = (self.cut * 2.0).sum()
        if self.held.spec.state("tp") != REPLICATE:
            return self.held.sum() + collectives.all_reduce(mine, self.axis)
        return collectives.all_reduce(mine + self.held.sum() * (1 / self.axis.size), self.axis)  # each rank its share


@pytest.mark.parametrize("spec", [None, {"tp": REPLICATE}], ids=["invariant", "replicate"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2])
def test_the_norm_of_three_and_four_is_five(tp, dp, spec):
    """C29."""

    def main():
        mesh = Mesh(world(), dp=dp, tp=tp)
        model = ThreeAndFour(mesh, spec)
        executor = Executor(model, Sgd(model.parameters(), lr=0.0), mesh, with_update(one_stage(1)), clip=1.0)
        executor.step(Nothing())
        return executor.report.grad_norm, model.held.grad, model.cut.grad

    for norm, held, cut in LocalWorld(dp * tp).run(main):
        assert norm == pytest.approx(5.0, rel=1e-14)
        np.testing.assert_allclose(held, np.full(9, 0.2), rtol=1e-6)  # clipped to norm 1, on every rank alike
        np.testing.assert_allclose(cut, np.full(4 // tp, 0.4), rtol=1e-6)


class OnlyNorms(layers.Norms):
    """A loss of nothing but norms."""

    def __init__(self, mesh, sp):
        super().__init__(mesh.tp, sp)
        self.axis, self.sp = mesh.tp, sp
        self.materialize(mesh, dtype=np.float64)

    def forward(self, batch):
        x = Tensor(np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH)))
        if not self.sp:
            return super().forward(x).sum()
        return collectives.all_reduce(super().forward(collectives.split(x, self.axis, 1)).sum(), self.axis)


@pytest.mark.parametrize("sp", [False, True], ids=["plain", "sequence parallel"])
def test_a_model_of_norms_only_has_the_same_norm_on_four_ranks(sp):
    """T28.2: counting it on every rank would double the norm."""

    def main():
        mesh = Mesh(world(), tp=world().size)
        model = OnlyNorms(mesh, sp)
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, with_update(one_stage(1)))
        return executor.step(Nothing()), executor.report.grad_norm

    (serial,) = LocalWorld(1).run(main)
    for found in LocalWorld(4).run(main):
        np.testing.assert_allclose(found, serial, rtol=1e-12)


# ------------------------------------------------------------------------------------------------------------ dropout


def is_of_attention(mask):
    return mask.ndim == 4


@pytest.mark.parametrize("sp", [False, True], ids=["plain", "sequence parallel"])
@pytest.mark.parametrize("tp", [2, 4])
def test_dropout_masks_are_those_of_one_rank_equal_where_the_stream_is_and_different_where_it_is_cut(tp, sp):
    """C36, T11.4: the stream has one mask in a tp group, or slices of it; attention has one for each head."""
    (serial,) = gpt.run(dropout=0.5)
    found = gpt.run(dp=2, tp=tp, sp=sp, dropout=0.5)
    groups = found[:tp], found[tp:]
    assert len(serial.masks) == 7
    for name, mask in serial.masks.items():
        assert 0.4 < mask.mean() < 0.6
        for replica, group in enumerate(groups):
            mine, own_rows = [f.masks[name] for f in group], mask[replica::2]
            if not sp and not is_of_attention(mask):
                assert all((m == own_rows).all() for m in mine)
                continue
            assert (np.concatenate(mine, 1) == own_rows).all()  # heads, or tokens
            assert all((a != b).any() for a, b in itertools.combinations(mine, 2))
        assert (mask[0::2] != mask[1::2]).any()


def test_dropout_masks_follow_from_the_step_not_from_what_ran_before():
    """C36, under resume: a fresh model at step 5 draws what one that ran before draws there."""

    def main():
        mesh = Mesh(world(), tp=2)
        model = gpt.GPT(replace(gpt.SIZES, dropout=0.5), mesh, seed=3, dtype=np.float64)
        return [gpt.pass_of(model, mesh, gpt.batch(mesh, step)).masks for step in (0, 5)]

    for (first, later), fresh in zip(LocalWorld(2).run(main), gpt.run(tp=2, step=5, dropout=0.5), strict=True):
        for name, mask in fresh.masks.items():
            assert (later[name] == mask).all()
            assert (first[name] != mask).any()


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda axis: ColumnLinear("blocks.3.mlp.up", 8, 10, axis),
            "blocks.3.mlp.up (ColumnLinear): out_features 10 is not divisible by axis tp of size 4.",
        ),
        (
            lambda axis: RowLinear("blocks.3.mlp.down", 10, 8, axis, sequence_parallel=True),
            "blocks.3.mlp.down (RowLinear): in_features 10 is not divisible by axis tp of size 4.",
        ),
        (
            lambda axis: GroupedColumns("blocks.3.qkv", 12, 6, 3, axis),
            "blocks.3.qkv: 6 heads in 3 groups cannot be cut over axis tp of size 4: groups and ranks must"
            " each divide the heads, and one of the two the other.",
        ),
        (
            lambda axis: GroupedColumns("blocks.3.qkv", 24, 12, 3, axis),
            "blocks.3.qkv: 12 heads in 3 groups cannot be cut over axis tp of size 4: groups and ranks must"
            " each divide the heads, and one of the two the other.",
        ),
        (
            lambda axis: GroupedColumns("blocks.3.qkv", 16, 8, 0, axis),
            "blocks.3.qkv: 8 heads in 0 groups cannot be cut over axis tp of size 4: groups and ranks must"
            " each divide the heads, and one of the two the other.",
        ),
        (
            lambda axis: leave(Tensor(np.ones((2, 10, 8))), axis, sequence_parallel=True),
            "reduce_scatter: dim 1 of shape (2, 10, 8) is not divisible by axis tp of size 4, at sequence.py:",
        ),
    ],
)
def test_what_does_not_divide_is_refused_on_every_rank_before_any_message(make, says):
    def main():
        mesh = Mesh(world(), tp=4)
        heard = []
        with listen(layers.messages(heard)), pytest.raises(ShapeError) as refused:
            make(mesh.tp)
        assert not heard
        return str(refused.value)

    told = LocalWorld(4).run(main)
    assert set(told) == {told[0]}
    assert told[0].startswith(says)
