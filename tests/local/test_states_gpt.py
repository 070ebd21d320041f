"""The GPT and its trainer under the state checker: no alarm on any layout, and bugs of whole programs are found."""

import re
import sys
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the layouts are
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import check_cost
from checks_layouts import SIZES, layouts, name_of, with_documents

from mpitrain import collectives
from mpitrain.autograd import ops
from mpitrain.autograd.carry import Carry
from mpitrain.autograd.ops import arithmetic
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.states import StateChecker
from mpitrain.errors import StateError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT
from mpitrain.models.mlp import MLP
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel import tensor, vocabulary
from mpitrain.parallel.data import BucketedReducer
from mpitrain.parallel.stages import Links
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition, balance
from mpitrain.pipeline.passes import complete, with_update
from mpitrain.pipeline.schedules import one_stage

AXIS = ContextVar("axis")  # of the rank, for a patched method
SMALL = replace(SIZES, layers=1)
NUMBERS = (np.arange(2000) * 7919 % 104729 % SIZES.vocab).astype(np.uint16)
TOKENS = Tokens(Corpus(NUMBERS[:1800], NUMBERS[1800:], SIZES.vocab, "bytes", "numbers", (), (), ""), SIZES.seq_len)


def run(
    ranks,
    *,
    sizes=SMALL,
    sp=False,
    kind="ring",
    micros=1,
    batch=8,
    documents=False,
    steps=1,
    meddle=None,
    schedule="1f1b",
    chunks=1,
    slices=None,
    layers=None,
    catches=StateError,
    **axes,
):
    """Train under the checker: what each rank is told, and the losses; `meddle(model, mesh, step)` before each step."""

    def main():
        mesh = Mesh(world(), **axes)
        partition = balance([1.0] * sizes.layers, mesh.pp.size * chunks) if layers is None else Partition(layers)
        model = GPT(sizes, mesh, sequence_parallel=sp, cp_attention=kind, partition=partition, seed=3, dtype=np.float64)
        reducer = BucketedReducer(model.flats, mesh, 4096)
        rows = complete(
            schedule, ranks=mesh.pp.size, microbatches=micros, chunks=chunks, slices=len(slices) if slices else 1
        )
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows, reducer=reducer, slices=slices)
        losses = []
        with listen(StateChecker(model.parameters(), mesh)):
            for step, rows in enumerate(TOKENS.batches(batch, mesh.dp.rank, mesh.dp.size, stop_step=steps)):
                if meddle is not None:
                    meddle(model, mesh, step)
                rows = with_documents(rows) if documents else rows
                try:
                    losses.append(executor.step(rows.part(model.positions_here)))
                    executor.evaluate([rows.part(model.positions_here)])
                except catches as error:
                    return str(error), losses
        return "", losses

    return LocalWorld(ranks).run(main)


def told(ranks, **how):
    """The one thing that all ranks are told."""
    texts = {text for text, _ in run(ranks, **how)}
    assert len(texts) == 1
    return texts.pop()


# ------------------------------------------------------------------------------------------------------ no false alarm

PLAIN = [(n, layout) for n in (1, 2, 4) for layout in layouts(n)]
MORE = [
    (8, {"dp": 2, "tp": 2, "cp": 2, "sp": True, "micros": 2}),
    (4, {"cp": 2, "tp": 2, "kind": "ulysses"}),
    (4, {"cp": 2, "tp": 2, "kind": "rsa", "sp": True}),
    (4, {"tp": 2, "cp": 2, "documents": True}),
    (8, {"tp": 8, "sp": True, "batch": 1}),  # one head a rank, one row
    (4, {"dp": 4, "batch": 4}),
    (4, {"tp": 4, "sizes": replace(SMALL, kv_heads=1, tied=True)}),
    (4, {"tp": 4, "sizes": replace(SMALL, kv_heads=2), "sp": True}),
    (2, {"tp": 2, "sizes": replace(SMALL, kv_heads=2)}),
    (4, {"tp": 4, "sizes": replace(SMALL, vocab=17, tied=True)}),
]


