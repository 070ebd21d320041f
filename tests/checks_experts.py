"""Experts in any layout against one rank, and routing at its extremes, as checks that any world can run.

The first half trains as checks_layouts.py does.  The second takes away all but one thing: the main loss, so that only
the router's own losses are left; all experts but one, which every token chooses; the tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import numpy as np
from checks_layouts import LAYOUT, SIZES, equals_one_rank, method, numbers, states, whole

from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import to_host
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.tokens import Batch
from mpitrain.debug.compare import compare
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn.module import mark_recompute
from mpitrain.optim.adam import AdamW
from mpitrain.optim.scaler import LossScaler
from mpitrain.parallel.expert.counted import OTHERS
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.routing import Routing

FACTORS = (0.5, 1.0, 1.25, 8.0, None)
"""Capacity factors: most is dropped, some, little, nothing though there is a bound, and none."""

Axes = dict[str, Any]

LAYOUTS: list[Axes] = [
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 2, "tp": 2},
    {"dp": 4, "ep": 2, "tp": 2, "sp": True},
    {"dp": 2, "ep": 2, "pp": 2},
    {"dp": 2, "ep": 2, "cp": 2},
]
"""Experts beside every axis."""

MORE: list[Axes] = [
    {"dp": 2, "ep": 2, "overlap": True},
    {"dp": 4, "ep": 2, "tp": 2, "sp": True, "overlap": True},
    {"tp": 2},
    {"tp": 4, "sp": True},
    {"cp": 4},
    {"dp": 2, "ep": 2, "cp": 2, "kind": "ulysses"},
    {"dp": 2, "ep": 2, "cp": 2, "kind": "rsa"},
    {"dp": 2, "ep": 2, "cp": 2, "tp": 2, "sp": True},
    {"pp": 2, "dp": 2, "ep": 2, "tp": 2, "sp": True, "schedule": "zb-h1"},
    {"pp": 2, "dp": 4, "ep": 2, "schedule": "gpipe"},
    {"pp": 2, "dp": 2, "ep": 2, "cp": 2, "schedule": "interleaved", "chunks": 2},
    {"pp": 4, "dp": 2, "ep": 2, "schedule": "interleaved", "chunks": 1},
]
"""The rest: experts that are not spread, other kinds of attention, three axes at once, other schedules."""


def router(name: str, factor: float | None, every: int = 1, **more: Any) -> Routing:
    """Four experts and a router with all that it can have."""
    kinds: dict[str, dict[str, Any]] = {
        "switch": {},
        "gshard": {"top_k": 2, "router": "gshard", "balance_loss": 0.16},
        "topk": {"top_k": 3, "router": "topk"},
        "renormalised": {"top_k": 3, "router": "topk", "renormalize": True},
    }
    how = {"z_loss": 1e-3, "jitter": 0.1, **kinds[name], **more}
    return Routing(4, capacity_factor=factor, every=every, **how)


ROUTERS = ("switch", "gshard", "topk", "renormalised")


def sizes(routing: Routing, axes: Axes | None = None) -> GPTConfig:
    """A GPT with experts, as many blocks as the stages of a pipeline want."""
    deep = (axes or {}).get("pp", 1) * (axes or {}).get("chunks", 1)
    return replace(SIZES, layers=max(2, deep), routing=routing)


def ranks_of(axes: Axes) -> int:
    """How many ranks a layout has; ep is a part of dp."""
    return int(np.prod([axes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")]))


SHORT: dict[str, Any] = {"batch": 16, "steps": 2}

EXTRAS: list[dict[str, Any]] = [
    {},
    {"padded": True},
    {"recompute": ("blocks.*",)},
    {"documents": True},
    {"tied": True},
    {"padded": True, "documents": True},
    {"recompute": ("blocks.*.mlp",)},
    {"bucket_bytes": 4096},
]


def drawn(layouts: Sequence[Axes], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Every layout with every capacity; routers, blocks, micro-batches, padding and recomputation are dealt out."""
    hows = cycle(product((1, 4), ROUTERS, (1, 2)))
    for _ in range(seed):
        next(hows)
    extras: Iterator[dict[str, Any]] = cycle(EXTRAS)
    for axes, factor in product(layouts, FACTORS):
        micros, name, every = next(hows)
        if axes.get("pp", 1) > 1:
            micros = 4
        yield {**axes, **SHORT, "micros": micros, "sizes": sizes(router(name, factor, every), axes), **next(extras)}


def spread(world: World, **how: Any) -> None:
    """Train in a layout with experts and alone, and compare everything."""
    equals_one_rank(world, **how)


# --------------------------------------------------------------------------------------------- only the router's losses


class Silent(GPT):
    """A GPT whose loss is times 0, so that only what routers add to the objective trains it."""

    def forward_stage(self, stage: int, batch: Batch, *inputs: Tensor, carry: Any = None) -> tuple[Tensor, ...]:
        outputs = super().forward_stage(stage, batch, *inputs, carry=carry)
        return tuple(output * 0.0 for output in outputs) if stage == self.num_stages - 1 else outputs


