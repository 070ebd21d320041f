"""Which encoding an array gets: as little as the nodes that hold it need of it.

what is needed                        waits as

signs (relu alone), masks             a bit an element
numbers below k (maxima of a pool)    log2 k bits an element, rounded up
values (relu and convolution)         sparse where that is less, else as it is; signs follow from either
values nearby                         words of 16, 10 or 8 bits, or sparse with words for values, whichever is less;
                                      beside words signs, if a node needs them: what was rounded to 0 has none
all else                              as it is
"""

from __future__ import annotations

from typing import Any

from mpitrain.autograd.needs import EXACT, NEAR, SIGN, Below, Need, count_of, need_of
from mpitrain.autograd.node import Node
from mpitrain.backend import Array, array_module, is_half, to_host
from mpitrain.memory.gist.narrow import Narrow
from mpitrain.memory.gist.planes import Planes, signs_of
from mpitrain.memory.gist.sparse import Sparse, filled_in, sparse_bytes
from mpitrain.memory.policy import AS_IS, Encoding, Policy, Stash

PEEK = 4096
"""Elements of an array that are looked at before all are counted: without a zero among them it is taken for dense."""


class Gist(Policy):
    """Saved arrays wait encoded.

    Args:
        bits: 16, 10 or 8: what need not be exact waits in so many bits an element.  None: every encoding is lossless,
            and gradients are what they are without, to the last bit.

    Source: Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA.
    """

    def __init__(self, bits: int | None = None) -> None:
        self.bits = bits
        self.narrow = None if bits is None else Narrow(bits)

    def pack(self, node: Node, place: int, array: Array) -> Stash:
        stash = Stash(array, AS_IS, (array,), need_of(node.function, place))
        self._encode(node, array, stash)
        return stash

    def share(self, node: Node, place: int, array: Array, stash: Stash) -> Stash:
        needs = stash.needs | {need_of(node.function, place)}
        if needs != stash.needs:
            stash.needs = needs
            self._encode(node, array, stash)
        return stash

    def unpack(self, node: Node, place: int, stash: Stash) -> Array:
        need = need_of(node.function, place)
        array = stash.array(need)
        if need == NEAR and EXACT in stash.needs and self._rounds(array.dtype):
            assert self.narrow is not None
            # Another node wants it exactly.  What this one gets must not depend on that: where a part of the model is
            # made again, the array is its input.
            array = self.narrow.decode(self.narrow.encode(array), array.shape, array.dtype)
        return array

    def _rounds(self, dtype: Any) -> bool:
        """Whether what need not be exact waits in fewer bits than it has."""
        return self.bits is not None and not (self.bits == 16 and is_half(dtype))

    def _encode(self, node: Node, array: Array, stash: Stash) -> None:
        stash.encoding, stash.parts = self._encoded(node, array, stash.needs)

    def _encoded(self, node: Node, array: Array, needs: frozenset[Need]) -> tuple[Encoding, tuple[Array, ...]]:
        kind = array.dtype.kind
        if kind == "b":
            return _in_planes(2, array)
        if kind in "ui":
            (need,) = needs if len(needs) == 1 else (EXACT,)
            return _in_planes(count_of(need, node.static), array) if isinstance(need, Below) else _as_is(array)
        if needs == {SIGN}:
            return _in_planes(2, signs_of(array))
        return self._values(array, needs)

    def _values(self, array: Array, needs: frozenset[Need]) -> tuple[Encoding, tuple[Array, ...]]:
        """An array of floats, of which some node needs more than signs."""
        has_signs = SIGN in needs
        exact = EXACT in needs or not self._rounds(array.dtype)
        narrow = None if exact else self.narrow
        if exact and not array.flags.c_contiguous:
            return _as_is(array)  # it would come back in another order, and products round by that
        flat = array.reshape(-1)
        dense = _bytes(narrow, array, array.size)
        if narrow is not None and has_signs:
            dense += -(-array.size // 8)
        if array.size and (has_signs or _number(array_module(flat), filled_in(flat[:PEEK])) < min(PEEK, array.size)):
            filled = filled_in(flat)
            count = _number(array_module(flat), filled)
            if sparse_bytes(array.size, count, _bytes(narrow, array, count)) < dense:
                encoding = Sparse(narrow)
                return encoding, encoding.encode(flat, filled, count)
        if narrow is None:
            return _as_is(array)
        words = narrow.encode(flat)
        return Words(narrow), (words, *Planes(2).encode(signs_of(array))) if has_signs else (words,)

    def __repr__(self) -> str:
        return f"Gist({'' if self.bits is None else f'bits={self.bits}'})"


class Words:
    """All elements rounded, and their signs where a node needs them.

    Args:
        narrow: the format.
    """

    def __init__(self, narrow: Narrow) -> None:
        self.narrow = narrow

    def decode(self, parts: tuple[Array, ...], need: Need, shape: tuple[int, ...], dtype: Any) -> Array:
        """The array, rounded; for `SIGN` which of its elements were above 0."""
        words, *signs = parts
        if need == SIGN:
            return Planes(2).decode(tuple(signs), need, shape, dtype)
        return self.narrow.decode(words, shape, dtype)

    def __repr__(self) -> str:
        return repr(self.narrow)


def _in_planes(count: int, array: Array) -> tuple[Encoding, tuple[Array, ...]]:
    planes = Planes(count)
    return planes, planes.encode(array)


def _as_is(array: Array) -> tuple[Encoding, tuple[Array, ...]]:
    return AS_IS, (array,)


def _bytes(narrow: Narrow | None, array: Array, count: int) -> int:
    """Of so many values of an array."""
    return count * int(array.dtype.itemsize) if narrow is None else narrow.nbytes(count)


def _number(xp: Any, mask: Array) -> int:
    """How many are True; waits for a device."""
    return int(to_host(xp.count_nonzero(mask)))
