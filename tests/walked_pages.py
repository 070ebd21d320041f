"""Pages that are walked through: their commands are run, their mendings done, and what they show is compared.

    sh      commands of `mpitrain local`, `debug` or `compare`, on ranks that are threads of this process; others are
            not run here, and only say which script is meant
    text    what the last command before it prints; of `debug` a session, whose commands are those behind its prompts
    diff    lines of the script named last, and what takes their place in the copy that is walked with

Numbers of lines of the library are not compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sessions import PROMPT, Asker

from mpitrain.comm.local import run_script
from mpitrain.compare.command import main as compare
from mpitrain.debug.console.console import Console

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(sh|text|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:mpitrain )?(local|debug|mpirun) -n (\d+) (?:python )?(examples/bugs/\w+\.py)")
_OTHER_LINE = re.compile(r"(?<![\w/])[a-z]\w*\.py:\d+")  # scripts that are walked with begin with a digit


@dataclass
class Shown:
    """What a command printed, and what the page shows of it.

    Attributes:
        command: as it stands in the page.
        typed: commands of the session.
        printed: what came.
        said: what the page says of that, None where it says nothing.
        code: the exit code.
        is_mended: some lines of the script had been replaced by then.
    """

    command: str
    typed: list[str]
    printed: str
    said: str | None
    code: int
    is_mended: bool


@dataclass
class Walk:
    """A walk through a page, or a part of it, in a folder with a copy of the scripts.

    Attributes:
        folder: the working folder.
        script: the one named last.
        shown: what was run so far.
        is_mended: some lines of a script were replaced.
    """

    folder: Path
    script: str = ""
    shown: list[Shown] = field(default_factory=list)
    is_mended: bool = False

    def __post_init__(self) -> None:
        shutil.copytree(ROOT / "examples/bugs", self.folder / "examples/bugs", ignore=shutil.ignore_patterns("__*"))

    def through(self, text: str) -> list[Shown]:
        """Walk through some text of a page; `shown` is what was run in it."""
        blocks = list(_FENCE.finditer(text))
        begun = len(self.shown)
        for at, block in enumerate(blocks):
            kind, body = block[1], block[2]
            if kind == "diff":
                self.mend(body)
            if kind == "sh":
                follows = blocks[at + 1] if at + 1 < len(blocks) and blocks[at + 1][1] == "text" else None
                *first, last = body.splitlines()
                for line in first:
                    self._run(line, None)
                self._run(last, follows[2] if follows else None)
        return self.shown[begun:]

    def mend(self, diff: str) -> None:
        """Put the lines with + in the place of those with -."""
        parts = {sign: [line[1:] for line in diff.splitlines() if line[0] == sign] for sign in "-+"}
        old, new = ("".join(f"{line}\n" for line in parts[sign]) for sign in "-+")
        self.replace(old, new)
        self.is_mended = True

    def replace(self, old: str, new: str) -> None:
        """Change the script in the walk's folder."""
        path = self.folder / self.script
        source = path.read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{self.script} has not once\n{old}"
        path.write_text(source.replace(old, new), encoding="utf-8")

    def _run(self, line: str, said: str | None) -> None:
        typed = [match[1] for match in map(PROMPT.fullmatch, (said or "").split("\n")) if match]
        if command := _COMMAND.fullmatch(line):
            self.script, ranks = command[3], int(command[2])
            if command[1] == "mpirun":
                return
            code, printed = self.local(ranks) if command[1] == "local" else self.debug(ranks, typed)
        elif line.startswith("mpitrain compare "):
            code, printed = self.compare(*line.split()[2:])
        else:
            return
        self.shown.append(Shown(line, typed, printed, said, code, self.is_mended))

    def compare(self, *folders: str) -> tuple[int, str]:
        """`mpitrain compare`: the exit code, and what it prints."""
        out = io.StringIO()
        with self._here(out):
            return compare(folders), out.getvalue()

    def local(self, ranks: int) -> tuple[int, str]:
        """Run the script as `mpitrain local` does: its exit code, and what it prints."""
        out = io.StringIO()
        with self._here(out):
            return run_script(ranks, self.script, []), out.getvalue()

    def debug(self, ranks: int, typed: list[str]) -> tuple[int, str]:
        """Play a session with it, as `mpitrain debug`: the exit code, and what is printed behind the greeting."""
        terminal = Asker(typed)
        terminal.is_interactive = True  # somebody types it
        console = terminal.console = Console(ranks, self.script, [], terminal)
        with self._here(terminal.out):
            code = console.run()
        return code, terminal.out.getvalue().partition("\n")[2]

    @contextlib.contextmanager
    def _here(self, out: io.StringIO) -> Iterator[None]:
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                yield
        finally:
            os.chdir(before)


def masked(text: str) -> str:
    """Without numbers of lines of the library, and blanks behind lines."""
    return "\n".join(_OTHER_LINE.sub("library.py:N", line).rstrip() for line in text.strip("\n").split("\n"))


def sections(page: Path) -> dict[str, str]:
    """Heading -> text below it."""
    parts = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