@pytest.mark.parametrize(
    ("ranks", "how"), PLAIN + MORE, ids=[f"{name_of(how)[:60]} {i}" for i, (_, how) in enumerate(PLAIN + MORE)]
)
def test_a_layout_of_the_gpt_raises_no_alarm(ranks, how):
    assert told(ranks, steps=2, **how) == ""


TWO = replace(SIZES, layers=2)
STAGES = [
    (2, {"pp": 2}),
    (4, {"pp": 2, "tp": 2, "schedule": "gpipe"}),
    (4, {"pp": 2, "tp": 2, "sp": True, "schedule": "zb-h1", "micros": 4}),
    (4, {"pp": 2, "cp": 2, "schedule": "zb-h1"}),
    (4, {"pp": 2, "dp": 2, "schedule": "interleaved", "chunks": 2}),
    (8, {"pp": 2, "dp": 2, "tp": 2, "sp": True, "schedule": "interleaved", "chunks": 2}),
    (8, {"pp": 2, "cp": 2, "tp": 2, "sp": True, "kind": "ulysses", "documents": True}),
    (4, {"pp": 2, "dp": 2, "schedule": "terapipe", "slices": [6, 1, 9], "documents": True}),
    (4, {"pp": 2, "tp": 2, "schedule": "terapipe", "slices": [9, 7]}),
    (8, {"pp": 4, "tp": 2, "layers": (0, 1, 0, 1)}),  # a stage that does nothing hands on what it was given
    (6, {"pp": 3, "dp": 2, "layers": (1, 0, 1), "schedule": "zb-h1", "sizes": replace(TWO, tied=True)}),
]


@pytest.mark.parametrize(
    ("ranks", "how"), STAGES, ids=[" ".join(f"{k} {v}" for k, v in how.items() if k != "sizes") for _, how in STAGES]
)
def test_stages_of_a_pipeline_raise_no_alarm(ranks, how):
    """Also where stages have other programs: the ranks that compare are always of one stage."""
    assert told(ranks, **{"sizes": TWO, "micros": 2, "steps": 2, **how}) == ""


def test_the_checker_changes_no_bit():
    watched = [losses for _, losses in run(4, tp=2, cp=2, sp=True, steps=3)]
    with mock.patch.object(StateChecker, "__call__"):
        alone = [losses for _, losses in run(4, tp=2, cp=2, sp=True, steps=3)]
    assert watched == alone
    assert len(watched[0]) == 3


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}])
def test_a_classifier_whose_batch_is_of_another_dtype_raises_no_alarm(axes):
    class Samples:
        def __init__(self, rank, dtype):
            self.inputs = np.random.default_rng(rank).standard_normal((6, 4)).astype(dtype)
            self.targets = np.arange(6) % 3
            self.count = 6

        def split(self, parts):
            return [self]

    class Classifier(MLP):
        def forward(self, batch):
            batch.inputs = batch.inputs.astype(np.float64)
            return super().forward(batch)

    def main():
        mesh = Mesh(world(), **axes)
        model = Classifier([4, 8, 3], mesh, dtype=np.float64)
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, with_update(one_stage(1)))
        with listen(StateChecker(model.parameters(), mesh)):
            return [executor.step(Samples(mesh.dp.rank, np.float32)) for _ in range(2)]

    losses = LocalWorld(axes.get("dp", 1) * axes.get("tp", 1)).run(main)
    assert len(set(map(tuple, losses))) == 1


def test_what_the_check_costs_is_measured_on_every_layout():
    for layout in check_cost.LAYOUTS:
        found = check_cost.measure("mini", layout, rounds=1)
        assert found.keys() == {"plain", "checked", "rules"}
        assert min(found.values()) > 0


# ------------------------------------------------------------------------------------------------------ bugs by rule


