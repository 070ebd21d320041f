"""The flight board and the look, without MPI: pages of several ranks in one process, and looks called by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpitrain.comm import board_file, watch
from mpitrain.comm.board import BoardLane, FlightBoard
from mpitrain.comm.board_file import BoardFile, sweep
from mpitrain.comm.page import KEPT_CALLS, LEFT, RUNNING, WAITING, Gone
from mpitrain.comm.watch import Watch

F4 = np.dtype(np.float32)


class Ended(Exception):
    """The job was ended with a code."""


class Lifeline:
    """Ends nothing, hears what a test wants it to hear."""

    def __init__(self) -> None:
        self.news: list[tuple[int, Gone]] = []

    def hear(self) -> list[tuple[int, Gone]]:
        news, self.news = self.news, []
        return news

    def abort(self, code: int) -> None:
        raise Ended(code)


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[FlightBoard]:
    """Three ranks of one host; they are one process, so that their locks tell nothing."""
    monkeypatch.setattr(BoardFile, "is_dead", lambda file, index: False)
    file = BoardFile.create(3)
    file.unlink()
    return [FlightBoard(file, rank, (0, 1, 2), (0, 0, 0)) for rank in range(3)]


def look_of(board: FlightBoard) -> Watch:
    return Watch(board, Lifeline())  # type: ignore[arg-type]


def test_a_page_tells_the_call_a_rank_waits_in(boards: list[FlightBoard]) -> None:
    lane = boards[0].open("tp", (0, 2))
    lane.enter(41, "all_reduce", (4, 512), F4, -1)
    seen = boards[1].pages[0]
    assert seen.state == WAITING
    assert str(seen.current()) == "all_reduce on tp, call 41, (4, 512) float32"
    lane.leave()
    assert boards[1].pages[0].state == RUNNING
    assert boards[1].pages[0].current() is None
    lane.enter(2, "recv", (3,), np.dtype(bool), 1)
    assert str(boards[1].pages[0].current()) == "recv on tp from rank 1 of it, call 2, (3,) bool"


def test_a_page_keeps_the_last_calls_and_shapes_of_up_to_six_dims(boards: list[FlightBoard]) -> None:
    lane = boards[0].open("dp", (0, 1, 2))
    for number in range(1, 101):
        lane.enter(number, "all_gather", (number,) + (1,) * (number % 8), F4, -1)
        lane.leave()
    calls = boards[2].pages[0].calls()
    assert [call.number for call in calls] == list(range(101 - KEPT_CALLS, 101))
    assert calls[-1].shape == (100, 1, 1, 1, 1)
    assert calls[-2].shape == (99, 1, 1, 1)
    assert calls[-6].shape == (95, 1, 1, 1, 1, 1)  # eight dims, of which six are kept


@pytest.mark.parametrize(("entered", "ends"), [(40, True), (41, False), (42, False)])
def test_a_leaver_is_missed_only_if_it_entered_fewer_calls_and_at_two_looks_running(
    boards: list[FlightBoard], capsys: pytest.CaptureFixture[str], entered: int, ends: bool
) -> None:
    lanes = [board.open("tp", (0, 1, 2)) for board in boards]
    look = look_of(boards[0])
    lanes[0].enter(41, "all_reduce", (4, 512), F4, -1)
    lanes[1].enter(entered, "all_reduce", (4, 512), F4, -1)
    look.look()
    boards[1].leave(3, spoke=False, where="train.py:40")
    look.look()  # the first look that sees it
    assert boards[2].pages[1].state == LEFT
    if ends:
        with pytest.raises(Ended, match="3"):
            look.look()
        said = capsys.readouterr().err
        assert said.startswith("CommError: rank 1 left with exit code 3 at train.py:40, but rank 0 waits for it in ")
        assert "all_reduce on tp, call 41, (4, 512) float32, at test_board.py:" in said
    else:
        look.look()
        look.look()


@pytest.mark.parametrize("inside_a_handler", [False, True])
def test_a_call_that_an_exception_ended_was_not_made(boards: list[FlightBoard], inside_a_handler: bool) -> None:
    lane = boards[1].open("tp", (0, 1))

    def call(number: int, verb: str, *, fails: bool) -> None:
        lane.enter(number, verb, (1,), F4, -1)
        try:
            if fails:
                raise KeyError(number)
        finally:
            lane.leave()

    def calls() -> None:
        call(1, "iall_reduce", fails=False)
        with pytest.raises(KeyError):
            call(2, "all_reduce", fails=True)
        assert list(boards[0].pages[1].counts().values()) == [1]
        call(2, "all_reduce", fails=False)
        with pytest.raises(KeyError):
            call(1, "wait iall_reduce", fails=True)  # it was made, before
        assert list(boards[0].pages[1].counts().values()) == [2]

    if inside_a_handler:
        try:
            raise OSError
        except OSError:
            calls()
    else:
        calls()


def test_a_call_that_returned_between_two_looks_is_no_longer_suspect(boards: list[FlightBoard]) -> None:
    lanes = [board.open("tp", (0, 1, 2)) for board in boards]
    look = look_of(boards[0])
    boards[1].leave(0, spoke=False, where="")
    for number in range(1, 6):
        lanes[0].enter(number, "all_reduce", (1,), F4, -1)
        look.look()
        lanes[0].leave()


def test_a_leaver_who_has_printed_its_error_ends_the_others_without_a_word(
    boards: list[FlightBoard], capsys: pytest.CaptureFixture[str]
) -> None:
    lanes = [board.open("tp", (0, 1, 2)) for board in boards]
    lanes[0].enter(1, "barrier", (), F4, -1)
    boards[1].leave(2, spoke=True, where="")
    look = look_of(boards[0])
    look.look()
    with pytest.raises(Ended, match="2"):
        look.look()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("mine", "theirs", "ends"),
    [
        ("recv", (0, "send"), True),
        ("recv", (1, "send"), False),
        ("wait irecv", (0, "isend"), True),
        ("wait irecv", (1, "isend"), False),
        ("send", (0, "recv"), True),
        ("send", (1, "recv"), False),
        ("recv", (1, "recv"), True),  # what it received says nothing about what it sent
    ],
)
def test_between_two_ranks_what_the_leaver_sent_or_took_counts(
    boards: list[FlightBoard], mine: str, theirs: tuple[int, str], ends: bool
) -> None:
    lanes = [board.open("pp", (0, 1, 2)) for board in boards]
    count, verb = theirs
    lanes[1].enter(9, "send", (1,), F4, 2)  # to somebody else
    if count:
        lanes[1].enter(count, verb, (1,), F4, 0)
    lanes[0].enter(1, mine, (1,), F4, 1)
    boards[1].leave(0, spoke=False, where="")
    look = look_of(boards[0])
    look.look()
    if ends:
        with pytest.raises(Ended):
            look.look()
    else:
        look.look()


def test_axes_of_one_name_and_different_ranks_are_not_confused(boards: list[FlightBoard]) -> None:
    first, second = boards[0].open("tp", (0, 1)), boards[1].open("tp", (1, 2))
    first.enter(1, "barrier", (), F4, -1)
    second.enter(5, "barrier", (), F4, -1)
    boards[1].leave(0, spoke=False, where="")
    look = look_of(boards[0])
    look.look()
    with pytest.raises(Ended):
        look.look()


def test_a_leaver_on_another_host_is_judged_by_the_counts_it_told() -> None:
    file = BoardFile.create(2)
    file.unlink()
    here, there = FlightBoard(file, 0, (0,), (0, 1)), FlightBoard(file, 1, (0, 1), (1, 1))
    mine, theirs = here.open("dp", (0, 1)), there.open("dp", (0, 1))
    lifeline = Lifeline()
    look = Watch(here, lifeline)  # type: ignore[arg-type]
    theirs.enter(7, "all_reduce", (1,), F4, -1)
    there.leave(0, spoke=False, where="")
    lifeline.news = [(1, there.page.gone())]
    mine.enter(7, "all_reduce", (1,), F4, -1)
    look.look()
    look.look()
    mine.enter(8, "all_reduce", (1,), F4, -1)
    look.look()
    with pytest.raises(Ended):
        look.look()


def test_a_full_page_never_accuses_anybody(boards: list[FlightBoard]) -> None:
    lanes = [[board.open(f"axis {n}", (0, 1, 2)) for n in range(500)] for board in boards[:2]]
    lanes[1][499].enter(1, "barrier", (), F4, -1)  # counted nowhere
    boards[1].leave(0, spoke=False, where="")
    lanes[0][499].enter(1, "barrier", (), F4, -1)
    assert len(boards[1].page.counts()) < 500
    look = look_of(boards[0])
    look.look()
    look.look()


def test_what_all_ranks_know_is_claimed_once(boards: list[FlightBoard]) -> None:
    assert [board.claim("MeshError: ...") for board in boards] == [True, False, False]
    assert [board.claim("another") for board in boards] == [True, False, False]


def test_a_dead_owner_is_seen_by_its_lock() -> None:
    file = BoardFile.create(2)
    code = (
        "import sys, time; from mpitrain.comm.board_file import BoardFile;"
        f"f = BoardFile.attach({file.path!r}, 2); f.own(1); print('owned', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ROOT}
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"owned\n"
        assert not file.is_dead(1)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        file.unlink()
    assert file.is_dead(1)


def test_the_file_is_private_and_only_the_job_s_own_is_mapped(tmp_path: Path) -> None:
    file = BoardFile.create(2)
    try:
        assert os.stat(file.path).st_mode & 0o777 == 0o600
        with pytest.raises(PermissionError):
            BoardFile.attach(file.path, 3)
        link = tmp_path / "link"
        link.symlink_to(file.path)
        with pytest.raises(OSError, match="symbolic links"):
            BoardFile.attach(str(link), 2)
        assert BoardFile.attach(file.path, 2).identity == file.identity
        assert BoardFile.private().identity != BoardFile.private().identity
    finally:
        file.unlink()


def test_boards_of_dead_ranks_are_swept_and_living_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_file, "_folders", lambda: (str(tmp_path),))
    code = (
        "from mpitrain.comm import board_file; import sys, time;"
        f"board_file._folders = lambda: ({str(tmp_path)!r},);"
        "f = board_file.BoardFile.create(1); f.own(0); print(f.path, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ROOT}
    )
    try:
        assert child.stdout is not None
        path = child.stdout.readline().decode().strip()
        assert sweep(min_age=0) == []
        assert os.path.exists(path)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert sweep() == []  # young: its ranks may be about to lock it
    assert sweep(min_age=0) == [path]
    assert os.listdir(tmp_path) == []


def test_entering_and_leaving_a_call_is_cheap(boards: list[FlightBoard]) -> None:
    """2 us are promised; a loaded machine gets ten times as much."""
    lane = boards[0].open("tp", (0, 1, 2))
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for number in range(200):
            lane.enter(number, "all_reduce", (4, 512), F4, -1)
            lane.leave()
        best = min(best, (time.perf_counter() - began) / 200)
    assert best < 20e-6


ROOT = str(Path(__file__).resolve().parents[2])


def test_ranks_that_wait_for_each_other_on_two_axes_end_at_the_second_look(
    boards: list[FlightBoard], capfd: pytest.CaptureFixture[str]
) -> None:
    """C73: rank 0 sums over the world, rank 1 over an axis; each has not entered what the other waits in."""
    world = [board.open("world", (0, 1, 2)) for board in boards]
    axis = [board.open("dp", (0, 1)) for board in boards[:2]]
    look = look_of(boards[0])
    world[0].enter(1, "all_reduce", (2,), F4, -1)
    world[2].enter(1, "all_reduce", (2,), F4, -1)
    axis[1].enter(1, "all_reduce", (3,), F4, -1)
    look.look()
    with pytest.raises(Ended):
        look.look()
    said = capfd.readouterr().err
    assert "CollectiveMismatch: ranks wait for each other" in said
    assert "rank 0 waits in all_reduce on world, call 1, (2,) float32" in said
    assert "rank 1 waits in all_reduce on dp, call 1, (3,) float32" in said
    assert len(said.splitlines()) <= 5


def test_a_ring_of_three_is_found_and_a_chain_that_can_go_on_is_none(boards: list[FlightBoard]) -> None:
    ends = {(0, 1): "a", (1, 2): "b", (0, 2): "c"}
    lanes = {(rank, name): boards[rank].open(name, pair) for pair, name in ends.items() for rank in pair}
    lanes[0, "a"].enter(1, "all_reduce", (2,), F4, -1)  # 0 waits for 1
    lanes[1, "b"].enter(1, "all_gather", (2,), F4, -1)  # 1 waits for 2
    look = look_of(boards[0])
    for _ in range(3):
        look.look()  # 2 runs: it may enter "b" any time
    lanes[2, "c"].enter(1, "barrier", (0,), F4, -1)  # 2 waits for 0
    look.look()
    with pytest.raises(Ended):
        look.look()


def looks_of(boards: list[FlightBoard], times: int = 3) -> None:
    looks = [look_of(board) for board in boards]
    for _ in range(times):
        for look in looks:
            look.look()


def test_ranks_in_the_same_call_or_with_a_message_on_its_way_are_in_no_ring(boards: list[FlightBoard]) -> None:
    lanes = [board.open("world", (0, 1, 2)) for board in boards]
    for lane in lanes:
        lane.enter(7, "all_reduce", (2,), F4, -1)
    looks_of(boards)
    for lane in lanes:
        lane.leave()
    lanes[1].enter(1, "isend", (2,), F4, 0)
    lanes[1].leave()
    lanes[0].enter(1, "recv", (2,), F4, 1)
    lanes[1].enter(8, "all_reduce", (2,), F4, -1)
    looks_of(boards)
    lanes[0].leave()
    lanes[0].enter(1, "irecv", (2,), F4, 1, 9)  # waits for nobody
    looks_of(boards)


@pytest.mark.parametrize(
    ("mine", "theirs", "tags"),
    [
        ("recv", "recv", (0, 0)),
        ("recv", "all_reduce", (0, 0)),
        ("wait irecv", "all_reduce", (0, 0)),
        ("recv", "wait irecv", (5, 6)),
    ],
)
def test_ranks_that_wait_for_each_others_messages_end_at_the_second_look(
    boards: list[FlightBoard], capfd: pytest.CaptureFixture[str], mine: str, theirs: str, tags: tuple[int, int]
) -> None:
    lanes = [board.open("world", (0, 1, 2)) for board in boards]
    lanes[0].enter(1, mine, (2,), F4, 2, tags[0])
    if theirs == "all_reduce":
        lanes[2].enter(1, theirs, (3,), F4, -1)
    else:
        lanes[2].enter(1, theirs, (3,), F4, 0, tags[1])
    look = look_of(boards[0])
    look.look()
    with pytest.raises(Ended):
        look.look()
    tag = f", tag {tags[0]}" if tags[0] else ""
    waits = f"for {mine[5:]}" if mine.startswith("wait ") else f"in {mine}"
    assert f"  rank 0 waits {waits} on world from rank 2 of it{tag}, call 1, (2,) float32" in capfd.readouterr().err


def test_a_message_with_another_tag_is_not_the_one_that_is_waited_for(boards: list[FlightBoard]) -> None:
    lanes = [board.open("pp", (0, 1, 2)) for board in boards]
    for tag in (3, 5):
        lanes[1].enter(1, "send", (2,), F4, 0, tag)
        lanes[1].leave()
    lanes[0].enter(1, "recv", (2,), F4, 1, 5)
    boards[1].leave(0, spoke=False, where="")
    looks_of(boards[:1])
    lanes[0].enter(1, "recv", (2,), F4, 1, 4)
    look = look_of(boards[0])
    look.look()
    with pytest.raises(Ended):
        look.look()


def test_sends_that_wait_for_each_other_get_time_to_end_by_themselves(
    boards: list[FlightBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C41: short ones do, at once; nobody knows from outside which are short."""
    lanes = [board.open("pp", (0, 1, 2)) for board in boards]
    lanes[0].enter(1, "send", (2,), F4, 1)
    lanes[1].enter(1, "send", (2,), F4, 0)
    look = look_of(boards[0])
    for _ in range(5):
        look.look()
    monkeypatch.setattr(watch, "SEND_SECONDS", 0.0)
    with pytest.raises(Ended):
        look.look()


