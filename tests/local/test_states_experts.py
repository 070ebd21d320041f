"""A GPT with experts under the state checker: no alarm on any layout, mistakes of routing and dispatch are named."""

import re
from contextvars import ContextVar
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from mpitrain import collectives
from mpitrain.autograd import ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.states import StateChecker
from mpitrain.errors import StateError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.module import mark_recompute
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.expert import moe, router
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import balance
from mpitrain.pipeline.passes import complete
from mpitrain.routing import Routing
from mpitrain.spec import REPLICATE, Shard, Spec

GSHARD = Routing(4, 2, "gshard", 1.0, balance_loss=0.1, z_loss=0.01, jitter=0.1)
SWITCH = Routing(4, 1, "switch", 0.5)
DROPLESS = Routing(4, 3, "topk", None, renormalize=True)
SIZES = GPTConfig(vocab=17, layers=1, width=8, heads=2, seq_len=8, dropout=0.1, routing=GSHARD)
TWO = replace(SIZES, layers=2)
NUMBERS = (np.arange(2000) * 7919 % 104729 % SIZES.vocab).astype(np.uint16)
TOKENS = Tokens(Corpus(NUMBERS[:1800], NUMBERS[1800:], SIZES.vocab, "bytes", "numbers", (), (), ""), SIZES.seq_len)
MESH: ContextVar[Mesh] = ContextVar("mesh")  # of the rank, for a patched function


def run(
    ranks,
    *,
    sizes=SIZES,
    routing=None,
    sp=False,
    micros=1,
    schedule="1f1b",
    recompute=(),
    overlap=False,
    dtype="float64",
    steps=1,
    meddle=None,
    catches=StateError,
    **axes,
):
    """Train under the checker: what each rank is told, and the losses; `meddle(model, step)` before each step."""

    def main():
        mesh = Mesh(world(), **axes)
        MESH.set(mesh)
        model = GPT(
            sizes if routing is None else replace(sizes, routing=routing),
            mesh,
            sequence_parallel=sp,
            partition=balance([1.0] * sizes.layers, mesh.pp.size),
            seed=3,
            dtype=dtype,
            expert_overlap=overlap,
        )
        mark_recompute(model, recompute, mesh.pp.exchange)
        if meddle is not None:
            meddle(model, -1)
        rows = complete(schedule, ranks=mesh.pp.size, microbatches=micros)
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, rows)
        losses = []
        with listen(StateChecker(model.parameters(), mesh)):
            for step, batch in enumerate(TOKENS.batches(8, mesh.dp.rank, mesh.dp.size, stop_step=steps)):
                if meddle is not None:
                    meddle(model, step)
                try:
                    losses.append(executor.step(batch.part(model.positions_here)))
                    executor.evaluate([batch.part(model.positions_here)])
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

RIGHT = {
    "dp4,ep4": (4, {"dp": 4, "ep": 4}),
    "dp4,ep2": (4, {"dp": 4, "ep": 2, "routing": SWITCH}),
    "dp2,ep2,tp2": (4, {"dp": 2, "ep": 2, "tp": 2}),
    "dp2,ep2,tp2,sp": (4, {"dp": 2, "ep": 2, "tp": 2, "sp": True}),
    "dp2,ep2,tp2,sp dropless": (4, {"dp": 2, "ep": 2, "tp": 2, "sp": True, "routing": DROPLESS}),
    "dp4,ep2,tp2,sp recompute": (8, {"dp": 4, "ep": 2, "tp": 2, "sp": True, "recompute": ["blocks.*"], "micros": 2}),
    "dp2,ep2,tp2 recompute": (4, {"dp": 2, "ep": 2, "tp": 2, "recompute": ["blocks.*.mlp"]}),
    "dp2,ep2,pp2": (4, {"dp": 2, "ep": 2, "pp": 2, "micros": 2, "sizes": TWO}),
    "dp2,ep2,pp2 zb-h1": (4, {"dp": 2, "ep": 2, "pp": 2, "micros": 4, "sizes": TWO, "schedule": "zb-h1"}),
    "dp2,ep2,pp2 every other": (
        4,
        {"dp": 2, "ep": 2, "pp": 2, "micros": 2, "sizes": TWO, "routing": replace(SWITCH, every=2)},
    ),
    "dp2,ep2,cp2": (4, {"dp": 2, "ep": 2, "cp": 2}),
    "dp2,ep2,cp2,tp2,sp": (8, {"dp": 2, "ep": 2, "cp": 2, "tp": 2, "sp": True, "recompute": ["blocks.*"]}),
    "dp2,ep2,tp2 overlap": (4, {"dp": 2, "ep": 2, "tp": 2, "overlap": True, "recompute": ["blocks.*.mlp"]}),
    "tp2": (2, {"tp": 2, "routing": DROPLESS}),
    "dp2,ep2,tp2 float16": (4, {"dp": 2, "ep": 2, "tp": 2, "dtype": "float16"}),
    "dp2,ep2,cp2 float16": (4, {"dp": 2, "ep": 2, "cp": 2, "dtype": "float16", "routing": SWITCH}),
}


