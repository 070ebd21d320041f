"""Ways in which ranks miss each other, and what is said of each: the table of RELIABILITY 2.9.

    PYTHONPATH=.:tests python tests/mismatches.py                   every case on both transports, as a table
    PYTHONPATH=.:tests python tests/mismatches.py local op dims     some of them, on one transport
    mpirun -n 3 python tests/mismatches.py run op 2                 one case by itself; `2`: turns that are right before

A case is one turn of a loop.  Ranks make some turns alike, in checked mode, and then a last one in which the last rank
goes astray (in a case between two ranks both may).  The report must come within ten seconds and name both call sites:
they are the lines marked `# HERE` and `# ASTRAY`.  It must name the last call that all made alike, and, where anybody
can know, the rank that left the path.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import inspect
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import run_script
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world

FILE = Path(__file__).name
LIMIT, SHORT_LIMIT = 60.0, 4.0  # --timeout of a case; the short one of those that nothing but a time limit can end
SECONDS = 10.0  # within which a case must be detected
SMALL, LARGE = np.ones(4), np.ones(1 << 20)  # below and far above the size up to which MPI sends without asking
ROWS = np.zeros((12, 12))
MARK = "MPITRAIN_TEST_MARK"  # names the file that tells when the last turn began


class Scene:
    """What a case plays with."""

    def __init__(self, w: World) -> None:
        self.w = w
        self.dp: Communicator = Mesh(w).dp  # of all ranks, too
        self.last = w.size - 1
        self.kept: list[object] = []  # requests that nobody waits for


# -- the calls of one axis differ


def op(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.all_reduce(SMALL, "max")  # ASTRAY
    else:
        s.w.all_reduce(SMALL)  # HERE


def root(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.broadcast(SMALL, 1)  # ASTRAY
    else:
        s.w.broadcast(SMALL)  # HERE


def count(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.all_reduce(SMALL[:3])  # ASTRAY
    else:
        s.w.all_reduce(SMALL)  # HERE


def count_of_a_broadcast(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.broadcast(LARGE)  # ASTRAY
    else:
        s.w.broadcast(SMALL)  # HERE


def dtype(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.all_reduce(SMALL.astype("f4"))  # ASTRAY
    else:
        s.w.all_reduce(SMALL)  # HERE


def shape(s: Scene, astray: bool) -> None:
    """The same number of elements."""
    s.w.barrier()
    if astray:
        s.w.all_reduce(SMALL.reshape(2, 2))  # ASTRAY
    else:
        s.w.all_reduce(SMALL)  # HERE


def dims(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.all_gather(ROWS, 1)  # ASTRAY
    else:
        s.w.all_gather(ROWS)  # HERE


def slices(s: Scene, astray: bool) -> None:
    """Each rank's own slice has the length that it says; only all of them together do not fit."""
    s.w.barrier()
    lengths = [1, 2, 3][: s.w.size]
    if astray:
        s.w.all_gather(np.ones(lengths[-1]), counts=[2, 1, *lengths[2:]])  # ASTRAY
    else:
        s.w.all_gather(np.ones(lengths[s.w.rank]), counts=lengths)  # HERE


def all_to_all_counts(s: Scene, astray: bool) -> None:
    s.w.barrier()
    n = s.w.size
    if astray:
        s.w.all_to_all(ROWS[:n], counts=([1] * n, [2] + [1] * (n - 1)))  # ASTRAY
    else:
        s.w.all_to_all(ROWS[:n], counts=([1] * n, [1] * n))  # HERE


