"""What happened, in order.  Backward reads it in reverse.

A tape is a list of nodes.  It belongs to one micro-batch of one stage, and it is walked once:

    with Tape() as tape:
        loss = model(batch)
    for final in tape.backward([(loss, seed)]):
        ...                                          # parameters whose gradient is complete: send them already

`backward` is a generator: overlapping messages with the walk is a `for` loop, stepping through it is the same loop with
a prompt in it.  Since all ranks of an axis run the same program, their tapes hold the same collectives in the same
order, and the reversed lists keep them in step.

Inside of `no_grad` nothing is recorded.

Values have a slot number on their tape, so a tape prints like an assembly listing:

    %7 = gelu(%6)  (8, 512) float32  blocks.3.mlp
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple

from mpitrain.autograd.lazy import Lazy, added
from mpitrain.autograd.node import CONSTANT, Node, SavePolicy, Visit
from mpitrain.autograd.returned import check_gradients
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, is_half
from mpitrain.errors import GraphError
from mpitrain.events import OP_LISTENERS, Event, tell

if TYPE_CHECKING:
    from mpitrain.autograd.function import Function

TAPE: ContextVar[Tape | None] = ContextVar("mpitrain.tape", default=None)
"""The tape that records just now, one a rank; None: nothing is recorded."""

PATH: ContextVar[str] = ContextVar("mpitrain.path", default="")
"""Where in the model the rank is just now (`blocks.3.mlp.down`); modules set it, nodes and events carry it."""

Gradient = Any  # an array, or Lazy
Seed = tuple["Tensor | Slot", Array | float]

SEEDS = "Give a list of pairs: tape.run_backward([(y, gradient)]), each gradient an array of the shape of its y"
"""How a walk back begins, for whoever began it otherwise."""


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
        self._weights: list[tuple[Any, Array | None, Any, int]] = []  # parameter, its array, its writes, how many
        self._views: dict[int, Visit] = {}  # slot -> the weight that comes and goes of which it is a view
        self._fixed_views: weakref.WeakKeyDictionary[Tensor, Visit] = weakref.WeakKeyDictionary()  # of frozen ones
        self._fixed: set[Tensor] = set()  # frozen parameters that ops have used
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
        node.firsts = ()
        slots, wanted, sides = [], [], []
        weights_only = function.weight_side
        visits = False
        for t in inputs:
            if isinstance(t, Tensor) and t.requires_grad:
                if t.is_parameter:
                    visits = visits or t.visits  # type: ignore[attr-defined]
                elif self._views and t.tape is self and t.slot in self._views:
                    visits = True
                slots.append(t.slot if t.tape is self else self._leaf(t, node))
                wanted.append(True)
                sides.append(t.weight_side)
                weights_only = weights_only and t.weight_side
            else:
                if isinstance(t, Tensor) and (t.is_parameter or t in self._fixed_views):
                    visits = self._note_fixed(t) or visits
                slots.append(CONSTANT)
                wanted.append(False)
                sides.append(False)
        node.inputs, node.wanted, node.weight_side = tuple(slots), tuple(wanted), tuple(sides)
        if visits:
            saved = self._noted(saved, inputs, is_op=type(node) is Node)
        if function.saved_for and False in wanted:
            saved = _needed(saved, function.saved_for, wanted)
        node.saved = saved if self.policy is None else self._pack(node, saved, inputs)
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
        weight = inputs[0] if visits and weights_only and len(inputs) == 1 else None
        if weight is not None and weight.is_parameter and _owner(outputs[0].data) is _owner(weight.data):
            self._views[first] = Visit(weight, function, static)
        self.nodes.append(node)

    def _noted(self, saved: tuple[Any, ...], inputs: Sequence[Any], is_op: bool) -> tuple[Any, ...]:
        """What a node saves, with a note in the place of each weight that will not be here all the time.

        Raises:
            GraphError: an op uses such a weight that is not here just now: what stands for it has no memory.  (A
                recomputed function may be around the part whose weight it is.)
        """
        notes: list[tuple[Array, Visit]] = []
        for t in inputs:
            if not isinstance(t, Tensor):
                continue
            if t.is_parameter and t.visits:  # type: ignore[attr-defined]
                if is_op and t.size > 1 and not any(t.data.strides):
                    name = t.name  # type: ignore[attr-defined]
                    raise GraphError(
                        f"{name} is used outside of its part of the model, and with zero 3 it is here only while that"
                        " part works.\nUse it inside of the part's forward, or say in Module.parts which part it is of."
                    )
                notes.append((t.data, Visit(t)))
            elif t.tape is self and t.slot in self._views:
                notes.append((t.data, self._views[t.slot]))
            elif t in self._fixed_views:
                notes.append((t.data, self._fixed_views[t]))
        return tuple([next((note for array, note in notes if array is item), item) for item in saved])

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
                writes, visits = t.writes, t.visits  # type: ignore[attr-defined]
                self._weights.append((t, None if visits else t.data, writes, writes.count))
        return slot

    def _note_fixed(self, t: Any) -> bool:
        """Remember a frozen parameter that an op uses, which must not be written; whether it comes and goes."""
        if not t.is_parameter:
            return True  # a view of one that does
        if t not in self._fixed:
            self._fixed.add(t)
            self._weights.append((t, None if t.visits else t.data, t.writes, t.writes.count))
        return bool(t.visits)

    def see_view(self, t: Any, view: Tensor, function: type[Function], static: dict[str, Any]) -> None:
        """An op that is not recorded has made a view of a frozen parameter, perhaps one that comes and goes."""
        if getattr(t, "is_parameter", False) and t.visits and _owner(view.data) is _owner(t.data):
            self._fixed_views[view] = Visit(t, function, static)

    def mark(self, node: Node) -> None:
        """Append a node that is no operation: backward walks it where it comes to it."""
        self.nodes.append(node)

    def _pack(self, node: Node, saved: tuple[Any, ...], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Hand each array that a node saves to the policy, and with an array that was saved before its handle.

        What lives on anyway stays as it is, for a policy could save no memory, only digits lose: weights, and
        constants, which are the batch's; not masks, which are made of it.  So do numbers, also NumPy's, which ops on
        0-d arrays return.
        """
        assert self.policy is not None
        living = [t.data for t in inputs if isinstance(t, Tensor) and (t.weight_side or not t.requires_grad)]
        living += [t for t in inputs if not isinstance(t, Tensor)]
        handles = []
        for place, array in enumerate(saved):
            packs = hasattr(array, "nbytes") and array.shape
            if not packs or (array.dtype != bool and any(array is other for other in living)):
                handles.append((False, array))
                continue
            known = self._packed.get(id(array))
            if known is None or known[0]() is not array:
                handle = self.policy.pack(node, place, array)
            else:
                handle = self.policy.share(node, place, array, known[1])
            self._packed[id(array)] = (weakref.ref(array), handle)
            handles.append((True, handle))
        return tuple(handles)

    def saved_of(self, node: Node) -> tuple[Any, ...]:
        """What a node saved, as it was."""
        policy = self.policy
        if policy is None:
            saved = tuple(node.saved)
        else:
            saved = tuple(
                policy.unpack(node, place, handle) if packed else handle
                for place, (packed, handle) in enumerate(node.saved)
            )
        return tuple([item.array if type(item) is Visit else item for item in saved])

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
                the tensor's `slot` serves as well.  A gradient is an array of the tensor's shape; of a tensor that is
                one number without dims a number.

        Yields:
            After each node the parameters whose gradient is now final (often none): those that were first used in
            it.  Exhaust the generator (`run_backward` does) or the walk is not done.

        Raises:
            GraphError: a seed is no such pair, is not on this tape or has another shape; the tape was walked before;
                a parameter's array was written between forward and backward.
            ConfigError: the backward of an operation returned something else than one gradient an input.
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
        given = list(self._checked(seeds))
        self._check_weights()
        self._walked = walk
        self._packed.clear()  # nodes alone hold what waits from here on, so it goes with them
        for slot, grad in given:
            self._accumulate(slot, grad)

    def _checked(self, seeds: Any) -> Iterator[tuple[int, Gradient]]:
        """The seeds by their slots; nothing was walked if one is refused."""
        if isinstance(seeds, (Tensor, Slot)):
            raise GraphError(f"a {type(seeds).__name__} is no list of seeds.\n{SEEDS}")
        for seed in seeds:
            is_pair = isinstance(seed, (tuple, list)) and len(seed) == 2 and isinstance(seed[0], (Tensor, Slot))
            if not is_pair:
                raise GraphError(f"a {type(seed).__name__} is no seed, which is (tensor, gradient).\n{SEEDS}")
            t, grad = seed
            slot = t if isinstance(t, Slot) else self.slot(t)
            if slot is None:
                raise GraphError(f"a seed of shape {t.shape} is not on this tape: nothing that was recorded made it")
            if isinstance(grad, (int, float)) and isinstance(t, Tensor) and not hasattr(grad, "shape") and not t.shape:
                grad = array_module(t.data).asarray(grad, t.dtype)
            if isinstance(grad, Tensor) or not hasattr(grad, "shape"):
                what = f"the gradient of a tensor of shape {t.shape} is a {type(grad).__name__}, which is no array"
                raise GraphError(f"{what}.\n{SEEDS}")
            if tuple(grad.shape) != t.shape:
                raise GraphError(f"the seed of a tensor of shape {t.shape} has shape {tuple(grad.shape)}")
            yield slot.number, grad

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
                    # Where nothing else is wanted W does all of it, unless that had weights come once more.
                    kept = not (node.function.undivided and (True in of_inputs or _notes_a_weight(node)))
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
        saved = node.saved
        if self.policy is not None or any(type(item) is Visit for item in saved):
            saved = self.saved_of(node)
        listeners = OP_LISTENERS.get()
        if listeners:
            name = f"{node.function.title()}.backward"
            info = {"path": node.path, "function": node.function, "grad": grad, "wanted": wanted}
            info |= {"tape": self, "node": node, "saved": saved}
            tell(listeners, Event("op", "begin", name, info))
            grads = node.function.backward(grad, *saved, wanted=wanted, **node.static)
            tell(listeners, Event("op", "end", name, {**info, "grads": grads}))
        else:
            grads = node.function.backward(grad, *saved, wanted=wanted, **node.static)
        if type(grads) is not tuple or len(grads) != len(wanted):
            check_gradients(node.function.__name__, grads, len(wanted))
        for slot, g, want in zip(node.inputs, grads, wanted):  # noqa: B905 - strict takes 0.5 us
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
        weights = {id(_owner(array)) for _, array, _, _ in self._weights if array is not None}
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


def _needed(saved: tuple[Any, ...], saved_for: Mapping[int, int], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """What forward saved, without what only gradients need that nobody wants."""
    return tuple(
        [None if place in saved_for and not wanted[saved_for[place]] else item for place, item in enumerate(saved)]
    )


def _notes_a_weight(node: Node) -> bool:
    """Whether backward of a node needs a weight that is here only while it is used."""
    return any(type(part) is Visit for item in node.saved for part in (item if type(item) is tuple else (item,)))


def _owner(array: Any) -> Any:
    """The array that owns the memory of a view (a mapped file counts as the first array on it)."""
    while hasattr(getattr(array, "base", None), "nbytes"):
        array = array.base
    return array
