"""The list of a run's checkpoints: which are complete, what is wrong with others, what was given up or left behind."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.folders import survey
from mpitrain.checkpoint.manifest import MANIFEST, read_manifest
from mpitrain.checkpoint.tools import wording
from mpitrain.options import show

_PLACE = re.compile(r"(?:given-up-[0-9]+|\.old|\.tmp|\.gone)-step-[0-9]{8,}")


@dataclass(frozen=True)
class Entry:
    """A checkpoint of a run.

    state: complete, damaged, given up, or left behind by a save that was killed, which the next one removes; wrong:
    what is wrong with it; facts: of its manifest.
    """

    folder: Path
    state: str
    wrong: str = ""
    facts: Mapping[str, Any] | None = None


def entries(run: Path) -> list[Entry]:
    """The checkpoints of a run, newest first; then what it gave up, and what killed saves left behind."""
    found = []
    for folder, wrong in survey(run):
        found.append(Entry(folder, "damaged", wrong) if wrong else Entry(folder, "complete", facts=_facts(folder)))
    for folder in sorted((run / "checkpoints").iterdir()):
        if _PLACE.fullmatch(folder.name) and folder.is_dir() and folder not in [entry.folder for entry in found]:
            given_up = folder.name.startswith("given-up-")
            found.append(Entry(folder, "given up", facts=_facts(folder)) if given_up else Entry(folder, "left behind"))
    return found


def _facts(folder: Path) -> dict[str, Any]:
    """What a list of checkpoints says of one; {} if its manifest is not whole."""
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return {}
    return {
        "step": manifest.step,
        "updates": manifest.scalars.get("updates"),
        "saved": os.stat(folder / MANIFEST).st_mtime,
        "layout": manifest.layout,
        "files": len(manifest.files),
        "bytes": sum(entry.nbytes for entry in manifest.files.values()),
    }


def run_text(run: Path, found: Sequence[Entry]) -> str:
    """A run as a table."""
    whole = [entry.facts for entry in found if entry.state == "complete" and entry.facts]
    total = sum(facts["bytes"] for facts in whole)
    head = f"{show(run)}: {wording.count(len(whole), 'complete checkpoint')}, {wording.size(total)}"
    if not found:
        return f"{show(run)}: no checkpoints yet; --save-every N and --stop-after N make some"
    rows = [["step", "updates", "saved", "on", "files", "size", ""]]
    for entry in found:
        step = entry.folder.name.rpartition("-")[2].lstrip("0") or "0"
        facts = entry.facts or {}
        state = entry.state if entry.state in ("complete", "damaged") else f"{entry.state}: {entry.folder.name}"
        if not facts:
            rows.append([step, "", "", "", "", "", state])
            continue
        updates = facts["updates"]
        rows.append(
            [
                step,
                f"{updates}" if type(updates) is int else "?",
                wording.date(facts["saved"]),
                wording.layout(facts["layout"]),
                str(facts["files"]),
                wording.size(facts["bytes"]),
                state,
            ]
        )
    lines = [head, "", *wording.table(rows, right="0145")]
    if wrong := [entry.wrong for entry in found if entry.wrong]:
        lines += ["", *wrong]
    return "\n".join(lines)


def run_json(run: Path, found: Sequence[Entry]) -> dict[str, Any]:
    """A run, for programs."""
    return {
        "run": str(run),
        "checkpoints": [
            {"path": str(e.folder), "state": e.state, **({"wrong": e.wrong} if e.wrong else {}), **(e.facts or {})}
            for e in found
        ],
    }
