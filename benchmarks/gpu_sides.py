"""One side of a measurement on a GPU: a process with mpitrain's training or with PyTorch's, which does as it is told.

    check                                           side
        <-- {"ready": "mpitrain", ...}              the library is loaded
        --> {"do": "build", "dtype": "bfloat16", "mode": "plain", "task": {...}}
        <-- {"parameters": ..., "loss": ...}        a model stands, and has made a step
        --> {"do": "run", "steps": 10}
        <-- {"seconds": ...}                        of all steps together, and nothing was in flight before or after
        --> {"do": "look"}                          where the time of a step goes, and the most memory
        --> {"do": "op", "name": "attention", "dtype": "bfloat16", "size": [...]}
        --> {"do": "drop"} ... {"do": "stop"}

Both sides train the same GPT from the same initial values on the same batches, with AdamW and clipping.  A side that
waits for its next command leaves the device alone.  Answers are lines that begin with @; whatever else is printed is
not for the check.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mpitrain  # noqa: F401 - before NumPy (mpitrain/blas.py)

# isort: split
import numpy as np
from gpu_ops import OPS, Size
from gpu_timing import CupyClock, TorchClock, by_kernel, device_ms, repeated_ms, waits

from mpitrain.data.tokens import Batch
from mpitrain.models.gpt import GPTConfig

LR, BETAS, WEIGHT_DECAY, CLIP, SEED, SCALE = 6e-4, (0.9, 0.95), 0.1, 1.0, 1, 2.0**12


class Side(Protocol):
    """A library that trains."""

    clock: Any

    def build(self, config: GPTConfig, dtype: str, mode: str, values: Path) -> int:
        """Make the model and its optimizer; returns the number of parameters."""

    def step(self, batch: Batch) -> Any:
        """Put one step on the device; returns what `loss` takes."""

    def look(self, batch: Batch, busy: int) -> dict[str, Any]:
        """Where the time of a step goes: milliseconds of the host without waits; kernels by name, if known."""

    def memory(self) -> dict[str, int]:
        """Bytes: the most that was in use, and the most that the library held for it, since `build`."""

    def drop(self) -> None:
        """Forget the model and give its memory back."""

    def op(self, name: str, dtype: str, size: Size) -> float | None:
        """Milliseconds of one operation; None: there is no such."""


class Mine:
    """mpitrain, on CuPy."""

    name = "mpitrain"

    def __init__(self) -> None:
        from mpitrain import kernels
        from mpitrain.device import open_device

        self._kernels = kernels
        self._device = open_device("cuda")
        self._xp = self._device.xp
        self._pool = self._xp.get_default_memory_pool()
        self.clock: Any = None
        self._executor: Any = None
        self._most = 0

    def build(self, config: GPTConfig, dtype: str, mode: str, values: Path) -> int:
        from mpitrain.backend import dtype_of, to_host
        from mpitrain.comm.mesh import Mesh
        from mpitrain.comm.world import world
        from mpitrain.models.families import build
        from mpitrain.optim import AdamW
        from mpitrain.optim.scaler import LossScaler
        from mpitrain.pipeline.executor import Executor
        from mpitrain.pipeline.passes import complete

        mesh = Mesh(world())
        model = build(config, mesh, seed=SEED, dtype=dtype_of(dtype), xp=self._xp)
        if not values.exists():
            written = values.with_suffix(".part.npz")
            np.savez(written, **{p.name: to_host(p.master) for p in model.kept()})
            written.rename(values)
        optimizer = AdamW(model.shares(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
        scaler = LossScaler(SCALE) if dtype == "float16" else None
        rows = complete("1f1b", ranks=1, microbatches=1)
        self._executor = Executor(model, optimizer, mesh, rows, clip=CLIP, scaler=scaler)
        self._pool.free_all_blocks()  # what drawing the weights took
        return sum(int(np.prod(p.full_shape)) for p in model.parameters())

    def step(self, batch: Batch) -> Any:
        return self._executor.step(batch)

    def look(self, batch: Batch, busy: int) -> dict[str, Any]:
        with waits(self._xp) as waited:
            began = time.perf_counter()
            self.step(batch)
            host = time.perf_counter() - began - waited.seconds
        with by_kernel(self.clock) as found:
            self.clock.keep_busy(busy)
            self.step(batch)
        self._most = self._peak(batch)
        return {"host_ms": 1e3 * host, "waits": waited.times, "kernels": found()}

    def _peak(self, batch: Batch) -> int:
        """The most bytes that were in use in a step, where CuPy tells."""
        pool, cuda = self._pool, self._xp.cuda
        if not hasattr(cuda, "MemoryHook"):
            return 0

        class Peak(cuda.MemoryHook):  # type: ignore[misc]
            name = "peak"
            bytes = 0

            def malloc_postprocess(self, **how: Any) -> None:
                self.bytes = max(self.bytes, int(pool.used_bytes()))

        with Peak() as peak:
            self.step(batch)
        return int(peak.bytes)

    def memory(self) -> dict[str, int]:
        return {"used": self._most, "held": int(self._pool.total_bytes())}

    def drop(self) -> None:
        import gc

        self._executor = None
        gc.collect()
        self.clock.wait()
        self._pool.free_all_blocks()

    def op(self, name: str, dtype: str, size: Size) -> float | None:
        from mpitrain.backend import dtype_of

        return repeated_ms(self.clock, OPS[name].mine(self._xp, self._kernels, dtype_of(dtype), size))


class Torchs:
    """PyTorch, as its users write it: eager, scaled_dot_product_attention, fused AdamW.

    Modes: plain, all in one dtype; autocast, weights in float32 and products in a half.
    """

    name = "PyTorch"

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._device = torch, device
        self.clock: Any = None
        self._model: Any = None

    def build(self, config: GPTConfig, dtype: str, mode: str, values: Path) -> int:
        import twin_gpt

        torch = self._torch
        torch.manual_seed(SEED)
        model = twin_gpt.Twin(config)
        with np.load(values, allow_pickle=False) as kept:
            twin_gpt.load_values(model, config, kept)
        self._half = getattr(torch, dtype) if mode == "autocast" else None
        self._model = model.to(self._device, None if mode == "autocast" else getattr(torch, dtype))
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8, fused=True)
        if self._device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return sum(p.numel() for p in model.parameters())

    def step(self, batch: Batch) -> Any:
        torch, half = self._torch, self._half
        inputs, targets = (torch.from_numpy(x).to(self._device) for x in (batch.inputs, batch.targets))
        with torch.autocast(self._device, half, enabled=half is not None):
            loss = self._model(inputs, targets) / batch.targets.size
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        return loss.detach()

    def look(self, batch: Batch, busy: int) -> dict[str, Any]:
        self.clock.wait()
        began = time.perf_counter()
        self.step(batch)
        host = time.perf_counter() - began  # nothing in a step waits
        self.clock.wait()
        return {"host_ms": 1e3 * host, "waits": 0, "kernels": {}}

    def memory(self) -> dict[str, int]:
        if self._device != "cuda":
            return {"used": 0, "held": 0}
        cuda = self._torch.cuda
        return {"used": int(cuda.max_memory_allocated()), "held": int(cuda.max_memory_reserved())}

    def drop(self) -> None:
        import gc

        self._model = self._optimizer = None
        gc.collect()
        if self._device == "cuda":
            self._torch.cuda.empty_cache()

    def op(self, name: str, dtype: str, size: Size) -> float | None:
        make = OPS[name].torchs
        if make is None:
            return None
        return repeated_ms(self.clock, make(self._torch, getattr(self._torch, dtype), size, self._device))


def batch_of(config: GPTConfig, rows: int, step: int) -> Batch:
    """Random tokens, the same on both sides."""
    random = np.random.default_rng([SEED, step])
    tokens = random.integers(0, config.vocab, (rows, config.seq_len + 1))
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(rows), np.arange(config.seq_len), step)


def serve(side: Any, values: Path) -> None:
    """Answer commands until told to stop."""
    config, rows, done = GPTConfig(), 1, 0

    def steps(number: int) -> tuple[float, Any]:
        nonlocal done
        batches = [batch_of(config, rows, done + i) for i in range(number)]
        done += number
        side.clock.wait()
        began, loss = time.perf_counter(), None
        for batch in batches:
            loss = side.step(batch)
        side.clock.wait()
        return time.perf_counter() - began, loss

    answer({"ready": side.name})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            match command["do"]:
                case "build":
                    config, rows, done = GPTConfig(**command["task"]["config"]), command["task"]["batch"], 0
                    count = side.build(config, command["dtype"], command["mode"], values)
                    seconds, loss = steps(1)
                    answer({"parameters": count, "loss": float(loss), "first_seconds": seconds})
                case "run":
                    seconds, loss = steps(command["steps"])
                    answer({"seconds": seconds, "loss": float(loss)})
                case "look":
                    batch = batch_of(config, rows, done)
                    found = side.look(batch, command["busy"])
                    found["device_ms"] = device_ms(side.clock, partial(side.step, batch), command["busy"])
                    answer({**found, **side.memory()})
                case "drop":
                    side.drop()
                    answer({})
                case "op":
                    answer({"ms": side.op(command["name"], command["dtype"], Size(*command["size"]))})
                case "stop":
                    return
        except Exception as error:  # the check goes on with what it can
            answer({"error": f"{type(error).__name__}: {error}"[:2000]})


def answer(values: dict[str, Any]) -> None:
    print("@" + json.dumps(values), flush=True)


def main(library: str, device: str, values: str, width: int) -> None:
    side: Any = Mine() if library == "mpitrain" else Torchs(device)
    side.clock = CupyClock(side._xp, width) if library == "mpitrain" else TorchClock(side._torch, device, width)
    serve(side, Path(values))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
