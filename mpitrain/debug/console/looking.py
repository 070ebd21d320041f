"""Commands that look: where ranks stand, what is under way, lines of source, and the inspectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpitrain.debug.console import pipeline, source, under_way
from mpitrain.debug.console.follow import Follow
from mpitrain.debug.console.words import folded, nothing, number, rank_or
from mpitrain.errors import ConsoleError

if TYPE_CHECKING:
    from mpitrain.debug.console.console import Console

HELP_WHERE = """\
where [all]      where every rank stands: step, action, what it is at, line of the source
  Ranks that stand in the same place share a line; where all gives each its own.  > marks the focus.
    next X               X has begun, and nothing of it was done yet
    after X              X is done
    waits for 0,2: X     those ranks have not come to X
  The line is the innermost one that is not of mpitrain's messages, ops or layers; stack shows what
  led there."""

HELP_RANK = """\
rank [N]      make rank N the focus, the one that show, tape, list and pdb are about"""

HELP_WAITS = """\
waits      who waits for whom and where, rings of waiting, messages that nobody waits for yet
  A ring can never go on, nor can who waits for a rank that has ended."""

HELP_PIPELINE = """\
pipeline [all]      the step as a picture, with a cursor > where each rank stands
  Of the pipeline that the focus is in; all: of every replica.  F, B and W take one unit of time each,
  as in mpitrain schedule.  What a rank has done is left of its cursor."""

HELP_LIST = """\
list [#N]      the lines of source around the place of the focus, or around call #N of its stack"""

HELP_STACK = """\
stack [RANK]      the calls that a rank is in, the innermost first"""

HELP_UNFOLLOW = """\
unfollow [NAME]      no more of that parameter, or of all that are followed"""


def where(console: Console, words: str) -> None:
    """See `HELP_WHERE`."""
    if words not in ("", "all"):
        raise ConsoleError("where, or where all for a line for each rank")
    console.show_places(every=words == "all")


def rank(console: Console, words: str) -> None:
    """See `HELP_RANK`."""
    if not words:
        console.say(f"rank {console.focus} of 0 to {console.size - 1}")
        return
    console.focus = console.view_of(number(words, "rank")).number
    console.show_places()


def waits(console: Console, words: str) -> None:
    """See `HELP_WAITS`."""
    nothing(words, "waits")
    lines = under_way.told(console.stepper.views).split("\n")
    console.say("\n".join(part for line in lines for part in folded(line, console.terminal.width)))


def picture(console: Console, words: str) -> None:
    """See `HELP_PIPELINE`."""
    if words not in ("", "all"):
        raise ConsoleError("pipeline, or pipeline all for that of every replica")
    console.say(pipeline.picture(console.stepper.views, console.focus, console.terminal.width, every=words == "all"))


def list_(console: Console, words: str) -> None:
    """See `HELP_LIST`."""
    frame = number(words.removeprefix("#"), "list") if words else 0
    console.say(source.listing(console.view, frame, console.terminal.width))


def stack(console: Console, words: str) -> None:
    """See `HELP_STACK`."""
    view = console.view_of(rank_or(words, console.focus, "stack"))
    console.say(source.stack(view, console.terminal.width))


def inspector(look: Callable[..., str]) -> Callable[[Console, str], None]:
    """A command that prints what an inspector finds."""

    def do(console: Console, words: str) -> None:
        watches = [console.watches[rank] for rank in sorted(console.watches)]
        console.say(look(watches, words, console.focus, console.terminal.width))

    return do


def follow(console: Console, words: str) -> None:
    """See follow.py."""
    if not words:
        console.say("\n".join(console.follows) or "no parameter is followed; follow NAME")
    elif words not in console.follows:
        watches = [console.watches[rank] for rank in sorted(console.watches)]
        console.follows[words] = Follow(words, console.say, watches, console.terminal.width)


def unfollow(console: Console, words: str) -> None:
    """See `HELP_UNFOLLOW`."""
    if words and words not in console.follows:
        raise ConsoleError(f"{words} is not followed; followed: {' '.join(console.follows) or 'nothing'}")
    for name in [words] if words else list(console.follows):
        rest = console.follows.pop(name).rest()
        if rest:
            console.say(rest)
