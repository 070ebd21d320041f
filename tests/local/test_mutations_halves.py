"""Half precision does what it must, and bugs that only rounding to halves can show are found.

Each oracle holds for the library as it is, and none of the bugs of mutations_halves.py passes the one that it names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the mutations are
import checks_layouts as checks
from mutations_halves import HALVES, OfHalves

from mpitrain import checkpoint
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.ops.branch import leave_branch
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.events import Event, listen
from mpitrain.models.gpt import GPT
from mpitrain.optim.adam import AdamW
from mpitrain.optim.scaler import BlockScaler, LossScaler
from mpitrain.optim.sgd import Sgd
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

SIZES = replace(checks.SIZES, layers=1, dropout=0.0)


class Run:
    """A small GPT of halves, of which each rank holds what the stage of ZeRO says."""

    def __init__(
        self, *, dtype: Any = np.float16, micros: int = 1, method: Any = AdamW, lr: float = 1e-3, zero: int = 0
    ) -> None:
        self.mesh = Mesh(world())
        self.model = GPT(SIZES, self.mesh, seed=3, dtype=dtype, zero=zero)
        self.parameters = self.model.shares()
        self.optimizer = method(self.parameters, lr=lr)
        scaler = LossScaler(1024.0, window=2, hysteresis=1) if dtype == np.float16 else None
        rows = complete("1f1b", ranks=1, microbatches=micros)
        self.executor = Executor(self.model, self.optimizer, self.mesh, rows, scaler=scaler)

    def train(self, first: int, last: int) -> Run:
        """Steps from the first to before the last."""
        for rows in checks.numbers(SIZES).batches(checks.BATCH, self.mesh.dp.rank, self.mesh.dp.size, first, last):
            self.executor.step(rows)
        return self

    def update_by(self, gradient: float) -> list[np.ndarray]:
        """What one update with the same gradient everywhere adds to the masters."""
        before = [p.master.copy() for p in self.parameters]
        for p in self.parameters:
            p.grad[...], p.touched = gradient, True
        self.optimizer.step()
        return [p.master - old for p, old in zip(self.parameters, before, strict=True)]


def small_updates() -> None:
    """T21.5: masters go where float64 goes, in steps that a half does not feel; and the model computes with them."""

    def moved(dtype: Any) -> tuple[Run, list[np.ndarray]]:
        run = Run(dtype=dtype, method=Sgd, lr=1e-3)
        before = [p.master.copy() for p in run.parameters]
        run.train(0, 4)
        return run, [p.master - old for p, old in zip(run.parameters, before, strict=True)]

    def main() -> None:
        (run, mine), (_, exact) = moved(np.float16), moved(np.float64)
        largest = max(np.linalg.norm(each) for each in exact)
        for p, found, wanted in zip(run.parameters, mine, exact, strict=True):
            assert np.linalg.norm(found - wanted) <= 0.05 * max(np.linalg.norm(wanted), 0.01 * largest), p.name
            np.testing.assert_array_equal(p.data, p.master.astype(np.float16), err_msg=p.name)

    LocalWorld(1).run(main)


def resume() -> None:
    """C68: a run that is saved in the middle and goes on is the same run, scale and all."""

    def slabs(run: Run) -> Any:
        return checkpoint.slabs_of(run.parameters, run.optimizer.state_tensors(), run.mesh)

    def main(folder: Path) -> None:
        straight = Run(lr=1e-5).train(0, 3)
        scalars = {"updates": straight.optimizer.updates, "scaler": straight.executor.scaler.state_dict()}
        path = checkpoint.save(folder, 3, slabs(straight), scalars, straight.mesh.world)
        straight.train(3, 6)
        again = Run(lr=1e-5)
        saved = checkpoint.load(path, slabs(again), again.mesh.world)
        for flat in again.model.flats:
            flat.refresh()
        again.optimizer.updates = saved["updates"]
        again.executor.scaler.load_state(saved["scaler"])
        again.train(3, 6)
        assert again.executor.scaler.state_dict() == straight.executor.scaler.state_dict()
        for p, other in zip(again.parameters, straight.parameters, strict=True):
            np.testing.assert_array_equal(p.master, other.master, err_msg=p.name)

    with TemporaryDirectory() as folder:
        LocalWorld(1).run(lambda: main(Path(folder)))


def micro_batches() -> None:
    """T21.6: the gradient of eight micro-batches is the float32 sum of the eight."""

    def gradients(apart: bool) -> list[np.ndarray]:
        run = Run(micros=8)
        sums = [np.zeros_like(p.grad) for p in run.parameters]

        def note(event: Event) -> None:
            kind, begins = (event.info["action"].kind, event.phase == "begin") if event.kind == "action" else ("", 0)
            if apart and kind == "B" and begins:
                run.model.start_step()
            if (kind == "B" and apart and not begins) or (kind == "REDUCE" and begins and not apart):
                for total, p in zip(sums, run.parameters, strict=True):
                    total += p.grad if p.touched else 0.0

        with listen(note):
            run.train(0, 1)
        return sums

    def main() -> None:
        for together, apart in zip(gradients(False), gradients(True), strict=True):
            np.testing.assert_allclose(together, apart, rtol=0, atol=3e-6 * np.abs(apart).max())

    LocalWorld(1).run(main)


def sums_over_ranks() -> None:
    """C20: 20000 from each of four ranks is 80000, which no half can hold."""

    def main() -> None:
        run = Run()
        for p in run.parameters:
            p.grad[...], p.touched = 20000.0, True
        run.executor.reducer.finish()
        for p in run.parameters:
            np.testing.assert_array_equal(p.grad, 80000.0, err_msg=p.name)

    LocalWorld(4).run(main)


def shares() -> None:
    """T21.6, C20 with ZeRO: shares add up micro-batches and ranks in float32, of gradients that travel as halves."""

    def main() -> None:
        run = Run(micros=6, zero=2)
        brought: list[np.ndarray] = []

        def note(event: Event) -> None:
            if event.kind == "message" and event.phase == "end" and event.name == "reduce_scatter":
                assert event.info["array"].dtype == np.float16
                brought.append(event.info["result"].copy())
            elif event.kind == "action" and event.info["action"].kind == "STEP" and event.phase == "begin":
                np.testing.assert_array_equal(run.model.flats[0].grads, functools.reduce(np.add, brought))

        with listen(note):
            run.train(0, 1)
        assert len(brought) == 6
        for zero in (1, 2):
            run = Run(zero=zero)
            for p in run.model.parameters():
                p.accumulate(np.full(p.shape, 20000.0, np.float32))
            if zero == 2:
                run.executor.reducer.walked(0)
            run.executor.reducer.finish()
            for p in run.parameters:
                np.testing.assert_array_equal(p.grad, 80000.0, err_msg=f"{p.name}, stage {zero}")

    LocalWorld(4).run(main)


def norms() -> None:
    """C12: a row of 96 equal halves, and one far from zero; eps that no half can hold."""
    far = np.random.default_rng(3).normal(300.0, 4.0, (5, 96)).astype(np.float16)
    for x in (np.full((5, 96), 7.25, np.float16), far):
        for eps in (1e-12, 1e-5):
            weight, bias = (Tensor(np.full(96, value, np.float16), requires_grad=True) for value in (1.5, 0.25))
            rows = Tensor(x, requires_grad=True)
            with Tape() as tape:
                y = ops.layer_norm(rows, weight, bias, eps)
            z = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
            wanted = z / np.sqrt((z * z).mean(-1, keepdims=True) + eps) * 1.5 + 0.25
            np.testing.assert_allclose(y.data, wanted, rtol=2e-3, atol=2e-3)
            if x is not far:
                np.testing.assert_array_equal(y.data, np.float16(0.25))
            tape.run_backward([(y, np.ones_like(y.data))])
            for t in (rows, weight, bias):
                assert np.isfinite(tape.grads[t]).all()


def no_gradient() -> None:
    """1e-8 is 0 in a half; a weight whose gradient is 0 stays where it is."""

    def main() -> None:
        for moved in Run(method=lambda parameters, lr: AdamW(parameters, lr=lr, weight_decay=0.0)).update_by(0.0):
            np.testing.assert_array_equal(moved, 0.0)

    LocalWorld(1).run(main)


def tiny_gradients() -> None:
    """T21.1: AdamW makes a whole step of a gradient that is 0 in a half, as its square is."""

    def main() -> None:
        run = Run(method=lambda parameters, lr: AdamW(parameters, lr=lr, weight_decay=0.0, eps=1e-12))
        for _ in range(3):
            for moved in run.update_by(2.5e-8):
                np.testing.assert_allclose(moved, -1e-3, rtol=1e-3, atol=1e-6)

    LocalWorld(1).run(main)


def branches() -> None:
    """T22.3: entries of a branch's gradient that overflow are dropped, the others keep their value."""
    y = Tensor(np.zeros(6, np.float16), requires_grad=True)
    with Tape() as tape:
        x = leave_branch(y, BlockScaler(["blocks.0.mlp."], start=4096.0), 0, np.float32)
    seed = np.array([1.0, -20.0, np.inf, 0.0, np.nan, 15.0], np.float32)
    tape.run_backward([(x, seed)])
    np.testing.assert_array_equal(tape.grads[y], [4096.0, 0.0, 0.0, 0.0, 0.0, 61440.0])


