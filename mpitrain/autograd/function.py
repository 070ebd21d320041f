"""An operation: two pure functions next to each other, and the one place where it is recorded.

    class Square(Function):
        @staticmethod
        def forward(x):
            return x * x, (x,)                       # the value, and what backward needs

        @staticmethod
        def backward(grad, x, *, wanted):
            return (2 * x * grad,)                   # one gradient an input

`forward` changes no input and no hidden state.  What backward needs is *returned*, not stashed: so the tape can print
it, measure it, compress it, move it to the host or drop it, without the operation knowing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from mpitrain import kernels
from mpitrain.autograd.needs import Need
from mpitrain.autograd.node import Node
from mpitrain.autograd.returned import check_made, check_takes_wanted
from mpitrain.autograd.tape import PATH, TAPE
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_half
from mpitrain.events import OP_LISTENERS, Event, tell


class Function:
    """An operation and its vector-Jacobian product.

    Subclasses define two static methods:

        forward(*arrays, **static) -> (y, saved)
            arrays: the inputs' arrays (constants as given); static: keyword arguments that are no tensors.
            y: an array, or a tuple of arrays; saved: a tuple of what backward needs, () where it is nothing.
        backward(grad, *saved, wanted, **static) -> gradients
            grad: the gradient of y (a tuple if y was one, None for outputs that nobody used);
            wanted: one bool an input; returns one gradient an input with exactly its shape and dtype, None where it is
            not wanted.  A gradient may be `Lazy` (see `mpitrain.autograd.lazy`): a product that is not computed yet.

    One that takes or returns something else is refused with a ConfigError that names it.

    Class attributes:
        linear: indexes of the inputs in which the operation is (jointly) linear; summands of a value across ranks may
            pass through it (docs/explanation/states-and-duals.md).
        bilinear: True if inputs 0 and 1 are factors: what `linear` says of input 0 then holds of input 1 as well, but
            of one of the two at a time.
        weight_side: True for cast, copy, transpose and all_gather: of a weight they make a weight.
        undivided: True if the gradients of all inputs come from one pass, which a split backward (B and W) should not
            make twice: B makes those of weights along.
        takes_lazy: True if backward accepts a `Lazy` gradient; else it is computed first.
        like: the operation whose rules of states hold for this one too; None: its own, or those of an operation element
            by element.  Its inputs begin as those of `like`, and its keyword arguments are called as there.
        node_type: the kind of node that a tape records; another one than `Node` is walked its own way.
        saved_for: place of an array that forward saves -> the one input whose gradient needs it; where that gradient is
            not wanted, as that of a frozen weight, backward is given None instead, and nothing waits.
        needs: of each array that forward saves what backward needs of it (`mpitrain.autograd.needs`), which a policy of
            the tape may make use of; those at the end that are needed exactly may be left out.

    One that sends says so by an `arrow` (mpitrain.collectives.Arrow).
    """

    linear: ClassVar[Container[int]] = ()
    bilinear: ClassVar[bool] = False
    weight_side: ClassVar[bool] = False
    undivided: ClassVar[bool] = False
    takes_lazy: ClassVar[bool] = False
    like: ClassVar[type[Function] | None] = None
    node_type: ClassVar[type[Node]] = Node
    saved_for: ClassVar[Mapping[int, int]] = MappingProxyType({})
    needs: ClassVar[tuple[Need, ...]] = ()

    forward: ClassVar[Any]
    backward: ClassVar[Any]

    _title: ClassVar[str] = "function"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__name__
        if "backward" in vars(cls):
            check_takes_wanted(name, vars(cls)["backward"])
        cls._title = "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))

    @classmethod
    def title(cls) -> str:
        """The name that tapes and events print: the class name in snake_case."""
        return cls._title

    @classmethod
    def apply(cls, *inputs: Any, **static: Any) -> Any:
        """Run forward and, if a tape runs and an input wants a gradient, record the node.

        Args:
            inputs: Tensors; anything else (arrays, numbers) is a constant.

        Returns:
            A Tensor, or a tuple of Tensors where forward returns a tuple.

        Events: "begin" before forward, with `inputs` (the arrays) and `tensors` (the inputs as they were given); "end"
        after the node was recorded, with `output` (forward's y), `saved` and `outputs` (a tuple of Tensors) as well.
        """
        recorded = False
        arrays = []
        for t in inputs:
            if isinstance(t, Tensor):
                arrays.append(t.data)
                recorded = recorded or t.requires_grad
            else:
                arrays.append(t)
        listeners = OP_LISTENERS.get()
        if listeners:
            info = {"path": PATH.get(), "function": cls, "inputs": arrays, "tensors": inputs, "static": static}
            tell(listeners, Event("op", "begin", cls.title(), info))
        made = cls.forward(*arrays, **static)
        try:
            y, saved = made
        except (TypeError, ValueError):
            check_made(cls.__name__, made)
            raise
        if type(saved) is not tuple:
            check_made(cls.__name__, made)
        many = type(y) is tuple
        outputs = tuple([Tensor(array) for array in y]) if many else (Tensor(y),)
        if recorded:
            tape = TAPE.get()
            if tape is not None:
                tape.record(cls, inputs, outputs, saved, static, PATH.get())
        elif cls.weight_side and (tape := TAPE.get()) is not None:
            tape.see_view(inputs[0], outputs[0], cls, static)
        if listeners:
            info = {**info, "output": y, "saved": saved, "outputs": outputs}
            tell(listeners, Event("op", "end", cls.title(), info))
        return outputs if many else outputs[0]


def plain(x: Any) -> Any:
    """A NumPy scalar as the Python number that takes the dtype of the tensor it meets; anything else as it is."""
    return x.item() if isinstance(x, np.generic) else x


def unbroadcast(grad: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
    """Sum `grad` down to `shape`, the shape that was broadcast to it: the backward of broadcasting.

    Every dim that was added in front, or stretched from length 1, is summed over, in at least float32.  The sum comes
    out in `dtype`, or in that of `grad`.
    """
    if grad.shape == shape:
        return grad if dtype is None else grad.astype(dtype, copy=False)
    extra = grad.ndim - len(shape)
    dims = tuple(range(extra))
    dims += tuple(i + extra for i, length in enumerate(shape) if length == 1 and grad.shape[i + extra] != 1)
    dtype = grad.dtype if dtype is None else dtype
    if dims:
        grad = (kernels.widen(grad) if is_half(grad.dtype) else grad).sum(axis=dims, keepdims=True)
    return grad.reshape(shape).astype(dtype, copy=False)
