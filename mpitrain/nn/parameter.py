"""Parameters: named rectangles of full tensors, whose values and gradients lie in flat buffers.

A Parameter is abstract first: a name, the shape of the full tensor, a `Spec` that says how it lies across ranks, and an
initialiser.  `Module.materialize` gives it this rank's slab.  Values and gradients of all parameters that are summed
over the same axes lie in two flat buffers (`Flat`), in the order of the model: so one message reduces them all, a
bucket is a slice, and the optimizer passes over long arrays.

A half-precision weight exists twice: as the halves with which the model computes, and as the float32 *master* that the
optimizer updates and a checkpoint keeps, since an update below 2^-11 of a half would be lost.  Its gradient is float32,
in which micro-batches add up.  A weight that is frozen has neither gradient nor master.

Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.1 (master weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.autograd.lazy import Lazy
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, is_half, to_device, to_host, wide
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn.no_values import NoValues
from mpitrain.spec import Spec, State, slab_shape

Initializer = Callable[[str, tuple[int, ...], tuple[slice, ...], int], Any]
"""(name, full_shape, slab, seed) -> float64 array of the slab; a pure function, the same on every layout."""


class Writes:
    """How often an array was written in place."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Parameter(Tensor):
    """A weight.

    Args:
        name: path in the model with global layer numbers (`blocks.3.mlp.up.weight`); names its random stream, its
            place in checkpoints, its messages.
        full_shape: shape of the unsharded tensor.
        spec: state on the axes that it names, e.g. `{"tp": Shard(1)}`.
        init: makes the initial values of any slab.
        decay: whether weight decay applies (matrices and embeddings: yes; biases and norms: no).

    Attributes:
        in_full: keep it in at least float32 where the model is of half precision; set before `materialize`.
        frozen: nobody trains it (mpitrain.nn.freezing): there is no gradient of it, no master, no optimizer state.  Set
            before `materialize`, or by `Module.freeze`.
        is_laid: whether it has its memory; before that it cannot be used, and says so.
        outside: it is used outside of the residual branch that it has its name from, as the last bias of a branch is,
            which is added with the residual: its gradient carries no scale of the branch.

    After `materialize`: `.data` and `.grad` are this rank's slab (views of flat buffers), `.rectangle` its slices in
    the full tensor, `.master` what an update changes.  `.grad` and `.master` are float32 where `.data` is a half; else
    the master is the data itself.  `.grad` holds the gradient only if `.touched`: the first gradient of a step
    overwrites.  `.writes` counts in-place writes into the array that is `.data`, so that a tape notices a weight that
    changed under it; whoever exchanges the array exchanges the count with it.

    Where ranks deal out what they would all hold (`mpitrain.nn.share`), `.grad` is None until a gradient is written,
    and `.visits` says that the array comes and goes: between uses `.data` has its shape and holds NaN.  `.grad` of what
    is frozen is None ever.
    """

    __slots__ = (
        "_master",
        "decay",
        "full_shape",
        "grad",
        "in_full",
        "init",
        "is_laid",
        "name",
        "outside",
        "rectangle",
        "spec",
        "touched",
        "visits",
        "writes",
    )

    is_parameter = True

    def __init__(
        self,
        name: str,
        full_shape: Sequence[int],
        spec: Mapping[str, State] | Spec | None = None,
        *,
        init: Initializer,
        decay: bool = False,
    ) -> None:
        self.name = name
        self.full_shape = tuple(int(length) for length in full_shape)
        if any(length < 1 for length in self.full_shape):
            raise ShapeError(f"{name}: shape {self.full_shape} has a dim below 1")
        self.spec = spec if isinstance(spec, Spec) else Spec(spec)
        self.init = init
        self.decay = decay
        self.rectangle: tuple[slice, ...] = ()
        super().__init__(np.empty(0), requires_grad=True)
        self.grad: Array = self.data
        self.data = NoValues(name)
        self.weight_side = True
        self.in_full = False
        self.outside = False
        self.is_laid = False
        self.visits = False
        self._master: Array | None = None
        self.touched = False
        self.writes = Writes()

    @property
    def master(self) -> Array:
        """The weights that the optimizer updates: `.data`, or in float32 what `.data` is the rounding of.

        Of a frozen half, which has none, the half itself in float32: it is read and written as an array is.
        """
        if self._master is not None:
            return self._master
        return Widened(self.data) if self.frozen and is_half(self.data.dtype) else self.data

    @property
    def frozen(self) -> bool:
        """Whether nobody trains it."""
        return not self.requires_grad

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        if self.is_laid and frozen != self.frozen:
            raise ConfigError(
                f"{self.name} has its place among what is {'not ' * self.frozen}trained, which frozen = {frozen} does"
                f" not change.\nSay model.freeze({self.name!r}), which moves it, before the optimizer is made."
            )
        self.requires_grad = not frozen

    def bind(self, data: Array, master: Array | None, grad: Array | None) -> None:
        """Take views of flat buffers; a master is given where data are halves."""
        self.is_laid = True
        self.data, self._master, self.grad = data, master, grad

    def refresh(self) -> None:
        """Make `.data` the rounding of the master again, after the master was written."""
        if self._master is not None:
            kernels.narrow(_here(self._master), self.data.dtype, out=self.data)

    @property
    def version(self) -> int:
        """Number of the in-place writes into `.data`; whoever writes adds one."""
        return self.writes.count

    @version.setter
    def version(self, count: int) -> None:
        self.writes.count = count

    def accumulate(self, grad: Any) -> None:
        """Add a gradient (an array or a recipe); the first of a step is written, not added."""
        if self.grad is None:
            self.grad = array_module(self.data).empty(self.data.shape, wide(self.data.dtype))
        if isinstance(grad, Lazy):
            grad.write(self.grad, add=self.touched)
        elif self.touched:
            self.grad += grad
        else:
            self.grad[...] = grad
        self.touched = True

    def settle(self) -> None:
        """Make `.grad` valid: zeros where this rank's step did not use the parameter."""
        if not self.touched:
            self.grad[...] = 0
            self.touched = True

    def __repr__(self) -> str:
        here = "" if not self.is_laid or self.data.shape == self.full_shape else f"{self.data.shape} of "
        return f"Parameter({self.name} {here}{self.full_shape}, {self.spec}{', frozen' if self.frozen else ''})"


