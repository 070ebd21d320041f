"""Bugs of half precision that float64 cannot show: each is found by an oracle in tests/local/test_mutations_halves.py.

`mpitrain verify` runs in float64, where rounding to a half does not happen, a sum of halves is no other sum and no
gradient is too large for its dtype.  So these are judged by what half precision must do: tests that say what comes out,
also against the library as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from mutations import put

from mpitrain import kernels
from mpitrain.autograd.ops import branch
from mpitrain.autograd.ops.fused import LayerNorm
from mpitrain.nn.parameter import Flat, Parameter
from mpitrain.nn.share import CutFlat
from mpitrain.optim.adam import AdamW
from mpitrain.optim.elementwise import Elementwise
from mpitrain.optim.runs import Run
from mpitrain.optim.scaler import LossScaler
from mpitrain.parallel import data
from mpitrain.pipeline.update import Update

HALVES: list[OfHalves] = []


class OfHalves(NamedTuple):
    """One bug: what was done, in words; the oracle that must find it; the patch; the case that it is."""

    name: str
    oracle: str
    patch: Callable[[], AbstractContextManager[Any]]
    case: str


def of_halves(name: str, oracle: str, case: str = "") -> Callable[[Callable[[], Iterator[None]]], Callable[[], Any]]:
    """Register a generator function as the patch of such a bug."""

    def register(patch: Callable[[], Iterator[None]]) -> Callable[[], Any]:
        HALVES.append(OfHalves(name, oracle, contextlib.contextmanager(patch), case))
        return patch

    return register


def rounded(x: Any) -> Any:
    """What is left of numbers in a half, in their own dtype."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.asarray(x).dtype)


@of_halves("an update is made of the halves, and masters follow", "small updates", "T21.5")
def _() -> Iterator[None]:
    whole = Elementwise._update_all

    def of_weights(self: Elementwise, lr: float) -> None:
        whole(self, lr)
        for p in self.parameters:
            p.master[...] = p.data

    with put(Elementwise, "_update_all", of_weights):
        yield


@of_halves("halves are not made anew after an update", "small updates", "T21.5")
def _() -> Iterator[None]:
    whole = Elementwise._update_all

    def old(self: Elementwise, lr: float) -> None:
        before = [p.data.copy() for p in self.parameters]
        whole(self, lr)
        for p, halves in zip(self.parameters, before, strict=True):
            p.data[...] = halves

    with put(Elementwise, "_update_all", old):
        yield


@of_halves("masters are made from the halves when a run goes on", "resume", "C68")
def _() -> Iterator[None]:
    whole = Flat.refresh

    def from_halves(self: Flat) -> None:
        whole(self)
        self.masters[...] = self.weights

    with put(Flat, "refresh", from_halves):
        yield


@of_halves("halves are those before the load when a run goes on", "resume", "C68")
def _() -> Iterator[None]:
    with put(Flat, "refresh", lambda self: None):
        yield


@of_halves("the scale starts anew when a run goes on", "resume", "T21.2")
def _() -> Iterator[None]:
    with put(LossScaler, "load_state", lambda self, state: None):
        yield


@of_halves("micro-batches add up in halves", "micro-batches", "T21.6")
def _() -> Iterator[None]:
    whole = Parameter.accumulate

    def in_half(self: Parameter, grad: Any) -> None:
        whole(self, grad)
        self.grad[...] = rounded(self.grad)

    with put(Parameter, "accumulate", in_half):
        yield


@of_halves("ranks add up in halves", "sums over ranks", "C20")
def _() -> Iterator[None]:
    def finish(self: data.FlatReducer) -> None:
        for flat, axis in self._work:
            data.settle(flat.parameters)
            if flat.axes:
                flat.grads[...] = axis.all_reduce(data.as_sent(flat.grads, flat.weights, axis))

    with put(data.FlatReducer, "finish", finish):
        yield


