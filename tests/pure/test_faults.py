"""Faults: their words, when they strike, what they do, and that each strikes once a run."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpitrain import faults
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.events import LISTENERS, Event, tell

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "inject-faults.md"


def world(rank: int = 0, size: int = 4) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, size=size)


def say(names: Iterable[str], kind: str = "message") -> int:
    """Tell that messages (or others) begin and end; how many began before a listener raised, or all."""
    began = 0
    for name in names:
        began += 1
        for phase in ("begin", "end"):
            tell(LISTENERS.get(), Event(kind, phase, name, {"path": "/run/file"} if kind == "disk" else {}))
    return began


def step(number: int, *actions: str) -> None:
    for name in actions:
        for phase in ("begin", "end"):
            tell(LISTENERS.get(), Event("action", phase, name, {"step": number}))


def steps_until_raised(text: str, steps: Iterable[int], *actions: str) -> int | None:
    with faults.injected(text, world()):
        for number in steps:
            try:
                step(number, *actions)
            except faults.InjectedFault:
                return number
    return None


# -- words


@pytest.mark.parametrize(
    "text",
    [
        "kill rank=1 at=message:all_reduce n=41",
        "slow rank=0 at=action:F n=1 seconds=0.2",
        "io rank=3 at=disk:write n=3 errno=ENOSPC",
        "exit rank=2 at=action:STEP step=12 n=1 code=3",
        "raise rank=2 at=message:all_reduce in=REDUCE step=12-20 n=2",
        "stop rank=2 at=op:gelu step=12- n=2",
    ],
)
def test_a_fault_prints_as_it_is_written(text: str) -> None:
    (fault,) = faults.plan(text, 4)
    assert str(fault) == text
    assert faults.plan(str(fault), 4) == (fault,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kil rank=1", "must be one of kill raise exit"),
        ("kil rank=1", "Did you mean kill?"),
        ("kill", "rank= is missing"),
        ("kill rank=-1", "must be a whole number from 0"),
        ("kill rank=1 n=0", "must be a whole number from 1"),
        ("kill rank=1 seconds=2", "KEY one of rank at n step in"),
        ("kill rank=1 at=mesage:send", "at=mesage:send must be one of action message disk op"),
        ("kill rank=1 step=9-3", "must be a step from 1, or several: 12, 12-20, 12-."),
        ("kill rank=1 rank=2", "rank stands twice"),
        ("kill rank", "must be KEY=VALUE"),
        ("raise rank=0 in=", "must be the beginning of the name of an action"),
        ("slow rank=1 seconds=-1", "must be a number of seconds"),
        ("exit rank=1 code=256", "from 0 to 255"),
        ("io rank=1 errno=ENOSPACE", "must be one of ENOSPC EIO"),
        ("io rank=1 at=message", "at= must be disk"),
        ("random faults=2", "seed= is missing"),
        ("random seed=1 of=kill,die", "of=kill,die must be some of kill,raise,exit"),
        (" ; ", "no fault"),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        Config(steps=1, faults=text)
    assert str(caught.value).startswith("--faults ")
    assert str(caught.value).count("\n") == 0


def test_a_rank_that_does_not_exist_is_refused_when_the_number_of_ranks_is_known() -> None:
    Config(steps=1, faults="kill rank=4")
    with pytest.raises(ConfigError, match="rank=4 must be from 0 to 3"):
        faults.begin("kill rank=4", world(size=4))


def test_faults_are_of_one_start_and_not_written_to_the_settings_of_the_run() -> None:
    assert not any(line.startswith("faults") for line in Config(steps=1, faults="kill rank=1").to_toml().splitlines())


def test_random_faults_are_a_function_of_seed_and_ranks_and_stay_within_what_is_asked() -> None:
    text = "random seed={} faults=40 of=kill,io,exit steps=9 within=5"
    drawn = faults.plan(text.format(7), 3)
    assert drawn == faults.plan(text.format(7), 3)
    assert drawn != faults.plan(text.format(8), 3)
    assert len(drawn) == 40
    assert {fault.how for fault in drawn} == {"kill", "io", "exit"}
    assert {fault.rank for fault in drawn} == {0, 1, 2}
    assert {fault.n for fault in drawn} == set(range(1, 6))
    assert {fault.step for fault in drawn} == {(first, None) for first in range(1, 10)}
    assert {fault.kind for fault in drawn if fault.how == "io"} == {"disk"}
    assert {fault.kind for fault in drawn if fault.how != "io"} == {"action", "message"}
    codes = {fault.code for fault in faults.plan("random seed=1 faults=1000 of=exit", 1)}
    assert len(codes) > 50
    assert not codes & {0, 2, 85, 130, 143}  # which say that a run is not to be started again


# -- when


def test_it_strikes_once_as_the_nth_event_that_begins_so_begins() -> None:
    names = ["all_reduce", "send", "iall_reduce", "all_reduce", "all_reduce", "all_reduce"]
    with faults.injected("raise rank=0 at=message:all_reduce n=3", world()):
        with pytest.raises(faults.InjectedFault, match="raise rank=0 at=message:all_reduce n=3"):
            say(names)
        assert say(names) == len(names)


def test_it_strikes_its_rank_and_its_kind_of_event_only(capsys: pytest.CaptureFixture[str]) -> None:
    with faults.injected("raise rank=1 at=message:send", world(rank=0)):
        assert say(["send"]) == 1
    assert capsys.readouterr().err == ""
    with faults.injected("raise rank=1 at=disk:send", world(rank=1)):
        assert say(["send"]) == 1
    assert "[rank 1] fault not reached: raise rank=1 at=disk:send n=1" in capsys.readouterr().err


def test_a_step_and_an_action_narrow_it_down() -> None:
    assert steps_until_raised("raise rank=0 at=action:F step=3", range(1, 9), "LOAD0@0", "F0@0") == 3
    assert steps_until_raised("raise rank=0 at=action:F step=3 n=2", range(1, 9), "LOAD0@0", "F0@0") is None
    assert steps_until_raised("raise rank=0 at=action:F step=3- n=4", range(1, 9), "LOAD0@0", "F0@0") == 6
    assert steps_until_raised("raise rank=0 at=action:F step=9-20", range(5, 30), "F0@0") == 9
    with faults.injected("raise rank=0 at=message:all_reduce in=REDUCE", world()):
        say(["all_reduce"])
        step(1, "REDUCE@0")
        say(["all_reduce"])  # after it has ended
        tell(LISTENERS.get(), Event("action", "begin", "REDUCE@0", {"step": 1}))
        with pytest.raises(faults.InjectedFault):
            say(["all_reduce"])


def test_the_letter_of_a_compute_action_is_no_prefix() -> None:
    assert steps_until_raised("raise rank=0 at=action:F", [1], "FETCH0@0") is None
    assert steps_until_raised("raise rank=0 at=action:RECV", [1], "RECV_B0@0") == 1
    with faults.injected("raise rank=0 at=message:wait_irecv", world()), pytest.raises(faults.InjectedFault):
        say(["irecv", "wait irecv"])


def test_of_two_faults_at_one_event_the_second_strikes_at_the_next() -> None:
    with faults.injected("raise rank=0 at=message; memory rank=0 at=message", world()):
        with pytest.raises(faults.InjectedFault):
            say(["send"])
        with pytest.raises(MemoryError):
            say(["send"])


# -- what


def test_the_error_of_a_disk_has_its_number_and_the_file() -> None:
    for name, number in faults.ERRNOS.items():
        with faults.injected(f"io rank=0 errno={name} at=disk:write", world()), pytest.raises(OSError) as caught:  # noqa: PT011
            say(["create", "write"], kind="disk")
        assert (caught.value.errno, caught.value.filename) == (number, "/run/file")
    assert (faults.ERRNOS["ENOSPC"], faults.ERRNOS["ENOTSUPP"]) == (errno.ENOSPC, 524)


def test_exceptions_are_what_they_are_named() -> None:
    for how, kind in {"interrupt": KeyboardInterrupt, "memory": MemoryError, "exit": SystemExit}.items():
        with faults.injected(f"{how} rank=0", world()), pytest.raises(kind):
            step(1, "F0@0")


SCRIPT = """
import json, os, sys, types
from mpitrain import faults
from mpitrain.events import LISTENERS, Event, tell
found = {}
for how in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        faults.begin(how + " rank=0", types.SimpleNamespace(rank=0, size=1))
        tell(LISTENERS.get(), Event("action", "begin", "F0@0", {"step": 1}))
        os._exit(99)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        found[how] = -os.WSTOPSIG(status)
        os.kill(child, 9)
        os.waitpid(child, 0)
    else:
        found[how] = os.waitstatus_to_exitcode(status)
