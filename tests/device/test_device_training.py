"""Training on device arrays: every layout gives the NumPy run in float64, and nothing crosses that need not.

Equal means the same bits where the host computes by NumPy's formulas, too, and the bound of `debug.compare` (1e-10 of
the largest element) where it uses compiled kernels, which round elsewhere.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from often import some
from strict_array import crossings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
from checks_data_parallel import SIZES, train

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.compare import compare
from mpitrain.errors import NumericsError
from mpitrain.models.families import build
from mpitrain.models.generate import generate, write
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.models.llama import LlamaConfig
from mpitrain.models.mlp import MLP
from mpitrain.models.sampling import Sampling
from mpitrain.optim.adam import AdamW
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

PLAIN = replace(SIZES, dropout=0.0, gelu="erf", tied=True)
LAYOUTS = {
    "one rank": (1, {}),
    "one rank, two micro-batches": (1, {"micros": 2}),
    "one rank, no dropout, tied, exact GELU": (1, {"sizes": PLAIN}),
    "two ranks": (2, {}),
    "two ranks, deterministic": (2, {"deterministic": True, "micros": 2}),
    "two ranks, buckets": (2, {"bucket_bytes": 4096, "micros": 2}),
    "three ranks, buckets, deterministic": (3, {"bucket_bytes": 4096, "deterministic": True}),
    "two ranks, SGD with momentum, no dropout": (2, {"sgd": True, "sizes": PLAIN}),
    "tensor parallel": (2, {"tp": 2}),
    "data and tensor parallel": (4, {"tp": 2, "micros": 2}),
}


def run(xp: Any, micros: int = 1, deterministic: bool = False, **how: Any) -> dict[str, dict[str, np.ndarray]]:
    w = world()
    w.set_deterministic(deterministic)
    return train(w, micros, steps=4, xp=xp, **how)


@pytest.mark.parametrize("layout", some(LAYOUTS, 2))
def test_losses_norms_gradients_weights_and_moments_have_the_bits_of_numpy(cupy, numpy_kernels, layout):
    ranks, how = LAYOUTS[layout]
    on_device = LocalWorld(ranks).run(lambda: run(cupy, **how))
    on_host = LocalWorld(ranks).run(lambda: run(np, **how))
    for mine, theirs in zip(on_device, on_host, strict=True):
        assert mine.keys() == theirs.keys()
        for kind, tensors in theirs.items():
            for name, array in tensors.items():
                assert mine[kind][name].tobytes() == array.tobytes(), (kind, name)
    assert on_device[0]["losses"]["loss"][-1] < on_device[0]["losses"]["loss"][0]


def test_a_host_with_compiled_kernels_trains_alike(cupy):
    """Not AdamW, which divides the noise of a gradient that is zero by its eps."""
    mine, theirs = (LocalWorld(2).run(lambda xp=xp: run(xp, 2, sgd=True))[1] for xp in (cupy, np))
    for kind in theirs:
        worst = compare(mine[kind], theirs[kind])[0]
        assert worst.ok, f"{kind}: {worst}"


def test_buckets_give_the_bits_of_one_message_in_deterministic_mode(cupy):
    flat, cut = (LocalWorld(2).run(lambda size=size: run(cupy, 2, True, bucket_bytes=size))[1] for size in (0, 4096))
    for kind, tensors in flat.items():
        for name, array in tensors.items():
            assert array.tobytes() == cut[kind][name].tobytes(), (kind, name)


def tokens(seq_len: int = SIZES.seq_len) -> Tokens:
    numbers = (np.arange(3000) * 7919 % 104729 % 17).astype(np.uint8)
    return Tokens(Corpus(numbers[:2700], numbers[2700:], 17, "bytes", "numbers", (), (), ""), seq_len)


def executor_of(xp: Any, micros: int = 1, **how: Any) -> Executor:
    mesh = Mesh(world())
    model = GPT(SIZES, mesh, dtype=np.float64, xp=xp)
    return Executor(model, AdamW(model.parameters()), mesh, with_update(one_stage(micros)), clip=0.5, **how)


@pytest.mark.parametrize("micros", [1, 3])
def test_a_step_crosses_for_its_tokens_its_loss_its_norm_and_its_message_only(cupy, micros):
    """No op waits for the device: what is counted does not grow with the model."""

    def main() -> None:
        executor = executor_of(cupy, micros)
        batches = tokens().batches(6, executor.mesh.dp.rank, executor.mesh.dp.size, stop_step=2)
        executor.step(next(batches))
        with crossings() as step:
            executor.step(next(batches))
        arrays_of_a_batch, messages = 4, int(executor.mesh.dp.size > 1)
        norms = 1  # losses, squares of gradients, what tells whether the optimizer's state is sound: at once
        assert step == Counter(asarray=arrays_of_a_batch * micros, set=messages, get=messages + norms)
        with crossings() as evaluation:
            executor.evaluate([next(tokens().validation(4))])
        assert evaluation == {"asarray": arrays_of_a_batch, "get": 1}

    for ranks in (1, 2):
        LocalWorld(ranks).run(main)


def test_validation_gives_the_loss_of_numpy(cupy):
    def main(xp: Any) -> float:
        executor = executor_of(xp)
        dp = executor.mesh.dp
        return executor.evaluate(tokens().validation(4, dp.rank, dp.size))

    on_device, on_host = (LocalWorld(2).run(main, xp) for xp in (cupy, np))
    assert on_device == pytest.approx(on_host, rel=1e-12)


def test_a_batch_may_be_on_the_device_before_the_step(cupy):
    losses = []
    for there in (False, True):
        executor = executor_of(cupy)
        batch = tokens().batch_at(0, 4)
        losses.append(executor.step(batch.to(executor.model.table.weight.data) if there else batch))
    assert losses[0] == losses[1]


def test_the_same_text_is_generated(cupy):
    texts = [list(generate(GPT(SIZES, Mesh(world()), dtype=np.float64, xp=xp), [1, 2, 3], 12)) for xp in (cupy, np)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("window", [None, 3])
def test_the_same_texts_of_several_lengths_are_written(cupy, window):
    """With a window the longest is filled in with more keys than have room."""
    config = LlamaConfig(vocab=19, layers=2, width=16, heads=4, kv_heads=2, seq_len=12, window=window)
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    texts = [
        np.stack(list(write(build(config, Mesh(world()), dtype=np.float64, xp=xp), prompts, 10, Sampling()))).tolist()
        for xp in (cupy, np)
    ]
    assert texts[0] == texts[1]


def test_replicas_on_devices_are_compared(cupy):
    def main() -> None:
        mesh = Mesh(world())
        check_replicas(GPT(SIZES, mesh, xp=cupy).parameters(), mesh, "at the start")

    LocalWorld(2).run(main)


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_changed(cupy):
    executor = executor_of(cupy)
    head = executor.model.parameters()[-1]
    assert head.name == "head.weight"
    head.data[0, 0] = np.inf
    before = [flat.weights.get() for flat in executor.model.flats]
    with pytest.raises(NumericsError, match=r"the weight head.weight was not finite before the step"):
        executor.step(tokens().batch_at(0, 4))
    for flat, weights in zip(executor.model.flats, before, strict=True):
        np.testing.assert_array_equal(flat.weights.get(), weights)


def test_single_precision_stays_single_precision(cupy):
    mesh = Mesh(world())
    losses = []
    for xp in (cupy, np):
        model = GPT(GPTConfig(vocab=17, layers=1, width=8, heads=2, seq_len=6, dropout=0.1), mesh, xp=xp)
        executor = Executor(model, AdamW(model.parameters()), mesh, with_update(one_stage(1)), clip=1.0)
        losses.append([executor.step(batch) for batch in tokens().batches(4, stop_step=3)])
        assert {p.grad.dtype for p in model.parameters()} == {np.dtype(np.float32)}
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@dataclass
class Points:
    """A batch for the MLP, as a script of one's own would have it."""

    inputs: Any
    targets: Any

    @property
    def count(self) -> int:
        return len(self.targets)

    def split(self, parts: int) -> list[Points]:
        cuts = zip(np.split(self.inputs, parts), np.split(self.targets, parts), strict=True)
        return [Points(inputs, targets) for inputs, targets in cuts]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("nesterov", [False, True])