@of_halves("statistics of a norm are halves", "norms", "C12")
def _() -> Iterator[None]:
    def forward(x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
        mean = rounded(x.astype(np.float32).mean(-1, keepdims=True))
        z = rounded(x - mean)
        with np.errstate(all="ignore"):
            rstd = np.float16(1.0) / np.sqrt((z * z).mean(-1, keepdims=True).astype(np.float16) + np.float16(eps))
            y = (z * rstd * weight + bias).astype(x.dtype)
        saved = (mean - x[..., :1]).reshape(-1, 1), rstd.reshape(-1, 1)
        return y, (x, *[each.astype(np.float32) for each in saved], weight, bias.dtype)

    with put(LayerNorm, "forward", forward):
        yield


@of_halves("the epsilon of a norm is a half", "norms", "C12")
def _() -> Iterator[None]:
    whole = LayerNorm.forward
    with put(LayerNorm, "forward", lambda *arrays, eps: whole(*arrays, eps=float(np.float16(eps)))):
        yield


@of_halves("AdamW's epsilon is a half", "no gradient")
def _() -> Iterator[None]:
    whole = AdamW._update_runs

    def in_half(self: AdamW, runs: Sequence[Run], lr: float) -> None:
        self.eps = float(np.float16(self.eps))
        whole(self, runs, lr)

    with put(AdamW, "_update_runs", in_half):
        yield


@of_halves("AdamW's moments are halves", "tiny gradients", "T21.1")
def _() -> Iterator[None]:
    whole = Elementwise._update_all

    def in_half(self: Elementwise, lr: float) -> None:
        for of_kind in self.state_dict().values():
            for array in of_kind.values():
                array[...] = rounded(array)
        whole(self, lr)

    with put(Elementwise, "_update_all", in_half):
        yield


@of_halves("gradients are rounded to halves once the scale is off", "tiny gradients", "T21.1")
def _() -> Iterator[None]:
    whole = Elementwise._update_all

    def in_half(self: Elementwise, lr: float) -> None:
        for p in self.parameters:
            p.grad[...] = rounded(p.grad)
        whole(self, lr)

    with put(Elementwise, "_update_all", in_half):
        yield


@of_halves("what overflows in a branch is handed on", "branches", "T22.3")
def _() -> Iterator[None]:
    def unfiltered(grad: Any, inside: Any, *, wanted: Any, scales: Any, branch: int, dtype: Any) -> Any:
        return (kernels.narrow(grad * np.float32(scales.scale(branch)), inside),)

    with put(branch.LeaveBranch, "backward", unfiltered):
        yield


@of_halves("all of a branch's gradient is dropped where one entry overflows", "branches", "T22.3")
def _() -> Iterator[None]:
    whole = branch.LeaveBranch.backward

    def all_or_nothing(grad: Any, inside: Any, *, scales: Any, branch: int, **how: Any) -> Any:
        (found,) = whole(grad, inside, scales=scales, branch=branch, **how)
        lost = np.abs(grad * scales.scale(branch)) > np.finfo(np.float16).max
        return (found * 0 if lost.any() else found,)

    with put(branch.LeaveBranch, "backward", all_or_nothing):
        yield


@of_halves("an overflow is not looked for where gradients are float32", "overflow of one rank", "C18")
def _() -> Iterator[None]:
    whole = Update._measure

    def blind(self: Update, inverses: Any, losses: Any = ()) -> Any:
        mine = whole(self, inverses, losses)
        mine[2:-1] = 0.0
        return mine

    with put(Update, "_measure", blind):
        yield


def brought(change: Callable[[CutFlat, Any], Any]) -> Any:
    """Sums over ranks change as they come to the shares: change(flat, summed)."""
    whole = CutFlat.bring

    def changed(self: CutFlat, first: int, last: int, summed: Any) -> None:
        summed[...] = change(self, summed)
        whole(self, first, last, summed)

    return put(CutFlat, "bring", changed)


@of_halves("the sum over ranks of a share is rounded to a half", "shares", "C20")
def _() -> Iterator[None]:
    with brought(lambda flat, summed: rounded(summed)):
        yield


@of_halves("shares add up micro-batches in halves", "shares", "T21.6")
def _() -> Iterator[None]:
    whole = CutFlat.bring

    def in_halves(self: CutFlat, first: int, last: int, summed: Any) -> None:
        whole(self, first, last, summed)
        if self.shares[first].touched:
            self.grads[...] = rounded(self.grads)

    with put(CutFlat, "bring", in_halves):
        yield


@of_halves("what a rank brings to a share is a mean", "shares", "C20")
def _() -> Iterator[None]:
    with brought(lambda flat, summed: summed / flat.ranks):
        yield
