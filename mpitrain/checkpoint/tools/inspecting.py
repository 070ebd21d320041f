"""`mpitrain checkpoint inspect`: what is in a checkpoint or one HDF5 file, as far as an index tells it.

No value is read, so it takes a moment, whatever the size.  All text that comes from a file is shown as `options.show`
shows it: a name that holds an escape sequence does not reach the terminal.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.catalog import MODELS, OF_MODEL
from mpitrain.checkpoint import foreign
from mpitrain.checkpoint.manifest import MANIFEST, Logical
from mpitrain.checkpoint.tools import wording
from mpitrain.checkpoint.tools.source import Source, chosen, kind_of, nbytes
from mpitrain.config import DEFAULT_LR, OPTIONS
from mpitrain.options import show

_NUMBER = re.compile(r"\.([0-9]{1,6})(?=\.)")


# ----------------------------------------------------------------------------------------------------------- checkpoint


def checkpoint_text(source: Source, patterns: Sequence[str]) -> str:
    """A checkpoint: what it is, and its tensors in groups; with patterns each tensor that they name, and its places."""
    if patterns:
        return places_text(source, patterns)
    manifest = source.manifest
    lines = [*(f"passed over: {note}" for note in source.notes), show(source), "", *_about(source), ""]
    total = sum(map(nbytes, manifest.tensors.values()))
    files = sum(entry.nbytes for entry in manifest.files.values())
    lines.append(
        f"  {wording.count(len(manifest.tensors), 'tensor')}, {wording.size(total)}, in "
        f"{wording.count(len(manifest.files), 'file')} of {wording.size(files)}"
    )
    return "\n".join([*lines, "", *_kinds(manifest.tensors), "", *_groups(manifest.tensors)])


def _about(source: Source) -> list[str]:
    """Step, layout, versions, settings, data, scale."""
    manifest = source.manifest
    scalars = manifest.scalars
    updates, tokens, data = scalars.get("updates"), scalars.get("tokens"), scalars.get("data")
    step = f"{manifest.step:,}"
    if type(updates) is int:
        step += f"; {wording.count(updates, 'update')}"
    if type(tokens) is int:
        step += f"; learned from {wording.count(tokens, 'token')}"
    versions = ", ".join(f"{show(name)} {show(version)}" for name, version in list(manifest.versions.items())[:12])
    rows = [
        ("step", step),
        ("saved", f"{wording.date(_saved(source))} on {wording.layout(manifest.layout)}"),
        ("by", versions),
    ]
    if isinstance(config := scalars.get("config"), dict):
        rows.append(("settings", " ".join(flags_of(config)) or "the defaults"))
    if isinstance(data, dict):
        sha = str(data.get("sha256"))[:12]
        rows.append(("data", f"next is step {show(data.get('next_step'))} of the text with sha256 {show(sha)}..."))
    if isinstance(scaler := scalars.get("scaler"), dict):
        shown = (f"{show(key)} {show(value)}" for key, value in scaler.items() if isinstance(value, int | float | str))
        rows.append(("loss scale", ", ".join(shown)))
    known = {"updates", "tokens", "data", "config", "scaler"}
    if more := [show(name) for name in scalars if name not in known]:
        rows.append(("also", wording.some(more, 12)))
    return [line for name, text in rows for line in _wrapped(name, text)]


def flags_of(config: Mapping[str, Any]) -> list[str]:
    """Saved settings as the flags that ask for them; those that are what they would be anyway are left out."""
    model = MODELS.get(str(config.get("model")), {})
    usual = {**{name: option.default for name, option in OPTIONS.items()}, **{s: model.get(s) for s in OF_MODEL}}
    usual |= {"lr": DEFAULT_LR.get(str(config.get("optimizer"))), "top_k": 2 if config.get("router") == "gshard" else 1}
    flags = []
    for name in [*(name for name in OPTIONS if name in config), *(name for name in config if name not in OPTIONS)]:
        option, value = OPTIONS.get(name), config[name]
        if (option is not None and option.session) or name == "run" or value is None or usual.get(name) == value:
            continue
        if isinstance(value, bool) and option is not None:
            flags.append(option.flag if value else option.off)
        else:
            flag = show(f"--{name.replace('_', '-')}")
            flags.append(f"{flag} {show(f'{value:g}' if isinstance(value, float) else value)}")
    return flags


def _kinds(tensors: Mapping[str, Logical]) -> list[str]:
    """A table of totals by kind."""
    kinds: dict[str, list[Logical]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(kind_of(name), []).append(tensor)
    rows = [["kind", "tensors", "elements", "size", "dtype", "in"]]
    rows += [[kind or "(none)", *_sums(of)] for kind, of in kinds.items()]
    if len(kinds) > 1:
        rows.append(["all", *_sums(list(tensors.values()))])
    return wording.table(rows, right="123")


def _sums(tensors: Sequence[Logical]) -> list[str]:
    elements = sum(math.prod(t.shape) for t in tensors)
    files = wording.files(slab.file for t in tensors for slab in t.slabs)
    dtypes = ", ".join(sorted({t.dtype for t in tensors}))
    return [f"{len(tensors):,}", f"{elements:,}", wording.size(sum(map(nbytes, tensors))), dtypes, files]


def _groups(tensors: Mapping[str, Logical]) -> list[str]:
    """A table a kind, tensors of the same name in other blocks in one row; kinds that look the same in one table."""
    tables: dict[tuple[Any, ...], list[str]] = {}
    for kind in dict.fromkeys(map(kind_of, tensors)):
        rows: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        for name, tensor in tensors.items():
            if kind_of(name) == kind:
                short = name.removeprefix(f"{kind}/")
                number = _NUMBER.search(short)
                pattern = _NUMBER.sub(".{}", short, count=1)
                rows.setdefault((pattern, tensor.shape, tensor.dtype), []).append(int(number[1]) if number else -1)
        key = tuple((row, tuple(numbers)) for row, numbers in rows.items())
        tables.setdefault(key, []).append(kind)
    lines: list[str] = []
    for key, kinds in tables.items():
        rows_ = []
        for (pattern, shape, dtype), numbers in key:
            one = math.prod(shape) * np.dtype(dtype).itemsize
            name = pattern.replace("{}", wording.ranges(numbers).replace(", ", ",")) if numbers[0] >= 0 else pattern
            times = f"{len(numbers)} x" if len(numbers) > 1 else ""
            rows_.append([name, times, wording.shape(shape), dtype, wording.size(one * len(numbers))])
        lines += [
            f"  {', '.join(kind or '(none)' for kind in kinds)}",
            *wording.table(rows_, right="14", indent="    "),
        ]
        lines.append("")
    return lines[:-1]


def places_text(source: Source, patterns: Sequence[str]) -> str:
    """Tensors, and where each slab of them lies."""
    lines = []
    for name, tensor in source.chosen(patterns).items():
        lines.append(f"{name}  {wording.shape(tensor.shape)}  {tensor.dtype}  {wording.size(nbytes(tensor))}")
        rows = []
        for slab in tensor.slabs:
            part = ", ".join(f"{start}:{stop}" for start, stop in zip(slab.start, slab.stop, strict=True))
            size = slab.elements * np.dtype(tensor.dtype).itemsize
            path = source.paths[slab.file].name
            rows.append(
                [f"[{part}]", show(path), f"at byte {slab.offset}", wording.size(size), f"{_sums_of(slab.crc32)}"]
            )
        lines += wording.table(rows, right="3")
    return "\n".join(lines)


def _sums_of(crcs: Sequence[int]) -> str:
    return f"CRC-32 {crcs[0]:08x}" if len(crcs) == 1 else f"CRC-32 {crcs[0]:08x} and {len(crcs) - 1} more"


def checkpoint_json(source: Source, patterns: Sequence[str]) -> dict[str, Any]:
    """A checkpoint, for programs."""
    manifest = source.manifest
    return {
        "checkpoint": str(source),
        "step": manifest.step,
        "saved": _saved(source),
        "layout": manifest.layout,
        "versions": manifest.versions,
        "scalars": manifest.scalars,
        "files": {str(source.paths[name].name): entry.nbytes for name, entry in manifest.files.items()},
        "tensors": {
            name: {
                "shape": t.shape,
                "dtype": t.dtype,
                "bytes": nbytes(t),
                "files": [source.paths[slab.file].name for slab in t.slabs],
            }
            for name, t in source.chosen(patterns).items()
        },
    }


# -------------------------------------------------------------------------------------------- a file of another program


def foreign_as_tensors(file: foreign.ForeignFile) -> dict[str, Logical]:
    """What an HDF5 file holds that has no index of ours."""
    return {name: Logical(dataset.shape, dataset.dtype, ()) for name, dataset in file.datasets.items()}


def foreign_text(file: foreign.ForeignFile, patterns: Sequence[str]) -> str:
    """An HDF5 file without an index of ours."""
    tensors = chosen(foreign_as_tensors(file), patterns, file.path)
    total = sum(map(nbytes, tensors.values()))
    head = f"{show(file.path)}: an HDF5 file of {wording.size(file.nbytes)}, not a checkpoint of mpitrain"
    lines = [head, "", f"  {wording.count(len(tensors), 'dataset')}, {wording.size(total)}"]
    rows = []
    for name, tensor in tensors.items():
        packed = ", ".join(file.datasets[name].filters)
        rows.append([show(name), wording.shape(tensor.shape), tensor.dtype, wording.size(nbytes(tensor)), packed])
    return "\n".join([*lines, "", *wording.table(rows, right="3")])


def foreign_json(file: foreign.ForeignFile, patterns: Sequence[str]) -> dict[str, Any]:
    """An HDF5 file without an index of ours, for programs."""
    tensors = chosen(foreign_as_tensors(file), patterns, file.path)
    return {
        "file": str(file.path),
        "bytes": file.nbytes,
        "tensors": {n: {"shape": t.shape, "dtype": t.dtype, "bytes": nbytes(t)} for n, t in tensors.items()},
    }


# ---------------------------------------------------------------------------------------------------------------- words


def _saved(source: Source) -> float:
    return os.stat(source.path / MANIFEST if source.path.is_dir() else source.path).st_mtime


def _wrapped(name: str, text: str, width: int = 110) -> list[str]:
    """A name and a text beside it, over as many lines as it takes; a flag stays with its value."""
    words = re.sub(r"(--[a-z0-9-]+) (?!-)", "\\1\x00", text).split(" ")
    lines, line = [], ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    lines.append(line)
    return [f"  {name if not i else '':<11} {part}".replace("\x00", " ") for i, part in enumerate(lines)]
