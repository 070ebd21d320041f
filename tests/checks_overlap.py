"""Experts half by half against all at once, as checks that any world can run: threads here, MPI in tests/mpi."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from checks_comm import data, mode
from checks_layouts import SIZES, train

from mpitrain.autograd import ops
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.collectives import all_to_all
from mpitrain.comm.alone import Alone
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.debug.compare import compare
from mpitrain.events import Event, listen
from mpitrain.parallel.expert.assign import assign
from mpitrain.parallel.expert.experts import Experts
from mpitrain.parallel.expert.overlap import Mail, arrive, send_off
from mpitrain.routing import Routing

WIDTH = 6
Kind = Callable[[int, int, int], int]  # (part, from, to) -> rows
UNEVEN: dict[str, Kind] = {
    "some are zero": lambda part, a, b: (3 * a + 2 * b + part) % 4,
    "a rank sends nothing": lambda part, a, b: 0 if a == 0 else 2 + part + b,
    "all to the last": lambda part, a, b: 5 * (b == 1) * (part == 1),
    "nothing at all": lambda part, a, b: 0,
}


def counts_of(world: Communicator, rows: Kind, part: int) -> tuple[list[int], list[int]]:
    """Rows that this rank sends to each, and receives from each."""
    n, me = world.size, world.rank
    return [rows(part, me, b) for b in range(n)], [rows(part, a, me) for a in range(n)]


def mails_bring_what_an_all_to_all_brings_both_ways(world: World) -> None:
    """Several parts, sent off together and one by one; the gradient of each side is what the dual message brings."""
    for rows in UNEVEN.values():
        for dtype in ("f4", "f8", "f2"):
            counts = [counts_of(world, rows, part) for part in range(2)]
            x = data(world.rank, (sum(sum(sent) for sent, _ in counts), WIDTH), dtype)
            seed = data(world.rank + 100, (sum(sum(received) for _, received in counts), WIDTH), dtype)

            there = Tensor(x, requires_grad=True)
            with Tape() as tape:
                mails = [Mail(world, *each) for each in counts]
                promises = send_off(there, world, *mails)
                here = arrive(world, *zip(promises, mails, strict=True))
            grad = tape.run_backward([(here, seed)])[there]

            plain = Tensor(x, requires_grad=True)
            with Tape() as tape:
                parts = ops.split(plain, [sum(sent) for sent, _ in counts])
                came = ops.concat(
                    [all_to_all(part, world, counts=each) for part, each in zip(parts, counts, strict=True)]
                )
            expected = tape.run_backward([(came, seed)])[plain]
            np.testing.assert_array_equal(here.data, came.data)
            np.testing.assert_array_equal(grad, expected)
            assert (here.dtype, grad.dtype) == (came.dtype, expected.dtype)


def a_layer(world: World, routing: Routing, codes: np.ndarray, dtype: str, overlap: bool) -> dict[str, np.ndarray]:
    """What a layer of experts makes of tokens, and its gradients."""
    alone = Communicator("tp", Alone(), [0])
    mesh = Mesh(world, ep=world.size)
    layer = Experts("experts", routing.experts, WIDTH, 8, mesh.ep, alone, overlap=overlap)
    layer.materialize(mesh, seed=5, dtype=np.dtype(dtype))
    b, s, _ = codes.shape
    x = Tensor(data(world.rank, (b, s, WIDTH), dtype), requires_grad=True)
    weights = Tensor(data(world.rank + 50, codes.shape, "f8" if dtype == "f8" else "f4"), requires_grad=True)
    to = assign(codes, routing, lengths=None, real=None, positions=None, axis=alone, training=True)
    with Tape() as tape:
        y = layer(x, weights, to)
    grads = tape.run_backward([(y, data(world.rank + 70, y.shape, dtype))])
    found = {"y": y.data, "x": grads[x], "weights": grads[weights]}
    return found | {p.name: p.grad for p in layer.parameters()}


def a_layer_by_halves_is_the_layer_to_the_last_bit(world: World) -> None:
    """Any choice of experts, of an even and an odd number a rank: few, all the same one, none by a rank; T18.3."""
    n, me = world.size, world.rank
    for here, k, factor in ((2, 1, None), (3, 2, 1.0), (4, 2, None)):
        routing = Routing(here * n, k, "topk" if k == 2 else "switch", factor)
        draw = np.random.default_rng(me)
        spread = np.stack([draw.permuted(np.arange(here * n))[:k] for _ in range(2 * 7)]).reshape(2, 7, k)
        one = np.broadcast_to(np.arange(k)[::-1] + here * n - k, (2, 7, k)).copy()  # all the last of the last rank
        nobody = ~spread if me == 0 else spread
        for codes in (spread, one, nobody):
            for dtype in ("f8", "f2"):
                whole = a_layer(world, routing, codes, dtype, False)
                halves = a_layer(world, routing, codes, dtype, True)
                for name, array in whole.items():
                    np.testing.assert_array_equal(halves[name], array, name)
                    assert halves[name].dtype == array.dtype
                    assert np.isfinite(array).all()


def messages_travel_beside_products(world: World) -> None:
    """Posted, computed, waited for: in this order, both ways, on every rank."""
    if world.size == 1:
        return
    heard: list[str] = []

    def listener(event: Event) -> None:
        if event.kind == "op" and event.phase == "begin" and event.name.startswith("grouped_matmul"):
            heard.append("product" + event.name.removeprefix("grouped_matmul"))
        if event.kind == "message" and event.name == "iall_to_all" and event.phase == "begin":
            heard.append("post")
        if event.kind == "arrival" and event.name == "iall_to_all":
            heard.append("here")

    codes = np.arange(4 * world.size).reshape(1, -1, 1)
    with listen(listener):
        a_layer(world, Routing(4 * world.size, capacity_factor=None), codes, "f8", True)
    forth = ["post", "post", "here", "product", "product", "post", "here", "product", "product", "post", "here", "here"]
    back = [word if word != "product" else "product.backward" for word in forth]
    assert heard == forth + back


def run_alike(world: World, routing: Routing, exact: bool = True, **how: Any) -> None:
    """Train both ways and compare everything: to the last bit, or to the order of sums."""
    sizes = replace(SIZES, routing=routing)
    with mode(world, deterministic=True):
        whole, halves = (train(world, sizes=sizes, overlap=overlap, **how) for overlap in (False, True))
    for kind, tensors in whole.items():
        if exact:
            for name, array in tensors.items():
                np.testing.assert_array_equal(halves[kind][name], array, f"{kind} {name}")
        else:
            worst = compare(halves[kind], tensors)[0]
            assert worst.ok, f"{kind}: {worst}"


GSHARD = Routing(8, 2, "gshard", 1.25, balance_loss=0.16, z_loss=1e-3, jitter=0.1)
SWITCH = Routing(4, 1, "switch", 1.0, z_loss=1e-3)
DROPLESS = Routing(4, 2, "topk", None, renormalize=True, every=2)
THREE = Routing(6, 3, "topk", 0.5)

RUNS: dict[str, dict[str, Any]] = {
    "dp2_ep2": {"routing": GSHARD, "dp": 2, "ep": 2, "micros": 4},
    "dp2_ep2_three_of_a_token": {"routing": THREE, "dp": 2, "ep": 2, "exact": False},
    "dp2_ep2_float16": {"routing": DROPLESS, "dp": 2, "ep": 2, "dtype": "float16", "scaling": "loss"},
    "dp4_ep2_buckets": {"routing": DROPLESS, "dp": 4, "ep": 2, "bucket_bytes": 4096},
    "dp2_ep2_tp2_sp": {"routing": SWITCH, "dp": 2, "ep": 2, "tp": 2, "sp": True},
    "dp2_ep2_cp2_recompute": {"routing": GSHARD, "dp": 2, "ep": 2, "cp": 2, "recompute": ("blocks.*",)},
    "pp2_dp2_ep2_1f1b": {"routing": GSHARD, "pp": 2, "dp": 2, "ep": 2, "micros": 4, "recompute": ("blocks.*.mlp",)},
    "pp2_dp2_ep2_zb_h1": {"routing": SWITCH, "pp": 2, "dp": 2, "ep": 2, "micros": 4, "schedule": "zb-h1"},
}
"""Layouts with what else a step may do; each is the same training run both ways."""


def _run(name: str) -> Callable[[World], None]:
    how = {"steps": 1 if "pp" in RUNS[name] else 2, **RUNS[name]}

    def check(world: World) -> None:
        run_alike(world, **how)

    check.__name__ = f"trains_alike_{name}"
    return check


def trains_alike_in_checked_mode(world: World) -> None:
    with world.checked():
        run_alike(world, SWITCH, dp=2, ep=2, steps=1)


MESSAGES: list[Callable[[World], None]] = [
    mails_bring_what_an_all_to_all_brings_both_ways,
    a_layer_by_halves_is_the_layer_to_the_last_bit,
    messages_travel_beside_products,
]
TRAININGS = {name: _run(name) for name in RUNS}
CHECKS = [*MESSAGES, TRAININGS["dp2_ep2"], TRAININGS["dp2_ep2_float16"], trains_alike_in_checked_mode]
"""Of two ranks."""
FOUR = [TRAININGS["dp2_ep2_cp2_recompute"], TRAININGS["pp2_dp2_ep2_1f1b"], TRAININGS["pp2_dp2_ep2_zb_h1"]]
"""Of four."""


def ranks_of(name: str) -> int:
    """Of a layout of RUNS."""
    return int(np.prod([RUNS[name].get(axis, 1) for axis in ("pp", "dp", "cp", "tp")]))
