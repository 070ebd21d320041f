"""Random cases: a model, a layout and options that nobody has thought of together, each proven against one rank.

Case S is a pure function of the seed S, so `--sweep 1 --seed S` is that case alone.  Sizes are small and odd: a
vocabulary that does not divide, heads of three, one layer, more ranks than tokens of the vocabulary, stages without a
block, fewer micro-batches than stages.  Every case is one that the trainer must accept, so a refusal is a failure too.

Everything runs in this process, with the parts that the trainer is made of; a case takes some hundredths of a second.
"""

from __future__ import annotations

import functools
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from mpitrain.assemble import build_executor, build_model, build_optimizer
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import LR_SCHEDULES, OPTIONS, Config
from mpitrain.config_rules import check_layout
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.capture import Record
from mpitrain.debug.states.around import checking_states
from mpitrain.errors import StateError
from mpitrain.verify import report
from mpitrain.verify.here import record_on, replay
from mpitrain.verify.judge import Verdict, judge
from mpitrain.verify.layouts import AXES, COUNTS, WAYS, Layout, all_layouts
from mpitrain.verify.suspect import Hint, hints

ROWS = (1, 1)  # steps: the second sees what the first has left
STALE_ROWS = (4, 2)  # where they overlap: more than the pipeline is full, and fewer
MOST_RANKS = 8
LEAST_WIDTH = 6  # a norm over two or three numbers leaves nearly nothing of them, and the rest is rounding
WIDTH_TO_DROP = 24  # of a narrower stream, half dropped may be all; a norm of zeros makes gradients 300 times as large
LEAST_TOKENS = 2  # the softmax over one key is 1, so that nothing is left of the gradient of queries but rounding
EVERY = 5.0  # seconds between two lines of progress
PARTS = ("blocks.*.mlp", "blocks.*.attention", "blocks.0", "table,norm,head", "*.*,blocks.*.mlp.up")
"""Of the model, that may be made again in backward; `*.*` is every block."""
LR_GROUPS = ("table.*=0.5,*.bias=2", "blocks.0.*=0", "*.mlp.*=0.3,*.weight=1.7")


@dataclass(frozen=True)
class Case:
    """One combination.

    Attributes:
        seed: makes it.
        layout: of its ranks.
        vocab: tokens of the text.
        options: settings of the trainer, besides those of the layout.
    """

    seed: int
    layout: Layout
    vocab: int
    options: dict[str, Any]

    def __str__(self) -> str:
        words = [str(self.layout) or "one rank", f"vocabulary {self.vocab}"]
        for name, value in self.options.items():
            if value is not None and value is not False:
                words.append(name.replace("_", "-") + ("" if value is True else f" {value}"))
        return ", ".join(words)

    def config(self, layout: Layout) -> Config:
        """The trainer's settings in a layout; the one rank without axes, which judges, makes nothing again."""
        settings = {axis: layout.sizes.get(axis, 1) for axis in AXES} | self.options
        kind = next((way for way in layout.ways if WAYS[way].group == "attention"), "ring")
        settings["schedule"] = layout.schedule or OPTIONS["schedule"].default
        for letter, number in layout.counts:
            settings[COUNTS[letter].option] = number
        if (layout.sizes.get("pp"), layout.counts) != (self.layout.sizes.get("pp"), self.layout.counts):
            settings["stage_layers"] = None  # an axis alone has other stages
        if not layout.axes:
            settings |= {"recompute": OPTIONS["recompute"].default, "recompute_modules": None}
        steps = sum(self.rows)
        return Config(**settings, cp_attention=kind, sequence_parallel="sp" in layout.ways, steps=steps)

    @property
    def rows(self) -> tuple[int, ...]:
        """Steps of each row."""
        return STALE_ROWS if self.layout.is_stale else ROWS


