"""How an array waits between forward and backward: the policies of a tape, and what they make of an array.

    with Tape(Keep()) as tape:                       # as it is; so does Tape() without a word between
    with Tape(Gist(bits=16)) as tape:                # encoded
    with Tape(Offloaded(Gist(bits=16), ...)) as tape:     # encoded, and moved elsewhere until it is wanted

A tape hands each array that a node saves to its policy, an array that several nodes save once, and keeps what it gets
back:

    pack(node, place, array)           -> handle     a node saves it, as the place-th of what its forward returns
    share(node, place, array, handle)  -> handle     a further node saves the same array
    unpack(node, place, handle)        -> array      backward has come to that node

At `pack` the node's function, keyword arguments and path are known, and what the function's backward needs of the array
(`mpitrain.autograd.needs`).  An array is packed when it is first saved, which is when it has just been made or used, so
its own memory is free as soon as forward has no use for it: no policy waits for the end of forward.  Whoever saves the
array later still holds it, so a handle that holds too little is made to hold more then (`share`), also for the nodes
before.  Weights, numbers, and floats of the batch do not come here: they live on anyway.

Policies of this package give a `Stash`: an encoding, and its `parts`, arrays that are all the memory it takes.  So
policies compose by nesting.  One that moves arrays asks another one for the stash, and moves its parts:

    class Offloaded(Policy):
        def pack(self, node, place, array):
            stash = self.inner.pack(node, place, array)      # Keep() by default
            ...                                              # later: stash.parts = () when they are elsewhere
            return stash

        def share(self, node, place, array, stash):
            parts = stash.parts
            stash = self.inner.share(node, place, array, stash)
            if stash.parts is not parts: ...                 # it holds other arrays now: those that left are stale
            return stash

        def unpack(self, node, place, stash):
            ...                                              # stash.parts = the arrays again
            return self.inner.unpack(node, place, stash)

Between `pack` and `unpack` nobody but the tape's own policy looks at parts, and the tape itself, which counts bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mpitrain.autograd.function import Function
from mpitrain.autograd.needs import EXACT, Need
from mpitrain.autograd.node import Node
from mpitrain.backend import Array


class Encoding(Protocol):
    """A way to write an array as other arrays."""

    def decode(self, parts: tuple[Array, ...], need: Need, shape: tuple[int, ...], dtype: Any) -> Array:
        """The array again, or as much of it as is needed."""


class AsIs:
    """The array itself."""

    def decode(self, parts: tuple[Array, ...], need: Need, shape: tuple[int, ...], dtype: Any) -> Array:
        (array,) = parts
        return array

    def __repr__(self) -> str:
        return "as it is"


AS_IS = AsIs()


class Stash:
    """An array while it waits: how it is written, and the arrays that it is written as.

    Attributes:
        encoding: knows the way back.
        parts: all the memory that is taken; a tuple that is exchanged as a whole, never written into.
        needs: what the nodes that hold it need of it.
        shape, dtype: of the array.
        owner: the policy that made it, where there are several.
    """

    __slots__ = ("__weakref__", "dtype", "encoding", "needs", "owner", "parts", "shape")

    def __init__(self, array: Array, encoding: Encoding, parts: tuple[Array, ...], *needs: Need) -> None:
        self.encoding = encoding
        self.parts = parts
        self.needs: frozenset[Need] = frozenset(needs)
        self.shape: tuple[int, ...] = array.shape
        self.dtype: Any = array.dtype
        self.owner: Policy | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the parts."""
        return sum([part.nbytes for part in self.parts])

    def array(self, need: Need = EXACT) -> Array:
        """The array again, or as much of it as is needed."""
        return self.encoding.decode(self.parts, need, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"Stash({self.shape} {self.dtype}, {self.encoding!r}, {self.nbytes:,} bytes)"


class Policy:
    """A `SavePolicy` whose handles are stashes; the base of those that follow.  It keeps arrays as they are."""

    def begin(self) -> Policy:
        """The policy for one more tape."""
        return self

    def pack(self, node: Node, place: int, array: Array) -> Stash:
        """What shall wait in the place of an array that a node saves."""
        return Stash(array, AS_IS, (array,), EXACT)

    def share(self, node: Node, place: int, array: Array, stash: Stash) -> Stash:
        """What shall wait for a further node that saves an array which has a stash already."""
        return stash

    def unpack(self, node: Node, place: int, stash: Stash) -> Array:
        """The array again, as the node's backward needs it."""
        return stash.array()


class Keep(Policy):
    """Arrays wait as they are."""


class ByFunction(Policy):
    """A policy for each kind of operation.

    An array that two operations save whose policies differ has a stash from each.

    Args:
        policies: function -> its policy; of several classes that a function is, the nearest counts.
        others: for all other functions.
    """

    def __init__(self, policies: Mapping[type[Function], Policy], others: Policy | None = None) -> None:
        self.policies = dict(policies)
        self.others = Keep() if others is None else others

    def begin(self) -> ByFunction:
        return ByFunction({function: policy.begin() for function, policy in self.policies.items()}, self.others.begin())

    def of(self, node: Node) -> Policy:
        """The policy of a node."""
        found = (self.policies[each] for each in node.function.__mro__ if each in self.policies)
        return next(found, self.others)

    def pack(self, node: Node, place: int, array: Array) -> Stash:
        policy = self.of(node)
        stash = policy.pack(node, place, array)
        stash.owner = policy
        return stash

    def share(self, node: Node, place: int, array: Array, stash: Stash) -> Stash:
        policy = self.of(node)
        if stash.owner is not policy:
            return self.pack(node, place, array)
        return policy.share(node, place, array, stash)

    def unpack(self, node: Node, place: int, stash: Stash) -> Array:
        return self.of(node).unpack(node, place, stash)
