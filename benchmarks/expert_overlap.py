"""Experts half by half beside all at once: does computing while rows travel pay?

    mpirun -n 2 python -m mpi4py benchmarks/expert_overlap.py
    mpirun -n 2 python -m mpi4py benchmarks/expert_overlap.py --network 1.25
    mpirun -n 2 python -m mpi4py benchmarks/expert_overlap.py --skew 0.5
    mpirun -n 4 python -m mpi4py benchmarks/expert_overlap.py --messages

One layer of 8 experts, forward and backward, on each of several widths; both ways have the same weights and the same
tokens, and take turns.  What counts is the slowest rank's time; a ratio is that of a pair of neighbours, the median of
all pairs.  Below 1 the halves are faster.

With `--network GB/s` a message takes as long as on a link of that rate with 20 microseconds of latency, during which
this rank's core is free: what shared memory cannot show.  (The copy that stands for the transfer costs what it costs on
top.)  With `--skew` that share of the tokens goes to the experts of one rank, by turns: the others wait for it.

`--messages` compares the message itself, one all-to-all of MPI, with as many sends and receives from rank to rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

import mpitrain  # noqa: F401 - before NumPy (mpitrain/blas.py)

# isort: split
import machine
import numpy as np

from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.alone import Alone
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.transport import Array, Pending, Transport
from mpitrain.comm.world import world
from mpitrain.parallel.expert.assign import assign
from mpitrain.parallel.expert.experts import Experts
from mpitrain.routing import Routing

ROUTING = Routing(8, capacity_factor=None)
SHAPES = ((64, 512), (128, 1024), (256, 1024), (512, 1024), (1024, 1024))
"""(width, tokens of a rank)."""
LATENCY = 20e-6  # seconds


class Link:
    """Messages of a rank that are complete no sooner than its link has carried them, one after the other.

    Args:
        transport: what really moves them.
        rate: bytes a second.
    """

    def __init__(self, transport: Transport, rate: float) -> None:
        self._transport, self._rate = transport, rate
        self.rank, self.size, self.kind = transport.rank, transport.size, transport.kind
        self._free = 0.0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._transport, verb)

    def all_to_all(self, *message: Any, own: bool = True) -> None:
        self.iall_to_all(*message, own=own).wait()

    def iall_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> Pending:
        sent, received = (sum(counts) - counts[self.rank] for counts in (send_counts, recv_counts))
        seconds = max(sent, received) * send.itemsize / self._rate
        self._free = max(self._free, time.perf_counter()) + seconds
        return _Carried(self._transport.iall_to_all(send, send_counts, recv, recv_counts, own), self._free + LATENCY)


class _Carried:
    def __init__(self, pending: Pending, due: float) -> None:
        self._pending, self._due = pending, due

    def test(self) -> bool:
        return time.perf_counter() >= self._due and self._pending.test()

    def wait(self) -> None:
        time.sleep(max(0.0, self._due - time.perf_counter()))
        self._pending.wait()


class Layer:
    """A layer of experts that stands ready, in one of the two ways."""

    def __init__(self, mesh: Mesh, ep: Communicator, width: int, overlap: bool) -> None:
        self.experts = Experts("experts", ROUTING.experts, width, 4 * width, ep, mesh.tp, overlap=overlap)
        self.experts.materialize(mesh, seed=1)

    def pass_seconds(self, x: Array, codes: Array) -> float:
        """Forward and backward of this rank's tokens."""
        to = assign(
            codes,
            ROUTING,
            lengths=None,
            real=None,
            positions=None,
            axis=Communicator("cp", Alone(), [0]),
            training=True,
        )
        weights = np.ones(codes.shape, np.float32)
        for p in self.experts.parameters():
            p.touched = False
        world().barrier()
        start = time.perf_counter()
        with Tape() as tape:
            y = self.experts(Tensor(x, requires_grad=True), Tensor(weights, requires_grad=True), to)
        tape.run_backward([(y, x)])
        return time.perf_counter() - start


def _codes(draw: np.random.Generator, tokens: int, skew: float, favoured: int) -> Array:
    """The expert of each token; a share of them go to the experts of one rank."""
    here = ROUTING.experts // world().size
    codes = draw.integers(ROUTING.experts, size=(1, tokens, 1))
    moved = draw.random(codes.shape) < skew
    return np.where(moved, favoured * here + codes % here, codes)


