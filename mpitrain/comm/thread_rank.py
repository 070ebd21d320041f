"""One rank of those that are threads: what it calls and waits for.  Also its flight board.

Every rank remembers its last calls with their places, as the page of a process does (page.py), so that the reports of
both are the same.
"""

from __future__ import annotations

import threading
from collections import deque
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from mpitrain.comm import page
from mpitrain.comm.page import KEPT_CALLS, answer_key, in_call
from mpitrain.comm.path import Doing, Standing, Turns
from mpitrain.comm.site import call_site
from mpitrain.comm.transport import AtEnd, DType
from mpitrain.errors import CommError

if TYPE_CHECKING:
    from mpitrain.comm.baton import Room


class Call(NamedTuple):
    """The call of the door that a rank is in, as its lane was told."""

    ordinal: int
    lane: LocalLane
    number: int
    verb: str
    shape: tuple[int, ...]
    dtype: DType
    peer: int
    tag: int
    site: str = ""
    is_new: bool = False

    @property
    def axis(self) -> str:
        """Its name."""
        return self.lane.axis

    @property
    def is_wait(self) -> bool:
        """Whether it only waits for an earlier one."""
        return self.verb.startswith("wait ")

    def short(self) -> str:
        """Beside others of the same axis and number."""
        if self.peer >= 0:
            way = "from" if "recv" in self.verb else "to"
            tag = f" tag {self.tag}" if self.tag else ""
            return f"{self.verb} {self.shape} {self.dtype} {way} rank {self.lane.ranks[self.peer]}{tag}"
        return f"{self.verb} {self.shape} {self.dtype}"

    def entry(self) -> page.Call:
        """As the page of a rank that is a process has it."""
        lane, peer, key = self.lane, self.peer, self.lane.key_of(self.verb, self.peer, self.tag)
        partner = lane.ranks[peer] if peer >= 0 else -1
        tag, members = (self.tag, ()) if peer >= 0 else (-1, lane.ranks)
        what = self.verb, str(self.dtype), peer, self.shape
        return page.Call(
            self.ordinal, lane.axis, self.number, *what, 0, key, partner, tag, self.site, self.is_new, members
        )


class Wait:
    """A message in flight of one rank: what it waits for, and how to say so.  The `Pending` of this transport."""

    __slots__ = ("axis", "call", "detail", "done", "rank", "site", "verb")

    def __init__(self, rank: Rank, axis: str, verb: str, detail: str = "") -> None:
        self.rank = rank
        self.axis = axis
        self.verb = verb
        self.detail = detail
        self.site = call_site()
        rank.place(self.site)
        self.call = rank.call
        self.done = False

    def test(self) -> bool:
        """Poll: if it is not complete, the others run until it is this rank's turn again."""
        if not self.done:
            self.rank.room.poll(self.rank)
        return self.done

    def wait(self) -> None:
        """Let the others run until it is complete."""
        if not self.done:
            self.site = call_site()
            self.rank.place(self.site)
            self.call = self.rank.call or self.call
            self.rank.room.block(self.rank, self)

    def __str__(self) -> str:
        """`all_reduce (4, 512) float32 max at a.py:7`: beside others of the same axis and number."""
        call = self.call
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.verb if call is None else call.short()}{detail} at {self.site}"

    @property
    def told(self) -> str:
        """`all_reduce on tp, call 41, (4, 512) float32, max, at a.py:7`: where others are in other calls."""
        call = self.call
        detail = f", {self.detail}" if self.detail else ""
        return f"{f'{self.verb} on {self.axis}' if call is None else call.entry()}{detail}, at {self.site}"