def test_a_layer_that_leaves_out_its_sum_is_found_in_the_model():
    with mock.patch.object(tensor, "leave", lambda y, axis, sp: y):
        text = told(2, tp=2)
    assert re.match(
        r"at \w+\.py:\d+: residual_norm of a Partial value over tp; an all_reduce or reduce_scatter is", text
    )
    assert "(from linear at tensor.py:" in text
    assert "\n  in blocks.0" in text


def test_a_layer_that_leaves_out_its_copy_is_found_in_the_model():
    with mock.patch.object(tensor, "enter", lambda x, axis, sp: x):
        text = told(2, tp=2)
    assert "linear of an Invariant and a Shard(2) value over tp; a copy of the Invariant one is missing" in text
    assert "\n  in blocks.0.attention.qkv: " in text


def test_a_lookup_that_is_not_summed_is_found():
    with mock.patch.object(vocabulary, "leave", lambda y, axis, sp: y):
        assert "add of a Partial value and an Invariant one over tp" in told(2, tp=2)


def test_a_head_without_its_gather_is_found():
    with mock.patch.object(vocabulary, "enter", lambda x, axis, sp: x):
        assert "linear of a Shard(1) and a Shard(2) value over tp" in told(2, tp=2, sp=True)


def test_a_serial_loss_of_a_cut_vocabulary_is_found():
    serial = lambda logits, targets, axis, *, vocab: ops.softmax_cross_entropy(logits, targets % 8)  # noqa: E731
    with mock.patch("mpitrain.models.decoder.cross_entropy", serial):
        assert "softmax_cross_entropy over the classes of a Shard(2) value over tp" in told(2, tp=2)


def test_serial_attention_over_cut_sequences_is_found():
    serial = lambda qkv, heads, kv_heads, axis, kind, **how: ops.attention(qkv, heads, kv_heads)  # noqa: E731
    with mock.patch("mpitrain.parallel.context.attention", serial):
        text = told(2, cp=2)
    assert (
        "attention among the tokens of a Shard(1) value, a part of each sequence over cp; attention over axis cp is"
        in text
    )


def test_a_loss_that_is_summed_over_the_data_axes_by_the_model_is_found():
    forward = GPT.forward
    sum_over_dp = lambda model, batch: collectives.all_reduce(forward(model, batch), AXIS.get())  # noqa: E731
    with mock.patch.object(GPT, "forward", sum_over_dp):
        text = told(2, dp=2, meddle=lambda model, mesh, step: AXIS.set(mesh.dp))
    assert "the loss is Invariant over dp where it leaves, but must be Partial, the sum over this rank's tokens" in text
    assert "this all_reduce is doubled: the executor sums over the ranks" in text


def meddled(stage, change):
    """`GPT._stage` with something done to what one stage hands on."""
    whole = GPT._stage

    def method(model, number, *args):
        y = whole(model, number, *args)
        return change(y, model) if number == stage else y

    return mock.patch.object(GPT, "_stage", method)


def told_stages(ranks, **how):
    """What ends a pipeline: its other stages would wait for the one that is told something."""
    with pytest.raises(StateError) as caught:
        run(ranks, **{"sizes": TWO, "micros": 2, "catches": (), **how})
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "change", "said"),
    [
        (
            {"tp": 2},
            lambda y, model: collectives.copy(y, model.tp),
            "hands on is Replicate over tp, but stage 1 takes it as Invariant; the boundary is wrong, or a message",
        ),
        (
            {"tp": 2},
            lambda y, model: collectives.copy(y, model.tp) * 0.5 + collectives.copy(y, model.tp) * 0.5,
            "hands on is Replicate over tp",
        ),
        (
            {"tp": 2, "sp": True},
            lambda y, model: collectives.gather(y, model.tp, 1),
            "what stage 0 hands on is Invariant over tp, but stage 1 takes it as Shard(1); the boundary is wrong, or",
        ),
        (
            {"tp": 2},
            lambda y, model: collectives.split(y, model.tp, 2),
            "hands on is Shard(2) over tp, but stage 1 takes it as Invariant; a gather is missing before it, or the",
        ),
    ],
)
def test_what_a_stage_hands_on_in_another_state_than_its_boundary_says_is_found_there(how, change, said):
    # Where the shape is another one too, that alone would be refused before.
    with meddled(0, change), mock.patch("mpitrain.nn.module.check_outputs", lambda model, stage, batch, made: made):
        text = told_stages(4, pp=2, **how)
    assert re.match(r"at test_states_gpt.py:\d+: what stage 0 hands on is ", text)
    assert said in text


