"""A tensor: an array, and whether anybody wants its gradient.

No algorithm lives here.  What happened to a tensor stands on the tape; a tensor that was produced under a tape knows
its slot there (`%7` when the tape is printed), and nothing points from the tape to the tensor, so activations go as
soon as nobody needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend import Array, array_module

if TYPE_CHECKING:
    from mpitrain.autograd.tape import Tape


class Tensor:
    """An array of numbers that ops can record.

    Args:
        data: a NumPy or CuPy array; Python numbers and lists become NumPy arrays.
        requires_grad: True for a leaf whose gradient is asked for (`tape.grads[tensor]` after backward).

    Operators and methods (`+ - * / ** @ [] .sum() .reshape() ...`) are the functions of `mpitrain.autograd.ops`.
    """

    __slots__ = ("__weakref__", "data", "requires_grad", "slot", "tape", "weight_side")

    is_parameter = False
    __array_ufunc__ = None  # numpy_array + tensor asks the tensor, not NumPy's loop over elements

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        if type(data) is not np.ndarray:  # what ops make by the thousand comes first
            if isinstance(data, Tensor):
                raise TypeError("Tensor(data) takes an array, not a Tensor")
            xp = array_module(data)
            data = data if isinstance(data, xp.ndarray) else xp.asarray(data)
        self.data: Array = data
        self.requires_grad = requires_grad
        self.tape: Tape | None = None  # the tape that produced it; None for leaves
        self.slot = -1
        self.weight_side = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.size

    def item(self) -> float:
        """The one element as a Python number (waits for the device where it lives on one)."""
        return self.data.item()

    def detach(self) -> Tensor:
        """The same array as a leaf without gradient."""
        return Tensor(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        where = "" if self.tape is None else f" %{self.slot}"
        wants = ", requires_grad" if self.requires_grad else ""
        return f"Tensor{where}({self.data!r}{wants})"

    if TYPE_CHECKING:  # what mpitrain.autograd.ops installs, for those who read types

        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __pow__(self, exponent: float) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def sum(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor: ...
        def mean(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor: ...
        def max(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor: ...
        def reshape(self, *shape: Any) -> Tensor: ...
        def transpose(self, *dims: Any) -> Tensor: ...
        def astype(self, dtype: Any) -> Tensor: ...
        @property
        def T(self) -> Tensor: ...
