"""What is measured: each entry gives the figures of one row of the table or of several, all of one run.

A measurement is a function of `Options` that returns plain data, ready for JSON; `rows.py` reads the table's figures
from it and `page.py` writes them down.  What each does stands in methods.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import first_line
import growth
import peak_memory
from fma_peak import Peak
from processes import result_of
from sides import SIZES, Task
from training import Turn, alive, take_turns

from mpitrain.models.gpt import GPTConfig

Data = dict[str, Any]


class Options(NamedTuple):
    """How to measure.

    rounds: of each measurement; stretch: seconds of counted steps that a training has in a round, about; undisturbed:
    time each step of the pipelines' measurements at real-time priority, on a machine where others are at work.
    """

    rounds: int = 5
    stretch: float = 1.5
    undisturbed: bool = False


def flops_per_token(config: GPTConfig) -> int:
    """Flops of a step's matrix products, a token: 6 a weight of a product, and 6 T d a layer for attention.

    Of attention's 12 T d (two products forward, four backward, each 2 T d) half is left: the other half belongs to
    keys that come after their query.  Products that are made again in backward are not counted, nor is anything else.
    """
    return config.flops_per_token - 6 * config.layers * config.seq_len * config.width


def task(size: str, *, ranks: int = 1, batch: int | None = None, dropout: float = 0.0) -> Task:
    """A size of `sides.SIZES` in float32."""
    sizes = dict(SIZES[size])
    sizes["batch"] = sizes["batch"] if batch is None else batch
    return Task(**sizes, ranks=ranks, dropout=dropout, dtype="float32")


def one_thread(size: str, options: Options, *, dropout: float = 0.0, numpy: bool = False) -> Data:
    """One rank against one thread; with `numpy` also mpitrain without its compiled kernels."""
    work = task(size, dropout=dropout)
    sides: dict[str, tuple[str, Task, Mapping[str, str]]] = {
        "torch": ("torch", work, {}),
        "mpitrain": ("mpitrain", work, {}),
    }
    if numpy:
        sides["numpy"] = ("mpitrain", work, {"MPITRAIN_KERNELS": "numpy"})
    peak = Peak()
    with alive(*sides.values()) as started:
        turns = {name: Turn(processes) for name, processes in zip(sides, started, strict=True)}
        same = [(name, "torch") for name in turns if name != "torch"]
        found = take_turns(turns, rounds=options.rounds, stretch=options.stretch, same=same, peak=peak)
        kernels = {name: processes.kernels for name, processes in zip(sides, started, strict=True)}
    assert kernels.get("numpy", "numpy") == "numpy", kernels
    return {
        **found,
        "task": work._asdict(),
        "kernels": kernels,
        "flops_per_token": flops_per_token(work.config),
        "vector_bits": peak.bits,
    }


def two_ranks(options: Options) -> Data:
    """S on one and two ranks of both sides: a batch of 8 shared out by two ranks, and 8 for each of them."""
    one, two = task("S"), task("S", ranks=2)
    each = one.batch
    sides = [(side, work, {}) for side in ("torch", "mpitrain") for work in (one, two)]
    with alive(*sides) as (torch1, torch2, mine1, mine2):
        turns = {
            "torch 1": Turn(torch1),
            "mpitrain 1": Turn(mine1),
            "torch 2": Turn(torch2),
            "mpitrain 2": Turn(mine2),
            "torch 2, each": Turn(torch2, 2 * each),
            "mpitrain 2, each": Turn(mine2, 2 * each),
        }
        same = [("mpitrain 1", "torch 1"), ("mpitrain 2", "torch 2"), ("mpitrain 2, each", "torch 2, each")]
        return take_turns(turns, rounds=options.rounds, stretch=options.stretch, same=same)


def many_ranks(options: Options) -> Data:
    """S with its batch of 8 shared out by 1, 2, 4 and 8 ranks, all on two cores."""
    numbers = (1, 2, 4, 8)
    with on_cores(2), alive(*(("mpitrain", task("S", ranks=ranks), {}) for ranks in numbers)) as started:
        turns = {str(ranks): Turn(processes) for ranks, processes in zip(numbers, started, strict=True)}
        same = [("2", "1"), ("4", "1"), ("8", "1")]
        return take_turns(turns, rounds=options.rounds, stretch=options.stretch, same=same)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {},
    "tp 2": {"tp": 2},
    "tp 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "cp 2": {"cp": 2},
}
"""Ways to lay a model over two ranks."""


def layouts(options: Options) -> Data:
    """S on two ranks, the same global batch, in each layout."""
    sides = [("mpitrain", task("S", ranks=2)._replace(**layout), {}) for layout in LAYOUTS.values()]
    with on_cores(2), alive(*sides) as started:
        turns = {name: Turn(processes) for name, processes in zip(LAYOUTS, started, strict=True)}
        same = [(name, "dp 2") for name in LAYOUTS if name != "dp 2"]
        return take_turns(turns, rounds=options.rounds, stretch=options.stretch, same=same, watch=True)


PIPELINES: dict[str, dict[str, Any]] = {
    "dp 2": {},
    "dp 2, 4 micro-batches": {"microbatches": 4},
    **{
        f"{name}, m {m}": {"pp": 2, "schedule": name, "chunks": chunks, "microbatches": m}
        for m in (8, 16)
        for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1))
    },
}
"""Ways to share S and 32 sequences out by two ranks: half of the sequences each, or half of the layers.

