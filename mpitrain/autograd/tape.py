"""What happened, in order.  Backward reads it in reverse.

A tape is a list of nodes.  It belongs to one micro-batch of one stage, and it is walked once:

    with Tape() as tape:
        loss = model(batch)
    for final in tape.backward([(loss, seed)]):
        ...                                          # parameters whose gradient is complete: send them already

`backward` is a generator: overlapping messages with the walk is a `for` loop, stepping through it is the same loop with
a prompt in it.  Since all ranks of an axis run the same program, their tapes hold the same collectives in the same
order, and the reversed lists keep them in step.

Values have a slot number on their tape, so a tape prints like an assembly listing:

    %7 = gelu(%6)  (8, 512) float32  blocks.3.mlp
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mpitrain.autograd.lazy import Lazy, added
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_half
from mpitrain.errors import GraphError
from mpitrain.events import LISTENERS, Event, tell

if TYPE_CHECKING:
    from mpitrain.autograd.function import Function

TAPE: ContextVar[Tape | None] = ContextVar("mpitrain.tape", default=None)
"""The tape that records just now, one a rank; None: nothing is recorded."""

PATH: ContextVar[str] = ContextVar("mpitrain.path", default="")
"""Where in the model the rank is just now (`blocks.3.mlp.down`); modules set it, nodes and events carry it."""

Gradient = Any  # an array, or Lazy
Seed = tuple["Tensor | Slot", Array]
CONSTANT = -1


class SavePolicy(Protocol):
    """Decides how an array waits between forward and backward: as it is, in half precision, on the host ..."""

    def pack(self, function: type[Function], array: Array) -> Any:
        """Take an array that `function` saves, give back what shall wait in its place."""

    def unpack(self, handle: Any) -> Array:
        """The array again."""


class Node:
    """One operation that happened.

    inputs: the slot of each input, CONSTANT where no gradient is wanted; wanted: where one is; weight_side: which of
    them are weight-side; outputs: slots, with shapes and dtypes for printing; saved: what forward returned for backward
    (or the policy's handles); firsts: parameters that are used here for the first time, so their gradient is final
    after this node.
    """

    __slots__ = (
        "firsts",
        "function",
        "inputs",
        "kinds",
        "outputs",
        "path",
        "saved",
        "static",
        "wanted",
        "weight_side",
    )

    function: type[Function]
    saved: Any
    static: dict[str, Any]
    path: str
    inputs: tuple[int, ...]
    wanted: tuple[bool, ...]
    weight_side: tuple[bool, ...]
    outputs: tuple[int, ...]
    kinds: tuple[tuple[tuple[int, ...], Any], ...]
    firsts: tuple[Any, ...]

    def __str__(self) -> str:
        left = ", ".join(f"%{slot}" for slot in self.outputs)
        args = ", ".join("const" if slot == CONSTANT else f"%{slot}" for slot in self.inputs)
        static = ", ".join(self.details())
        right = "  ".join(f"{shape} {dtype}" for shape, dtype in self.kinds)
        arrow = getattr(self.function, "arrow_text", None)
        parts = [f"{left} = {self.function.title()}({args}{'; ' if static else ''}{static})"]
        parts += [arrow(**self.static)] if arrow else []
        return "  ".join([*parts, right, self.path]).rstrip()

    def details(self) -> list[str]:
        """What is printed behind the inputs."""
        return [text for text in (_static_text(*item) for item in self.static.items()) if text]

    def held(self, packed: bool) -> Iterator[Any]:
        """The arrays that wait in this node, or a policy's handles."""
        for item in self.saved or ():
            yield item[1] if packed else item

    def walk(self, tape: Tape, grad: Any, half: str) -> Iterator[tuple[Any, ...]]:
        """Its own way back, of a node that is of another kind than this class (see `Tape.backward` for what it yields).

        Args:
            tape: that it is on.
            grad: of its output, a tuple where there are several; None where nobody wants one.
            half: "" for the whole, "inputs" for B, which yields nothing, "weights" for W.
        """
        raise AssertionError("a plain node is walked by its tape")


def _static_text(name: str, value: Any) -> str:
    """One keyword argument of a node as text; '' for what would not fit on the line."""
    axis = getattr(value, "name", None)
    if axis is not None and hasattr(value, "ranks"):
        return str(axis)
    if getattr(value, "shape", ()):
        return f"{name}={tuple(value.shape)}"
    text = f"{name}={value}"
    return text if len(text) <= 40 else ""


class Slot(NamedTuple):
    """A value on a tape, without its array: what is needed to seed it after the array is gone."""

    number: int
    shape: tuple[int, ...]


class Gradients(dict[Tensor, Array]):
    """Gradients of a tape's leaves that are no parameters, by tensor (a tensor is its own key: identity)."""


class Tape:
    """A list of nodes, and the way back through it.

    Args:
        policy: how saved arrays wait for backward; None keeps them as they are.

    `grads` holds, after backward, the gradient of every leaf that is not a Parameter (a stage's inputs).  A
    Parameter's gradient is added to its own `.grad`.
    """

    gone = False
    """Whether what it recorded was dropped, so that no gradient can pass through it any more."""

    def __init__(self, policy: SavePolicy | None = None) -> None:
        self.nodes: list[Node] = []
        self.grads = Gradients()
        self.policy = policy
        self._slots = 0
        self._leaves: dict[Tensor, int] = {}
        self._leaf_at: dict[int, Tensor] = {}
        self._weights: list[tuple[Any, Array, Any, int]] = []  # parameter, its array, the array's writes, how many
        self._packed: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._pending: dict[int, Gradient] = {}
        self._owned: set[int] = set()
        self._kept: dict[int, Gradient] = {}  # by B for W: gradients of outputs ...
        self._made: dict[Node, list[tuple[Any, Gradient]]] = {}  # ... and those of parameters that B made along
        self._early: list[tuple[Any, Gradient]] = []  # of the node that B is at
        self._walked = ""
        self._tokens: list[Token[Tape | None]] = []

    def __enter__(self) -> Tape:
        self._tokens.append(TAPE.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        TAPE.reset(self._tokens.pop())

    # -- recording ----------------------------------------------------------------------------------------------------

    def record(
        self,
        function: type[Function],
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        saved: tuple[Any, ...],
        static: dict[str, Any],
        path: str,
    ) -> None:
        """Append one node; called by `Function.apply` and nobody else."""
        if self._walked:
            raise GraphError("this tape was walked already: an op cannot be recorded on it any more")
        node = function.node_type()
        node.function, node.static, node.path = function, static, path
        node.saved = saved if self.policy is None else self._pack(function, saved, inputs)
        node.firsts = ()
        slots, wanted, sides = [], [], []
        weights_only = function.weight_side
        for t in inputs:
            if isinstance(t, Tensor) and t.requires_grad:
                slots.append(t.slot if t.tape is self else self._leaf(t, node))
                wanted.append(True)
                sides.append(t.weight_side)
                weights_only = weights_only and t.weight_side
            else:
                slots.append(CONSTANT)
                wanted.append(False)
                sides.append(False)
        node.inputs, node.wanted, node.weight_side = tuple(slots), tuple(wanted), tuple(sides)
        first = slot = self._slots
        for t in outputs:
            t.requires_grad = True
            t.tape = self
            t.slot = slot
            t.weight_side = weights_only
            slot += 1
        self._slots = slot
        if len(outputs) == 1:
            data = outputs[0].data
            node.outputs, node.kinds = (first,), ((data.shape, data.dtype),)
        else:
            node.outputs = tuple(range(first, slot))
            node.kinds = tuple([(t.data.shape, t.data.dtype) for t in outputs])
        self.nodes.append(node)

    def _leaf(self, t: Tensor, node: Node) -> int:
        """The slot of a tensor that this tape did not make; a new one on its first use."""
        slot = self._leaves.get(t)
        if slot is None:
            if t.tape is not None and t.tape.gone:
                raise GraphError(
                    f"a value of shape {t.shape} that was made inside of a recomputed function is used outside of it,"
                    " where its gradient would be lost: the function must return it, in tuples, lists or dicts"
                )
            slot = self._slots
            self._slots += 1
            self._leaves[t] = slot
            self._leaf_at[slot] = t
            if t.is_parameter:
                node.firsts += (t,)
                writes = t.writes  # type: ignore[attr-defined]
                self._weights.append((t, t.data, writes, writes.count))
        return slot

    def _pack(self, function: type[Function], saved: tuple[Any, ...], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Hand each array that a node saves to the policy, an array that several nodes save only once.

        Weights stay as they are: they live on anyway, so a policy could save no memory, only digits lose.  So do
        numbers, also NumPy's, which ops on 0-d arrays return.
        """
        assert self.policy is not None
        weights = [t.data for t in inputs if isinstance(t, Tensor) and t.weight_side]
        handles = []
        for array in saved:
            if not hasattr(array, "nbytes") or not array.shape or any(array is weight for weight in weights):
                handles.append((False, array))
                continue
            known = self._packed.get(id(array))
            if known is None or known[0]() is not array:
                known = (weakref.ref(array), self.policy.pack(function, array))
                self._packed[id(array)] = known
            handles.append((True, known[1]))
        return tuple(handles)

    def saved_of(self, node: Node) -> tuple[Any, ...]:
        """What a node saved, as it was."""
        policy = self.policy
        if policy is None:
            return tuple(node.saved)
        return tuple(policy.unpack(handle) if packed else handle for packed, handle in node.saved)

    def slot(self, t: Tensor) -> Slot | None:
        """The place of a tensor on this tape; None if it is not there, as a value that went through untouched."""
        number = t.slot if t.tape is self else self._leaves.get(t)
        return None if number is None else Slot(number, t.shape)

    def leaf(self, slot: int) -> Tensor | None:
        """The leaf at a slot: a parameter or an input; None where an op made the value or no gradient is wanted."""
        return self._leaf_at.get(slot)

    # -- walking back -------------------------------------------------------------------------------------------------

    def backward(self, seeds: Sequence[Seed]) -> Iterator[tuple[Any, ...]]:
        """Walk the tape in reverse, once, and free what each node saved as soon as it was used.

        Args:
            seeds: (tensor, gradient of the objective with respect to it), for outputs or any other value on the tape;
                the tensor's `slot` serves as well.

        Yields:
            After each node the parameters whose gradient is now final (often none): those that were first used in
            it.  Exhaust the generator (`run_backward` does) or the walk is not done.

        Raises:
            GraphError: a seed is not on this tape or has another shape; the tape was walked before; a parameter's
                array was written between forward and backward.
        """
        self._begin(seeds, "backward")
        yield from self._walk(deferring=False)
        self._deliver()

    def backward_inputs(self, seeds: Sequence[Seed]) -> None:
        """The first half of a split backward: gradients of the tape's inputs only (B of a zero-bubble schedule).

        Weight-side inputs are left for `backward_weights`; their nodes keep what they saved and their gradient.  Where
        a function is `undivided` the gradients of its weights are made here, and wait.
        Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
        """
        self._begin(seeds, "backward_inputs")
        for _ in self._walk(deferring=True):
            pass
        self._deliver()
        # The inputs have done their part; what of their arrays weights need stands among what is saved.
        self._leaves = {t: slot for t, slot in self._leaves.items() if t.weight_side}
        self._leaf_at = {slot: t for t, slot in self._leaves.items()}

    def backward_weights(self) -> Iterator[tuple[Any, ...]]:
        """The second half (W): the nodes that were left, in the same order; yields final parameters."""
        if self._walked != "backward_inputs":
            raise GraphError("backward_weights comes after backward_inputs, once")
        self._walked = "backward_weights"
        self._check_weights()
        self._pending.update(self._kept)
        self._kept = {}
        yield from self._walk(deferring=False, only_weights=True)
        self._deliver()

    def run_backward(self, seeds: Sequence[Seed]) -> Gradients:
        """Walk to the end; the gradients of the leaves that are no parameters."""
        for _ in self.backward(seeds):
            pass
        return self.grads

    def _begin(self, seeds: Sequence[Seed], walk: str) -> None:
        if self._walked:
            raise GraphError("this tape was walked already; a tape is walked once, record the forward pass again")
        self._walked = walk
        self._check_weights()
        for t, grad in seeds:
            slot = t if isinstance(t, Slot) else self.slot(t)
            if slot is None:
                raise GraphError(f"a seed of shape {t.shape} is not on this tape: nothing that was recorded made it")
            if tuple(grad.shape) != t.shape:
                raise GraphError(f"the seed of a tensor of shape {t.shape} has shape {tuple(grad.shape)}")
            self._accumulate(slot.number, grad)

    def _check_weights(self) -> None:
        """Refuse weights that were written; a parameter may have another array by now, which is not this tape's."""
        for parameter, _, writes, count in self._weights:
            if writes.count != count:
                raise GraphError(
                    f"{parameter.name} was written between forward and backward: its gradient would be that of"
                    " other weights"
                )

    def _walk(self, deferring: bool, only_weights: bool = False) -> Iterator[tuple[Any, ...]]:
        """The loop.  `deferring` leaves weight-side inputs (B); `only_weights` then does just those (W)."""
        pending = self._pending
        for node in reversed(self.nodes):
            outputs = node.outputs
            if len(outputs) == 1:
                grad: Any = pending.pop(outputs[0], None)
            else:
                grad = tuple([pending.pop(slot, None) for slot in outputs])
                if all([g is None for g in grad]):
                    grad = None
            if type(node) is not Node:
                yield from node.walk(self, grad, "inputs" if deferring else "weights" if only_weights else "")
                continue
            kept = deferring and True in node.weight_side
            if grad is not None:
                wanted = node.weight_side if only_weights else node.wanted
                if kept:
                    of_inputs = tuple([want and not w for want, w in zip(wanted, node.weight_side, strict=True)])
                    kept = not (node.function.undivided and True in of_inputs)
                if kept:
                    wanted = of_inputs
                    grads = grad if type(grad) is tuple else (grad,)
                    self._kept.update((slot, g) for slot, g in zip(outputs, grads, strict=True) if g is not None)
                if True in wanted:
                    self._step(node, grad, wanted)
            if self._early:
                self._made[node], self._early = self._early, []
            elif only_weights:
                for parameter, early in self._made.pop(node, ()):
                    parameter.accumulate(early)
            if not kept:
                node.saved = None
            if not deferring:
                yield node.firsts

    def _step(self, node: Node, grad: Any, wanted: tuple[bool, ...]) -> None:
        """Gradients of one node's inputs from those of its outputs."""
        if type(grad) is tuple:
            grad = tuple(g.array() if isinstance(g, Lazy) else g for g in grad)
        elif isinstance(grad, Lazy) and not node.function.takes_lazy:
            grad = grad.array()
        saved = node.saved if self.policy is None else self.saved_of(node)
        listeners = LISTENERS.get()
        if listeners:
            name = f"{node.function.title()}.backward"
            info = {"path": node.path, "function": node.function, "grad": grad, "wanted": wanted}
            info |= {"tape": self, "node": node}
            tell(listeners, Event("op", "begin", name, info))
            grads = node.function.backward(grad, *saved, wanted=wanted, **node.static)
            tell(listeners, Event("op", "end", name, {**info, "grads": grads}))
        else:
            grads = node.function.backward(grad, *saved, wanted=wanted, **node.static)
        for slot, g, want in zip(node.inputs, grads, wanted, strict=True):
            if want and g is not None:
                self._accumulate(slot, g)

    def _accumulate(self, slot: int, grad: Gradient) -> None:
        """Add a gradient to a slot; a parameter's goes straight into its own buffer."""
        leaf = self._leaf_at.get(slot)
        if leaf is not None and leaf.is_parameter:
            if self._walked == "backward_inputs":
                self._early.append((leaf, grad))  # W's to add, in its order
            else:
                leaf.accumulate(grad)  # type: ignore[attr-defined]
            return
        before = self._pending.get(slot)
        if before is None:
            # Kept as it came: the array may be another slot's gradient too, so it must not be written.
            self._pending[slot] = grad
            return
        before, addend = (g.array() if isinstance(g, Lazy) else g for g in (before, grad))
        if slot in self._owned and not is_half(before.dtype):
            before += addend
            self._pending[slot] = before  # NumPy's sum of two 0-d arrays is a number, to which += makes a new one
        else:
            self._pending[slot] = added(before, addend)
            self._owned.add(slot)

    def lend(self, slot: int, other: Tape, other_slot: int) -> None:
        """Have the gradient that a slot has so far wait on another tape, for one of its slots.

        What that tape's walk adds comes after it, as it would if all were on one tape: so sums have the same bits.
        """
        grad = self._pending.pop(slot, None)
        if grad is not None:
            other._pending[other_slot] = grad  # what comes back is this array or a new one: nobody else's either way

    def take_back(self, slot: int, other: Tape, leaf: Tensor) -> None:
        """Take over the gradient that another tape found for one of its leaves."""
        grad = other.grads.pop(leaf, None)
        if grad is not None:
            self._accumulate(slot, grad)

    def leaves(self) -> Iterator[tuple[Tensor, int]]:
        """The tensors that this tape uses and did not make, parameters too, with their slots."""
        yield from self._leaves.items()

    def _deliver(self) -> None:
        """Move the gradients of leaves into `grads`."""
        for t, slot in self._leaves.items():
            if slot in self._pending:
                grad = self._pending.pop(slot)
                self.grads[t] = grad.array() if isinstance(grad, Lazy) else grad

    # -- looking at it ------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes that wait for backward: the sum over distinct arrays that nodes saved, parameters not counted.

        Between the halves of a split backward the gradients that the second one begins with count as well.  A view
        counts as the array whose memory it keeps alive, once.  Where a policy packs, its handles count, if they have
        `nbytes`.
        """
        weights = {id(_owner(array)) for _, array, _, _ in self._weights}
        seen: dict[int, int] = {}
        for array in self.held():
            if hasattr(array, "nbytes"):
                owner = _owner(array)
                seen[id(owner)] = 0 if id(owner) in weights else owner.nbytes
        return sum(seen.values())

    def held(self) -> Iterator[Any]:
        """Everything that waits for backward, an array as often as something holds it."""
        packed = self.policy is not None
        for node in self.nodes:
            yield from node.held(packed)
        for grads in self._made.values():
            yield from (grad for _, grad in grads)
        yield from self._kept.values()

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        lines = [f"%{slot} = {getattr(t, 'name', 'input')}  {t.shape} {t.dtype}" for t, slot in self._leaves.items()]
        return "\n".join([*lines, *map(str, self.nodes)])


def _owner(array: Any) -> Any:
    """The array that owns the memory of a view (a mapped file counts as the first array on it)."""
    while hasattr(getattr(array, "base", None), "nbytes"):
        array = array.base
    return array
