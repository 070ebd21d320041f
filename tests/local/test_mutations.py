"""The proofs are sharp: every known bug of distributed training, put into the library, is found.

Found means: `mpitrain verify`'s judge says that the layout is not the same training run, or the check of states (rules
and digests) raises before a step is over.  And where nothing is wrong, neither says a word.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the mutations are
import mutations_experts  # noqa: F401 - registers its own
import mutations_memory  # noqa: F401
import mutations_offload  # noqa: F401
import mutations_optimizer  # noqa: F401
import mutations_pipeline
import mutations_powersgd  # noqa: F401
import mutations_zero  # noqa: F401
from checks_layouts import with_documents, with_padding
from mutations import MUTATIONS, Mutation
from often import some

from mpitrain.assemble import build_executor, build_model, build_optimizer
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import Config
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.debug.capture import Record
from mpitrain.debug.states.around import checking_states
from mpitrain.errors import ScheduleError, StateError
from mpitrain.pipeline.action import Row, Schedule
from mpitrain.pipeline.check import check
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_messages, with_update
from mpitrain.pipeline.schedules import one_f_one_b
from mpitrain.verify.here import record_on, replay
from mpitrain.verify.judge import judge
from mpitrain.verify.layouts import AXES, WAYS, Layout, parse
from mpitrain.verify.sweep import case_of, prove
from mpitrain.verify.sweep import train as train_case

STEPS = 3
BASE: dict[str, Any] = {
    "layers": 2, "width": 16, "heads": 4, "seq_len": 16, "batch": 8, "lr": 1e-3, "steps": STEPS, "dropout": 0.0
}  # fmt: skip


def short_of_targets(batch: Batch) -> Batch:
    """The same batch with other numbers of valid targets in its rows."""
    keep = np.arange(batch.targets.shape[1]) < 2 + 3 * batch.places[:, None]
    return replace(batch, targets=np.where(keep, batch.targets, -100))


CHANGES = {"padded": short_of_targets, "documents": with_documents, "empty_rows": with_padding}
"""Options of a mutation that give it other batches."""

OVERFLOWS = (2, 3)
"""The steps in which a gradient is too large for its square, where a mutation asks for it."""


def overflowing(executor: Executor, name: str) -> None:
    """Let the last element of a parameter's gradient be too large in some steps, once it is summed over ranks."""
    finish, mesh = executor.reducer.finish, executor.mesh
    held = [p for p in executor.model.parameters() if p.name == name]
    ends = [p for p in held if all(part.stop == n for part, n in zip(p.rectangle, p.full_shape, strict=True))]

    def broken() -> None:
        if executor.steps + 1 in OVERFLOWS:
            for p in ends:
                p.settle()
                p.grad.reshape(-1)[-1] = 2.4e154 / (mesh.dp.size * mesh.cp.size)
        finish()

    executor.reducer.finish = broken  # type: ignore[method-assign]


def train(layout: Layout, options: dict[str, Any]) -> float:
    """Some steps of a small GPT on the ranks of the surrounding world; the validation loss after them.

    One rank without an axis judges: it makes nothing again.
    """
    options = dict(options)
    spread, overflow = (options.pop(name, None) for name in ("spread", "overflow"))
    changes = [change for name, change in CHANGES.items() if options.pop(name, None)]
    again = next((way for way in layout.ways if way in ("full", "none")), None)
    if again is not None:
        options["recompute"] = again
    if not layout.axes:
        options.pop("recompute_modules", None)
    sizes = {axis: layout.sizes.get(axis, 1) for axis in AXES}
    kind = next((way for way in layout.ways if way in ("ulysses", "rsa")), "ring")
    if layout.schedule:
        options["schedule"] = layout.schedule
    if layout.sizes.get("pp", 1) == 1:
        options.pop("stage_layers", None)
    ways: dict[str, Any] = {"sequence_parallel": "sp" in layout.ways, "expert_overlap": "overlap" in layout.ways}
    ways["zero"] = next((int(way[-1]) for way in layout.ways if WAYS[way].group == "ZeRO"), 0)
    config = Config(**{**BASE, **options}, **sizes, **ways, cp_attention=kind)
    mesh = Mesh(world(), pp=config.pp, dp=config.dp, ep=config.ep, cp=config.cp, tp=config.tp)
    text = np.random.default_rng(7).integers(14, size=2000, dtype=np.uint16)
    corpus = Corpus(text[:1500], text[1500:], 14, "tokens", "random numbers", (), (), "")
    tokens = Tokens(corpus, config.seq_len, config.seed)
    model = build_model(config, corpus, mesh)
    if spread:
        model.branch_scales.scales[:] = [2.0 ** (5 + 2 * number) for number in range(len(model.branch_scales.scales))]
    steps = config.steps or STEPS
    executor = build_executor(config, model, build_optimizer(config, model, mesh), mesh, steps)
    if overflow:
        overflowing(executor, overflow)
    batches = []
    for batch in tokens.batches(config.batch, mesh.dp.rank, mesh.dp.size, 0, steps):
        for change in changes:
            batch = change(batch)
        batches.append(batch.part(model.positions_here))
    rows = 4 * mesh.dp.size
    try:
        for row in [batches] if layout.is_stale else [[batch] for batch in batches]:
            executor.run(row)
        return executor.evaluate(tokens.validation(rows, mesh.dp.rank, mesh.dp.size, model.positions_here))
    finally:
        if model.elsewhere is not None:
            model.elsewhere.home.close()