Replicas may take their 16 sequences at once, or 4 at a time as the pipelines of 8 micro-batches do; the faster
count.
"""


def pipelines(options: Options) -> Data:
    """S on two ranks, the same global batch of 32, as replicas and in pipelines."""
    sides = [("mpitrain", task("S", ranks=2, batch=32)._replace(**layout), {}) for layout in PIPELINES.values()]
    with on_cores(2), alive(*sides) as started:
        turns = {name: Turn(processes) for name, processes in zip(PIPELINES, started, strict=True)}
        same = [(name, "dp 2") for name in PIPELINES if name != "dp 2"]
        how = {"rounds": options.rounds, "stretch": options.stretch, "undisturbed": options.undisturbed}
        return take_turns(turns, **how, same=same, watch=True)


DTYPES = ("float32", "float16", "bfloat16")
RECOMPUTES = ("none", "selective", "full")
OPTIMIZERS = ("adamw", "adafactor")
EXPERTS = 8


def halves(size: str, options: Options) -> Data:
    """One rank in float32 and in each kind of halves."""
    with alive(*(("mpitrain", task(size)._replace(dtype=dtype), {}) for dtype in DTYPES)) as started:
        turns = {dtype: Turn(processes) for dtype, processes in zip(DTYPES, started, strict=True)}
        same = [(dtype, "float32") for dtype in DTYPES[1:]]
        found = take_turns(turns, rounds=options.rounds, stretch=options.stretch, same=same)
        return {**found, "kernels": started[0].kernels}


def experts(size: str, options: Options) -> Data:
    """One rank with an MLP in each block, and with eight experts of which a token meets one."""
    dense = task(size)
    switch = dense._replace(experts=EXPERTS)
    return _experts(options, {"dense": dense, "switch": switch, "dropless": switch._replace(capacity_factor=None)})


def experts_on_ranks(size: str, options: Options) -> Data:
    """The same global batch on two ranks, which both hold all experts or half of them each."""
    dense = task(size, ranks=2)
    switch = dense._replace(experts=EXPERTS)
    with on_cores(2):
        return _experts(options, {"dense": dense, "dp 2": switch, "ep 2": switch._replace(ep=2)}, watch=True)


def _experts(options: Options, tasks: Mapping[str, Task], **how: Any) -> Data:
    """Tasks by turns.

    Returns:
        what `take_turns` gives; kernels; dropped: name -> share of choices without a place, in a step afterwards.
    """
    with alive(*(("mpitrain", work, {}) for work in tasks.values())) as started:
        turns = {name: Turn(processes) for name, processes in zip(tasks, started, strict=True)}
        same = [("ep 2", "dp 2")] if "ep 2" in tasks else []
        found = take_turns(turns, rounds=options.rounds, stretch=options.stretch, same=same, **how)
        looks = {name: turn.processes.look() for name, turn in turns.items()}
        return {
            **found,
            "kernels": started[0].kernels,
            "dropped": {name: look["dropped"] for name, look in looks.items()},
        }


def recomputes(size: str, options: Options, dtypes: Sequence[str], optimizers: Sequence[str]) -> Data:
    """One rank in each combination of precision, recompute and optimizer, by names as `float32, full, adamw`.

    Returns:
        what `take_turns` gives; looks: name -> bytes by owner, their peak and the operations of one step.
    """
    ways = {
        f"{dtype}, {recompute}, {optimizer}": {"dtype": dtype, "recompute": recompute, "optimizer": optimizer}
        for dtype in dtypes
        for recompute in RECOMPUTES
        for optimizer in optimizers
    }
    with alive(*(("mpitrain", task(size)._replace(**way), {}) for way in ways.values())) as started:
        turns = {name: Turn(processes) for name, processes in zip(ways, started, strict=True)}
        first = {optimizer: f"{dtypes[0]}, {RECOMPUTES[0]}, {optimizer}" for optimizer in optimizers}
        same = [(name, first[way["optimizer"]]) for name, way in ways.items() if name not in first.values()]
        found = take_turns(turns, rounds=options.rounds, stretch=options.stretch, same=same)
        return {**found, "looks": {name: turn.processes.look() for name, turn in turns.items()}}


def bubbles(options: Options) -> Data:
    """Of each schedule, by the clock of its own steps."""
    return child("pipeline_bubble.py", options, *(["--undisturbed"] if options.undisturbed else []), ranks=2)


@contextlib.contextmanager
def on_cores(number: int) -> Iterator[None]:
    """Whatever is started inside runs on so many cores, if there are more."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def child(script: str, options: Options, *arguments: str, ranks: int = 1) -> Data:
    """What a script of its own prints."""
    return result_of(script, "--rounds", str(options.rounds), *arguments, ranks=ranks)