def silent_gradients(
    world: World,
    routing: Routing,
    *,
    sizes: GPTConfig = SIZES,
    micros: int = 1,
    batch: int = 16,
    sp: bool = False,
    padded: int = 0,
    nudge: float = 0.0,
    **axes: int,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Gradients and what the router counted of a step that has only the router's losses.

    Args:
        padded: as many rows of the global batch are padding, the last ones.
        nudge: is added to an element of the last router's weight.
    """
    mesh = Mesh(world, **axes)
    sizes = replace(sizes, routing=routing, dropout=0.0)
    model = Silent(sizes, mesh, sequence_parallel=sp, seed=3, dtype=np.float64)
    if nudge:
        model.blocks[-1].mlp.router.weight.data[2, 1] += nudge
    executor = Executor(model, method(model), mesh, complete("1f1b", ranks=mesh.pp.size, microbatches=micros))
    (rows,) = numbers(sizes).batches(batch, mesh.dp.rank, mesh.dp.size, stop_step=1)
    real = rows.places[:, None] < batch - padded
    rows = replace(rows, targets=np.where(real, rows.targets, -100), lengths=None)
    assert executor.step(rows.part(model.positions_here)) == 0.0
    assert executor.report is not None
    assert executor.report.rows == batch - padded
    gradients = whole(world, mesh, model.parameters(), [p.grad for p in model.parameters()])
    return gradients, {name: np.array(numbers) for name, numbers in executor.report.counted.items()}


def routers_learn_from_their_own_losses(world: World, routing: Routing, **how: Any) -> None:
    """C50: their gradients are not zero, and those of one rank, whatever the layout; the last experts have none."""
    alone = {name: how.pop(name) for name in ("sizes", "batch", "padded") if name in how}
    wanted, told = silent_gradients(World(Alone(), "none"), routing, **alone)
    found, counted = silent_gradients(world, routing, **alone, **how)
    assert [name for name in found if name.endswith("router.weight") and not found[name].any()] == []
    last = f"blocks.{routing.layers(SIZES.layers)[-1]}.mlp.experts."
    assert not any(array.any() for name, array in found.items() if name.startswith((last, "norm", "head")))
    worst = compare(found, wanted)[0]
    assert worst.ok, worst
    worst = compare(counted, told)[0]
    assert worst.ok, worst


# -------------------------------------------------------------------------------------------------- one expert for all


def forced(model: GPT, size: float) -> None:
    """Every token chooses expert 0: its logit is `size` times the width, those of the others the negative of it."""
    for p in model.shares():
        if p.name.endswith("norm2.bias"):
            p.master[...] = size
        elif p.name.endswith("router.weight"):
            p.master[...] = np.where(np.arange(p.master.shape[1]) == 0, 1.0, -1.0)
        p.refresh()


class Kept:
    """Whole tensors before a run and after it."""

    def __init__(self) -> None:
        self.before: dict[str, np.ndarray] = {}
        self.after: dict[str, np.ndarray] = {}
        self.gradients: list[dict[str, np.ndarray]] = []
        self.reports: list[Any] = []
        self.moments: dict[str, dict[str, np.ndarray]] = {}


def crowded(
    world: World,
    routing: Routing,
    *,
    dtype: Any = np.float64,
    size: float = 0.25,
    steps: int = 3,
    micros: int = 2,
    batch: int = 16,
    sp: bool = False,
    schedule: str = "1f1b",
    recompute: bool = False,
    empty: Sequence[int] = (),
    lr: float = 1e-3,
    zero: int = 0,
    **axes: int,
) -> Kept:
    """Some steps in which every token chooses expert 0.

    Args:
        empty: places in the global batch of rows that are padding.
    """
    mesh = Mesh(world, **axes)
    model = GPT(replace(SIZES, routing=routing), mesh, sequence_parallel=sp, seed=3, dtype=dtype, zero=zero)
    forced(model, size)
    if recompute:
        mark_recompute(model, "blocks.*", mesh.pp.exchange)
    shares = model.shares()
    optimizer = AdamW(shares, lr=lr, eps=1e-6, weight_decay=0.1)
    scaler = LossScaler(2.0**10) if np.dtype(dtype) == np.float16 else None
    rows_of = complete(schedule, ranks=mesh.pp.size, microbatches=micros)
    executor = Executor(model, optimizer, mesh, rows_of, clip=1.0, scaler=scaler)
    executor.reducer.updated()  # those who share the weights that were written get them
    kept = Kept()
    kept.before = whole(world, mesh, shares, [p.master for p in shares])
    for rows in numbers(SIZES).batches(batch, mesh.dp.rank, mesh.dp.size, stop_step=steps):
        odd = np.isin(rows.places, empty)[:, None]
        rows = replace(rows, targets=np.where(odd, -100, rows.targets), lengths=None)
        loss = executor.step(rows.part(model.positions_here))
        assert np.isfinite(loss)
        assert executor.report is not None
        assert not executor.report.skipped
        kept.reports.append(executor.report)
        kept.gradients.append(whole(world, mesh, shares, [p.grad for p in shares]))
        check_replicas(shares, mesh, "after a step in which one expert had all tokens")
    kept.after = whole(world, mesh, shares, [p.master for p in shares])
    kept.moments = states(world, mesh, optimizer)
    for p in shares:
        assert np.isfinite(to_host(p.data)).all(), p.name
    return kept


def one_expert_has_all_tokens(world: World, routing: Routing, *, empty_rank: int | None = None, **how: Any) -> None:
    """C53: the others, and ranks that hold only such, have zero gradients and change by weight decay alone.

    In float64 the whole run is that of one rank.

    Args:
        empty_rank: no row of this rank of dp has a token.
    """
    how = {"steps": 3, "lr": 1e-3, "batch": 16, **how}
    if empty_rank is not None:
        how["empty"] = tuple(numbers(SIZES).batch_at(0, how["batch"], empty_rank, how["dp"]).places.tolist())
    kept = crowded(world, routing, **how)
    if how.get("dtype", np.float64) == np.float64:
        alone = crowded(World(Alone(), "none"), routing, **{name: how[name] for name in how if name not in LAYOUT})
        for mine, theirs in ((kept.gradients[0], alone.gradients[0]), (kept.after, alone.after)):
            worst = compare(mine, theirs)[0]
            assert worst.ok, worst
    layers = [f"blocks.{n}.mlp" for n in routing.layers(SIZES.layers)]
    for report in kept.reports:
        for layer in layers:
            asked = np.array(report.counted[layer][: -len(OTHERS)])
            assert asked[0] > 0
            if routing.top_k == 1:
                assert not asked[1:].any()
    if routing.top_k > 1:
        return
    for layer, part in product(layers, ("up", "down")):
        name = f"{layer}.experts.{part}"
        for gradients in kept.gradients:
            assert gradients[name][0].any()
            assert not gradients[name][1:].any()
        for kind in kept.moments.values():
            assert not kind[name][1:].any()
        left = (1 - how["lr"] * 0.1) ** how["steps"]
        np.testing.assert_allclose(kept.after[name][1:], left * kept.before[name][1:], rtol=1e-6)
        assert np.abs(kept.after[name][0] - left * kept.before[name][0]).max() > 0.1 * how["lr"]


# For real MPI: each layout once, messages above the eager limit, and what hangs where an empty message is left out.


def check(name: str, function: Callable[..., None], *args: Any, **how: Any) -> Callable[[World], None]:
    """A check of the world under a name."""

    def run(world: World) -> None:
        function(world, *args, **how)

    run.__name__ = name
    return run


LARGE = GPTConfig(vocab=17, layers=1, width=128, heads=4, seq_len=64, routing=router("gshard", 1.25))
"""A rank sends about 128 KiB of rows to each of the others."""

CHECKS = [
    check("experts_on_every_rank", spread, dp=4, ep=4, sizes=sizes(router("switch", 1.0)), micros=4, **SHORT),
    check("experts_on_every_other_rank", spread, dp=4, ep=2, sizes=sizes(router("gshard", 1.25)), padded=True, **SHORT),
    check("experts_and_a_pipeline", spread, pp=2, dp=2, ep=2, sizes=sizes(router("topk", 0.5)), micros=4, **SHORT),
    check("experts_and_context", spread, dp=2, ep=2, cp=2, sizes=sizes(router("renormalised", 1.0)), **SHORT),
    check("experts_without_capacity", spread, dp=4, ep=2, sizes=sizes(router("gshard", None)), overlap=True, **SHORT),
    check("rows_above_the_eager_limit", spread, dp=4, ep=4, sizes=LARGE, steps=1, batch=16),
    check("losses_of_routers", routers_learn_from_their_own_losses, router("switch", 1.25), dp=4, ep=2, micros=4),
    check(
        "one_expert_for_all_in_halves", one_expert_has_all_tokens, router("switch", None), dp=4, ep=4, dtype=np.float16
    ),
    check("a_rank_without_a_token", one_expert_has_all_tokens, router("switch", 1.25), dp=4, ep=4, empty_rank=0),
]
"""On four ranks."""

EIGHT = [
    check("experts_and_sequences", spread, dp=4, ep=2, tp=2, sp=True, sizes=sizes(router("topk", 1.25)), **SHORT),
    check("all_axes", spread, pp=2, dp=2, ep=2, tp=2, sizes=sizes(router("gshard", 0.5)), micros=4, **SHORT),
]
"""On eight."""
