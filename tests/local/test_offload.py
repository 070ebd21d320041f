"""Offload changes no bit, keeps what it promises to be here, and moves the bytes of the formulas."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_offload
from checks_offload import ROWS, SIZES, SLOT, train

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.memory.gist import Gist
from mpitrain.models.gpt import GPTConfig
from mpitrain.optim import AdamW, Sgd
from mpitrain.pipeline.check import check
from mpitrain.pipeline.passes import complete
from mpitrain.plan.memory import offload as planned
from mpitrain.plan.traffic import Step


@pytest.mark.parametrize("check", checks_offload.CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check):
    LocalWorld(2).run(lambda: check(world()))


@pytest.mark.parametrize("what", ["o", "a", "p", "oap"])
@pytest.mark.parametrize("where", ["device", "host", "hdf5"])
def test_one_rank_computes_the_same_bits(what, where, tmp_path):
    place = f"hdf5:{tmp_path}" if where == "hdf5" else where
    base = train(world(), zero=3 if "p" in what else 0)
    for prefetch in (0, 1, 3) if where == "host" else (1,):
        assert train(world(), what, place, prefetch=prefetch).equals(base)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("optimizer", [AdamW, Sgd])
def test_with_each_optimizer_and_precision(dtype, optimizer):
    how = {"dtype": dtype, "optimizer": optimizer, "micros": 1}
    assert train(world(), "oa", **how).equals(train(world(), **how))
    assert train(world(), "oap", **how).equals(train(world(), zero=3, **how))


@pytest.mark.parametrize("how", [{"recompute": True}, {"tied": True}, {"inner": Gist()}, {"clip": 0.0}], ids=str)
def test_with_recompute_tied_tables_and_gist(how):
    assert train(world(), "oap", **how).equals(train(world(), zero=3, **how))


# -- what moves (T24.3) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float16], ids=["float64", "float16"])
@pytest.mark.parametrize("what", ["o", "p", "op"])
@pytest.mark.parametrize(
    ("micros", "ranks"), [(1, 2), (4, 1), *(pytest.param(n, n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_a_step_moves_the_bytes_of_the_formula(what, dtype, micros, ranks):
    names = [{"o": planned.OPTIMIZER, "p": planned.PARAMETERS}[letter] for letter in what]
    row = complete("1f1b", ranks=1, microbatches=micros)[0]

    def run():
        found = train(world(), what, dtype=dtype, micros=micros, dp=ranks)
        step = Step(SIZES, ROWS, micros, dtype, dp=ranks, dp_rank=world().rank)
        expected = planned.moves(step, row, names)
        assert (found.moved.read, found.moved.written) == expected

    LocalWorld(ranks).run(run)


def test_tapes_move_what_the_formula_of_saved_arrays_says():
    step = Step(SIZES, ROWS, 4, np.float64)
    found = train(world(), "a", micros=4, schedule="gpipe", prefetch=0)
    kept = [saved.nbytes for saved in planned.of_stage(step, 0)]
    moving = sum(nbytes for nbytes in kept if nbytes >= planned.LEAST)
    assert moving > 0.9 * sum(kept)
    # The last of four forward passes goes back at once: what is in its last, open group stays.
    assert 3 * moving <= found.moved.written <= 4 * moving
    assert found.moved.read == found.moved.written


# -- what is here -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_weights_of_few_parts_are_here_at_a_time(prefetch):
    found = train(world(), "p", prefetch=prefetch)
    step = Step(SIZES, ROWS, 2, np.float64, prefetch=prefetch)
    plan = planned.plan(step, complete("1f1b", ranks=1, microbatches=2), ["parameters"], prefetch)
    assert found.resident == plan.here["weights"]
    block = max(sum(8 * slab.size for slab in part) for part in planned.parts_of(step))
    assert found.resident <= (1 + prefetch) * block


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_tapes_hold_no_more_than_the_plan_says(schedule, distance):
    from mpitrain.comm.mesh import Mesh
    from mpitrain.data.tokens import Batch
    from mpitrain.events import listen
    from mpitrain.memory.offload import Offload, region_of
    from mpitrain.memory.store import open_store
    from mpitrain.models.gpt import GPT
    from mpitrain.pipeline.executor import Executor

    mesh, group = Mesh(world()), 2**14
    model = GPT(SIZES, mesh, seed=1, dtype=np.float64)
    rows = complete(schedule, ranks=1, microbatches=4, offload=distance)
    store = open_store("host", [region_of(4, SLOT)], like=np.empty(0))
    policy = Offload(store, slots=4, slot_bytes=SLOT, group=group, distance=distance)
    executor = Executor(model, AdamW(model.parameters()), mesh, rows, policy=policy)
    most = 0

    def look(event):
        nonlocal most
        if event.kind in ("op", "action") and event.phase == "end":
            most = max(most, executor.bytes_in_flight)

    random = np.random.default_rng(0)
    tokens = random.integers(0, 50, (ROWS, 17))
    with listen(look):
        executor.step(Batch(tokens[:, :-1], tokens[:, 1:], np.arange(ROWS), np.arange(16), 0))
    step = Step(SIZES, ROWS, 4, np.float64)
    bare = complete(schedule, ranks=1, microbatches=4)
    bound = planned._activations_here(step, bare[0], check(rows).here[0], group, distance, 4)
    whole = planned.peak(step, bare[0])
    assert most <= bound
    if schedule == "gpipe":
        assert most < whole / 2
    store.close()


def test_ranks_with_other_numbers_of_rows_choose_alike():
    """Of some budget only the one with fewest rows would keep all here."""
    sizes = GPTConfig(vocab=50, layers=2, width=20, heads=4, seq_len=16)
    rows = complete("1f1b", ranks=1, microbatches=1)
    steps = [Step(sizes, 12, dp=3, dp_rank=rank, zero=2) for rank in range(3)]
    budget = max(planned.plan(step, rows, ()).total for step in steps) - 1
    assert {bool(planned.within(step, rows, budget).what) for step in steps} == {False, True}

    def choose():
        found = planned.within(steps[world().rank], rows, budget, most=lambda total: max(world().exchange(total)))
        return found.what

    first, *others = LocalWorld(3).run(choose)
    assert first
    assert others == [first, first]


def test_slots_come_back_also_when_a_pass_is_given_up():
    from mpitrain.autograd.tape import Tape
    from mpitrain.memory.offload import Offload, region_of
    from mpitrain.memory.store import open_store

    store = open_store("host", [region_of(1, SLOT)], like=np.empty(0))
    policy = Offload(store, slots=1, slot_bytes=SLOT)
    tape = Tape(policy.begin())
    assert not policy._free
    other = Tape(policy.begin())  # without a slot nothing moves
    other.policy.evict()
    del tape
    assert policy._free == [0]
    store.close()


def test_arrays_in_another_order_of_dims_come_back_as_they_were():
    from mpitrain.autograd import ops
    from mpitrain.autograd.tape import Tape
    from mpitrain.autograd.tensor import Tensor
    from mpitrain.memory.offload import Offload, region_of
    from mpitrain.memory.store import open_store

    values = np.random.default_rng(0).normal(size=(3, 40, 30))
    store = open_store("host", [region_of(1, SLOT)], like=np.empty(0))

    def gradients(policy):
        x, w = Tensor(values, requires_grad=True), Tensor(values[0], requires_grad=True)
        with Tape(policy) as tape:
            z = ops.matmul(ops.tanh(ops.tanh(x).transpose(0, 2, 1)), w)
        if policy is not None:
            policy.evict()
        found = tape.run_backward([(z, np.ones(z.shape))])
        return [found[each] for each in (x, w)]

    here, there = gradients(None), gradients(Offload(store, slots=1, slot_bytes=SLOT).begin())
    assert store.moved.read == store.moved.written >= 2 * values.nbytes
    for mine, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(mine, other)
    store.close()
