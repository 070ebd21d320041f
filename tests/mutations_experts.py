"""Bugs that mixtures of experts are known for: the part of `mutations.py` about routing, experts and their axis.

Each stands in a model with experts in both blocks, unless its options say otherwise; `documents` packs several into a
row and pads its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from mutations import bug, put
from mutations_memory import blind

from mpitrain import collectives, rng
from mpitrain.autograd import lazy, ops
from mpitrain.autograd.ops import experts as expert_ops
from mpitrain.autograd.recompute import recomputing
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.alone import Alone
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.world import World, world
from mpitrain.models import transformer
from mpitrain.parallel.data import FlatReducer
from mpitrain.parallel.expert import assign as assigning
from mpitrain.parallel.expert import experts, moe, overlap, router
from mpitrain.pipeline import executor
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.update import Update
from mpitrain.rng import Draw
from mpitrain.routing import Routing
from mpitrain.spec import Spec

SWITCH: dict[str, Any] = {"experts": 4, "capacity_factor": 1.0, "balance_loss": 0.1}
GSHARD: dict[str, Any] = {"experts": 4, "top_k": 2, "capacity_factor": 1.0, "balance_loss": 1.6}
TOP_2: dict[str, Any] = {**GSHARD, "router": "topk", "balance_loss": 0.1}
SIX: dict[str, Any] = {**SWITCH, "experts": 6, "capacity_factor": 1.25}
SPREAD, DENSE = "dp2,ep2", "dp2"

# ------------------------------------------------------------------------------------------------- gradients of experts


def summed(change: Callable[[Any, Communicator], None]) -> Any:
    """Something is done to the buffers of experts after their sum: change(flat, its axis)."""
    finish = FlatReducer.finish

    def changed(self: Any) -> None:
        finish(self)
        for flat, axis in self._work:
            if "ep" not in flat.axes:
                change(flat, axis)

    return put(FlatReducer, "finish", changed)


def times(factor: Callable[[Any, Communicator], float]) -> Any:
    def scale(flat: Any, axis: Communicator) -> None:
        flat.grads *= factor(flat, axis)

    return summed(scale)


@bug("gradients of experts are a mean over those who share them", "dp4,ep2", "C48, T16.4", **SWITCH)
def _() -> Iterator[None]:
    with times(lambda flat, axis: 1 / axis.size):
        yield


@bug("gradients of experts are a mean over all of dp", SPREAD, "C48", **SWITCH)
def _() -> Iterator[None]:
    with times(lambda flat, axis: 1 / 2):
        yield


@bug("gradients of experts are summed over all of dp", SPREAD, "C48, 16.3", **SWITCH)
def _() -> Iterator[None]:
    axes = Spec.replicate_axes
    with put(Spec, "replicate_axes", lambda self: ("edp", "ep", *(a for a in axes(self) if a not in ("edp", "ep")))):
        yield


@bug("gradients of experts are not summed over those who share them", "dp4,ep2", "16.3", seen=True, **SWITCH)
def _() -> Iterator[None]:
    axes = Spec.replicate_axes

    def without(self: Spec) -> tuple[str, ...]:
        return tuple(axis for axis in axes(self) if axis != "edp" or "ep" in axes(self))

    with put(Spec, "replicate_axes", without):
        yield


@bug(
    "an expert without a token keeps what was in its gradient",
    SPREAD,
    "C53",
    microbatches=4,
    **{**SWITCH, "experts": 16},
)
def _() -> Iterator[None]:
    write = lazy.GroupedProduct.write

    def only_some(self: Any, out: Any, add: bool) -> None:
        before = out.copy()
        write(self, out, add)
        empty = [group for group, count in enumerate(self.counts) if not count]
        out[empty] = before[empty]

    with put(lazy.GroupedProduct, "write", only_some):
        yield


@bug("the norm counts the experts of the first rank of ep only", SPREAD, "C28, T28.1", clip=0.01, **SWITCH)
def _() -> Iterator[None]:
    counts = Update._counts
    with put(Update, "_counts", lambda self, p: counts(self, p) and self._mesh.coords["ep"] == 0):
        yield


@bug("initial experts are those of the first rank", SPREAD, "C36", **SWITCH)
def _() -> Iterator[None]:
    normal = rng.normal

    def first(seed: int, name: str, full_shape: Any, slab: Any) -> np.ndarray:
        if ".experts." in name:
            slab = (slice(0, slab[0].stop - slab[0].start), *slab[1:])
        return normal(seed, name, full_shape, slab)

    with put(rng, "normal", first):
        yield


# ------------------------------------------------------------------------------------------------- losses of the router


def seeded(factor: Callable[[float], float]) -> Any:
    """Losses of routers come into backward with another weight."""
    whole = executor.seeds_of
    return put(executor, "seeds_of", lambda losses, scale: whole(losses, factor(scale)))


@bug("the router's losses are dropped", DENSE, "C50", **SWITCH)
def _() -> Iterator[None]:
    with put(executor, "seeds_of", lambda losses, scale: []):
        yield


@bug("the router's losses are a mean over the rows of a rank", DENSE, "C50", **SWITCH)
def _() -> Iterator[None]:
    with seeded(lambda scale: scale * world().size):
        yield


@bug("the router's losses are a mean over ranks once more", SPREAD, "C50", **SWITCH)
def _() -> Iterator[None]:
    with seeded(lambda scale: scale / world().size):
        yield


@bug("the router's losses are those of one micro-batch each", "tp2", "C50", microbatches=2, **SWITCH)
def _() -> Iterator[None]:
    with seeded(lambda scale: scale * 2):
        yield


@bug("the router's losses are divided by tokens", "pp2", "16.4", microbatches=2, **SWITCH)
def _() -> Iterator[None]:
    with seeded(lambda scale: scale / 16):
        yield


@bug(
    "the router's losses lack the scale of gradients", DENSE, "C50", loss_scaling="static", loss_scale=1024.0, **SWITCH
)
def _() -> Iterator[None]:
    with seeded(lambda scale: scale / 1024.0):
        yield


@bug("rows of a step are counted on every rank of cp", "cp2", "C50", **SWITCH)
def _() -> Iterator[None]:
    count = Executor._count

    def every(self: Executor, number: int, run: Any) -> None:
        count(self, number, run)
        run.rows[number] *= self.mesh.cp.size

    with put(Executor, "_count", every):
        yield


@bug("rows that are padding count in the mean over rows", DENSE, "16.5", empty_rows=True, **SWITCH)
def _() -> Iterator[None]:
    count = Executor._count

    def every(self: Executor, number: int, run: Any) -> None:
        count(self, number, run)
        run.rows[number] = self._axis.size * sum(len(micro.places) for micro in run.micros[number])

    with put(Executor, "_count", every):
        yield


@bug("stages but the last one lose the losses of their routers", "pp2", "C50", **SWITCH)
def _() -> Iterator[None]:
    whole = Executor._forward

    def forgetful(self: Executor, action: Any, run: Any) -> None:
        whole(self, action, run)
        if action.stage < self.model.num_stages - 1:
            for flight in run.flying.values():
                flight.losses = ()

    with put(Executor, "_forward", forgetful):
        yield


@bug("a recomputed block adds the losses of its router once more", "dp2,full", "T19.5", **SWITCH)
def _() -> Iterator[None]:
    whole = transformer.add_loss

    def twice(name: str, value: Tensor, coefficient: float) -> None:
        whole(name, value * 2.0 if recomputing() else value, coefficient)

    with blind(), put(transformer, "add_loss", twice):
        yield


@bug(
    "the balance loss counts what was kept, not what was asked for",
    SPREAD,
    "17 (4), 18",
    **{**SWITCH, "capacity_factor": 0.5},
)
def _() -> Iterator[None]:
    with loaded(lambda to: to.places >= 0):
        yield


def loaded(counts: Callable[[Any], Any]) -> Any:
    """The balance loss is told of other choices: counts(assignment) says which of them count, (b, s, k) of bools."""

    def told(to: Any, codes: Any) -> Any:
        asked = zip(np.maximum(codes, ~codes), np.broadcast_to(counts(to), codes.shape), strict=True)
        return to._replace(load=np.stack([np.bincount(row[which], minlength=4) for row, which in asked]))

    return assigned(told)


@bug("gshard's balance loss counts second choices as well", SPREAD, "17 (4)", **GSHARD)
def _() -> Iterator[None]:
    with loaded(lambda to: True):
        yield


@bug("gshard's balance loss has the factor of switch", SPREAD, "17 (3)", **GSHARD)
def _() -> Iterator[None]:
    whole = moe.balance_loss

    def switched(p: Tensor, load: Any, lengths: Any, real: Any, routing: Routing) -> Tensor:
        return whole(p, load, lengths, real, replace(routing, router="topk", top_k=1))

    with put(moe, "balance_loss", switched):
        yield


@bug("the share of each expert is that of the chunk of a row that is here", "cp2", "16.4", **SWITCH)
def _() -> Iterator[None]:
    with loaded(lambda to: True):
        yield


@bug("the balance loss averages over the tokens of a slice of the row", "tp2,sp", "16.4", **SWITCH)
def _() -> Iterator[None]:
    whole = moe.balance_loss

    def local(p: Tensor, load: Any, lengths: Any, real: Any, routing: Routing) -> Tensor:
        return whole(p, load, np.full_like(lengths, p.shape[1]), real, routing)

    with put(moe, "balance_loss", local):
        yield


@bug("the z-loss is added on all ranks of a row, each for the whole of it", "cp2", "16.4", z_loss=0.1, **SWITCH)
def _() -> Iterator[None]:
    whole = moe.z_loss
    with put(moe, "z_loss", lambda z, lengths, real: whole(z, np.full_like(lengths, z.shape[1]), real)):
        yield


@bug("the z-loss of every rank of tp is counted", "tp2", "16.4", z_loss=0.1, **SWITCH)
def _() -> Iterator[None]:
    whole = moe.z_loss
    with put(moe, "z_loss", lambda z, lengths, real: whole(z, lengths, real) * float(world().size)):
        yield


@bug("the z-loss is not squared", "tp2", "16.4", z_loss=0.1, **SWITCH)
def _() -> Iterator[None]:
    def linear(z: Tensor, lengths: Any, real: Any) -> Tensor:
        return ops.sum(ops.logsumexp(z, -1) * np.float64(1.0 / lengths[0]))

    with put(moe, "z_loss", linear):
        yield


@bug("the z-loss is that of probabilities", SPREAD, "16.4", z_loss=0.1, **SWITCH)
def _() -> Iterator[None]:
    whole = moe.z_loss
    with put(moe, "z_loss", lambda z, lengths, real: whole(ops.softmax(z, -1), lengths, real)):
        yield


# --------------------------------------------------------------------------------------------------- weights of choices


@bug("the router is cut off from the loss", SPREAD, "T18.2", **SWITCH)
def _() -> Iterator[None]:
    whole = ops.gates
    with put(ops, "gates", lambda p, ids, renormalize: Tensor(whole(p, ids, renormalize).data)):
        yield


@bug("the weight of the one expert is renormalised", SPREAD, "T18.2", **SWITCH)
def _() -> Iterator[None]:
    whole = ops.gates
    with put(ops, "gates", lambda p, ids, renormalize: whole(p, ids, True)):
        yield


def combined(weights: Callable[[Tensor, Any], Tensor]) -> Any:
    """Other weights for what comes back: weights(weights, places)."""
    whole = ops.combine
    return put(ops, "combine", lambda out, gates, places: whole(out, weights(gates, places), places))


@bug("weights are renormalised over the choices that were kept", SPREAD, "17 (1)", **GSHARD)
def _() -> Iterator[None]:
    def over_kept(gates: Tensor, places: Any) -> Tensor:
        kept = gates * (places >= 0).astype(gates.dtype)
        return kept / (ops.sum(kept, -1, keepdims=True) + 1e-30)

    with combined(over_kept):
        yield


@bug("weights are not renormalised before choices are dropped", "dp4,ep2", "17 (1)", **GSHARD)
def _() -> Iterator[None]:
    whole = ops.gates
    with put(ops, "gates", lambda p, ids, renormalize: whole(p, ids, False)):
        yield


@bug("weights of the two choices are swapped", SPREAD, **TOP_2)
def _() -> Iterator[None]:
    with combined(lambda gates, places: gates[..., ::-1]):
        yield


@bug("what comes back is not weighted", SPREAD, "16.1", **SWITCH)
def _() -> Iterator[None]:
    with combined(lambda gates, places: gates / gates.data):
        yield


@bug("weights have no gradient", "tp2", "T18.2", **SWITCH)
def _() -> Iterator[None]:
    backward = expert_ops.Combine.backward

    def without(grad: Any, *saved: Any, wanted: Any) -> Any:
        d_out, d_gates, *rest = backward(grad, *saved, wanted=wanted)
        return d_out, np.zeros_like(d_gates), *rest

    with put(expert_ops.Combine, "backward", without):
        yield


@bug("weights are not copied on entering tp", "tp2", "T3.1", seen=True, **TOP_2)
def _() -> Iterator[None]:
    whole = moe.enter
    with put(moe, "enter", lambda x, axis, sp: x if x.shape[-1] == 2 else whole(x, axis, sp)):
        yield


@bug("tokens are not copied on entering tp", "tp2", "T3.1", seen=True, **SWITCH)
def _() -> Iterator[None]:
    whole = moe.enter
    with put(moe, "enter", lambda x, axis, sp: whole(x, axis, sp) if x.shape[-1] == 1 else x):
        yield


@bug("what experts of a rank of tp make is not summed", "tp2", seen=True, **SWITCH)
def _() -> Iterator[None]:
    with put(moe, "leave", lambda y, axis, sp: y):
        yield


@bug("the gradient of routers is not summed over tp", "tp2,sp", "C39", seen=True, **SWITCH)
def _() -> Iterator[None]:
    with put(router, "between", lambda sequence_parallel: Spec()):
        yield


@bug("the gradient of routers is summed over tp without sequence parallelism", "tp2", "C39", **SWITCH)
def _() -> Iterator[None]:
    between = router.between
    with put(router, "between", lambda sequence_parallel: between(True)):
        yield


# ---------------------------------------------------------------------------------------------------- places of experts


def assigned(change: Callable[[Any, Any], Any]) -> Any:
    """Tokens are assigned otherwise: change(assignment, codes)."""
    whole = moe.assign
    return put(moe, "assign", lambda codes, routing, **how: change(whole(codes, routing, **how), codes))


def given(change: Callable[..., tuple[Any, Routing, dict[str, Any]]]) -> Any:
    """`assign` is given something else: change(codes, routing, how)."""
    whole = moe.assign

    def other(codes: Any, routing: Routing, **how: Any) -> Any:
        codes, routing, how = change(codes, routing, how)
        return whole(codes, routing, **how)

    return put(moe, "assign", other)


@bug("experts have one place more", SPREAD, "T16.3", **SWITCH)
def _() -> Iterator[None]:
    whole = Routing.capacities
    with put(Routing, "capacities", lambda self, lengths: np.minimum(whole(self, lengths) + 1, lengths)):
        yield


@bug("experts have one place less", SPREAD, "T16.3", **GSHARD)
def _() -> Iterator[None]:
    whole = Routing.capacities
    with put(Routing, "capacities", lambda self, lengths: np.maximum(whole(self, lengths) - 1, 1)):
        yield


@bug("the number of places is rounded down", SPREAD, "16.2", **SIX)
def _() -> Iterator[None]:
    with put(
        Routing, "capacities", lambda self, lengths: np.maximum(1, (lengths * self.top_k * 1.25 / 6).astype(np.int64))
    ):
        yield


@bug("experts have places for the tokens of one choice", SPREAD, "16.2", **GSHARD)
def _() -> Iterator[None]:
    whole = Routing.capacities
    with put(Routing, "capacities", lambda self, lengths: -(-whole(self, lengths) // 2)):
        yield


@bug("experts take the first tokens of the batch of a rank", DENSE, "16.2", **SWITCH)
def _() -> Iterator[None]:
    whole = moe.assign

    def other(codes: Any, routing: Routing, **how: Any) -> Any:
        right = whole(codes, routing, **how)
        joined = {**how, "lengths": how["lengths"].sum(keepdims=True), "real": None}
        one = whole(codes.reshape(1, -1, codes.shape[2]), routing, **joined)
        return one._replace(places=one.places.reshape(codes.shape), load=right.load)

    with put(moe, "assign", other):
        yield


@bug("second choices compete with first ones for places", SPREAD, "16.2", **TOP_2)
def _() -> Iterator[None]:
    whole = moe.assign

    def together(codes: Any, routing: Routing, **how: Any) -> Any:
        right = whole(codes, routing, **how)
        if not how["training"]:
            return right
        b, s, k = codes.shape
        one = replace(routing, top_k=1, capacity_factor=routing.capacity_factor * k)
        mixed = whole(codes.reshape(b, s * k, 1), one, **how)
        return mixed._replace(rows=mixed.rows // k, places=mixed.places.reshape(b, s, k), load=right.load)

    with put(moe, "assign", together):
        yield


@bug("places are given in the order of the tokens that are here", "cp2", "16.2", **SWITCH)
def _() -> Iterator[None]:
    whole = assigning._exchange

    def own(by_group: Any, begins: Any, axis: Communicator) -> Any:
        in_row, before = whole(by_group, begins, axis)
        before = np.zeros_like(before)
        before[..., 1] = by_group[..., 0]
        return in_row, before

    with put(assigning, "_exchange", own):
        yield


@bug("the two runs of a rank count as one", "cp2", "16.2", **SWITCH)
def _() -> Iterator[None]:
    whole = assigning._runs
    with put(assigning, "_runs", lambda positions, length, axis: ([whole(positions, length, axis)[0][0], 0], length)):
        yield


@bug("chunks of a row come in the order of the ranks", "cp2", "16.2", **SWITCH)
def _() -> Iterator[None]:
    with given(lambda codes, routing, how: (codes, routing, {**how, "positions": None})):
        yield


@bug("every chunk of a row has the places of the whole row", "cp2,ulysses", "16.2", **SWITCH)
def _() -> Iterator[None]:
    whole = moe.assign

    def alone(codes: Any, routing: Routing, **how: Any) -> Any:
        right = whole(codes, routing, **how)
        return whole(codes, routing, **{**how, "axis": World(Alone(), "none")})._replace(load=right.load)

    with put(moe, "assign", alone):
        yield


@bug("padding takes places", DENSE, "16.5", documents=True, **SWITCH)
def _() -> Iterator[None]:
    with given(lambda codes, routing, how: (codes, routing, {**how, "real": None})):
        yield


@bug("rows that end in padding have the places of whole ones", DENSE, "16.5", documents=True, **SIX)
def _() -> Iterator[None]:
    def whole_rows(codes: Any, routing: Routing, how: dict[str, Any]) -> Any:
        return codes, routing, {**how, "lengths": np.full_like(how["lengths"], codes.shape[1])}

    with given(whole_rows):
        yield


@bug("a second expert that the draw did not take leaves its place", SPREAD, "17 (2)", **GSHARD)
def _() -> Iterator[None]:
    def gone(codes: Any, routing: Routing, how: dict[str, Any]) -> Any:
        first = codes[..., :1]
        return np.where(codes < 0, ~np.broadcast_to(first, codes.shape), codes), routing, how

    with given(gone):
        yield


@bug("in evaluation tokens are dropped", SPREAD, "16.2", by="evaluation", **{**SWITCH, "capacity_factor": 0.25})
def _() -> Iterator[None]:
    def limited(codes: Any, routing: Routing, how: dict[str, Any]) -> Any:
        return codes, routing, {**how, "training": True}

    with given(limited):
        yield


# ------------------------------------------------------------------------------------------------------- random numbers


def streams(suffix: str, change: Callable[[Draw, str], tuple[Draw, str]]) -> Any:
    """Random numbers of some streams are others: change(draw, stream)."""
    rows = Draw.rows

    def other(self: Draw, stream: str) -> Any:
        return rows(*change(self, stream)) if stream.endswith(suffix) else rows(self, stream)

    return put(Draw, "rows", other)


@bug("every rank has a jitter of its own", DENSE, "16.5", jitter=0.1, **SWITCH)
def _() -> Iterator[None]:
    with streams(".jitter", lambda draw, stream: (draw, f"{stream}.{world().rank}")):
        yield


@bug("ranks of tp have different jitter", "tp2", "16.5", seen=True, jitter=0.1, **SWITCH)
def _() -> Iterator[None]:
    with streams(".jitter", lambda draw, stream: (draw, f"{stream}.{world().rank}")):
        yield


@bug("jitter of a slice of the sequence is that of the first one", "tp2,sp", "16.5", jitter=0.1, **SWITCH)
def _() -> Iterator[None]:
    with streams(".jitter", lambda draw, stream: (draw._replace(positions=np.arange(len(draw.positions))), stream)):
        yield


@bug("a second forward has another jitter", "dp2,full", "C59, T19.5", jitter=0.1, **SWITCH)
def _() -> Iterator[None]:
    with blind(), streams(".jitter", of_next_step):
        yield


def of_next_step(draw: Draw, stream: str) -> tuple[Draw, str]:
    """A second forward draws as the step after this one will."""
    return draw._replace(step=draw.step + recomputing()), stream


@bug("a second forward draws other second experts", "dp2,full", "C59, T19.5", **GSHARD)
def _() -> Iterator[None]:
    with blind(), streams(".second", of_next_step):
        yield


@bug("the jitter reaches the experts", SPREAD, "16.5", jitter=0.1, **SWITCH)
def _() -> Iterator[None]:
    whole = moe.Moe.forward

    def shaken(self: Any, x: Tensor, tokens: Any) -> Any:
        if tokens.training and tokens.draw is not None:
            x = ops.jitter(x, tokens.draw.rows(f"{self.name}.router.jitter"), self.routing.jitter)
        return whole(self, x, tokens)

    with put(moe.Moe, "forward", shaken):
        yield


@bug("second experts are drawn by the place on the rank", DENSE, "17 (2)", **GSHARD)
def _() -> Iterator[None]:
    with streams(".second", lambda draw, stream: (draw._replace(places=np.arange(len(draw.places))), stream)):
        yield


@bug("second experts are always sent", SPREAD, "17 (2)", **GSHARD)
def _() -> Iterator[None]:
    with put(moe.Moe, "_drawn", lambda self, ids, weights, tokens: ids):
        yield


@bug("all layers draw the same second experts", SPREAD, "C36", **GSHARD)
def _() -> Iterator[None]:
    with streams(".second", lambda draw, stream: (draw, "second")):
        yield


# ------------------------------------------------------------------------------------------------------- there and back


@bug("counts are not swapped on the way back of backward", SPREAD, "3", **SWITCH)
def _() -> Iterator[None]:
    def backward(grad: Any, *, wanted: Any, axis: Communicator, i: int, j: int, counts: Any = None) -> Any:
        return (axis.all_to_all(grad, j, i, counts),)

    with put(collectives.AllToAll, "backward", backward):
        yield


def ordered(change: Callable[[Any], Any]) -> Any:
    """The order in which rows that came stand by expert is another."""
    whole = experts._expert_major

    def other(arrived: np.ndarray) -> Any:
        order = whole(arrived)
        return order if order is None else change(order)

    return put(experts, "_expert_major", other)


@bug("rows that came are taken as sorted by expert", SPREAD, "16.1", **SWITCH)
def _() -> Iterator[None]:
    with ordered(np.sort):
        yield


@bug("the order of rows is not undone before they go back", SPREAD, "16.1", **SWITCH)
def _() -> Iterator[None]:
    class Numpy:
        """NumPy, whose argsort sorts nothing."""

        def __getattr__(self, name: str) -> Any:
            return (lambda order: np.arange(order.size)) if name == "argsort" else getattr(np, name)

    with put(experts, "np", Numpy()):
        yield


@bug("the order of rows is not undone in backward", SPREAD, "3", **SWITCH)
def _() -> Iterator[None]:
    with put(expert_ops.PermuteRows, "backward", lambda grad, order, *, wanted: (np.take(grad, order, axis=0), None)):
        yield


@bug("a token that went to two experts gets the gradient of one", SPREAD, "16.1", **TOP_2)
def _() -> Iterator[None]:
    def last(grad: Any, rows: Any, shape: Any, *, wanted: Any) -> Any:
        found = np.zeros((int(np.prod(shape[:-1])), shape[-1]))
        found[rows] = grad
        return found.reshape(shape), None

    with put(expert_ops.TakeRows, "backward", last):
        yield


@bug("an expert works with the weights of its neighbour", SPREAD, "16.1", **SWITCH)
def _() -> Iterator[None]:
    forward = expert_ops.GroupedMatmul.forward
    with put(
        expert_ops.GroupedMatmul,
        "forward",
        lambda x, w, *, counts: (forward(x, np.roll(w, 1, 0), counts=counts)[0], (x, w)),
    ):
        yield


@bug("experts stand in the even blocks, not in the odd ones", "pp2", "17", moe_every=2, **SWITCH)
def _() -> Iterator[None]:
    with put(Routing, "has_experts", lambda self, block: block % 2 == 0):
        yield


# -------------------------------------------------------------------------------------------------------------- overlap

OVERLAP = "dp2,ep2,overlap"


@bug("choices look for their rows where they would be without overlap", OVERLAP, "16.1", **SWITCH)
def _() -> Iterator[None]:
    with put(experts, "_moved", lambda places, order: places):
        yield


@bug("rows of both halves leave with the first one", OVERLAP, "16.1", **TOP_2)
def _() -> Iterator[None]:
    with put(experts, "_part_major", lambda going, parts: np.arange(int(going.sum()))):
        yield


@bug("gradients of the two halves change places", OVERLAP, "16.1", **{**TOP_2, "capacity_factor": 0.25})
def _() -> Iterator[None]:
    backward = overlap.Arrive.backward
    with put(overlap.Arrive, "backward", lambda grad, *lengths, **how: backward(grad, *lengths, **how)[::-1]):
        yield
