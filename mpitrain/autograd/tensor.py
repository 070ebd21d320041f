"""A tensor: an array, and whether anybody wants its gradient.

No algorithm lives here.  What happened to a tensor stands on the tape; a tensor that was produced under a tape knows
its slot there (`%7` when the tape is printed), and nothing points from the tape to the tensor, so activations go as
soon as nobody needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend import Array, array_module, to_host
from mpitrain.errors import GraphError, ShapeError

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
        """The one element as a Python number (waits for the device where it lives on one).

        Raises:
            ShapeError: it has several elements, or none.
        """
        if self.size != 1:
            raise ShapeError(f"a tensor of shape {self.shape} is not one number: take its .tolist(), or .numpy()")
        return self.data.item()

    def backward(self, *_: Any, **__: Any) -> None:
        """There is none: a tape walks back.

        Raises:
            GraphError: ever; it says how.
        """
        raise GraphError(
            "a tensor does not go backward: what happened stands on a tape, which walks it.\n"
            "Record with Tape() as tape, then tape.run_backward([(y, gradient)]); of a loss: [(loss, 1.0)]"
        )

    def detach(self) -> Tensor:
        """The same array as a leaf without gradient."""
        return Tensor(self.data)

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array: the tensor's own where it lives on the host, else a copy."""
        host: np.ndarray = to_host(self.data)
        return host

    def tolist(self) -> Any:
        """The values as Python numbers in nested lists."""
        return self.data.tolist()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dims")
        return int(self.shape[0])

    def __bool__(self) -> bool:
        if self.size != 1:
            what = f"a tensor of shape {self.shape} is neither true nor false"
            raise ShapeError(f"{what}: ask for (x > 0).all() or (x > 0).any()")
        return bool(self.data.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("a Tensor is not made an array without a word, for its gradient would be lost: take x.numpy()")

    def __repr__(self) -> str:
        """Values, shape, dtype, whether its gradient is asked for, and its slot on the tape; of many values a few."""
        ends = 3 if self.ndim < 2 else 2 if self.ndim == 2 else 1
        values = to_host(self.data)
        if values.dtype.kind not in "fiub":  # bfloat16, which NumPy cannot print shortly
            values = values.astype(np.float32)
        text = np.array2string(values, precision=4, threshold=24, edgeitems=ends, separator=", ", prefix="Tensor(")
        about = [text.replace("\n\n", "\n").replace("\n\n", "\n"), f"shape={self.shape}", str(self.dtype)]
        if self.requires_grad:
            about.append("requires_grad" if self.tape is None else f"%{self.slot} of a tape")
        return f"Tensor({', '.join(about)})"

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
        def __iter__(self) -> Iterator[Tensor]: ...
        def __abs__(self) -> Tensor: ...
        def __rpow__(self, other: Any) -> Tensor: ...
        def __lt__(self, other: Any) -> Array: ...
        def __le__(self, other: Any) -> Array: ...
        def __gt__(self, other: Any) -> Array: ...
        def __ge__(self, other: Any) -> Array: ...
        def abs(self) -> Tensor: ...
        def argmax(self, dim: int | None = None, keepdims: bool = False) -> Array: ...
        def argmin(self, dim: int | None = None, keepdims: bool = False) -> Array: ...
        def clip(self, low: float | None = None, high: float | None = None) -> Tensor: ...
        def cumsum(self, dim: int = -1) -> Tensor: ...
        def exp(self) -> Tensor: ...
        def log(self) -> Tensor: ...
        def sqrt(self) -> Tensor: ...
        def tanh(self) -> Tensor: ...
        def squeeze(self, dim: int | tuple[int, ...] | None = None) -> Tensor: ...
        def swap(self, one: int, other: int) -> Tensor: ...
        def sum(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor: ...
        def mean(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor: ...
        def max(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor: ...
        def min(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor: ...
        def prod(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor: ...
        def std(
            self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False, correction: int = 0
        ) -> Tensor: ...
        def var(
            self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False, correction: int = 0
        ) -> Tensor: ...
        def reshape(self, *shape: Any) -> Tensor: ...
        def transpose(self, *dims: Any) -> Tensor: ...
        def astype(self, dtype: Any) -> Tensor: ...
        @property
        def T(self) -> Tensor: ...
