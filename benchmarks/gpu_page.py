"""The page of a GPU check: what is right, how fast it is beside PyTorch, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plots
from gpu_chips import chip_of, peak

PARTS = {
    "compiled": "sources and precisions, compiled for this device",
    "kernels": "kernels, against the reference in float64",
    "streams": "ways to read something stale, and memory",
    "training": "training runs, against NumPy in float64",
    "commands": "runs of the command line, against the CPU",
}
GIB = 2**30


def device_words(facts: dict[str, Any]) -> str:
    """What was checked."""
    return (
        f"{facts['name']}, compute capability {facts['capability']}, {facts['memory'] / GIB:.0f} GiB; CuPy"
        f" {facts['cupy']} for CUDA {facts['runtime']}, driver for CUDA {facts['driver']}"
    )


def verdicts(found: dict[str, Any]) -> list[tuple[bool | None, str]]:
    """What was asked, and whether it holds: parts that try things, and whether both sides train the same.

    None in the place of right and wrong: this was not checked, for want of time or because nobody asked for it.
    """
    said: list[tuple[bool | None, str]] = []
    for name, words in PARTS.items():
        if name in found:
            part = found[name]
            bad = [thing["name"] for thing in part["things"] if not thing["ok"]]
            left = part["of"] - len(part["things"]) - len(part["troubles"])
            more = f"; {left} were left out for want of time" if left > 0 else ""
            wrong = f"; wrong: {', '.join(bad[:8])}{' ...' if len(bad) > 8 else ''}" if bad else ""
            trouble = f"; {'; '.join(part['troubles'][:3])}" if part["troubles"] else ""
            ok = not bad and not part["troubles"] and (bool(part["things"]) or (None if left > 0 else False))
            said.append((ok, f"{len(part['things']) - len(bad)} of {part['of']} {words}{more}{wrong}{trouble}"))
    if "speed" in found:
        speed = found["speed"]
        mine = {row["dtype"]: row for row in speed["rows"] if row["side"] == "mpitrain"}
        more = f"; {', '.join(speed['left'])} were left out for want of time" if speed["left"] else ""
        trouble = f"; {'; '.join(speed['troubles'][:3])}" if speed["troubles"] else ""
        ok = not speed["troubles"] and (bool(mine) or (None if speed["left"] else False))
        said.append((ok, f"speed was measured in {', '.join(mine) or 'nothing'}{more}{trouble}"))
        for row in speed["rows"]:
            if row["side"] == "PyTorch" and row["dtype"] in mine:
                gap = abs(row["loss"] - mine[row["dtype"]]["loss"]) / abs(row["loss"])
                bound = 1e-4 if row["dtype"] == "float32" else 1e-2
                said.append((gap <= bound, f"first losses in {row['dtype']}, {row['mode']}, differ by {gap:.1e}"))
    absent = [part for part in (*PARTS, "speed") if part not in found]
    if absent:
        said.append((None, f"not checked: {', '.join(absent)}, which --parts did not ask for"))
    return said


def write(found: dict[str, Any], page: Path) -> None:
    """Write the page, and its picture beside it."""
    picture = page.with_suffix(".svg")
    page.write_text("\n".join(_lines(found, picture.name)) + "\n")
    rows = found.get("speed", {}).get("rows", [])
    if rows:
        picture.write_text(_picture(found, rows))


def _lines(found: dict[str, Any], picture: str) -> Iterator[str]:
    yield "# mpitrain on a GPU"
    yield ""
    if "skipped" in found:
        yield f"Skipped: nothing was checked or measured. {found['skipped']}"
        return
    facts = found["device"]
    yield (
        f"{device_words(facts)}; {found['seconds']:.0f} s in all, commit {found['machine']['commit']},"
        f" {found['machine']['time']}."
    )
    if found["tiny"]:
        yield ""
        yield "**Tiny sizes: this tries the script, and no figure here means anything.**"
    yield ""
    marks = {True: "right", False: "**WRONG**", None: "-"}
    yield from _table(("", "what"), [(marks[ok], words) for ok, words in verdicts(found)])
    if found.get("speed", {}).get("rows"):
        yield from _speed(found, picture)
    yield from _troubles(found)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' for _ in head)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in row)} |"


def _speed(found: dict[str, Any], picture: str) -> Iterator[str]:
    speed, facts = found["speed"], found["device"]
    config = speed["task"]["config"]
    yield ""
    yield "## Training beside PyTorch"
    yield ""
    yield (
        f"{_trained(speed)}; {config['layers']} layers, width {config['width']}, {config['heads']} heads, vocabulary"
        f" {config['vocab']:,}, tied; AdamW, clipping. {_large(speed['flops'])}FLOP a step"
        " (72 B L s h^2 (1 + s/6h + V/12hL))."
    )
    if speed["torch"]:
        yield f"PyTorch was not measured: {speed['torch']}."
    yield ""
    yield f"![Tokens a second]({picture})"
    yield ""
    head = ("side", "precision", "tokens/s", "min-max", "ms a step", "MFU", "peak GiB: used", "held", "first loss")
    yield from _table(head, [_speed_row(row, speed["task"]) for row in speed["rows"]])
    yield ""
    yield "autocast: weights in float32, products in the half. mpitrain's halves have masters in float32. PyTorch is"
    yield ("eager, with scaled_dot_product_attention and fused AdamW. Neither uses TF32. " + _peaks(facts))
    yield ""
    yield "### Where a step's time goes"
    yield ""
    yield "Host: what the host does for a step, without its waits. Device: from the step's first kernel to its last if"
    yield "the host is ahead. Where the host takes longer than the device, the device waits for launches."
    yield ""
    looked = [row for row in speed["rows"] if "host_ms" in row]
    head = ("side", "precision", "step, ms", "host, ms", "device, ms", "host / step", "device idle", "waits")
    yield from _table(head, [_looked_row(row) for row in looked])
    yield ""
    yield "Step, host, device and kernels were timed in steps of their own each, kernels with a stamp before and after"
    yield "every call: where a step is small the stamps are much of it, and shares may pass 100 %."
    for row in looked:
        if row["kernels"]:
            yield ""
            yield f"mpitrain, {row['dtype']}, by kernel:"
            yield ""
            yield from _table(("kernel", "ms", "calls", "of the device's time"), list(_kernel_rows(row)))
    if speed["ops"]:
        yield ""
        yield "### Operations one by one"
        yield ""
        head = ("operation", "precision", "mpitrain, ms", "PyTorch, ms", "ratio", "mpitrain reaches")
        yield from _table(head, [_op_row(row, facts["name"]) for row in speed["ops"]])
        yield ""
        yield "Ratio: mpitrain's time over PyTorch's. Below 1 mpitrain is the faster one."


def _trained(speed: dict[str, Any]) -> str:
    parameters = max(row["parameters"] for row in speed["rows"])
    batch, length = speed["task"]["batch"], speed["task"]["config"]["seq_len"]
    return f"GPT of {_large(parameters)} parameters, {batch} x {length} tokens a step"


def _large(number: float) -> str:
    """Its first digits and what they count: "124.4 M", "21.5 k"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g} {letter}"
    return f"{number:.0f}"


