"""The commands: one table of names, what they do, how they are explained.

A command is known by its name, by its short name, and by any beginning that no other command has.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.debug.console import looking, moving, stopping
from mpitrain.debug.console.backward import HELP_BACKWARD, backward
from mpitrain.debug.console.follow import HELP_FOLLOW
from mpitrain.debug.console.held import HELP_MEMORY, memory
from mpitrain.debug.console.shown import HELP_KEEP, HELP_SHOW, keep, show
from mpitrain.debug.console.so_far import HELP_REPORT, report
from mpitrain.debug.console.tapes import HELP_TAPE, tape
from mpitrain.debug.console.watch import Watch
from mpitrain.debug.console.words import folded, number, rank_or
from mpitrain.errors import ConsoleError

if TYPE_CHECKING:
    from mpitrain.debug.console.console import Console

WHERE, GOING, STOPPING, HELD, SESSION = "Where ranks stand", "Going on", "Stopping", "What ranks hold", "The session"
GROUPS = (WHERE, GOING, STOPPING, HELD, SESSION)
MOST_CHARACTERS = 1000
_LARGEST_CODE = 255
_LAST = (
    "A beginning of a name will do.  ; parts commands.  An empty line goes on as before.",
    "help NAME tells more, of break also what can be waited for.",
)

Do = Callable[["Console", str], bool | None]
"""Does a command with what stands behind its name; says whether ranks are to go on."""

HELP_PDB = """\
pdb [RANK]      Python's debugger, in the line that a rank is in
  n, s, r step lines of this rank; the others go on only as far as its messages need them.
  q: back to the console, with the rank where it is.  c: all go on to the next breakpoint.
  Of a rank that waits, or has failed, lines and variables can be looked at, not stepped.
  Only where somebody types: what pdb runs is code."""

HELP_HELP = """\
help [COMMAND]      the commands, or one of them in full"""

HELP_QUIT = """\
quit [CODE]      end all ranks; CODE is the exit code, 0 unless given, or that of a failed run"""


@dataclass(frozen=True)
class Command:
    """One of them.

    short: its short name; group: one of `GROUPS`; brief: what it does, on a line; help: how it is used, in full.
    """

    name: str
    short: str
    group: str
    do: Do
    brief: str
    help: str


def obey(console: Console, text: str) -> bool:
    """Do one command; whether ranks are to go on.

    Raises:
        ConsoleError: it is none, or cannot be done.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConsoleError(f"a command of {len(text)} characters; the most is {MOST_CHARACTERS}")
    word, _, words = " ".join(text.split()).partition(" ")
    if word.startswith("#"):
        return False
    command = named(word)
    if command.group == GOING:
        console.repeats = text
    return bool(command.do(console, words))