def ordered_sums(options: Options) -> Data:
    """On 2, 4 and 8 ranks."""
    runs = [child("ordered_sums.py", options, ranks=ranks) for ranks in (2, 4, 8)]
    return {
        "by_ranks": {str(run["ranks"]): run["ms"] for run in runs},
        "load": [x for run in runs for x in run["load"]],
    }


def sweep(name: str, options: Options) -> Data:
    """One sweep of `growth.py`, at most three times: its least times settle quickly."""
    few = options._replace(rounds=min(options.rounds, 3))
    return child("growth.py", few, "--sweeps", name)


MEASUREMENTS: dict[str, Callable[[Options], Data]] = {
    "S": lambda options: one_thread("S", options, numpy=True),
    "M": lambda options: one_thread("M", options),
    "S with dropout": lambda options: one_thread("S", options, dropout=0.1),
    "T 1024": lambda options: one_thread("long", options),
    "Llama S": lambda options: one_thread("llama-S", options),
    "step": lambda options: child("step_split.py", options),
    "two ranks": two_ranks,
    "many ranks": many_ranks,
    "layouts": layouts,
    "pipelines": pipelines,
    "bubbles": bubbles,
    "halves mini": lambda options: halves("mini", options),
    "halves S": lambda options: halves("S", options),
    "experts mini": lambda options: experts("mini", options),
    "experts S": lambda options: experts("S", options),
    "experts on two ranks mini": lambda options: experts_on_ranks("mini", options),
    "experts on two ranks S": lambda options: experts_on_ranks("S", options),
    "memory and time": lambda options: recomputes("S", options, DTYPES[:2], OPTIMIZERS),
    "recompute T 1024": lambda options: recomputes("long", options, DTYPES[:1], OPTIMIZERS[:1]),
    "memory S": lambda options: peak_memory.measure("S", rounds=options.rounds),
    "memory M": lambda options: peak_memory.measure("M", rounds=options.rounds),
    "first line": lambda options: first_line.measure(options.rounds),
    "AdamW": lambda options: child("adamw_cost.py", options),
    "generation S": lambda options: child("generation.py", options),
    "digits CNN": lambda options: child("cnn_step.py", options),
    "messages": lambda options: child("message_cost.py", options, ranks=2),
    "ops": lambda options: child("op_overhead.py", options),
    "ordered sums": ordered_sums,
    **{f"cost over {name}": lambda options, name=name: sweep(name, options) for name in growth.SWEEPS},  # type: ignore[misc]
}
"""By name; how each is done stands in methods.md under the same name."""
