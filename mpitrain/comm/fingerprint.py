"""What one rank is about to do, in 256 bytes that the other ranks can compare with theirs.

    41 | all_gather | dim 0 | (4, 512) | float32 | even | 7f3a... | | sequence.py:71

What must agree depends on the verb:

    all collectives     number, verb, what stands behind it (op, dims, lengths of slices, root, distance), dtype
    all but all_to_all  shape; where slices of different lengths are joined, that of the whole.  An all-to-all may be
                        uneven in any way: there the block that i sends to j is compared with the one that j expects of
                        i (checked.py)
    send and recv       number, shape and dtype; `send` may meet `irecv`

Places in the program may differ: ranks may make one call in two branches.  What must agree is their order
(call_order.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpitrain.comm.page import call_words, stable_hash
from mpitrain.comm.path import judged
from mpitrain.comm.places import told
from mpitrain.comm.slices import SLICED, shape_of_call, told_lengths
from mpitrain.comm.transport import Array

WORDS = 32  # of 8 bytes
_BYTES = 8 * WORDS
_LONGEST_SHAPE = 100  # characters: 30 dims of usual lengths
_LONGEST_HOW = 40  # characters: a word that is no op has not been refused yet

_HOW = {  # verb -> how its arguments read
    "all_reduce": "{}",
    "iall_reduce": "{}",
    "all_gather": "dim {}",
    "iall_gather": "dim {}",
    "reduce_scatter": "dim {}",
    "ireduce_scatter": "dim {}",
    "all_to_all": "dims {} {} of {ndim}",
    "iall_to_all": "dims {} {} of {ndim}",
    "broadcast": "root {}",
    "shift": "by {}",
}
UNEVEN = ("all_to_all", "iall_to_all")  # may have blocks of any lengths
# Sums that deterministic mode takes in rank order:
_SUMS = ("all_reduce", "iall_reduce", "reduce_scatter", "ireduce_scatter")


class Fingerprint(NamedTuple):
    """One call of one rank.

    number: of the call on the axis, or of the message between the two; how: its arguments, as text; even: whether all
    its blocks have one length; place: a number for the call in the program, in hex; turn: "new" where this rank comes
    to it as it never did (path.py); site: for people.
    """

    number: str
    verb: str
    how: str
    shape: str
    dtype: str
    even: str
    place: str
    turn: str
    site: str

    def pack(self) -> bytes:
        """As `_BYTES` bytes; a long site loses its beginning."""
        head = "|".join(self[:-1]) + "|"
        assert len(head) < _BYTES
        return (head.encode() + self.site.encode()[len(head) - _BYTES :]).ljust(_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Fingerprint:
        """What `pack` has packed."""
        return cls(*data.rstrip(b"\0").decode(errors="replace").split("|", len(cls._fields) - 1))

    @property
    def kind(self) -> str:
        """What calls have in common that fit each other."""
        shape = self.shape if self.verb not in UNEVEN else ""
        return f"{self.verb} {self.how} {shape} {self.dtype}"

    def told(self, with_how: bool) -> str:
        """`all_gather (4, 512) float32 at sequence.py:71`, as reports have it."""
        how = f" {self.how}" if with_how and self.how else ""
        return f"{self.verb} {self.shape} {self.dtype}{how} at {self.site}"

    def in_words(self, axis: str, peer: int = -1, tag: int = 0) -> str:
        """`all_gather on tp, call 41, (4, 512) float32, at sequence.py:71`."""
        words = call_words(self.verb, axis, peer, tag, int(self.number), self.shape, self.dtype)
        return f"{words}, at {self.site}"


def fingerprint(
    number: int, verb: str, a: Array, how: Sequence[Any], place: tuple[int, str], in_order: bool
) -> Fingerprint:
    """The fingerprint of a call of the door.

    Args:
        number: of the call.
        verb: its name.
        a: the array that this rank brings, or receives into.
        how: the further arguments of the call.
        place: its number and its site.
        in_order: whether sums are taken in rank order.
    """
    shape = str(shape_of_call(verb, a, how))
    if len(shape) > _LONGEST_SHAPE:
        shape = f"({a.ndim} dims, {stable_hash(shape):x})"
    words = _HOW.get(verb, "").format(*how, ndim=a.ndim)[:_LONGEST_HOW].replace("|", "/")
    if verb in SLICED and how[1] is not None:
        words += f" in slices of {told_lengths(how[1])}"
    if in_order and verb in _SUMS:
        words += " in rank order"
    even = verb not in UNEVEN or all(len(set(lengths)) == 1 for lengths in how[2:])
    return Fingerprint(
        str(number), verb, words, shape, str(a.dtype), "even" if even else "", f"{place[0]:x}", "", place[1]
    )


def differ(prints: Sequence[Fingerprint]) -> bool:
    """Whether calls do not fit each other, wherever they stand."""
    return len({(p.number, p.kind) for p in prints}) > 1


def judge(prints: Sequence[Fingerprint], ranks: Sequence[int]) -> str:
    """Which of these ranks left the path, as a sentence; "" where nobody can know."""
    new = {rank: bool(p.turn) for rank, p in zip(ranks, prints, strict=True)}
    return judged(new, {rank: (p.number, p.kind) for rank, p in zip(ranks, prints, strict=True)})


def tell_apart(prints: Sequence[Fingerprint], ranks: Sequence[int]) -> str:
    """Who calls what where: `ranks 0,1,3 all_gather (4, 512) float32 at sequence.py:71; rank 2 reduce_scatter ...`."""
    hows: dict[str, set[str]] = {}
    for p in prints:
        hows.setdefault(p.verb, set()).add(p.how)
    numbers = {p.number for p in prints}
    texts = []
    for p in prints:
        number = f"(call {p.number}) " if len(numbers) > 1 else ""
        texts.append(number + p.told(len(hows[p.verb]) > 1))
    return told(list(zip(ranks, texts, strict=True)))
