"""The console as somebody sits at it: a terminal of its own, keys, Ctrl-C and Ctrl-D, pdb on one rank."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LIMIT = 30.0  # seconds
PATIENCE = 5.0  # seconds
CODES = re.compile(r"\033\[[0-9;?]*[A-Za-z]|[\001\002\007]")
PDB = r"\(pdb, rank (\d)\) "

SUMS = """\
import sys
import time

import numpy as np
from mpitrain.comm.world import world

w = world()


def work(n):
    x = np.full(2, n)
    y = w.all_reduce(x)
    return y * w.rank


if sys.argv[1:] == ["sleeps"]:
    print("asleep", flush=True)
    while True:
        time.sleep(0.01)
turn = 0
while turn < 3 or sys.argv[1:] == ["forever"]:
    total = work(turn)
    turn += 1
print("over", w.rank, total)
"""


class Keyboard:
    """A session in a terminal of 100 columns."""

    def __init__(self, folder, *words, ranks=2):
        self.text = ""
        self._at = 0
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ |= {"TERM": "xterm", "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}
            os.environ.pop("NO_COLOR", None)
            command = [sys.executable, "-m", "mpitrain", "debug", "-n", str(ranks), *words]
            os.execv(sys.executable, command)

    def expect(self, pattern):
        """Wait until something is printed; what stands before it."""
        until = time.monotonic() + LIMIT
        while True:
            found = re.search(pattern, self.text[self._at :])
            if found:
                before = self.text[self._at : self._at + found.start()]
                self._at += found.end()
                return before
            goes_on = time.monotonic() < until and self._read()
            assert goes_on, f"no {pattern!r} in:\n{self.text[self._at :]}"

    def prompt(self, rank=0):
        return self.expect(rf"rank {rank}> ")

    def type(self, keys):
        os.write(self._file, keys.encode())

    def interrupt(self):
        """Ctrl-C at the prompt; what was printed up to the next one.

        A signal that comes just before readline begins to wait is looked at with the next key only: so this waits a
        little, as people do, and types again where that was not enough.
        """
        time.sleep(0.3)
        self.type("\x03")
        until = time.monotonic() + PATIENCE
        while "rank" not in self.text[self._at :] and time.monotonic() < until:
            self._read()
        if "rank" not in self.text[self._at :]:
            self.type("\x03")
        return self.prompt()

    def say(self, *lines, rank=0):
        """Type lines at the console's prompt, each when it is there."""
        for line in lines:
            self.prompt(rank)
            self.type(line + "\n")

    def pdb(self, *lines, rank=0):
        """The same at pdb's."""
        for line in lines:
            assert self.expect(PDB) is not None
            self.type(line + "\n")

    def end(self):
        """Its exit code, when it has ended."""
        until = time.monotonic() + LIMIT
        while self._read():
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self):
        if not select.select([self._file], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._file, 65536)
        except OSError:  # how Linux tells the end of a terminal
            return False
        self.text += CODES.sub("", data.decode(errors="replace")).replace("\r", "")
        return bool(data)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SUMS)
    return tmp_path


def test_tab_completes_an_empty_line_goes_on_and_ctrl_d_ends(folder):
    keys = Keyboard(folder, "script.py")
    keys.prompt()
    keys.type("whe\t\n")
    assert "before its first line" in keys.prompt()
    keys.type("step mes\t\n")
    assert "next all_reduce (2,) int64 on world" in keys.prompt()
    keys.type("\n")  # step message again
    assert "next all_reduce (2,) int64 on world" in keys.prompt()
    assert "continue lets ranks run, quit ends them" in keys.interrupt()
    keys.type("not a command; where\n")
    keys.expect("what follows it is left out")
    keys.prompt()
    keys.type("where; rank\n")
    keys.expect("next all_reduce")
    keys.expect("rank 0 of 0 to 1")
    keys.prompt()
    keys.type("not a command\n")
    assert "'not' is no command" in keys.prompt()
    keys.type("\x04")
    assert keys.end() == 0
    assert "over" not in keys.text
    history = folder / "state" / "mpitrain" / "console_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text().split("\n")[:2] == ["where ", "step message "]


def test_ctrl_c_stops_ranks_that_run(folder):
    keys = Keyboard(folder, "--no-history", "script.py", "forever")
    keys.say("continue")
    time.sleep(0.3)
    keys.type("\x03")
    keys.expect(r"interrupted at rank (\d)")
    keys.expect(r"rank \d> ")
    keys.type("waits\n")
    keys.expect(r"rank \d> ")
    keys.type("quit 4\n")
    assert keys.end() == 4
    assert not (folder / "state").exists()


def test_ctrl_c_names_a_rank_that_comes_to_no_op_or_message_and_ends_it_when_asked_thrice(folder):
    keys = Keyboard(folder, "script.py", "sleeps")
    keys.say("c")
    keys.expect("asleep")
    for _ in range(2):
        time.sleep(0.3)
        keys.type("\x03")
    keys.expect(r"rank \d runs at script.py:19, and stops at its next op or message")
    keys.type("\x03")
    assert keys.end() == 130


def test_pdb_steps_lines_of_one_rank_and_the_others_follow_its_messages(folder):
    (folder / ".pdbrc").write_text("print('this file was run')\n")
    keys = Keyboard(folder, "script.py", ranks=3)
    keys.say("step message", "pdb 1")
    keys.expect(r"script.py\(12\)work\(\)")
    keys.pdb("s")
    keys.expect(r"script.py\(13\)work\(\)")  # over the sum, for which the others had to come
    assert "communicator.py" not in keys.text
    keys.pdb("p x, y")
    assert "(array([0, 0]), array([0, 0]))" in keys.expect(PDB)
    keys.type("r\n")
    keys.expect("--Return--")
    keys.pdb("interact", "q")
    assert "where" not in keys.prompt(1)
    keys.type("where\n")
    assert "> 1 " in keys.prompt(1)
    keys.type("pdb\n")
    keys.pdb("b 23", "c", "p turn, total", "cl 1", "\x03", "c")
    keys.expect("all ranks have ended")
    assert keys.end() == 0
    assert "this file was run" not in keys.text
    assert "(0, array([0, 0]))" in keys.text
    assert "statements run as they are typed" in keys.text
    assert [f"over {rank}" in keys.text for rank in range(3)] == [True] * 3


def test_pdb_looks_at_ranks_that_have_failed_or_wait(folder):
    (folder / "script.py").write_text(SUMS.replace("y = w.all", "assert w.rank != 1\n    y = w.all"))
    keys = Keyboard(folder, "script.py")
    keys.say("c")
    keys.say("pdb", rank=1)
    keys.expect(r"script.py\(12\)work\(\)")
    keys.pdb("p n", "n", "q")
    keys.say("pdb 0", rank=1)
    keys.expect(r"script.py\(13\)work\(\)")
    keys.pdb("p w.rank", "c")
    keys.say("q", rank=0)
    assert keys.end() == 1
    assert "its lines can be looked at, not stepped" in keys.text
