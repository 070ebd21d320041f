"""Where commands come from and where answers go: a script of commands first, then the keyboard.

A file of commands is data: a line a command, `#` begins a comment.  Each is echoed behind its prompt, so that what a
script prints reads as a session does.  Keyboard lines are edited, completed and remembered by readline, where Python
has it; the history is a file of the user's own, which nobody else may read.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from mpitrain.debug.console.words import folded
from mpitrain.errors import ConsoleError

Completer = Callable[[str, int], str | None]

MOST_BYTES = 1 << 16  # of a file of commands
MOST_CHARACTERS = 1000  # of a command
REMEMBERED = 1000  # lines of history
_DELIMITERS = " \t\n,<>=;"
_PAINT = re.compile(r"(\033\[(?:0|1|2|31|33)m)")  # what `_painted` puts in


class Line(NamedTuple):
    """A command, and where it stands: `look.txt:3`; "" if it was typed."""

    text: str
    place: str


def commands_of_file(path: str) -> list[Line]:
    """The commands of a file.

    Raises:
        ConsoleError: it cannot be read, is too long, or no text.
    """
    name = os.path.basename(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer blocks
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConsoleError(f"--commands {path}: not a file")
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConsoleError(f"--commands {path}: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise ConsoleError(f"--commands {path}: longer than {MOST_BYTES >> 10} KiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConsoleError(f"--commands {path}: not UTF-8 at byte {error.start}") from error
    return commands_of(text, name)


def commands_of(text: str, name: str = "") -> list[Line]:
    """The commands of a text: lines, or parts of a line between semicolons."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        for part in line.partition("#")[0].split(";"):
            if part.strip():
                lines.append(Line(part.strip(), f"{name}:{number}" if name else ""))
    return lines