def named(word: str) -> Command:
    """The command of a name, a short name, or a beginning.

    Raises:
        ConsoleError: no command, or several.
    """
    for command in COMMANDS:
        if word in (command.name, command.short):
            return command
    found = [command.name for command in COMMANDS if command.name.startswith(word)]
    if len(found) == 1:
        return named(found[0])
    if found:
        raise ConsoleError(f"{word} is short for {' or '.join(found)}")
    names = [command.name for command in COMMANDS]
    near = difflib.get_close_matches(word, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {' '.join(names)}"
    raise ConsoleError(f"{word[:40]!r} is no command; {hint}")


def _pdb(console: Console, words: str) -> bool:
    view = console.view_of(rank_or(words, console.focus, "pdb"))
    if not console.terminal.is_interactive:
        raise ConsoleError("pdb runs code, which somebody types at a terminal; a file of commands holds none")
    console.focus = view.number
    if console.over or view.waits is not None or view.rank.left:
        console.look_by_pdb(view)
        return False
    view.debug_by_pdb()
    console.stepper.go(None, only={view.number})
    return True


def _quit(console: Console, words: str) -> bool:
    code = number(words, "quit") if words else console.code
    if code > _LARGEST_CODE:
        raise ConsoleError(f"quit {code}: an exit code is a number from 0 to {_LARGEST_CODE}")
    console.end(code)
    return True


def _keep(watches: Sequence[Watch], words: str, focus: int, width: int) -> str:
    return keep(watches, words)


def _help(console: Console, words: str) -> None:
    width = console.terminal.width
    console.say(told(named(words), width) if words else overview(width))


def told(command: Command, width: int = 100) -> str:
    """All that there is to say about a command."""
    lines = (command.help + (f"\n  short: {command.short}" if command.short else "")).split("\n")
    return "\n".join(part for line in lines for part in folded(line, width))


def overview(width: int = 100) -> str:
    """All commands, a line each."""
    lines: list[str] = []
    for group in GROUPS:
        lines += ["", group]
        lines += [f"  {one.short:<4}{one.name:<10}{one.brief}" for one in COMMANDS if one.group == group]
    return "\n".join(part for line in [*lines[1:], "", *_LAST] for part in folded(line, width))


COMMANDS: tuple[Command, ...] = (
    Command("where", "w", WHERE, looking.where, "where every rank stands", looking.HELP_WHERE),
    Command("rank", "r", WHERE, looking.rank, "make a rank the one that commands are about", looking.HELP_RANK),
    Command("waits", "", WHERE, looking.waits, "who waits for whom, messages under way", looking.HELP_WAITS),
    Command("pipeline", "pi", WHERE, looking.picture, "the step as a picture, with cursors", looking.HELP_PIPELINE),
    Command("list", "l", WHERE, looking.list_, "the source around the place of a rank", looking.HELP_LIST),
    Command("stack", "bt", WHERE, looking.stack, "the calls that a rank is in", looking.HELP_STACK),
    Command("step", "s", GOING, moving.step, "each rank to its next action, op or message", moving.HELP_STEP),
    Command("next", "n", GOING, moving.next_, "the same, over what is within", moving.HELP_NEXT),
    Command("finish", "fin", GOING, moving.finish, "each rank to the end of what it is in", moving.HELP_FINISH),
    Command("to", "", GOING, moving.to, "each rank to an action, op, message ...: to F3@1", moving.HELP_TO),
    Command("continue", "c", GOING, moving.continue_, "to the next breakpoint, or the end", moving.HELP_CONTINUE),
    Command("break", "b", STOPPING, stopping.break_, "stop where a condition holds on a rank", stopping.HELP_BREAK),
    Command("tbreak", "tb", STOPPING, stopping.tbreak, "the same, once", stopping.HELP_TBREAK),
    Command("breaks", "", STOPPING, stopping.breaks, "the breakpoints", stopping.HELP_BREAKS),
    Command("delete", "d", STOPPING, stopping.delete, "remove breakpoints, or all", stopping.HELP_DELETE),
    Command("disable", "", STOPPING, stopping.disable, "do not stop at them", stopping.HELP_DISABLE),
    Command("enable", "", STOPPING, stopping.enable, "stop at them again", stopping.HELP_ENABLE),
    Command("show", "p", HELD, looking.inspector(show), "a value on all ranks, and where they differ", HELP_SHOW),
    Command("keep", "", HELD, looking.inspector(_keep), "keep all values of tapes, for show %7", HELP_KEEP),
    Command("tape", "t", HELD, looking.inspector(tape), "what a rank has recorded; where two differ", HELP_TAPE),
    Command("backward", "bw", HELD, looking.inspector(backward), "one step of the way back", HELP_BACKWARD),
    Command("follow", "f", HELD, looking.follow, "tell each touch of a parameter from now on", HELP_FOLLOW),
    Command("unfollow", "", HELD, looking.unfollow, "no more of that", looking.HELP_UNFOLLOW),
    Command("memory", "m", HELD, looking.inspector(memory), "who holds how many bytes", HELP_MEMORY),
    Command("report", "", HELD, looking.inspector(report), "what was done in this step so far", HELP_REPORT),
    Command("pdb", "", SESSION, _pdb, "Python's debugger on one rank", HELP_PDB),
    Command("help", "h", SESSION, _help, "the commands, or one in full", HELP_HELP),
    Command("quit", "q", SESSION, _quit, "end all ranks", HELP_QUIT),
)
