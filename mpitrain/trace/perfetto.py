"""A trace for other viewers: the Trace Event Format that ui.perfetto.dev and chrome://tracing open.

    {"traceEvents": [
      {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "rank 3 pp0 dp1 tp1"}},
      {"ph": "X", "pid": 3, "tid": 0, "ts": 0.512, "dur": 91.25, "name": "F0@0", "cat": "action", "args": {...}},
      {"ph": "s", "pid": 3, "tid": 0, "ts": 80.0, "id": 1, "name": "send", "cat": "pp"},            an arrow begins
      {"ph": "f", "pid": 7, "tid": 0, "ts": 95.5, "id": 1, "name": "send", "cat": "pp", "bp": "e"}  and ends
      {"ph": "C", "pid": 3, "ts": 91.762, "name": "memory", "args": {"activations": 1048576}}, ...]}

A rank is a process, times are microseconds from the first moment of the trace by the clock of all.  What a rank does
itself nests on track 0; what its other threads move is on tracks of their own.  An arrow leads from a send to where the
message came, and from the last rank that called a collective to each that waited for it.

The format: "Trace Event Format", Duffy and others, in the documents of Chromium's tracing project.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mpitrain import disk
from mpitrain.debug.trace.nesting import NESTED
from mpitrain.debug.trace.records import KIND, KINDS, SPAN
from mpitrain.errors import ConfigError
from mpitrain.options import show
from mpitrain.trace.held import amounts_of
from mpitrain.trace.known import Known, Lane
from mpitrain.trace.places import place_of

Array = np.ndarray[Any, Any]

OTHER_THREADS = 1  # the first track of what other threads do
MOST_TRACKS = 64  # of them
_AT_A_TIME = 1 << 14
_WORDS = ("path", "action", "site", "axis", "shape")


def write_perfetto(known: Known, path: str) -> int:
    """Write the file, compressed where its name ends in .gz; the number of its bytes.

    Raises:
        ConfigError: it cannot be written.
    """
    target = Path(path)
    draft = target.with_name(f"{target.name}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)  # of a process that was killed
        with open(disk.create(draft), "wb") as file:
            if path.endswith(".gz"):
                with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
                    _write(known, packed)
            else:
                _write(known, file)
            size = file.tell()
        disk.rename(draft, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise ConfigError(f"--perfetto {show(path)}: cannot be written: {error.strerror}.") from None
    return size


def _write(known: Known, file: BinaryIO | gzip.GzipFile) -> None:
    """Events one by one: of a large trace they are gigabytes."""
    before = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    for event in events(known):
        file.write(before + json.dumps(event, separators=(",", ":"), allow_nan=False).encode())
        before = b",\n"
    file.write(b"\n]}\n")


def events(known: Known) -> Iterator[dict[str, Any]]:
    """All events."""
    origin = min((int(lane.start.min()) for lane in known.lanes if lane.spans.size), default=0)
    for lane in known.lanes:
        yield from _process(known, lane)
        yield from _spans(lane, origin)
        yield from _memory(known, lane, origin)
    yield from _arrows(known, origin)


def _process(known: Known, lane: Lane) -> Iterator[dict[str, Any]]:
    rank = lane.number
    name = f"rank {rank} {place_of(known, lane)}".strip()
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "name": "process_labels", "args": {"labels": lane.rank.host}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "actions, ops, messages"}}


def _spans(lane: Lane, origin: int) -> Iterator[dict[str, Any]]:
    tracks = _tracks(lane)
    for track in sorted(set(tracks.tolist()) - {0}):
        name = f"other threads {track - OTHER_THREADS + 1}"
        yield {"ph": "M", "pid": lane.number, "tid": track, "name": "thread_name", "args": {"name": name}}
    texts, names = lane.rank.strings, list(SPAN.names or ())
    for values, start, stop, track, waited, whom in _rows(lane, tracks):
        span = dict(zip(names, values, strict=True))
        args = {word: texts[span[word]] for word in _WORDS if span[word]}
        args |= {"step": span["step"]} if span["step"] else {}
        if span["axis"]:
            args |= {"number": span["number"]}
            args |= {"peer": span["peer"], "tag": span["tag"]} if span["peer"] >= 0 else {}
        args |= {"bytes": span["bytes"]} if span["bytes"] else {}
        args |= {"waited_ms": waited / 1e6, "waited_for_rank": whom} if whom >= 0 else {}
        kind = KINDS[span["kind"]]
        name = f"wait {texts[span['name']]}" if kind == "wait" else texts[span["name"]]
        event = {"pid": lane.number, "tid": track, "ts": _us(start - origin), "name": name, "cat": kind, "args": args}
        if kind == "arrival":
            yield {"ph": "i", "s": "t", **event}
        else:
            yield {"ph": "X", "dur": _us(stop - start), **event}


def _rows(lane: Lane, tracks: Array) -> Iterator[tuple[Any, ...]]:
    """Fields, start, stop, track, ns of waiting and for whom, of each span; some thousand at a time as Python's."""
    columns = lane.spans, lane.start, lane.stop, tracks, lane.waited.ns, lane.waited.whom
    for first in range(0, lane.spans.size, _AT_A_TIME):
        yield from zip(*(column[first : first + _AT_A_TIME].tolist() for column in columns), strict=True)


