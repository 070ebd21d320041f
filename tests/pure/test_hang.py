"""Who is behind, and what is said of it: pages of several ranks in one process, and looks called by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpitrain.comm import copies, watch
from mpitrain.comm.behind import behind
from mpitrain.comm.board import BoardLane, FlightBoard
from mpitrain.comm.board_file import BoardFile, Process
from mpitrain.comm.copies import Copies
from mpitrain.comm.hang import Hang, Seen
from mpitrain.comm.site import trail_of
from mpitrain.comm.watch import Watch

F4 = np.dtype(np.float32)
ROOT = str(Path(__file__).resolve().parents[2])


class Ended(Exception):
    """The job was ended with a code."""


class Lifeline:
    """Ends nothing and hears nothing."""

    def hear(self) -> list[object]:
        return []

    def abort(self, code: int) -> None:
        raise Ended(code)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[FlightBoard]]:
    """Boards of so many ranks of one host; they are one process, so that locks and kernel tell nothing."""
    monkeypatch.setattr(BoardFile, "is_dead", lambda file, index: False)
    monkeypatch.setattr(BoardFile, "process", lambda file, index: Process(0, "S"))

    def boards(ranks: int) -> list[FlightBoard]:
        file = BoardFile.create(ranks)
        file.unlink()
        return [FlightBoard(file, rank, tuple(range(ranks)), (0,) * ranks) for rank in range(ranks)]

    return boards


def look_of(board: FlightBoard) -> Watch:
    return Watch(board, Lifeline())  # type: ignore[arg-type]


def hang_of(board: FlightBoard) -> Hang:
    assert board.current is not None
    return look_of(board).hang(board.current[0].partners)


def found(boards: list[FlightBoard], start: int, still: tuple[int, ...] = ()) -> list[int] | None:
    current = boards[start].current
    assert current is not None
    return behind(boards[start].pages, start, current[0].partners, still)


def lanes_of(boards: list[FlightBoard], axis: str, *ranks: int) -> dict[int, BoardLane]:
    return {rank: boards[rank].open(axis, ranks) for rank in ranks}


def test_the_rank_in_no_call_is_behind_and_so_is_one_in_an_earlier_call(
    make: Callable[[int], list[FlightBoard]],
) -> None:
    boards = make(4)
    lanes = lanes_of(boards, "dp", 0, 1, 2, 3)
    for rank, number in enumerate((8, 8, 7, 7)):
        lanes[rank].enter(number, "all_reduce", (2,), F4, -1)
    lanes[2].leave()
    assert found(boards, 0) == [2, 3]
    assert found(boards, 3) == []  # whatever that waits for: all have entered it
    lanes[2].enter(8, "all_reduce", (2,), F4, -1)
    assert found(boards, 1) == [3]
    assert "Rank 3 is behind: it is in an earlier call." in hang_of(boards[1]).head()[0]


def test_the_way_goes_on_from_those_who_wait_for_others(make: Callable[[int], list[FlightBoard]]) -> None:
    """3 waits for 2 on dp, 2 for a message of 1, 1 for 0 on tp, and 0 computes."""
    boards = make(5)
    dp, pp, tp = lanes_of(boards, "dp", 2, 3, 4), lanes_of(boards, "pp", 1, 2), lanes_of(boards, "tp", 0, 1)
    for rank in (3, 4):
        dp[rank].enter(1, "all_reduce", (2,), F4, -1)
    pp[2].enter(1, "wait irecv", (2,), F4, 0)
    tp[1].enter(1, "all_gather", (2,), F4, -1)
    assert found(boards, 3) == [0]
    tp[0].enter(1, "all_gather", (2,), F4, -1)
    assert found(boards, 3) == [1]  # all of tp are there: 1 goes on any moment
    tp[1].leave()
    pp[1].enter(1, "isend", (2,), F4, 1)
    pp[1].leave()
    assert found(boards, 3) == [2]  # the message is on its way


def test_a_stopped_rank_is_behind_also_in_the_call_that_all_are_in(make: Callable[[int], list[FlightBoard]]) -> None:
    boards = make(3)
    lanes = lanes_of(boards, "dp", 0, 1, 2)
    for rank in range(3):
        lanes[rank].enter(1, "barrier", (), F4, -1)
    assert found(boards, 0) == []
    assert "No rank is behind: the message itself does not arrive." in hang_of(boards[0]).head()[0]
    assert found(boards, 0, still=(2,)) == [2]


def test_a_member_that_has_not_made_the_axis_yet_is_behind_too(make: Callable[[int], list[FlightBoard]]) -> None:
    boards = make(3)
    boards[0].open("dp", (0, 2)).enter(1, "barrier", (), F4, -1)
    assert found(boards, 0) == [2]


def test_ranks_that_wait_for_each_other_are_said_to(make: Callable[[int], list[FlightBoard]]) -> None:
    boards = make(2)
    lanes = lanes_of(boards, "pp", 0, 1)
    lanes[0].enter(1, "send", (2,), F4, 1)
    lanes[1].enter(1, "send", (2,), F4, 0)
    assert found(boards, 0) is None
    assert "Ranks wait for each other." in hang_of(boards[0]).head()[0]


def test_the_head_has_at_most_five_lines_and_puts_ranks_of_one_place_together(
    make: Callable[[int], list[FlightBoard]],
) -> None:
    boards = make(3)
    lanes = lanes_of(boards, "tp", 0, 1, 2)
    lanes[1].enter(1, "all_gather", (2,), F4, -1)
    lanes[1].leave()
    for rank in (0, 2):
        lanes[rank].enter(2, "all_reduce", (4,), F4, -1)
    assert hang_of(boards[0]).head() == [
        "CommError: no answer for 300 s (--timeout).  Rank 1 is behind: it is in no call.",
        "  rank 1 runs, after all_gather on tp, call 1, (2,) float32 (for 0 s)",
        "  ranks 0,2 wait in all_reduce on tp, call 2, (4,) float32 (for 0 s)",
    ]
    many = make(40)
    for board in many:
        board.open("tp", tuple(range(40))).enter(1 + board.rank % 7, "barrier", (), F4, -1)
    hang = hang_of(many[6])
    lines = hang.head()
    assert len(lines) == 5
    assert lines[1].startswith("  ranks 0,7,14,21,28,35 wait in barrier on tp, call 1")
    assert lines[-1] == "  and 4 more places"
    assert len(hang.rest("")) <= 40
    assert hang.rest("")[-1] == "  and 5 more ranks"
    assert sum(line.startswith("rank ") for line in hang.whole()) == 40


def test_last_calls_are_told_newest_first_and_all_of_them_stand_in_the_file(
    make: Callable[[int], list[FlightBoard]], tmp_path: Path
) -> None:
    boards = make(2)
    lanes = lanes_of(boards, "dp", 0, 1)
    for number in range(1, 41):
        for rank in (0, 1)[: 2 if number < 40 else 1]:
            lanes[rank].enter(number, "all_reduce", (number,), F4, -1)
            if number < 40:
                lanes[rank].leave()
    hang = hang_of(boards[0])
    path = hang.write(str(tmp_path))
    assert path == str(tmp_path / "hang-report.txt")
    rest = hang.rest(path)
    assert rest[1:3] == [
        "Last common call: all_reduce on dp, call 39, (39,) float32",
        f"Last calls, the newest first; more of them: {path}.",
    ]
    assert [line.split(", ")[1] for line in rest if "    all_reduce" in line] == [
        f"call {number}" for number in (39, 38, 37, 36, 40, 39, 38, 37)
    ]
    whole = Path(path).read_text()
    assert whole.count("all_reduce on dp, call") >= 64
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert hang.write(str(tmp_path / "missing")) == ""
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "hang-report.txt").symlink_to(tmp_path / "elsewhere")
    assert hang.write(str(tmp_path / "linked")) == ""
    assert not (tmp_path / "elsewhere").exists()


def computes(ready: threading.Event, go_on: threading.Event) -> None:
    ready.set()
    go_on.wait()  # HERE it waits


def test_a_look_posts_where_a_rank_runs_and_what_it_was_called_from(
    make: Callable[[int], list[FlightBoard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = make(2)
    lanes = lanes_of(boards, "dp", 0, 1)
    ready, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: computes(ready, go_on))
    monkeypatch.setattr(threading, "main_thread", lambda: thread)
    thread.start()
    ready.wait()
    time.sleep(0.05)
    try:
        look_of(boards[1]).look()
    finally:
        go_on.set()
        thread.join()
    here = 1 + next(
        n for n, line in enumerate(Path(__file__).read_text().splitlines()) if line.endswith("# HERE it waits")
    )
    page = boards[0].pages[1]
    assert page.site == f"test_hang.py:{here}"
    assert page.trail.startswith(f"test_hang.py:{here},")
    lanes[0].enter(1, "barrier", (), F4, -1)
    assert f"  rank 1 runs at test_hang.py:{here} and never entered a call (for 0 s)" in hang_of(boards[0]).head()
    lanes[1].enter(1, "barrier", (), F4, -1)
    assert page.site == ""  # that was another moment
    lanes[1].leave()
    assert any(f"rank 1 runs, last seen at test_hang.py:{here}, after" in line for line in hang_of(boards[0]).head())


def test_a_trail_names_each_file_once_in_a_row() -> None:
    def inner() -> str:
        return trail_of(sys._getframe())

    first, *_ = trail_of(sys._getframe()).split(" < ")
    assert inner().split(" < ")[0].count(",") == first.count(",") + 1
    assert first.startswith("test_hang.py:")


def test_a_wait_is_counted_while_the_process_is_awake(
    make: Callable[[int], list[FlightBoard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended job stands still as a whole, for hours maybe, and goes on."""
    boards = make(2)
    lanes = lanes_of(boards, "dp", 0, 1)
    now = [time.monotonic_ns()]
    monkeypatch.setattr(watch.time, "monotonic_ns", lambda: now[0])
    boards[0].limit = 3.0
    look = look_of(boards[0])
    lanes[0].enter(1, "barrier", (), F4, -1)
    for seconds in (0.5, 0.5, 3600.0, 0.5):
        now[0] += int(seconds * 1e9)
        look.look()
    for _ in range(2):
        now[0] += 10**9 // 4
        look.look()
    now[0] += 10**9 // 4
    with pytest.raises(Ended):
        look.look()


