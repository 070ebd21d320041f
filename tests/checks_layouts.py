"""Any layout against one rank, as checks that any world can run: threads here, MPI's ranks in tests/mpi.

Every rank trains alone too (a world of one needs no partner), so the reference is made where it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.backend import dtype_of, to_host
from mpitrain.checkpoint.layout import counted_here
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.debug.compare import compare
from mpitrain.memory.gist import Gist
from mpitrain.models.decoder import Decoder
from mpitrain.models.families import build
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.llama import LlamaConfig
from mpitrain.models.sizes import DecoderConfig
from mpitrain.models.transformer import branches
from mpitrain.nn.module import mark_recompute
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.adafactor import Adafactor
from mpitrain.optim.adam import AdamW
from mpitrain.optim.optimizer import Optimizer, StateTensor
from mpitrain.optim.scaler import BlockScaler, LossScaler
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.data import BucketedReducer, FlatReducer, Reducer
from mpitrain.parallel.replicas import ReplicaCheck
from mpitrain.parallel.zero import RowReducer
from mpitrain.parallel.zero.gather import PREFETCH
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition, balance
from mpitrain.pipeline.passes import complete

SIZES = GPTConfig(vocab=17, layers=2, width=16, heads=8, seq_len=16, dropout=0.2)
SIX = GPTConfig(vocab=13, layers=2, width=12, heads=6, seq_len=12, dropout=0.2)  # for 3 and 6 ranks
FIVE = GPTConfig(vocab=11, layers=1, width=20, heads=5, seq_len=20, dropout=0.2)
LLAMA = LlamaConfig(vocab=17, layers=2, width=32, heads=8, seq_len=16, dropout=0.2, kv_heads=4, hidden=24)
BATCH = 24
STEPS = 3  # two in which the ranks check each other's messages and batches, and one as all that follow
AXES = ("pp", "dp", "cp", "tp")
LAYOUT = {
    *AXES, "ep", "sp", "kind", "micros", "schedule", "chunks", "slices", "blocks", "bucket_bytes", "recompute",
    "overlap", "zero", "prefetch",
}  # fmt: skip
"""What must not change a training run."""
Found = dict[str, dict[str, np.ndarray]]


def whole(world: World, mesh: Mesh, parameters: Iterable[Parameter], arrays: Iterable[np.ndarray]) -> dict[str, Any]:
    """Full tensors from the slabs that all ranks hold of parameters, or of what belongs to them."""
    return joined(world, mesh, {p.name: (p, a) for p, a in zip(parameters, arrays, strict=True)})


def states(world: World, mesh: Mesh, optimizer: Optimizer) -> Found:
    """What an optimizer keeps: kind -> full tensors."""
    kept = optimizer.state_tensors()
    return {kind: joined(world, mesh, {name: (t, t.array) for name, t in of.items()}) for kind, of in kept.items()}


def joined(world: World, mesh: Mesh, slabs: dict[str, tuple[Parameter | StateTensor, np.ndarray]]) -> dict[str, Any]:
    """Full tensors from slabs: every rank that counts one brings it, the others bring zeros.

    No rank of a pipeline knows all names: they are told first.
    """
    mine = {name: (p, array) for name, (p, array) in slabs.items() if counted_here(p.spec, mesh.coords)}
    told = world.exchange({name: p.full_shape for name, (p, _) in mine.items()})
    found = {name: np.zeros(shape) for shapes in told for name, shape in shapes.items()}
    for name, (p, array) in mine.items():
        found[name][p.rectangle] = to_host(array)
    if not found:
        return {}
    flats = world.all_reduce(np.concatenate([array.reshape(-1) for array in found.values()]))
    ends = np.cumsum([array.size for array in found.values()])[:-1]
    return {name: flat.reshape(found[name].shape) for name, flat in zip(found, np.split(flats, ends), strict=True)}


def train(
    world: World,
    *,
    sizes: DecoderConfig = SIZES,
    micros: int = 1,
    steps: int = STEPS,
    batch: int = BATCH,
    documents: bool = False,
    padded: bool = False,
    recompute: Sequence[str] = (),
    sgd: bool = False,
    adafactor: bool = False,
    sp: bool = False,
    kind: str = "ring",
    overlap: bool = False,
    schedule: str = "1f1b",
    chunks: int = 1,
    slices: Sequence[int] | None = None,
    blocks: tuple[int, ...] | None = None,
    bucket_bytes: int = 0,
    dtype: str = "float64",
    scaling: str = "none",
    scale: float = 2.0**12,
    clip: float = 0.5,
    zero: int = 0,
    prefetch: int = PREFETCH,
    gist: int | None = None,
    freeze: Sequence[str] = (),
    xp: Any = np,
    **axes: int,
) -> Found:
    """Losses, norms, what experts were asked for, the first step's gradients, the last weights and moments; whole."""
    mesh = Mesh(world, **axes)
    stages = mesh.pp.size * chunks
    scales = BlockScaler(branches(sizes.layers), start=scale) if scaling == "blocks" else None
    model = build(
        sizes,
        mesh,
        sequence_parallel=sp,
        cp_attention=kind,
        expert_overlap=overlap,
        partition=balance([1.0] * sizes.layers, stages) if blocks is None else Partition(blocks),
        seed=3,
        dtype=dtype_of(dtype),
        scales=scales,
        zero=zero,
        prefetch=prefetch,
        freeze=freeze,
        xp=xp,
    )
    mark_recompute(model, recompute, mesh.pp.exchange)
    executor = Executor(
        model,
        optimizer := method(model, sgd, adafactor, mesh),
        mesh,
        complete(schedule, ranks=mesh.pp.size, microbatches=micros, chunks=chunks, slices=len(slices or (0,))),
        slices=slices,
        reducer=reducer(model, mesh, bucket_bytes),
        clip=clip,
        scaler=LossScaler(scale) if scaling == "loss" else scales,
        policy=None if gist is None else Gist(gist),
    )
    tokens = numbers(sizes)
    losses, norms, counts, gradients = [], [], [], {}
    for rows in tokens.batches(batch, mesh.dp.rank, mesh.dp.size, stop_step=steps):
        here = with_documents(rows) if documents else rows
        here = with_padding(here) if padded else here
        losses.append(executor.step(here.part(model.positions_here)))
        assert executor.report is not None
        norms.append(executor.report.grad_norm)
        counts.append(executor.report.counted)
        gradients = gradients or whole(world, mesh, model.shares(), [p.grad for p in model.shares()])
        ReplicaCheck(model, optimizer, executor.reducer, mesh, 1)(len(losses))
    return {
        "losses": {"loss": np.array(losses), "validation": np.array(executor.evaluate(few(tokens, mesh, model)))},
        "norms": {"norm": np.array(norms)},
        **routing(counts),
        "gradients": gradients,
        "weights": whole(world, mesh, model.kept(), [p.master for p in model.kept()]),
        **states(world, mesh, optimizer),
    }


