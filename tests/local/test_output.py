"""An output that cannot be written, or that nobody reads: at most one line, and a code that says it; all commands."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout

import pytest

from mpitrain import cli
from mpitrain.comm.local import LocalWorld
from mpitrain.errors import ConfigError

LONG = "x" * 100_000
"""More than is kept in memory before it is written."""


@contextmanager
def full():
    """Output on a disk without room."""
    with open("/dev/full", "w") as stream, redirect_stdout(stream):
        yield


@contextmanager
def unread():
    """Output whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream, redirect_stdout(stream):
        yield


def says(text):
    def command():
        print(text)
        return 0

    return command


@pytest.mark.parametrize("text", ["short", LONG], ids=len)
def test_a_full_disk_is_one_line(capfd, text):
    with full():
        assert cli.guarded(says(text)) == 2
    assert capfd.readouterr().err == "ConfigError: the output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("text", ["short", LONG], ids=len)
def test_who_goes_away_is_told_nothing(capfd, text):
    with unread():
        assert cli.guarded(says(text)) == 141
    assert not capfd.readouterr().err


def test_on_ranks_of_one_process_it_is_a_mistake_of_the_user():
    with full(), pytest.raises(ConfigError, match="the output cannot be written"):
        LocalWorld(2).run(lambda: cli.guarded(says("short")))


@pytest.mark.parametrize("words", [["--version"], ["checkpoint", "--help"], ["tokenizer", "--help"], ["generate"]])
def test_every_command_says_it(capfd, words):
    with full():
        assert cli.main(words) == 2
    assert capfd.readouterr().err.startswith("ConfigError: the output cannot be written")


@pytest.mark.parametrize("words", [["--version"], ["checkpoint", "--help"], ["schedule", "--help"], ["generate"]])
def test_a_closed_output_is_one_that_nobody_reads(capfd, monkeypatch, words):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(words) == 141
    sys.stdout.close()
    assert capfd.readouterr() == ("", "")


def test_no_file_gets_the_number_of_a_closed_output():
    program = """
import sys
from mpitrain.cli import guarded
print(guarded(lambda: print(open(sys.executable, "rb").fileno(), file=sys.stderr)), file=sys.stderr)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1), text=True
    )
    number, code = ran.stderr.split()
    assert int(number) > 2
    assert (code, ran.returncode) == ("None", 0)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "no space", "a file"), OSError(errno.EIO, "of a socket"), BrokenPipeError()],
    ids=repr,
)
def test_an_error_of_another_file_is_none_of_the_output(capfd, error):
    def fails():
        raise error

    with pytest.raises(type(error)):
        cli.guarded(fails)
    assert capfd.readouterr().out == ("" if error.filename else "\n")