def distance(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.shift(SMALL, -1)  # ASTRAY
    else:
        s.w.shift(SMALL)  # HERE


def verb(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.reduce_scatter(ROWS)  # ASTRAY
    else:
        s.w.all_gather(ROWS)  # HERE


def barrier_against_a_sum(s: Scene, astray: bool) -> None:
    s.w.all_gather(SMALL)
    if astray:
        s.w.barrier()  # ASTRAY
    else:
        s.w.all_reduce(SMALL)  # HERE


def one_waits_at_once(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.all_reduce(SMALL)  # ASTRAY
    else:
        s.w.iall_reduce(SMALL).wait()  # HERE


def op_in_flight(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.iall_reduce(SMALL, "max").wait()  # ASTRAY
    else:
        s.w.iall_reduce(SMALL).wait()  # HERE


def order(s: Scene, astray: bool) -> None:
    """Two calls that cannot be taken for each other have changed places."""
    s.w.barrier()
    if astray:
        s.w.all_gather(SMALL)  # ASTRAY
        s.w.all_reduce(SMALL)
    else:
        s.w.all_reduce(SMALL)  # HERE
        s.w.all_gather(SMALL)


def order_of_calls_that_look_alike(s: Scene, astray: bool) -> None:
    """MPI lets them through, with wrong sums."""
    a, b = SMALL, 2 * SMALL
    s.w.barrier()
    if astray:
        s.w.all_reduce(b)
        s.w.all_reduce(a)  # ASTRAY
    else:
        s.w.all_reduce(a)
        s.w.all_reduce(b)  # HERE


def order_in_flight(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        requests = [s.w.iall_gather(SMALL), s.w.iall_reduce(SMALL)]  # ASTRAY
    else:
        requests = [s.w.iall_reduce(SMALL), s.w.iall_gather(SMALL)]  # HERE
    for request in requests:
        request.wait()


def missing_call(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if not astray:
        s.w.all_reduce(SMALL)  # HERE
    s.w.all_gather(SMALL)  # ASTRAY


def extra_call(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.all_reduce(SMALL)  # ASTRAY
    s.w.all_gather(SMALL)  # HERE


def sums_in_rank_order(s: Scene, astray: bool) -> None:
    s.w.barrier()
    s.w.set_deterministic(astray)
    if astray:
        s.w.all_reduce(SMALL)  # ASTRAY
    else:
        s.w.all_reduce(SMALL)  # HERE


# -- ranks that never meet in one call


def missing_last_call(s: Scene, astray: bool) -> None:
    s.w.all_gather(SMALL)  # ASTRAY
    if not astray:
        s.w.all_reduce(SMALL)  # HERE


def extra_last_call(s: Scene, astray: bool) -> None:
    s.w.all_gather(SMALL)  # HERE
    if astray:
        s.w.all_gather(ROWS)  # ASTRAY


def wrong_communicator(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.dp.all_reduce(SMALL)  # ASTRAY
    else:
        s.w.all_reduce(SMALL)  # HERE


def two_axes_crossed(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.dp.all_reduce(SMALL)  # ASTRAY
        s.w.all_reduce(SMALL)
    else:
        s.w.all_reduce(SMALL)  # HERE
        s.dp.all_reduce(SMALL)


def wrong_tag(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if s.w.rank == 0:
        s.w.isend(SMALL, s.last, 1).wait()
    elif s.w.rank == s.last:
        s.w.recv(SMALL.shape, SMALL.dtype, 0, 2 if astray else 1)  # ASTRAY
    s.w.barrier()  # HERE


def wrong_sender(s: Scene, astray: bool) -> None:
    """Of three ranks: the last waits for a message of the middle one, and the first has sent it."""
    s.w.barrier()
    if s.w.rank == 0:
        s.w.isend(SMALL, s.last).wait()
    elif s.w.rank == s.last:
        s.w.recv(SMALL.shape, SMALL.dtype, 1 if astray else 0)  # ASTRAY
    s.w.barrier()  # HERE


def wrong_group_order(s: Scene, astray: bool) -> None:
    """Everybody makes an axis of all ranks, the last one in another order."""
    s.w.barrier()
    everyone = range(s.w.size)
    if astray:
        axis = s.w.group([*reversed(everyone)], "line")  # ASTRAY
    else:
        axis = s.w.group(everyone, "line")  # HERE
    axis.barrier()


def group_without_a_member(s: Scene, astray: bool) -> None:
    s.w.all_gather(SMALL)
    if not astray:
        s.w.group(range(s.w.size), "line").barrier()  # HERE
    s.w.barrier()  # ASTRAY


def self_deadlock(s: Scene, astray: bool) -> None:
    """The message that would wake the other end is sent after the wait for its answer."""
    s.w.barrier()
    if s.w.rank == s.last and not astray:
        s.w.isend(SMALL, 0).wait()
    if s.w.rank == 0:
        answer = s.w.irecv(SMALL.shape, SMALL.dtype, s.last)
        answer.wait()  # HERE
        s.w.isend(SMALL, s.last).wait()
    elif s.w.rank == s.last:
        s.w.recv(SMALL.shape, SMALL.dtype, 0)  # ASTRAY
        if astray:
            s.w.isend(SMALL, 0).wait()


def crossed_sends(s: Scene, astray: bool) -> None:
    """Both send a long message first; while one rank takes turns with the other, it is well."""
    s.w.barrier()
    if s.w.rank == 0:
        s.w.send(LARGE, 1)  # HERE
        s.w.recv(LARGE.shape, LARGE.dtype, 1)
    elif astray:
        s.w.send(LARGE, 0)  # ASTRAY
        s.w.recv(LARGE.shape, LARGE.dtype, 0)
    else:
        s.w.recv(LARGE.shape, LARGE.dtype, 0)
        s.w.send(LARGE, 0)


def crossed_waits(s: Scene, astray: bool) -> None:
    """Each waits for its receive before it sends."""
    s.w.barrier()
    other = 1 - s.w.rank
    got = s.w.irecv(SMALL.shape, SMALL.dtype, other)
    if s.w.rank == 0:
        got.wait()  # HERE
        s.w.isend(SMALL, other).wait()
    elif astray:
        got.wait()  # ASTRAY
        s.w.isend(SMALL, other).wait()
    else:
        sent = s.w.isend(SMALL, other)
        got.wait()
        sent.wait()


def ring_of_sends(s: Scene, astray: bool) -> None:
    """Three ranks in a circle; one of them must receive first."""
    s.w.barrier()
    ahead, behind = (s.w.rank + 1) % s.w.size, (s.w.rank - 1) % s.w.size
    if s.w.rank == s.last and not astray:
        s.w.recv(LARGE.shape, LARGE.dtype, behind)
        s.w.send(LARGE, ahead)
    elif astray:
        s.w.send(LARGE, ahead)  # ASTRAY
    else:
        s.w.send(LARGE, ahead)  # HERE
        s.w.recv(LARGE.shape, LARGE.dtype, behind)


def send_against_a_barrier(s: Scene, astray: bool) -> None:
    s.w.all_gather(SMALL)
    if s.w.rank == 0:
        s.w.send(LARGE, s.last)  # HERE
    elif s.w.rank == s.last and not astray:
        s.w.recv(LARGE.shape, LARGE.dtype, 0)
    s.w.barrier()  # ASTRAY


def receive_of_nothing(s: Scene, astray: bool) -> None:
    """A non-blocking receive for which nobody sends."""
    s.w.all_gather(SMALL)
    if astray:
        s.w.irecv(SMALL.shape, SMALL.dtype, 0).wait()  # ASTRAY
    s.w.barrier()  # HERE


# -- messages between two


def dtype_of_a_receive(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if s.w.rank == 0:
        s.w.isend(SMALL, s.last).wait()  # HERE
    elif s.w.rank == s.last:
        s.w.recv(SMALL.shape, "i8" if astray else "f8", 0)  # ASTRAY
    s.w.barrier()


def count_of_a_receive(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if s.w.rank == 0:
        s.w.isend(LARGE, s.last, 7).wait()  # HERE
    elif s.w.rank == s.last:
        s.w.irecv((4,) if astray else LARGE.shape, "f8", 0, 7).wait()  # ASTRAY
    s.w.barrier()


def shape_of_a_receive(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if s.w.rank == 0:
        s.w.send(SMALL, s.last)  # HERE
    elif s.w.rank == s.last:
        s.w.recv((2, 2) if astray else (4,), "f8", 0)  # ASTRAY
    s.w.barrier()


def message_to_oneself(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.isend(SMALL, s.last)  # ASTRAY
    s.w.barrier()


# -- buffers and requests


def buffer_changed_in_flight(s: Scene, astray: bool) -> None:
    s.w.barrier()
    x = np.ones(4)
    if s.w.rank == s.last:
        request = s.w.isend(x, 0)  # HERE
        if astray:
            x += 1
        s.w.barrier()
        request.wait()  # ASTRAY
    else:
        s.w.barrier()
        if s.w.rank == 0:
            s.w.recv((4,), "f8", s.last)
    s.w.barrier()


def buffer_freed_in_flight(s: Scene, astray: bool) -> None:
    s.w.barrier()
    x = np.ones(1 << 16)
    if s.w.rank == s.last:
        request = s.w.isend(x, 0)  # HERE
        if astray:
            with contextlib.suppress(ValueError):  # where MPI holds it
                x.resize(4, refcheck=False)
            x[:] = 0  # whoever has the memory next writes it
        s.w.barrier()
        request.wait()  # ASTRAY
    else:
        s.w.barrier()
        if s.w.rank == 0:
            s.w.recv((1 << 16,), "f8", s.last)  # ASTRAY
    s.w.barrier()


def receive_buffer_used_twice(s: Scene, astray: bool) -> None:
    """Two receives that are in flight share a buffer: which one is in it at the end is a matter of luck."""
    s.w.barrier()
    place, other = np.zeros(4), np.zeros(4)
    if s.w.rank == s.last:
        first = s.w.irecv((4,), "f8", 0, 1, out=place)  # HERE
        second = s.w.irecv((4,), "f8", 0, 2, out=place if astray else other)  # ASTRAY
        first.wait()
        second.wait()
    elif s.w.rank == 0:
        s.w.isend(SMALL, s.last, 1).wait()
        s.w.isend(SMALL, s.last, 2).wait()
    s.w.barrier()


def send_that_nobody_receives(s: Scene, astray: bool) -> None:
    """The program ends with it in flight."""
    s.w.barrier()
    if astray:
        s.kept.append(s.w.isend(SMALL, 0, 5))  # ASTRAY


def request_never_waited_for(s: Scene, astray: bool) -> None:
    """All ranks sum, one of them never looks at the sum; the program ends."""
    s.w.barrier()
    request = s.w.iall_reduce(SMALL)  # ASTRAY
    if astray:
        s.kept.append(request)
    else:
        request.wait()


def request_dropped(s: Scene, astray: bool) -> None:
    """As before, and nobody has the request any more."""
    s.w.barrier()
    request = s.w.irecv(SMALL.shape, SMALL.dtype, 0, 9) if astray else None  # ASTRAY
    del request
    s.w.barrier()


def exit_with_an_open_request(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.kept.append(s.w.irecv(SMALL.shape, SMALL.dtype, 0, 9))  # ASTRAY
        sys.exit(0)


# -- one rank ends or does not come


def one_rank_exits(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        sys.exit(0)  # ASTRAY
    s.w.all_reduce(SMALL)  # HERE


def one_rank_exits_with_a_code(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        sys.exit(3)  # ASTRAY
    s.w.all_reduce(SMALL)  # HERE


def one_rank_loops(s: Scene, astray: bool) -> None:
    s.w.barrier()
    while astray:  # ASTRAY
        pass  # ASTRAY
    s.w.all_reduce(SMALL)  # HERE


def one_rank_sleeps(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        time.sleep(60)  # ASTRAY
    s.w.all_reduce(SMALL)  # HERE


def checked_on_one_rank_only(s: Scene, astray: bool) -> None:
    s.w.barrier()
    if astray:
        s.w.set_checked(False)
        s.w.all_reduce(SMALL)  # ASTRAY
    else:
        s.w.all_reduce(SMALL)  # HERE


class Case(NamedTuple):
    """`ranks` play it; `who` left the path (-1: the last one; None: nobody can know)."""

    play: Callable[[Scene, bool], None]
    ranks: int = 3
    who: int | None = -1
    own: bool = False  # a mistake of that rank alone: there is no other side, and no last common call
    limit: float = LIMIT

    @property
    def name(self) -> str:
        return self.play.__name__


CASES = {
    case.name: case
    for case in (
        Case(op),
        Case(root),
        Case(count),
        Case(count_of_a_broadcast),
        Case(dtype),
        Case(shape),
        Case(dims),
        Case(slices),
        Case(all_to_all_counts),
        Case(distance),
        Case(verb),
        Case(barrier_against_a_sum),
        Case(one_waits_at_once),
        Case(op_in_flight),
        Case(order),
        Case(order_of_calls_that_look_alike),
        Case(order_in_flight),
        Case(missing_call),
        Case(extra_call),
        Case(sums_in_rank_order),
        Case(missing_last_call),
        Case(extra_last_call),
        Case(wrong_communicator),
        Case(two_axes_crossed),
        Case(wrong_tag),
        Case(wrong_sender),
        Case(wrong_group_order),
        Case(group_without_a_member),
        Case(self_deadlock),
        Case(crossed_sends, ranks=2),
        Case(crossed_waits, ranks=2, who=None),
        Case(ring_of_sends),
        Case(send_against_a_barrier),
        Case(receive_of_nothing),
        Case(dtype_of_a_receive),
        Case(count_of_a_receive),
        Case(shape_of_a_receive),
        Case(message_to_oneself, own=True),
        Case(buffer_changed_in_flight, own=True),
        Case(buffer_freed_in_flight, own=True),
        Case(receive_buffer_used_twice, own=True),
        Case(send_that_nobody_receives, own=True),
        Case(request_never_waited_for, own=True),
        Case(request_dropped, own=True),
        Case(exit_with_an_open_request, own=True),
        Case(one_rank_exits),
        Case(one_rank_exits_with_a_code),
        Case(one_rank_loops, limit=SHORT_LIMIT),
        Case(one_rank_sleeps, limit=SHORT_LIMIT),
        Case(checked_on_one_rank_only),
    )
}
TURNS = 2  # that are right, before


def play(case: Case, turns: int, mark: Callable[[], None]) -> None:
    """What every rank does."""
    w = world()
    w.board.limit = case.limit
    w.set_checked()
    scene = Scene(w)
    for _ in range(turns):
        case.play(scene, False)
    w.barrier()
    mark()
    case.play(scene, w.rank == w.size - 1)


class Said(NamedTuple):
    """What came of a case: the report, and seconds from the last turn's begin to the end of all ranks."""

    text: str
    seconds: float


def on_threads(case: Case, turns: int) -> Said:
    """Under Local, in this process, as `mpitrain local` does it."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = os.environ[MARK] = str(Path(folder) / "mark")
        with contextlib.redirect_stderr(printed):
            code = run_script(case.ranks, __file__, ["run", case.name, str(turns)])
        return Said(f"exit code {code}\n{printed.getvalue()}", time.time() - float(Path(path).read_text()))


def on_processes(case: Case, turns: int) -> Said:
    """Under mpirun."""
    from mpi_launch import launch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mark"
        words = (sys.executable, __file__, "run", case.name, str(turns))
        run = launch(case.ranks, *words, timeout=40, env={MARK: str(path)})
        seconds = time.time() - float(path.read_text()) if path.exists() else float("inf")
    return Said(f"exit code {run.code}\n{run.output}", seconds)


def lines_of(case: Case, mark: str) -> list[str]:
    """The places of a case that a comment marks."""
    source, first = inspect.getsourcelines(case.play)
    return [f"{FILE}:{first + at}" for at, line in enumerate(source) if line.rstrip().endswith(f"# {mark}")]


def verdict(case: Case, said: Said) -> dict[str, bool]:
    """What is asked of a report, and whether it has it."""
    text, who = said.text, case.ranks - 1 if case.who == -1 else case.who
    sides = [places for mark in ("HERE", "ASTRAY") if (places := lines_of(case, mark))]
    does = ("left", "is behind", "does not", "of axis", "isend", f"of {case.ranks} ended")
    tells_who = (f"rank {who}: ", *(f"ank {who} {verb}" for verb in does))
    said_once = sum(text.count(f"{kind}: ") for kind in ("CollectiveMismatch", "CommError")) or text.count(
        " ended all "
    )
    head = text.split("\nLast calls")[0].split("-----")[0].strip().splitlines()
    return {
        "told": bool(said_once) and not text.startswith("exit code 0") and said.seconds <= SECONDS,
        "once": said_once == 1 and "Traceback" not in text,
        "sites": all(any(place in text for place in places) for places in sides),
        "last": case.own or "Last common call: " in text or " ended all " in text,
        "who": who is None or any(words in text for words in tells_who),
        "short": len(head) <= 1 + 5 + 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="local, mpi, or names of cases")
    parser.add_argument("--turns", type=int, default=TURNS, help="that are right, before")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the reports")
    options = parser.parse_args()
    ways = {"local": on_threads, "mpi": on_processes}
    chosen = [word for word in options.words if word in ways] or list(ways)
    names = [word for word in options.words if word not in ways] or list(CASES)
    good = done = 0
    total = len(names) * len(chosen)
    for name in names:
        for way in chosen:
            done += 1
            case = CASES[name]
            said = ways[way](case, options.turns)
            found = verdict(case, said)
            missing = " ".join(what for what, has in found.items() if not has)
            good += not missing
            word = f"lacks {missing}" if missing else "ok"
            print(f"{done:3} of {total}  {name:32} {way:6} {said.seconds:5.1f} s  {word}", flush=True)
            if options.verbose:
                print("".join(f"    {line}\n" for line in said.text.splitlines()), flush=True)
    print(f"{good} of {total} have all")
    sys.exit(good < total)


def run_one(name: str, turns: int) -> None:
    """One case, on the ranks that are there."""
    if "MPITRAIN_TEST_STACKS_AFTER" in os.environ:
        faulthandler.dump_traceback_later(float(os.environ["MPITRAIN_TEST_STACKS_AFTER"]), exit=True)
    path = os.environ.get(MARK)

    def mark() -> None:
        if path and world().rank == 0:
            Path(path).write_text(repr(time.time()))

    play(CASES[name], turns, mark)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_one(sys.argv[2], int(sys.argv[3]))
    else:
        sys.path.insert(0, str(Path(__file__).with_name("mpi")))
        main()
