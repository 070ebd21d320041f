"""Recomputation on ranks that are threads: the same bits on every layout, twice the messages of forward, no alarms."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_recompute as checks
from checks_layouts import SIZES, numbers
from mutations import MUTATIONS

from mpitrain.autograd import Tape, Tensor
from mpitrain.autograd.recompute import recomputing
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.debug.ledger import Ledger
from mpitrain.debug.states import StateChecker
from mpitrain.errors import ConfigError, GraphError, ScheduleError, StateError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT
from mpitrain.models.transformer import Block
from mpitrain.nn.module import mark_recompute
from mpitrain.optim.adam import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

QUICK = ["one_rank", "tp2_sp", "cp2_ring", "pp2_zb_h1", "pp2_interleaved", "pp2_terapipe", "pp2_2bw", "dp2_tp2_pp2"]


def some(names: Any) -> list[Any]:
    """These layouts; those that are not quick are slow."""
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


def run(layout: dict[str, Any], **how: Any) -> None:
    LocalWorld(checks.ranks_of(layout), timeout=60).run(lambda: checks.is_the_same_run(world(), **{**layout, **how}))


@pytest.mark.parametrize("name", some(checks.LAYOUTS))
def test_every_layout_gives_the_same_bits(name: str) -> None:
    """T19.1, C59: float64, dropout of a half; every block is recomputed and checked to be pure, under the check of
    states, which has nothing to say."""
    run(checks.LAYOUTS[name], states=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", checks.LAYOUTS)
@pytest.mark.parametrize(
    "recomputed", [["blocks.*.attention"], ["blocks.*.mlp"], ["blocks.*", "blocks.*.mlp"], ["*.1"]], ids=" ".join
)
def test_any_parts_may_be_marked(name: str, recomputed: list[str]) -> None:
    """Half of a block, one block of several, one in another."""
    run(checks.LAYOUTS[name], recomputed=recomputed, dtype=np.float32)


@pytest.mark.parametrize("recomputed", [(), ("blocks.*",)], ids=["plain", "recomputed"])
@pytest.mark.parametrize("sp", [False, True])
def test_a_layer_sends_six_times_instead_of_four(recomputed: tuple[str, ...], sp: bool) -> None:
    """T19.4: forward, again and backward two all-reduces each; with sequence parallelism each is two messages."""

    def main() -> Ledger:
        ledger = Ledger()
        with listen(ledger):
            checks.trained(world(), recomputed, tp=2, sp=sp, micros=1, steps=1)
        return ledger

    for ledger in LocalWorld(2).run(main):
        of_layer = ledger.by(lambda place: place.action, lambda place: place.path.startswith("blocks.1."))
        calls = {action: amount.calls for action, amount in of_layer.items()}
        each = 4 if sp else 2
        assert calls == {"F": each, "B": 2 * each if recomputed else each}


def test_a_pattern_may_name_a_block_of_another_stage() -> None:
    def main() -> list[str]:
        mesh = Mesh(world(), pp=2)
        model = GPT(checks.HALF, mesh)
        with pytest.raises(ConfigError, match=r"'blocks\.2'"):
            mark_recompute(model, ["blocks.1", "blocks.2"], mesh.pp.exchange)
        return mark_recompute(model, ["blocks.1"], mesh.pp.exchange)

    assert LocalWorld(2).run(main) == [[], ["blocks.1"]]


def test_dropout_of_another_stream_in_the_second_forward_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """C59."""
    inner = Block.forward

    def forward(self: Block, x: Tensor, this: Any) -> Tensor:
        if recomputing():
            this = this._replace(stream=this.stream._replace(step=this.stream.step + 1))
        return inner(self, x, this)

    monkeypatch.setattr(Block, "forward", forward)
    with pytest.raises(GraphError, match=r"blocks\.1 \(block\), called again in backward, gave other numbers"):
        checks.trained(World(Alone(), "none"), ["blocks.1"])


# ------------------------------------------------------------------------------------------------ the check of states

SEEN = [m for m in MUTATIONS if m.seen and not m.options and m.layout in ("tp2", "tp2,sp", "cp2")]
SHARP = ("copy has no backward", "all_reduce is left out after row-parallel layers")


@pytest.mark.parametrize(
    "mutation", [pytest.param(m, id=m.name, marks=() if m.name in SHARP else pytest.mark.slow) for m in SEEN]
)
def test_a_mistake_inside_is_told_as_without_recomputation(mutation: Any) -> None:
    axis, *sp = mutation.layout.split(",")
    layout = {axis[:2]: 2, "sp": bool(sp)}

    def main(recomputed: tuple[str, ...]) -> str:
        with pytest.raises(StateError) as caught:
            checks.trained(world(), recomputed, states=True, **layout)
        return str(caught.value)

    with mutation.patch():
        plain = LocalWorld(2).run(lambda: main(()))
        found = LocalWorld(2).run(lambda: main(("blocks.*",)))
    assert found == plain


def test_values_that_differ_between_ranks_only_the_second_time_are_found() -> None:
    class Odd(Block):
        def forward(self, x: Tensor, this: Any) -> Tensor:
            y = super().forward(x, this)
            return y * (1.0 + (recomputing() and self.attention.proj.axis.rank))

    def main() -> str:
        mesh = Mesh(world(), tp=2)
        model = GPT(replace(checks.HALF, dropout=0.0), mesh, dtype=np.float64)
        model.blocks[1].__class__ = Odd
        mark_recompute(model, ["blocks.*"])
        batch = next(iter(checks.numbers(checks.HALF).batches(4)))
        checker = StateChecker(model.parameters(), mesh)
        with listen(checker):
            checker.start(batch)
            with Tape() as tape:
                loss = model(batch)
            checker.finish(loss)
            checker.confirm()
            checker.start(batch)
            tape.run_backward([(loss, np.ones(()))])
            with pytest.raises(StateError) as caught:
                checker.confirm()
        return str(caught.value)

    first, second = LocalWorld(2).run(main)
    assert first == second
    assert "scale" in first
    assert "blocks.1" in first


@pytest.mark.parametrize("axis", ["dp", "cp", "tp"])
def test_who_begins_to_look_in_backward_raises_no_alarm(axis: str) -> None:
    """Nothing is known then of what goes into a second forward: of ranks with other tokens it is not the same."""

    def main() -> None:
        mesh = Mesh(world(), **{axis: 2})
        model = GPT(checks.HALF, mesh, dtype=np.float64)
        mark_recompute(model, ["blocks.0", "blocks.1.mlp", "norm"])
        rows = next(iter(checks.numbers(checks.HALF).batches(4, mesh.dp.rank, mesh.dp.size)))
        batch = rows.part(model.positions_here)
        with Tape() as tape:
            loss = model(batch)
        checker = StateChecker(model.parameters(), mesh)
        with listen(checker):
            checker.start(batch)
            tape.run_backward([(loss, np.ones(()))])
            checker.confirm()

    LocalWorld(2).run(main)


def test_ranks_that_mark_other_parts_are_refused_before_the_first_step():
    def main():
        mesh = Mesh(world(), pp=2, tp=2)
        model = GPT(SIZES, mesh, seed=3, dtype=np.float64)
        model.blocks[0].recompute = mesh.world.rank != 3  # of the second stage
        rows = complete("1f1b", ranks=2, microbatches=2)
        with pytest.raises(ScheduleError, match="rank 3 makes other parts of the model again"):
            Executor(model, AdamW(model.parameters()), mesh, rows)

    LocalWorld(4).run(main)


def test_a_function_that_is_not_pure_is_told_in_the_first_step():
    """C59: a mask that is drawn anew in the second forward."""

    def main():
        mesh = Mesh(world())
        model = GPT(SIZES, mesh, seed=3, dtype=np.float64)
        block, noise = model.blocks[1], np.random.default_rng(0)
        forward = block.forward
        block.forward = lambda x, this: forward(x, this) * noise.random(x.shape[-1])
        block.recompute = True
        executor = Executor(model, AdamW(model.parameters()), mesh, complete("1f1b", ranks=1, microbatches=1))
        with pytest.raises(GraphError, match=r"blocks\.1"):
            executor.step(next(numbers(SIZES).batches(8, 0, 1)))

    LocalWorld(1).run(main)