class Terminal:
    """Reads commands and prints answers.

    Args:
        script: commands that come before those of the keyboard.
        stdin: the keyboard; where it is no terminal its lines are read as a script is, unless there is one.
        out: where answers go.
        colour: whether to mark lines.
        history: file of remembered lines; None: they are forgotten.

    Attributes:
        is_interactive: whether somebody sits at it.
        width: columns of a line.
    """

    def __init__(
        self,
        script: Sequence[Line],
        stdin: TextIO,
        out: TextIO,
        *,
        colour: bool | None = None,
        width: int | None = None,
        history: Path | None = None,
    ) -> None:
        self._script = list(script)
        self._had_script = bool(script)
        self._stdin = stdin
        self._out = out
        self.is_interactive = stdin.isatty()
        self.colour = out.isatty() and "NO_COLOR" not in os.environ if colour is None else colour
        self._width = width
        self._history = history
        self._readline = _readline() if self.is_interactive else None
        self._number = 0
        if self._readline is not None and history is not None:
            _recall(self._readline, history)

    @property
    def width(self) -> int:
        """Columns of a line: the terminal's, at least 80; 100 where there is none."""
        if self._width is not None:
            return self._width
        try:
            return max(80, os.get_terminal_size(self._out.fileno()).columns) if self._out.isatty() else 100
        except (OSError, ValueError):
            return 100

    @property
    def is_scripted(self) -> bool:
        """Whether the next command is one of a script."""
        return bool(self._script)

    @property
    def left(self) -> int:
        """Commands of the script that were not read yet."""
        return len(self._script)

    def forget_script(self) -> None:
        """Leave out what is left of it."""
        self._script.clear()

    # -- input --------------------------------------------------------------------------------------------------------

    def command(self, prompt: str, completer: Completer) -> Line:
        """The next command.

        Raises:
            EOFError: there is none any more.
            KeyboardInterrupt: Ctrl-C.
        """
        if self._script:
            line = self._script.pop(0)
            self.say(f"{self.strong(prompt)}{line.text}")
            return line
        if self.is_interactive:
            text = self.ask(prompt, completer)
            first, *rest = commands_of(text) or [Line(text, "")]
            self._script = rest
            return first
        if self._had_script:
            raise EOFError
        text = self._stdin.readline(MOST_CHARACTERS + 2)
        if not text:
            raise EOFError
        self._number += 1
        self._script = commands_of(text, "")
        self._script = [Line(line.text, f"standard input:{self._number}") for line in self._script]
        return self.command(prompt, completer) if self._script else Line("#", "")

    def ask(self, prompt: str, completer: Completer) -> str:
        """A line of the keyboard; to be called in the main thread.

        Raises:
            EOFError: Ctrl-D, or nobody sits there.
        """
        if not self.is_interactive:
            raise EOFError
        self._out.flush()
        if self._readline is not None:
            self._readline.set_completer(completer)
            self._readline.set_completer_delims(_DELIMITERS)
            prompt = f"\001\033[1m\002{prompt}\001\033[0m\002" if self.colour else prompt
        else:
            prompt = self.strong(prompt)
        return input(prompt)

    def close(self) -> None:
        """Keep the history."""
        if self._readline is not None and self._history is not None:
            _remember(self._readline, self._history)

    # -- output -------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print an answer; of its lines those that begin with `! ` are marked."""
        lines = [self._painted(line, "31") if line.startswith("! ") else line for line in self._tame(text).split("\n")]
        try:
            print("\n".join(lines), file=self._out, flush=True)
        except OSError as error:  # whoever reads is gone, or the disk is full: no reason for ranks to stand for ever
            if not isinstance(error, BrokenPipeError):
                print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())  # for what is flushed at the end, too

    def _tame(self, text: str) -> str:
        """Without what a terminal would obey, or cannot show: a text may be a file's, a script's or an error's."""
        if not text.isascii():
            encoding = getattr(self._out, "encoding", None) or "utf-8"
            text = text.encode(encoding, "replace").decode(encoding)
        parts = _PAINT.split(text) if self.colour else [text]
        return "".join(part if place % 2 else _tamed(part) for place, part in enumerate(parts))

    def warn(self, text: str) -> None:
        """Print what is wrong, folded to the width of a line."""
        lines = [f"! {line}" for line in text.split("\n")]
        self.say("\n".join(part for line in lines for part in folded(line, self.width)))

    def strong(self, text: str) -> str:
        """Marked as what matters."""
        return self._painted(text, "1")

    def quiet(self, text: str) -> str:
        """Marked as what stands beside."""
        return self._painted(text, "2")

    def alarm(self, text: str) -> str:
        """Marked as why ranks stand."""
        return self._painted(text, "33")

    def _painted(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.colour and text else text


def _tamed(text: str) -> str:
    return text if text.isprintable() else "".join(x if x.isprintable() or x in "\n\t" else "?" for x in text)


def _readline() -> Any:
    """The module, set up; None where Python was built without."""
    try:
        import readline
    except ImportError:
        return None
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    readline.set_history_length(REMEMBERED)
    return readline


# -- history ----------------------------------------------------------------------------------------------------------


def history_file() -> Path:
    """Where the history is kept: in the user's folder of states."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "mpitrain" / "console_history"


def _recall(readline: Any, path: Path) -> None:
    """Fill the history from a file of the user's own; anything else is left alone."""
    with contextlib.suppress(OSError, ValueError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, "rb") as lines:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                return
            text = lines.read(REMEMBERED * MOST_CHARACTERS).decode(errors="replace")
        readline.clear_history()
        for line in text.splitlines()[-REMEMBERED:]:
            if line.isprintable():
                readline.add_history(line[:MOST_CHARACTERS])


def _remember(readline: Any, path: Path) -> None:
    """Write the history: a new file takes the place of the old one."""
    count = readline.get_current_history_length()
    found = [readline.get_history_item(n) for n in range(max(1, count - REMEMBERED + 1), count + 1)]
    text = "".join(f"{line}\n" for line in found if line)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a full or read-only disk is no reason to end with an error
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(file, "w", encoding="utf-8") as lines:
            lines.write(text)
        os.replace(new, path)


@contextlib.contextmanager
def standard(script: Sequence[Line], *, keep_history: bool = True) -> Iterator[Terminal]:
    """The terminal of this process."""
    terminal = Terminal(script, sys.stdin, sys.stdout, history=history_file() if keep_history else None)
    try:
        yield terminal
    finally:
        terminal.close()