def alone(layout: Layout, options: dict[str, Any], kept: list[list[Record]]) -> tuple[list[Record], float]:
    """One rank, or its replay of what a pipeline has recorded that never drains; and the validation loss."""
    if not layout.is_stale:
        return plain(**options)
    losses: list[float] = []
    records = replay(layout.schedule, kept, lambda: losses.append(train(Layout(()), options)))
    return records, losses[0]


@functools.cache  # many mutations share their options
def plain(**options: Any) -> tuple[list[Record], float]:
    """One rank without a bug; its arrays cannot be written to, so whoever asks gets the same."""
    losses: list[float] = []
    (records,) = recorded(1, lambda: losses.append(train(Layout(()), options)))
    for record in records:
        for array in record.arrays.values():
            array.setflags(write=False)
    return records, losses[0]


def checked(work: Callable[[], Any]) -> None:
    """Do something under a check of states."""
    with checking_states(world()):
        work()


def recorded(ranks: int, work: Callable[[], Any]) -> list[list[Record]]:
    kept: list[list[Record]] = [[] for _ in range(ranks)]
    record_on(kept, work)
    return kept


MISTAKES = (AttributeError, KeyError, NameError, TypeError)
"""What a mutation raises that does not fit the library any more: that is no bug that anybody would have found."""


def found_by(mutation: Mutation, states: bool = True) -> dict[str, str]:
    """Who finds it, and what they say; `states`: whether the check of states is asked, too."""
    layout = parse(mutation.layout)
    losses: list[float] = []
    found = {}
    kept: list[list[Record]] = [[] for _ in range(layout.ranks)]
    raised = ""
    with mutation.patch():
        try:
            record_on(kept, lambda: losses.append(train(layout, mutation.options)))
        except MISTAKES:
            raise
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    reference, loss = alone(layout, mutation.options, kept)
    verdict = judge(reference, kept)
    if not verdict.ok:
        found["verify"] = raised or str(verdict.first)
    elif losses != pytest.approx([loss] * layout.ranks, rel=1e-10):
        found["evaluation"] = f"losses {losses}, not {loss}"
    if not states:
        return found
    with mutation.patch(), contextlib.suppress(Exception):
        try:
            recorded(layout.ranks, lambda: checked(lambda: train(layout, mutation.options)))
        except StateError as error:
            found["states"] = str(error)
    return found


@pytest.mark.parametrize("mutation", some(MUTATIONS, 6), ids=lambda mutation: mutation.name)
def test_a_known_bug_is_found(mutation: Mutation) -> None:
    found = found_by(mutation, states=mutation.seen)
    assert mutation.by in found
    assert "states" in found or not mutation.seen


def test_there_are_enough_of_them_and_none_twice() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 280


OPTIONS = ({}, {"dropout": 0.3, "padded": True, "microbatches": 2}, {"kv_heads": 2, "tied": True})


SAVING = ("loss_scaling", "lr_groups", "recompute_modules", "experts", "offload")


