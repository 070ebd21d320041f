"""Write what the pages show of the code itself: tables of options and collectives, pictures, the API reference.

    python docs/generate.py            rewrite what is out of date
    python docs/generate.py --check    only say what is; exit code 1 if anything is

A table stands in its page between `<!-- generated: NAME -->` and `<!-- end -->`; the text around it is written by hand.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mpitrain.options import Option

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))  # for whoever loads this file by its path

from api_reference import api_pages  # noqa: E402
from checkpoint_pictures import layouts_picture, save_picture  # noqa: E402
from console_picture import console_picture  # noqa: E402
from experts_picture import experts_picture  # noqa: E402

_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def options_table() -> str:
    """Every setting of a training run, a table a group."""
    from mpitrain.config import GROUPS, OPTIONS

    lines: list[str] = []
    for name, option in OPTIONS.items():
        if name in GROUPS:
            lines += ["", f"### {GROUPS[name]}", "", "| flag | default | allowed | meaning |", "|---|---|---|---|"]
        flag = f"`{option.flag}`" + (f", `{option.off}`" if option.off else "")
        default = option.unset.removeprefix("default").lstrip(": ") or _word(option.default)
        allowed = "on or off" if option.kind is bool else option.allowed if option.within or option.choices else "text"
        lines.append(f"| {flag} | {default} | {allowed} | {option.help} |".replace("|PATH", "\\|PATH"))
    return "\n".join(lines[1:]) + "\n"


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def models_table() -> str:
    """The named models and their sizes."""
    from mpitrain.catalog import MODELS, OF_MODEL

    lines = ["| name | " + " | ".join(size.replace("_", " ") for size in OF_MODEL) + " |"]
    lines.append("|---" * (1 + len(OF_MODEL)) + "|")
    lines += [
        f"| `{name}` | " + " | ".join(str(sizes.get(size, "")) for size in OF_MODEL) + " |"
        for name, sizes in MODELS.items()
    ]
    return "\n".join(lines) + "\n"


def collectives_table() -> str:
    """The arrows between states, with the duals that their backward is."""
    from mpitrain import collectives
    from mpitrain.collectives import ARROWS, Along
    from mpitrain.spec import dual

    def name_of(side: object, *, of_gradient: bool = False) -> str:
        if isinstance(side, Along):
            return f"Shard({side.argument})"
        return str(dual(side) if of_gradient else side)

    lines = ["| function | arrow | gradient | meaning | backward | cost |", "|---" * 6 + "|"]
    for arrow in ARROWS:
        name = arrow.title()
        function = getattr(collectives, name)
        text = inspect.getdoc(function) or ""
        arguments = ", ".join(
            str(p.replace(annotation=p.empty)) for p in inspect.signature(function).parameters.values()
        )
        start, end = arrow.arrow
        lines.append(
            f"| `{name}({arguments})` | {name_of(start)} -> {name_of(end)} "
            f"| {name_of(end, of_gradient=True)} -> {name_of(start, of_gradient=True)} "
            f"| {text.partition('   ')[0]} | {_said(text, 'Backward')} | {_said(text, 'Cost')} |"
        )
    return "\n".join(lines) + "\n"


def layout_words_table() -> str:
    """The words of a layout of `mpitrain verify`."""
    from mpitrain.verify.layouts import AXES, COUNTS, PART_OF, WAYS

    lines = ["| word | flags | of | meaning |", "|---|---|---|---|"]
    for axis, flag in AXES.items():
        whole = PART_OF.get(axis, "")
        meaning = f"N of the ranks of {whole}, over which experts are spread" if whole else f"N ranks on axis {axis}"
        lines.append(f"| `{axis}N` | `{flag} N` | {whole} | {meaning} |")
    lines += [f"| `{word}` | `{' '.join(way.flags)}` | {way.axis} | {way.meaning} |" for word, way in WAYS.items()]
    lines += [f"| `{letter}N` | `{c.flag} N` | {c.way} | N {c.meaning} |" for letter, c in COUNTS.items()]
    return "\n".join(lines) + "\n"


def verify_options_table() -> str:
    """The options of `mpitrain verify`."""
    from mpitrain.verify.command import OPTIONS

    return _options_of_a_command(OPTIONS)


def generate_options_table() -> str:
    """The options of `mpitrain generate`."""
    from mpitrain.generation.command import OPTIONS

    return _options_of_a_command(OPTIONS)


def schedule_options_table() -> str:
    """The options of `mpitrain schedule`."""
    from mpitrain.schedule.command import OPTIONS

    return _options_of_a_command(OPTIONS)


def trace_options_table() -> str:
    """The options of `mpitrain trace`."""
    from mpitrain.trace.command import OPTIONS

    return _options_of_a_command(OPTIONS)


def checkpoint_options_table() -> str:
    """The options of the tools of `mpitrain checkpoint`."""
    from mpitrain.checkpoint.tools.command import TOOLS as OWN
    from mpitrain.interchange.command import TOOLS as OF_OTHERS

    head, line, *_ = _options_of_a_command({}).splitlines()
    rows = [f"| tool {head}", f"|---{line}"]
    for word, tool in {**OWN, **OF_OTHERS}.items():
        options = {option.name: option for option in tool.options}
        rows += [f"| {word} {row}" for row in _options_of_a_command(options).splitlines()[2:]]
    return "\n".join(rows) + "\n"


def _options_of_a_command(options: Mapping[str, Option]) -> str:
    lines = ["| flag | default | allowed | meaning |", "|---|---|---|---|"]
    for option in options.values():
        default = option.unset.removeprefix("default").lstrip(": ")
        default = default or ("none" if option.default is None else _word(option.default))
        allowed = "on or off" if option.kind is bool else option.allowed if option.within or option.choices else "text"
        lines.append(f"| `{option.flag}` | {default} | {allowed} | {option.help} |")
    return "\n".join(lines) + "\n"


def verify_order_table() -> str:
    """What `mpitrain verify` compares, in its order."""
    from mpitrain.debug.compare import FLOAT64_TOLERANCE
    from mpitrain.verify.judge import EXACT, NUMBERS_AFTER, NUMBERS_BEFORE
    from mpitrain.verify.routed import CHOICES, SUMS

    def bound(kind: str) -> str:
        return "exact" if kind in EXACT else f"{FLOAT64_TOLERANCE:g} of its size"

    tensors = f"{FLOAT64_TOLERANCE:g} of the largest element"
    lines = ["| when | what | allowed |", "|---|---|---|", f"| before the first step | initial weights | {tensors} |"]
    lines.append(f"| each step | {CHOICES} of each layer of experts | exact |")
    lines += [f"| | {kind} | {tensors} |" for kind in SUMS.values()]
    lines.append("| | the loss before it is summed, on ranks of one tp axis | the same bits |")
    lines += [f"| | {kind} | {bound(kind)} |" for kind in NUMBERS_BEFORE]
    lines.append(f"| | gradients, in the order in which backward makes them final | {tensors} |")
    lines += [f"| | {kind} | {bound(kind)} |" for kind in NUMBERS_AFTER]
    lines.append(f"| | weights, then every state of the optimizer | {tensors} |")
    return "\n".join(lines) + "\n"


def _said(docstring: str, word: str) -> str:
    """The sentence behind `Word:` in a docstring, without its full stop."""
    found = re.search(rf"^{word}: (.*)$", docstring, re.MULTILINE)
    return found[1].partition(".  ")[0].removesuffix(".") if found else ""


def verbs_table() -> str:
    """The verbs of a communicator, from their signatures and docstrings."""
    from mpitrain.comm.communicator import Communicator

    lines = ["| verb | meaning | cost |", "|---|---|---|"]
    for name, verb in vars(Communicator).items():
        if name.startswith("_") or not inspect.isfunction(verb):
            continue
        text = inspect.getdoc(verb) or ""
        arguments = [str(p.replace(annotation=p.empty)) for p in inspect.signature(verb).parameters.values()][1:]
        summary = " ".join(text.split("\n\n")[0].split())
        lines.append(f"| `{name}({', '.join(arguments)})` | {summary} | {_said(text, 'Cost')} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------- the picture of a step

_COLOURS = {
    "LOAD": "#e4e7eb",
    "COUNT": "#ffd9a0",
    "F": "#b9d7f5",
    "B": "#bfe5c3",
    "REDUCE": "#ffd9a0",
    "STEP": "#d9c9f2",
}
_SENDS = {"COUNT": "1 integer", "REDUCE": "the gradients", "STEP": "2 numbers"}


def step_picture() -> str:
    """Two ranks and the list of actions that each runs in a step of two micro-batches."""
    from mpitrain.pipeline.passes import with_update
    from mpitrain.pipeline.schedules import one_stage

    (row,) = with_update(one_stage(2))
    widths = [112 if a.kind in ("F", "B") else 74 if a.kind == "LOAD" else 84 for a in row]
    left, height, tops = 76, 36, (34, 116)
    total = left + sum(widths) + 6 * len(row) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} 186" width="{total}" height="186"'
        ' font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="13">',
        "<title>The actions of one step on two ranks</title>",
        f'<rect width="{total}" height="186" rx="8" fill="#ffffff"/>',
    ]
    for rank, top in enumerate(tops):
        parts.append(f'<text x="16" y="{top + 23}" fill="#52606d">rank {rank}</text>')
        x = left
        for action, width in zip(row, widths, strict=True):
            middle = x + width / 2
            parts.append(
                f'<rect x="{x}" y="{top}" width="{width}" height="{height}" rx="5" fill="{_COLOURS[action.kind]}"/>'
            )
            parts.append(f'<text x="{middle:g}" y="{top + 23}" text-anchor="middle" fill="#1f2933">{action}</text>')
            if rank == 0 and action.kind in _SENDS:
                parts.append(_both_ways(middle, tops[0] + height + 4, tops[1] - 4))
            if rank == 1 and action.kind in _SENDS:
                parts.append(
                    f'<text x="{middle:g}" y="{top + height + 20}" text-anchor="middle" fill="#b4690e" font-size="11">'
                    f"{_SENDS[action.kind]}</text>"
                )
            x += width + 6
    parts.append(
        f'<text x="{left}" y="22" fill="#52606d" font-size="11">time, not to scale; arrows are all-reduces</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _both_ways(x: float, top: float, bottom: float) -> str:
    low, high = x - 4, x + 4
    up = f"M{low:g} {top + 7:g} L{x:g} {top:g} L{high:g} {top + 7:g}"
    down = f"M{low:g} {bottom - 7:g} L{x:g} {bottom:g} L{high:g} {bottom - 7:g}"
    return f'<path d="M{x:g} {top:g} V{bottom:g} {up} {down}" fill="none" stroke="#b4690e" stroke-width="1.6"/>'


# ------------------------------------------------------------------------------------- the picture of ring attention

_RANKS = ("#b9d7f5", "#bfe5c3", "#ffd9a0", "#d9c9f2")
_IDLE = "#e4e7eb"


def ring_picture() -> str:
    """Which rank computes which pair of chunks at which hop, and how long hops take, in both layouts of four ranks."""
    names = (("contiguous", False), ("zig-zag", True))
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 516" width="900" height="516"'
        ' font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="13">',
        "<title>Ring attention on four ranks: who computes what, contiguous and in zig-zag order</title>",
        '<rect width="900" height="516" rx="8" fill="#ffffff"/>',
    ]
    for (name, zigzag), top in zip(names, (44, 284), strict=True):
        parts += [_text(16, top + 14, name), *_scores(140, top, zigzag), *_lock_step(440, top + 14, zigzag)]
    parts.append(_text(140, 506, "rows: queries, columns: keys, number: hop", size=11))
    parts.append(_text(440, 506, "time: a hop takes as long as its busiest rank; grey waits", size=11))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scores(left: int, top: int, zigzag: bool, ranks: int = 4, side: int = 24) -> list[str]:
    """The lower triangle of all scores, chunk by chunk, in the colour of the rank that computes it."""
    from mpitrain.parallel.context.layout import positions

    owner = {int(chunk): r for r in range(ranks) for chunk in positions(2 * ranks, ranks, r, zigzag)}
    parts = [_text(left + side * (k + 0.5), top - 8, str(owner[k]), "middle", 11) for k in range(2 * ranks)]
    for q in range(2 * ranks):
        parts.append(_text(left - 8, top + side * q + 16, str(owner[q]), "end", 11))
        for k in range(q + 1):
            x, y, hop = left + side * k, top + side * q, (owner[q] - owner[k]) % ranks
            half = f"M{x} {y} V{y + side} H{x + side} Z" if k == q else f"M{x} {y} H{x + side} V{y + side} H{x} Z"
            parts.append(f'<path d="{half}" fill="{_RANKS[owner[q]]}" stroke="#ffffff" stroke-width="1.5"/>')
            parts.append(_text(x + (8 if k == q else side / 2), y + (20 if k == q else 16), str(hop), "middle", 11))
    return parts


def _lock_step(left: int, top: int, zigzag: bool, ranks: int = 4, unit: int = 30) -> list[str]:
    """One row a rank: what it computes at each hop, in pairs of chunks, and how long it waits for the busiest."""
    from mpitrain.parallel.context.layout import visible

    chunk, parts, x, total = 1000, [], left, 0
    for hop in range(ranks):
        seen = [visible(r, (r - hop) % ranks, 2 * chunk, zigzag=zigzag, causal=True) for r in range(ranks)]
        works = [0 if part is None else round(part.pairs / chunk**2) for part in seen]
        longest = max(works)
        parts.append(_text(x + unit * longest / 2, top - 8, f"hop {hop}", "middle", 11))
        for r, work in enumerate(works):
            y = top + 44 * r
            parts.append(f'<rect x="{x}" y="{y}" width="{unit * longest}" height="32" rx="4" fill="{_IDLE}"/>')
            if work:
                parts.append(f'<rect x="{x}" y="{y}" width="{unit * work}" height="32" rx="4" fill="{_RANKS[r]}"/>')
                parts.append(_text(x + unit * work / 2, y + 21, str(work), "middle"))
        x, total = x + unit * longest + 6, total + longest
    ends = [_text(left - 8, top + 44 * r + 21, f"rank {r}", "end", 11) for r in range(ranks)]
    return [*parts, *ends, _text(x - 6, top + 44 * ranks + 8, f"{total} pairs of chunks", "end", 11)]


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#1f2933" font-size="{size}">{text}</text>'


# ----------------------------------------------------------------------------------------- the picture of recomputation


def recompute_picture() -> str:
    """What waits for backward after each op, with none of 16 layers recomputed, each by itself, and two at a time."""
    lines = {"all kept": (0, "#9aa5b1"), "each layer recomputed": (1, "#2f7ed8"), "two at a time": (2, "#2f9e44")}
    runs = {name: _waiting(16, together) for name, (together, _) in lines.items()}
    left, bottom, wide, high = 60, 250, 780, 6.2
    longest = max(len(run) for run in runs.values())
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 300" width="900" height="300"'
        ' font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="13">',
        "<title>What waits for backward over the ops of a step, with and without recomputation</title>",
        '<rect width="900" height="300" rx="8" fill="#ffffff"/>',
        f'<path d="M{left} 30 V{bottom} H{left + wide}" fill="none" stroke="#9aa5b1"/>',
        *[_text(left - 8, bottom - high * n + 4, str(n), "end", 11) for n in (0, 12, 18, 33)],
        _text(left, 20, "arrays of a layer's size that wait", size=11),
        _text(left + wide, bottom + 18, "ops of forward and backward", "end", 11),
    ]
    for place, (name, run) in enumerate(runs.items()):
        colour, width = lines[name][1], wide / longest
        steps = "".join(f" V{bottom - high * held:g} H{left + width * (at + 1):.1f}" for at, held in enumerate(run))
        parts.append(f'<path d="M{left} {bottom}{steps}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        x = (60, 290, 600)[place]
        parts.append(f'<rect x="{x}" y="276" width="14" height="14" rx="3" fill="{colour}"/>')
        parts.append(_text(x + 20, 288, f"{name}: at most {max(run):g}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _waiting(layers: int, together: int) -> list[float]:
    """Arrays that wait after each op; so many layers at a time are recomputed, 0: none."""
    import numpy as np

    from mpitrain.autograd import Tape, Tensor
    from mpitrain.autograd.recompute import recompute
    from mpitrain.events import Event, listen

    def some(x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = ((x * 0.5).tanh() * x).tanh()
        return x

    found: list[float] = []
    x = Tensor(np.ones(64), requires_grad=True)

    def note(event: Event) -> None:
        if event.phase == "end" and not event.name.startswith("recompute"):
            found.append(tape.nbytes / x.data.nbytes)

    with listen(note), Tape() as tape:
        y = x
        for _ in range(layers // (together or layers)):
            y = recompute(some, y, together) if together else some(y, layers)
        tape.run_backward([(y, np.ones(64))])
    return found


# ------------------------------------------------------------------------------------------------ the picture of memory


def memory_picture() -> str:
    """Bytes by owner, as a memory ledger finds them, over a step of a small GPT with each kind of recompute."""
    owners = {
        "weights, gradients, moments": ("#cbd2d9", ("weights", "gradients", "optimizer state", "batch")),
        "activations": ("#2f7ed8", ("activations",)),
        "recompute scratch": ("#f08c00", ("recompute scratch",)),
        "values and their gradients": ("#2f9e44", ("values", "value gradients")),
    }
    runs = {recompute: _step_of_memory(recompute) for recompute in ("none", "selective", "full")}
    most = max(sum(now.values()) for run in runs.values() for now in run)
    left, bottom, wide, high, gap = 60, 250, 256, 200, 12
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 310" width="900" height="310"'
        ' font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="13">',
        "<title>Memory of a rank by owner over the ops of a step, with each kind of recompute</title>",
        '<rect width="900" height="310" rx="8" fill="#ffffff"/>',
        *[
            _text(left - 8, bottom - high * mib * 2**20 / most + 4, f"{mib}", "end", 11)
            for mib in range(0, int(most / 2**20) + 1, 3)
        ],
        _text(left - 8, 26, "MiB", "end", 11),
    ]
    for place, (recompute, run) in enumerate(runs.items()):
        x = left + place * (wide + gap)
        below = [0.0] * len(run)
        for colour, names in owners.values():
            above = [low + sum(now.get(name, 0) for name in names) for low, now in zip(below, run, strict=True)]
            there = " ".join(_corner(at, height, run, x, bottom, wide, high / most) for at, height in enumerate(above))
            back = [_corner(at, below[at], run, x, bottom, wide, high / most) for at in range(len(run))]
            parts.append(f'<polygon points="{there} {" ".join(reversed(back))}" fill="{colour}"/>')
            below = above
        parts.append(f'<path d="M{x} 40 V{bottom} H{x + wide}" fill="none" stroke="#9aa5b1"/>')
        parts.append(_text(x + 8, 30, f"{recompute}: at most {max(below) / 2**20:.2f} MiB"))
        parts.append(_text(x + wide, bottom + 18, "ops of a step", "end", 11))
    for x, (name, (colour, _)) in zip((60, 290, 430, 610), owners.items(), strict=True):
        parts.append(f'<rect x="{x}" y="284" width="14" height="14" rx="3" fill="{colour}"/>')
        parts.append(_text(x + 20, 296, name, size=12))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _corner(at: int, height: float, run: list[Any], x: int, bottom: int, wide: int, scale: float) -> str:
    return f"{x + wide * at / (len(run) - 1):.1f},{bottom - scale * height:.1f}"


def _step_of_memory(recompute: str) -> list[dict[str, int]]:
    """Bytes by owner after each op and action of the second step."""
    import numpy as np

    from mpitrain.comm.alone import Alone
    from mpitrain.comm.mesh import Mesh
    from mpitrain.comm.world import World
    from mpitrain.data.tokens import Batch
    from mpitrain.debug.memory import MemoryLedger
    from mpitrain.events import Event, listen
    from mpitrain.models.gpt import GPT, GPTConfig
    from mpitrain.optim.adam import AdamW
    from mpitrain.pipeline.executor import Executor
    from mpitrain.pipeline.passes import complete

    mesh = Mesh(World(Alone(), "none"))
    sizes = GPTConfig(vocab=64, layers=6, width=32, heads=4, seq_len=128)
    model = GPT(sizes, mesh, keep_scores=recompute == "none")
    for block in model.blocks:
        block.recompute = recompute == "full"
    executor = Executor(model, AdamW(model.parameters()), mesh, complete("1f1b", ranks=1, microbatches=1))
    tokens = np.arange(4 * 128).reshape(4, 128) * 7919 % 64
    batch = Batch(tokens, np.roll(tokens, -1, axis=1), np.arange(4), np.arange(128), step=0)
    ledger, found = MemoryLedger(), []

    def note(event: Event) -> None:
        if event.phase == "end" and event.kind in ("op", "action"):
            found.append(dict(ledger.now))

    with listen(ledger):
        executor.step(batch)
        with listen(note):
            executor.step(batch)
    return found


# ------------------------------------------------------------------------------------- the picture of learning rates


def rates_picture() -> str:
    """The four schedules over a run of 100 updates, a tenth of them warm-up, with and without a final rate."""
    from mpitrain.optim.lr import SCHEDULES

    total, warmup = 100, 10
    colours = {"constant": "#9aa5b1", "linear": "#2f9e44", "cosine": "#2f7ed8", "inverse-sqrt": "#b4690e"}
    left, bottom, wide, high = 60, 214, 780, 180
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 272" width="900" height="272"'
        ' font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="13">',
        "<title>Four schedules of the learning rate over a run</title>",
        '<rect width="900" height="272" rx="8" fill="#ffffff"/>',
        f'<path d="M{left} 24 V{bottom} H{left + wide}" fill="none" stroke="#9aa5b1"/>',
        _text(left - 8, bottom - high + 4, "peak", "end", 11),
        _text(left - 8, bottom + 4, "0", "end", 11),
        _text(left + wide * warmup / total, bottom + 18, "end of warm-up", "middle", 11),
        _text(left + wide, bottom + 18, "updates", "end", 11),
    ]
    for place, (name, schedule) in enumerate(SCHEDULES.items()):
        x = left + 190 * place
        parts.append(f'<rect x="{x}" y="248" width="14" height="14" rx="3" fill="{colours[name]}"/>')
        parts.append(_text(x + 20, 260, name))
        for final, dash in ((0.0, ""), (0.2, ' stroke-dasharray="5 4"')):
            rates = [schedule(update, total, warmup, 1.0, final) for update in range(total + 1)]
            if final and rates[-1] != final:
                continue
            points = " ".join(
                f"{left + wide * u / total:.1f},{bottom - high * rate:.1f}" for u, rate in enumerate(rates)
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.8"{dash}/>')
    parts.append(_text(left + wide, 24, "dashed: --lr-final 0.2", "end", 11))
    return "\n".join([*parts, "</svg>"]) + "\n"


# ----------------------------------------------------------------------------------------------------------- pipelines


class _Pipeline(NamedTuple):
    """How a schedule is shown: the heading of its picture, its sizes, and whether its messages are drawn."""

    title: str
    sizes: dict[str, int]
    arrows: bool = False


_EIGHT = {"ranks": 4, "microbatches": 8}

_PIPELINES = {
    "gpipe": _Pipeline("GPipe", _EIGHT, arrows=True),
    "1f1b": _Pipeline("1F1B with flush", _EIGHT, arrows=True),
    "interleaved": _Pipeline("Interleaved 1F1B, two chunks a rank", {**_EIGHT, "chunks": 2}),
    "zb-h1": _Pipeline("Zero bubble, ZB-H1", _EIGHT, arrows=True),
    "terapipe": _Pipeline("TeraPipe, four slices", {"ranks": 4, "microbatches": 2, "slices": 4}),
    "pipedream": _Pipeline("PipeDream", {"ranks": 4, "microbatches": 1, "batches": 10}),
    "pipedream-2bw": _Pipeline("PipeDream-2BW, batches of 4", {"ranks": 4, "microbatches": 4, "batches": 3}),
}


def pipeline_picture(name: str) -> str:
    """A schedule on four ranks."""
    from mpitrain.pipeline.passes import complete
    from mpitrain.pipeline.picture import svg
    from mpitrain.pipeline.simulate import Costs, simulate
    from mpitrain.schedule.costs import costs_of_passes

    title, sizes, arrows = _PIPELINES[name]
    rows = complete(name, **sizes)
    return svg(simulate(rows, costs_of_passes(Costs(), rows)), title, messages=arrows)


def pipelines_table() -> str:
    """The schedules at the same work: 8 micro-batches on 4 ranks; what never drains goes on over 64."""
    from mpitrain.pipeline.passes import complete
    from mpitrain.pipeline.render import in_flight
    from mpitrain.pipeline.schedules import SCHEDULES
    from mpitrain.pipeline.simulate import Costs, simulate
    from mpitrain.schedule.costs import costs_of_passes

    heads = "schedule", "time", "bubble", "in flight on rank 0 1 2 3", "messages that rank 1 sends", "what it does"
    lines = [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---:|---|"]
    for name, (_, sizes, _) in _PIPELINES.items():
        kind = SCHEDULES[name]
        work: dict[str, Any] = {**sizes, "microbatches": 8}
        if kind.versions is not None:
            work["batches"] = 64 if kind.versions == "newest" else 8
            work["microbatches"] = 64 // work["batches"]
        schedule = complete(name, **work)
        timeline = simulate(schedule, costs_of_passes(Costs(), schedule))
        rows = work.get("batches", 1) * work["microbatches"] / 8
        sent = sum(action.kind.startswith("SEND") for action in timeline.rows[1]) / rows
        flying = " ".join(f"{peak:g}" for peak in in_flight(timeline))
        bubble = f"{100 * timeline.bubble:.1f} %"
        cells = f"[{name}]({name}.md)", f"{timeline.makespan / rows:.4g}", bubble, flying, f"{sent:g}", kind.meaning
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------------------- files


def console_commands_table() -> str:
    """The commands of the console."""
    from mpitrain.debug.console.commands import COMMANDS, GROUPS

    lines = []
    for group in GROUPS:
        lines += ["", f"**{group}**", "", "| | short | |", "|---|---|---|"]
        lines += [f"| `{one.name}` | {_code(one.short)} | {one.brief} |" for one in COMMANDS if one.group == group]
    return "\n".join(lines[1:]) + "\n"


def _code(word: str) -> str:
    return f"`{word}`" if word else ""


def console_clauses_table() -> str:
    """The clauses of a condition."""
    from mpitrain.debug.console.conditions import WORDS

    return "\n".join(["| clause | |", "|---|---|", *(f"| `{word}` | {text} |" for word, text in WORDS.items())]) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "options": options_table,
    "models": models_table,
    "collectives": collectives_table,
    "verbs": verbs_table,
    "layout-words": layout_words_table,
    "verify-options": verify_options_table,
    "generate-options": generate_options_table,
    "verify-order": verify_order_table,
    "schedule-options": schedule_options_table,
    "trace-options": trace_options_table,
    "checkpoint-options": checkpoint_options_table,
    "pipelines": pipelines_table,
    "console-commands": console_commands_table,
    "console-clauses": console_clauses_table,
}
PICTURES: dict[str, Callable[[], str]] = {
    "images/step.svg": step_picture,
    "images/ring.svg": ring_picture,
    "images/recompute.svg": recompute_picture,
    "images/memory.svg": memory_picture,
    "images/learning-rates.svg": rates_picture,
    "images/experts.svg": experts_picture,
    "images/checkpoint-save.svg": save_picture,
    "images/checkpoint-layouts.svg": layouts_picture,
    "images/console.svg": console_picture,
    **{f"images/pipeline-{name}.svg": partial(pipeline_picture, name) for name in _PIPELINES},
}


def current() -> dict[Path, str]:
    """What every page and picture with generated parts has to be."""
    texts: dict[Path, str] = {}
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if _PART.search(text):
            texts[page] = _PART.sub(lambda part: part[1] + TABLES[part[2]]() + part[4], text)
    texts.update((DOCS / name, draw()) for name, draw in PICTURES.items())
    texts.update((DOCS / name, text) for name, text in api_pages().items())
    return texts


def main(argv: list[str]) -> int:
    """Rewrite, or with --check compare."""
    texts = current()
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" not in argv:
        for path in stale:
            path.parent.mkdir(exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
    for path in stale:
        print(path.relative_to(DOCS.parent))
    return 1 if stale and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
