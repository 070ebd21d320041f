"""Any number of ranks and micro-batches is the same training run: loss, gradients, weights and moments in float64."""

import functools

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.compare import compare
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.adam import AdamW
from mpitrain.parallel.data import BucketedReducer, FlatReducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

SIZES = GPTConfig(vocab=17, layers=2, width=12, heads=2, seq_len=6, dropout=0.2)
BATCH = 96
STEPS = 20


def corpus() -> Corpus:
    tokens = (np.arange(5000) * 7919 % 104729 % 17).astype(np.uint8)
    return Corpus(tokens[:4500], tokens[4500:], 17, "bytes", "numbers", ("numbers",), (), "0" * 64)


def train(dp, micros, *, reducer="flat", tied=False, steps=STEPS, deterministic=False):
    """Losses, first gradients, last weights and moments of a run on this rank."""
    ranks = world()
    ranks.set_deterministic(deterministic)
    mesh = Mesh(ranks, dp=dp)
    model = GPT(GPTConfig(**{**vars(SIZES), "tied": tied}), mesh, seed=3, dtype=np.float64)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    if reducer == "flat":
        sums = FlatReducer(model.flats, mesh)
    else:
        sums = BucketedReducer(model.flats, mesh, bucket_bytes=4096)
    executor = Executor(model, optimizer, mesh, with_update(one_stage(micros)), reducer=sums, clip=0.5)
    tokens = Tokens(corpus(), SIZES.seq_len, seed=5)
    losses, gradients = [], {}
    for batch in tokens.batches(BATCH, mesh.dp.rank, mesh.dp.size, stop_step=steps):
        losses.append(executor.step(batch))
        if len(losses) == 1:
            gradients = {p.name: p.grad.copy() for p in model.parameters()}
    weights = {p.name: p.data.copy() for p in model.parameters()}
    moments = {f"{kind}/{name}": a.copy() for kind, of in optimizer.state_dict().items() for name, a in of.items()}
    norms = {"norm": np.array([executor.report.grad_norm])}
    return {"losses": {"loss": np.array(losses)}, "gradients": gradients, "weights": weights, **norms_of(norms, moments)}


def norms_of(norms, moments):
    first = {name: a for name, a in moments.items() if name.startswith("first")}
    second = {name: a for name, a in moments.items() if name.startswith("second")}
    return {"norms": norms, "first moments": first, "second moments": second}


@functools.cache
def one_rank(tied=False):
    (result,) = LocalWorld(1).run(train, 1, 1)if not tied else LocalWorld(1).run(functools.partial(train, tied=True), 1, 1)
    return result


def assert_same_run(result, reference):
    for kind, tensors in reference.items():
        worst = compare(result[kind], tensors)[0]
        assert worst.ok, f"{kind}: {worst}"


@pytest.mark.parametrize("micros", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 8])
def test_every_number_of_ranks_and_micro_batches_is_the_same_run(dp, micros):
    for result in LocalWorld(dp).run(train, dp, micros):
        assert_same_run(result, one_rank())


def test_a_tied_head_is_the_same_run_on_any_number_of_ranks():
    for result in LocalWorld(4).run(functools.partial(train, tied=True), 4, 2):
        assert_same_run(result, one_rank(tied=True))


def test_replicas_hold_the_same_bits():
    results = LocalWorld(4).run(functools.partial(train, steps=5), 4, 1)
    for result in results[1:]:
        for name, array in result["weights"].items():
            assert array.tobytes() == results[0]["weights"][name].tobytes(), name


@pytest.mark.parametrize("micros", [1, 2])
def test_buckets_sum_to_the_same_bits_as_one_message_in_deterministic_mode(micros):
    flat, bucketed = (
        LocalWorld(3).run(functools.partial(train, reducer=reducer, steps=5, deterministic=True), 3, micros)[0]
        for reducer in ("flat", "bucketed")
    )
    for kind, tensors in flat.items():
        for name, array in tensors.items():
            assert array.tobytes() == bucketed[kind][name].tobytes(), (kind, name)
