"""PowerSGD on several ranks, as checks that any world can run: threads here, MPI's ranks in tests/mpi.

A `Bench` is parameters, their reducer and gradients by random numbers: of a step, a parameter and the rank that brings
them, so that every rank can say what all of them brought.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.debug.compare import compare
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.init import zeros
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import Sgd
from mpitrain.parallel.data import FlatReducer, sum_over_ends
from mpitrain.parallel.powersgd import ERROR, PowerSgd
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.routing import Routing
from mpitrain.spec import REPLICATE, Shard

SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "up": ((12, 20), {"tp": Shard(1)}),
    "down": ((20, 12), {"tp": Shard(0)}),
    "bias": ((20,), {"tp": Shard(0)}),
    "norm": ((12,), {}),
    "narrow": ((2, 40), {}),  # its factors of rank 2 hold all of it
    "kernel": ((6, 3, 5), {}),
    "experts": ((4, 9, 10), {"ep": Shard(0), "tp": Shard(2)}),
    "shared": ((8, 15), {"tp": REPLICATE}),
}
LOSSY = ("up", "down", "kernel", "experts", "shared", "table")
TIED = {"table": ((11, 14), {"ends": REPLICATE, "tp": Shard(0)})}


class Bench:
    """Parameters of the shapes above on a layout, and what compresses their gradients.

    Args:
        mesh: the layout.
        dtype: of the weights.
        names: which, in which order they lie in the buffers.
        how: of the reducer; rank 2 and no exceptions unless given.
    """

    def __init__(self, mesh: Mesh, dtype: Any = np.float64, names: Sequence[str] = tuple(SHAPES), **how: Any) -> None:
        self.mesh, self.rank = mesh, how.get("rank", 2)
        shapes = SHAPES | TIED
        self.parameters = [Parameter(name, shapes[name][0], shapes[name][1], init=zeros) for name in names]
        flats = materialize(self.parameters, mesh.coords, mesh.sizes, 0, np.dtype(dtype))
        self.reducer = PowerSgd(flats, mesh, **{"rank": 2, "exact": (), "worth": 0.0, **how})
        self.exact = FlatReducer(flats, mesh)

    def bring(self, step: int, scale: float = 1.0) -> None:
        """This rank's gradients."""
        for p in self.parameters:
            p.touched = False
            p.accumulate((self.gradient(p, step, *self.place(p)) * scale).astype(p.grad.dtype))

    def step(self, step: int, updated: bool = True) -> dict[str, np.ndarray]:
        """A step; what comes back, summed over both ends where they share it."""
        self.bring(step)
        self.reducer.finish()
        sum_over_ends(self.parameters, self.mesh, self.reducer.over_ends)
        if updated:
            self.reducer.updated()
        return {p.name: p.grad.copy() for p in self.parameters}

    def place(self, p: Parameter) -> tuple[int, ...]:
        """Which of the ranks that add to the gradient of a parameter this one is."""
        end = self.mesh.ends.rank if p.spec.tied else 0
        return end, self.mesh.merged(p.spec.replicate_axes()).rank

    def gradient(self, p: Parameter, step: int, end: int, rank: int) -> np.ndarray:
        """What a rank brings; of a few directions that last, and noise."""
        lasting = np.random.default_rng([*p.name.encode()]).normal(size=p.full_shape)
        noise = np.random.default_rng([step, end, rank, *p.name.encode()]).normal(size=p.full_shape)
        return (lasting + noise)[p.rectangle]

    def of_all(self, p: Parameter, step: int) -> np.ndarray:
        """The sum of what all ranks bring."""
        ends = self.mesh.ends.size if p.spec.tied else 1
        ranks = self.mesh.merged(p.spec.replicate_axes()).size
        return sum(self.gradient(p, step, end, rank) for end in range(ends) for rank in range(ranks))  # type: ignore[return-value]

    def errors(self) -> dict[str, np.ndarray]:
        """The sum over ranks of what was left out."""
        found = {}
        for p in self.parameters:
            error = self.reducer.state_tensors()[ERROR].get(p.name)
            mine = np.zeros(p.grad.shape) if error is None else error.array[0].astype(np.float64)
            total = self.mesh.merged(p.spec.replicate_axes()).all_reduce(mine)
            found[p.name] = self.mesh.ends.all_reduce(total) if p.spec.tied else np.array(total)
        return found


def nothing_is_lost(bench: Bench, steps: int = 50, close: float = 1e-10) -> None:
    """T26.2: what was sent in all steps and what is left out at the end is what all ranks brought."""
    sent = {p.name: np.zeros(p.grad.shape) for p in bench.parameters}
    brought = {p.name: np.zeros(p.grad.shape) for p in bench.parameters}
    largest = 0.0
    for step in range(steps):
        for name, array in bench.step(step).items():
            sent[name] += array
        for p in bench.parameters:
            brought[p.name] += bench.of_all(p, step)
            largest = max(largest, float(np.abs(brought[p.name]).max(initial=0.0)))
    lefts = bench.errors()
    for name, left in lefts.items():
        worst = float(np.abs(sent[name] + left - brought[name]).max(initial=0.0)) / largest
        assert worst <= close, (name, worst)
    for p in bench.parameters:
        sides = (p.grad.shape[-1], p.grad.shape[-2 if p.name == "experts" else 0])
        is_lossy = p.name in LOSSY and min(sides) > bench.rank
        assert bool(np.abs(lefts[p.name]).max(initial=0.0) > 1e-3 * largest) == is_lossy, p.name


def what_is_sent_and_what_is_left_add_up_to_all_gradients(world: World) -> None:
    nothing_is_lost(Bench(Mesh(world)))


