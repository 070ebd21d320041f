"""Bugs that saving memory is known for: the part of `mutations.py` about recomputation, kept scores, scaled gradients.

They are looked for in float64, where scales change nothing and a skipped step is made by hand: in the steps that the
option `overflow` concerns, the gradient of the parameter that it names is too large for its square.  With `spread`
every branch has another scale.  What only rounding to halves can show is in mutations_halves.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from mutations import bug, put

from mpitrain.autograd.carry import Carry
from mpitrain.autograd.inner import Inner
from mpitrain.autograd.ops import branch
from mpitrain.autograd.ops.attention import Attention
from mpitrain.autograd.recompute import Recomputed, recomputing
from mpitrain.autograd.tape import Tape
from mpitrain.comm.world import world
from mpitrain.models import transformer
from mpitrain.optim import adafactor, optimizer
from mpitrain.optim.scaler import BlockScaler, LossScaler
from mpitrain.parallel import tensor
from mpitrain.parallel.data import FlatReducer
from mpitrain.pipeline import update
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.update import Update

# ------------------------------------------------------------------------------------------------------- recomputation


def blind() -> Any:
    """A second forward is not compared with the first, which would find most of this at once and name the module."""
    return put(Recomputed, "_compare", lambda self, again, outputs: None)


@contextlib.contextmanager
def second_forward(change: Callable[[Any], Any]) -> Iterator[None]:
    """Blocks that are made again are given something else than the first time: change(pass)."""
    whole = transformer.Block.forward

    def forward(self: Any, x: Any, this: Any) -> Any:
        return whole(self, x, change(this) if recomputing() else this)

    with blind(), put(transformer.Block, "forward", forward):
        yield


@bug("a second forward draws from np.random", "tp2,full", "C59", dropout=0.3)
def _() -> Iterator[None]:
    random = np.random.default_rng(5)
    with second_forward(lambda this: this._replace(stream=this.stream._replace(step=int(random.integers(9, 999))))):
        yield


@bug("a second forward draws the next masks of its stream", "pp2,gpipe,full", "C59", dropout=0.3, microbatches=2)
def _() -> Iterator[None]:
    with second_forward(lambda this: this._replace(stream=this.stream._replace(step=this.stream.step + 1))):
        yield


@bug("a second forward drops attention by the masks of another step", "cp2,full", "C59", dropout=0.3)
def _() -> Iterator[None]:
    with second_forward(lambda this: this._replace(draw=this.draw._replace(step=this.draw.step + 1))):
        yield


@bug("a second forward drops nothing", "dp2,full", "C59", dropout=0.3)
def _() -> Iterator[None]:
    with second_forward(lambda this: this._replace(stream=None, draw=None)):
        yield


@bug("a second forward has lost the name of its stream", "dp2,full", "C36, C59", dropout=0.3)
def _() -> Iterator[None]:
    whole = transformer.Block.forward

    def nameless(self: Any, x: Any, this: Any) -> Any:
        if not recomputing():
            return whole(self, x, this)
        with put(self.drop1, "name", ""), put(self.drop2, "name", ""):
            return whole(self, x, this)

    with blind(), put(transformer.Block, "forward", nameless):
        yield


@bug("a second forward leaves out the sum over tp", "tp2,full", "T19.4")
def _() -> Iterator[None]:
    leave = tensor.leave
    with blind(), put(tensor, "leave", lambda y, *how: y if recomputing() else leave(y, *how)):
        yield


@bug("a second forward starts from the inputs of another micro-batch", "pp2,full", microbatches=2)
def _() -> Iterator[None]:
    saved_of, kept = Tape.saved_of, {}

    def first(self: Tape, node: Any) -> Any:
        saved = saved_of(self, node)
        return kept.setdefault((world().rank, node.path), saved) if isinstance(node, Recomputed) else saved

    with blind(), put(Tape, "saved_of", first):
        yield


@bug("the inputs of a recomputed block are kept in float32", "dp2,full")
def _() -> Iterator[None]:
    saved_of = Tape.saved_of

    def rounded(self: Tape, node: Any) -> Any:
        saved = saved_of(self, node)
        return tuple(a.astype(np.float32).astype(a.dtype) for a in saved) if isinstance(node, Recomputed) else saved

    with blind(), put(Tape, "saved_of", rounded):
        yield


@bug("PipeDream makes a block again with its newest weights", "pp2,pipedream,full", "T8.1", clip=0.0)
def _() -> Iterator[None]:
    with blind(), put(Recomputed, "_own_weights", lambda self: contextlib.nullcontext()):
        yield


@bug("2BW makes a block again with its newest weights", "pp2,pipedream-2bw,full", "T8.4", microbatches=2)
def _() -> Iterator[None]:
    with blind(), put(Recomputed, "_own_weights", lambda self: contextlib.nullcontext()):
        yield


def _again(change: Callable[[Recomputed, Any], Any]) -> Any:
    """`Recomputed._run_again` with something done to the seeds that it gives: change(node, seeds)."""
    whole = Recomputed._run_again
    return put(Recomputed, "_run_again", lambda self, tape, grads: change(self, whole(self, tape, grads)))


@bug("gradients of what a recomputed block finds by itself are lost", "pp2,terapipe,full", "15.1")
def _() -> Iterator[None]:
    def given_only(node: Recomputed, seeds: Any) -> Any:
        given = {place.number for place in node.places if place is not None}
        node._leaves = [leaf for leaf in node._leaves if leaf.outer in given]
        return seeds

    with _again(given_only):
        yield


@bug("gradients of what a recomputed block hands out are lost", "pp2,terapipe,full", "15.1")
def _() -> Iterator[None]:
    with _again(lambda node, seeds: seeds[:1]):
        yield


@bug("the first gradient of a recomputed block comes in twice", "tp2,full")
def _() -> Iterator[None]:
    with _again(lambda node, seeds: [*seeds[:1], *seeds]):
        yield


def walked(walk: Callable[..., Iterator[Any]]) -> Any:
    """Another walk of a recomputed node: walk(whole, node, tape, grad, half)."""
    return put(Recomputed, "walk", partial_method(walk, Recomputed.walk))


def partial_method(function: Callable[..., Any], first: Any) -> Callable[..., Any]:
    """A method that gives `function` something before itself."""
    return lambda self, *args: function(first, self, *args)


@bug("a recomputed block says that its gradients are final before it has walked", "dp2,full", "T2.4",
     reducer="bucketed", bucket_mib=0.001)  # fmt: skip
def _() -> Iterator[None]:
    def early(whole: Any, self: Any, tape: Any, grad: Any, half: str) -> Iterator[Any]:
        if half != "inputs":
            yield tuple(self.firsts)
        yield from whole(self, tape, grad, half)

    with walked(early):
        yield


@bug("W of a recomputed block is left out", "pp2,zb-h1,full", microbatches=2)
def _() -> Iterator[None]:
    def without(whole: Any, self: Any, tape: Any, grad: Any, half: str) -> Iterator[Any]:
        if half != "weights":
            yield from whole(self, tape, grad, half)

    with walked(without):
        yield


@bug("a recomputed part of a recomputed block is not walked", "tp2,full", recompute_modules="blocks.*.mlp")
def _() -> Iterator[None]:
    def outermost(whole: Any, self: Any, tape: Any, grad: Any, half: str) -> Iterator[Any]:
        if not isinstance(tape, Inner):
            yield from whole(self, tape, grad, half)

    with walked(outermost):
        yield


@bug("gradients of a recomputed block overwrite those of the micro-batch before", "pp2,full", microbatches=2)
def _() -> Iterator[None]:
    def fresh(whole: Any, self: Any, tape: Any, grad: Any, half: str) -> Iterator[Any]:
        for p in self.firsts:
            p.touched = False
        yield from whole(self, tape, grad, half)

    with walked(fresh):
        yield


@bug("a slice that is made again moves what slices hand on", "pp2,terapipe,full")
def _() -> Iterator[None]:
    with put(Carry, "_runs_again", property(lambda self: False)):
        yield


@bug("ranks beside each other make other blocks again", "tp2,full")
def _() -> Iterator[None]:
    init = Executor.__init__

    def odd(self: Executor, model: Any, *args: Any, **how: Any) -> None:
        model.blocks[0].recompute = model.blocks[0].recompute and world().rank == 0
        init(self, model, *args, **how)

    with put(Executor, "__init__", odd):
        yield


# --------------------------------------------------------------------------------------------------------- kept scores


def _scores(change: Callable[[Any], Any]) -> Any:
    """Backward of attention with something done to the scores that forward has kept."""
    attention = import_module(Attention.__module__)  # `ops.attention` is the function of that name
    whole = attention.attend_backward

    def backward(*arrays: Any, scores: Any = None, **how: Any) -> None:
        whole(*arrays, scores=None if scores is None else change(scores), **how)

    return put(attention, "attend_backward", backward)


@bug("kept scores are those of the next head", "tp2,none", "T19.2")
def _() -> Iterator[None]:
    with _scores(lambda scores: np.roll(scores, 1, axis=1)):
        yield


@bug("kept scores are those of the next row of the batch", "dp2,none", "T19.2")
def _() -> Iterator[None]:
    with _scores(lambda scores: np.roll(scores, 1, axis=0)):
        yield


@bug("kept scores were not scaled", "tp2,none", "T19.2")
def _() -> Iterator[None]:
    with _scores(lambda scores: scores * 2.0):  # by the root of a head's width, which is 4
        yield


@bug("kept scores are float32", "tp2,none", "T19.2")
def _() -> Iterator[None]:
    with _scores(lambda scores: scores.astype(np.float32).astype(scores.dtype)):
        yield


@bug("kept scores are not masked", "dp2,none", "T19.2")
def _() -> Iterator[None]:
    module = import_module(Attention.__module__)
    whole = module.attend_backward

    def unmasked(*arrays: Any, scores: Any, **how: Any) -> None:
        whole(*arrays, scores=scores, **{**how, "causal": how["causal"] and scores is None})

    with put(module, "attend_backward", unmasked):
        yield


@bug("all layers keep their scores in one buffer", "pp2,none", "T19.2", layers=4)
def _() -> Iterator[None]:
    whole, buffers = Attention.forward, {}

    def shared(*arrays: Any, **how: Any) -> Any:
        y, (*saved, scores) = whole(*arrays, **how)
        if scores is not None:
            buffer = buffers.setdefault((world().rank, scores.shape), scores)
            buffer[...] = scores
            scores = buffer
        return y, (*saved, scores)

    with put(Attention, "forward", shared):
        yield


# ----------------------------------------------------------------------------------------------------------- one scale

SCALED = {"loss_scaling": "dynamic", "loss_scale": 1024.0}
GROWING = {**SCALED, "loss_scale_window": 1}
OVERFLOW = {**SCALED, "overflow": "blocks.0.mlp.up.weight", "steps": 4}


@bug("the scale is not taken off", "tp2", "T21.4", **SCALED)
def _() -> Iterator[None]:
    with put(LossScaler, "inverse", lambda self, group: 1.0):
        yield


@bug("gradients are clipped before the scale is taken off", "dp2", "T28.3", clip=0.01, **SCALED)
def _() -> Iterator[None]:
    whole = update.coefficient
    with put(update, "coefficient", lambda norm, limit: whole(norm * SCALED["loss_scale"], limit)):
        yield


@bug("the norm is that of scaled gradients", "tp2", "T28.3", clip=0.01, **SCALED)
def _() -> Iterator[None]:
    whole = Update._measure
    with put(Update, "_measure", lambda self, inverses, *of: whole(self, [1.0] * len(inverses), *of)):
        yield


@bug("the scale grows on one rank only", "dp2", "C18", **GROWING)
def _() -> Iterator[None]:
    whole = LossScaler.settle
    with put(LossScaler, "settle", lambda self, bad: whole(self, bad) if world().rank == 0 else None):
        yield


@bug("gradients are divided by the scale of the next step", "pp2", "T21.4", **GROWING)
def _() -> Iterator[None]:
    whole = Update._rescale

    def late(self: Update, inverses: Any, clipped: float) -> None:
        whole(self, [self._scaler.inverse(0)], clipped)

    with put(Update, "_rescale", late):
        yield


@bug("the scale grows with every update", "tp2", "T21.2", **SCALED)
def _() -> Iterator[None]:
    whole = LossScaler.settle

    def grown(self: LossScaler, bad: Any) -> Any:
        self.scale *= 2.0
        return whole(self, bad)

    with put(LossScaler, "settle", grown):
        yield


class Told:
    """A mesh whose world says something else when ranks agree: change(mesh, what I said, what all said)."""

    def __init__(self, mesh: Any, change: Any) -> None:
        self._mesh, self._change = mesh, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    @property
    def world(self) -> Told:
        """Itself."""
        return Told(self._mesh.world, partial(self._change, self._mesh))

    def all_reduce(self, mine: Any) -> Any:
        """The sum, changed."""
        found = self._mesh.all_reduce(mine.copy())
        return self._change(mine, found)


def _agreed(change: Callable[[Any, Any], Any]) -> Any:
    """Ranks agree on other flags: change(mesh, mine) gives them."""
    whole = Update._agree

    def flags(mesh: Any, mine: Any, found: Any) -> Any:
        found[2:-1] = change(mesh, mine[2:-1].copy())
        return found

    def agree(self: Update, *numbers: Any) -> Any:
        mesh, self._mesh = self._mesh, Told(self._mesh, flags)
        try:
            return whole(self, *numbers)
        finally:
            self._mesh = mesh

    return put(Update, "_agree", agree)


@bug("every rank decides by itself whether it skips a step", "tp2", "C18", **OVERFLOW)
def _() -> Iterator[None]:
    with _agreed(lambda mesh, mine: mine):
        yield


@bug("the first rank decides for all whether they skip a step", "tp2", "C18", **OVERFLOW)
def _() -> Iterator[None]:
    with _agreed(lambda mesh, mine: mesh.world.exchange(mine.tolist())[0]):
        yield


@bug("whether a step is skipped is agreed on over dp only", "dp2,tp2", "C18, T28.4", **OVERFLOW)
def _() -> Iterator[None]:
    with _agreed(lambda mesh, mine: mesh.dp.all_reduce(mine)):
        yield


@bug("every stage decides by itself whether it skips a step", "pp2", "C18, T28.4", **OVERFLOW)
def _() -> Iterator[None]:
    with _agreed(lambda mesh, mine: mesh.dp.all_reduce(mesh.tp.all_reduce(mine))):
        yield


@bug("gradients are looked at before they are summed", "dp2", "C20, T21.3", **OVERFLOW)
def _() -> Iterator[None]:
    finish, measure, early = FlatReducer.finish, Update._measure, {}

    def looking(self: FlatReducer) -> None:
        early[world().rank] = [
            not np.isfinite(np.vdot(p.grad, p.grad)) for flat, _ in self._work for p in flat.parameters if p.touched
        ]
        finish(self)

    def measured(self: Update, inverses: Any, *losses: Any) -> Any:
        mine = measure(self, inverses, *losses)
        mine[2:-1] = any(early[world().rank])
        return mine

    with put(FlatReducer, "finish", looking), put(Update, "_measure", measured):
        yield


@bug("the rank whose gradients overflow leaves before the others know", "dp2,tp2", "C18", **OVERFLOW)
def _() -> Iterator[None]:
    whole = Update._agree

    def leaves(self: Update, *numbers: Any) -> Any:
        if any(self._measure([1.0])[2:-1]):
            self._scaler.settle([True])
            return update.StepReport(0.0, float("nan"), 0.0, 0, True)
        return whole(self, *numbers)

    with put(Update, "_agree", leaves):
        yield


@contextlib.contextmanager
def skipping(what: Callable[[Update], None]) -> Iterator[None]:
    """A step that is skipped does something nevertheless."""
    whole = Update.make

    def make(self: Update, *numbers: Any) -> Any:
        report = whole(self, *numbers)
        if report is not None and report.skipped:
            what(self)
        return report

    with put(Update, "make", make):
        yield


@bug("a skipped step counts as an update", "dp2", "T21.3", **OVERFLOW)
def _() -> Iterator[None]:
    def count(self: Update) -> None:
        self._optimizer.updates += 1

    with skipping(count):
        yield


@bug("a skipped step moves the moments", "tp2", "T21.3", **OVERFLOW)
def _() -> Iterator[None]:
    def decay(self: Update) -> None:
        for array in self._optimizer.state_dict()["first_moment"].values():
            array *= 0.9

    with skipping(decay):
        yield


@bug("a skipped step lets the weights decay", "pp2", "T21.3", **OVERFLOW)
def _() -> Iterator[None]:
    def decay(self: Update) -> None:
        for p in self._parameters:
            p.master[...] *= 1.0 - 1e-4

    with skipping(decay):
        yield


@bug("a skipped step takes its gradient along to the next", "pp2", "T21.3", **OVERFLOW)
def _() -> Iterator[None]:
    start, skipped = Executor._run_row, set()

    def note(self: Update) -> None:
        skipped.add(id(self._model))

    def row(self: Executor, batches: Any) -> Any:
        if id(self.model) not in skipped:
            return start(self, batches)
        for p in self.model.parameters():
            p.grad[...] = np.where(np.abs(p.grad) < 1e100, p.grad, 0.0)
        with put(self.model, "start_step", lambda: None):
            return start(self, batches)

    with skipping(note), put(Executor, "_run_row", row):
        yield


@contextlib.contextmanager
def attempts(use: Callable[[Update, int], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """A step is made knowing how many were skipped before it: use(update, skipped) is on around it."""
    whole, skipped = Update.make, Counter()

    def make(self: Update, *numbers: Any) -> Any:
        with use(self, skipped[self]):
            report = whole(self, *numbers)
        skipped[self] += report is not None and report.skipped
        return report

    with put(Update, "make", make):
        yield


@bug("the learning rate goes on in skipped steps", "dp2", "T21.3", **OVERFLOW)
def _() -> Iterator[None]:
    def rates(self: Update, skipped: int) -> Any:
        whole = self._lr
        return put(self, "_lr", lambda updates: whole(updates + skipped))

    with attempts(rates):
        yield


def _of_attempts() -> Any:
    """Corrections of the optimizer go by attempts."""

    def counted(self: Update, skipped: int) -> Any:
        method = self._optimizer
        whole = method._update_all

        def update_all(lr: float) -> None:
            method.updates += skipped
            whole(lr)
            method.updates -= skipped

        return put(method, "_update_all", update_all)

    return attempts(counted)


@bug("AdamW corrects its moments by the number of attempts", "dp1,none", "T21.3", **OVERFLOW)
def _() -> Iterator[None]:
    with _of_attempts():
        yield


@bug("Adafactor's beta2 goes by the number of attempts", "dp1,none", "T25.3", optimizer="adafactor", **OVERFLOW)
def _() -> Iterator[None]:
    with _of_attempts():
        yield


@bug("every group of ranks lowers the scale once", "dp2", "T21.2", **OVERFLOW)
def _() -> Iterator[None]:
    whole = LossScaler.settle

    def twice(self: LossScaler, bad: Any) -> Any:
        if any(bad):
            whole(self, bad)
        return whole(self, bad)

    with put(LossScaler, "settle", twice):
        yield


@bug("the scale that overflows is not lowered", "tp2", "T21.2", **OVERFLOW)
def _() -> Iterator[None]:
    whole = LossScaler.settle
    with put(LossScaler, "settle", lambda self, bad: None if any(bad) else whole(self, bad)):
        yield


# ------------------------------------------------------------------------------------------------- scales of branches

BLOCKS = {"loss_scaling": "blocks", "spread": True}
BLOCKS_OVERFLOW = {**BLOCKS, "overflow": "blocks.0.mlp.up.weight", "steps": 4}


@bug("the scale of a branch is taken off twice", "tp2", "T22.1", **BLOCKS)
def _() -> Iterator[None]:
    whole = BlockScaler.inverse
    with put(BlockScaler, "inverse", lambda self, group: whole(self, group) ** 2):
        yield


@bug("the scale of a branch is not taken off", "pp2", "T22.1", **BLOCKS)
def _() -> Iterator[None]:
    with put(BlockScaler, "inverse", lambda self, group: 1.0):
        yield


@bug("the scale of the branch beside it is taken off", "dp2", "T22.1", **BLOCKS)
def _() -> Iterator[None]:
    whole = BlockScaler.inverse
    with put(BlockScaler, "inverse", lambda self, group: whole(self, max(1, group - 1)) if group else 1.0):
        yield


@bug("the stream behind a branch carries its scale", "tp2", "T22.1", **BLOCKS)
def _() -> Iterator[None]:
    with put(branch.EnterBranch, "backward", lambda grad, outside, **how: (grad,)):
        yield


@bug("a branch gets the scale of the one beside it", "dp2", "T22.1", **BLOCKS)
def _() -> Iterator[None]:
    whole = branch.LeaveBranch.backward

    def beside(grad: Any, inside: Any, *, branch: int, **how: Any) -> Any:
        return whole(grad, inside, branch=branch ^ 1, **how)

    with put(branch.LeaveBranch, "backward", beside):
        yield


@bug("branches are numbered from each stage's first block", "pp2", "T22.1", **BLOCKS)
def _() -> Iterator[None]:
    init = Executor.__init__

    def local(self: Executor, model: Any, *args: Any, **how: Any) -> None:
        for number, block in enumerate(model.blocks):
            block.number = number
        init(self, model, *args, **how)

    with put(Executor, "__init__", local):
        yield


@bug("what is kept in full counts as part of its branch", "tp2", "T22.1", **BLOCKS)
def _() -> Iterator[None]:
    def by_name(self: BlockScaler, p: Any) -> int:
        return next((k for k, name in enumerate(self.branches, start=1) if p.name.startswith(name)), 0)

    with put(BlockScaler, "group", by_name):
        yield


@bug("squares in the norm are divided by the scale once", "dp2", "T28.3", clip=0.01, **BLOCKS)
def _() -> Iterator[None]:
    whole = Update._measure
    with put(Update, "_measure", lambda self, inverses, *of: whole(self, [*map(np.sqrt, inverses)], *of)):
        yield


@bug("scales of branches grow on one rank only", "dp2", "C18", **BLOCKS)
def _() -> Iterator[None]:
    whole = BlockScaler.settle
    with put(BlockScaler, "settle", lambda self, bad: whole(self, bad) if world().rank == 0 else None):
        yield


@bug("one branch that overflows lowers the scales of all", "tp2", "T22.2", **BLOCKS_OVERFLOW)
def _() -> Iterator[None]:
    whole = BlockScaler.settle
    with put(BlockScaler, "settle", lambda self, bad: whole(self, [any(bad)] * len(bad))):
        yield


@bug("a branch that overflows is skipped on its own rank only", "pp2", "C18", **BLOCKS_OVERFLOW)
def _() -> Iterator[None]:
    with _agreed(lambda mesh, mine: mine):
        yield


# ----------------------------------------------------------------------------------------- groups and Adafactor's step

FACTORED = {"optimizer": "adafactor", "lr": 0.02}


def _course(
    first: Callable[..., Any] = lambda own, *_: own, second: Callable[..., Any] = lambda own, found: found
) -> Any:
    """Adafactor's update with other summands (first(own, weights, hyper)) or another root mean square of directions."""
    whole = adafactor.update

    def course(p: Any, g: Any, state: Any, hyper: Any, shape: Any, counts: bool = True) -> Iterator[Any]:
        inner = whole(p, g, state, hyper, shape, counts)
        own = inner.send((yield first(next(inner), p, hyper)))
        with contextlib.suppress(StopIteration):
            inner.send(second(own, (yield own)))

    return put(adafactor, "update", course)


