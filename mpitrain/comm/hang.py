"""What is said of a wait that lasts too long: who is behind, where every rank is, and what each called last.

    CommError: no answer for 300 s (--timeout).  Rank 2 is behind: it is in no call.
      rank 2 runs at corpus.py:88, after all_gather on tp, call 40, (2, 512) float32 (for 302 s)
      ranks 0,1,3 wait in all_reduce on tp, call 41, (4, 512) float32, at executor.py:170 (for 300 s)

    Their last calls, the newest first; all of them: runs/gpt/hang-report.txt
      rank 2 at corpus.py:88 < tokens.py:31 < train.py:243
        all_gather on tp, call 40, (2, 512) float32, 302 s ago
        ...

The head has at most five lines, the rest room for a few groups of ranks; the file has every rank that could be seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpitrain.comm.behind import behind
from mpitrain.comm.page import LEFT, NEW, UNKNOWN_CODE, WAITING, Page, in_call, innermost
from mpitrain.comm.path import (
    MAX_LINES,
    Standing,
    common_words,
    deadlock_report,
    last_common_call,
    who_left,
)
from mpitrain.comm.places import by_place, named

MAX_GROUPS, SHOWN_CALLS = 6, 4  # on the terminal
FILE = "hang-report.txt"
STOPPED, DEBUGGED, SILENT = "stopped", "held by a debugger", "without a sign of life"
_FRESH = 2.0  # seconds; what was seen longer ago was seen last


@dataclass(frozen=True)
class Seen:
    """A rank as another one sees it.

    Attributes:
        page: a copy.
        clock: of its host then, in ns.
        still: why it does not go on whatever it does: `STOPPED`, `DEBUGGED` or `SILENT`; "" if it does.
        age: seconds since it was seen.
    """

    page: Page
    clock: int
    still: str = ""
    age: float = 0.0

    @property
    def seconds(self) -> float:
        """Since it does what it does."""
        return (self.clock - self.page.since) / 1e9 + self.age

    def place(self) -> tuple[str, str, str]:
        """What it does: a verb for one rank, the same for several, and the rest; equal for ranks that do the same."""
        page, call, last = self.page, self.page.current(), self.page.calls()[-1:]
        if page.state == LEFT:
            code = page.gone().code
            after = f", after {last[0].told}" if last else ""
            return "left", "left", (f" with exit code {code}" if code != UNKNOWN_CODE else "") + _at(page.site) + after
        one, several = ("waits", "wait") if call is not None else ("runs", "run")
        if self.still:
            one, several = (f"{verb} {self.still}" for verb in ("is", "are"))
        step = f", step {page.step}" if page.step else ""
        if call is not None:
            place = call.site or (page.site if self.is_there() else "")
            where = f", at {place}" if place else self._site() if self.still else ""
            return one, several, in_call(call) + where + step
        after = f", after {last[0].told}" if page.state != NEW and last else " and never entered a call"
        return one, several, self._site() + after + step

    def standing(self) -> Standing:
        """The same for path.py."""
        page = self.page
        return Standing(page.calls(), page.counts(), page.current() is not None, page.state == LEFT)

    def _site(self) -> str:
        """Where it runs, as far as that is known."""
        return self.where(innermost(self.page.last_trail))

    def is_there(self) -> bool:
        """Whether the place on its page is where it is, not where it was.

        A call stays where it is, and a rank that runs must have been looked at just now.  One that stands still may
        have gone on after the last look.
        """
        page = self.page
        if not page.trail or self.still:
            return False
        return page.state in (WAITING, LEFT) or (self.clock - page.looked) / 1e9 < _FRESH

    def where(self, trail: str) -> str:
        """Words for the place on its page, or for that and what it was called from."""
        return _at(trail) if self.is_there() or not trail else f", last seen at {trail}"

    def calls(self, most: int) -> list[str]:
        """Its last calls, the newest first."""
        calls = self.page.calls()[: -most - 1 : -1]
        return [f"{call.told}, {(self.clock - call.since) / 1e9 + self.age:.1f} s ago" for call in calls]


@dataclass(frozen=True)
class Hang:
    """Why rank `start` gets no answer, and where everybody is.

    Attributes:
        limit: the seconds that have passed.
        start: the rank that waits.
        partners: the other ranks of its call.
        seen: the ranks that can be seen, it among them.
        ranks: of the world.
    """

    limit: float
    start: int
    partners: Sequence[int]
    seen: Mapping[int, Seen]
    ranks: int

    def head(self) -> list[str]:
        """The first lines, five at most: those behind before the others, ranks in the same place together."""
        late = self._behind()
        first = late or []
        order = [*first, *(rank for rank in sorted(self.seen) if rank not in first)]
        lines = []
        for (one, several, rest), ranks in by_place((rank, self.seen[rank].place()) for rank in order).items():
            seconds = max(self.seen[rank].seconds for rank in ranks)
            lines.append(f"  {named(ranks)} {several if len(ranks) > 1 else one}{rest} (for {seconds:.0f} s)")
        if len(self.seen) < self.ranks:
            unseen = [rank for rank in range(self.ranks) if rank not in self.seen]
            lines.append(f"  {named(unseen)} on other hosts cannot be seen from here (a run folder would show them)")
        if len(lines) >= MAX_LINES:
            lines[MAX_LINES - 2 :] = [f"  and {len(lines) - MAX_LINES + 2} more places"]
        return [f"CommError: no answer for {self.limit:g} s (--timeout).  {self._verdict(late)}", *lines]

    def _behind(self) -> list[int] | None:
        still = [rank for rank, seen in self.seen.items() if seen.still]
        return behind({rank: seen.page for rank, seen in self.seen.items()}, self.start, self.partners, still)

    def _standings(self, ranks: Iterable[int]) -> dict[int, Standing]:
        """Of those that can be seen, and of all that stand in the same calls."""
        calls = {self.seen[rank].page.current() for rank in ranks if rank in self.seen} - {None}
        places = {(call.key, call.number) for call in calls if call is not None}
        found = {rank: self.seen[rank].standing() for rank in ranks if rank in self.seen}
        for rank, seen in self.seen.items():
            call = seen.page.current()
            if call is not None and (call.key, call.number) in places:
                found.setdefault(rank, seen.standing())
        return found

    def deadlock(self, ring: Sequence[int], head: str = "") -> list[str]:
        """Of ranks that wait for each other: five lines at most; `head`: the first one."""
        head = head or "CollectiveMismatch: ranks wait for each other, none can go on."
        standings = self._standings(ring)
        places = [(rank, self.seen[rank].place()) for rank in standings]
        return deadlock_report(head, standings, places)

    def path(self, ranks: Iterable[int]) -> tuple[str, str]:
        """Who of these, and of those in their calls, left the path, and their last common call; "" if unknown."""
        standings = self._standings(ranks)
        common = last_common_call(standings) if len(standings) > 1 else None
        return who_left(standings, common), common_words(common)

    def _verdict(self, late: list[int] | None) -> str:
        if late is None:
            return "  ".join(part for part in ("Ranks wait for each other.", self.path([self.start])[0]) if part)
        if not late:
            if len(self.seen) < self.ranks:
                return "Of the ranks that can be seen none is behind."
            return "No rank is behind: the message itself does not arrive."
        whys = {self._why(rank) for rank in late}
        is_, they = ("is", "it is") if len(late) == 1 else ("are", "they are")
        why = f": {they} {whys.pop()}" if len(whys) == 1 else ""
        return f"{named(late).capitalize()} {is_} behind{why}."

    def _why(self, rank: int) -> str:
        seen = self.seen[rank]
        if seen.still:
            return "stopped (SIGSTOP)" if seen.still == STOPPED else seen.still
        return "in an earlier call" if seen.page.state == WAITING else "in no call"

    def rest(self, path: str) -> list[str]:
        """The last calls of all ranks, those with the same ones together; `path` of the file that has more, or ""."""
        first = self._behind() or []
        order = [*first, *(rank for rank in sorted(self.seen) if rank not in first)]
        groups = by_place((rank, self._story(rank)) for rank in order)
        common = self.path([self.start, *first])[1]
        lines = ["", *([common] if common else [])]
        lines += ["Last calls, the newest first" + (f"; more of them: {path}" if path else "") + "."]
        for (where, _), ranks in list(groups.items())[:MAX_GROUPS]:
            lines.append(f"  {named(ranks)}{where}")
            lines += [f"    {call}" for call in self.seen[ranks[0]].calls(SHOWN_CALLS) or ["none"]]
        left = sum(len(ranks) for ranks in list(groups.values())[MAX_GROUPS:])
        return lines + ([f"  and {left} more ranks"] if left else [])

    def _story(self, rank: int) -> tuple[str, tuple[str, ...]]:
        """What must be equal to be told together."""
        seen = self.seen[rank]
        return seen.where(seen.page.last_trail), tuple(str(call) for call in seen.page.calls()[-SHOWN_CALLS:])

    def whole(self) -> list[str]:
        """All that is known of every rank."""
        lines = [*self.head(), "", f"Seen by rank {self.start}, {time.strftime('%Y-%m-%d %H:%M:%S')}."]
        for rank, seen in sorted(self.seen.items()):
            one, _, rest = seen.place()
            trail = seen.page.last_trail or "?"
            lines += ["", f"rank {rank} {one}{rest} (for {seen.seconds:.1f} s)"]
            lines.append(f"  {trail}" if seen.is_there() or trail == "?" else f"  last seen at {trail}")
            lines += [f"  {call}" for call in seen.calls(len(seen.page.calls()))]
        return lines

    def write(self, run_folder: str | None) -> str:
        """Write all of it to a file of the run folder; its path, "" if there is none."""
        if run_folder is None:
            return ""
        path = os.path.join(run_folder, FILE)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with open(path, "w", encoding="utf-8", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
                file.write("\n".join(self.whole()) + "\n")
        except OSError:  # what can be said is said on the terminal
            return ""
        return path


def _at(site: str) -> str:
    return f" at {site}" if site else ""