def case_of(seed: int) -> Case:
    """The case that a seed stands for."""
    draw = np.random.default_rng([seed, 4])

    def one_of(*values: Any) -> Any:
        return values[int(draw.integers(len(values)))]

    layout = one_of(*_layouts(one_of(*range(1, MOST_RANKS + 1))))
    pp, dp, cp, tp = (layout.sizes.get(axis, 1) for axis in AXES)
    cut_heads = tp * (cp if "ulysses" in layout.ways else 1)
    heads = cut_heads * one_of(1, 1, 2, 3)
    groups = [g for g in range(1, heads + 1) if heads % g == 0 and _fits(g, tp, cut_heads // tp)]
    tokens = math.lcm(2 * cp if "ring" in layout.ways else cp, cp * tp if "sp" in layout.ways else cp)
    seq_len = tokens * one_of(*range(1 if tokens >= LEAST_TOKENS else LEAST_TOKENS, max(2, 24 // tokens)))
    micro = one_of(1, 1, 2, 3) if pp == 1 else one_of(*range(1, 2 * pp + 2))
    chunks = slices = 1
    if layout.schedule == "interleaved":
        chunks = one_of(1, 2, 2, 3)
        micro = micro if chunks == 1 else pp * one_of(1, 2)
        layout = replace(layout, counts=(("v", chunks),))
    elif layout.schedule == "terapipe":
        slices = min(seq_len, one_of(1, 2, 3, 4, 7))
        layout = replace(layout, counts=(("s", slices),))
    if {"gpipe", "1f1b"}.intersection(layout.ways) and cp == 1 and "sp" not in layout.ways and one_of(False, True):
        layout = replace(layout, ways=(one_of("pipedream", "pipedream-2bw"), *layout.ways[1:]))
        micro = 1 if layout.schedule == "pipedream" else max(pp, micro)
    agree = layout.schedule != "pipedream"  # there each stage updates by itself
    layers = one_of(1, 1, 2, 3) if pp == 1 else one_of(1, 2, pp * chunks, pp * chunks + 1)
    cuts = np.sort(draw.integers(layers + 1, size=pp * chunks - 1))  # stages without a block among them
    by_stage = ",".join(map(str, np.diff([0, *cuts, layers])))
    vocab = one_of(2, 3, 5, 17, 64, 97, 257)
    options = {
        "layers": layers,
        "stage_layers": one_of(None, by_stage) if pp > 1 else None,
        "balance": one_of("layers", "parameters", "flops"),
        "width": heads * one_of(*(size for size in (1, 2, 3, 4, 5, 8) if size * heads >= LEAST_WIDTH)),
        "heads": heads,
        "kv_heads": one_of(None, *groups),
        "seq_len": seq_len,
        "tied": one_of(False, agree),
        "gelu": one_of("tanh", "erf"),
        "dropout": one_of(0.0, 0.1, 0.5),
        "seed": int(draw.integers(1000)),
        "batch": dp * micro * one_of(1, 2, 3),
        "microbatches": micro,
        "optimizer": one_of("adamw", "adamw", "sgd", "adafactor"),
        "lr": one_of(1e-4, 1e-3),
        "weight_decay": one_of(0.0, 0.1),
        "clip": one_of(0.0, 0.01, 0.5, 10.0) if agree else 0.0,
        "reducer": one_of("flat", "bucketed"),
        "bucket_mib": one_of(0.0005, 0.005, 1.0),
    }
    options |= {
        "recompute": one_of("none", "selective", "full", "full"),
        "recompute_modules": one_of(None, None, *PARTS),
        "dtype": one_of(
            "float32", "bfloat16", *(["float16"] if agree else [])
        ),  # a proof runs in float64 whatever is said
        "loss_scaling": one_of(None, "dynamic", "static", "blocks", "blocks") if agree else None,
        "loss_scale": one_of(0.125, 1.0, 1024.0, 65536.0),
        "loss_scale_window": one_of(1, 1000),
        "lr_groups": one_of(None, None, *LR_GROUPS),
        "lr_schedule": one_of(*LR_SCHEDULES),
        "warmup": one_of(0.03, 1.0),
    }
    scaling = options["loss_scaling"] or ("dynamic" if options["dtype"] == "float16" else "none")
    if scaling not in ("dynamic", "static"):
        options["loss_scale"] = None
    if scaling != "dynamic":
        options["loss_scale_window"] = None
    if options["width"] < WIDTH_TO_DROP:
        options["dropout"] = min(options["dropout"], 0.1)
    return Case(seed, layout, vocab, options)


def _fits(groups: int, tp: int, cp: int) -> bool:
    """Whether so many heads of keys and values can be laid over the ranks; cp counts where it cuts heads."""
    return (groups % tp == 0 or tp % groups == 0) and max(1, groups // tp) % cp == 0


@functools.cache
def _layouts(ranks: int) -> tuple[Layout, ...]:
    """Of axes and their ways; what the model does on any ranks is drawn with its options."""
    return tuple(layout for layout in all_layouts(ranks) if all(WAYS[way].axis for way in layout.ways))


# ----------------------------------------------------------------------------------------------------------- one case


def train(case: Case, layout: Layout) -> None:
    """Train on the ranks of the surrounding world, as the trainer does."""
    config = case.config(layout)
    mesh = Mesh(world(), pp=config.pp, dp=config.dp, cp=config.cp, tp=config.tp)
    check_layout(config, mesh.dp.size)
    text = np.random.default_rng(case.seed).integers(case.vocab, size=4000, dtype=np.uint16)
    corpus = Corpus(text[:3500], text[3500:], case.vocab, "tokens", "random numbers", (), (), "")
    tokens = Tokens(corpus, config.seq_len, config.seed)
    model = build_model(config, corpus, mesh)
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


def main(count: int, seed: int, json_path: str | None = None, train: Train = train) -> int:
    """Prove `count` cases from `seed` on; print progress, each failure with the command that repeats it, and counts.

    Returns:
        The exit code: 0 if all are equal, else 1.
    """
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
            print(f"  repeat    mpitrain verify --sweep 1 --seed {case.seed}\n", flush=True)
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
