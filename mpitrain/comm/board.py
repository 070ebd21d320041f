"""The flight board: what every rank of this host is doing, readable when nobody answers any more.

Each rank writes a page of shared memory; the others only read it:

    RUNNING | WAITING | LEFT      the call it is in, its last 32 calls, and how often it entered each channel

A *channel* is what two ranks must agree about: the collectives of one communicator, or the messages from one rank to
another on it.  If I wait in call 41 of a channel and a member that has LEFT entered it 40 times, I wait for ever;
that comparison (watch.py makes it) needs no message and no help from the one who is gone.

Entering and leaving a call costs 1.3 us.
"""

from __future__ import annotations

import sys
import time
from threading import get_ident

from mpitrain.comm.board_file import BoardFile, Process
from mpitrain.comm.open_requests import told_lost
from mpitrain.comm.page import (
    CALLS,
    CODE,
    CURRENT,
    DIMS,
    ENTRIES,
    ENTRY,
    KEPT_CALLS,
    LEFT,
    RANK,
    RING,
    RUNNING,
    SINCE,
    SPOKE,
    STATE,
    STEP,
    UNKNOWN_CODE,
    WAITING,
    Gone,
    answer_key,
    entered,
    members_word,
    pair_word,
    stable_hash,
)
from mpitrain.comm.path import Turns
from mpitrain.comm.transport import AtEnd, DType
from mpitrain.errors import CommError


class FlightBoard:
    """This rank's page, the pages of its host, and what is known of ranks elsewhere.

    Attributes:
        rank: in the world.
        pages: world rank -> page, for the ranks of this host.
        remote: world rank -> Gone, for ranks of other hosts that said farewell.
        current: the call this rank waits in, as (channel, number, ordinal, thread), or None.
        limit: seconds after which waiting is a hang; `--timeout`.
        run_folder: where to keep copies of the page for reports between hosts, or None.
        texts: names that stand in the page: see `text`.
        turns: that this rank has taken.
        sends: its channels to others.
        at_end: asked when this rank ends well: what it has left undone, or None.
    """

    def __init__(self, file: BoardFile, rank: int, locals_: tuple[int, ...], hosts: tuple[int, ...]) -> None:
        """Take the page of `rank` in `file`, whose pages belong to the world's ranks `locals_`, in that order.

        `hosts` numbers the host of every rank of the world.
        """
        self.file = file
        self.rank = rank
        self.hosts = hosts
        self.pages = {other: file.page(index) for index, other in enumerate(locals_)}
        self.page = self.pages[rank]
        self.remote: dict[int, Gone] = {}
        self.current: tuple[Channel, int, int, int] | None = None
        self.limit = 300.0
        self.run_folder: str | None = None
        self._index = {other: index for index, other in enumerate(locals_)}
        self._opened: dict[tuple[str, tuple[int, ...]], int] = {}
        self.texts: dict[str, tuple[int, bool]] = {}
        self.turns = Turns()
        self.at_end: AtEnd | None = None
        self.sends: list[Channel] = []
        file.own(self._index[rank])
        words = self.page.words
        words[RANK], words[CODE], words[SINCE] = rank, UNKNOWN_CODE, time.monotonic_ns()
        words[STATE] = RUNNING

    @property
    def step(self) -> int:
        """The step that this rank is in, counted from 1 over all starts of the run; 0 before the first."""
        return self.page.words[STEP]

    @step.setter
    def step(self, number: int) -> None:
        self.page.words[STEP] = number

    def open(self, axis: str, ranks: tuple[int, ...]) -> BoardLane:
        """The lane of a communicator; the n-th with the same name and ranks meets the n-th of the other members."""
        count = self._opened[axis, ranks] = self._opened.get((axis, ranks), 0) + 1
        return BoardLane(self, axis, ranks, count)

    def text(self, name: str) -> tuple[int, bool]:
        """A verb's or other name: (where it stands in the page, whether it is the name of a send)."""
        known = self.texts.get(name)
        if known is None:
            known = self.texts[name] = (self.page.add_text(name), "send" in name)
        return known

    def leave(self, code: int, *, spoke: bool, where: str) -> None:
        """Say that this rank enters no more calls."""
        self.current = None
        self.page.set_site(where, self.page.moment_of(LEFT))
        words = self.page.words
        words[CODE], words[SPOKE], words[SINCE] = code, spoke, time.monotonic_ns()
        words[STATE] = LEFT

    def gone(self, rank: int) -> Gone | None:
        """What another rank said when it left, or None if it has not left as far as this host can know."""
        page = self.pages.get(rank)
        if page is None:
            return self.remote.get(rank)
        return page.gone() if page.state == LEFT else None

    def unreceived(self) -> CommError | None:
        """See `transport.Board`; of receivers on this host."""
        found = []
        for channel in self.sends:
            page = self.pages.get(channel.partners[0])
            if page is not None and channel.word and not entered(page.counts(), channel.answer_key, channel.count):
                key = answer_key(channel.answer_key)
                calls = [call.told for call in self.page.calls() if call.key == key and not call.is_wait]
                found.append(calls[-1] if calls else f"message {channel.count} to rank {channel.partners[0]}")
        return CommError(told_lost([f"rank {self.rank}: {words}" for words in found])) if found else None

    def process(self, rank: int) -> Process:
        """See `BoardFile.process`; of a rank of this host."""
        return self.file.process(self._index[rank])

    def is_dead(self, rank: int) -> bool:
        """True if a rank of this host ended without saying so."""
        return rank in self._index and rank != self.rank and self.file.is_dead(self._index[rank])

    def claim(self, text: str) -> bool:
        """See `BoardFile.claim`."""
        return self.file.claim(text)