class Rank:
    """One rank: its thread, its turn, and what it is doing.  Also its flight board."""

    def __init__(self, room: Room, number: int) -> None:
        self.room = room
        self.number = number
        self.main: ModuleType | None = None  # its own __main__, where scripts run
        self.ident = 0
        self.call: Call | None = None
        self.calls: deque[Call] = deque(maxlen=KEPT_CALLS)  # entered last
        self.entered = 0  # calls
        self.waits: Wait | None = None
        self.left = False
        self.left_at = ""  # where it called sys.exit
        self.held = False  # by a debugger
        self.turn = threading.Lock()
        self.turn.acquire()
        self.turns = Turns()
        self.counts: dict[int, int] = {}  # channel -> calls entered
        self.opened: dict[tuple[str, tuple[int, ...]], int] = {}
        self.at_end: AtEnd | None = None
        self.run_folder: str | None = None  # ranks that share a process need none
        self.step = 0
        self.last_move = -1  # of the room, when this rank polled, and when that was
        self.since = 0.0

    @property
    def limit(self) -> float:
        """Seconds after which polling in vain is a hang, the same for all ranks of the process."""
        return self.room.timeout

    @limit.setter
    def limit(self, seconds: float) -> None:
        self.room.timeout = seconds

    def open(self, axis: str, ranks: tuple[int, ...]) -> LocalLane:
        """See `transport.Board`."""
        count = self.opened[axis, ranks] = self.opened.get((axis, ranks), 0) + 1
        return LocalLane(self, axis, ranks, count)

    def unreceived(self) -> CommError | None:
        """None: here a message is complete when it is received."""
        return None

    def place(self, site: str, way: int | None = None) -> bool:
        """Where the call stands that it is in; see `transport.Lane.place`, where the first answer counts."""
        call = self.call
        if call is not None and not call.site:
            if way is None:
                way = hash((call.verb, call.shape, call.dtype, call.peer, call.tag, site))
            is_new = not call.is_wait and self.turns.is_new(hash((call.lane.key, way)))
            call = self.call = self.calls[-1] = call._replace(site=site, is_new=is_new)
        return call is not None and call.is_new

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a message that is not complete."""
        return self.waits is not None and not self.waits.done and not self.left

    def where(self) -> Doing:
        """What it does: a verb for one rank, the same for several, and the rest."""
        last = f" after {self.calls[-1].entry().told}" if self.calls else " and never entered a call"
        if self.left:
            return "left", "left", (f" at {self.left_at}," if self.left_at else "") + last
        if self.waits is None or self.waits.done:
            return "is to go on", "are to go on", last
        return "waits", "wait", in_call(self.waits.told)

    def standing(self) -> Standing:
        """Where it stands, for path.py."""
        calls = [call.entry() for call in self.calls]
        waits = self.waits
        if waits is not None and waits.call is not None and (not calls or calls[-1].ordinal != waits.call.ordinal):
            calls.append(waits.call.entry())
        return Standing(calls, self.counts, self.is_waiting, self.left)

    def can_go_on(self) -> bool:
        """True if it would do something with the baton."""
        return not self.left and not self.held and (self.waits is None or self.waits.done)


class LocalLane:
    """One communicator's line on the board of a rank."""

    __slots__ = ("_keys", "_rank", "axis", "key", "ranks")

    def __init__(self, rank: Rank, axis: str, ranks: tuple[int, ...], count: int) -> None:
        self._rank = rank
        self.axis = axis
        self.ranks = ranks
        self.key = hash((axis, ranks, count)) | 1
        self._keys: dict[tuple[bool, int, int], int] = {}

    def key_of(self, verb: str, peer: int, tag: int) -> int:
        """Of the channel of a call, as in board.py."""
        if peer < 0:
            return self.key
        is_send = "send" in verb
        key = self._keys.get((is_send, peer, tag))
        if key is None:
            me, other = self._rank.number, self.ranks[peer]
            sent = hash((self.key, (me, other) if is_send else (other, me), tag)) | 1
            key = self._keys[is_send, peer, tag] = sent if is_send else answer_key(sent)
        return key

    def enter(self, number: int, verb: str, shape: tuple[int, ...], dtype: DType, peer: int, tag: int = 0) -> None:
        """See `transport.Lane`."""
        rank = self._rank
        rank.entered += 1
        call = rank.call = Call(rank.entered, self, number, verb, shape, dtype, peer, tag)
        rank.calls.append(call)
        key = self.key if peer < 0 else self.key_of(verb, peer, tag)
        if number > rank.counts.get(key, 0):
            rank.counts[key] = number

    def place(self, site: str, way: int) -> bool:
        """See `transport.Lane`."""
        return self._rank.place(site, way)

    def leave(self) -> None:
        """See `transport.Lane`."""
        self._rank.call = None
