"""ZeRO against one rank, and its stages against each other bit by bit, as checks that any world can run.

The first part trains the GPT of checks_layouts.py.  The second trains `Odd`: parameters of 1, 7, 13 and 1001 elements,
which no number of ranks divides, and one that only the data of some ranks use; it is saved and read on other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks_comm import mode
from checks_layouts import SIZES, equals_one_rank, states, train, whole

from mpitrain import checkpoint
from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.checkpoint.folders import folder_of
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.debug.compare import compare
from mpitrain.models.gpt import GPTConfig
from mpitrain.nn import init as initial
from mpitrain.nn.layers import LayerNorm, Linear
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.adafactor import Adafactor
from mpitrain.optim.adam import AdamW
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.zero import RowReducer, gather_units
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

Found = dict[str, dict[str, np.ndarray]]
STAGES = (1, 2, 3)
DEEP = replace(SIZES, layers=4)
LARGE = GPTConfig(vocab=257, layers=1, width=128, heads=4, seq_len=16)
"""Its largest weight has 512 KiB: the rows of a rank are above the eager limit of any MPI."""

TWO_ROWS = GPTConfig(vocab=2, layers=2, width=8, heads=2, seq_len=3)
"""On four ranks table and positions both stay whole; the last stage has no positions, and must agree on the table."""
SEVEN_ROWS = GPTConfig(vocab=7, layers=1, width=8, heads=2, seq_len=3)
"""On two ranks of tp four rows of the table are cut over four ranks, three are not."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp3": {"dp": 3, "micros": 4},
    "dp4": {"dp": 4, "micros": 2, "bucket_bytes": 2048},
    "dp8": {"dp": 8},
    "cp2": {"cp": 2, "micros": 4},
    "dp2 cp2": {"dp": 2, "cp": 2, "kind": "ulysses", "bucket_bytes": 1},
    "dp2 tp2": {"dp": 2, "tp": 2, "micros": 4, "bucket_bytes": 4096},
    "dp2 tp2 sp": {"dp": 2, "tp": 2, "sp": True, "micros": 2},
    "tp4 sp": {"tp": 4, "sp": True},
    "pp2 dp2 gpipe": {"pp": 2, "dp": 2, "micros": 4, "schedule": "gpipe"},
    "pp2 dp2 1f1b": {"pp": 2, "dp": 2, "micros": 4, "bucket_bytes": 2048},
    "pp2 dp2 interleaved": {
        **{"pp": 2, "dp": 2, "micros": 4, "schedule": "interleaved", "chunks": 2},
        **{"sizes": DEEP, "bucket_bytes": 2048},
    },
    "pp2 dp2 zb-h1": {"pp": 2, "dp": 2, "micros": 4, "schedule": "zb-h1"},
    "pp2 dp2 terapipe": {"pp": 2, "dp": 2, "micros": 2, "schedule": "terapipe", "slices": (6, 1, 9)},
    "pp2 dp2 tp2 sp": {"pp": 2, "dp": 2, "tp": 2, "sp": True, "micros": 2, "bucket_bytes": 2048},
    "pp3 a stage without a block": {"pp": 3, "dp": 2, "micros": 2, "blocks": (1, 0, 1), "adafactor": True},
    "pp2 dp4 a tied table of two rows": {"pp": 2, "dp": 4, "sizes": TWO_ROWS, "batch": 8},
    "dp4 tp2 slabs of four and three rows": {"dp": 4, "tp": 2, "sizes": SEVEN_ROWS, "batch": 8},
    "dp4 tp2 the same of a tied table": {"dp": 4, "tp": 2, "sizes": SEVEN_ROWS, "batch": 8},
    "pp4 five layers": {"pp": 4, "dp": 2, "micros": 4, "blocks": (2, 1, 1, 1), "sizes": replace(SIZES, layers=5)},
}
"""Name -> how to train: every axis, and every schedule that drains; those with buckets send while backward goes on."""

EXTRAS: list[dict[str, Any]] = [
    {},
    {"adafactor": True},
    {"sgd": True, "padded": True},
    {"recompute": ("blocks.*",)},
    {"recompute": ("blocks.*.mlp", "blocks.0", "table"), "documents": True},
    {"scaling": "blocks"},
    {"scaling": "loss", "clip": 0.0},
]
"""What may be beside it; each is some layout's."""


