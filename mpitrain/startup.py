"""What the start block says of a run: the model, the ranks and where they run, the text."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mpitrain import kernels
from mpitrain.assemble import build_rows, compression, step_of
from mpitrain.backend import is_half
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.config import Config
from mpitrain.config_rules import ASYNCHRONOUS
from mpitrain.data.packing import PackedTokens
from mpitrain.data.tokens import Tokens
from mpitrain.device import CPU, Device
from mpitrain.faults import plan
from mpitrain.metrics.sinks import files
from mpitrain.models.decoder import Decoder
from mpitrain.offloading import describe
from mpitrain.optim.scaler import power
from mpitrain.pipeline.partition import describe as describe_partition
from mpitrain.pipeline.passes import without_backward
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.simulate import Costs, simulate
from mpitrain.plan.traffic import Step, Traffic, traffic
from mpitrain.plan.traffic.slabs import all_slabs
from mpitrain.plan.traffic.way_back import way_back
from mpitrain.routing import Routing

MUCH_IDLE = 0.25  # of a step, from which on the start block says what helps
IDLE_OVER = 16  # batches of an asynchronous schedule over which its idle time is told


def facts(
    config: Config, mesh: Mesh, model: Decoder, tokens: Tokens, folder: Path, device: Device = CPU
) -> list[tuple[str, str]]:
    """Labels and values, in the order in which they are printed."""
    world, corpus = mesh.world, tokens.corpus
    grid = str(mesh).splitlines()[0].removeprefix(f"mesh of {world.size} ranks: ")
    micro = f", in {config.microbatches} micro-batches" if config.microbatches > 1 else ""
    sums = "in rank order (deterministic)" if world.deterministic else "in the order of the MPI library"
    return [
        (
            "model",
            f"{config.model}: {config.layers} layers, width {config.width}, {_heads(config)}, {_hidden(config, model)}"
            f"{config.seq_len} tokens{_window(config)}{_scaling(config)}, {'tied' if config.tied else 'untied'} head",
        ),
        ("parameters", f"{_parameters(model)} in {config.dtype}, {_tensors(mesh, model)}"),
        *([("frozen", _frozen(config, mesh, model))] if config.freeze is not None else []),
        *([("experts", _experts(config.routing, mesh, config.expert_overlap))] if config.routing is not None else []),
        *([("precision", _precision(config))] if is_half(model.like.dtype) or config.scaling != "none" else []),
        *([("recompute", _recompute(config, model))] if _recompute(config, model) else []),
        *([("offload", describe(model.elsewhere, config))] if model.elsewhere is not None else []),
        *([("gist", _gist(config.gist))] if config.gist is not None else []),
        *([("zero", _zero(config, model))] if config.zero else []),
        ("batch", f"{config.batch} sequences, {config.batch // mesh.dp.size} a rank{micro}"),
        *([("pipeline", _pipeline(config, mesh, model))] if mesh.pp.size > 1 else []),
        ("mesh", ", ".join([grid.removeprefix("mesh of 1 rank: "), *_cuts(config, mesh)])),
        *([("device", str(device))] if device.kind != "cpu" else []),
        ("kernels", _kernels(device)),
        ("ranks", f"{world.size} on {_cores()}, {blas_threads()} BLAS thread each"),
        (
            "messages",
            "; ".join(filter(None, (world.library, f"{config.reducer} sums {sums}", world.progress, _arrays(world))))
            if world.size > 1
            else "none: one rank",
        ),
        *([("asynchronous", _asynchronous(config))] if config.reducer in ASYNCHRONOUS else []),
        *([("compression", _compression(config, mesh, model))] if config.reducer == "powersgd" else []),
        *([("traffic", _traffic(config, mesh, model))] if world.size > 1 else []),
        *([("checks", "every message and the state of every value, at every step")] if config.check else []),
        *([("faults", "; ".join(map(str, plan(config.faults, world.size))))] if config.faults is not None else []),
        ("corpus", str(corpus)),
        *([("packed", str(tokens))] if isinstance(tokens, PackedTokens) else []),
        *([("tokenizer", f"{config.tokenizer}: {corpus.tokenizer}")] if corpus.tokenizer is not None else []),
        *([("metrics", ", ".join(("metrics.jsonl", *files(config.sinks))))] if config.sinks else []),
        ("run", str(folder)),
    ]


def _arrays(world: World) -> str:
    """How arrays of devices travel, where there are any."""
    return f"arrays of devices go {world.device_messages}" if world.device_messages else ""


def _kernels(device: Device) -> str:
    """What computes: the level on the host, and on a device its own kernels or CuPy by the formulas."""
    host = kernels.level() if len(kernels.levels()) > 1 else "NumPy only, slower (mpitrain doctor says what to do)"
    if device.kind == "cpu":
        return host
    return f"{'CUDA' if kernels.serves_devices() else 'formulas'} on the device; on the host {host}"


def _frozen(config: Config, mesh: Mesh, model: Decoder) -> str:
    """What is not trained of the whole model, and where backward ends."""
    step = step_of(config, mesh, model)
    tensors = [*all_slabs(Step(model.config, 1, freeze=step.freeze))]
    fixed = [slab for slab in tensors if slab.frozen]
    count = sum(slab.size for slab in fixed)
    stages = f", stage {model.trains_from} of {model.num_stages}" if model.num_stages > 1 else ""
    return (
        f"{len(fixed)} of {len(tensors)} tensors, {count:,} of {model.config.num_parameters:,} weights;"
        f" backward ends at {way_back(step).lowest}{stages}"
    )


def _parameters(model: Decoder) -> str:
    """How many, and with experts how many of them a token meets."""
    count, met = model.config.num_parameters, model.config.num_active_parameters
    return f"{count:,}" + (f" ({met:,} a token)" if met < count else "")


def _precision(config: Config) -> str:
    """Masters, and how gradients are scaled."""
    masters = "float32 masters, gradients and moments; " if config.dtype in ("float16", "bfloat16") else ""
    scaling = {
        "none": "gradients without a scale",
        "dynamic": f"loss scale {power(config.first_scale)}, doubled after {config.scale_window} clean steps",
        "static": f"loss scale {power(config.first_scale)}, fixed",
        "blocks": "a scale for each residual branch, float32 stream",
    }
    return masters + scaling[config.scaling]


def _experts(routing: Routing, mesh: Mesh, overlap: bool) -> str:
    """How many, how tokens choose them, and how much room they have."""
    where = {1: "every block", 2: "every other block"}.get(routing.every, f"every {routing.every}th block")
    of_a_token = f"{routing.top_k} a token" + (" (weights sum to 1)" if routing.normalizes else "")
    factor = routing.capacity_factor
    room = "dropless" if factor is None else f"room for {factor:g} times an even share of each sequence"
    here = f"{routing.experts // mesh.ep.size} on a rank{', half by half' * overlap}, " if mesh.ep.size > 1 else ""
    losses = [f"balance loss x {routing.balance_loss:g}"] * (routing.balance_loss > 0)
    losses += [f"z-loss x {routing.z_loss:g}"] * (routing.z_loss > 0)
    losses += [f"jitter {routing.jitter:g}"] * (routing.jitter > 0)
    return "; ".join([f"{routing.experts} in {where}, {here}{of_a_token}", f"{routing.router} router", room, *losses])


def _recompute(config: Config, model: Decoder) -> str:
    """What backward makes again besides attention scores; '' for nothing."""
    blocks = sum(block.recompute for block in model.blocks)
    others = [m.name for m in model.modules() if m.recompute and m not in model.blocks]
    said = [f"{blocks} of {len(model.blocks)} blocks here"] * (blocks > 0) + others[:4] + ["..."] * (len(others) > 4)
    kept = "attention scores are kept" if config.recompute == "none" else ""
    return "; ".join(filter(None, (", ".join(said), kept)))


def _gist(kind: str) -> str:
    """How what is saved waits for backward."""
    lossless = "masks and signs wait as bits, arrays with many zeros without them"
    return lossless if kind == "lossless" else f"factors of gradients wait in {kind} bits; {lossless}"


def _zero(config: Config, model: Decoder) -> str:
    """What ranks deal out, and how much of it is here."""
    what = {1: "optimizer state", 2: "gradients and optimizer state", 3: "weights, gradients and optimizer state"}
    own, whole = (sum(p.data.size for p in held) for held in (model.kept(), model.parameters()))
    ahead = f", {config.prefetch} part{'s' * (config.prefetch != 1)} fetched ahead" if config.zero == 3 else ""
    return f"stage {config.zero}: {what[config.zero]} of {own:,} of {whole:,} weights here{ahead}"


def _traffic(config: Config, mesh: Mesh, model: Decoder) -> str:
    """What a rank sends in a step, by axis: this one, and of a pipeline the one whose stages send most."""
    step = step_of(config, mesh, model)
    most = max((traffic(replace(step, pp_rank=rank)) for rank in range(step.pp)), key=Traffic.total)
    return str(most) if step.pp == 1 or most.at_most else f"at most {most}"


def _asynchronous(config: Config) -> str:
    """What is computed in the place of synchronous training, and what it is the same as."""
    late, apart = (f"{number} step{'s' * (number != 1)}" for number in (config.staleness, config.local_steps))
    if config.reducer == "stale" and not config.stale_workers:
        start = f" after {config.stale_start} updates" if config.stale_start else ""
        return (
            f"gradients come {late} late{start}: the same on every layout, and not what synchronous training computes"
        )
    if config.reducer == "stale":
        said = f"gradients of worker i come i mod {config.staleness + 1} steps late"
    else:
        moments = "and moments " if config.average_moments else ""
        said = f"workers learn apart for {apart}, then their weights {moments}are averaged"
    return f"{said}: every layout is a training run of its own"


def _compression(config: Config, mesh: Mesh, model: Decoder) -> str:
    """What of the gradients of this rank travels as factors, from when on, and what is done otherwise than usual."""
    choice = compression(config)
    assert choice is not None
    found = [(p, choice.of_parameter(p, mesh.sizes)) for p in model.parameters() if not p.frozen]
    sizes = [(p.grad.size, m.left + m.right) for p, m in found if m is not None]
    whole, factors = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
    said = [f"PowerSGD of rank {choice.rank}: {len(sizes)} of {len(found)} tensors, {whole:,} numbers as {factors:,}"]
    said += [f"after {config.powersgd_start} updates"] * (config.powersgd_start > 0)
    said += ["one random factor for all steps"] * config.powersgd_fixed
    said += ["no feedback of errors"] * (not config.powersgd_feedback)
    return "; ".join(said)


def _tensors(mesh: Mesh, model: Decoder) -> str:
    number = len(model.parameters())
    return f"{number} tensors" if mesh.pp.size == 1 else f"{number} tensors on this rank"


def _pipeline(config: Config, mesh: Mesh, model: Decoder) -> str:
    """Stages, schedule, and for how much of a step ranks have nothing to do if operations take equal time."""
    flush = SCHEDULES[config.schedule].versions is None
    embedding, blocks, head = model.config.flops_of_parts
    stages = map(model.partition.range, range(model.partition.stages))
    costs = [float(sum(blocks[number] for number in stage)) for stage in stages]
    costs[0] += embedding
    costs[-1] += head
    rows = without_backward(build_rows(config, 1 if flush else IDLE_OVER), model.trains_from)
    played = simulate(rows, Costs(f=costs, b=costs, w=costs), trains_from=model.trains_from)
    over = "of a step" if flush else f"in a row of {IDLE_OVER} batches"
    idle = f"about {100 * played.bubble:.0f} % idle {over}"
    empty = sum(blocks == 0 for blocks in model.partition.layers)
    if empty:
        idle += f": {empty} stage{'s have' if empty > 1 else ' has'} no block"
    elif played.bubble > MUCH_IDLE:
        idle += ": more --microbatches, or another --balance, idle less"
    return f"{config.schedule}, blocks {describe_partition(model.partition)}; {idle}"


def _heads(config: Config) -> str:
    grouped = config.kv_heads is not None and config.kv_heads != config.heads
    return f"{config.heads} heads" + (f" ({config.kv_heads} of keys and values)" if grouped else "")


def _hidden(config: Config, model: Decoder) -> str:
    """Units of an MLP where they are not the 4 widths that a reader expects."""
    return f"{model.config.units} hidden units, " if model.config.units != 4 * config.width else ""


def _window(config: Config) -> str:
    return "" if config.window is None else f", each of which sees {config.window}"


def _scaling(config: Config) -> str:
    """How rotary positions are stretched."""
    return "" if config.rope_scaling is None else f", positions scaled {config.rope_scaling}"


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
