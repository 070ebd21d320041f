"""Versions of the weights: what a pipeline without flush computes with while it updates.

Such a pipeline updates before everything in flight came back.  A micro-batch must go back through the weights with
which it went forward, so its stage keeps them until then:

    enter(3, batch=3)    F of micro-batch 3 begins: the parameters' arrays are those of its version, which it holds
    leave(3)             its last backward is done: it holds no version any more
    renew()              before an update: what the optimizer now writes in place is a version of its own
    settle()             nothing is in flight: all that looks at a parameter sees the newest version

A version is a buffer of a pool.  A tape keeps the arrays that its forward saved, so stashing weights is a reference,
not a copy: the one copy of an update is from the newest buffer into a free one, and there is none where nobody holds
the newest.  Gradients and the optimizer's state exist once; only weights have versions.

Source: weight stashing, Harlap et al. 2018, arXiv:1806.03377; double-buffered weights (2BW), Narayanan et al. 2020,
arXiv:2006.09503.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mpitrain.backend import Array, array_module
from mpitrain.nn.parameter import Flat, Writes
from mpitrain.optim.optimizer import Joined, Optimizer

RULES = ("newest", "previous")


class Versions:
    """A pool of weight buffers, and which unit of work uses which.

    A unit is whatever goes forward once and back once on this rank, e.g. the number of a micro-batch.

    Args:
        flats: the model's buffers; their present weights are version 0.
        optimizer: what writes the weights; its `step` follows each `renew`.
        rule: which version a unit of batch k uses: `newest`, the newest there is when it enters (PipeDream);
            `previous`, version max(k - 1, 0), counted from the last `settle` (2BW: the one before the batch's own).

    Attributes:
        number: of the newest version: how often weights were renewed.
        peak: most versions that were alive at once.

    Memory: a weight vector for each version alive at the peak, the model's own among them; none is allocated once the
    peak is reached.
    """

    def __init__(self, flats: Sequence[Flat], optimizer: Optimizer, rule: str) -> None:
        assert rule in RULES, rule
        self.flats = tuple(flats)
        self.optimizer = optimizer
        self.rule = rule
        self.number = 0
        self.peak = 1
        self._first = 0  # number of the version with which batch 0 of this row is computed
        self._newest = _Buffer.in_use(self.flats)
        self._bound = self._newest
        self._alive = {0: self._newest}  # by number; the newest, those that are held, and one before if the rule asks
        self._free: list[_Buffer] = []
        self._held: dict[Hashable, int] = {}

    @property
    def alive(self) -> int:
        """How many versions exist now: the newest, those that units hold, and what the rule may still ask for."""
        return len(self._alive)

    @property
    def held(self) -> dict[Hashable, int]:
        """Units in flight and the number of the version that each holds."""
        return dict(self._held)

    def enter(self, unit: Hashable, batch: int) -> int:
        """Bind the parameters to the version that a unit of this batch uses, which it holds until it leaves.

        Args:
            unit: not in flight.
            batch: number of the batch in its row; batches of a row are counted from 0.

        Returns:
            The version's number.
        """
        assert unit not in self._held, f"{unit} is in flight already"
        number = self.number if self.rule == "newest" else self._first + max(batch - 1, 0)
        assert number in self._alive, f"batch {batch} uses version {number}, alive are {sorted(self._alive)}"
        self._held[unit] = number
        self._bind(self._alive[number])
        return number

    def leave(self, unit: Hashable) -> None:
        """The unit's last backward is done: nobody looks at its version on its behalf any more."""
        del self._held[unit]
        self._free_unused()

    def renew(self) -> None:
        """Make the newest version one that may be written, with the number after it, and bind the parameters to it.

        Its weights are those of the newest so far, until the optimizer writes them.
        """
        old, number = self._newest, self.number
        self.number += 1
        if self.rule == "previous" or number in self._held.values():
            self._free_unused()
            self._newest = self._free.pop() if self._free else _Buffer.like(self.flats)
            self._newest.copy(old)
            old.joined, self.optimizer.joined = self.optimizer.joined, self._newest.joined
        else:
            del self._alive[number]  # nobody looks at it: it is written where it lies
        self._alive[self.number] = self._newest
        self.peak = max(self.peak, self.alive)
        self._bind(self._newest)

    def settle(self) -> None:
        """Bind the parameters to the newest version and let all others go; batches count from 0 again.

        Units that are still in flight, after an error, are given up.
        """
        self._held.clear()
        self._first = self.number
        self._free_unused()
        self._bind(self._newest)

    def _free_unused(self) -> None:
        """Give back the buffers of versions that nothing holds and no unit to come may ask for."""
        needed = {self.number, *self._held.values()}
        if self.rule == "previous":
            needed.add(max(self._first, self.number - 1))
        for number in [number for number in self._alive if number not in needed]:
            self._free.append(self._alive.pop(number))

    def _bind(self, buffer: _Buffer) -> None:
        if buffer is self._bound:
            return
        self._bound = buffer
        for flat, weights, views in zip(self.flats, buffer.weights, buffer.views, strict=True):
            flat.weights = weights
            for p, (data, writes) in zip(flat.parameters, views, strict=True):
                p.data, p.writes = data, writes


class _Buffer:
    """Weights of all parameters of a rank: vectors, their views, and how often each view was written.

    The optimizer joins neighbouring arrays into runs; those of this buffer wait here while it writes another one.
    """

    def __init__(self, weights: list[Array], views: list[list[tuple[Array, Writes]]]) -> None:
        self.weights = weights
        self.views = views
        self.joined = Joined()

    @classmethod
    def in_use(cls, flats: Sequence[Flat]) -> _Buffer:
        """What the parameters are bound to now."""
        return cls([flat.weights for flat in flats], [[(p.data, p.writes) for p in flat.parameters] for flat in flats])

    @classmethod
    def like(cls, flats: Sequence[Flat]) -> _Buffer:
        """A new one, not written yet."""
        weights = [array_module(flat.weights).empty_like(flat.weights) for flat in flats]
        views = [flat.views(vector) for flat, vector in zip(flats, weights, strict=True)]
        return cls(weights, [[(data, Writes()) for data in of_flat] for of_flat in views])

    def copy(self, other: _Buffer) -> None:
        """Take over the weights of another one.

        The counts become those of the other and one more: so they grow from version to version, and no tape that used
        this buffer for an older one finds its own count again.
        """
        for mine, source in zip(self.weights, other.weights, strict=True):
            mine[...] = source
        for mine_views, source_views in zip(self.views, other.views, strict=True):
            for (_, mine_writes), (_, source_writes) in zip(mine_views, source_views, strict=True):
                mine_writes.count = source_writes.count + 1
