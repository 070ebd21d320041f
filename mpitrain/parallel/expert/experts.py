"""Experts: tokens go to the ranks that hold theirs, through them, and back.

    x (b, s, h)  --take_rows-->  (n, h) sorted by expert  --all_to_all-->  (n', h)  --permute-->  sorted by expert here
                 up, gelu, down of each expert on its own rows
    y (b, s, h)  <--combine----  (n, h)                   <--all_to_all--  (n', h)  <--permute--

Experts are cut over ep: rank i of e holds the E/e experts from i E/e on, for the tokens of all e ranks.  Only rows that
an expert has a place for travel, so messages have the length that a pass comes to; the counts travel before them.
Hidden units of each expert are cut over tp, as those of an MLP: what comes back is this rank's summand.

Source: Lepikhin et al. 2020, GShard, arXiv:2006.16668, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpitrain import collectives
from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, to_host
from mpitrain.comm.communicator import Communicator
from mpitrain.errors import ShapeError
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Gelu
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.expert.assign import Assignment
from mpitrain.parallel.expert.overlap import Mail, arrive, send_off
from mpitrain.spec import Shard


class Experts(Module):
    """E networks of two layers with a GELU between and no biases, each for some of the tokens.

    x (b, s, h) Replicate on tp, weights (b, s, k) Replicate on tp -> (b, s, h) Partial on tp.

    Args:
        name: path in the model; the parameters are `name.up` (E, h, hidden) and `name.down` (E, hidden, h).
        experts: E.
        width: h.
        hidden: units of each expert.
        ep: the axis over which experts are cut.
        tp: the axis over which hidden units are.
        gelu: tanh or erf.
        layers: of the model; the initial values of `down` get smaller with them.
        overlap: whether half of the experts here work while the rows of the other half travel (overlap.py).

    Raises:
        ShapeError: E or hidden is not divisible by its axis; a single expert here has no halves.
    """

    def __init__(
        self,
        name: str,
        experts: int,
        width: int,
        hidden: int,
        ep: Communicator,
        tp: Communicator,
        *,
        gelu: str = "tanh",
        layers: int = 1,
        overlap: bool = False,
    ) -> None:
        super().__init__(name)
        check(name, experts, hidden, ep, tp)
        self.ep = ep
        self.experts_here = experts // ep.size
        if overlap and self.experts_here == 1:
            raise ShapeError(f"{name}: {experts} experts over {ep.size} ranks leave one here, which has no halves.")
        self.overlap = overlap
        self.up = Parameter(
            f"{name}.up",
            (experts, width, hidden),
            {ep.name: Shard(0), tp.name: Shard(2)},
            init=initial.fan_in(1),
            decay=True,
        )
        self.gelu = Gelu(gelu)
        self.down = Parameter(
            f"{name}.down",
            (experts, hidden, width),
            {ep.name: Shard(0), tp.name: Shard(1)},
            init=initial.residual(layers, 1),
            decay=True,
        )

    def forward(self, x: Tensor, weights: Tensor, to: Assignment) -> Tensor:
        """Each token through its experts, and the weighted sum of what they make of it; 0 where there is none.

        Args:
            x: the tokens of this rank.
            weights: of what comes back, for each token and choice.
            to: which token goes where.
        """
        going, arrived = self._counts(to)
        if self.overlap:
            rows, places = self._by_halves(x, to, going, arrived)
            return ops.combine(rows, weights, places)
        sent, received = going.sum(1).tolist(), arrived.sum(1).tolist()
        rows = collectives.all_to_all(ops.take_rows(x, to.rows), self.ep, counts=(sent, received))
        rows = self._through(rows, arrived, slice(None))
        rows = collectives.all_to_all(rows, self.ep, counts=(received, sent))
        return ops.combine(rows, weights, to.places)

    def _by_halves(self, x: Tensor, to: Assignment, going: np.ndarray, arrived: np.ndarray) -> tuple[Tensor, Array]:
        """What comes back of the tokens' rows, and where the choices are among them; messages beside computation."""
        halves = slice(self.experts_here // 2), slice(self.experts_here // 2, None)
        there = [Mail(self.ep, going[:, half].sum(1).tolist(), arrived[:, half].sum(1).tolist()) for half in halves]
        back = [Mail(self.ep, arrived[:, half].sum(1).tolist(), going[:, half].sum(1).tolist()) for half in halves]
        order = array_module(to.rows).asarray(_part_major(going, halves))
        leaving = send_off(ops.take_rows(x, to.rows[order]), self.ep, *there)
        coming: list[Tensor] = []
        for half, promise, mail, home in zip(halves, leaving, there, back, strict=True):
            rows = self._through(arrive(self.ep, (promise, mail)), arrived, half)
            coming += send_off(rows, self.ep, home)
        return arrive(self.ep, *zip(coming, back, strict=True)), _moved(to.places, order)

    def _through(self, rows: Tensor, arrived: np.ndarray, which: slice) -> Tensor:
        """Rows that came for some of the experts here, through them, in the order in which they came."""
        order = _expert_major(arrived[:, which])
        if order is not None:
            rows = ops.permute_rows(rows, array_module(rows.data).asarray(order))
        counts = np.zeros_like(arrived[0])
        counts[which] = arrived[:, which].sum(0)
        rows = self.gelu(ops.grouped_matmul(rows, self.up, counts.tolist()))
        rows = ops.grouped_matmul(rows, self.down, counts.tolist())
        if order is not None:
            rows = ops.permute_rows(rows, array_module(rows.data).asarray(np.argsort(order)))
        return rows

    def _counts(self, to: Assignment) -> tuple[np.ndarray, np.ndarray]:
        """int64 (e, experts here): how many rows go to each expert of each rank, how many come for each from each.

        Cost: one message of 8 E bytes.
        """
        going = np.ascontiguousarray(to_host(to.counts), np.int64)
        shape = self.ep.size, self.experts_here
        return going.reshape(shape), self.ep.all_to_all(going).reshape(shape)


def check(name: str, experts: int, hidden: int, ep: Communicator, tp: Communicator) -> None:
    """Refuse experts or hidden units that cannot be cut evenly.

    Raises:
        ShapeError: they do not divide.
    """
    for what, number, axis in (("experts", experts, ep), ("hidden units", hidden, tp)):
        if number % axis.size:
            raise ShapeError(f"{name}: {number} {what} are not divisible by axis {axis.name} of size {axis.size}.")


def _expert_major(arrived: np.ndarray) -> np.ndarray | None:
    """The order in which rows that came as (rank, expert) stand as (expert, rank); None where they do already."""
    ranks, experts = arrived.shape
    if ranks == 1 or experts == 1:
        return None
    stop = np.cumsum(arrived).reshape(arrived.shape)
    return _runs((stop - arrived).T, stop.T)


def _part_major(going: np.ndarray, parts: Sequence[slice]) -> np.ndarray:
    """The order in which rows that lie as (rank, expert) stand as (part of the experts, rank, expert)."""
    stop = np.cumsum(going).reshape(going.shape)
    start = stop - going
    return np.concatenate([_runs(start[:, part], stop[:, part]) for part in parts])


def _runs(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The numbers of one run after the other."""
    runs = zip(start.reshape(-1).tolist(), stop.reshape(-1).tolist(), strict=True)
    return np.concatenate([np.arange(a, b) for a, b in runs])


def _moved(places: Array, order: Array) -> Array:
    """Where rows are that were brought into another order; -1 stays: nowhere."""
    xp = array_module(places)
    now = xp.empty(order.size + 1, places.dtype)
    now[order] = xp.arange(order.size, dtype=places.dtype)
    now[order.size] = -1
    return xp.take(now, places)  # -1 is the last