def _tracks(lane: Lane) -> Array:
    """The track of each span: what is not the rank's own thread goes where nothing overlaps it."""
    tracks = np.zeros(lane.spans.size, np.int64)
    ends = [-(1 << 62)] * MOST_TRACKS
    for at in np.flatnonzero(~np.isin(lane.spans["kind"], (*NESTED, KIND["arrival"]))).tolist():
        free = next((track for track, end in enumerate(ends) if end <= lane.start[at]), MOST_TRACKS - 1)
        ends[free] = int(lane.stop[at])
        tracks[at] = OTHER_THREADS + free
    return tracks


def _memory(known: Known, lane: Lane, origin: int) -> Iterator[dict[str, Any]]:
    found = amounts_of(lane)
    if found is None:
        return
    for time, nbytes in zip(known.clocks.shared(lane.number, found.times).tolist(), found.nbytes.tolist(), strict=True):
        args = dict(zip(found.owners, nbytes, strict=True))
        yield {"ph": "C", "pid": lane.number, "ts": _us(max(time - origin, 0)), "name": "memory", "args": args}


def _arrows(known: Known, origin: int) -> Iterator[dict[str, Any]]:
    lanes = {lane.number: lane for lane in known.lanes}
    number = 0
    for pair in known.messages.pairs:
        number += 1
        source, dest = lanes[pair["source"]], lanes[pair["dest"]]
        yield from _arrow(number, source, pair["sent"], dest, pair["got"], origin)
    met = known.messages.meetings
    calls = {(meeting, rank): span for meeting, rank, span in met[["meeting", "rank", "span"]].tolist()}
    for meeting, rank, done in met[["meeting", "rank", "done"]].tolist():
        lane = lanes[rank]
        whom = int(lane.waited.whom[done]) if done >= 0 else -1
        if (meeting, whom) in calls:
            number += 1
            yield from _arrow(number, lanes[whom], calls[meeting, whom], lane, done, origin)


def _arrow(number: int, source: Lane, sent: int, dest: Lane, got: int, origin: int) -> Iterator[dict[str, Any]]:
    """From the begin of a call to just before the end of the span in which its message came."""
    about = {"id": number, "name": "message", "cat": source.rank.text(source.spans["axis"][sent]) or "message"}
    end = max(int(dest.stop[got]) - 1, int(dest.start[got]))
    yield {"ph": "s", "pid": source.number, "tid": 0, "ts": _us(int(source.start[sent]) - origin), **about}
    yield {"ph": "f", "bp": "e", "pid": dest.number, "tid": 0, "ts": _us(end - origin), **about}


def _us(ns: int) -> float:
    return ns / 1000
