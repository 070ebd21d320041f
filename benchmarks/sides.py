"""One process of one side of a measurement: builds its training, then runs steps when it is told to.

    controller                          every process of a side
        <-- {"rank": 1, ...}            on its own connection, when model and data stand
        --> {"run": 20, "warm": 1, "batch": 8, "undisturbed": false}
        <-- {"seconds": ..., ...}       of the 20 steps; the warm ones before them are not counted
        --> {"look": 8}                 a step more, of 8 sequences (mpitrain only)
        <-- {"owners": {...}, ...}      which bytes were alive and how many operations it took
        --> {"stop": true}

A process that waits for its next command sleeps in recv: it must not disturb the other side, as a rank that waits
inside a message would.  `processes.py` starts these processes and holds the other end.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mpitrain  # noqa: F401 - before NumPy, as a training script that follows the documents has it (mpitrain/blas.py)

# isort: split
import machine
import numpy as np

from mpitrain.data import corpus
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.llama import LlamaConfig
from mpitrain.models.sizes import DecoderConfig
from mpitrain.routing import DEFAULT_CAPACITY, Routing

SIZES = {
    "mini": {"layers": 2, "width": 128, "heads": 4, "seq_len": 64, "batch": 16},
    "S": {"layers": 4, "width": 256, "heads": 4, "seq_len": 128, "batch": 8},
    "M": {"layers": 6, "width": 384, "heads": 6, "seq_len": 256, "batch": 8},
    "llama-S": {
        **{"family": "llama", "layers": 6, "width": 384, "heads": 6, "kv_heads": 2, "hidden": 1024},
        **{"seq_len": 256, "batch": 8},
    },
    "long": {"layers": 6, "width": 384, "heads": 6, "seq_len": 1024, "batch": 2},
}


class Task(NamedTuple):
    """What both sides train.

    batch: sequences of the global batch; ranks: processes of each side; tp, cp, pp, sequence_parallel: how mpitrain
    lays the model over them, dp being what is left; microbatches: parts of a rank's share of the batch; schedule,
    chunks: of the pipeline; recompute: none, selective or full; optimizer: adamw or adafactor; experts: of the Switch
    layers in the place of MLPs, 0 for MLPs; capacity_factor: of experts, None for dropless; ep: ranks that share them;
    zero: stage of ZeRO; family, kv_heads, hidden: of the model, gpt with as many of them as usual where not given.
    """

    layers: int
    width: int
    heads: int
    seq_len: int
    batch: int
    ranks: int
    dropout: float
    dtype: str
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "selective"
    optimizer: str = "adamw"
    experts: int = 0
    capacity_factor: float | None = DEFAULT_CAPACITY
    ep: int = 1
    zero: int = 0
    family: str = "gpt"
    kv_heads: int | None = None
    hidden: int | None = None

    @property
    def config(self) -> DecoderConfig:
        """The model's sizes."""
        names = ("layers", "width", "heads", "seq_len", "dropout", "kv_heads", "hidden")
        if self.family == "llama":
            return LlamaConfig(**{name: getattr(self, name) for name in names})
        routing = Routing(self.experts, capacity_factor=self.capacity_factor) if self.experts else None
        return GPTConfig(**{name: getattr(self, name) for name in names}, routing=routing)

    @property
    def tokens_per_step(self) -> int:
        """Targets of a step over all ranks."""
        return self.batch * self.seq_len


LR, WEIGHT_DECAY, BETAS, CLIP = 1e-3, 0.1, (0.9, 0.99), 1.0
SCALE = 2.0**10  # of the loss, in halves
ADAFACTOR_LR = 0.05
SEED = 1


class Side(NamedTuple):
    """A training that stands ready.

    rank: of this process among those of its side; share: which rows of a batch it trains on, as (rank, number of ranks)
    over which rows are divided; positions: which tokens of them, None for all; step: trains on this rank's part of a
    global batch with so many targets and returns a loss; meet: a meeting of its ranks; total: whether that loss is the
    whole one on every rank, else the sum over ranks is; before_model: bytes resident when everything was imported and
    the text was read; kernels: the level in use; look: makes a step and sees which bytes were alive, which
    operations it took and which share of the choices of experts was dropped.
    """

    rank: int
    share: tuple[int, int]
    positions: np.ndarray | None
    step: Callable[[Batch, int], float]
    meet: Callable[[], None]
    total: bool
    before_model: int
    kernels: str
    look: Callable[[Batch], dict[str, Any]] | None = None