def test_many_tags_take_no_room_from_collectives_and_accuse_nobody(boards: list[FlightBoard]) -> None:
    pairs = [board.open("pp", (0, 1, 2)) for board in boards]
    for tag in range(1000):
        pairs[1].enter(1, "send", (2,), F4, 0, tag)
        pairs[1].leave()
    axes = [board.open("dp", (0, 1, 2)) for board in boards]
    axes[1].enter(4, "barrier", (), F4, -1)
    axes[1].leave()
    assert 4 in boards[1].page.counts().values()
    boards[1].leave(0, spoke=False, where="")
    pairs[0].enter(1, "recv", (2,), F4, 1, 2000)  # rank 1 had no room left to count these
    looks_of(boards[:1])
    pairs[0].leave()
    axes[0].enter(5, "barrier", (), F4, -1)
    look = look_of(boards[0])
    look.look()
    with pytest.raises(Ended):
        look.look()


def test_a_rank_whose_own_page_is_full_proves_no_ring(boards: list[FlightBoard]) -> None:
    lanes = [board.open("pp", (0, 1, 2)) for board in boards]
    for tag in range(300):
        lanes[0].enter(1, "send", (2,), F4, 1, tag)
        lanes[0].leave()
    lanes[1].enter(1, "send", (2,), F4, 0, 900)
    lanes[1].leave()
    lanes[0].enter(1, "recv", (2,), F4, 1, 900)  # under way, but this page has no room for its channel
    lanes[1].enter(1, "barrier", (), F4, -1)
    looks_of(boards)