def reducer(model: Decoder, mesh: Mesh, bucket_bytes: int) -> Reducer:
    """The one for the model's stage of ZeRO; with buckets while backward goes on, or with 0 all in one message."""
    if model.zero:
        return RowReducer(model, mesh, bucket_bytes or 1 << 30, overlap=bool(bucket_bytes))
    return BucketedReducer(model.flats, mesh, bucket_bytes) if bucket_bytes else FlatReducer(model.flats, mesh)


def routing(counts: Sequence[Mapping[str, Sequence[float]]]) -> Found:
    """What a run says of each layer of experts, step by step: choices, which are whole numbers, and what is none."""
    found: Found = {"choices": {}, "router's losses": {}}
    for layer in counts[0]:
        numbers = np.array([each[layer] for each in counts])
        found["choices"][layer], found["router's losses"][layer] = numbers[:, :-3], numbers[:, -3:]
    return found


def method(model: Decoder, sgd: bool = False, adafactor: bool = False, mesh: Mesh | None = None) -> Optimizer:
    """The optimizer of the proofs."""
    if sgd:
        return Sgd(model.shares(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if adafactor:
        return Adafactor(model.shares(), mesh=mesh, lr=0.02, beta1=0.5, eps=(1e-12, 1e-3), weight_decay=0.1)
    # The true gradient of a key's bias is zero, and AdamW divides the noise that is left by eps: a larger one keeps it
    # below the digits that are compared.
    return AdamW(model.shares(), lr=2e-3, eps=1e-6, weight_decay=0.1)


def numbers(sizes: DecoderConfig) -> Tokens:
    """Sequences for a model of this vocabulary and length."""
    text = (np.arange(20_000) * 7919 % 104729 % sizes.vocab).astype(np.uint16)
    corpus = Corpus(text[:19_000], text[19_000:], sizes.vocab, "bytes", "numbers", (), (), "")
    return Tokens(corpus, sizes.seq_len, seed=5)


def few(tokens: Tokens, mesh: Mesh, model: Decoder) -> list[Batch]:
    """Some validation windows: the first two batches of 30 rows."""
    return list(tokens.validation(30, mesh.dp.rank, mesh.dp.size, model.positions_here))[:2]


def with_documents(batch: Batch) -> Batch:
    """Rows that hold several documents of different lengths and end in padding, which are no targets."""
    length = batch.inputs.shape[1]
    ends = 1 + (batch.places[:, None] * 5 + np.array([2, 3])) % (length - 2)
    documents = (np.arange(length) >= ends[:, :1]).astype(np.int64) + (np.arange(length) >= ends[:, 1:])
    documents[np.arange(length) >= length - batch.places[:, None] % 4] = -1
    targets = np.where(documents < 0, -100, batch.targets)
    return replace(batch, documents=documents, targets=targets)


def with_padding(batch: Batch) -> Batch:
    """Every third row of the global batch is padding, and others have a few targets less."""
    odd = batch.places[:, None] % 3 == 2
    short = np.arange(batch.targets.shape[1]) < batch.places[:, None] % 4
    inputs, targets = np.where(odd, 0, batch.inputs), np.where(odd | short, -100, batch.targets)
    documents = None if batch.documents is None else np.where(odd, -1, batch.documents)
    return replace(batch, inputs=inputs, targets=targets, documents=documents)


@functools.cache
def _alone(**how: Any) -> Found:
    return train(World(Alone(), "none"), **how)


def equals_one_rank(world: World, *, tied: bool = False, **how: Any) -> None:
    """Train on this world and alone, and compare everything by the rule of `debug.compare`.

    Every rank compares losses and norms; whole tensors are the same everywhere, so the first rank does.
    """
    how["sizes"] = replace(how.get("sizes", SIZES), tied=tied)
    reference = _alone(**{name: value for name, value in how.items() if name not in LAYOUT})
    for kind, tensors in train(world, **how).items():
        if not tensors or (world.rank and kind not in ("losses", "norms", "choices")):
            continue
        if kind == "choices":
            assert all(np.array_equal(tensors[layer], reference[kind][layer]) for layer in reference[kind]), tensors
        worst = compare(tensors, reference[kind])[0]
        assert worst.ok, f"{kind}: {worst}"


def layouts(ranks: int, pp: int = 1) -> list[dict[str, Any]]:
    """Every pp x dp x tp x cp of this pp over so many ranks, where tp > 1 with and without sequence parallelism."""
    if pp > 1:
        return [{"pp": pp, **layout} for layout in layouts(ranks // pp)]
    found: list[dict[str, Any]] = []
    for tp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        for cp in (n for n in range(1, ranks // tp + 1) if ranks // tp % n == 0):
            for sp in (False, True) if tp > 1 else (False,):
                found.append({"dp": ranks // tp // cp, "tp": tp, "cp": cp, "sp": sp})
    return found


def name_of(layout: dict[str, Any]) -> str:
    """`dp2 tp2 sp`"""
    return " ".join(
        (name if value is True else f"{name}{value}" if not isinstance(value, str) else value)
        for name, value in layout.items()
        if value not in (1, False)
    )


# On four ranks, for real MPI: each kind of parallelism, alone and with others.


def tensor_and_data(world: World) -> None:
    equals_one_rank(world, dp=2, tp=2)


def tensor_with_sequence(world: World) -> None:
    equals_one_rank(world, tp=4, sp=True, tied=True)


def context_by_ring(world: World) -> None:
    equals_one_rank(world, cp=4, micros=2)


def context_by_ulysses_and_tensor(world: World) -> None:
    equals_one_rank(world, cp=2, tp=2, kind="ulysses")


def context_by_two_rings(world: World) -> None:
    equals_one_rank(world, cp=2, dp=2, kind="rsa")


def context_tensor_and_sequence(world: World) -> None:
    equals_one_rank(world, cp=2, tp=2, sp=True, tied=True)


def grouped_heads_with_more_ranks_than_heads_of_keys(world: World) -> None:
    equals_one_rank(world, tp=4, sizes=replace(SIZES, kv_heads=2))


def documents_and_padding(world: World) -> None:
    equals_one_rank(world, cp=2, tp=2, documents=True)


def llama_on_all_axes(world: World) -> None:
    equals_one_rank(world, sizes=LLAMA, cp=2, tp=2, sp=True, zero=3)
    equals_one_rank(world, sizes=LLAMA, pp=2, tp=2, micros=2, tied=True)


def messages_above_the_eager_limit(world: World) -> None:
    """The stream of a rank has 256 KiB, a block of keys 64 KiB."""
    large = GPTConfig(vocab=257, layers=1, width=64, heads=4, seq_len=128)
    equals_one_rank(world, cp=2, tp=2, sp=True, sizes=large, steps=2, batch=8)
    equals_one_rank(world, cp=4, sizes=large, steps=2, batch=8)


CHECKS: list[Callable[[World], None]] = [
    tensor_and_data,
    tensor_with_sequence,
    context_by_ring,
    context_by_ulysses_and_tensor,
    context_by_two_rings,
    context_tensor_and_sequence,
    grouped_heads_with_more_ranks_than_heads_of_keys,
    documents_and_padding,
    llama_on_all_axes,
    messages_above_the_eager_limit,
]
