"""Figures and picture of docs/explanation/zero.md, from a result of `zero.py`.

The page is written by hand but for what stands between two marks in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import plots
from plots import Line, Panel
from precision_page import DOCS, MARKED, text_of

from mpitrain.plan.memory.zero import published

PAGE = DOCS / "explanation/zero.md"
KEPT = DOCS / "figures/zero.json"
PICTURE = DOCS / "images/zero.svg"

RANKS = (1, 2, 3, 4, 6, 8)
SENT_ON = 4
"""Ranks of dp for which it is told what they send."""
STAGES = (0, 1, 2, 3)
WORDS = ("nothing is cut", "masters, moments", "gradients too", "weights too")
PSI = 7_500_000_000
"""Weights of the model of the paper's figure."""
PAPERS = (1, 4, 16, 64, 256, 1024)

Result = Mapping[str, Any]


def name(ranks: int, zero: int, microbatches: int = 1) -> str:
    """Of a measurement of bytes."""
    return f"dp {ranks}, zero {zero}" + (f", {microbatches} micro-batches" if microbatches > 1 else "")


def state(result: Result, ranks: int, zero: int) -> int:
    """Bytes that the rank with most of them keeps between two steps."""
    return sum(result["bytes"][name(ranks, zero)]["state"].values())


def ratios(result: Result, size: str) -> dict[str, list[float]]:
    """By stage, the time of a step as a multiple of that of stage 0, round by round."""
    rounds = result["times"][size]["rounds"]
    base = [run["ms_per_step"] for run in rounds["zero 0"]]
    return {
        stage: [run["ms_per_step"] / of_0 for run, of_0 in zip(runs, base, strict=True)]
        for stage, runs in rounds.items()
        if stage != "zero 0"
    }


def lines(result: Result) -> list[str]:
    """What is kept, for a terminal."""
    texts = []
    if "bytes" in result:
        texts.append(f"{'state, bytes':<14}" + "".join(f"{f'zero {zero}':>12}" for zero in STAGES))
        texts += [
            f"{f'dp {ranks}':<14}" + "".join(f"{state(result, ranks, zero):>12,}" for zero in STAGES) for ranks in RANKS
        ]
        texts.append(f"{f'sent, dp {SENT_ON}':<14}" + "".join(f"{_sent(result, zero):>12,}" for zero in STAGES))
        texts.append(f"{'4 micros':<14}" + "".join(f"{_sent(result, zero, 4):>12,}" for zero in STAGES))
    for size in result.get("times", {}):
        found = {stage: statistics.median(each) for stage, each in ratios(result, size).items()}
        texts.append(f"{size}: " + ", ".join(f"{stage} {ratio:.3f} of zero 0" for stage, ratio in found.items()))
    return texts


def _sent(result: Result, zero: int, microbatches: int = 1) -> int:
    return int(result["bytes"][name(SENT_ON, zero, microbatches)]["sent"])


# ------------------------------------------------------------------------------------------------------------- the page


def parts(result: Result) -> dict[str, str]:
    """What stands between marks, by their names."""
    return {
        **({"state": _state(result), "sent": _sends(result), "peak": _peaks(result)} if "bytes" in result else {}),
        **({"time": _times(result)} if "times" in result else {}),
        "about": _about(result),
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    texts = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return "\n".join([*texts, *(f"| {' | '.join(row)} |" for row in rows)])


def _state(result: Result) -> str:
    rows = [[f"{ranks}", *(f"{state(result, ranks, zero):,}" for zero in STAGES)] for ranks in RANKS]
    return _table(["ranks of dp", *(f"`--zero {zero}`" for zero in STAGES)], rows)


def _sends(result: Result) -> str:
    rows = []
    unit = Fraction(_sent(result, 0), 2)  # an all-reduce is two
    for zero in STAGES:
        sent = [_sent(result, zero, microbatches) for microbatches in (1, 4)]
        times = [f"{float(amount / unit):.2f}" for amount in sent]
        rows.append([f"`--zero {zero}`: {WORDS[zero]}", f"{sent[0]:,}", times[0], f"{sent[1]:,}", times[1]])
    return _table(["", "1 micro-batch", "in units", "4 micro-batches", "in units"], rows)


def _peaks(result: Result) -> str:
    rows = []
    for zero in STAGES:
        found = result["bytes"][name(SENT_ON, zero)]
        rows.append(
            [f"`--zero {zero}`", f"{sum(found['state'].values()):,}"]
            + [f"{found[what]:,}" for what in ("whole", "gathered", "peak")]
        )
    return _table(["", "state", "whole gradients", "gathered weights", "most at once"], rows)


def _times(result: Result) -> str:
    rows = []
    for size, found in result["times"].items():
        base = statistics.median(run["ms_per_step"] for run in found["rounds"]["zero 0"])
        cells = [
            f"**{statistics.median(each):.2f}** ({min(each):.2f} to {max(each):.2f})"
            for each in ratios(result, size).values()
        ]
        rows.append([size, f"{base:.1f} ms", *cells])
    return _table(["model", "`--zero 0`", *(f"`--zero {zero}`" for zero in STAGES[1:])], rows)


def _about(result: Result) -> str:
    if not result.get("about"):
        return "Not measured."
    of_times = result["about"].get("times")
    about = of_times or result["about"]["bytes"]
    what = f"{about['cpu']}, 2 cores; " if of_times else ""
    numpy = about["versions"]["numpy"]
    return f"{what}{about['time'][:10]}; numpy {numpy}, kernels {about['kernels']}; commit {about['commit']}."


# ---------------------------------------------------------------------------------------------------------- the picture


def picture(result: Result) -> str:
    """State of a rank over ranks, by stage: the default model as it was measured, and the paper's with 7.5 billion."""
    ours = [
        Line(
            f"stage {zero}: {WORDS[zero]}",
            [(float(ranks), state(result, ranks, zero) / 2**20) for ranks in RANKS],
            zero,
        )
        for zero in STAGES
    ]
    theirs = [
        Line(
            f"stage {zero}",
            [(float(ranks), float(published(PSI, ranks, zero)) / 1e9) for ranks in PAPERS],
            zero,
        )
        for zero in STAGES
    ]
    panels = [
        Panel("The default model, measured", ours, "ranks of dp", "MiB of state a rank", log_y=False),
        Panel("7.5 billion weights, the paper's formula", theirs, "ranks", "GB of state a rank", log_y=False),
    ]
    return plots.panels("What a rank keeps with ZeRO", panels)


# ---------------------------------------------------------------------------------------------------------------- files


def files(result: Result) -> dict[Path, str]:
    """What stands in docs/ for a result."""
    written = parts(result)
    text = PAGE.read_text(encoding="utf-8")
    text = MARKED.sub(lambda found: f"{found[1]}{written.get(found[2], 'Not measured.')}\n{found[3]}", text)
    drawn = {PICTURE: picture(result)} if "bytes" in result else {}
    return {KEPT: text_of(result), PAGE: text, **drawn}


def write(result: Result) -> list[Path]:
    """Write them; the paths."""
    texts = files(result)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)
