"""What the start block says of a run: the model, the ranks and where they run, the text."""

from __future__ import annotations

import os
from pathlib import Path

from mpitrain import kernels
from mpitrain.comm.mesh import Mesh
from mpitrain.config import Config
from mpitrain.data.corpus import Corpus
from mpitrain.models.gpt import GPT
from mpitrain.plan.traffic import Step, traffic


def facts(config: Config, mesh: Mesh, model: GPT, corpus: Corpus, folder: Path) -> list[tuple[str, str]]:
    """Labels and values, in the order in which they are printed."""
    world = mesh.world
    grid = str(mesh).splitlines()[0].removeprefix(f"mesh of {world.size} ranks: ")
    micro = f", in {config.microbatches} micro-batches" if config.microbatches > 1 else ""
    sums = "in rank order (deterministic)" if world.deterministic else "in the order of the MPI library"
    return [
        (
            "model",
            f"{config.model}: {config.layers} layers, width {config.width}, {_heads(config)}, "
            f"{config.seq_len} tokens, {'tied' if config.tied else 'untied'} head",
        ),
        ("parameters", f"{model.num_parameters:,} in {config.dtype}, {len(model.parameters())} tensors"),
        ("batch", f"{config.batch} sequences, {config.batch // mesh.dp.size} a rank{micro}"),
        ("mesh", ", ".join([grid.removeprefix("mesh of 1 rank: "), *_cuts(config, mesh)])),
        (
            "kernels",
            kernels.level() if len(kernels.levels()) > 1 else "NumPy only, slower (mpitrain doctor says what to do)",
        ),
        ("ranks", f"{world.size} on {_cores()}, {blas_threads()} BLAS thread each"),
        (
            "messages",
            "; ".join(filter(None, (world.library, f"{config.reducer} sums {sums}", world.progress)))
            if world.size > 1
            else "none: one rank",
        ),
        *([("traffic", _traffic(config, mesh, model))] if world.size > 1 else []),
        *([("checks", "every message and the state of every value, at every step")] if config.check else []),
        ("corpus", str(corpus)),
        ("run", str(folder)),
    ]


def _traffic(config: Config, mesh: Mesh, model: GPT) -> str:
    """What this rank sends in a step, by axis."""
    step = Step(
        model.config,
        config.batch,
        config.microbatches,
        model.flats[0].weights.dtype,
        dp=mesh.dp.size,
        tp=mesh.tp.size,
        cp=mesh.cp.size,
        sequence_parallel=config.sequence_parallel,
        cp_attention=config.cp_attention,
        tp_rank=mesh.tp.rank,
    )
    return str(traffic(step))


def _heads(config: Config) -> str:
    grouped = config.kv_heads is not None and config.kv_heads != config.heads
    return f"{config.heads} heads" + (f" ({config.kv_heads} of keys and values)" if grouped else "")


def _cuts(config: Config, mesh: Mesh) -> list[str]:
    """What besides the axes says how values are cut."""
    return ["sequence parallel on tp"] * (config.sequence_parallel and mesh.tp.size > 1) + [
        f"{config.cp_attention} attention over cp"
    ] * (mesh.cp.size > 1)


def _cores() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{cores} core{'s' if cores != 1 else ''}"


def blas_threads() -> str:
    """Threads of the BLAS that NumPy uses, as it says itself; `?` where it cannot be asked."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return os.environ.get("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "?"))
    counts = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return str(max(counts)) if counts else "?"
