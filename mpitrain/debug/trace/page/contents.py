"""What of a trace a page holds: spans on one clock, what they are called, messages with both ends, memory.

Spans of a run repeat themselves, step after step: what a span is, but for its time, is a *label*, and a run of any
length has some hundred of them.  So a span is little more than its start, its length and its label.

A span's number in the page counts over all ranks, rank by rank, in order of time.  Times are ticks from the first
moment of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.debug.trace.clocks import Clocks
from mpitrain.debug.trace.matches import Matched
from mpitrain.debug.trace.nesting import parents
from mpitrain.debug.trace.page.choice import Choice
from mpitrain.debug.trace.page.columns import Columns
from mpitrain.debug.trace.page.plain import number_of, shown
from mpitrain.debug.trace.records import KIND, KINDS, RankTrace, Trace
from mpitrain.debug.trace.waits import Waited, waits

TICK = 100  # ns; a span in Python takes longer
WORDS = ("name", "path", "action", "site", "axis", "shape")  # fields of a span that are numbers of strings
LABEL = ("kind", *WORDS, "peer", "tag", "bytes")
MESSAGES = ("message", "wait", "arrival")

Numbers = np.ndarray[Any, Any]


class Contents:
    """Columns and facts of a page.

    Attributes:
        columns: of spans, labels, messages, memory.
        facts: everything else, plain JSON.
    """

    def __init__(
        self, trace: Trace, clocks: Clocks, messages: Matched, choice: Choice, records: Iterable[Mapping[str, Any]]
    ) -> None:
        self.columns = Columns()
        self._strings: dict[str, int] = {"": 0}
        self._trace = trace
        self._clocks = clocks
        self._order = [self._in_order(rank, kept) for rank, kept in zip(trace.ranks, choice.kept, strict=True)]
        self._held = [held_since(rank.memory, choice.first_detailed) for rank in trace.ranks]
        self._groups: dict[tuple[int, ...], int] = {}
        self.steps = self._steps(choice)
        self.origin, last = self._ends()
        self.tick = max(TICK, (last - self.origin) >> 46)  # times stay exact in the page's numbers
        self._spans(waits(trace, clocks, messages))
        self._messages(messages)
        self._memory()
        self.facts = self._facts(choice, records)

    def _ends(self) -> tuple[int, int]:
        """The first and the last moment of what the page holds."""
        times = [
            self._times(rank, rank.spans[field][order])
            for rank, order in zip(self._trace.ranks, self._order, strict=True)
            for field in ("start", "stop")
        ]
        times += [self._times(rank, held["time"]) for rank, held in zip(self._trace.ranks, self._held, strict=True)]
        times += [np.array([step["start"], step["stop"]]) for step in self.steps]
        ends = [(int(of.min()), int(of.max())) for of in times if len(of)]
        return min((low for low, _ in ends), default=0), max((high for _, high in ends), default=0)

    # -- spans --------------------------------------------------------------------------------------------------------

    def _in_order(self, rank: RankTrace, kept: Numbers) -> Numbers:
        """Indexes of the spans that are kept, in order of time, what is around others before them."""
        at = np.flatnonzero(kept)
        spans = rank.spans[at]
        return at[np.lexsort((spans["depth"], spans["start"]))]

    def _spans(self, waited: Mapping[int, Waited]) -> None:
        starts, lengths, labels, outer, steps, numbers, waits_of, whom = [], [], [], [], [], [], [], []
        for rank, order in zip(self._trace.ranks, self._order, strict=True):
            spans = rank.spans[order]
            start = np.maximum.accumulate(self._ticks(rank, spans["start"]))  # a clock that is mended never goes back
            starts.append(np.diff(start, prepend=0))
            lengths.append(self._ticks(rank, spans["stop"]) - start)
            labels.append(self._labels_of(rank, spans))
            around = parents(spans)
            outer.append(np.where(around < 0, 0, np.arange(len(spans)) - around))
            steps.append(spans["step"])
            message = np.isin(spans["kind"], [KIND[kind] for kind in MESSAGES])
            numbers.append(spans["number"][message])
            waits_of.append(waited[rank.rank].ns[order][message] // self.tick)
            whom.append(waited[rank.rank].whom[order][message] + 1)
        everywhere = _joined(labels, _LABEL)
        distinct, label = np.unique(everywhere.view(f"V{_LABEL.itemsize}"), return_inverse=True)
        table = distinct.view(_LABEL)
        self.columns.add("start", _joined(starts))
        self.columns.add("length", _joined(lengths))
        self.columns.add("label", label.reshape(-1))
        self.columns.add("outer", _joined(outer))  # how far back the span around stands; 0: there is none
        self.columns.add("step", _joined(steps))
        self.columns.add("number", _joined(numbers))
        self.columns.add("waited", _joined(waits_of))
        self.columns.add("whom", _joined(whom))
        for field in LABEL:
            values = table[field]
            # From 0 on: a collective has peer -1, a shift may have a tag below 0.
            shifted = (
                values.astype(np.int64) + {"peer": 1, "tag": TAG_SHIFT}.get(field, 0) if field != "bytes" else values
            )
            self.columns.add(f"label.{field}", np.nan_to_num(shifted, posinf=0, neginf=0))

    def _labels_of(self, rank: RankTrace, spans: Numbers) -> Numbers:
        """What spans are but for their time, with words as numbers that all ranks share."""
        labels = np.zeros(len(spans), _LABEL)
        for field in LABEL:
            labels[field] = self._words(rank, spans[field]) if field in WORDS else spans[field]
        return labels

    def _words(self, rank: RankTrace, numbers: Numbers) -> Numbers:
        """Numbers of a rank's strings as those of the page's, which has only what is used."""
        used, place = np.unique(numbers, return_inverse=True)
        texts = [shown(rank.strings[number]) for number in used.tolist()]
        words = np.array([self._strings.setdefault(text, len(self._strings)) for text in texts], np.uint32)
        return words[place.reshape(-1)]

    def _times(self, rank: RankTrace, times: Numbers) -> Numbers:
        return np.asarray(self._clocks.shared(rank.rank, times.astype(np.int64)), np.int64)

    def _ticks(self, rank: RankTrace, times: Numbers) -> Numbers:
        ticks: Numbers = (self._times(rank, times) - self.origin) // self.tick
        return ticks

    # -- messages -----------------------------------------------------------------------------------------------------

    def _messages(self, messages: Matched) -> None:
        """Both ends of messages, those of which a page has both; who took part in a collective."""
        place = self._places()
        pairs = messages.pairs
        sent, got = place(pairs["source"], pairs["sent"]), place(pairs["dest"], pairs["got"])
        whole = (sent >= 0) & (got >= 0)
        self.columns.add("sent", sent[whole])
        self.columns.add("got", got[whole])
        meetings = messages.meetings[np.argsort(messages.meetings["meeting"], kind="stable")]
        call = place(meetings["rank"], meetings["span"])
        done = place(meetings["rank"], np.where(meetings["done"] < 0, meetings["span"], meetings["done"]))
        whole = (call >= 0) & (done >= 0)
        number = np.unique(meetings["meeting"][whole], return_inverse=True)[1].reshape(-1)
        self.columns.add("meeting", np.diff(number, prepend=0))
        self.columns.add("call", call[whole])
        self.columns.add("done", done[whole])

    def _places(self) -> Any:
        """A function of ranks and indexes of their spans: the spans' numbers in the page, -1 for what it lacks."""
        offsets = np.cumsum([0, *map(len, self._order)])
        tables = {}
        for rank, order, offset in zip(self._trace.ranks, self._order, offsets, strict=False):
            numbers = np.full(len(rank.spans), -1, np.int64)
            numbers[order] = offset + np.arange(len(order))
            tables[rank.rank] = numbers

        def place(ranks: Numbers, indexes: Numbers) -> Numbers:
            found = np.full(len(ranks), -1, np.int64)
            for rank, numbers in tables.items():
                of_rank = ranks == rank
                found[of_rank] = numbers[indexes[of_rank]]
            return found

        return place

    # -- memory and the rest ------------------------------------------------------------------------------------------

    def _memory(self) -> None:
        times, owners, held, steps = [], [], [], []
        for rank, memory in zip(self._trace.ranks, self._held, strict=True):
            times.append(np.diff(np.maximum.accumulate(self._ticks(rank, memory["time"])), prepend=0))
            owners.append(self._words(rank, memory["owner"]))
            held.append(memory["bytes"])
            steps.append(memory["step"])
        self.columns.add("memory.time", _joined(times))
        self.columns.add("memory.owner", _joined(owners))
        self.columns.add("memory.bytes", _joined(held))
        self.columns.add("memory.step", _joined(steps))

    def _steps(self, choice: Choice) -> list[dict[str, Any]]:
        """Each step from its first beginning to its last end over all ranks."""
        steps: dict[int, dict[str, Any]] = {}
        for rank in self._trace.ranks:
            for told in rank.steps:
                if told["step"] < choice.first:
                    continue
                start, stop = self._times(rank, np.array([told["start"], told["stop"]], np.int64)).tolist()
                step = steps.setdefault(
                    told["step"], {"step": told["step"], "start": start, "stop": stop, "ops": False}
                )
                step["start"], step["stop"] = min(step["start"], start), max(step["stop"], stop)
                step["ops"] = step["ops"] or (bool(told.get("ops")) and told["step"] >= choice.first_detailed)
                for name in ("loss", "tokens"):
                    if name not in step and number_of(told.get(name)) is not None:
                        step[name] = told[name]
        return [steps[number] for number in sorted(steps)]

    def _group(self, ranks: Sequence[int]) -> int:
        """The number of some ranks: all that are on an axis share one list of them."""
        return self._groups.setdefault(tuple(map(int, ranks)), len(self._groups))

    def _facts(self, choice: Choice, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        curve = [
            [record["step"], number_of(record.get("loss")), number_of(record.get("val_loss"))]
            for record in records
            if isinstance(record.get("step"), int)
        ]
        if not curve:
            curve = [[step["step"], step.get("loss"), None] for step in self.steps if "loss" in step]
        ranks = self._trace.ranks
        return {
            "kinds": KINDS,
            "tick": self.tick,
            "tagShift": TAG_SHIFT,
            "strings": list(self._strings),
            "columns": self.columns.index,
            "ranks": [
                {
                    "rank": rank.rank,
                    "host": shown(rank.host),
                    "error": number_of(self._clocks.error[rank.rank]),
                    "spans": len(order),
                    "memory": len(held),
                    "dropped": rank.dropped,
                    "axes": {shown(name): self._group(members) for name, members in rank.axes.items()},
                }
                for rank, order, held in zip(ranks, self._order, self._held, strict=True)
            ],
            "groups": list(self._groups),  # after `ranks`, which names them
            "size": max((rank.size for rank in ranks), default=0),
            "steps": [
                {**step, "start": step["start"] - self.origin, "stop": step["stop"] - self.origin}
                for step in self.steps
            ],
            "curve": thinned(curve),
            "leftOut": choice.left_out,
            "clocks": {"exact": bool(self._clocks.exact), "said": shown(self._clocks.said)},
        }


TAG_SHIFT = 1 << 20
_LABEL = np.dtype(
    [("kind", "u1"), *((word, "<u4") for word in WORDS), ("peer", "<i4"), ("tag", "<i4"), ("bytes", "<f8")]
)


def held_since(memory: Numbers, step: int) -> Numbers:
    """What was held from a step on, by time; what was held before and did not change is told at the beginning."""
    memory = memory[np.argsort(memory["time"], kind="stable")]
    later = memory["step"] >= step
    begin = int(np.argmax(later)) if later.any() else len(memory)
    if begin == 0:
        return memory
    newest = begin - 1 - np.unique(memory["owner"][:begin][::-1], return_index=True)[1]
    before = memory[newest]
    before["time"] = memory["time"][min(begin, len(memory) - 1)]
    before["step"] = memory["step"][min(begin, len(memory) - 1)]
    return np.concatenate([before, memory[begin:]])


def thinned(curve: Sequence[list[Any]], most: int = 4000) -> list[list[Any]]:
    """A curve of at most so many points, the last one among them."""
    every = 1 + len(curve) // most
    last = [curve[-1]] if every > 1 and (len(curve) - 1) % every else []
    return [*curve[::every], *last]


def _joined(parts: Sequence[Numbers], dtype: Any = np.int64) -> Numbers:
    return np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype, copy=False)