class Widened:
    """An array of halves as one of float32: what is read of it is made so, what is written into it is rounded.

    A checkpoint keeps weights in the precision in which they would be updated, whoever trains them.
    """

    __slots__ = ("half",)

    base = None

    def __init__(self, half: Any) -> None:
        self.half = half

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.half.shape)

    @property
    def dtype(self) -> Any:
        return wide(self.half.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(self.half.size)

    def here(self) -> Array:
        """A copy."""
        return kernels.widen(_here(self.half))

    def copy(self) -> Array:
        """As `here`."""
        return self.here()

    def get(self) -> Any:
        """A copy on the host."""
        return to_host(self.here())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.get() if dtype is None else self.get().astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Array:
        return kernels.widen(_here(self.half)[index])

    def __setitem__(self, index: Any, values: Any) -> None:
        here = _here(self.half)
        if hasattr(values, "dtype") and values.dtype != here.dtype:
            values = kernels.narrow(to_device(values.astype(self.dtype, copy=False), here), here.dtype)
        self.half[index] = values


def _here(array: Any) -> Array:
    """An array, also one that lives elsewhere (mpitrain.memory.stored_array)."""
    return array.here() if hasattr(array, "here") else array


class Flat:
    """Values and gradients of parameters that are summed over the same axes, one after the other.

    Args:
        parameters: in the model's order; each gets views of the buffers.
        places: of each of them among all parameters of the model here; other buffers hold the rest.
        axes: the atomic axes over whose merge their gradients are summed.
        dtype: of the values.

    Attributes:
        weights: with which the model computes.
        grads: in at least float32.
        shares: what this rank updates: all of its parameters, or its rows of them (`mpitrain.nn.share`).
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        places: Sequence[int],
        axes: tuple[str, ...],
        dtype: Any,
        xp: Any,
    ) -> None:
        self._lay_out(parameters, places, axes)
        self.weights = xp.empty(self.offsets[-1], dtype)
        self._masters = xp.empty(self.offsets[-1], wide(dtype)) if is_half(dtype) else None
        self.grads = xp.zeros(self.offsets[-1], wide(dtype))
        masters = [None] * len(self.parameters) if self._masters is None else self.views(self._masters)
        parts = zip(self.views(self.weights), masters, self.views(self.grads), strict=True)
        for p, (data, master, grad) in zip(self.parameters, parts, strict=True):
            p.bind(data, master, grad)

    def _lay_out(self, parameters: Sequence[Parameter], places: Sequence[int], axes: tuple[str, ...]) -> None:
        """Where each parameter lies; takes no memory."""
        self.parameters = self.shares = tuple(parameters)
        self.places = tuple(places)
        self.axes = axes
        sizes = [int(np.prod(slab_shape(p.rectangle), dtype=np.int64)) for p in self.parameters]
        self.offsets = [int(offset) for offset in np.cumsum([0, *sizes])]

    @property
    def masters(self) -> Array:
        """What the optimizer updates: the weights, or what they are the rounding of."""
        return self.weights if self._masters is None else self._masters

    frozen = False
    """Whether nobody trains the parameters (`FrozenFlat`)."""

    def move_masters(self, vector: Any) -> None:
        """The masters live elsewhere now, and lie there as they lay here."""
        self._masters = vector

    @property
    def updated(self) -> list[Array]:
        """The gradients by which it updates them."""
        return [self.grads]

    def start(self, seed: int) -> None:
        """Write the initial values."""
        for p in self.parameters:
            values = p.init(p.name, p.full_shape, p.rectangle, seed).astype(p.master.dtype)
            p.master[...] = array_module(p.master).asarray(values)
            p.refresh()

    def refresh(self) -> None:
        """Make the weights the rounding of the masters again, after masters were written."""
        for p in self.parameters:
            p.refresh()

    def views(self, vector: Array) -> list[Array]:
        """Each parameter's part of a vector that lies as the buffers do, in the parameter's shape."""
        shapes = [slab_shape(p.rectangle) for p in self.parameters]
        ends = zip(self.offsets, self.offsets[1:], shapes, strict=False)
        return [vector[start:stop].reshape(shape) for start, stop, shape in ends]


class FrozenFlat(Flat):
    """Values of parameters that nobody trains: arguments as of a `Flat`, and no gradients and no masters.

    The axes are those over which gradients would be summed: along them ranks hold the same.
    """

    frozen = True

    def __init__(
        self,
        parameters: Sequence[Parameter],
        places: Sequence[int],
        axes: tuple[str, ...],
        dtype: Any,
        xp: Any,
    ) -> None:
        self._lay_out(parameters, places, axes)
        self.weights = xp.empty(self.offsets[-1], dtype)
        self._masters = None
        self.grads = xp.empty(0, wide(dtype))
        for p, data in zip(self.parameters, self.views(self.weights), strict=True):
            p.bind(data, None, None)

    @property
    def updated(self) -> list[Array]:
        return []