def saves(mutation: Mutation) -> bool:
    """Whether it is about memory, scales, groups, experts or offload, where its own options are to be proven sound."""
    again = {"full", "none"}.intersection(mutation.layout.split(","))
    return bool(again) or not mutation.options.keys().isdisjoint(SAVING)


SOUND = {repr((m.layout, sorted(m.options.items()))): m for m in MUTATIONS if saves(m)}


@pytest.mark.parametrize("mutation", some(SOUND.values(), 6), ids=[*SOUND])
def test_nobody_complains_without_the_bug(mutation: Mutation) -> None:
    layout = parse(mutation.layout)
    losses: list[float] = []
    kept = recorded(layout.ranks, lambda: losses.append(train(layout, mutation.options)))
    reference, loss = alone(layout, mutation.options, kept)
    verdict = judge(reference, kept)
    assert verdict.ok, str(verdict.first)
    assert losses == pytest.approx([loss] * layout.ranks, rel=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "padded", "tied"])
@pytest.mark.parametrize("layout", some(sorted({mutation.layout for mutation in MUTATIONS if not saves(mutation)}), 6))
def test_without_a_bug_nobody_complains(layout: str, options: dict[str, Any]) -> None:
    ran = parse(layout)
    if "ulysses" in layout and options.get("kv_heads"):
        options = {**options, "kv_heads": 4}
    if "interleaved" in layout:
        options = {**options, "microbatches": 2, "layers": 4}
    if "2bw" in layout:
        options = {**options, "microbatches": 2}
    elif ran.is_stale:
        options = {**options, "microbatches": 1, "clip": 0.0, "tied": False}
    losses: list[float] = []
    kept = recorded(ran.ranks, lambda: checked(lambda: losses.append(train(ran, options))))
    reference, loss = alone(ran, options, kept)
    verdict = judge(reference, kept)
    assert verdict.ok, str(verdict.first)
    assert losses == pytest.approx([loss] * ran.ranks, rel=1e-12)


def warmed_up(row: Row, by: int) -> Row:
    """A row of 1F1B that warms up with so many forwards more."""
    f, b = ([action for action in row if action.kind == kind] for kind in "FB")
    warm = max(0, [action.kind for action in row].index("B") - 1 + by)
    pairs = zip_longest(f[warm:], b)
    return f[:warm] + [action for pair in pairs for action in pair if action is not None]


@pytest.mark.parametrize(("ranks", "micros"), [(2, 3), (3, 2), (3, 6)])
def test_warm_ups_that_are_off_by_one_are_refused_or_change_nothing(ranks: int, micros: int) -> None:
    layout, options = parse(f"pp{ranks}"), {"microbatches": micros, "layers": ranks, "batch": 6}
    reference, _ = alone(layout, options, [])
    refused = []
    known: list[Schedule] = []
    for offs in product((-1, 0, 1), repeat=ranks):
        rows = [warmed_up(row, by) for row, by in zip(one_f_one_b(ranks, micros), offs, strict=True)]
        if rows in known:  # there are no forwards to put off
            continue
        known.append(rows)
        try:
            check(with_update(with_messages(rows)))
        except ScheduleError as error:
            refused.append(str(error))
            continue
        with mutations_pipeline.changed_rows(lambda _, rows=rows: rows):
            verdict = judge(reference, recorded(ranks, lambda: train(layout, options)))
        assert verdict.ok, str(verdict.first)
    assert all(text.startswith("deadlock: rank ") for text in refused)
    assert refused  # two neighbours of which one hurries, and the other waits
    assert len(refused) < len(known)


@pytest.mark.parametrize("seed", some(range(40), 6))
def test_no_false_alarm_over_random_configurations(seed: int) -> None:
    """The cases of `mpitrain verify --sweep`, under the check of states."""
    result = prove(case_of(seed), lambda case, layout: checked(lambda: train_case(case, layout)))
    assert result.ok, f"{result.case}\n{result.trouble}\n{result.verdict.first}"


if __name__ == "__main__":
    for each in MUTATIONS:
        names = found_by(each)
        print(f"{' + '.join(names) or 'NOBODY':16s} {each.layout:12s} {each.name}  {each.case}")
        for who, text in names.items():
            print(f"        {who}: {text.splitlines()[0][:170]}")
