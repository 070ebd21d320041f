"""Training on a GPU against NumPy in float64, and by how much lower precisions may differ.

Ranks are threads that share the device.  AdamW divides the noise of a gradient that is zero by its eps, so what is
compared in all digits is trained by SGD with momentum, or by AdamW for a few steps at a small rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import checks_cnn
import checks_layouts
import numpy as np

from mpitrain.backend import dtype_of
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.debug.compare import FLOAT64_TOLERANCE, compare
from mpitrain.models.families import build
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.llama import LlamaConfig
from mpitrain.models.sizes import DecoderConfig
from mpitrain.optim.adam import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage
from mpitrain.routing import Routing

Found = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Run:
    """A training: its ranks, what trains (`xp` says where), and how."""

    ranks: int
    train: Callable[..., Found]
    how: Mapping[str, Any] = field(default_factory=dict)


GPT = GPTConfig(vocab=61, layers=2, width=48, heads=4, seq_len=80, dropout=0.1)
LLAMA = LlamaConfig(vocab=61, layers=2, width=64, heads=4, seq_len=80, kv_heads=2, hidden=72, window=33)
EXPERTS = GPTConfig(
    vocab=61, layers=2, width=32, heads=4, seq_len=24, dropout=0.1, routing=Routing(4, top_k=2, jitter=0.02)
)
ALL_EXPERTS = GPTConfig(**{**vars(EXPERTS), "routing": Routing(3, top_k=3, capacity_factor=None)})
"""Every token has them all: with a choice that tips over in a lower precision it would be another model."""
SGD: dict[str, Any] = {"sgd": True, "batch": 6}


def _decoder(ranks: int, sizes: DecoderConfig, **how: Any) -> Run:
    return Run(ranks, checks_layouts.train, {"sizes": sizes, **SGD, **how})


RUNS: dict[str, Run] = {
    "GPT": _decoder(1, GPT, micros=2),
    "GPT, AdamW": _decoder(1, GPT, sgd=False, steps=2),
    "GPT, exact GELU, tied": _decoder(1, GPTConfig(**{**vars(GPT), "gelu": "erf", "tied": True})),
    "Llama, grouped heads, a window": _decoder(1, LLAMA, micros=2),
    "Llama, documents, padding": _decoder(1, LLAMA, documents=True, padded=True),
    "CNN": Run(1, checks_cnn.train, {"micros": 3}),
    "CNN, batch norm": Run(1, checks_cnn.train, {"norms": {"batch_norm": True}}),
    "experts": _decoder(1, EXPERTS),
    "recompute": _decoder(1, GPT, recompute=("blocks.*",)),
    "two ranks": _decoder(2, GPT, dp=2),
    "tensor parallel with sequences": _decoder(2, GPT, tp=2, sp=True),
    "ring attention": _decoder(2, GPT, cp=2),
    "experts on two ranks": _decoder(2, EXPERTS, dp=2, ep=2),
    "a pipeline, halves of backward": _decoder(2, GPT, pp=2, schedule="zb-h1", micros=3),
    "a pipeline of slices": _decoder(2, GPT, pp=2, schedule="terapipe", slices=(40, 40), micros=2),
    "ZeRO-3": _decoder(2, GPT, dp=2, zero=3),
}
"""By name; each on `ranks` ranks, equal to NumPy's in float64."""


class Judged(NamedTuple):
    """How far a run is from NumPy's: the worst difference in units of its bound, and its words."""

    share: float
    worst: str

    @property
    def ok(self) -> bool:
        return self.share <= 1.0


def trained(run: Run, xp: Any, use: Callable[[], None] = lambda: None, **more: Any) -> list[Found]:
    """What each rank found, with arrays of xp; `use` is called in the thread of each rank first."""

    def main() -> Found:
        use()
        here: World = world()
        return run.train(here, xp=xp, **{**run.how, **more})

    return LocalWorld(run.ranks).run(main)


def judged(run: Run, xp: Any, use: Callable[[], None] = lambda: None) -> Judged:
    """Train on the device and with NumPy, both in float64, and compare all that is found."""
    worst = Judged(-1.0, "")
    for mine, theirs in zip(trained(run, xp, use), trained(run, np), strict=True):
        assert mine.keys() == theirs.keys()
        for kind, tensors in theirs.items():
            for found in compare(mine[kind], tensors, FLOAT64_TOLERANCE, kind)[:1]:
                if found.share >= worst.share:
                    worst = Judged(found.share, f"{kind}: {found}")
    return worst if worst.share >= 0 else Judged(np.inf, "nothing was compared")


LOWER = {
    "GPT": _decoder(1, GPT, sgd=False, steps=20),
    "Llama": _decoder(1, LLAMA, sgd=False, steps=20),
    "experts": _decoder(1, ALL_EXPERTS, sgd=False, steps=4),
    "CNN": Run(1, checks_cnn.train),
}
"""By name: what is trained in lower precisions, too."""
LOSS_BOUND = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Allowed difference of any loss, as a share of the largest; of singles that of the numerics contract."""
GRADIENT_BOUND = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Allowed difference of the first gradients, as a share of the largest element of all."""


class Gap(NamedTuple):
    """How far a run in a lower precision is from float64: largest differences as shares, each beside its bound."""

    loss: float
    gradient: float
    dtype: str

    @property
    def ok(self) -> bool:
        return self.loss <= LOSS_BOUND[self.dtype] and self.gradient <= GRADIENT_BOUND[self.dtype]


def gap(run: Run, dtype: str, xp: Any) -> Gap:
    """Train on the device in a lower precision and with NumPy in float64."""
    lower: dict[str, Any] = {"dtype": dtype}
    if run.train is checks_cnn.train:
        lower = {"dtype": dtype_of(dtype)}
    elif dtype != "float32":
        lower |= {"scaling": "loss", "scale": 2.0**10}
    (mine,), (right,) = trained(run, xp, **lower), trained(run, np)
    kind = "losses" if "losses" in right else "told"

    def share(kind: str) -> float:
        largest = max(np.abs(x).max() for x in right[kind].values())
        return float(max(np.abs(mine[kind][name] - x).max() / largest for name, x in right[kind].items()))

    return Gap(share(kind), share("gradients"), dtype)


def bits(run: Run, dtype: str, xp: Any) -> bytes:
    """All that a run in some precision finds."""
    found = trained(run, xp, dtype=dtype)[0]
    return b"".join(array.tobytes() for tensors in found.values() for array in tensors.values())


def held_after_steps(xp: Any, pool: Any, steps: tuple[int, ...]) -> list[int]:
    """Bytes that the device's pool holds after so many steps of a model with everything, of one training."""
    mesh = Mesh(world())
    model = build(GPT, mesh, seed=3, dtype=np.dtype(np.float32), xp=xp)
    executor = Executor(model, AdamW(model.shares()), mesh, with_update(one_stage(2)), clip=0.5)
    held = []
    for step, batch in enumerate(checks_layouts.numbers(GPT).batches(6, stop_step=max(steps))):
        executor.step(batch)
        if step + 1 in steps:
            held.append(int(pool.total_bytes()))
    return held