def test_an_mlp_trains_alike(cupy, tp, nesterov):
    def main(xp: Any) -> dict[str, Any]:
        mesh = Mesh(world(), tp=tp)
        model = MLP((3, 8, 4, 5), mesh, seed=2, dtype=np.float64, xp=xp)
        optimizer = Sgd(model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
        executor = Executor(model, optimizer, mesh, with_update(one_stage(2)))
        rng = np.random.default_rng(mesh.dp.rank)
        losses = [executor.step(Points(rng.standard_normal((8, 3)), rng.integers(0, 5, 8))) for _ in range(4)]
        return {"loss": np.array(losses), **{p.name: p.data for p in model.parameters()}}

    for mine, theirs in zip(LocalWorld(2).run(main, cupy), LocalWorld(2).run(main, np), strict=True):
        worst = compare(mine, theirs)[0]
        assert worst.ok, str(worst)


def test_a_batch_that_lies_on_the_device_already_stays_there(cupy):
    model = GPT(SIZES, Mesh(world()), dtype=np.float64, xp=cupy)
    batch = tokens().batch_at(0, 4).to(model.table.weight.data)
    with crossings() as counted:
        loss = model(batch)
    assert not counted
    assert loss.item() == pytest.approx(GPT(SIZES, Mesh(world()), dtype=np.float64)(tokens().batch_at(0, 4)).item())