@bug("alpha is the size of weights that have decayed already", "tp2", "T25.2", **FACTORED)
def _() -> Iterator[None]:
    def decayed(own: Any, p: Any, hyper: Any) -> Any:
        return {**own, "tensor": own["tensor"] * (1.0 - hyper.lr * hyper.weight_decay) ** 2}

    with _course(decayed):
        yield


@bug("directions are clipped by the size of those of a shard", "tp2", "T25.6", **FACTORED)
def _() -> Iterator[None]:
    def of_shard(own: Any, found: Any) -> Any:
        return {"tensor": own["tensor"] * (2 if own["tensor"] != found["tensor"] else 1)}

    with _course(second=of_shard):
        yield


@bug("column sums are summed over ranks that hold the same columns", "dp2", "T25.6", **FACTORED)
def _() -> Iterator[None]:
    def doubled(own: Any, p: Any, hyper: Any) -> Any:
        return {**own, "columns": own["columns"] * 2} if "columns" in own else own

    with _course(doubled):
        yield


def _treated(change: Callable[..., Any]) -> Any:
    """Parameters are treated in another way: change(parameters, treatments, groups)."""
    whole = optimizer.treatments

    def treatments(parameters: Any, groups: Any, weight_decay: float) -> Any:
        parameters = list(parameters)
        return change(parameters, whole(parameters, groups, weight_decay), groups)

    return put(optimizer, "treatments", treatments)


