"""From settings to parts: corpus, model, optimizer, executor, each as the settings say.

Whatever can be wrong is said on every rank at once: a rank that fails alone (a file that only one host lacks) tells the
others by `comm.together`, so that all stop with the same error instead of waiting for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.backend import dtype_of
from mpitrain.comm.devices import memory_of
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.comm.world import World
from mpitrain.config import Config
from mpitrain.config_rules import check_memory, frozen, lr_factors
from mpitrain.data import corpus as corpora
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.device import CPU, Device
from mpitrain.errors import ConfigError, DataError
from mpitrain.memory.gist import Gist
from mpitrain.memory.policy import Policy
from mpitrain.model_rules import rope_scaling
from mpitrain.models.decoder import Decoder
from mpitrain.models.families import build
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.llama import LlamaConfig
from mpitrain.models.profile import measured_costs
from mpitrain.models.sizes import DecoderConfig
from mpitrain.models.transformer import branches
from mpitrain.nn.module import mark_recompute
from mpitrain.nn.rotary import Scaling
from mpitrain.offloading import Elsewhere, build_elsewhere
from mpitrain.optim.adafactor import Adafactor
from mpitrain.optim.adam import AdamW
from mpitrain.optim.groups import Group
from mpitrain.optim.lr import SCHEDULES as LR_SCHEDULES
from mpitrain.optim.lr import warmup_updates
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.scaler import BlockScaler, LossScaler, Scaler
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.data import BucketedReducer, FlatReducer, Reducer
from mpitrain.parallel.local_sgd import LocalSgd
from mpitrain.parallel.powersgd import TABLES, Choice, PowerSgd
from mpitrain.parallel.stale import Stale, StaleWorkers
from mpitrain.parallel.zero import RowReducer
from mpitrain.pipeline.action import Schedule
from mpitrain.pipeline.check import check
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition, balance
from mpitrain.pipeline.passes import complete, with_offload, without_backward
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.slicing import equal_cost_slices
from mpitrain.plan.memory.choice import recomputed_blocks
from mpitrain.plan.memory.offload import OPTIMIZER, PARAMETERS
from mpitrain.plan.traffic import Step, Workers
from mpitrain.recording.outside import heard
from mpitrain.tokenizing.start import read_words

ASKS = 2
"""What ranks are asked at the end of each step of a training: whether to stop, and whether a save is under way."""


def run_folder(config: Config, world: World) -> Path:
    """The folder of the run: the one that is given, or a new one in `runs/` whose name the first rank chooses."""
    if config.run is not None:
        return Path(config.run)
    name = heard("name of the run", lambda: f"{config.model}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    name = name if world.rank == 0 else ""
    return Path("runs") / str(world.exchange(name)[0])


def read_corpus(
    config: Config,
    world: World,
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """The corpus, in the words of a tokenizer if there is one, proven to be the same on all ranks.

    Args:
        config: the settings.
        world: all ranks.
        tokenizer: the same on all of them.
        say: tells people how far it is, where it takes long.

    Raises:
        DataError: it cannot be read, or ranks on different hosts read different text.
    """
    if tokenizer is not None:
        corpus: Corpus | None = read_words(config, world, tokenizer, say)
    else:
        corpus = together(world, lambda: corpora.load(config.data))
    assert corpus is not None
    hashes = world.exchange(corpus.identity)
    odd = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
    if odd:
        raise DataError(
            f"{corpus.source} is not the same text on all ranks: rank {odd[0]} reads sha256 {hashes[odd[0]][:12]}, "
            f"rank 0 {hashes[0][:12]}.\nGive every host the same file with --data PATH, and the same Python."
        )
    return corpus


def sizes_of(config: Config, vocab: int) -> DecoderConfig:
    """The sizes of the model.

    Args:
        config: the settings.
        vocab: words of the text; the model has as many, or more if it is told so.

    Raises:
        ConfigError: it is told to have fewer, or the ranks of tp do not divide the hidden units of an MLP.
    """
    if config.vocab is not None and config.vocab < vocab:
        raise ConfigError(f"--vocab {config.vocab}: the text has {vocab:,} words, and the model needs a row for each.")
    numbers: dict[str, Any] = {
        "vocab": vocab if config.vocab is None else config.vocab,
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "seq_len": config.seq_len,
        "dropout": config.dropout,
        "tied": config.tied,
        "kv_heads": config.kv_heads,
        "hidden": config.hidden,
        "window": config.window,
    }
    if config.norm_eps is not None:
        numbers["eps"] = config.norm_eps
    if config.family == "gpt":
        numbers |= {"gelu": config.gelu, "routing": config.routing}
    if config.rope_theta is not None:
        numbers["rope_theta"] = config.rope_theta
    if config.rope_scaling is not None:
        numbers["rope_scaling"] = Scaling(**rope_scaling(config.rope_scaling))
    sizes = GPTConfig(**numbers) if config.family == "gpt" else LlamaConfig(**numbers)
    if sizes.units % config.tp:
        near = max(config.tp, round(sizes.units / config.tp) * config.tp)
        raise ConfigError(
            f"--hidden {sizes.units} is not divisible by --tp {config.tp}: every rank holds as many hidden units of an"
            f" MLP.  Try --hidden {near}."
        )
    return sizes


def build_model(config: Config, corpus: Corpus, mesh: Mesh, device: Device = CPU) -> Decoder:
    """The model with its initial values, on the device of this rank.

    Raises:
        ConfigError: it cannot fit into the memory of this host or device.
    """
    sizes = sizes_of(config, corpus.vocab_size)
    dtype = together(mesh.world, lambda: dtype_of(config.dtype))  # a host may lack bfloat16
    partition = build_partition(config, sizes, mesh, device.xp)
    memory = memory_of(mesh.world, device)
    counts = sizes.num_parameters, mesh.dp.size, sizes.num_expert_parameters
    together(mesh.world, lambda: check_memory(config, *counts, *memory))
    like = device.xp.empty(0, dtype)
    overlapping = SCHEDULES[config.schedule_name].versions is not None
    rows = complete_rows(config, 2 * config.pp if overlapping else 1)
    elsewhere = build_elsewhere(config, _step_of(config, mesh, sizes, dtype, partition), rows, mesh, like)
    has_parameters = elsewhere is not None and PARAMETERS in elsewhere.plan.what
    model = build(
        sizes,
        mesh,
        sequence_parallel=config.sequence_parallel,
        cp_attention=config.cp_attention,
        expert_overlap=config.expert_overlap,
        partition=partition,
        seed=config.seed,
        dtype=dtype,
        xp=device.xp,
        keep_scores=config.recompute == "none",
        scales=BlockScaler(branches(config.layers)) if config.scaling == "blocks" else None,
        zero=3 if has_parameters else config.zero,
        prefetch=config.prefetch,
        home=elsewhere.home if elsewhere is not None and has_parameters else None,
        freeze=frozen(config),
    )
    model.elsewhere = elsewhere
    if elsewhere is not None and elsewhere.plan.what and not has_parameters:
        elsewhere.home.take_in(model.flats)
    for block in model.blocks:
        block.recompute = config.recompute == "full"
    if config.recompute_modules is not None:
        mark_recompute(model, [name.strip() for name in config.recompute_modules.split(",")], mesh.pp.exchange)
    if config.recompute_budget is not None:
        mark_recompute(model, _blocks_within(config, mesh, model, config.recompute_budget))
    return model


def _blocks_within(config: Config, mesh: Mesh, model: Decoder, budget: float) -> list[str]:
    """Names of the blocks of this rank that are made again so that its activations fit into so many MiB.

    Raises:
        ConfigError: some rank's do not fit whatever is made again; on every rank.
    """
    overlapping = SCHEDULES[config.schedule_name].versions is not None
    rows = build_rows(config, 2 * config.pp if overlapping else 1)  # as many as fill the pipeline
    rows = without_backward(rows, model.trains_from)
    step, row, checked = step_of(config, mesh, model), rows[mesh.pp.rank], check(rows, model.trains_from)
    found = together(mesh.world, lambda: recomputed_blocks(step, row, checked, round(budget * 2**20)))
    return sorted(found or ())


def step_of(config: Config, mesh: Mesh, model: Decoder, row: int = 1) -> Step:
    """A step as this rank sees it, for the formulas of `plan`; `row` of them overlap."""
    again = frozenset(module.name for module in model.modules() if module.recompute)
    as_asked = again == {block.name for block in model.blocks if config.recompute == "full"}
    step = _step_of(config, mesh, model.config, model.like.dtype, model.partition)
    return replace(step, row=row, recomputed=None if as_asked else again, zero=model.zero)


def _step_of(config: Config, mesh: Mesh, sizes: DecoderConfig, dtype: Any, partition: Partition) -> Step:
    """The same before there is a model; which parts are made again by name is not known then."""
    slices = slice_lengths(config, sizes)
    return Step(
        sizes,
        config.batch,
        config.microbatches,
        dtype,
        dp=mesh.dp.size,
        tp=mesh.tp.size,
        cp=mesh.cp.size,
        sequence_parallel=config.sequence_parallel,
        cp_attention=config.cp_attention,
        tp_rank=mesh.tp.rank,
        pp=mesh.pp.size,
        pp_rank=mesh.pp.rank,
        partition=partition,
        slices=None if slices is None else tuple(slices),
        recompute=config.recompute,
        scaled=config.scaling == "blocks",
        optimizer=config.optimizer,
        ep=mesh.ep.size,
        packed=config.pack,
        expert_overlap=config.expert_overlap,
        dp_rank=mesh.dp.rank,
        cp_rank=mesh.cp.rank,
        zero=config.zero,
        prefetch=config.prefetch,
        bucket_bytes=round(config.bucket_mib * 2**20),
        compression=compression(config),
        workers=_workers(config),
        gist=gist_bits(config),
        asks=ASKS,
        freeze=frozen(config),
    )


def build_partition(config: Config, sizes: DecoderConfig, mesh: Mesh, xp: Any = np) -> Partition:
    """Which blocks are on which stage: as given, or so that the most expensive stage costs least.

    What a stage costs is its number of blocks, its parameters, its operations, or the time of its parts as rank 0
    measures them, with arrays of `xp`; all ranks get the same answer.
    """
    stages = config.pp * config.num_chunks
    blocks: Sequence[float] = [1.0] * sizes.layers
    embedding, head = 0.0, 0.0
    if config.stage_layers is not None:
        return Partition(tuple(map(int, config.stage_layers.split(","))))
    match config.balance:
        case "parameters":
            embedding, blocks, head = sizes.parameters_of_parts
        case "flops":
            embedding, blocks, head = sizes.flops_of_parts
        case "measured" if stages > 1:
            rows = config.batch // (mesh.dp.size * config.microbatches)
            found = None
            if mesh.world.rank == 0:
                dtype = dtype_of(config.dtype)
                found = heard(
                    "costs of stages", lambda: measured_costs(sizes, rows, dtype, config.seed, xp, mesh.ep.size)
                )
            embedding, blocks, head = mesh.world.exchange(found)[0]
    return balance(blocks, stages, first=embedding, last=head)


def build_rows(config: Config, batches: int = 1, elsewhere: Elsewhere | None = None) -> Schedule:
    """The actions of every pipeline rank."""
    rows = complete_rows(config, batches)
    distance = None if elsewhere is None else elsewhere.fetch_distance
    return rows if distance is None else with_offload(rows, distance)


def complete_rows(config: Config, batches: int = 1) -> Schedule:
    """The same without what is offloaded."""
    return complete(
        config.schedule_name,
        ranks=config.pp,
        microbatches=config.microbatches,
        chunks=config.num_chunks,
        slices=config.num_slices,
        batches=batches,
    )


def slice_lengths(config: Config, sizes: DecoderConfig) -> list[int] | None:
    """Lengths into which terapipe cuts each sequence: of one cost, so later ones, which see more keys, are shorter."""
    if config.num_slices == 1:
        return None
    costs = [sizes.flops_of_a_token(block) for block in range(sizes.layers)]
    linear, quadratic = map(sum, zip(*costs, strict=True))
    return equal_cost_slices(sizes.seq_len, config.num_slices, linear, quadratic)


def parameter_groups(config: Config) -> list[Group]:
    """Which parameters have another learning rate."""
    return [Group(pattern, factor) for pattern, factor in lr_factors(config)]


def build_optimizer(config: Config, model: Decoder, mesh: Mesh) -> Optimizer:
    """The optimizer over all parameters of this rank.

    Raises:
        ConfigError: a group of parameters has no member in the whole model; on every rank.
    """
    parameters, lr, decay = model.kept(), config.lr, config.weight_decay  # the optimizer leaves out what is frozen
    groups = parameter_groups(config)
    where: dict[str, Any] = {}
    if model.elsewhere is not None:
        plan = model.elsewhere.plan
        where = {"window": plan.window, "ahead": plan.distance}
        if OPTIMIZER in plan.what:
            where["keep"] = model.elsewhere.home.keep
    match config.optimizer:
        case "sgd":
            momentum = config.momentum
            return Sgd(parameters, lr=lr, momentum=momentum, weight_decay=decay, groups=groups, mesh=mesh, **where)
        case "adafactor":
            return Adafactor(parameters, mesh=mesh, lr=lr, eps=(config.eps**2, 1e-3), weight_decay=decay, groups=groups)
        case _:
            betas = config.beta1, config.beta2
            numbers: dict[str, Any] = {"lr": lr, "betas": betas, "eps": config.eps, "weight_decay": decay}
            return AdamW(parameters, groups=groups, mesh=mesh, **numbers, **where)


def build_scaler(config: Config, model: Decoder) -> Scaler | None:
    """What keeps gradients from underflow, or None: then an executor scales those of float16 models of its own."""
    match config.scaling:
        case "dynamic":
            return LossScaler(config.first_scale, window=config.scale_window, floor=min(1.0, config.first_scale))
        case "static":
            return LossScaler(config.first_scale, window=0, floor=config.first_scale)
        case "blocks":
            assert isinstance(model.branch_scales, BlockScaler)
            return model.branch_scales
        case _:
            return LossScaler(1.0, window=0) if config.dtype == "float16" else None


def compression(config: Config) -> Choice | None:
    """What of the gradients is compressed, and how far; None: nothing."""
    if config.reducer != "powersgd":
        return None
    return Choice(config.powersgd_rank, () if config.powersgd_tables else TABLES)


def _workers(config: Config) -> Workers | None:
    """How workers learn that do so apart from each other; None: gradients of all ranks are summed."""
    clips = config.clip > 0
    if config.reducer == "stale" and config.stale_workers:
        return Workers(clips=clips)
    if config.reducer != "local":
        return None
    kept = {"adamw": 2, "sgd": int(config.momentum > 0)}.get(config.optimizer, 0)
    return Workers(config.local_steps, kept if config.average_moments else 0, clips)


def build_reducer(config: Config, model: Decoder, optimizer: Optimizer, mesh: Mesh) -> Reducer:
    """How gradients are summed over ranks."""
    bucket_bytes = round(config.bucket_mib * 2**20)
    if model.zero:
        return RowReducer(model, mesh, bucket_bytes, overlap=config.reducer == "bucketed")
    match config.reducer:
        case "bucketed":
            return BucketedReducer(model.flats, mesh, bucket_bytes=bucket_bytes)
        case "powersgd":
            return PowerSgd(
                model.flats,
                mesh,
                config.powersgd_rank,
                start=config.powersgd_start,
                warm_start=not config.powersgd_fixed,
                feedback=config.powersgd_feedback,
                exact=() if config.powersgd_tables else TABLES,
                seed=config.seed,
            )
        case "stale":
            if config.stale_workers:
                return StaleWorkers(model.flats, mesh, config.staleness)
            return Stale(model.flats, mesh, config.staleness, config.stale_start)
        case "local":
            return LocalSgd(model.flats, mesh, optimizer, config.local_steps, config.average_moments)
        case _:
            return FlatReducer(model.flats, mesh)


def build_policy(config: Config, elsewhere: Elsewhere | None = None) -> Policy | None:
    """How what is saved waits for backward; None: as it is."""
    inner = None if config.gist is None else Gist(gist_bits(config))
    return inner if elsewhere is None else elsewhere.policy(inner)


def gist_bits(config: Config) -> int | None:
    """Bits in which what need not be exact waits for backward; None: all is exact."""
    return None if config.gist in (None, "lossless") else int(config.gist)


def build_executor(
    config: Config,
    model: Decoder,
    optimizer: Optimizer,
    mesh: Mesh,
    steps: int,
    ask: Callable[[], Sequence[float]] = tuple,
) -> Executor:
    """The executor with its schedule, reducer, clipping and learning rates for a run of `steps`.

    Args:
        ask: see `Executor`; of a training it gives `ASKS` numbers.
    """
    warmup = warmup_updates(config.warmup, steps)
    kind = SCHEDULES[config.schedule_name]
    return Executor(
        model,
        optimizer,
        mesh,
        (lambda batches: build_rows(config, batches, model.elsewhere))
        if kind.versions
        else build_rows(config, 1, model.elsewhere),
        versions=kind.versions,
        slices=slice_lengths(config, model.config),
        reducer=build_reducer(config, model, optimizer, mesh),
        clip=config.clip,
        scaler=build_scaler(config, model),
        policy=build_policy(config, model.elsewhere),
        lr=lambda update: LR_SCHEDULES[config.lr_schedule](
            update, steps, warmup, config.lr, config.lr_final * config.lr
        ),
        ask=ask,
    )