def how_of(name: str, place: int, zero: int) -> dict[str, Any]:
    """A layout at a stage, with something beside it, and with more or fewer units on their way."""
    how = {**LAYOUTS[name], "zero": zero, "prefetch": (1, 0, 3)[place % 3], "tied": place % 2 == 0 or "tied" in name}
    extras = EXTRAS[(place + zero) % len(EXTRAS)]
    if "adafactor" in how:
        extras = {key: value for key, value in extras.items() if key != "sgd"}
    return {**how, **extras, "steps": 2}


# ---------------------------------------------------------------------------------------------------- bits of one stage


def bits(found: Found) -> dict[str, bytes]:
    """All tensors of a run as bytes; not norms, whose squares are added up share by share."""
    return {
        f"{kind} {name}": np.ascontiguousarray(array).tobytes()
        for kind, of in found.items()
        if kind != "norms"
        for name, array in of.items()
    }


def same_bits(one: Found, other: Found, what: str) -> None:
    mine, theirs = bits(one), bits(other)
    assert mine.keys() == theirs.keys(), what
    different = [name for name in mine if mine[name] != theirs[name]]
    assert not different, f"{what}: {len(different)} of {len(mine)} differ, first {different[0]}"


def stages_have_the_same_bits(world: World, tied: bool = False, **how: Any) -> None:
    """T23.1 as the project decides: without clipping 0 = 1 and 2 = 3, and with one micro-batch all four.

    Adafactor adds up statistics of cut tensors share by share, so only stages that cut have its bits in common.
    """
    how["sizes"] = replace(how.get("sizes", SIZES), tied=tied)
    with mode(world, deterministic=True):
        runs = [train(world, clip=0.0, zero=zero, steps=3, **how) for zero in range(4)]
    if world.rank:
        return
    if not how.get("adafactor"):
        same_bits(runs[0], runs[1], "stages 0 and 1")
    same_bits(runs[2], runs[3], "stages 2 and 3")
    if how.get("micros", 1) == 1:
        same_bits(runs[1], runs[2], "stages 1 and 2")


def nothing_depends_on_messages(world: World, tied: bool = False, **how: Any) -> None:
    """The size of buckets, their overlap with backward, and prefetch change no bit of stages 2 and 3."""
    how["sizes"] = replace(SIZES, tied=tied)
    with mode(world, deterministic=True):
        wanted = train(world, zero=2, steps=2, **how)
        for more in ({"bucket_bytes": 1}, {"bucket_bytes": 4000}, {"bucket_bytes": 1 << 30}):
            same_bits(train(world, zero=2, steps=2, **how, **more), wanted, str(more))
        for ahead in (0, 1, 3, 1000):
            same_bits(train(world, zero=3, steps=2, prefetch=ahead, **how), wanted, f"prefetch {ahead}")


def a_skipped_step_changes_nothing(world: World, micros: int = 1, **axes: int) -> None:
    """C18, C68: a scale that is too large lets the first steps overflow, which are skipped.

    Gradients of several micro-batches are rounded to halves once in stages 0 and 1, each by itself in 2 and 3, whose
    sum may be larger.
    """
    how = {"dtype": "float16", "scaling": "loss", "scale": 2.0**21, "clip": 0.0, "micros": micros, **axes}
    with mode(world, deterministic=True):
        runs = [train(world, zero=zero, steps=6, **how) for zero in range(4)]
    if world.rank:
        return
    for run in runs:
        assert 0 < np.isnan(run["norms"]["norm"]).sum() < 6
    same_bits(runs[0], runs[1], "stages 0 and 1")
    same_bits(runs[2], runs[3], "stages 2 and 3")
    if micros == 1:
        same_bits(runs[1], runs[2], "stages 1 and 2")


# ----------------------------------------------------------------------------------------------- parameters of any size

ROWS, WIDTH = 48, 13
SMALL = dict(zip(("one", "seven", "thirteen", "many"), (1, 7, 13, 1001), strict=True))


