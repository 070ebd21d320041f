"""A micro-batch in flight: between its forward on a stage and the end of its backward there."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.autograd.auxiliary import AuxiliaryLoss
from mpitrain.autograd.carry import Carry
from mpitrain.autograd.tape import Seed, Slot, Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.pipeline.action import Action

Key = tuple[int | None, int, int]
"""(micro-batch, slice, stage)."""


def key_of(action: Action) -> Key:
    """What an action works on."""
    return action.micro, action.part or 0, action.stage


def beside(key: Key, stage: int) -> Key:
    """The same micro-batch on another stage."""
    return key[0], key[1], stage


class Flight:
    """A micro-batch between its forward and the end of its backward, on one stage.

    Attributes:
        losses: what its forward added to the objective besides its outputs.
    """

    def __init__(
        self,
        tape: Tape,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        carry: Carry | None,
        losses: Sequence[AuxiliaryLoss] = (),
    ) -> None:
        self.tape = tape
        self.inputs = tuple(inputs)
        self.outputs: tuple[Tensor, ...] = tuple(outputs)
        self.carry = carry
        self.losses = tuple(losses)
        self._slots: tuple[Slot | int | None, ...] = ()

    def forget_arrays(self) -> None:
        """Outputs were passed on: their places on the tape are all that backward needs."""
        self._slots = self._places()
        self.outputs = ()

    def forget_inputs(self) -> None:
        """What backward needs of inputs waits on the tape, as its policy has it; so they need not wait here as well."""
        for t in self.inputs:
            if all(t is not other for other in self.outputs):
                xp = array_module(t.data)
                t.data = xp.broadcast_to(xp.full((), xp.nan, t.dtype), t.shape)  # a number's memory

    def _places(self) -> tuple[Slot | int | None, ...]:
        """For each output its place on the tape, or which input it is where the stage did nothing to it.

        None for what depends on neither weights nor inputs, numbers of the batch itself: nobody wants its gradient.
        """
        places: list[Slot | int | None] = []
        for t in self.outputs:
            same = next((i for i, x in enumerate(self.inputs) if x is t), None)
            place = self.tape.slot(t) if same is None else same
            assert place is not None or not t.requires_grad, "an output that comes from nowhere"
            places.append(place)
        return tuple(places)

    def seeds(self, gradients: Sequence[Array]) -> tuple[list[Seed], list[tuple[int, Array]]]:
        """Where the gradients of the outputs go: onto the tape, or past it to an input."""
        places = self._slots or self._places()
        seeds: list[Seed] = []
        untouched: list[tuple[int, Array]] = []
        for place, gradient in zip(places, gradients, strict=True):
            if isinstance(place, int):
                untouched.append((place, gradient))
            elif place is not None:
                seeds.append((place, gradient))
        return seeds, untouched

    def input_gradients(self, untouched: Sequence[tuple[int, Array]]) -> list[Array]:
        """What goes back to the stage before; zeros for what this one did not use."""
        gradients = []
        for number, t in enumerate(self.inputs):
            parts = [g for place, g in untouched if place == number]
            if t in self.tape.grads:
                parts.append(self.tape.grads[t])
            gradients.append(sum(parts[1:], start=parts[0]) if parts else array_module(t.data).zeros(t.shape, t.dtype))
        return gradients

    def done(self) -> None:
        """The first half of backward is over: inputs and outputs are not needed any more."""
        self.inputs = self.outputs = self.losses = ()
        self.tape.grads.clear()