def test_a_rank_that_goes_from_call_to_call_never_reaches_the_limit(
    make: Callable[[int], list[FlightBoard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = make(2)
    lanes = lanes_of(boards, "dp", 0, 1)
    now = [time.monotonic_ns()]
    monkeypatch.setattr(watch.time, "monotonic_ns", lambda: now[0])
    boards[0].limit = 1.0
    look = look_of(boards[0])
    for number in range(1, 10):
        lanes[0].enter(number, "barrier", (), F4, -1)
        now[0] += 10**9 * 9 // 10
        look.look()
        lanes[0].leave()
        now[0] += 10**9 * 60  # a long computation, while nobody waits
        look.look()


def test_the_kernel_tells_whether_the_owner_of_a_page_is_stopped() -> None:
    file = BoardFile.create(2)
    code = (
        "import time; from mpitrain.comm.board_file import BoardFile;"
        f"f = BoardFile.attach({file.path!r}, 2); f.own(1); print('owned', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ROOT}
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"owned\n"
        assert file.process(1).number == child.pid
        assert file.process(1).state in ("S", "R")
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while file.process(1).state != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert file.process(1) == Process(child.pid, "T")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        file.unlink()
    assert file.process(1) == Process(0, "")


def test_a_stopped_rank_is_told_with_where_it_was_seen_last(
    make: Callable[[int], list[FlightBoard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = make(3)
    lanes = lanes_of(boards, "dp", 0, 1, 2)
    for rank in (0, 2):
        lanes[rank].enter(1, "barrier", (0,), F4, -1)
    boards[1].page.set_site("corpus.py:88 < train.py:9", boards[1].page.moment)
    monkeypatch.setattr(BoardFile, "process", lambda file, index: Process(7, "T" if index == 1 else "S"))
    assert hang_of(boards[0]).head() == [
        "CommError: no answer for 300 s (--timeout).  Rank 1 is behind: it is stopped (SIGSTOP).",
        "  rank 1 is stopped, last seen at corpus.py:88 and never entered a call (for 0 s)",
        "  ranks 0,2 wait in barrier on dp, call 1, (0,) float32 (for 0 s)",
    ]


@pytest.mark.parametrize("looked", ["before the call", "in the call"])
def test_the_place_of_a_rank_that_was_stopped_in_a_call_is_where_it_was_seen_last(
    make: Callable[[int], list[FlightBoard]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, looked: str
) -> None:
    boards = make(2)
    lanes = lanes_of(boards, "dp", 0, 1)
    if looked == "before the call":  # stopped before the next look came
        boards[1].page.set_site("corpus.py:88 < train.py:9", boards[1].page.moment)
    for lane in lanes.values():
        lane.enter(13, "all_reduce", (2,), F4, -1)
    if looked == "in the call":
        boards[1].page.set_site("corpus.py:88 < train.py:9", boards[1].page.moment)
    boards[0].page.set_site("train.py:14", boards[0].page.moment)
    monkeypatch.setattr(BoardFile, "process", lambda file, index: Process(7, "T" if index == 1 else "S"))
    hang = hang_of(boards[0])
    call = "all_reduce on dp, call 13, (2,) float32"
    assert hang.head()[1:] == [
        f"  rank 1 is stopped in {call}, last seen at corpus.py:88 (for 0 s)",
        f"  rank 0 waits in {call}, at train.py:14 (for 0 s)",
    ]
    places = [line for line in hang.rest("") if line.startswith("  rank")]
    assert places == ["  rank 1, last seen at corpus.py:88 < train.py:9", "  rank 0 at train.py:14"]
    assert [line for line in hang.whole() if ".py:" in line and "rank" not in line] == [
        "  train.py:14",
        "  last seen at corpus.py:88 < train.py:9",
    ]


def test_copies_tell_of_ranks_elsewhere_and_of_those_that_give_no_sign_of_life(
    make: Callable[[int], list[FlightBoard]], tmp_path: Path
) -> None:
    file = BoardFile.create(1)
    file.unlink()
    here = FlightBoard(file, 0, (0,), (0, 1, 1, 1))
    here.run_folder = str(tmp_path)
    here.open("dp", (0, 1, 2, 3)).enter(3, "barrier", (0,), F4, -1)
    there = make(4)
    for rank, number in ((1, 2), (2, 3), (3, 3)):
        there[rank].open("dp", (0, 1, 2, 3)).enter(number, "barrier", (0,), F4, -1)
        Copies(rank).write(str(tmp_path), there[rank].page)
    assert "Rank 1 is behind: it is in an earlier call." in hang_of(here).head()[0]
    long_ago = time.time() - 60
    os.utime(tmp_path / "board" / "rank-00002.page", (long_ago, long_ago))
    head = hang_of(here).head()
    assert "Rank 2 is behind: it is without a sign of life." in head[0]  # for which rank 1 waits, too
    assert head[1].startswith("  rank 2 is without a sign of life in barrier on dp, call 3")
    assert head[1].endswith("(for 60 s)")
    (tmp_path / "board" / "rank-00003.page").write_bytes(b"\xff" * copies.PAGE)
    head = hang_of(here).head()
    assert head[-1].startswith("  rank 3 on other hosts cannot be seen from here")


def test_a_copy_is_written_every_two_seconds_and_taken_away_at_the_end(
    make: Callable[[int], list[FlightBoard]], tmp_path: Path
) -> None:
    (board,) = make(1)
    own = Copies(0)
    own.write(str(tmp_path), board.page)
    path = tmp_path / "board" / "rank-00000.page"
    before = path.read_bytes()
    own.write(str(tmp_path), board.page)
    assert path.read_bytes() == before
    own.write(str(tmp_path), board.page, now=True)
    assert path.read_bytes()[:8] != before[:8]
    own.remove(str(tmp_path))
    assert not (tmp_path / "board").exists()
    own.remove(str(tmp_path))


def test_a_rank_whose_threads_stand_still_was_seen_last_where_it_was_seen(
    make: Callable[[int], list[FlightBoard]],
) -> None:
    """C code that keeps Python's lock stops the look, too: what it posted last may be another line."""
    (board,) = make(1)
    board.page.set_site("train.py:9", board.page.moment)
    seen = Seen(board.page.copy(), board.page.looked + 60 * 10**9)
    assert seen.place()[2].startswith(", last seen at train.py:9")
