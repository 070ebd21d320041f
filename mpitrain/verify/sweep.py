"""Random cases, each proven against one rank.

Everything runs in this process, with the parts that the trainer is made of; a case takes some hundredths of a second.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from mpitrain.assemble import build_executor, build_model, build_optimizer
from mpitrain.comm.device_messages import use_device_messages
from mpitrain.comm.devices import device_of_rank
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config_rules import check_layout
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.capture import Record
from mpitrain.debug.states.around import checking_states
from mpitrain.errors import StateError
from mpitrain.verify import report
from mpitrain.verify.cases import Case, case_of
from mpitrain.verify.here import record_on, replay
from mpitrain.verify.judge import Verdict, judge
from mpitrain.verify.layouts import Layout
from mpitrain.verify.suspect import Hint, hints

EVERY = 5.0  # seconds between two lines of progress

# ----------------------------------------------------------------------------------------------------------- one case


def train(case: Case, layout: Layout, device: str = "cpu") -> None:
    """Train on the ranks of the surrounding world, as the trainer does, each on a device of this kind."""
    config = case.config(layout)
    own = device_of_rank(world(), device)
    use_device_messages(world(), config.device_messages, own)
    mesh = Mesh(world(), pp=config.pp, dp=config.dp, ep=config.ep, cp=config.cp, tp=config.tp)
    check_layout(config, mesh.dp.size)
    text = np.random.default_rng(case.seed).integers(case.vocab, size=4000, dtype=np.uint16)
    corpus = Corpus(text[:3500], text[3500:], case.vocab, "tokens", "random numbers", (), (), "")
    tokens = Tokens(corpus, config.seq_len, config.seed)
    model = build_model(config, corpus, mesh, own)
    steps = sum(case.rows)
    executor = build_executor(config, model, build_optimizer(config, model, mesh), mesh, steps)
    batches = tokens.batches(config.batch, mesh.dp.rank, mesh.dp.size, 0, steps, model.positions_here)
    for row in case.rows:
        executor.run(list(islice(batches, row)))


@dataclass
class Result:
    """What came of a case; `trouble` is what a rank raised."""

    case: Case
    verdict: Verdict
    trouble: str = ""

    @property
    def ok(self) -> bool:
        """Whether the layout is the same training run."""
        return not self.trouble and self.verdict.ok


Train = Callable[[Case, Layout], None]


def trains_on(device: str) -> Train:
    """`train` on devices of a kind."""
    return partial(train, device=device)


def prove(case: Case, train: Train = train) -> Result:
    """Run a case on one rank and in its layout, and judge.

    Args:
        case: which.
        train: trains it in a layout on the surrounding world.
    """
    alone: list[list[Record]] = [[]]
    try:
        record_on(alone, lambda: train(case, Layout(())))
    except Exception as error:
        return Result(case, judge((), []), f"on one rank already: {_described(error)}")
    return _against(case, case.layout, alone[0], train)


def _against(case: Case, layout: Layout, alone: Sequence[Record], train: Train) -> Result:
    kept: list[list[Record]] = [[] for _ in range(layout.ranks)]
    trouble = ""
    try:
        record_on(kept, lambda: train(case, layout))
    except Exception as error:
        trouble = _described(error)
    if layout.is_stale and not trouble:
        alone = replay(layout.schedule, kept, lambda: train(case, Layout(())))
    return Result(case, judge(alone, kept), trouble)


def _described(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def explain(result: Result, train: Train = train) -> list[Hint]:
    """Where to look; runs the axes of the layout alone."""
    first = result.verdict.first
    trouble = [Hint("trouble", result.trouble)] if result.trouble else []
    if first is None:
        return trouble
    alone: list[list[Record]] = [[]]
    record_on(alone, lambda: train(result.case, Layout(())))
    parts = [(part, _part(result.case, part, alone[0], train)) for part in result.case.layout.parts()]
    return [*trouble, *hints(first, result.case.layout, parts, _state_error(result.case, train))]


def _state_error(case: Case, train: Train) -> str:
    """What a check of states says of a case; empty if nothing."""

    def body() -> None:
        with checking_states(world()):
            train(case, case.layout)

    try:
        record_on([[] for _ in range(case.layout.ranks)], body)
    except StateError as error:
        return f"StateError: {error}"
    except Exception:  # which is known already
        return ""
    return ""


def _part(case: Case, part: Layout, alone: Sequence[Record], train: Train) -> str:
    result = _against(case, part, alone, train)
    return "failed" if result.trouble else "equal" if result.verdict.ok else "differs"


# ----------------------------------------------------------------------------------------------------------- all cases


def main(count: int, seed: int, json_path: str | None = None, train: Train | None = None, device: str = "cpu") -> int:
    """Prove `count` cases from `seed` on; print progress, each failure with the command that repeats it, and counts.

    Args:
        count, seed: which cases.
        json_path: of a file for all that was found; None: none.
        train: trains a case in a layout on the surrounding world; None: the trainer's parts do.
        device: they do so on devices of this kind.

    Returns:
        The exit code: 0 if all are equal, else 1.
    """
    train = trains_on(device) if train is None else train
    again = f" --device {device}" if device != "cpu" else ""
    began = told = time.perf_counter()
    failed: list[dict[str, Any]] = []
    ranks = 0
    worst = 0.0, seed
    for number in range(count):
        case = case_of(seed + number)
        result = prove(case, train)
        ranks += case.layout.ranks
        if result.ok:
            worst = max(worst, (result.verdict.worst()[0].share, case.seed))
        else:
            said = explain(result, train)
            failed.append({"seed": case.seed, "case": str(case), "hints": [hint._asdict() for hint in said]})
            print(f"\n{report.explanation(f'case {case.seed}: {case}', said, case.layout.is_stale)}")
            print(f"  repeat    mpitrain verify --sweep 1 --seed {case.seed}{again}\n", flush=True)
        now = time.perf_counter()
        if now - told > EVERY and number + 1 < count:
            told, speed = now, (number + 1) / (now - began)
            print(f"{number + 1} of {count} cases, {len(failed)} failed, {speed:.1f} a second", flush=True)
    seconds = time.perf_counter() - began
    if count == 1 and not failed:
        print(f"case {seed}: {case}\n\n{report.table(result.verdict)}\n")
    print(
        f"{count - len(failed)} of {count} cases (seeds {seed} to {seed + count - 1}) are equal to one rank, "
        f"{len(failed)} failed; the worst, seed {worst[1]}, is {worst[0]:.2g} of its bound; "
        f"{ranks / count:.1f} ranks a case, {count / seconds:.1f} cases a second"
    )
    if json_path is not None:
        found = {"cases": count, "seed": seed, "seconds": round(seconds, 3), "worst": worst[0], "failed": failed}
        report.write(json_path, found)
    return 1 if failed else 0
