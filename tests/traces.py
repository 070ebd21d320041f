"""Traces that are made up: ranks in a virtual time, read by clocks that are wrong on purpose."""

from __future__ import annotations

import numpy as np

from mpitrain.debug.trace.records import KIND, SPAN, RankTrace, Trace


class Rank:
    """One rank of a trace that is written by hand; times are true ones, in ns."""

    def __init__(self, rank, size, axes, clock="one", reads=None, facts=None):
        self.rank, self.size, self.axes, self.clock = rank, size, axes, clock
        self.reads = (lambda true: true) if reads is None else reads
        self.strings = [""]
        self.spans = []
        self.memory = []
        self.steps = []
        self.facts = facts or {}
        self.now = 0
        self.numbers = {}
        self.step = 0
        self.action = ""
        self.path = ""
        self.depth = 0

    def text(self, word):
        if word not in self.strings:
            self.strings.append(word)
        return self.strings.index(word)

    def span(self, kind, name, start, stop, **more):
        """A span; the number of it."""
        words = ("path", "action", "site", "axis", "shape")
        more = {"path": self.path, "action": self.action, "depth": self.depth, "step": self.step, **more}
        more = {key: self.text(value) if key in words else value for key, value in more.items()}
        values = {"peer": -1, **more, "kind": KIND[kind], "name": self.text(name)}
        self.spans.append({**values, "start": start, "stop": stop})
        return len(self.spans) - 1

    def count(self, *key):
        self.numbers[key] = self.numbers.get(key, 0) + 1
        return self.numbers[key]

    def trace(self):
        spans = np.zeros(len(self.spans), SPAN)
        for at, values in enumerate(self.spans):
            for name, value in values.items():
                spans[name][at] = self.reads(value) if name in ("start", "stop") else value
        spans = spans[np.lexsort([spans["depth"], spans["start"]])]
        steps = [{**step, "start": self.reads(step["start"]), "stop": self.reads(step["stop"])} for step in self.steps]
        return RankTrace(
            self.rank,
            self.size,
            host=self.clock,
            clock=self.clock,
            axes=self.axes,
            strings=self.strings,
            spans=spans,
            steps=steps,
            facts=self.facts,
        )


def ranks_of(size, clocks=None, reads=None, **axes):
    """Ranks of a world; `reads`: for each clock how it reads a true time."""
    made = []
    for rank in range(size):
        clock = "one" if clocks is None else clocks[rank]
        on = {name: next(group for group in groups if rank in group) for name, groups in axes.items()}
        on["world"] = tuple(range(size))
        made.append(Rank(rank, size, on, clock, None if reads is None else reads[clock]))
    return made


def together(ranks, axis, enter, leave, verb="all_reduce", shape="(8,) float32", **more):
    """A collective of the ranks of an axis: when each calls, and when each has its result."""
    members = ranks[0].axes[axis]
    for rank in ranks:
        number = rank.count(axis)
        factor = {"all_reduce": 2 * (len(members) - 1) / len(members), "barrier": 0}.get(verb, 1)
        rank.span(
            "message", verb, enter[rank.rank], leave[rank.rank], axis=axis, shape=shape, number=number,
            bytes=32 * factor, site="train.py:5", **more,
        )  # fmt: skip


def send(source, dest, axis, sent, came, called=None, tag=0, blocks=True, nbytes=32, **more):
    """A message between two; `called`: when the receiver asked for it.

    `blocks`: the receiver waits in recv, else in the wait for an irecv that it posted before.
    """
    to, frm = source.axes[axis].index(dest.rank), dest.axes[axis].index(source.rank)
    number = source.count(axis, "send", dest.rank, tag)
    about = {"axis": axis, "tag": tag, "number": number, "shape": "(8,) float32", "site": "stages.py:9", **more}
    source.span("message", "isend", sent, sent + 1000, peer=to, bytes=nbytes, **about)
    called = came - 1000 if called is None else called
    about["number"] = dest.count(axis, "recv", source.rank, tag)
    if blocks:
        dest.span("message", "recv", called, came, peer=frm, **about)
        return
    dest.span("message", "irecv", called, called + 500, peer=frm, **about)
    dest.span("wait", "irecv", called + 700, came, peer=frm, **about)
    dest.span("arrival", "irecv", came + 10, came + 10, peer=frm, **about)


def trace_of(ranks):
    return Trace([rank.trace() for rank in ranks])
