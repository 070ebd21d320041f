"""The settings of a training run: one table, from which flags, files, help and checks are made.

A field of `Config` is an option: its name, kind, default, range and help stand once, here.

    python train.py --layers 4 --lr 1e-3              flags
    python train.py --config run.toml --lr 1e-3       a TOML file, and flags that win over it
    Config(layers=4, lr=1e-3)                         Python

A `Config` that exists is valid in itself: every value is in its range, and sizes that must divide one another do.  What
takes the ranks to know is asked of `config_rules.check_layout` and `check_memory`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mpitrain import disk
from mpitrain.backend import DTYPES
from mpitrain.catalog import MODELS, OF_MODEL, family_of
from mpitrain.config_rules import OF_REDUCERS, check_settings
from mpitrain.device import DEVICES
from mpitrain.errors import ConfigError
from mpitrain.options import (
    Interval,
    Option,
    choice,
    file_text,
    help_text,
    number,
    option_of,
    read_file,
    read_flags,
    show,
    switch,
    text,
    whole,
)
from mpitrain.pipeline.schedules import DEFAULT_CHUNKS, SCHEDULES
from mpitrain.routing import DEFAULT_BALANCE, DEFAULT_CAPACITY, ROUTERS, Routing

DEFAULT_SLICES = 4
OF_SCHEDULES = ("chunks", "slices")
"""Options that mean something for one schedule only."""
BALANCES = ("layers", "parameters", "flops", "measured")
"""What a partition into stages can deal out evenly."""
DEFAULT_LR: Mapping[str, float] = {"adamw": 2.5e-3, "sgd": 2.5e-3, "adafactor": 0.05}
"""Optimizers by name, and the peak of their learning rate where none is given."""
LR_SCHEDULES = ("cosine", "linear", "inverse-sqrt", "constant")
"""Those of `mpitrain.optim.lr`, the default first."""
CONTEXT_KINDS = ("ring", "ulysses", "rsa")
"""Kinds of context-parallel attention (`mpitrain.parallel.context`), the default first."""
RECOMPUTES = ("none", "selective", "full")
GISTS = ("lossless", "16", "10", "8")
"""How what is saved for backward may be encoded: without loss, or also rounded to so many bits."""
DEVICE_MESSAGES = ("auto", "staged", "mpi", "nccl")
"""How arrays of devices travel (`mpitrain.comm.device_messages`), the default first."""
REDUCERS = ("flat", "bucketed", "powersgd", "stale", "local")
"""How gradients are summed over ranks, the default first."""
SCALINGS = ("none", "dynamic", "static", "blocks")
"""How gradients are scaled: not at all, by one power of two that adapts or stays, by a number for each branch."""
DEFAULT_SCALE = {"loss_scale": 2**16, "loss_scale_window": 1000}
BUDGET = 255.0  # seconds of training where neither --steps nor --budget is given: a run of five minutes with its start

DEFAULT_EVALUATIONS = 5  # of the validation loss, the last one included
FEWEST_BETWEEN = 250  # steps between two of them; one takes as long as some 40 steps of the default model

_MONTH = 30 * 24 * 3600
_OF_MODEL = "default: the model's"


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run; see `--help` for what each is.

    The sizes of `mpitrain.catalog.OF_MODEL` are those of `model` where they are not given, and `lr` is that of
    `optimizer`.  Of `steps` and `budget` exactly one is set: the budget is turned into steps once, by `fixed`, before
    the first one.

    Raises:
        ConfigError: a value outside its range, or two that do not go together.
    """

    model: str = choice("gpt-mini", "whose sizes are used", MODELS)
    layers: int = whole(None, "blocks", 1, 1000, unset=_OF_MODEL)
    width: int = whole(None, "size of the residual stream, a multiple of --heads", 1, 65536, unset=_OF_MODEL)
    heads: int = whole(None, "attention heads", 1, 1024, unset=_OF_MODEL)
    seq_len: int = whole(None, "tokens of a sequence", 1, 1048576, unset=_OF_MODEL)
    kv_heads: int | None = whole(
        None,
        "heads of keys and values, each shared by a group of --heads",
        1,
        1024,
        unset="default: the model's, else as many as --heads",
    )
    hidden: int | None = whole(
        None,
        "hidden units of an MLP",
        1,
        2**20,
        unset="default: the model's, else 4 times --width; llama 8/3 times, a multiple of 64",
    )
    window: int | None = whole(
        None, "how many positions a query sees, its own and those before it", 1, 2**20, unset="default: all before it"
    )
    tied: bool = switch(False, "use the token table as the output head too, or not", off="untied")
    gelu: str = choice("tanh", "GPT-2's approximation of GELU, or the exact one", ("tanh", "erf"))
    norm_eps: float | None = number(
        None, "number added in norms", Interval(0, 1, above=True), unset="default: the model's, else 1e-5"
    )
    rope_theta: float | None = number(
        None,
        "llama: base of the angles by which positions turn queries and keys",
        Interval(1, 10**12, above=True),
        unset="default: the model's, else 10000",
    )
    rope_scaling: str | None = text(
        None,
        "llama: how these angles are stretched: linear:FACTOR, or llama3:FACTOR,LOW,HIGH,LENGTH",
        metavar="KIND:X,...",
        unset="default: the model's, else not at all",
    )
    vocab: int | None = whole(
        None, "words of the model, at least those of the text", 1, 2**24, unset="default: as many as the text has"
    )
    dropout: float = number(0.0, "share of activations that are dropped", Interval(0, 1, below=True), metavar="P")
    dtype: str = choice("float32", "precision of weights, activations and messages", DTYPES)

    experts: int | None = whole(
        None, "a mixture of so many experts in the place of MLPs", 1, 2**16, unset="default: none, MLPs"
    )
    top_k: int = whole(None, "experts of a token", 1, 2**16, metavar="K", unset="default: 1, gshard 2")
    router: str | None = choice(
        None,
        "how tokens choose: top 1, top 2 with a random second, or top k",
        ROUTERS,
        unset="default: switch for --top-k 1, gshard for 2, else topk",
    )
    capacity_factor: float | None = number(
        None,
        "room of an expert, as a multiple of an even share of a sequence's choices; who finds none is dropped",
        Interval(0, 10**6, above=True),
        metavar="F",
        unset=f"default: {DEFAULT_CAPACITY:g}",
    )
    dropless: bool = switch(False, "experts take all that come, as they do in evaluation")
    renormalize: bool = switch(False, "--router topk: the weights of a token's experts sum to 1")
    moe_every: int = whole(1, "1: experts in all blocks; 2: in every second one; ...; in the others MLPs", 1, 1000)
    balance_loss: float | None = number(
        None,
        "coefficient of the loss that spreads tokens over experts",
        Interval(0, 10**9),
        metavar="A",
        unset=f"default: {DEFAULT_BALANCE:g}, gshard {DEFAULT_BALANCE:g} times the square of --experts",
    )
    z_loss: float = number(
        0.0, "coefficient of the loss that keeps router logits small", Interval(0, 10**6), metavar="A"
    )
    jitter: float = number(
        0.0, "noise on the router's input in training, as a share of it", Interval(0, 1, below=True), metavar="E"
    )

    data: str | None = text(
        None,
        "text to learn: a file, a folder, or a token file (uint16, *.bin)",
        metavar="PATH",
        unset="default: the source of Python's standard library",
    )
    tokenizer: str | None = text(
        None,
        "words of the text: a tokenizer.json, or so many made of the text",
        metavar="PATH|bpe:N",
        unset="default: bytes, or the tokens of a token file",
    )
    pack: bool = switch(False, "whole files of --data side by side in a sequence, none of which sees another")
    seed: int = whole(0, "seed of the initial weights, the data order and dropout", 0, 2**63 - 1)

    batch: int = whole(16, "sequences of a step, over all ranks and micro-batches", 1, 2**24)
    microbatches: int = whole(1, "parts into which a rank's share of the batch is cut", 1, 2**16)
    steps: int | None = whole(None, "steps of the run", 1, 10**9, unset="default: what --budget allows")
    budget: float | None = number(
        None,
        "train about this long; ten timed steps tell how many that makes",
        Interval(1, _MONTH),
        metavar="SECONDS",
        unset=f"default {BUDGET:g} where --steps is not given",
    )
    optimizer: str = choice("adamw", "rule that updates the weights", DEFAULT_LR)
    lr: float = number(
        None,
        "peak learning rate; adafactor: the largest step, as a share of the weights",
        Interval(0, 10),
        unset=f"default: {DEFAULT_LR['adamw']:g}, adafactor {DEFAULT_LR['adafactor']:g}",
    )
    lr_schedule: str = choice("cosine", "how the learning rate goes on after the warm-up", LR_SCHEDULES)
    lr_final: float = number(0.0, "cosine, linear: share of the peak at which they end", Interval(0, 1))
    lr_groups: str | None = text(
        None,
        "factors on the learning rate by parameter, as 'table.*=0.5,*.bias=2'; the first match wins",
        metavar="PATTERN=X,...",
        unset="default: none",
    )
    freeze: str | None = text(
        None,
        "parameters that are not trained, by name or part, as 'table,blocks.0,*.bias'; all but the head: '*,!head'",
        metavar="PATTERN,...",
        unset="default: none",
    )
    warmup: float = number(0.03, "linear warm-up, as a share of the steps below 1, else in steps", Interval(0, 10**9))
    weight_decay: float = number(0.1, "decoupled weight decay on matrices and embeddings", Interval(0, 10))
    beta1: float = number(0.9, "adamw: decay of the mean of gradients", Interval(0, 1, below=True))
    beta2: float = number(0.99, "adamw: decay of the mean of squared gradients", Interval(0, 1, below=True))
    eps: float = number(
        1e-8, "adamw, adafactor: size of a gradient below which it moves ever less", Interval(0, 1, above=True)
    )
    momentum: float = number(0.9, "sgd: decay of the velocity", Interval(0, 1, below=True))
    clip: float = number(1.0, "largest global norm of the gradient (0: no clipping)", Interval(0, 10**6))
    loss_scaling: str | None = choice(
        None,
        "what keeps small gradients from becoming 0",
        SCALINGS,
        unset="default: dynamic for float16, else none",
    )
    loss_scale: float | None = number(
        None,
        "dynamic, static: scale of the loss at the start, a power of two",
        Interval(2.0**-24, 2.0**40),
        unset=f"default: {DEFAULT_SCALE['loss_scale']}",
    )
    loss_scale_window: int | None = whole(
        None,
        "dynamic: clean steps after which the scale is doubled",
        1,
        10**9,
        unset=f"default: {DEFAULT_SCALE['loss_scale_window']}",
    )

    recompute: str = choice(
        "selective", "what backward makes again: nothing, attention scores, or whole blocks", RECOMPUTES
    )
    recompute_modules: str | None = text(
        None,
        "parts of the model that are made again besides, as blocks.*.mlp,blocks.0.attention",
        metavar="NAME,...",
        unset="default: none",
    )
    recompute_budget: float | None = number(
        None,
        "make as few blocks again as keep the activations of a rank within this",
        Interval(0, 2**30, above=True),
        metavar="MIB",
        unset="default: no bound",
    )
    gist: str | None = choice(
        None,
        "encode what backward waits for, without loss or rounded to so many bits (Gist)",
        GISTS,
        unset="default: as it is",
    )

    offload: str | None = text(
        None,
        "what lives elsewhere and is fetched ahead: some of optimizer,activations,parameters, or none",
        metavar="WHAT,...",
        unset="default: what --memory-budget needs, else nothing",
    )
    offload_to: str = text("host", "where: host memory, or a file of each rank in a folder", metavar="host|hdf5:DIR")
    memory_budget: str | None = text(
        None,
        "bytes that a rank may hold of weights, gradients, optimizer state and activations",
        metavar="2GiB",
        unset="default: no bound",
    )

    pp: int = whole(1, "pipeline stages: ranks over which the layers are dealt out", 1, 2**20)
    schedule: str = choice("1f1b", "order in which the stages of --pp work", SCHEDULES)
    chunks: int | None = whole(
        None, "interleaved: stages of each rank of --pp", 1, 2**10, unset=f"default: {DEFAULT_CHUNKS}"
    )
    slices: int | None = whole(
        None, "terapipe: slices into which every sequence is cut", 1, 2**16, unset=f"default: {DEFAULT_SLICES}"
    )
    balance: str = choice("layers", "what is dealt out evenly over the stages", BALANCES)
    stage_layers: str | None = text(
        None, "blocks of each stage, as 3,2,2,1", metavar="N,N,...", unset="default: what --balance comes to"
    )
    dp: int | None = whole(None, "ranks over which the batch is divided", 1, 2**20, unset="default: all that are left")
    tp: int = whole(1, "ranks over which every layer is cut: heads, hidden units, vocabulary", 1, 2**20)
    sequence_parallel: bool = switch(False, "cut norms, dropouts and residuals over --tp too, along the sequence")
    ep: int = whole(1, "ranks of --dp over which experts are spread", 1, 2**20)
    expert_overlap: bool = switch(False, "half of a rank's experts work while the tokens of the other half travel")
    cp: int = whole(1, "ranks over which every sequence is cut", 1, 2**20)
    cp_attention: str = choice("ring", "how attention reaches the keys of other ranks of --cp", CONTEXT_KINDS)
    zero: int = whole(
        0,
        "what data ranks deal out: 1 optimizer state, 2 gradients too, 3 weights too (ZeRO)",
        0,
        3,
    )
    prefetch: int = whole(
        1, "--zero 3, --offload: how many parts (of the model, of tapes, of state) are fetched ahead", 0, 1000
    )
    reducer: str = choice(
        "flat",
        "gradients in one message, in buckets during backward, or compressed; stale and local harm learning",
        REDUCERS,
    )
    bucket_mib: float = number(
        1.0, "bucketed, and --zero: MiB of gradients that close a bucket", Interval(0, 4096, above=True)
    )
    powersgd_rank: int = whole(
        4, "powersgd: columns of the two factors in whose place a gradient travels", 1, 2**16, metavar="R"
    )
    powersgd_start: int = whole(0, "powersgd: updates with exact sums before the first compressed one", 0, 10**9)
    powersgd_tables: bool = switch(False, "powersgd: compress the tables of words and positions and the head, too")
    powersgd_fixed: bool = switch(False, "powersgd: each step begins with the random factor of the start, not the last")
    powersgd_feedback: bool = switch(
        True, "powersgd: what a step leaves out is added to the next gradient; without it training is harmed"
    )
    staleness: int = whole(1, "stale: steps that gradients come late", 0, 10**4, metavar="K")
    stale_start: int = whole(0, "stale: updates with gradients on time before the first late one", 0, 10**9)
    stale_workers: bool = switch(False, "stale: each worker comes late by its own number of steps, at most --staleness")
    local_steps: int = whole(8, "local: steps after which workers average their weights", 1, 10**9, metavar="H")
    average_moments: bool = switch(False, "local: the optimizer's moments are averaged, too")
    device: str = choice("cpu", "what computes: the CPU, or for each rank a GPU of its host, by CuPy", DEVICES)
    device_messages: str = choice(
        "auto",
        "how arrays of GPUs travel: staged through page-locked memory of the host, by an mpi that takes them as they"
        " are, or by nccl, with one rank a GPU; auto: mpi where it passes a probe, else staged",
        DEVICE_MESSAGES,
    )
    deterministic: bool = switch(False, "sum in rank order, one BLAS thread: the same bits on every MPI")
    check: bool = switch(False, "check every message, and of every value the state and that it is finite, at some cost")
    check_replicas: int = whole(
        100, "compare what ranks hold alike every N steps, and before each save (0: never)", 0, 10**9
    )
    memory: bool = switch(False, "tell what holds how much memory on which rank, beside what was predicted")
    digests: int = whole(
        0,
        "write sums of all that is computed in each N-th step, and in the first three, to DIR/digests of --run, for"
        " mpitrain compare (0: never)",
        0,
        10**9,
        session=True,
    )
    trace: bool = switch(
        False, "write what every rank does, and when, to DIR/trace of --run, for mpitrain trace", session=True
    )
    trace_ops: int = whole(
        10,
        "--trace: operations are noted in each N-th step, besides the first three (1: in all)",
        1,
        10**9,
        session=True,
    )
    trace_limit: int = whole(
        64, "--trace: MiB that a rank keeps, of the first steps and the newest", 1, 10**6, session=True
    )
    record: str | None = text(
        None,
        "keep what every rank sends and receives in a new folder, for mpitrain replay; sums in rank order",
        metavar="DIR",
        unset="default: nothing is kept",
        session=True,
    )
    record_ranks: str | None = text(
        None, "--record: only these ranks", metavar="N,N,...", unset="default: all", session=True
    )
    record_steps: str | None = text(
        None,
        "--record: only these steps, as 100:103, with what the ranks hold before the first",
        metavar="FIRST:LAST",
        unset="default: all",
        session=True,
    )
    record_sent: str = choice(
        "values", "--record: what is kept of what a rank sends", ("values", "digest"), session=True
    )
    timeout: float = number(300.0, "end the job when a message waits this long", Interval(1, _MONTH), metavar="SECONDS")
    start_timeout: float | None = number(
        None,
        "end the job when a rank has not arrived after this long",
        Interval(1, _MONTH),
        metavar="SECONDS",
        unset="default: MPITRAIN_START_TIMEOUT, else 300",
    )

    run: str | None = text(None, "folder of the run", metavar="DIR", unset="default: a new one in runs/")
    log_every: int | None = whole(None, "print a line every N steps", 1, 10**9, unset="default: about 50 lines a run")
    eval_every: int | None = whole(
        None,
        "measure the validation loss every N steps (0: only at the end)",
        0,
        10**9,
        unset="default: about 5 times a run, at least 250 steps apart",
    )
    metrics: str | None = text(
        None,
        "write metrics.jsonl of --run also as: csv, tensorboard, or both joined by a comma",
        metavar="KIND,...",
        unset="default: metrics.jsonl alone",
    )
    save_every: int = whole(0, "save a checkpoint every N steps, and at the end (0: never)", 0, 10**9)
    stop_after: int | None = whole(
        None,
        "save and stop after step N, to go on with --resume",
        1,
        10**9,
        unset="default: go to the end",
        session=True,
    )
    keep: int | None = whole(
        None, "keep the newest N checkpoints and remove older ones", 2, 10**6, unset="default: all"
    )
    async_save: bool = switch(False, "--save-every: copy what is saved, and write it while training goes on")
    read_back: bool = switch(False, "read each checkpoint from the disk before it counts")
    max_seconds: float | None = number(
        None,
        "save and stop in time to end by then, counted from the start, with exit code 85",
        Interval(0, _MONTH, above=True),
        metavar="SECONDS",
        unset="default: no limit",
        session=True,
    )
    resume: str | None = text(
        None,
        "go on from the newest checkpoint of --run (auto: if there is one), or from a folder",
        metavar="latest|auto|PATH",
        unset="default: start",
        session=True,
    )
    init: str | None = text(
        None,
        "begin with the weights of a checkpoint, or of a run's newest one, and with its model's settings",
        metavar="PATH",
        unset="default: initial weights drawn by --seed",
        session=True,
    )
    sample_length: int = whole(400, "tokens of generated text at the end", 0, 10**6)
    faults: str | None = text(
        None,
        "have ranks fail on purpose, each once a run, as 'kill rank=1 at=action:STEP step=12'",
        metavar="SPEC",
        unset="default: none",
        session=True,
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is None and name in OF_MODEL and self.model in MODELS:
                value = MODELS[self.model].get(name)
            if name == "lr" and value is None:
                value = DEFAULT_LR[self.optimizer]
            if name == "top_k" and value is None:
                value = 2 if self.router == "gshard" else 1
            if name == "budget" and value is None and self.steps is None:
                value = BUDGET
            # The class is frozen for its users; here it is still being made.
            object.__setattr__(self, name, option.convert(value, f"{option.flag} {show(value)}"))
        check_settings(self)

    # -- what follows from the settings

    @property
    def family(self) -> str:
        """The family of the model: gpt or llama."""
        return family_of(self.model)

    @property
    def scaling(self) -> str:
        """How gradients are scaled."""
        return _scaling(self.loss_scaling, self.dtype)

    @property
    def first_scale(self) -> float:
        """The loss scale at the start."""
        return float(DEFAULT_SCALE["loss_scale"] if self.loss_scale is None else self.loss_scale)

    @property
    def scale_window(self) -> int:
        """Clean steps after which the loss scale is doubled."""
        return DEFAULT_SCALE["loss_scale_window"] if self.loss_scale_window is None else self.loss_scale_window

    @property
    def routing(self) -> Routing | None:
        """The numbers of the mixture of experts; None: there is none."""
        if self.experts is None:
            return None
        capacity = DEFAULT_CAPACITY if self.capacity_factor is None else self.capacity_factor
        given = {"router": self.router, "balance_loss": self.balance_loss}
        named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return Routing(
            experts=self.experts,
            top_k=self.top_k,
            capacity_factor=None if self.dropless else capacity,
            renormalize=self.renormalize,
            z_loss=self.z_loss,
            jitter=self.jitter,
            every=self.moe_every,
            **named,
        )

    @property
    def offloads(self) -> frozenset[str] | None:
        """What lives elsewhere; None: nobody said."""
        words = frozenset(word.strip() for word in (self.offload or "").split(","))
        return None if self.offload is None else words - {"none"} if len(words) == 1 else words

    @property
    def sinks(self) -> frozenset[str]:
        """What metrics are written as besides `metrics.jsonl`."""
        return frozenset(word.strip() for word in self.metrics.split(",")) if self.metrics is not None else frozenset()

    @property
    def schedule_name(self) -> str:
        """The schedule that is run: one stage has nothing to put in order, so there all are the same."""
        return self.schedule if self.pp > 1 else "1f1b"

    @property
    def num_chunks(self) -> int:
        """Stages of each rank of pp."""
        return (self.chunks or DEFAULT_CHUNKS) if self.schedule_name == "interleaved" else 1

    @property
    def num_slices(self) -> int:
        """Parts into which sequences are cut over time."""
        return (self.slices or DEFAULT_SLICES) if self.schedule_name == "terapipe" else 1

    def fixed(self, steps: int) -> Config:
        """The same settings with the number of steps that the budget came to."""
        return replace(self, steps=steps, budget=None)

    def log_interval(self, steps: int) -> int:
        """Steps between two printed lines in a run of `steps`."""
        return self.log_every or max(1, round(steps / 50))

    def eval_interval(self, steps: int) -> int:
        """Steps between two measurements of the validation loss in a run of `steps`; 0: only at the end."""
        if self.eval_every is None:
            return max(FEWEST_BETWEEN, math.ceil(steps / DEFAULT_EVALUATIONS))
        return self.eval_every

    def to_toml(self) -> str:
        """All settings as the text of a file that `load` reads back to an equal Config.

        `stop_after`, `resume` and their like are of one start, not of the run: they are left out, and do not count for
        equality.
        """
        return file_text(asdict(self), OPTIONS, GROUPS)


def _scaling(asked: str | None, dtype: str) -> str:
    return asked or ("dynamic" if dtype == "float16" else "none")


OPTIONS: Mapping[str, Option] = {field.name: option_of(field.name, field.metadata) for field in fields(Config)}

GROUPS: Mapping[str, str] = {
    "model": "Model",
    "experts": "Mixture of experts",
    "data": "Data",
    "batch": "Training",
    "recompute": "Memory",
    "pp": "Ranks",
    "run": "Run",
    "config": "Settings from a file",
}

_FILE = Option(
    "config", str, None, "settings from a TOML file; flags win over it", metavar="FILE.toml", unset="default: none"
)


OF_RECORDING = ("record", "record_ranks", "record_steps", "record_sent")
OF_A_START = ("run", "resume", "init", "start_timeout", "timeout", "deterministic", "check", "faults", *OF_RECORDING)
"""Options that are used before the settings of a run that goes on are known."""


def parse(argv: Sequence[str], saved: Mapping[str, Any] | None = None) -> Config:
    """The settings that a command line gives, its `--config` file included; reads that file and nothing else.

    Args:
        argv: flags without the program's name.
        saved: settings of a run that goes on, over which file and flags win; those of one start do not count.

    A named model replaces sizes that a lower level gives: with `--config run.toml --model gpt2` the sizes are gpt2's,
    whatever run.toml says.  So do --steps and --budget replace each other, --dropless and --capacity-factor, another
    optimizer the learning rate, another reducer or schedule what only the one before uses, and another loss scaling its
    scale and window.

    Raises:
        ConfigError: see `mpitrain.options`.
    """
    merged, flags = _merged(argv, saved)
    return Config(**_without_defaults(merged, given=flags))


def parse_first(argv: Sequence[str]) -> Config:
    """What a start knows before its ranks have met: of a run that goes on, how they meet and where it is.

    The rest of what such a command line gives is only whole with the settings that were saved: `--resume latest --ep 4`
    does not say how many experts there are, nor does `--init PATH --ep 4`.

    Raises:
        ConfigError: as `parse`; of a run that goes on only what is wrong by itself.
    """
    merged, flags = _merged(argv)
    if merged.get("resume") is not None:
        merged = {name: merged[name] for name in OF_A_START if name in merged}
    elif merged.get("init") is not None:
        merged = {name: merged[name] for name in (*OF_A_START, "steps", "budget") if name in merged}
    return Config(**_without_defaults(merged, given=flags))


def _merged(argv: Sequence[str], saved: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all levels give, and the flags among it."""
    flags = read_flags(argv, (*OPTIONS.values(), _FILE))
    path = flags.pop("config", None)
    merged: dict[str, Any] = {}
    lowest = {name: saved[name] for name in OPTIONS if name in saved and not OPTIONS[name].session} if saved else {}
    for level in (lowest, read_file(str(path), OPTIONS) if path is not None else {}, flags):
        if "model" in level:
            merged = {name: value for name, value in merged.items() if name not in OF_MODEL}
        if "steps" in level or "budget" in level:
            merged = {name: value for name, value in merged.items() if name not in ("steps", "budget")}
        before = merged.get("optimizer", OPTIONS["optimizer"].default)
        if level.get("optimizer", before) != before:
            merged.pop("lr", None)
        before = merged.get("reducer", OPTIONS["reducer"].default)
        if level.get("reducer", before) != before:
            merged = {name: value for name, value in merged.items() if name not in OF_REDUCERS}
        before = merged.get("schedule", OPTIONS["schedule"].default)
        if level.get("schedule", before) != before:
            merged = {name: value for name, value in merged.items() if name not in OF_SCHEDULES}
        if _scaling_in({**merged, **level}) != _scaling_in(merged):
            merged = {name: value for name, value in merged.items() if name not in DEFAULT_SCALE}
        if level.get("dropless"):
            merged.pop("capacity_factor", None)
        if level.get("capacity_factor") is not None:
            merged.pop("dropless", None)
        merged.update(level)
    return merged, flags


def _scaling_in(settings: Mapping[str, Any]) -> str:
    return _scaling(settings.get("loss_scaling"), settings.get("dtype", OPTIONS["dtype"].default))


def _without_defaults(settings: Mapping[str, Any], given: Collection[str] = ()) -> dict[str, Any]:
    """The same settings: the files of older runs have a scale also where nothing uses one, and then the default."""
    return {
        name: value
        for name, value in settings.items()
        if name in given or name not in DEFAULT_SCALE or value != DEFAULT_SCALE[name]
    }


def load(path: str) -> Config:
    """The settings in a TOML file.

    Raises:
        ConfigError: the file cannot be read or holds what is not allowed; the text names file and key.
    """
    return Config(**_without_defaults(read_file(path, OPTIONS)))


def write(config: Config, path: str) -> None:
    """Write all settings to a file, whole or not at all; makes its folder.  One rank calls it.

    Raises:
        ConfigError: the folder or the file cannot be written.
    """
    if os.path.lexists(path) and not os.path.isfile(path):  # a rename would put a file in the place of a device
        raise ConfigError(f"{show(path)}: is not a regular file; settings cannot be written there.")
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        disk.replace(Path(path), config.to_toml().encode())
    except OSError as error:
        raise ConfigError(
            f"--run {show(os.path.dirname(path))}: cannot be written: {error.strerror}.  It must be a folder with"
            " room, or the name of one that can be made."
        ) from None


def names_a_file(argv: Sequence[str]) -> bool:
    """Whether the command line takes settings from a file."""
    return gives(argv, "--config")


def gives(argv: Sequence[str], flag: str) -> bool:
    """Whether the command line gives an option."""
    return any(word == flag or word.startswith(f"{flag}=") for word in argv)


def wants_help(argv: Sequence[str]) -> bool:
    """Whether the command line asks for the list of options."""
    return "--help" in argv or "-h" in argv


def usage(program: str) -> str:
    """The list of options."""
    title = f"usage: {program} [options]\n\nTrains a language model; on as many ranks as it is started with."
    return help_text(title, {**OPTIONS, _FILE.name: _FILE}, GROUPS)
