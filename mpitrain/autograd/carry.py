"""What earlier tapes hand to later ones: values that go forward, and their gradients that come back.

The slices of a sequence are forward passes of their own, each with its own tape, and yet a later slice looks at keys
and values of the earlier ones.  On the later tape a leaf stands for each of these values; when that tape was walked,
the leaf's gradient becomes one more seed of the tape that made the value:

    forward    begin(0)  F.0  begin(1)  F.1  begin(2)  F.2          F.i: earlier(name) -> leaves, keep(name, value)
    backward   seeds(2)  B.2  pass_back(2)   seeds(1)  B.1  ...     always from the last part to the first

A value has its whole gradient only when all later parts have been walked, hence the order.  Where nothing records, as
in evaluation, there are no gradients, and only the first line happens.

Source: Li et al. 2021, "TeraPipe", arXiv:2102.07988, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mpitrain.autograd.tape import TAPE, Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.errors import GraphError


class Leaf(Tensor):
    """A leaf of a later tape; `stands_for` is the tensor of an earlier one that it stands for."""

    __slots__ = ("stands_for",)

    def __init__(self, value: Tensor, requires_grad: bool) -> None:
        super().__init__(value.data, requires_grad)
        self.stands_for = value


@dataclass
class _Kept:
    """A value that a part kept, and the sum of the gradients that came back for it."""

    value: Tensor
    grad: Array | None = None
    owned: bool = False  # whether grad is an array of ours, to write into


@dataclass
class _Part:
    """One slice: what it kept, by name, and the leaves that stand for what others kept."""

    kept: dict[str, _Kept] = field(default_factory=dict)
    leaves: list[tuple[Leaf, _Kept]] = field(default_factory=list)


class Carry:
    """Values of earlier parts of the same sequences, for one micro-batch on one stage.

    What a part holds is freed as it goes backward.
    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._turned = False  # whether backward has begun
        self._seeded = False  # whether the last part has been given its seeds

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin(self, part: int) -> None:
        """The forward pass of a part begins.

        Raises:
            GraphError: it is not the next one.
        """
        if self._turned or part != len(self._parts):
            flying = f"{len(self._parts)} are in flight{' and backward has begun' if self._turned else ''}"
            raise GraphError(
                f"forward of part {part} of a sequence, when {flying}: parts go forward in the order 0, 1, 2, ..., all"
                " of them before the first goes backward"
            )
        self._parts.append(_Part())

    def earlier(self, name: str) -> list[Leaf]:
        """What earlier parts kept under this name, oldest first.

        Returns:
            Leaves of the tape that records now; a gradient is asked for where a tape made the value.  Without a tape:
            plain tensors.
        """
        *before, now = self._begun()
        records = TAPE.get() is not None
        leaves = []
        for kept in (part.kept[name] for part in before if name in part.kept):
            leaf = Leaf(kept.value, records and kept.value.requires_grad)
            if leaf.requires_grad:
                now.leaves.append((leaf, kept))
            leaves.append(leaf)
        return leaves

    def keep(self, name: str, value: Tensor) -> None:
        """Keep a value of this part for later ones, which have it until this part goes backward.

        Raises:
            GraphError: this part keeps something under this name already.
        """
        now = self._begun()[-1]
        if name in now.kept:
            raise GraphError(f"part {len(self._parts) - 1} keeps two values as {name!r}; each needs a name of its own")
        now.kept[name] = _Kept(value)

    def _begun(self) -> list[_Part]:
        if not self._parts or self._turned:
            raise GraphError("no part is going forward: begin(part) comes before earlier and keep")
        return self._parts

    # -- backward -----------------------------------------------------------------------------------------------------

    def seeds(self, part: int) -> list[tuple[Tensor, Array]]:
        """Seeds of a part's tape besides those of its outputs: what later parts want of the values that it kept.

        Raises:
            GraphError: a later part has not been walked, or this one has.
        """
        self._check_last(part, "seeds", seeded=False)
        self._turned = self._seeded = True
        kept, self._parts[-1].kept = self._parts[-1].kept, {}
        return [(item.value, item.grad) for item in kept.values() if item.grad is not None]

    def pass_back(self, part: int, tape: Tape) -> None:
        """After the walk of a part's tape: hand the gradients of its leaves to the values that they stand for.

        They leave `tape.grads`, and are summed in place.

        Raises:
            GraphError: `seeds` was not called for this part just before.
        """
        self._check_last(part, "pass_back", seeded=True)
        self._seeded = False
        for leaf, kept in self._parts.pop().leaves:
            grad = tape.grads.pop(leaf, None)
            if grad is None:
                continue
            if kept.grad is None:
                kept.grad = grad  # as it came: the array may be another leaf's gradient too
            elif kept.owned:
                kept.grad += grad
            else:
                kept.grad, kept.owned = kept.grad + grad, True

    def _check_last(self, part: int, call: str, *, seeded: bool) -> None:
        """Parts go backward from the last to the first, each by seeds, walk, pass_back."""
        if part == len(self._parts) - 1 and seeded == self._seeded:
            return
        if not self._parts:
            raise GraphError(f"{call}({part}): all parts have been backward, or none was forward")
        wanted = "pass_back" if self._seeded else "seeds"
        raise GraphError(
            f"{call}({part}) when {wanted}({len(self._parts) - 1}) must come: parts go backward from the last to the"
            " first, since each later one adds to the gradients of what earlier ones kept"
        )