class Channel:
    """What this rank counts of one channel, and whom it waits for there."""

    __slots__ = ("answer_key", "count", "pair", "partners", "word")

    def __init__(self, word: int, answer_key: int, partners: tuple[int, ...], pair: int = -1) -> None:
        """`word` of the page counts; `partners` (world ranks) count what they do about it under `answer_key`.

        `pair`: see `pair_word`; -1 for collectives.
        """
        self.word = word
        self.answer_key = answer_key
        self.partners = partners
        self.pair = pair
        self.count = 0


class BoardLane:
    """The lane of one communicator (see `transport.Lane`)."""

    __slots__ = (
        "_before",
        "_board",
        "_collectives",
        "_handled",
        "_key",
        "_memory",
        "_pairs",
        "_ranks",
        "_words",
        "axis",
    )

    def __init__(self, board: FlightBoard, axis: str, ranks: tuple[int, ...], count: int) -> None:
        """Use `FlightBoard.open`."""
        self.axis = axis
        self._board, self._words, self._memory, self._ranks = board, board.page.words, board.page.memory, ranks
        self._key = (axis, ranks, count)
        self._pairs: dict[tuple[bool, int, int], Channel] = {}
        self._before = 0  # what the channel of the current call had counted before it
        self._handled: BaseException | None = None  # what was being handled as it was entered
        key = stable_hash(*self._key)
        others = tuple(rank for rank in ranks if rank != board.rank)
        word = board.page.add_channel(key, board.text(axis)[0], members=members_word(ranks))
        self._collectives = Channel(word, key, others)

    def enter(self, number: int, verb: str, shape: tuple[int, ...], dtype: DType, peer: int, tag: int = 0) -> None:
        """See `transport.Lane.enter`."""
        board = self._board
        name, is_send = board.texts.get(verb) or board.text(verb)
        if peer < 0:
            channel = self._collectives
        else:
            channel = self._pairs.get((is_send, peer, tag)) or self._pair(is_send, peer, tag)
        words, memory = self._words, self._memory
        ordinal = words[CALLS] + 1
        now = time.monotonic_ns()
        ndim, kind = len(shape), int(dtype.num)
        if ndim > DIMS:
            ndim, shape = DIMS, shape[:DIMS]
        if kind >= 64:  # a type that NumPy lacks has no number of its own
            kind = -board.text(dtype.name)[0]
        at = RING + (ordinal - 1) % KEPT_CALLS * ENTRY.size
        ENTRIES[ndim].pack_into(
            memory, at, ordinal, channel.word, number, name, kind, channel.pair, now, 0, ndim, *shape
        )
        self._before = channel.count
        self._handled = sys.exc_info()[1]
        if number > channel.count:
            channel.count = number
            if channel.word:
                words[channel.word] = number
        words[CALLS] = words[CURRENT] = ordinal
        words[SINCE] = now
        words[STATE] = WAITING
        board.current = (channel, number, ordinal, get_ident())

    def place(self, site: str, way: int) -> bool:
        """See `transport.Lane.place`."""
        board = self._board
        is_new = board.turns.is_new(hash((self._collectives.answer_key, way)))
        board.page.set_site_of_call((board.texts.get(site) or board.text(site))[0], is_new)
        return is_new

    def leave(self) -> None:
        """See `transport.Lane.leave`.

        A call that an exception ends was not made: the partners wait in it, should this rank leave now.
        """
        board, words = self._board, self._words
        if board.current is not None and sys.exc_info()[1] is not self._handled:
            channel = board.current[0]
            channel.count = self._before
            if channel.word:
                words[channel.word] = self._before
        board.current = None
        words[SINCE] = time.monotonic_ns()
        words[STATE] = RUNNING

    def _pair(self, is_send: bool, peer: int, tag: int) -> Channel:
        """Messages between this rank and `peer`: each side counts under a key of its own and reads the other's."""
        me, other = self._board.rank, self._ranks[peer]
        sent = stable_hash(*self._key, (me, other) if is_send else (other, me), tag) | 1
        key = sent if is_send else answer_key(sent)
        word = self._board.page.add_channel(key, self._board.text(self.axis)[0], of_pair=True)
        channel = Channel(word, answer_key(key), (other,), pair_word(peer, other, tag))
        self._pairs[is_send, peer, tag] = channel
        if is_send:
            self._board.sends.append(channel)
        return channel
