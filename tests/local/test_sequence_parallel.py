"""A stream cut along the sequence is the same layer: its values and gradients, the same bytes, less memory."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the layers are
import gpt_on_tp as gpt
import layers_on_tp as layers
from layers_on_tp import BATCH, LENGTH, WIDTH, Message, assert_same, evaluate

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ShapeError, StateError
from mpitrain.events import listen
from mpitrain.models import gpt as model_file
from mpitrain.optim.adam import AdamW
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage
from mpitrain.spec import Spec

STREAM = BATCH * LENGTH * WIDTH  # b s h


def layer(axis, sp, spec=None, cut=True):
    """Attention and MLP of a transformer layer with norms before each: the regions, and the stretches between them."""
    return layers.Chain(
        layers.Norms(axis, sp, "norms1", spec),
        layers.SelfAttention(axis, sp, cut=cut),
        layers.Norms(axis, sp, "norms2", spec),
        layers.Mlp(axis, sp, cut=cut),
    )


# ----------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_a_stream_cut_along_the_sequence_gives_the_serial_layer(tp):
    """T13.1: values and all gradients, those of norms and biases after the one rule."""
    (serial,) = evaluate(lambda axis, sp: layer(axis, sp, cut=False), 1)
    for found in evaluate(layer, tp, sp=True):
        assert_same(found, serial)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp", [2, 4])
def test_gpt_has_the_same_loss_and_gradients_with_and_without(tp, tied):
    """T13.1, T11.5, dropout on; C39: the gradients are those of one rank."""
    (serial,) = gpt.run(dropout=0.2, tied=tied)
    for sp in (False, True):
        for found in gpt.run(tp=tp, sp=sp, dropout=0.2, tied=tied):
            assert found.loss == pytest.approx(serial.loss, rel=1e-12)
            for name, grad in serial.grads.items():
                assert np.abs(found.grads[name] - grad).max() <= 1e-12 * np.abs(grad).max(), name


@pytest.mark.parametrize("tp", [2, 4])
def test_weights_stay_the_same_bits_on_all_ranks_and_the_run_is_that_of_one_rank(tp):
    """C39, T11.3: ten steps, dropout on; weights compared bit by bit after every step."""

    def main():
        mesh = Mesh(world(), tp=world().size)
        sizes = replace(gpt.SIZES, dropout=0.2)
        model = gpt.GPT(sizes, mesh, sequence_parallel=True, seed=3, dtype=np.float64)
        optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
        executor = Executor(model, optimizer, mesh, with_update(one_stage(2)), clip=1.0)
        losses, gradients = [], []
        for step in range(10):
            losses.append(executor.step(gpt.batch(mesh, step)))
            check_replicas(model.parameters(), mesh, f"after step {step}")
            gradients.append(layers.whole(mesh, model.parameters(), [p.grad for p in model.parameters()]))
        held_by_all = [p for p in model.parameters() if not p.spec.shard_dims()]
        return losses, gradients, {p.name: p.data.tobytes() for p in held_by_all}

    [(losses, gradients, _)] = LocalWorld(1).run(main)
    found = LocalWorld(tp).run(main)
    for mine, mine_gradients, bits in found:
        np.testing.assert_allclose(mine, losses, rtol=1e-10)
        for step, reference in zip(mine_gradients, gradients, strict=True):
            floor = 1e-6 * max(np.abs(grad).max() for grad in reference.values())
            for name, grad in reference.items():
                assert np.abs(step[name] - grad).max() <= 1e-10 * max(np.abs(grad).max(), floor), name
        assert bits == found[0][2]
        assert "blocks.0.norm1.weight" in bits
        assert "blocks.1.mlp.down.bias" in bits
        assert "positions.weight" in bits


# ----------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_it_sends_the_bytes_of_plain_tensor_parallelism_in_twice_as_many_messages(tp):
    """T13.2: forward two all-gathers and two reduce-scatters, backward too."""
    pair = [Message("all_gather", "tp", STREAM // tp), Message("reduce_scatter", "tp", STREAM)]
    for plain, cut in zip(evaluate(layer, tp), evaluate(layer, tp, sp=True), strict=True):
        assert cut.forward == (pair * 2 if tp > 1 else [])
        assert cut.backward == (pair * 2 if tp > 1 else [])
        assert cut.sent == plain.sent == 8 * (tp - 1) * STREAM * 8 // tp


@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_of_gpt_sends_those_bytes_too(tp):
    """T13.2 in the model: what three layers send without what two do."""
    stream = gpt.ROWS * gpt.SIZES.seq_len * gpt.SIZES.width
    pairs = {Message("all_gather", "tp", stream // tp): 2, Message("reduce_scatter", "tp", stream): 2}
    sent = {}
    for sp in (False, True):
        two, three = (gpt.run(tp=tp, sp=sp, layers=n)[tp - 1] for n in (2, 3))
        sent[sp] = three.sent - two.sent
        if sp:
            assert three.forward - two.forward == pairs
            assert three.backward - two.backward == pairs
    assert sent[True] == sent[False] == 8 * (tp - 1) * stream * 8 // tp


# ------------------------------------------------------------------------------------------------- what the rule is for


@pytest.mark.parametrize("tp", [2, 4])
def test_without_the_sum_the_ranks_would_disagree(tp):
    """T13.3: norms left Invariant; each rank has the gradient of its own tokens, which add up to the true one."""
    (serial,) = evaluate(lambda axis, sp: layer(axis, sp, cut=False), 1)
    found = evaluate(lambda axis, sp: layer(axis, sp, spec=Spec()), tp, sp=True)
    norms = [name for name in serial.grads if name.startswith("norms")]
    assert len(norms) == 12
    for name in norms:
        summands, truth = [f.own_grads[name] for f in found], serial.grads[name]
        np.testing.assert_allclose(sum(summands), truth, rtol=1e-11, atol=1e-11 * np.abs(truth).max())
        for rank, mine in enumerate(summands):
            assert np.abs(mine - truth).max() > 0.1 * np.abs(truth).max()
            assert all(np.abs(mine - other).max() > 0.1 * np.abs(truth).max() for other in summands[:rank])


def test_norms_that_are_left_invariant_are_found_after_one_step(monkeypatch):
    """T13.3 in the model: the check of replicas names the first of them."""
    monkeypatch.setattr(model_file, "between", lambda sequence_parallel: Spec())

    def main():
        mesh = Mesh(world(), tp=2)
        model = gpt.GPT(gpt.SIZES, mesh, sequence_parallel=True, seed=3, dtype=np.float64)
        executor = Executor(model, AdamW(model.parameters(), lr=1e-3), mesh, with_update(one_stage(1)))
        executor.step(gpt.batch(mesh))
        check_replicas(model.parameters(), mesh, "after step 1")

    with pytest.raises(StateError, match=r"positions.weight differs between ranks that share it, after step 1: rank 1"):
        LocalWorld(2).run(main)


# ------------------------------------------------------------------------------------------------------------- memory


def kept_by_a_layer(sizes, rows, t, sp, itemsize):
    """Bytes that the nodes of one layer keep for backward: docs/explanation/sequence-parallelism.md has the table."""
    b, s, h, a = rows, sizes.seq_len, sizes.width, sizes.heads
    u = t if sp else 1  # ranks over which the stream is cut
    stream = 2 * b * s * h // u  # the inputs of the two norms
    entered = 2 * b * s * h  # what the two regions start from: the whole sequence
    inside = 12 * b * s * h // t  # q k v, attention's result, GELU's slope and result
    numbers = 2 * 2 * b * s // u + b * a * s // t  # mean and scale of a token in each norm, lse of a query
    hashes = 2 * b * s // u + b * a * s // t if sizes.dropout else 0
    return (stream + entered + inside + numbers) * itemsize + hashes * 8


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sp", [False, True], ids=["plain", "sequence parallel"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_keeps_exactly_what_the_formula_says(tp, sp, dtype, dropout):
    """T13.4 for our own activations: tape.nbytes of three layers without that of two."""
    two, three = (gpt.run(tp=tp, sp=sp, layers=n, dtype=dtype, dropout=dropout)[0] for n in (2, 3))
    sizes = replace(gpt.SIZES, dropout=dropout)
    assert three.kept - two.kept == kept_by_a_layer(sizes, gpt.ROWS, tp, sp, np.dtype(dtype).itemsize)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_a_sequence_that_does_not_divide_is_refused_on_every_rank_before_any_message():
    def main():
        mesh = Mesh(world(), tp=4)
        heard = []
        with listen(layers.messages(heard)), pytest.raises(ShapeError) as refused:
            gpt.GPT(replace(gpt.SIZES, seq_len=10), mesh, sequence_parallel=True)
        assert not heard
        return str(refused.value)

    says = "sequence parallelism: 10 tokens of a sequence are not divisible by axis tp of size 4."
    assert LocalWorld(4).run(main) == [says] * 4


@pytest.mark.parametrize("sp", [False, True], ids=["plain", "sequence parallel"])
def test_heads_that_do_not_divide_are_refused_on_every_rank_before_any_message(sp):
    def main():
        mesh = Mesh(world(), tp=8)
        heard = []
        with listen(layers.messages(heard)), pytest.raises(ShapeError) as refused:
            gpt.GPT(replace(gpt.SIZES, seq_len=16), mesh, sequence_parallel=sp)
        assert not heard
        return str(refused.value)

    assert LocalWorld(8).run(main) == ["blocks.0.attention: 4 heads are not divisible by axis tp of size 8."] * 8