def mpitrain_side(task: Task) -> Side:
    """The side of mpitrain, on NumPy; under mpirun if there is more than one rank."""
    from mpitrain import kernels
    from mpitrain.backend import dtype_of, is_half
    from mpitrain.comm.mesh import Mesh
    from mpitrain.comm.world import world
    from mpitrain.models.families import build
    from mpitrain.optim import Adafactor, AdamW, Optimizer
    from mpitrain.optim.scaler import LossScaler
    from mpitrain.pipeline.executor import Executor
    from mpitrain.pipeline.partition import balance
    from mpitrain.pipeline.passes import complete

    everyone = world()
    assert everyone.size == task.ranks, (everyone.size, task.ranks)
    before_model = resident("VmRSS")
    mesh = Mesh(everyone, tp=task.tp, cp=task.cp, pp=task.pp, ep=task.ep)
    embedding, blocks, head = task.config.flops_of_parts
    partition = balance(blocks, task.pp * task.chunks, first=embedding, last=head)
    layout = {"sequence_parallel": task.sequence_parallel, "partition": partition, "zero": task.zero}
    keep_scores = task.recompute == "none"
    model = build(task.config, mesh, seed=SEED, dtype=dtype_of(task.dtype), keep_scores=keep_scores, **layout)
    for each in model.blocks:
        each.recompute = task.recompute == "full"
    optimizer: Optimizer
    if task.optimizer == "adafactor":
        optimizer = Adafactor(model.shares(), mesh=mesh, lr=ADAFACTOR_LR, weight_decay=WEIGHT_DECAY)
    else:
        optimizer = AdamW(model.shares(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    rows = complete(task.schedule, ranks=task.pp, microbatches=task.microbatches, chunks=task.chunks)
    # At a scale that fits from the start no step is skipped: all sides are the same training.
    scaler = LossScaler(SCALE) if is_half(model.like.dtype) else None
    executor = Executor(model, optimizer, mesh, rows, clip=CLIP, scaler=scaler)
    return Side(
        everyone.rank,
        (mesh.dp.rank, mesh.dp.size),
        model.positions_here,
        lambda batch, _: executor.step(batch),
        everyone.barrier,
        True,
        before_model,
        kernels.level(),
        lambda batch: looked(executor, batch),
    )


def looked(executor: Any, batch: Batch) -> dict[str, Any]:
    """A step under listeners: bytes by owner when most were alive, their sum, operations by reason; share of drops."""
    from mpitrain.debug.flops import AGAIN, BACKWARD, FORWARD, Flops
    from mpitrain.debug.memory import MemoryLedger
    from mpitrain.events import listen
    from mpitrain.parallel.expert.counted import of_model

    ledger, flops = MemoryLedger(), Flops()
    with listen(ledger), listen(flops):
        executor.step(batch)
    counted = {why: flops.total(why) for why in (FORWARD, AGAIN, BACKWARD)}
    loads = of_model(executor.report.counted, executor.report.rows).values()
    return {
        "owners": {owner: n for owner, n in ledger.at_peak.items() if n},
        "peak": ledger.peak,
        "flops": counted,
        "dropped": sum(load.dropped_share for load in loads) / max(len(loads), 1),
    }


def torch_side(task: Task, rank: int, rendezvous: str) -> Side:
    """The side of PyTorch, the twin; under DDP with gloo if there is more than one process."""
    import torch
    import torch.distributed as dist
    from twin import TwinTrainer

    torch.set_num_threads(1)
    if task.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=task.ranks)
    before_model = resident("VmRSS")
    trainer = TwinTrainer(
        task.config,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        betas=BETAS,
        clip=CLIP,
        seed=SEED,
        dtype=task.dtype,
    )
    # The twin took its values from a model of mpitrain, which is gone; its peak must not count as PyTorch's.
    Path("/proc/self/clear_refs").write_text("5")
    meet = dist.barrier if task.ranks > 1 else lambda: None
    return Side(
        rank,
        (rank, task.ranks),
        None,
        lambda batch, targets: trainer.step(batch, targets).item(),
        meet,
        False,
        before_model,
        "torch",
    )


def serve(side: Side, task: Task, text: corpus.Corpus, connection: Any) -> None:
    """Answer commands until told to stop."""
    tokens = Tokens(text, task.seq_len, SEED)
    done = 0
    commands, replies = connection.makefile("r"), connection.makefile("w")

    def reply(**values: Any) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    reply(rank=side.rank, total=side.total, before_model=side.before_model, kernels=side.kernels)
    for line in commands:
        command = json.loads(line)
        if "stop" in command:
            return
        if "look" in command:
            assert side.look is not None
            batch = tokens.batch_at(done, command["look"], *side.share).part(side.positions)
            done += 1
            reply(**side.look(batch))
            continue
        warm, steps, size, begun = command["warm"], command["run"], command["batch"], _usage()
        batches = [tokens.batch_at(done + i, size, *side.share).part(side.positions) for i in range(warm + steps)]
        done += warm + steps
        targets = size * task.seq_len
        for batch in batches[:warm]:
            side.step(batch, targets)
        side.meet()
        before = _usage()
        undisturbed = command.get("undisturbed", False)
        losses, seconds = timed(batches[warm:], side, targets, undisturbed)
        after = _usage()
        seen = watched(batches[warm:], side, targets, undisturbed) if command.get("watch") else {}
        reply(
            **seen,
            rank=side.rank,
            seconds=seconds,
            cpu=after.cpu - before.cpu,
            cpu_in_all=_usage().cpu - begun.cpu,
            faults=(after.faults - before.faults) / steps,
            peak_bytes=resident("VmHWM"),
            loss=losses[-1],
        )


def timed(batches: list[Batch], side: Side, targets: int, undisturbed: bool) -> tuple[list[float], float]:
    """Losses of some steps, and their seconds; if `undisturbed`, rests between them do not count."""
    if undisturbed:
        pairs = [at_priority(lambda batch=batch: side.step(batch, targets), side) for batch in batches]
        return [loss for loss, _ in pairs], sum(seconds for _, seconds in pairs)
    start = time.perf_counter()
    losses = [side.step(batch, targets) for batch in batches]
    return losses, time.perf_counter() - start


def at_priority(step: Callable[[], float], side: Side) -> tuple[float, float]:
    """A step that nothing else on the machine disturbs, after a rest; its loss and its seconds."""
    time.sleep(machine.REST)
    side.meet()
    with machine.undisturbed():
        side.meet()
        start = time.perf_counter()
        return step(), time.perf_counter() - start


def watched(batches: list[Batch], side: Side, targets: int, undisturbed: bool) -> dict[str, Any]:
    """The same steps once more: the share of their time that this rank stands in messages, and ms by kind of action."""
    from mpitrain.debug.ledger import share_in_messages
    from mpitrain.debug.timeline import Stopwatch
    from mpitrain.events import listen

    left, watch = iter(batches), Stopwatch(len(batches))
    with listen(watch):
        share = share_in_messages(lambda: timed([next(left)], side, targets, undisturbed), len(batches))
    return {"in_messages": share, "actions": {kind: 1e3 * seconds for kind, seconds in watch.seconds().items()}}


class Usage(NamedTuple):
    """Of this process since its start: CPU seconds, page faults."""

    cpu: float
    faults: int


def _usage() -> Usage:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(usage.ru_utime + usage.ru_stime, usage.ru_minflt)


def resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most so far.

    ru_maxrss will not do: a process begins with that of the one that started it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def main() -> None:
    """Arguments: side, path of the controller's socket, the task as JSON; for PyTorch also rank and rendezvous file."""
    name, address, task_text, *rest = sys.argv[1:]
    task = Task(**json.loads(task_text))
    text = corpus.load()
    side = mpitrain_side(task) if name == "mpitrain" else torch_side(task, int(rest[0]), rest[1])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        serve(side, task, text, connection)
    if name == "torch" and task.ranks > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


if __name__ == "__main__":
    main()
