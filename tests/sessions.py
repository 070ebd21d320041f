"""Sessions of the console, played and compared.

A transcript is what a session prints, prompts and commands included: its commands are taken from it, played on the
ranks of a script, and everything that is printed must be as it stands there.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.debug.console.console import Console
from mpitrain.debug.console.terminal import Line, Terminal

PROMPT = re.compile(r"rank \d+> (.*)")
LIBRARY_LINE = re.compile(r"(?<!/script)(?<!\bscript)\.py:\d+")


class Asker(Terminal):
    """A terminal whose commands may also be functions, called with the console while all ranks stand."""

    def __init__(self, commands: Sequence[str | Callable[[Console], Any]]) -> None:
        self.out = io.StringIO()
        super().__init__([], io.StringIO(), self.out, width=100)
        self.commands = list(commands)
        self.console: Console | None = None

    def command(self, prompt: str, completer: Any) -> Line:
        while self.commands:
            command = self.commands.pop(0)
            if isinstance(command, str):
                self.say(f"{prompt}{command}")
                return Line(command, "")
            assert self.console is not None
            command(self.console)
        raise EOFError


def play(path: Any, ranks: int, commands: Sequence[Any], argv: Sequence[str] = ()) -> tuple[int, str]:
    """Play a session; its exit code, and what it prints."""
    terminal = Asker(commands)
    console = terminal.console = Console(ranks, str(path), list(argv), terminal)
    return console.run(), terminal.out.getvalue()


def plays(path: Any, ranks: int, transcript: str, argv: Sequence[str] = ()) -> int:
    """Play the commands of a transcript, and compare; the exit code."""
    expected = textwrap.dedent(transcript).strip("\n").split("\n")
    commands = [match[1] for match in map(PROMPT.fullmatch, expected) if match]
    code, printed = play(path, ranks, commands, argv)
    assert masked(printed) == expected, printed
    return code


def masked(printed: str) -> list[str]:
    """The lines of a session without its greeting, which names a path, and without numbers of lines of the library."""
    lines = printed.rstrip("\n").split("\n")[1:]
    return [LIBRARY_LINE.sub(".py:N", line).rstrip() for line in lines]