def test_a_member_that_has_not_made_the_axis_and_waits_elsewhere_is_in_a_ring(
    boards: list[FlightBoard], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its page says nothing of that axis; that of the one who waits there tells its members."""
    boards[1].open("line", (0, 1, 2)).enter(1, "barrier", (0,), F4, -1)
    worlds = [board.open("world", (0, 1, 2)) for board in boards]
    worlds[2].enter(1, "all_reduce", (2,), F4, -1)
    look = look_of(boards[2])
    look.look()
    with pytest.raises(Ended):
        look.look()
    said = capfd.readouterr().err
    assert "  rank 1 waits in barrier on line, call 1, (0,) float32" in said
    assert "  rank 2 waits in all_reduce on world, call 1, (2,) float32" in said


def test_calls_with_places_tell_who_left_the_path_and_the_last_common_call(
    boards: list[FlightBoard], capfd: pytest.CaptureFixture[str]
) -> None:
    lanes = [board.open("world", (0, 1, 2)) for board in boards]
    others = [board.open("dp", (0, 1, 2)) for board in boards]

    def call(rank: int, lane: BoardLane, number: int, verb: str, line: int) -> None:
        lane.enter(number, verb, (2,), F4, -1)
        lane.place(f"train.py:{line}", line)
        if rank >= 0:
            lane.leave()

    for turn in range(3):
        for rank, lane in enumerate(lanes):
            call(rank, lane, 2 * turn + 1, "barrier", 5)
            if turn < 2:
                call(rank, lane, 2 * turn + 2, "all_reduce", 6)
    for rank in (0, 1):
        call(-1, lanes[rank], 6, "all_reduce", 6)
    call(-1, others[2], 1, "all_reduce", 9)
    look = look_of(boards[0])
    look.look()
    with pytest.raises(Ended):
        look.look()
    assert capfd.readouterr().err.splitlines() == [
        "CollectiveMismatch: ranks wait for each other, none can go on."
        "  Rank 2 left the path: a new turn for it alone.",
        "  ranks 0,1 wait in all_reduce on world, call 6, (2,) float32, at train.py:6",
        "  rank 2 waits in all_reduce on dp, call 1, (2,) float32, at train.py:9",
        "  Last common call: barrier on world, call 5, (2,) float32, at train.py:5",
    ]


def test_what_was_sent_and_not_received_is_told_when_all_have_ended(boards: list[FlightBoard]) -> None:
    lanes = [board.open("pp", (0, 1, 2)) for board in boards]
    for number in (1, 2):
        lanes[0].enter(number, "isend", (4,), F4, 1, 7)
        lanes[0].place("train.py:9", 9)
        lanes[0].leave()
    lanes[1].enter(1, "recv", (4,), F4, 0, 7)
    lanes[1].leave()
    assert str(boards[0].unreceived()) == (
        "the program ends, and nobody has received what was sent:\n"
        "  rank 0: isend on pp to rank 1 of it, tag 7, call 2, (4,) float32, at train.py:9"
    )
    lanes[1].enter(2, "irecv", (4,), F4, 0, 7)
    lanes[1].leave()
    assert boards[0].unreceived() is None
    assert boards[1].unreceived() is None


@pytest.mark.parametrize("checked", [(0, 1), (0, 1, 2), ()])
def test_checked_mode_on_some_ranks_only_ends_the_job_at_the_second_look(
    boards: list[FlightBoard], capfd: pytest.CaptureFixture[str], checked: tuple[int, ...]
) -> None:
    lanes = [board.open("world", (0, 1, 2)) for board in boards]
    for rank, lane in enumerate(lanes):
        lane.enter(1, "all_reduce", (2,), F4, -1)
        if rank in checked:
            lane.place("train.py:6", 6)
    look = look_of(boards[2])
    look.look()
    if len(checked) != 2:
        look.look()
        return
    with pytest.raises(Ended):
        look.look()
    said = capfd.readouterr().err
    assert said.startswith("CollectiveMismatch: ranks 0,1 compare their calls (checked mode), rank 2 does not.\n")


def test_a_site_that_finds_no_room_leaves_the_call_checked(boards: list[FlightBoard]) -> None:
    lane = boards[0].open("world", (0, 1, 2))
    for number in range(1, 2000):
        lane.enter(number, "barrier", (0,), F4, -1)
        lane.place(f"a_file_with_a_long_name_{number}.py:{number}", number)
    call = boards[1].pages[0].current()
    assert call is not None
    assert (call.site, call.is_checked, call.number) == ("", True, 1999)
