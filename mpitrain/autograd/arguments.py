"""Tensors among the arguments of a call, or in what it returned: found, and put back as others.

Tuples (named ones, too), lists and dicts are looked into, as deep as they go; anything else is one thing, handed on as
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, each once, in the order in which they are met."""
    found: dict[Tensor, None] = {}

    def note(x: Any) -> Any:
        if isinstance(x, Tensor):
            found.setdefault(x)
        return x

    _change(value, note)
    return list(found)


class Arguments:
    """Positional and keyword arguments, in which other tensors can be put in the places of those that are there.

    The containers are copied: what the call does to a list or dict that it is given changes nothing here.  Only plain
    tensors have a place.  Parameters, and tensors of other classes, stay what they are.

    Attributes:
        tensors: those that have a place, each once; () after `forget`.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places: dict[Tensor, int] = {}

        def place(x: Any) -> Any:
            return _Place(places.setdefault(x, len(places))) if type(x) is Tensor else x

        self._args, self._kwargs = _change((args, kwargs), place)
        self.tensors: tuple[Tensor, ...] = tuple(places)
        self._kinds = [_Kind(t.requires_grad, t.weight_side) for t in self.tensors]

    def forget(self) -> None:
        """Let go of the tensors."""
        self.tensors = ()

    def again(self, arrays: Sequence[Array]) -> tuple[tuple[Tensor, ...], tuple[Any, ...], dict[str, Any]]:
        """The arguments with new leaves in the places: (leaves, args, kwargs).

        Args:
            arrays: of the tensors, in their order.
        """
        leaves = tuple([Tensor(array, kind.requires_grad) for array, kind in zip(arrays, self._kinds, strict=True)])
        for leaf, kind in zip(leaves, self._kinds, strict=True):
            leaf.weight_side = kind.weight_side
        args, kwargs = _change((self._args, self._kwargs), lambda x: leaves[x.number] if isinstance(x, _Place) else x)
        return leaves, args, kwargs


class _Kind(NamedTuple):
    """What a leaf takes over from the tensor that it stands for."""

    requires_grad: bool
    weight_side: bool


class _Place:
    """Where a tensor was."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def _change(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with all that is no container replaced; containers are new ones of the same kind."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_change(item, change) for item in value)
    if kind is dict:
        return {key: _change(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return kind._make(_change(item, change) for item in value)
    return change(value)