@pytest.mark.parametrize(("ranks", "how"), RIGHT.values(), ids=RIGHT)
def test_a_layout_of_experts_raises_no_alarm(ranks, how):
    assert told(ranks, steps=2, **how) == ""


def test_the_checker_changes_no_bit_of_a_mixture():
    how = {"dp": 2, "ep": 2, "tp": 2, "sp": True, "steps": 3}
    watched = [losses for _, losses in run(4, **how)]
    with mock.patch.object(StateChecker, "__call__"):
        assert watched == [losses for _, losses in run(4, **how)]
    assert len(watched[0]) == 3


# ------------------------------------------------------------------------------------------------------ bugs by rule

PLAIN = {"dp": 2, "ep": 2, "tp": 2}
SP = {**PLAIN, "sp": True}


def test_a_router_whose_spec_says_invariant_under_sequence_parallelism_is_found():
    with mock.patch.object(router, "between", return_value=Spec()):
        text = told(4, **SP)
    assert "linear of an Invariant and a Shard(1) value over tp" in text
    assert "the spec of blocks.0.mlp.router.weight on tp is Invariant (the default)" in text
    assert "Replicate if each uses the whole for its own tokens" in text
    assert "\n  in blocks.0.mlp.router: linear(" in text


def test_a_router_whose_spec_says_replicate_on_the_whole_stream_is_found():
    """Its gradient would be summed over tp although every rank has the whole one."""
    with mock.patch.object(router, "between", return_value=Spec({"tp": REPLICATE})):
        text = told(4, **PLAIN)
    assert "linear of an Invariant and a Replicate value over tp" in text
    assert "blocks.0.mlp.router.weight" in text


def with_spec(name, spec):
    """A parameter of the experts says something else of itself than what it is."""

    def meddle(model, step):
        vars(model.blocks[0].mlp.experts)[name].spec = spec

    return meddle


def test_an_expert_whose_spec_does_not_cut_it_over_ep_is_found():
    """Its gradient would be summed over ranks that hold other experts."""
    text = told(4, dp=4, ep=2, meddle=with_spec("up", Spec({"tp": Shard(2)})))
    assert (
        "grouped_matmul of a Sent(0) value, rows that were sent to their experts, by a Replicate weight over ep; the"
        " spec of blocks.0.mlp.experts.up on ep is Replicate: Shard(0), each rank has its own experts"
    ) in text
    assert "(Sent(0) from all_to_all at experts.py:" in text
    assert "\n  in blocks.0.mlp.experts: grouped_matmul(" in text


def test_an_expert_that_is_cut_over_edp_too_is_found():
    text = told(4, dp=4, ep=2, meddle=with_spec("up", Spec({"dp": Shard(0), "tp": Shard(2)})))
    assert (
        "grouped_matmul of a Shard(0) value by experts of which each rank has some over edp; an all_to_all of the rows"
        " to their experts is missing before it"
    ) in text


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("up", Spec({"ep": Shard(0)}), "grouped_matmul of an Invariant and a Replicate value over tp"),
        ("up", Spec({"ep": Shard(0), "tp": Shard(1)}), "which cuts the rows that are summed over: Shard(2) cuts its"),
        ("down", Spec({"ep": Shard(0), "tp": Shard(2)}), "Shard(1) cuts the rows that are summed over"),
    ],
    ids=["not at all", "the rows of up", "the columns of down"],
)
def test_an_expert_that_is_cut_otherwise_over_tp_is_found(name, spec, words):
    text = told(4, **PLAIN, meddle=with_spec(name, spec))
    assert words in text
    assert f"the spec of blocks.0.mlp.experts.{name} on tp is " in text


def entering(skips):
    """`enter` of the layer, left out where `skips` says so of a value."""
    whole = moe.enter
    return mock.patch.object(moe, "enter", lambda x, axis, sp: x if skips(x) else whole(x, axis, sp))


def are_gates(x):
    return x.shape[-1] == GSHARD.top_k


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (PLAIN, "combine of an Invariant and a Partial value over tp; a copy of the Invariant one is missing"),
        (
            SP,
            "combine of a Partial value with a Shard(1) one as its gates over tp; the rows are those of all tokens: an"
            " all_gather of the gates is missing before it",
        ),
    ],
    ids=["copied", "gathered"],
)
def test_gates_that_are_not_copied_or_gathered_are_found(how, words):
    """Else the router's gradient would be that of this rank's hidden units alone."""
    with entering(are_gates), mock.patch.object(moe.ops, "combine", of_any_shape):
        text = told(4, **how)
    assert words in text
    assert "\n  in blocks.0.mlp.experts: combine(" in text


