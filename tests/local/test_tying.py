"""Weights that parts of different stages share: at the ends of a pipeline, on one rank, and where it cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.errors import ConfigError
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Embedding, Linear
from mpitrain.nn.module import Boundary, Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.adam import AdamW
from mpitrain.parallel.data import BucketedReducer
from mpitrain.parallel.zero import RowReducer, gather_units
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.spec import REPLICATE, Shard

VOCAB, WIDTH, STAGES = 7, 4, 4
ENDS = {"ends": REPLICATE}


class Chain(Module):
    """A table, two layers, the table again as the head: four stages, of which two may share a layer's weight.

    Args:
        mesh: the layout.
        spec: of the table.
        shared: stages that use one weight.
        held: stages that hold the table.
    """

    num_stages = STAGES

    def __init__(
        self,
        mesh: Mesh,
        spec: Any = None,
        shared: tuple[int, ...] = (),
        held: tuple[int, ...] = (0, 3),
        zero: int = 0,
    ) -> None:
        super().__init__("chain")
        self.stages = tuple(range(mesh.pp.rank, STAGES, mesh.pp.size))
        table = Parameter("table.weight", (VOCAB, WIDTH), spec, init=initial.normal(0.5), decay=True)
        common = Parameter("common.weight", (WIDTH, WIDTH), init=initial.fan_in(), decay=True)
        self.at: dict[int, Module] = {}
        for stage in self.stages:
            tied = common if stage in shared else None
            if stage == 0:
                part: Module = Embedding("table", VOCAB, WIDTH, tied=table if 0 in held else None)
            elif stage == 3:
                part = Linear("head", WIDTH, VOCAB, bias=False, tied=table if 3 in held else None)
            else:
                part = Linear(f"layer{stage}", WIDTH, WIDTH, tied=tied, transposed=stage == 2)
            self.at[stage] = part
        self.layers = [*self.at.values()]
        self.materialize(mesh, seed=2, dtype=np.float64, zero=zero)
        gather_units(self, mesh)

    def parts(self, stage: int) -> list[Module]:
        return [self.at[stage]]

    def forward_stage(self, stage: int, batch: Batch, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = self.at[stage](batch.inputs if stage == 0 else inputs[0])
        return (ops.softmax_cross_entropy(made, batch.targets),) if stage == 3 else (ops.tanh(made),)

    def boundary(self, stage: int, batch: Batch) -> tuple[Boundary, ...]:
        return (Boundary((*batch.inputs.shape, WIDTH), np.float64, {"dp": Shard(0)}),) if stage else ()


def batches(dp: int, rank: int) -> list[Batch]:
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 4, 6))
    mine = slice(rank * 4 // dp, (rank + 1) * 4 // dp)
    return [Batch(x[mine, :-1], x[mine, 1:], np.arange(4)[mine], np.arange(5), step) for step, x in enumerate(ids)]


def trained(pp: int, dp: int = 1, buckets: bool = False, **how: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and norms of two steps, and the weights of a rank."""
    mesh = Mesh(world(), pp=pp, dp=dp)
    model = Chain(mesh, **how)
    if model.zero:
        reducer: Any = RowReducer(model, mesh, 32, overlap=buckets)
    else:
        reducer = BucketedReducer(model.flats, mesh, 32) if buckets else None
    rows = complete("interleaved", ranks=pp, microbatches=2, chunks=STAGES // pp)
    executor = Executor(model, AdamW(model.shares(), lr=0.1), mesh, rows, reducer=reducer, clip=0.5)
    found = []
    for batch in batches(dp, mesh.dp.rank):
        executor.step(batch)
        assert executor.report is not None
        found += [executor.report.loss, executor.report.grad_norm]
    return found, {p.name: p.master.copy() for p in model.shares() if p.full_shape == p.master.shape}


def of_ranks(ranks: int, *args: Any, **how: Any) -> list[Any]:
    return LocalWorld(ranks, timeout=60).run(lambda: trained(*args, **how))


@pytest.mark.parametrize("shared", [(), (1, 2)], ids=["the table", "and a layer"])
def test_one_rank_may_share_whatever_it_holds(shared: tuple[int, ...]) -> None:
    """Its stages' gradients add up before they leave, also where buckets leave early, or rows in every walk."""
    alone, weights = of_ranks(1, 1, shared=shared)[0]
    assert ("common.weight" in weights) == bool(shared)
    for how in ({"buckets": True}, {"zero": 1}, {"zero": 2, "buckets": True}, {"zero": 3}):
        for found, mine in of_ranks(2, 1, 2, shared=shared, **how):
            np.testing.assert_allclose(found, alone, rtol=1e-12, err_msg=str(how))
            for name, weight in mine.items():
                np.testing.assert_allclose(weight, weights[name], atol=1e-10, err_msg=f"{how} {name}")


@pytest.mark.parametrize("how", [{}, {"buckets": True}, {"zero": 2}, {"zero": 3}], ids=str)
def test_the_ends_of_a_pipeline_share_a_weight(how: dict[str, Any]) -> None:
    """Its gradient is the sum of both, it counts once in the norm, and both ends have the same bits of it."""
    alone, weights = of_ranks(1, 1)[0]
    for found, mine in of_ranks(4, 2, 2, spec=ENDS, **how):
        np.testing.assert_allclose(found, alone, rtol=1e-12)
        for name, weight in mine.items():
            np.testing.assert_allclose(weight, weights[name], atol=1e-10)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, r"table\.weight is held by ranks 0 and 3 of axis pp: two stages"),
        ({"shared": (1, 2), "spec": ENDS}, r"common\.weight is held by ranks 1 and 2 of axis pp: two stages"),
        ({"held": (0,), "spec": ENDS}, r"table\.weight is tied over the ends .* but rank 0 of axis pp holds it"),
    ],
    ids=["no spec", "stages between", "one end"],
)
def test_weights_that_stages_cannot_share_are_refused(how: dict[str, Any], message: str) -> None:
    """On every rank, within five lines; else they would be two weights that learn apart, or a sum that never ends."""
    with pytest.raises(ConfigError, match=message) as caught:
        of_ranks(4, 4, **how)
    assert len(str(caught.value).splitlines()) <= 5
