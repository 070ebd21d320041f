"""A trace that no run has made: pipeline, data and tensor parallelism in a small simulation.

    trace = synthetic(pp=2, dp=2, tp=2, steps=20)

Ranks are coroutines with a clock each.  They compute for times drawn from a seed, and stand in messages until the last
rank has come, so that the trace holds together as a real one does: nothing arrives before it was sent, nobody leaves a
collective before all are in it, spans nest.  Rank 5 is slow, and everybody waits for it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from mpitrain.debug.trace.records import KIND, MEMORY, SPAN, RankTrace, Trace
from mpitrain.pipeline.passes import with_messages, with_update
from mpitrain.pipeline.schedules import one_f_one_b

US = 1000  # ns
SLOW = 5  # the rank that takes longer
FORWARD = (  # op, module, us, whether it sends over tp, shape of its output
    ("norm", "norm1", 60, False, "(4, 64, 128) float32"),
    ("linear", "attention.qkv", 300, False, "(4, 64, 192) float32"),
    ("attention", "attention", 420, False, "(4, 64, 64) float32"),
    ("linear", "attention.proj", 180, False, "(4, 64, 128) float32"),
    ("all_reduce", "attention.proj", 30, True, "(4, 64, 128) float32"),
    ("residual", "", 40, False, "(4, 64, 128) float32"),
    ("norm", "norm2", 60, False, "(4, 64, 128) float32"),
    ("linear", "mlp.up", 380, False, "(4, 64, 256) float32"),
    ("gelu", "mlp", 90, False, "(4, 64, 256) float32"),
    ("linear", "mlp.down", 360, False, "(4, 64, 128) float32"),
    ("all_reduce", "mlp.down", 30, True, "(4, 64, 128) float32"),
    ("residual", "", 40, False, "(4, 64, 128) float32"),
)
BACKWARD = tuple(
    (f"{'copy' if name == 'norm' else name}.backward", path, 2 * us, name == "norm", shape)
    for name, path, us, _, shape in reversed(FORWARD)
    if name != "all_reduce"
)
Steps = Generator[tuple[Any, ...], int, None]


class _Rank:
    """What one rank notes."""

    def __init__(self, trace: RankTrace, seed: int, ahead: int) -> None:
        self.trace = trace
        self.now = 0
        self.ahead = ahead  # of this rank's clock, in ns
        self.random = np.random.default_rng([seed, trace.rank])
        self.slow = 1.35 if trace.rank == SLOW else 1.0
        self.rows: list[tuple[Any, ...]] = []
        self.memory: list[tuple[int, int, int, int]] = []
        self.numbers = {"": 0}
        self.open: list[int] = []
        self.step = 0
        self.action = ""
        self.calls: dict[Any, int] = {}
        self.held: dict[str, int] = {}

    def word(self, text: str) -> int:
        if text not in self.numbers:
            self.numbers[text] = len(self.trace.strings)
            self.trace.strings.append(text)
        return self.numbers[text]

    def begin(self, kind: str, name: str, *, path: str = "", site: str = "", axis: str = "", shape: str = "",
              number: int = 0, peer: int = -1, tag: int = 0, nbytes: float = 0.0) -> None:  # fmt: skip
        words = [self.word(text) for text in (name, path, self.action, site, axis, shape)]
        self.open.append(len(self.rows))
        self.rows.append(
            (self.now, self.now, KIND[kind], len(self.open) - 1, self.step, *words, number, peer, tag, nbytes)
        )

    def end(self) -> None:
        at = self.open.pop()
        self.rows[at] = (self.rows[at][0], self.now, *self.rows[at][2:])

    def work(self, us: float) -> None:
        self.now += int(us * US * self.slow * self.random.uniform(0.9, 1.25))

    def count(self, *key: Any) -> int:
        self.calls[key] = number = self.calls.get(key, 0) + 1
        return number

    def done(self) -> RankTrace:
        spans = np.array(self.rows, SPAN)
        spans["start"] += self.ahead
        spans["stop"] += self.ahead
        memory = np.array(self.memory, MEMORY)
        memory["time"] += self.ahead
        for step in self.trace.steps:
            step["start"] += self.ahead
            step["stop"] += self.ahead
        self.trace.spans = spans[np.lexsort((spans["depth"], spans["start"]))]
        self.trace.memory = memory
        return self.trace


def synthetic(
    pp: int = 2,
    dp: int = 2,
    tp: int = 2,
    steps: int = 20,
    microbatches: int = 4,
    blocks: int = 2,
    seed: int = 0,
    clocks_apart: int = 0,
    words: tuple[str, str] = ("blocks", "train.py"),
) -> Trace:
    """A trace of a transformer.

    Args:
        pp, dp, tp: sizes of the axes; tp varies fastest.
        steps, microbatches, blocks: of the run; blocks on each stage.
        seed: of all times.
        clocks_apart: ns by which the clock of the second half of ranks, on a host of its own, is ahead; 0: one host.
        words: the name of the model's list of blocks and that of the script.
    """
    size = pp * dp * tp
    ranks = []
    for rank in range(size):
        p, d, t = rank // (dp * tp), rank // tp % dp, rank % tp
        axes = {
            "world": tuple(range(size)),
            "pp": tuple(range(rank - p * dp * tp, size, dp * tp)),
            "dp": tuple(p * dp * tp + t + k * tp for k in range(dp)),
            "tp": tuple(rank - t + k for k in range(tp)),
        }
        other = bool(clocks_apart) and rank >= size // 2
        trace = RankTrace(rank, size, f"node{int(other)}", f"clock {int(other)}", axes)
        trace.facts = {
            "model": f"gpt-mini: {pp * blocks} layers, width 128, 4 heads, 64 tokens",
            "layout": {"pp": pp, "edp": dp, "ep": 1, "cp": 1, "tp": tp},
            "coords": {"pp": p, "edp": d, "ep": 0, "cp": 0, "tp": t},
            "schedule": {"name": "1f1b", "microbatches": microbatches, "chunks": 1, "slices": 1},
            "command": ["mpirun", "-n", str(size), "python", words[1], "--trace"],
        }
        ranks.append(_Rank(trace, seed, clocks_apart if other else 0))
    rows = with_update(with_messages(one_f_one_b(pp, microbatches)))
    _run(ranks, [_training(rank, rows[rank.trace.facts["coords"]["pp"]], steps, blocks, words) for rank in ranks])
    return Trace([rank.done() for rank in ranks])


def _training(rank: _Rank, row: list[Any], steps: int, blocks: int, words: tuple[str, str]) -> Steps:
    """The whole life of a rank; yields what it has to wait for."""
    axes = rank.trace.axes
    for step in range(1, steps + 1):
        rank.step, began = step, rank.now
        if step == 1:
            rank.work(9000)
        kept = 0
        for action in row:
            rank.action = action.kind
            rank.begin("action", str(action))
            if action.kind == "LOAD":
                rank.work(80)
            elif action.kind == "COUNT":
                yield from _collective(rank, "all_reduce", "dp", "(1,) int64", 8, "mpitrain/pipeline/executor.py:312")
            elif action.kind in ("F", "B"):
                ops = FORWARD if action.kind == "F" else BACKWARD
                kept += 1 if action.kind == "F" else -1
                yield from _pass(rank, ops, blocks, words[0], backward=action.kind == "B")
            elif action.kind.startswith("SEND"):
                yield from _send(rank, action.kind, action.micro, len(axes["pp"]))
            elif action.kind.startswith("RECV"):
                yield from _recv(rank, action.kind, action.micro)
            elif action.kind == "REDUCE":
                yield from _collective(
                    rank, "iall_reduce", "dp", "(235264,) float32", 941056, "mpitrain/parallel/data.py:140"
                )
            elif action.kind == "STEP":
                yield from _collective(rank, "all_reduce", "world", "(3,) float64", 24, f"{words[1]}:31")
                rank.work(500)
            rank.end()
            _hold(rank, kept)
            rank.work(12)
        rank.trace.steps.append(
            {"step": step, "start": began, "stop": rank.now, "loss": 1.6 + 4.1 / step**0.7, "tokens": 4096, "ops": True}
        )
    rank.step, rank.action = 0, ""


def _pass(rank: _Rank, ops: tuple[Any, ...], blocks: int, stem: str, backward: bool) -> Steps:
    for block in reversed(range(blocks)) if backward else range(blocks):
        for name, module, us, sends, shape in ops:
            path = f"{stem}.{block}.{module}".rstrip(".")
            rank.begin("op", name, path=path, shape=shape)
            rank.work(us)
            if sends:
                yield from _collective(rank, "all_reduce", "tp", shape, 131072, "mpitrain/parallel/tensor.py:71")
            rank.end()
            rank.work(6)


def _collective(rank: _Rank, verb: str, axis: str, shape: str, nbytes: float, site: str) -> Steps:
    members = rank.trace.axes[axis]
    if len(members) == 1:
        return
    number = rank.count(axis)
    factor = 2 * (len(members) - 1) / len(members)
    rank.begin("message", verb, axis=axis, shape=shape, number=number, nbytes=nbytes * factor, site=site)
    called = rank.now
    if verb.startswith("i"):  # posted, then waited for
        rank.work(20)
        rank.end()
        rank.work(60)
        rank.begin("wait", verb, axis=axis, shape=shape, number=number, site=site)
    rank.now = (yield "meet", (axis, members, number), members, called) + int(
        (20 + nbytes / 4000) * US * rank.random.uniform(0.9, 1.2)
    )
    rank.end()


def _send(rank: _Rank, kind: str, micro: int, size: int) -> Steps:
    members = rank.trace.axes["pp"]
    mine = members.index(rank.trace.rank)
    peer = mine + (1 if kind == "SEND_F" else -1)
    key = (members[mine], members[peer], kind[-1])
    number = rank.count("pp", peer, kind[-1])
    rank.begin("message", "isend", axis="pp", shape="(4, 64, 128) float32", number=number, peer=peer,
               tag=int(kind[-1] == "B"), nbytes=131072, site="mpitrain/pipeline/executor.py:421")  # fmt: skip
    rank.work(35)
    yield "sent", (*key, number), rank.now + int(90 * US * rank.random.uniform(0.9, 1.5))
    rank.end()


def _recv(rank: _Rank, kind: str, micro: int) -> Steps:
    members = rank.trace.axes["pp"]
    mine = members.index(rank.trace.rank)
    peer = mine + (-1 if kind == "RECV_F" else 1)
    number = rank.count("from", "pp", peer, kind[-1])
    what = {"axis": "pp", "shape": "(4, 64, 128) float32", "number": number, "peer": peer,
            "tag": int(kind[-1] == "B"), "site": "mpitrain/pipeline/executor.py:398"}  # fmt: skip
    rank.begin("message", "irecv", **what)
    rank.work(10)
    rank.end()
    rank.begin("wait", "irecv", **what)
    there = yield "came", (members[peer], members[mine], kind[-1], number)
    rank.now = max(rank.now + 8 * US, there)
    rank.end()
    rank.begin("arrival", "irecv", **what)
    rank.end()
    rank.work(5)


def _hold(rank: _Rank, kept: int) -> None:
    """What of it has changed at the end of an action."""
    model = 941056
    held = {"weights": model, "gradients": model, "optimizer state": 2 * model, "activations": kept * 1_900_000,
            "between stages": 131072 * (1 + kept % 2), "wire scratch": 262144, "batch": 8192}  # fmt: skip
    for owner, nbytes in held.items():
        if rank.held.get(owner) != nbytes:
            rank.memory.append((rank.now, rank.step, rank.word(owner), nbytes))
    rank.held = held


def _run(ranks: list[_Rank], lives: list[Steps]) -> None:
    """Let all ranks live; each goes on as soon as what it waits for has happened."""
    meetings: dict[Any, dict[int, int]] = {}
    on_the_way: dict[Any, int] = {}
    asks: list[Any] = [next(life, None) for life in lives]
    while any(ask is not None for ask in asks):
        moved = False
        for at, ask in enumerate(asks):
            if ask is None:
                continue
            answer = 0
            if ask[0] == "meet":
                came = meetings.setdefault(ask[1], {})
                came[ranks[at].trace.rank] = ask[3]
                if len(came) < len(ask[2]):
                    continue
                answer = max(came.values())
            elif ask[0] == "sent":
                on_the_way[ask[1]] = ask[2]
            elif ask[1] not in on_the_way:
                continue
            else:
                answer = on_the_way[ask[1]]
            moved = True
            try:
                asks[at] = lives[at].send(answer)
            except StopIteration:
                asks[at] = None
        assert moved, "the synthetic ranks wait for each other"