@dataclass(frozen=True)
class Numbers:
    """Rows of numbers, each with a target; `odd` says which of two branches a row takes."""

    inputs: np.ndarray
    targets: np.ndarray
    odd: np.ndarray

    @property
    def count(self) -> int:
        return len(self.inputs)

    def split(self, parts: int) -> list[Numbers]:
        cut = (np.array_split(array, parts) for array in (self.inputs, self.targets, self.odd))
        return [Numbers(*piece) for piece in zip(*cut, strict=True)]

    def share(self, rank: int, ranks: int) -> Numbers:
        """Neighbouring rows, so that some ranks may have rows of one branch only."""
        first, last = (len(self.inputs) * (rank + end) // ranks for end in (0, 1))
        return Numbers(self.inputs[first:last], self.targets[first:last], self.odd[first:last])


def numbers_of(step: int) -> Numbers:
    """A global batch: its last third takes the other branch."""
    draw = np.random.default_rng(step)
    return Numbers(draw.standard_normal((ROWS, WIDTH)), draw.standard_normal(ROWS), np.arange(ROWS) >= ROWS * 2 // 3)


class Branches(Module):
    """Two matrices, of which a row uses one, and vectors of odd lengths."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.even, self.other = (
            Parameter(f"{name}.{which}", (WIDTH, 7), init=initial.fan_in(), decay=True) for which in ("even", "other")
        )
        self.vectors = {
            which: Parameter(f"{name}.{which}", (length,), init=initial.fan_in()) for which, length in SMALL.items()
        }
        self.one, self.seven, self.thirteen, self.many = self.vectors.values()

    def forward(self, x: Tensor, odd: np.ndarray) -> Tensor:
        x = x + self.thirteen
        ways = (self.even, np.flatnonzero(~odd)), (self.other, np.flatnonzero(odd))
        parts = [x[rows] @ weight for weight, rows in ways if rows.size]
        h = ops.tanh((ops.concat(parts, 0) if len(parts) > 1 else parts[0]) + self.seven)
        wave = ops.sum(ops.sin(self.many)) * 0.01 + ops.sum(self.many * self.many) * 0.001
        return h * self.one + wave


class Odd(Module):
    """A model of one stage whose parameters nothing divides."""

    def __init__(self, mesh: Mesh, zero: int, prefetch: int, dtype: Any = np.float64) -> None:
        super().__init__("odd")
        self.norm = LayerNorm("norm", WIDTH)
        self.branches = Branches("branches")
        self.up = Linear("up", 7, 256, init=initial.fan_in())
        self.down = Linear("down", 256, 1, init=initial.fan_in())
        self.materialize(mesh, 3, dtype, zero=zero)
        gather_units(self, mesh, prefetch)

    def forward(self, batch: Numbers) -> Tensor:
        x = self.norm(Tensor(batch.inputs.astype(self.like.dtype)))
        order = np.argsort(batch.odd, kind="stable")
        y = self.down(ops.tanh(self.up(self.branches(x, batch.odd))))
        miss = ops.reshape(y, (len(order),)) - batch.targets[order].astype(self.like.dtype)
        return ops.sum(miss * miss)


class Run:
    """`Odd` on the ranks of a world, and what it is trained by."""

    def __init__(
        self,
        world: World,
        zero: int = 0,
        *,
        micros: int = 1,
        method: str = "adamw",
        bucket_bytes: int = 1 << 20,
        overlap: bool = False,
        prefetch: int = 1,
        clip: float = 0.0,
    ) -> None:
        self.world, self.mesh = world, Mesh(world)
        self.model = Odd(self.mesh, zero, prefetch)
        self.optimizer = self._method(method)
        reducer = RowReducer(self.model, self.mesh, bucket_bytes, overlap=overlap) if zero else None
        rows = complete("1f1b", ranks=1, microbatches=micros)
        self.executor = Executor(self.model, self.optimizer, self.mesh, rows, reducer=reducer, clip=clip)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def _method(self, name: str) -> Optimizer:
        shares = self.model.shares()
        if name == "sgd":
            return Sgd(shares, lr=0.01, momentum=0.9)
        if name == "adafactor":
            return Adafactor(shares, mesh=self.mesh, lr=0.02, beta1=0.5)
        return AdamW(shares, lr=0.01, eps=1e-6, weight_decay=0.1)

    def steps(self, first: int, last: int) -> Run:
        for step in range(first, last):
            self.losses.append(self.executor.step(numbers_of(step).share(self.mesh.dp.rank, self.mesh.dp.size)))
            assert self.executor.report is not None
            self.norms.append(self.executor.report.grad_norm)
        return self

    def found(self) -> Found:
        """Whole tensors, on every rank."""
        shares = self.model.shares()
        return {
            "losses": {"loss": np.array(self.losses)},
            "norms": {"norm": np.array(self.norms)},
            "gradients": whole(self.world, self.mesh, shares, [p.grad for p in shares]),
            "weights": whole(self.world, self.mesh, shares, [p.master for p in shares]),
            **states(self.world, self.mesh, self.optimizer),
        }

    def slabs(self) -> Any:
        return checkpoint.slabs_of(self.model.shares(), self.optimizer.state_tensors(), self.mesh)

    def save(self, folder: Path, step: int) -> Path:
        return checkpoint.save(folder, step, self.slabs(), {"updates": self.optimizer.updates}, self.world)

    def load(self, path: Path) -> Run:
        self.optimizer.updates = checkpoint.load(path, self.slabs(), self.world)["updates"]
        for flat in self.model.flats:
            flat.refresh()
        self.executor.reducer.updated()
        return self


@functools.cache
def odd_alone(method: str, clip: float) -> Found:
    return Run(World(Alone(), "none"), method=method, clip=clip).steps(0, 3).found()


def odd_parameters(world: World, *, micros: int = 1, method: str = "adamw", clip: float = 0.0, **how: Any) -> None:
    """C54, T23.5: uneven and empty shares, of tensors that are cut and of those that stay whole; a matrix that the
    data of some ranks do not use.  All stages equal one rank, and have the bits of each other as decided.
    """
    with mode(world, deterministic=True):
        runs = [
            Run(world, zero, micros=micros, method=method, clip=clip, **(how if zero else {})).steps(0, 3).found()
            for zero in range(4)
        ]
    for zero, run in enumerate(runs):
        for kind, tensors in odd_alone(method, clip).items():
            worst = compare(run[kind], tensors)[0]
            assert worst.ok, f"stage {zero}, {kind}: {worst}"
    if clip:
        return
    if method != "adafactor":
        same_bits(runs[0], runs[1], "stages 0 and 1")
    same_bits(runs[2], runs[3], "stages 2 and 3")
    if micros == 1:
        same_bits(runs[1], runs[2], "stages 1 and 2")


def a_matrix_that_nobody_uses(world: World, zero: int) -> None:
    """In the second step no row takes the other branch: its gradient is zero then, not that of the step before."""
    norms = []
    for stage in (0, zero):
        run = Run(world, stage, micros=2).steps(0, 1)
        batch = numbers_of(1).share(run.mesh.dp.rank, run.mesh.dp.size)
        run.executor.step(replace(batch, odd=np.zeros_like(batch.odd)))
        gradients = run.found()["gradients"]
        assert gradients["branches.even"].any()
        assert not gradients["branches.other"].any()
        squares = sum(float((array**2).sum()) for array in gradients.values())
        assert run.executor.report is not None
        norms += [run.executor.report.grad_norm, squares**0.5]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-12)


def a_step_that_broke_off(world: World, zero: int, call: int, overlap: bool = False) -> None:
    """An error on all ranks in the middle of backward leaves nothing behind: the step is made again, and the next."""
    calls: list[int] = []

    def run(breaks: bool) -> list[float]:
        here = Run(world, zero, micros=2, overlap=overlap).steps(0, 1)
        calls.clear()
        if breaks:
            before = here.executor.reducer.add
            here.executor.reducer.add = lambda p: _count(calls, call) or before(p)  # type: ignore[method-assign]
            with pytest.raises(ArithmeticError):
                here.steps(1, 2)
            here.executor.reducer.add = before  # type: ignore[method-assign]
        norms = []
        for step in (1, 2):
            here.steps(step, step + 1)
            assert here.executor.report is not None
            norms += [here.executor.report.loss, here.executor.report.grad_norm]
        return norms

    assert run(True) == run(False)


def _count(calls: list[int], last: int) -> None:
    calls.append(1)
    if len(calls) == last:
        raise ArithmeticError("broke off")


class Unused(Module):
    """A part that no pass comes to, between two that work."""

    def __init__(self, mesh: Mesh, zero: int) -> None:
        super().__init__("unused")
        self.first = Linear("first", 4, 4)
        self.second = Linear("second", 4, 4)
        self.third = Linear("third", 4, 4)
        self.materialize(mesh, 0, np.float64, zero=zero)
        gather_units(self, mesh)

    def forward(self, batch: Any) -> Tensor:
        return ops.sum(self.third(self.first(Tensor(batch.inputs))))


class _Rows:
    """Numbers, one row a sample."""

    count = rows = 4

    def __init__(self, inputs: np.ndarray) -> None:
        self.inputs = inputs

    def split(self, micros: int) -> list[_Rows]:
        return [self] * micros


def a_part_that_no_pass_comes_to(world: World, zero: int) -> None:
    """Its weights were asked for ahead, and are let go before the update; its gradient is zero."""
    found = []
    for stage in (0, zero):
        mesh = Mesh(world)
        model = Unused(mesh, stage)
        executor = Executor(model, AdamW(model.shares(), lr=0.1), mesh, complete("1f1b", ranks=1, microbatches=1))
        rows = np.random.default_rng(mesh.dp.rank).normal(size=(4, 4))
        found.append([executor.step(_Rows(rows)) for _ in range(3)])
        assert model.resident is None or model.resident.now == 0
    np.testing.assert_allclose(found[1], found[0], rtol=1e-10)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def same_state(mine: Found, theirs: Found, exact: bool = True) -> None:
    """Weights and what the optimizer keeps are the same, to the last bit or by the rule of `debug.compare`."""
    for kind in mine.keys() - {"losses", "norms", "gradients"}:
        assert mine[kind].keys() == theirs[kind].keys()
        if exact:
            assert [name for name, array in mine[kind].items() if (array != theirs[kind][name]).any()] == [], kind
        else:
            worst = compare(mine[kind], theirs[kind])[0]
            assert worst.ok, f"{kind}: {worst}"


def go_on(world: World, run: str, zero: int, start: int, stop: int, method: str = "adamw") -> tuple[Found, Found]:
    """From a checkpoint of `start` steps, if they are not 0, to one of `stop`: what it held, and what came of it."""
    here = Run(world, zero, method=method)
    if start:
        here.load(folder_of(run, start))
    loaded = here.found()
    here.steps(start, stop).save(Path(run), stop)
    return loaded, here.found()


# On four ranks, for real MPI.


def check(name: str, function: Callable[..., None], *args: Any, **how: Any) -> Callable[[World], None]:
    """A check of the world under a name."""

    def run(world: World) -> None:
        function(world, *args, **how)

    run.__name__ = name
    return run


def every_stage(world: World, stages: Sequence[int] = STAGES, **how: Any) -> None:
    """Each stage of ZeRO in a layout is the training run of one rank."""
    for zero in stages:
        equals_one_rank(world, zero=zero, **how)


CHECKS = [
    check("data_ranks", every_stage, dp=4, micros=2, bucket_bytes=2048),
    check("tensor_ranks", every_stage, dp=2, tp=2, sp=True, tied=True),
    check("context_ranks", every_stage, dp=2, cp=2, adafactor=True),
    check("a_pipeline", every_stage, pp=2, dp=2, micros=4, schedule="zb-h1", tied=True, bucket_bytes=2048),
    check("bits", stages_have_the_same_bits, dp=4, bucket_bytes=4096),
    check("bits_with_micro_batches", stages_have_the_same_bits, dp=4, micros=3),
    check("a_skipped_step", a_skipped_step_changes_nothing, dp=4, micros=2),
    check("odd_sizes", odd_parameters, micros=2, bucket_bytes=256, overlap=True),
    check("rows_above_the_eager_limit", every_stage, dp=4, sizes=LARGE, steps=1, batch=8, bucket_bytes=1 << 18),
]
