"""From settings to parts: corpus, model, optimizer, executor, each as the settings say.

Whatever can be wrong is said on every rank at once: a rank that fails alone (a file that only one host lacks) tells the
others by `comm.together`, so that all stop with the same error instead of waiting for it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from mpitrain.backend import dtype_of
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.comm.world import World
from mpitrain.config import Config
from mpitrain.config_rules import check_memory
from mpitrain.data import corpus as corpora
from mpitrain.data.corpus import Corpus
from mpitrain.errors import DataError
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.models.profile import measured_costs
from mpitrain.optim.adam import AdamW
from mpitrain.optim.lr import warmup_cosine, warmup_updates
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.data import BucketedReducer, FlatReducer, Reducer
from mpitrain.pipeline.action import Schedule
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition, balance
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.slicing import equal_cost_slices


def run_folder(config: Config, world: World) -> Path:
    """The folder of the run: the one that is given, or a new one in `runs/` whose name the first rank chooses."""
    if config.run is not None:
        return Path(config.run)
    name = f"{config.model}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}" if world.rank == 0 else ""
    return Path("runs") / str(world.exchange(name)[0])


def read_corpus(config: Config, world: World) -> Corpus:
    """The corpus, proven to be the same on all ranks.

    Raises:
        DataError: it cannot be read, or ranks on different hosts read different text.
    """
    corpus = together(world, lambda: corpora.load(config.data))
    assert corpus is not None
    hashes = world.exchange(corpus.sha256)
    odd = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
    if odd:
        raise DataError(
            f"{corpus.source} is not the same text on all ranks: rank {odd[0]} reads sha256 {hashes[odd[0]][:12]}, "
            f"rank 0 {hashes[0][:12]}.\nGive every host the same file with --data PATH, and the same Python."
        )
    return corpus


def gpt_config(config: Config, vocab: int) -> GPTConfig:
    """The sizes of the model."""
    return GPTConfig(
        vocab=vocab,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        seq_len=config.seq_len,
        dropout=config.dropout,
        tied=config.tied,
        gelu=config.gelu,
        kv_heads=config.kv_heads,
    )


def build_model(config: Config, corpus: Corpus, mesh: Mesh) -> GPT:
    """The model with its initial values.

    Raises:
        ConfigError: it cannot fit into this host's memory.
    """
    sizes = gpt_config(config, corpus.vocab_size)
    partition = build_partition(config, sizes, mesh)
    here = mesh.world.exchange(mesh.world.host).count(mesh.world.host)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    together(mesh.world, lambda: check_memory(config, sizes.num_parameters, mesh.dp.size, here, memory))
    return GPT(
        sizes,
        mesh,
        sequence_parallel=config.sequence_parallel,
        cp_attention=config.cp_attention,
        partition=partition,
        seed=config.seed,
        dtype=dtype_of(config.dtype),
    )


def build_partition(config: Config, sizes: GPTConfig, mesh: Mesh) -> Partition:
    """Which blocks are on which stage: as given, or so that the most expensive stage costs least.

    What a stage costs is its number of blocks, its parameters, its operations, or the time of its parts as rank 0
    measures them; all ranks get the same answer.
    """
    stages = config.pp * config.num_chunks
    embedding, block, head = 0.0, 1.0, 0.0
    if config.stage_layers is not None:
        return Partition(tuple(map(int, config.stage_layers.split(","))))
    match config.balance:
        case "parameters":
            embedding, block, head = sizes.parameters_of_parts
        case "flops":
            embedding, block, head = sizes.flops_of_parts
        case "measured" if stages > 1:
            rows = config.batch // (mesh.dp.size * config.microbatches)
            found = measured_costs(sizes, rows, dtype_of(config.dtype), config.seed) if mesh.world.rank == 0 else None
            embedding, block, head = mesh.world.exchange(found)[0]
    return balance([block] * sizes.layers, stages, first=embedding, last=head)


def build_rows(config: Config, batches: int = 1) -> Schedule:
    """The actions of every pipeline rank."""
    return complete(
        config.schedule_name,
        ranks=config.pp,
        microbatches=config.microbatches,
        chunks=config.num_chunks,
        slices=config.num_slices,
        batches=batches,
    )


def slice_lengths(config: Config, sizes: GPTConfig) -> list[int] | None:
    """Lengths into which terapipe cuts each sequence: of one cost, so later ones, which see more keys, are shorter."""
    if config.num_slices == 1:
        return None
    linear, quadratic = sizes.flops_of_a_token
    return equal_cost_slices(sizes.seq_len, config.num_slices, linear, quadratic)


def build_optimizer(config: Config, model: GPT) -> Optimizer:
    """The optimizer over all parameters of this rank."""
    if config.optimizer == "sgd":
        return Sgd(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return AdamW(model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)


def build_executor(config: Config, model: GPT, optimizer: Optimizer, mesh: Mesh, steps: int) -> Executor:
    """The executor with its schedule, reducer, clipping and learning rates for a run of `steps`."""
    reducer: Reducer
    if config.reducer == "bucketed":
        reducer = BucketedReducer(model.flats, mesh, bucket_bytes=round(config.bucket_mib * 2**20))
    else:
        reducer = FlatReducer(model.flats, mesh)
    warmup = warmup_updates(config.warmup, steps)
    kind = SCHEDULES[config.schedule_name]
    return Executor(
        model,
        optimizer,
        mesh,
        (lambda batches: build_rows(config, batches)) if kind.versions else build_rows(config),
        versions=kind.versions,
        slices=slice_lengths(config, model.config),
        reducer=reducer,
        clip=config.clip,
        lr=lambda update: warmup_cosine(update, steps, warmup, config.lr),
    )