print(json.dumps(found))
"""


def test_a_process_ends_as_it_is_told_to() -> None:
    hows = ["kill", "segv", "term", "usr1", "stop", "_exit", "slow"]
    run = subprocess.run([sys.executable, "-c", SCRIPT, *hows], capture_output=True, text=True, cwd=ROOT, timeout=60)
    signals = {"kill": "SIGKILL", "segv": "SIGSEGV", "term": "SIGTERM", "usr1": "SIGUSR1", "stop": "SIGSTOP"}
    expected = {how: -getattr(signal, name) for how, name in signals.items()}
    assert json.loads(run.stdout) == {**expected, "_exit": 1, "slow": 99}, run.stderr
    assert run.stderr.count("[rank 0] fault injected in step 1 as F0@0 begins:") == len(hows)


# -- once a run


def test_a_fault_that_has_struck_is_left_out_when_the_run_starts_again(tmp_path: Path) -> None:
    text = "raise rank=0 at=message n=2; memory rank=0 at=message n=3"
    for error in (faults.InjectedFault, MemoryError, None):
        with faults.injected(text, world()):
            faults.remember(tmp_path)
            if error is None:
                assert say(["send"] * 5) == 5
            else:
                with pytest.raises(error):
                    say(["send"] * 5)
    with faults.injected(text, world()) as injector:
        assert injector is not None
        assert len(injector.pending) == 2
        faults.remember(tmp_path)
        assert not injector.pending
    notes = sorted((tmp_path / faults.DONE).iterdir())
    assert [note.read_text() for note in notes] == [f"{fault}\n" for fault in faults.plan(text, 4)]
    with faults.injected("raise rank=0 at=message n=1", world()):  # another one
        faults.remember(tmp_path)
        with pytest.raises(faults.InjectedFault):
            say(["send"])


def test_a_drawn_fault_does_not_come_again_on_another_number_of_ranks(tmp_path: Path) -> None:
    text = "random seed=3 faults=1 of=raise within=1 at=message"
    rank = faults.plan(text, 8)[0].rank
    with faults.injected(text, world(rank, 8)):
        faults.remember(tmp_path)
        with pytest.raises(faults.InjectedFault):
            say(["send"])
    for rank in range(2):
        with faults.injected(text, world(rank, 2)):
            faults.remember(tmp_path)
            assert say(["send"]) == 1


def test_a_fault_that_cannot_be_noted_does_not_strike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / faults.DONE).write_text("not a folder")
    with faults.injected("raise rank=0 at=message", world()):
        faults.remember(tmp_path)
        assert say(["send"]) == 1
    assert "fault left out" in capsys.readouterr().err


def test_the_page_names_every_fault_and_every_error_of_a_disk() -> None:
    page = PAGE.read_text()
    for word, how in faults.HOWS.items():
        assert f"| `{word}" in page, word
        assert how.help in page, word
    assert all(f"`{name}`" in page for name in faults.ERRNOS)