# ------------------------------------------------------------------------------------------- bugs that no rule can see


def test_a_dropout_stream_that_is_another_on_one_rank_is_found_at_its_op():
    """C36."""

    def meddle(model, mesh, step):
        if mesh.tp.rank:
            model.blocks[0].drop1.name = "drop"

    text = told(2, tp=2, meddle=meddle)
    assert (
        "in blocks.0: the value of residual_norm is Invariant over tp, but rank 1 holds another one than rank 0" in text
    )


def test_replicas_that_drift_apart_are_found_at_the_parameter():
    """T4.3."""

    def meddle(model, mesh, step):
        if step == 1 and mesh.dp.rank == 2:
            model.norm.weight.data[0] *= 1 + 1e-15

    texts = {text for text, losses in run(4, dp=4, steps=3, meddle=meddle) if len(losses) == 1}
    assert texts == {
        "norm.weight is Replicate over dp, but rank 2 holds another one than ranks 0, 1, 3.\n"
        "  Of all such values it is the first that differs."
    }


def test_a_copy_without_its_backward_is_found_in_the_model(monkeypatch):
    monkeypatch.setattr(collectives.Copy, "backward", staticmethod(lambda grad, *, wanted, axis: (grad,)))
    text = told(2, tp=2)
    assert "in head: copy.backward, the gradient of the value of layer_norm at " in text
    assert "is Invariant over tp, but rank 1 holds another one than rank 0" in text


def test_a_micro_batch_that_one_rank_of_a_stage_takes_for_another_is_found_as_it_arrives():
    whole = Links.expect

    def expect(links, kind, stage, unit, boundaries, like):
        swapped = world().rank == 3 and kind == "F"  # of stage 1, the second of tp
        return whole(links, kind, stage, 1 - unit if swapped else unit, boundaries, like)

    with mock.patch.object(Links, "expect", expect):
        text = told_stages(4, pp=2, tp=2)
    assert text.startswith("the input of stage 1 is Invariant over tp, but rank 3 holds another one than rank 2.")


def test_the_second_half_of_a_split_backward_is_looked_at_too(monkeypatch):
    """A gradient of a weight that one rank of tp makes otherwise, in W alone: that of the positions."""
    whole = arithmetic.Add.backward

    def backward(grad, *saved, wanted, **how):
        if AXIS.get().rank and wanted == (False, True):
            grad = grad * (1 + 1e-15)
        return whole(grad, *saved, wanted=wanted, **how)

    monkeypatch.setattr(arithmetic.Add, "backward", staticmethod(backward))
    how = {"pp": 2, "tp": 2, "meddle": lambda model, mesh, step: AXIS.set(mesh.tp)}
    assert "add.backward, the gradient of positions.weight, is Invariant over tp, but" in told_stages(
        4, schedule="zb-h1", **how
    )


def test_a_leaf_that_stands_for_an_earlier_slice_has_its_states():
    """Keys of earlier slices in another state than the slice's own."""
    whole = Carry.keep

    def keep(carry, name, value):
        whole(carry, name, collectives.gather(value, AXIS.get(), 2)[..., : value.shape[2]])

    with mock.patch.object(Carry, "keep", keep):
        text = told_stages(
            4, pp=2, tp=2, schedule="terapipe", slices=[8, 8], meddle=lambda model, mesh, step: AXIS.set(mesh.tp)
        )
    assert "slice_attention of an Invariant and a Shard(2) value over tp" in text