combine = ops.combine


def of_any_shape(out, gates, places):
    """`ops.combine`, which else would see by itself that gates of some tokens do not fit the places of all."""
    return combine(out, gates, places[:, : gates.shape[1]])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (PLAIN, "grouped_matmul of an Invariant and a Shard(1) value over tp; a copy of the Invariant one is missing"),
        (SP, "grouped_matmul of a Shard(0) and a Shard(1) value over tp; an all_gather of the Shard(0) one is missing"),
    ],
    ids=["copied", "gathered"],
)
def test_tokens_that_are_not_copied_or_gathered_are_found(how, words):
    take = ops.take_rows
    some = lambda x, rows: take(x, rows % (x.shape[0] * x.shape[1]))  # noqa: E731  (of a slice, too)
    with entering(lambda x: not are_gates(x)), mock.patch.object(moe.ops, "take_rows", some):
        assert words in told(4, **how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (PLAIN, "residual of a Partial value and an Invariant one over tp; every rank would add the other one"),
        (SP, "residual of a Partial value and a Shard(1) one over tp; every rank would add the other one"),
    ],
    ids=["summed", "scattered"],
)
def test_experts_that_do_not_leave_their_region_are_found(how, words):
    with mock.patch.object(moe, "leave", lambda y, axis, sp: y[:, : y.shape[1] // 2] if sp else y):
        text = told(4, **how)
    assert words in text
    assert "an all_reduce or reduce_scatter of the Partial one is missing (Partial from grouped_matmul at" in text


def without(call):
    """Leave out an all_to_all of each layer, by its place; as many rows come out as would have come."""
    whole, seen = collectives.all_to_all, ContextVar("seen", default=0)

    def all_to_all(x, axis, i=0, j=0, counts=None):
        seen.set(seen.get() + 1)
        if seen.get() % 2 != call:
            return whole(x, axis, i, j, counts)
        return ops.take_rows(x, np.arange(sum(counts[1])) % max(x.shape[0], 1))

    return mock.patch.object(collectives, "all_to_all", all_to_all)


def test_rows_that_are_not_sent_to_their_experts_are_found():
    with without(1):
        text = told(4, **PLAIN)
    assert (
        "grouped_matmul of a Shard(0) value by experts of which each rank has some over ep; an all_to_all of the rows"
        " to their experts is missing before it"
    ) in text


@pytest.mark.parametrize("layout", [{"dp": 4, "ep": 4}, {"dp": 4, "ep": 2}, SP], ids=str)
def test_rows_that_are_combined_where_the_experts_are_are_found(layout):
    with without(0):
        text = told(4, **layout)
    assert (
        "combine of a Sent(0) value, rows that are with their experts over ep; an all_to_all back to their tokens is"
        " missing before it (from all_to_all at"
    ) in text


# ------------------------------------------------------------------------------------------------------ losses besides


def balancing(change):
    """The balance loss with something done to it, or to the probabilities of which it is."""
    whole = moe.balance_loss
    return mock.patch.object(moe, "balance_loss", lambda p, *how: change(whole, p, *how))


def summed_over(*axes):
    def change(whole, *how):
        loss = whole(*how)
        for axis in axes:
            loss = collectives.all_reduce(loss, getattr(MESH.get(), axis))
        return loss

    return change


def of_a_copy(whole, p, *how):
    return whole(collectives.copy(p, MESH.get().tp), *how)


LOSSES = {
    "summed over tp on plain tp": (
        PLAIN,
        summed_over("tp"),
        "all_reduce of an Invariant value over tp; this all_reduce is doubled: the value is summed already",
    ),
    "summed over tp with sequence parallelism": (
        SP,
        summed_over("tp"),
        "an auxiliary loss of blocks.0.mlp is Invariant over tp where it leaves, but must be Partial, the sum over this"
        " rank's tokens, or Invariant where all hold them; this all_reduce is doubled: each rank adds what its own",
    ),
    "of a copy": (
        PLAIN,
        of_a_copy,
        "an auxiliary loss of blocks.0.mlp is Replicate over tp where it leaves, but must be Partial, the sum over this"
        " rank's tokens, or Invariant where all hold them; every rank would add all of it: it is meant of the value"
        " before that copy or all_gather",
    ),
    "summed over ep": (
        {"dp": 4, "ep": 2},
        summed_over("ep"),
        "an auxiliary loss of blocks.0.mlp is Invariant over ep where it leaves, but must be Partial, the sum over this"
        " rank's tokens; this all_reduce is doubled: each rank adds what its own tokens say (from all_reduce at test_",
    ),
    "summed over the data axis": (
        {"dp": 4, "ep": 2},
        summed_over("edp"),
        "an auxiliary loss of blocks.0.mlp is Invariant over edp where it leaves",
    ),
    "summed over cp": (
        {"dp": 2, "ep": 2, "cp": 2},
        summed_over("cp"),
        "an auxiliary loss of blocks.0.mlp is Invariant over cp where it leaves",
    ),
    "shared by all": (
        {"dp": 2, "ep": 2},
        lambda whole, *how: collectives.sum_everywhere(whole(*how), MESH.get().ep),
        "an auxiliary loss of blocks.0.mlp is Replicate over ep where it leaves, but must be Partial, the sum over this"
        " rank's tokens; every rank would add all of it: it is meant of the value before that sum",
    ),
    "of a mean": (
        {"dp": 2, "ep": 2},
        lambda whole, p, *how: ops.mean(p),
        "mean over dim 0 of a Shard(0) value over ep; the mean of a part is not a part of the mean",
    ),
}


@pytest.mark.parametrize(("how", "change", "words"), LOSSES.values(), ids=LOSSES)
def test_a_balance_loss_in_another_state_is_found_by_name(how, change, words):
    with balancing(change):
        text = told(how["dp"] * how.get("tp", 1) * how.get("cp", 1), **how)
    assert words in text
    assert re.match(r"at \w+\.py:\d+: ", text)


def test_a_balance_loss_that_leaves_a_recomputed_block_is_looked_at_too():
    with balancing(of_a_copy):
        assert LOSSES["of a copy"][2] in told(4, **PLAIN, recompute=["blocks.*"])


def test_a_balance_loss_of_the_first_stage_is_looked_at_too():
    """Other stages wait for the one that is told: the first error ends all."""
    with balancing(summed_over("ep")), pytest.raises(StateError, match=r"blocks\.0\.mlp is Invariant over ep where"):
        run(4, dp=2, ep=2, pp=2, micros=2, sizes=TWO, catches=())


# ------------------------------------------------------------------------------------------- bugs that no rule can see


def told_first(ranks, **how):
    """What ends the run: ranks of other groups, which agree among each other, would go on."""
    with pytest.raises(StateError) as caught:
        run(ranks, **how, catches=())
    return str(caught.value)


def test_a_rank_of_tp_that_chooses_other_experts_is_found_at_its_gates():
    whole = moe.choose
    swapped = lambda p, k: whole(p, k)[..., :: -1 if MESH.get().tp.rank else 1].copy()  # noqa: E731
    with mock.patch.object(moe, "choose", swapped):
        text = told_first(4, **PLAIN)
    assert "in blocks.0.mlp: the value of normalized_gates is Invariant over tp, but rank" in text


def test_a_rank_of_tp_that_sends_other_rows_is_found_where_it_takes_them():
    whole = moe.assign

    def assign(*how, **named):
        to = whole(*how, **named)
        return to._replace(rows=to.rows[::-1].copy()) if MESH.get().tp.rank else to

    with mock.patch.object(moe, "assign", assign):
        text = told_first(4, **SP)
    assert "in blocks.0.mlp.experts: the value of take_rows is Replicate over tp, but rank" in text


@pytest.mark.parametrize(
    ("dp", "name", "axis", "said"),
    [
        (4, "experts.up", "edp", "rank 3 holds another one than rank 1"),
        (2, "router.weight", "ep", "rank 1 holds another"),
    ],
)
def test_replicas_that_drift_apart_are_found_on_the_axes_that_hold_them_alike(dp, name, axis, said):
    """Ranks of ep hold other experts: those are compared on edp alone."""

    def meddle(model, step):
        if step == 1 and world().rank == dp - 1:
            (p,) = [p for p in model.parameters() if p.name.endswith(name)]
            p.data.reshape(-1)[0] *= 1 + 1e-15

    text = told_first(dp, dp=dp, ep=2, steps=3, meddle=meddle)
    assert text.startswith(f"blocks.0.mlp.{name} is Replicate over {axis}, but {said}")


def test_gates_whose_copy_has_no_backward_are_found(monkeypatch):
    backward = collectives.Copy.backward

    def broken(grad, *, wanted, axis):
        return (grad,) if grad.shape[-1] == GSHARD.top_k else backward(grad, wanted=wanted, axis=axis)

    monkeypatch.setattr(collectives.Copy, "backward", staticmethod(broken))
    text = told_first(4, **PLAIN)
    assert "copy.backward, the gradient of the value of normalized_gates at moe.py:" in text
    assert "is Invariant over tp, but rank" in text