def _peaks(facts: dict[str, Any]) -> str:
    chip = chip_of(facts["name"])
    if chip is None:
        return "What this chip can do at most is not in the table (gpu_chips.py), so there is no MFU."
    return f"MFU is of {chip.single:g} TFLOP/s in float32 and {chip.half:g} in halves."


def _speed_row(row: dict[str, Any], task: dict[str, Any]) -> list[str]:
    tokens = task["batch"] * task["config"]["seq_len"]
    low, high = tokens / max(row["times"]), tokens / min(row["times"])
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    memory = [f"{row[key] / GIB:.2f}" if row.get(key) else "-" for key in ("used", "held")]
    ms = f"{1e3 * row['seconds']:.1f}"
    name = f"{row['dtype']}{'' if row['mode'] == 'plain' else ', ' + row['mode']}"
    return [
        row["side"],
        name,
        f"{row['tokens_per_s']:,.0f}",
        f"{low:,.0f}-{high:,.0f}",
        ms,
        mfu,
        *memory,
        f"{row['loss']:.5f}",
    ]


def _looked_row(row: dict[str, Any]) -> list[str]:
    step = 1e3 * row["seconds"]
    name = f"{row['dtype']}{'' if row['mode'] == 'plain' else ', ' + row['mode']}"
    times = [f"{ms:.1f}" for ms in (step, row["host_ms"], row["device_ms"])]
    return [
        row["side"], name, *times, f"{row['host_ms'] / step:.0%}", f"{max(0.0, 1 - row['device_ms'] / step):.0%}",
        str(row["waits"]),
    ]  # fmt: skip


def _kernel_rows(row: dict[str, Any]) -> Iterator[list[str]]:
    for name, (ms, calls) in row["kernels"].items():
        yield [name, f"{ms:.2f}", str(calls), f"{ms / row['device_ms']:.1%}"]
    rest = row["device_ms"] - sum(ms for ms, _ in row["kernels"].values())
    yield ["everything else", f"{max(0.0, rest):.2f}", "", f"{max(0.0, rest) / row['device_ms']:.1%}"]


def _op_row(row: dict[str, Any], name: str) -> list[str]:
    mine, torchs = row.get("mpitrain"), row.get("PyTorch")
    ratio = f"{mine / torchs:.2f}" if mine and torchs else "-"
    reached = "-"
    if mine and row["flops"]:
        most = peak(name, row["dtype"])
        share = f", {row['flops'] / mine * 1e3 / most:.0%} of the peak" if most else ""
        reached = f"{_large(row['flops'] / mine * 1e3)}FLOP/s{share}"
    elif mine and row["bytes"]:
        chip = chip_of(name)
        share = f", {row['bytes'] / mine / 1e6 / chip.memory:.0%} of the memory's" if chip else ""
        reached = f"{row['bytes'] / mine / 1e6:,.0f} GB/s{share}"
    return [row["name"], row["dtype"], *(f"{ms:.3f}" if ms else "-" for ms in (mine, torchs)), ratio, reached]


def _troubles(found: dict[str, Any]) -> Iterator[str]:
    bad = [(part, thing) for part in PARTS for thing in found.get(part, {}).get("things", []) if not thing["ok"]]
    troubles = [(part, words) for part in (*PARTS, "speed") for words in found.get(part, {}).get("troubles", [])]
    if bad or troubles:
        yield ""
        yield "## What is wrong"
        yield ""
        rows = [(part, thing["name"], str(thing["found"])[:300]) for part, thing in bad]
        yield from _table(("part", "what", "found"), rows + [(part, "", words[:300]) for part, words in troubles])


def _picture(found: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    bars = [
        plots.Bar(
            f"{row['side']}, {row['dtype']}{'' if row['mode'] == 'plain' else '*'}",
            row["tokens_per_s"],
            f"{row['tokens_per_s']:,.0f}" + ("" if row["mfu"] is None else f", MFU {row['mfu']:.0%}"),
            0 if row["side"] == "mpitrain" else 1,
        )
        for row in rows
    ]
    precisions = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    words = f"{found['device']['name']}; {_trained(found['speed'])}; {precisions}; * autocast"
    return plots.bars("Tokens a second", words, bars)
