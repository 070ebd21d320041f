"""The page of one rank on the flight board: words in shared memory, written by its owner and read by all.

    state, exit code                RUNNING | WAITING | LEFT
    site                            where in the program that is, as its own look found it (watch.py)
    32 calls                        what it called last, and the one it waits in
    channels                        how often it entered each, and who its members are

In checked mode every call has its place in the program, too; else only the call that the rank waits in (watch.py).

A word is written at once, a call before the number that points to it; so a reader sees whole calls or notices.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NEW, RUNNING, WAITING, LEFT = range(4)
UNKNOWN_CODE = -1  # the exit code of a rank that left without telling it
KEPT_CALLS = 32
FROM = " < "  # between a place and the one that it was called from

# The page, in 8-byte words.  Text and site are bytes.
PAGE = 24576
STATE, CODE, SPOKE, CALLS, CURRENT, SINCE, _CHANNELS, _TEXT, RANK, PROBED, MOMENT, LOOKED, STEP = range(13)
SITE, _SITE_SIZE = 16 * 8, 256  # bytes
RING = SITE + _SITE_SIZE
DIMS = 6
ENTRY = struct.Struct(f"<{9 + DIMS}q")  # ordinal channel number verb dtype pair since site ndim sizes[DIMS]
ENTRIES = tuple(struct.Struct(f"<{9 + ndim}q") for ndim in range(DIMS + 1))  # as much of one as a shape needs
_SITE_OF_CALL = 7  # the word of an entry that has its place: where that text stands, and these bits
_IS_CHECKED, _IS_NEW = 1 << 32, 1 << 33
_CHANNEL_WORDS = (RING + KEPT_CALLS * ENTRY.size) // 8  # key, count, axis text and members: three words a channel
_MAX_CHANNELS = 384
_MAX_PAIRS = 256  # of them; so the collectives of an axis that is opened late are counted, too
_TEXTS = (_CHANNEL_WORDS + 3 * _MAX_CHANNELS) * 8

_TAG_BITS, _RANK_BITS = 15, 24
_MEMBER_BITS = 15  # of each of three numbers, in the third word of a channel


def pair_word(peer: int, partner: int, tag: int) -> int:
    """Whom a message between two goes to or comes from, in one word.

    Args:
        peer: its rank on the axis.
        partner: its rank in the world.
        tag: of the message.
    """
    return (peer << _RANK_BITS | partner) << _TAG_BITS | tag


def in_call(call: Call | str) -> str:
    """What stands behind `waits`: ` in all_reduce on ...`, ` for irecv on ...`."""
    text = str(call)
    return f" for {text.removeprefix('wait ')}" if text.startswith("wait ") else f" in {text}"


def members_word(ranks: Sequence[int]) -> int:
    """World ranks at equal distances, as those of an axis are, in one word; 0: others, which it cannot hold."""
    ranks = sorted(ranks)
    found = range(ranks[0], ranks[-1] + 1, (ranks[-1] - ranks[0]) // max(1, len(ranks) - 1) or 1) if ranks else ()
    if not ranks or tuple(found) != tuple(ranks) or max(ranks[-1], len(ranks)) >> _MEMBER_BITS:
        return 0
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return (len(ranks) << _MEMBER_BITS | step) << _MEMBER_BITS | ranks[0]


def _members(word: int) -> range:
    mask = (1 << _MEMBER_BITS) - 1
    count, step, first = word >> 2 * _MEMBER_BITS & mask, word >> _MEMBER_BITS & mask, word & mask
    return range(first, first + count * step, step) if step else range(0)


def call_words(verb: str, axis: str, peer: int, tag: int, number: int, shape: object, dtype: object) -> str:
    """A call in a report: `all_reduce on tp, call 41, (4, 512) float32`."""
    other = f" {'from' if 'recv' in verb else 'to'} rank {peer} of it" if peer >= 0 else ""
    if peer >= 0 and tag:
        other += f", tag {tag}"
    return f"{verb} on {axis}{other}, call {number}, {shape} {dtype}"


def innermost(trail: str) -> str:
    """The first place of a trail (`site.trail_of`)."""
    return trail.partition(FROM)[0].partition(",")[0]


def answer_key(key: int) -> int:
    """The key under which the other end of a pair counts: what one has sent, the other takes."""
    return key ^ 1


_DTYPES = {np.dtype(code).num: np.dtype(code).name for code in "?bBhHiIlLqQefdgFD"}


class Call(NamedTuple):
    """One call of one rank, as its page tells it.

    site: where in the program it stands, "" if that is not known; is_new: see path.py; members: world ranks of its
    axis, in a collective, if they are known; is_checked: whether it is made in checked mode.
    """

    ordinal: int
    axis: str
    number: int
    verb: str
    dtype: str
    peer: int  # -1 in a collective, as are the partner and the tag
    shape: tuple[int, ...]
    since: int
    key: int  # of its channel
    partner: int  # the peer's rank in the world
    tag: int

    site: str = ""
    is_new: bool = False
    members: Sequence[int] = ()
    is_checked: bool = False

    def __str__(self) -> str:
        """Without the site."""
        return call_words(self.verb, self.axis, self.peer, self.tag, self.number, self.shape, self.dtype)

    @property
    def told(self) -> str:
        """With it, as far as it is known."""
        return f"{self}, at {self.site}" if self.site else str(self)

    @property
    def is_wait(self) -> bool:
        """Whether it only waits for an earlier one."""
        return self.verb.startswith("wait ")


@dataclass(frozen=True)
class Gone:
    """A rank that left: its exit code, whether it has printed why, where, and how often it entered each channel."""

    code: int
    spoke: bool
    where: str
    counts: dict[int, int]

    def entered(self, key: int, number: int) -> bool:
        """Whether it entered call `number` of a channel; True where its page was too full to know."""
        return entered(self.counts, key, number)


def entered(counts: Mapping[int, int], key: int, number: int) -> bool:
    """Whether a rank with these counts entered call `number` of a channel; True where its page is too full to know."""
    return counts.get(key, number if len(counts) >= _MAX_PAIRS else 0) >= number


class Page:
    """The words of one rank."""

    def __init__(self, memory: memoryview) -> None:
        """Take `PAGE` bytes."""
        self.memory = memory
        self.words = memory.cast("q")

    # -- written by the owner

    def add_channel(self, key: int, axis: int, *, members: int = 0, of_pair: bool = False) -> int:
        """The word that counts a new channel, or 0 where the page is full (that channel is then never counted).

        `axis`: where the name of its axis stands; `members`: of that (`members_word`), 0 for a channel of messages
        between two.
        """
        words = self.words
        index = words[_CHANNELS]
        if index >= (_MAX_PAIRS if of_pair else _MAX_CHANNELS):
            return 0
        at = _CHANNEL_WORDS + 3 * index
        words[at], words[at + 1], words[at + 2] = key, 0, members << 16 | axis
        words[_CHANNELS] = index + 1
        return at + 1

    def add_text(self, text: str) -> int:
        """Where `text` stands from now on; 0 if there is no more room."""
        data = text.encode()[:255]
        at = self.words[_TEXT] or _TEXTS
        if at + 1 + len(data) > PAGE:
            return 0
        self.memory[at] = len(data)
        self.memory[at + 1 : at + 1 + len(data)] = data
        self.words[_TEXT] = at + 1 + len(data)
        return at

    def set_site_of_call(self, text: int, is_new: bool) -> None:
        """Of the call entered last: where the text of its place stands; for `is_new` see path.py."""
        at = RING + (self.words[CALLS] - 1) % KEPT_CALLS * ENTRY.size
        self.words[at // 8 + _SITE_OF_CALL] = text | _IS_CHECKED | (_IS_NEW if is_new else 0)

    def set_site(self, text: str, moment: int) -> None:
        """Where in the program the rank is, or where it left; of which `moment` that is told."""
        data = text.encode()[: _SITE_SIZE - 1]
        self.words[MOMENT] = -1
        self.memory[SITE] = len(data)
        self.memory[SITE + 1 : SITE + 1 + len(data)] = data
        self.words[MOMENT] = moment

    # -- read by all

    @property
    def state(self) -> int:
        """NEW, RUNNING, WAITING or LEFT."""
        return self.words[STATE]

    @property
    def since(self) -> int:
        """When it took that state, in ns of the monotonic clock."""
        return self.words[SINCE]

    @property
    def step(self) -> int:
        """The step that it is in, from 1; 0 before the first."""
        return self.words[STEP]

    @property
    def looked(self) -> int:
        """When its owner's look last ran, by the same clock; 0: never."""
        return self.words[LOOKED]

    @property
    def moment(self) -> int:
        """A number for what the rank does now: its n-th call, what comes after that, or the end."""
        return self.moment_of(self.words[STATE])

    def moment_of(self, state: int) -> int:
        """The same, if it were in another state."""
        return 4 * self.words[CALLS] + state

    @property
    def site(self) -> str:
        """The innermost place of the current moment, `train.py:40`; empty if not known."""
        return innermost(self.trail)

    @property
    def trail(self) -> str:
        """The same with the places that it was called from; see `set_site`."""
        return self.last_trail if self.words[MOMENT] == self.moment else ""

    @property
    def last_trail(self) -> str:
        """What was set last, of whatever moment that was."""
        size = self.memory[SITE]
        return bytes(self.memory[SITE + 1 : SITE + 1 + size]).decode(errors="replace")

    def text(self, at: int) -> str:
        """The text that `add_text` put there."""
        if not _TEXTS <= at < PAGE:
            return "?"
        return bytes(self.memory[at + 1 : at + 1 + self.memory[at]]).decode(errors="replace")

    def call(self, ordinal: int) -> Call | None:
        """The call entered as the `ordinal`-th (from 1), if the page still holds it."""
        if ordinal < 1:
            return None
        at = RING + (ordinal - 1) % KEPT_CALLS * ENTRY.size
        found, channel, number, verb, dtype, pair, since, site, ndim, *sizes = ENTRY.unpack_from(self.memory, at)
        if found != ordinal:  # overwritten while we read
            return None
        about = self.words[channel + 1] if channel else 0
        axis = self.text(about & 0xFFFF) if channel else "?"
        shape = tuple(sizes[: min(ndim, DIMS)])
        kind = self.text(-dtype) if dtype < 0 else _DTYPES.get(dtype, "?")  # text: a type that NumPy lacks
        key = self.words[channel - 1] if channel else 0
        peer, partner, tag = -1, -1, -1
        if pair >= 0:
            ranks, tag = pair >> _TAG_BITS, pair & (1 << _TAG_BITS) - 1
            peer, partner = ranks >> _RANK_BITS, ranks & (1 << _RANK_BITS) - 1
        place = self.text(site & 0xFFFF) if site & 0xFFFF else ""
        members = _members(about >> 16) if peer < 0 else ()
        name, is_new, is_checked = self.text(verb), bool(site & _IS_NEW), bool(site & _IS_CHECKED)
        return Call(
            ordinal, axis, number, name, kind, peer, shape, since, key, partner, tag, place, is_new, members, is_checked
        )

    def current(self) -> Call | None:
        """The call it waits in, None unless WAITING."""
        return self.call(self.words[CURRENT]) if self.state == WAITING else None

    def calls(self) -> list[Call]:
        """The calls entered last, the newest at the end."""
        newest = self.words[CALLS]
        kept = (self.call(n) for n in range(max(1, newest - KEPT_CALLS + 1), newest + 1))
        return [call for call in kept if call is not None]

    def counts(self) -> dict[int, int]:
        """Channel key -> calls entered."""
        words = self.words
        starts = range(_CHANNEL_WORDS, _CHANNEL_WORDS + 3 * words[_CHANNELS], 3)
        return {words[at]: words[at + 1] for at in starts}

    def gone(self) -> Gone:
        """What a page in state LEFT says."""
        return Gone(self.words[CODE], bool(self.words[SPOKE]), self.site, self.counts())

    def copy(self) -> Page:
        """As it is now: what is told from one copy goes together, as far as its owner wrote it at once."""
        return Page(memoryview(bytearray(self.memory)))


def stable_hash(*parts: object) -> int:
    """A 63-bit number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