def also_with_a_fixed_factor(world: World) -> None:
    nothing_is_lost(Bench(Mesh(world), warm_start=False), 15)


def also_with_a_start_of_exact_sums(world: World) -> None:
    nothing_is_lost(Bench(Mesh(world), start=7), 15)


def also_in_float32(world: World) -> None:
    nothing_is_lost(Bench(Mesh(world), np.float32), 30, close=1e-6)


def the_sums_are_the_same_on_all_ranks_that_share_them(world: World) -> None:
    """And with parameters in another order in their buffers."""
    mesh = Mesh(world)
    benches = Bench(mesh), Bench(mesh, names=[*reversed(SHAPES)])
    for step in range(5):
        one, other = (bench.step(step) for bench in benches)
    for p in benches[0].parameters:
        axis = mesh.merged(p.spec.replicate_axes())
        assert len(set(axis.exchange(one[p.name].tobytes().hex()))) == 1, p.name
        if world.deterministic:
            assert one[p.name].tobytes() == other[p.name].tobytes(), p.name


def exact_steps_are_those_of_one_message(world: World) -> None:
    """T26.6: bit by bit."""
    mesh = Mesh(world)
    bench, plain = Bench(mesh, start=3), Bench(mesh)
    for step in range(3):
        found = bench.step(step)
        plain.bring(step)
        plain.exact.finish()
        for p in plain.parameters:
            assert found[p.name].tobytes() == p.grad.tobytes(), p.name
    bench.step(3)
    assert any(left.any() for left in bench.errors().values())


# ------------------------------------------------------------------------------------------------------ training runs

SIZES = GPTConfig(vocab=17, layers=2, width=12, heads=2, seq_len=8, dropout=0.1)
EXPERTS = GPTConfig(vocab=17, layers=2, width=12, heads=2, seq_len=8, routing=Routing(4))
STEPS = 8


def train(
    world: World,
    sizes: GPTConfig = SIZES,
    *,
    steps: int = STEPS,
    microbatches: int = 2,
    dtype: Any = np.float64,
    seed: int = 3,
    how: dict[str, Any] | None = None,
    xp: Any = np,
    **axes: Any,
) -> tuple[Executor, list[float]]:
    """A run with momentum and clipping; the executor and the losses."""
    import checks_layouts

    mesh = Mesh(world, **axes)
    model = GPT(sizes, mesh, seed=seed, dtype=dtype, xp=xp)
    optimizer = Sgd(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    reducer = PowerSgd(model.flats, mesh, **{"rank": 2, "exact": (), "worth": 1.0, "seed": seed, **(how or {})})
    rows = complete("1f1b", ranks=mesh.pp.size, microbatches=microbatches)
    executor = Executor(model, optimizer, mesh, rows, reducer=reducer, clip=0.5)
    tokens = checks_layouts.numbers(sizes)
    batches = tokens.batches(8, mesh.dp.rank, mesh.dp.size, 0, steps, model.positions_here)
    return executor, [executor.step(batch) for batch in batches]


@functools.cache
def _alone(sizes: GPTConfig, **how: Any) -> tuple[dict[str, np.ndarray], list[float]]:
    executor, losses = train(World(Alone(), "none"), sizes, **how)
    return {p.name: p.data.copy() for p in executor.model.parameters()}, losses


def equals_one_rank(world: World, sizes: GPTConfig = SIZES, **how: Any) -> None:
    """Every line of the algorithm is linear in what a rank brings: who brings how much of it does not matter."""
    weights, losses = _alone(sizes)
    executor, found = train(world, sizes, **how)
    mine = {p.name: p.data for p in executor.model.parameters()}
    theirs = {p.name: weights[p.name][p.rectangle] for p in executor.model.parameters()}
    worst = compare(mine, theirs)[0]
    assert worst.ok, worst
    np.testing.assert_allclose(found, losses, rtol=1e-10)
    check_replicas(executor.model.parameters(), executor.mesh, "after compressed steps")


def any_number_of_data_parallel_ranks_is_the_same_run(world: World) -> None:
    equals_one_rank(world)


def and_a_pipeline_of_them(world: World) -> None:
    equals_one_rank(world, pp=2)


def and_a_pipeline_whose_ends_share_a_table(world: World) -> None:
    """It is one matrix, to whose gradient both ends add."""
    equals_one_rank(world, replace(SIZES, tied=True), pp=2)


def and_ranks_that_share_a_sequence(world: World) -> None:
    equals_one_rank(world, cp=2)


def and_experts_anywhere(world: World) -> None:
    equals_one_rank(world, EXPERTS, ep=2)


def workers_hold_the_same_bits_after_20_compressed_steps(world: World) -> None:
    """T26.6, in float32 and with sums in the order of the library; and every rank of tp compresses its own slabs."""
    for axes in ({}, {"tp": 2}):
        executor, _ = train(world, steps=20, dtype=np.float32, **axes)
        check_replicas(executor.model.parameters(), executor.mesh, "after 20 steps")


CHECKS: list[Callable[[World], None]] = [
    what_is_sent_and_what_is_left_add_up_to_all_gradients,
    also_with_a_fixed_factor,
    also_with_a_start_of_exact_sums,
    also_in_float32,
    the_sums_are_the_same_on_all_ranks_that_share_them,
    exact_steps_are_those_of_one_message,
    any_number_of_data_parallel_ranks_is_the_same_run,
    and_a_pipeline_of_them,
    and_a_pipeline_whose_ends_share_a_table,
    and_ranks_that_share_a_sequence,
    and_experts_anywhere,
    workers_hold_the_same_bits_after_20_compressed_steps,
]