def overflow_of_one_rank() -> None:
    """C18: infinity on one of three ranks, in a parameter that it does not count: nobody updates."""

    def main() -> None:
        run = Run()
        finish = run.executor.reducer.finish

        def broken() -> None:
            finish()
            if run.mesh.world.rank == 2:
                run.parameters[-1].grad.reshape(-1)[3] = -np.inf

        run.executor.reducer.finish = broken
        run.train(0, 1)
        assert run.executor.report.skipped
        assert (run.optimizer.updates, run.executor.scaler.scale) == (0, 512.0)

    LocalWorld(3).run(main)


ORACLES: dict[str, Callable[[], None]] = {
    "small updates": small_updates,
    "resume": resume,
    "micro-batches": micro_batches,
    "sums over ranks": sums_over_ranks,
    "shares": shares,
    "norms": norms,
    "no gradient": no_gradient,
    "tiny gradients": tiny_gradients,
    "branches": branches,
    "overflow of one rank": overflow_of_one_rank,
}


@pytest.mark.parametrize("oracle", ORACLES)
def test_half_precision_does_what_it_must(oracle: str) -> None:
    ORACLES[oracle]()


@pytest.mark.parametrize("mutation", HALVES, ids=lambda mutation: mutation.name)
def test_a_known_bug_of_half_precision_is_found(mutation: OfHalves) -> None:
    with mutation.patch(), pytest.raises(AssertionError):
        ORACLES[mutation.oracle]()


def test_every_oracle_has_a_bug_to_find() -> None:
    assert {mutation.oracle for mutation in HALVES} == set(ORACLES)
    assert len({mutation.name for mutation in HALVES}) == len(HALVES) >= 15