def measure(width: int, tokens: int, rounds: int, rate: float, skew: float, undisturbed: bool) -> dict[str, Any]:
    """Times of both ways, and their ratio, the same on every rank."""
    everyone = world()
    mesh = Mesh(everyone, ep=everyone.size)
    ep = mesh.ep
    if rate:
        ep = Communicator(ep.name, Link(ep.transport, rate), ep.ranks)
    ways = {"whole": Layer(mesh, ep, width, False), "halves": Layer(mesh, ep, width, True)}
    draw = np.random.default_rng(everyone.rank)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        x = draw.standard_normal((1, tokens, width), np.float32)
        codes = _codes(draw, tokens, skew, number % everyone.size)
        if undisturbed:
            time.sleep(machine.REST)
            everyone.barrier()
        with machine.undisturbed() if undisturbed else contextlib.nullcontext():
            for name in ways if number % 2 else reversed(ways):
                found[name].append(ways[name].pass_seconds(x, codes))
    slowest = {name: everyone.all_reduce(np.array(times[2:]), "max") for name, times in found.items()}
    ratios = slowest["halves"] / slowest["whole"]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return {
        "width": width,
        "tokens": tokens,
        "message": round(4 * width * tokens * (everyone.size - 1) / everyone.size),
        "whole": round(1e3 * float(np.median(slowest["whole"])), 3),
        "halves": round(1e3 * float(np.median(slowest["halves"])), 3),
        "ratio": round(float(middle), 3),
        "quartiles": [round(float(low), 3), round(float(high), 3)],
    }


def messages(rounds: int) -> None:
    """Microseconds of an all-to-all of several lengths, as MPI's own and as messages from rank to rank."""
    transport, n, me = world().transport, world().size, world().rank

    def at_once(x: Array, y: Array, counts: list[int]) -> None:
        transport.all_to_all(x, counts, y, counts)

    def from_rank_to_rank(x: Array, y: Array, counts: list[int]) -> None:
        blocks, places = x.reshape(n, -1), y.reshape(n, -1)
        flying = [transport.irecv(places[(me - step) % n], (me - step) % n, 1) for step in range(1, n)]
        flying += [transport.isend(blocks[(me + step) % n], (me + step) % n, 1) for step in range(1, n)]
        places[me] = blocks[me]
        for request in flying:
            request.wait()

    for kib in (1, 16, 64, 256, 1024, 4096):
        x, y, counts = np.ones(kib * 256, np.float32), np.empty(kib * 256, np.float32), [kib * 256 // n] * n
        times: dict[str, list[float]] = {"at_once": [], "from_rank_to_rank": []}
        for number in range(5 * rounds):
            ways = [at_once, from_rank_to_rank]
            for way in ways if number % 2 else reversed(ways):
                world().barrier()
                start = time.perf_counter()
                way(x, y, counts)
                times[way.__name__].append(1e6 * (time.perf_counter() - start))
        slowest = {name: world().all_reduce(np.array(of), "max") for name, of in times.items()}
        ratio = float(np.median(slowest["from_rank_to_rank"] / slowest["at_once"]))
        if me == 0:
            medians = {name: round(float(np.median(of)), 1) for name, of in slowest.items()}
            print(json.dumps({"KiB": kib, **medians, "ratio": round(ratio, 2)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--network", type=float, default=0.0, metavar="GB/s", help="rate of an emulated link")
    parser.add_argument("--skew", type=float, default=0.0, metavar="SHARE", help="of tokens that go to one rank")
    parser.add_argument("--undisturbed", action="store_true", help="each pair of passes at real-time priority")
    parser.add_argument("--widths", type=int, nargs="+", default=[width for width, _ in SHAPES])
    parser.add_argument("--messages", action="store_true", help="the message alone")
    options = parser.parse_args()
    if options.messages:
        messages(options.rounds)
        return
    for width, tokens in SHAPES:
        if width not in options.widths:
            continue
        found = measure(width, tokens, options.rounds, options.network * 1e9, options.skew, options.undisturbed)
        if world().rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
