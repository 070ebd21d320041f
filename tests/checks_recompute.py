"""Recomputed blocks give the bits of plain ones on every layout, as checks that any world can run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from checks_layouts import SIZES, method, numbers, with_documents

from mpitrain.autograd.node import SavePolicy
from mpitrain.autograd.recompute import CHECKS_PURITY
from mpitrain.backend import to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.debug.states.around import checking_states
from mpitrain.events import Event, listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.module import mark_recompute
from mpitrain.parallel.data import BucketedReducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import balance
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES

HALF = replace(SIZES, dropout=0.5)
DEEP = replace(HALF, layers=4)


def trained(
    world: World,
    recomputed: Sequence[str],
    *,
    sizes: GPTConfig = HALF,
    micros: int = 2,
    batch: int = 8,
    steps: int = 2,
    documents: bool = False,
    states: bool = False,
    sp: bool = False,
    kind: str = "ring",
    schedule: str = "1f1b",
    chunks: int = 1,
    slices: Sequence[int] | None = None,
    dtype: Any = np.float64,
    policy: SavePolicy | None = None,
    **axes: int,
) -> tuple[dict[str, bytes], list[int]]:
    """This rank's losses, gradients and weights as bytes, and the bytes that wait at the end of each F.

    Args:
        recomputed: patterns of the parts that are.
        states: under the check of states.
        policy: how what is saved waits for backward.
    """
    mesh = Mesh(world, **axes)
    model = GPT(
        sizes,
        mesh,
        sequence_parallel=sp,
        cp_attention=kind,
        partition=balance([1.0] * sizes.layers, mesh.pp.size * chunks),
        seed=3,
        dtype=dtype,
    )
    mark_recompute(model, recomputed, mesh.pp.exchange)
    rule = SCHEDULES[schedule].versions

    def rows(batches: int) -> Any:
        of = {} if rule is None else {"batches": batches}
        parts = len(slices or (0,))
        return complete(schedule, ranks=mesh.pp.size, microbatches=micros, chunks=chunks, slices=parts, **of)

    executor = Executor(
        model,
        method(model),
        mesh,
        rows(1) if rule is None else rows,
        versions=rule,
        slices=slices,
        reducer=BucketedReducer(model.flats, mesh, 2048),
        clip=0.0 if rule else 0.5,
        policy=policy,
    )
    found: dict[str, bytes] = {}
    waiting: list[int] = []

    def note(event: Event) -> None:
        if event.kind != "action":
            return
        action = event.info["action"]
        if action.kind == "F" and event.phase == "end":
            waiting.append(executor.bytes_in_flight)
        elif action.kind == "STEP" and event.phase == "begin":
            for p in model.parameters():
                found[f"gradient of {p.name} at {len(found)}"] = to_host(p.grad).tobytes()

    token = CHECKS_PURITY.set(True)
    try:
        with listen(note), checking_states(world) if states else contextlib.nullcontext():
            batches = [
                (with_documents(rows) if documents else rows).part(model.positions_here)
                for rows in numbers(sizes).batches(batch, mesh.dp.rank, mesh.dp.size, stop_step=steps)
            ]
            reports = executor.run(batches)
    finally:
        CHECKS_PURITY.reset(token)
    found["losses"] = np.array([report.loss for report in reports]).tobytes()
    found |= {p.name: to_host(p.data).tobytes() for p in model.parameters()}
    return found, waiting


def is_the_same_run(world: World, recomputed: Sequence[str] = ("blocks.*",), states: bool = False, **how: Any) -> None:
    """Train with and without, and compare bits."""
    plain, whole = trained(world, (), **how)
    found, kept = trained(world, recomputed, states=states, **how)
    assert plain.keys() == found.keys()
    different = [name for name in plain if plain[name] != found[name]]
    assert not different, f"{len(different)} of {len(plain)}, first {different[0]}"
    kept_by_all, whole_by_all = (sum(map(sum, world.exchange(each))) for each in (kept, whole))
    assert kept_by_all < 0.9 * whole_by_all, "nothing was saved"


LAYOUTS: dict[str, dict[str, Any]] = {
    "one_rank": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sp": True},
    "tp4": {"tp": 4},
    "cp2_ring": {"cp": 2, "documents": True},
    "cp2_ulysses": {"cp": 2, "kind": "ulysses"},
    "cp2_rsa": {"cp": 2, "kind": "rsa"},
    "pp2_1f1b": {"pp": 2, "micros": 4},
    "pp2_gpipe": {"pp": 2, "micros": 4, "schedule": "gpipe"},
    "pp2_interleaved": {"pp": 2, "micros": 4, "schedule": "interleaved", "chunks": 2, "sizes": DEEP},
    "pp2_zb_h1": {"pp": 2, "micros": 4, "schedule": "zb-h1"},
    "pp2_terapipe": {"pp": 2, "micros": 4, "schedule": "terapipe", "slices": (6, 1, 9), "documents": True},
    "pp2_pipedream": {"pp": 2, "micros": 1, "steps": 4, "schedule": "pipedream"},
    "pp2_2bw": {"pp": 2, "micros": 2, "steps": 4, "schedule": "pipedream-2bw"},
    "dp2_tp2_pp2": {"dp": 2, "tp": 2, "pp": 2, "sizes": replace(HALF, tied=True)},
}
"""Name -> layout; those of tensors and of pipelines, each way of attention and each schedule."""


def ranks_of(layout: dict[str, Any]) -> int:
    """How many ranks a layout has."""
    return int(np.prod([layout.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")]))


def check(name: str) -> Callable[[World], None]:
    """The check of one layout."""

    def same(world: World) -> None:
        is_the_same_run(world, **LAYOUTS[name])

    same.__name__ = name
    return same


CHECKS = [check("tp2_sp"), check("pp2_zb_h1")]
"""A few on two ranks, for MPI."""
MORE = [check(name) for name, layout in LAYOUTS.items() if ranks_of(layout) == 2]
