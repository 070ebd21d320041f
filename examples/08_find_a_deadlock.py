"""Lesson 8: a pipeline that would hang is found before it runs.

    python examples/08_find_a_deadlock.py

Two stages, two micro-batches.  Three schedules are given to the checker, which plays them without computing, and then
to two ranks that really run them: one whose ranks wait for each other, one that hangs only if sends wait for their
receiver, as those of MPI may do with large messages, and one that is right.  A schedule is text: change it and see.
"""

from __future__ import annotations

import numpy as np

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.errors import CommError, ScheduleError
from mpitrain.pipeline.action import Action, Row, Schedule, parse_row, row_text
from mpitrain.pipeline.check import check
from mpitrain.pipeline.passes import with_messages, with_update

# Rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 1; rank 1 wants it the other way around.
CROSSED = """F0@0 B0@0 F1@0 B1@0
             F0@1 F1@1 B0@1 B1@1"""

# 1F1B.  After two forwards rank 0 is at SEND_F1 and rank 1 at SEND_B0: both send, and nobody receives.
BOTH_SEND = """F0@0 F1@0 B0@0 B1@0
               F0@1 B0@1 F1@1 B1@1"""

# The same order of work, with messages put in by hand: rank 1 receives before it sends.
REPAIRED = """F0@0 SEND_F0@0 F1@0 SEND_F1@0         RECV_B0@0 B0@0            RECV_B1@0 B1@0
              RECV_F0@1 F0@1 B0@1 RECV_F1@1 SEND_B0@1 F1@1      B1@1 SEND_B1@1"""

WIDTH, SAMPLES, MICROS = 16, 8, 2


def weight(stage: int) -> np.ndarray:
    """A stage is y = tanh(W x), and the loss the sum of squares of the last one's outputs, halved."""
    return np.random.default_rng(stage).normal(size=(WIDTH, WIDTH)) / 4


def sample(micro: int) -> np.ndarray:
    """The input of the first stage."""
    return np.random.default_rng(100 + micro).normal(size=(WIDTH, SAMPLES))


def run(row: Row, ranks: Communicator, waits: bool, at: dict[int, Action]) -> np.ndarray:
    """Do a row's actions on a rank, whose number is also that of its stage; the gradient of W.

    If `waits`, a send ends when its receiver has taken it and says so.  `at` is told what the rank is doing.
    """
    w, total = weight(ranks.rank), np.zeros((WIDTH, WIDTH))
    other, made, arrived = 1 - ranks.rank, {}, {}
    for action in row:
        kind, micro, _, _ = at[ranks.rank] = action
        match kind:
            case "F":
                if ranks.rank == 0:
                    arrived["F", micro] = sample(micro)
                made["F", micro] = np.tanh(w @ arrived["F", micro])
            case "B":
                y = made["F", micro]
                dz = (y if ranks.rank == 1 else arrived["B", micro]) * (1 - y * y)
                total += dz @ arrived["F", micro].T
                made["B", micro] = w.T @ dz
            case "SEND_F" | "SEND_B":
                ranks.isend(made[kind[-1], micro], other, tag=micro)
                if waits:
                    ranks.recv((0,), np.float64, other, tag=MICROS + micro)
            case "RECV_F" | "RECV_B":
                arrived[kind[-1], micro] = ranks.recv((WIDTH, SAMPLES), np.float64, other, tag=micro)
                if waits:
                    ranks.isend(np.empty(0), other, tag=MICROS + micro)
    return total


def on_two_ranks(rows: Schedule, waits: bool) -> tuple[str | None, list[np.ndarray]]:
    """Two ranks run the rows: where they hang, if they do, else the gradients."""
    at: dict[int, Action] = {}
    try:
        return None, LocalWorld(2).run(lambda: run(rows[world().rank], world(), waits, at))
    except CommError:  # ranks that are threads of one process: a deadlock is seen at once, not after a time limit
        return "deadlock: " + "; ".join(f"rank {rank} at {at[rank]}" for rank in range(2)), []


def main() -> float:
    """Print the lesson; return the largest difference of a gradient to those of one process."""
    serial = [np.zeros((WIDTH, WIDTH)) for _ in range(2)]
    for micro in range(MICROS):
        x = sample(micro)
        h = np.tanh(weight(0) @ x)
        y = np.tanh(weight(1) @ h)
        dz = y * (1 - y * y)
        serial[1] += dz @ h.T
        serial[0] += (weight(1).T @ dz * (1 - h * h)) @ x.T

    worst = 0.0
    for name, text in (("Crossed", CROSSED), ("Both send", BOTH_SEND), ("Repaired", REPAIRED)):
        rows = [parse_row(line) for line in text.splitlines()]
        rows = rows if "SEND" in text else with_messages(rows)
        try:
            found = {False: None, True: check(with_update(rows)).blocking_hang}
        except ScheduleError as error:
            found = dict.fromkeys((False, True), str(error))
        print(name, *(f"    {row_text(row)}" for row in rows), sep="\n")
        for waits, kind in ((False, "sends go on"), (True, "sends wait")):
            happened, gradients = on_two_ranks(rows, waits)
            print(f"    {kind + ', says the checker:':<31} {found[waits] or 'it can run'}")
            print(f"    {kind + ', on two ranks:':<31} {happened or 'it ran'}")
            assert happened == found[waits]
            for mine, theirs in zip(gradients, serial, strict=False):
                worst = max(worst, float(np.abs(mine - theirs).max() / np.abs(theirs).max()))
        print()
    print(f"largest difference of a value or gradient to those of one process: {worst:.1e}")
    assert worst < 1e-12, worst
    return worst


if __name__ == "__main__":
    main()
