"""What earlier tapes hand to later ones: values that go forward, and their gradients that come back.

The slices of a sequence are forward passes of their own, each with its own tape, and yet a later slice looks at keys
and values of the earlier ones.  On the later tape a leaf stands for each of these values; when that tape was walked,
the leaf's gradient becomes one more seed of the tape that made the value:

    forward    begin(0)  F.0  begin(1)  F.1  begin(2)  F.2          F.i: earlier(name) -> leaves, keep(name, value)
    backward   seeds(2)  B.2  pass_back(2)   seeds(1)  B.1  ...     always from the last part to the first

A value has its whole gradient only when all later parts have been walked, hence the order.  Where nothing records, as
in evaluation, there are no gradients, and only the first line happens.

Where a part is recomputed in backward, it is given the same leaves again, and what it keeps is kept already.

Source: Li et al. 2021, "TeraPipe", arXiv:2102.07988, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mpitrain import kernels
from mpitrain.autograd.inner import hand_out
from mpitrain.autograd.recompute import recomputing
from mpitrain.autograd.tape import TAPE, Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, wide
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
    owned: bool = False  # whether grad is an array of ours, to write into: for halves a sum in float32

    def seed(self) -> Array:
        """The sum in the value's dtype: a sum of halves is rounded once, here."""
        assert self.grad is not None
        same = self.grad.dtype == self.value.dtype
        return self.grad if same else kernels.narrow(self.grad, self.value.dtype)


@dataclass
class _Part:
    """One slice: what it kept, by name, and, also by name, the leaves that stand for what others kept."""

    kept: dict[str, _Kept] = field(default_factory=dict)
    leaves: dict[str, list[tuple[Leaf, _Kept]]] = field(default_factory=dict)


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
            Leaves of the tape that records now, the same ones however often a part asks; a gradient is asked for where
            a tape made the value.  Without a tape: plain tensors.
        """
        if self._runs_again:
            return [leaf for leaf, _ in self._parts[-1].leaves.get(name, ())]
        *before, now = self._begun()
        if name not in now.leaves:
            records = TAPE.get() is not None
            found = [part.kept[name] for part in before if name in part.kept]
            now.leaves[name] = [(Leaf(kept.value, records and kept.value.requires_grad), kept) for kept in found]
        return [leaf for leaf, _ in now.leaves[name]]

    def keep(self, name: str, value: Tensor) -> None:
        """Keep a value of this part for later ones, which have it until this part goes backward.

        Raises:
            GraphError: this part keeps something under this name already.
        """
        hand_out(value)
        if self._runs_again:
            return
        now = self._begun()[-1]
        if name in now.kept:
            raise GraphError(f"part {len(self._parts) - 1} keeps two values as {name!r}; each needs a name of its own")
        now.kept[name] = _Kept(value)

    @property
    def _runs_again(self) -> bool:
        """Whether the last part's forward is made again on its way back; a whole pass may be a second one, too."""
        return self._turned and recomputing()

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
        return [(item.value, item.seed()) for item in kept.values() if item.grad is not None]

    def pass_back(self, part: int, tape: Tape) -> None:
        """After the walk of a part's tape: hand the gradients of its leaves to the values that they stand for.

        They leave `tape.grads`, and are summed in place, in at least float32.

        Raises:
            GraphError: `seeds` was not called for this part just before.
        """
        self._check_last(part, "pass_back", seeded=True)
        self._seeded = False
        for leaf, kept in (pair for pairs in self._parts.pop().leaves.values() for pair in pairs):
            grad = tape.grads.pop(leaf, None)
            if grad is None:
                continue
            if kept.grad is None:
                kept.grad = grad  # as it came: the array may be another leaf's gradient too
            elif kept.owned:
                kept.grad += grad
            else:
                kept.grad, kept.owned = kept.grad.astype(wide(grad.dtype)), True
                kept.grad += grad

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