@bug("biases and norms decay as well", "tp2", "T25.2", **FACTORED)
def _() -> Iterator[None]:
    with _treated(lambda parameters, found, groups: [each._replace(decay=0.1) for each in found]):
        yield


GROUPS = {"lr_groups": "table.*=0.5,blocks.1.*=0.25,*.bias=2"}


@bug("the factor of a group goes to the parameter beside it", "pp2", **GROUPS)
def _() -> Iterator[None]:
    def beside(parameters: Any, found: Any, groups: Any) -> Any:
        rates = [each.rate for each in found]
        return [each._replace(rate=rate) for each, rate in zip(found, rates[1:] + rates[:1], strict=True)]

    with _treated(beside):
        yield


@bug("the last pattern that matches wins", "dp2", **GROUPS)
def _() -> Iterator[None]:
    whole = optimizer.treatments
    with put(optimizer, "treatments", lambda parameters, groups, decay: whole(parameters, groups[::-1], decay)):
        yield


@bug("patterns are looked for in the names of this rank only", "pp2", **GROUPS)
def _() -> Iterator[None]:
    whole = optimizer.check_groups
    with put(optimizer, "check_groups", lambda groups, names, everyone: whole(groups, names, None)):
        yield


@bug("patterns count blocks from the first of a stage", "pp2", optimizer="sgd", **GROUPS)
def _() -> Iterator[None]:
    def local(parameters: Any, found: Any, groups: Any) -> Any:
        numbers = list(dict.fromkeys(p.name.split(".")[1] for p in parameters if p.name.startswith("blocks.")))
        quarter = {p.name for p in parameters if numbers[1:] and p.name.startswith(f"blocks.{numbers[1]}.")}
        return [
            each._replace(rate=0.25 if p.name in quarter else 1.0 if each.rate == 0.25 else each.rate)
            for p, each in zip(parameters, found, strict=True)
        ]

    with _treated(local):
        yield


@bug("a group's factor does not reach Adafactor", "tp2", **FACTORED, **GROUPS)
def _() -> Iterator[None]:
    with _treated(lambda parameters, found, groups: [each._replace(rate=1.0) for each in found]):
        yield
