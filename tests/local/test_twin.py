"""mpitrain trains as its PyTorch twin does: same losses, same weights, in float64."""

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from twin import TWINS, TwinTrainer, lr_factor, num_targets  # noqa: E402

from mpitrain.comm.mesh import Mesh  # noqa: E402
from mpitrain.comm.world import world  # noqa: E402
from mpitrain.data.corpus import load  # noqa: E402
from mpitrain.data.tokens import Tokens  # noqa: E402
from mpitrain.models.families import build  # noqa: E402
from mpitrain.models.gpt import GPTConfig  # noqa: E402
from mpitrain.models.llama import LlamaConfig  # noqa: E402
from mpitrain.nn.rotary import Scaling  # noqa: E402
from mpitrain.optim.adam import AdamW  # noqa: E402
from mpitrain.optim.lr import cosine, warmup_updates  # noqa: E402
from mpitrain.pipeline.executor import Executor  # noqa: E402
from mpitrain.pipeline.passes import with_update  # noqa: E402
from mpitrain.pipeline.schedules import one_stage  # noqa: E402

STEPS, BATCH, LR, WARMUP, SEED = 10, 4, 1e-2, 0.3, 3
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.99), 0.1, 0.5  # the clip is below the norms met here


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(layers=2, width=32, heads=4, seq_len=16),
        GPTConfig(layers=1, width=24, heads=2, seq_len=16, tied=True, gelu="erf"),
        LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, seq_len=16),
        LlamaConfig(layers=1, width=24, heads=2, seq_len=16, tied=True, rope_scaling=Scaling("llama3", 8, original=16)),
    ],
    ids=["untied, tanh", "tied, erf", "llama, groups", "llama, tied, scaled"],
)
def test_ten_losses_and_then_every_weight_equal_the_twins(config, one_thread):
    tokens = Tokens(load(), config.seq_len, SEED)
    mesh = Mesh(world())
    model = build(config, mesh, seed=SEED, dtype=np.float64)
    optimizer = AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    warmup = warmup_updates(WARMUP, STEPS)
    executor = Executor(
        model,
        optimizer,
        mesh,
        with_update(one_stage(2)),
        clip=CLIP,
        lr=lambda update: cosine(update, STEPS, warmup, LR),
    )
    twin = TwinTrainer(
        config,
        steps=STEPS,
        lr=LR,
        warmup=WARMUP,
        weight_decay=WEIGHT_DECAY,
        clip=CLIP,
        betas=BETAS,
        seed=SEED,
        dtype=np.float64,
    )
    losses, twins = [], []
    for batch in tokens.batches(BATCH, stop_step=STEPS):
        losses.append(executor.step(batch))
        twins.append(twin.step(batch, num_targets(tokens, BATCH, batch.step)).item())
    np.testing.assert_allclose(losses, twins, rtol=0, atol=1e-9)
    assert losses[-1] < losses[0] - 0.1  # it has learned, so there was something to differ in
    weights = TWINS[config.family].mpitrain_order(twin.model, config)
    for p in model.parameters():
        np.testing.assert_allclose(p.data, weights[p.name], rtol=0, atol=1e-9, err_msg=p.name)
    windows = [next(tokens.validation(8))]
    assert executor.evaluate(windows) == pytest.approx(twin.evaluate(windows), abs=1e-9)


SMALL = [GPTConfig(layers=1, width=24, heads=3, seq_len=8), LlamaConfig(layers=1, width=24, heads=3, seq_len=8)]
SMALL += [LlamaConfig(layers=1, width=24, heads=4, kv_heads=2, seq_len=8)]


@pytest.mark.parametrize("config", SMALL, ids=["gpt", "llama", "llama, groups"])
def test_the_twin_decays_the_weights_that_mpitrain_decays(config):
    twin = dict(TwinTrainer(config).model.named_parameters())
    for p in build(config, Mesh(world())).parameters():
        assert p.decay == (twin[p.name].ndim >= 2), p.name


@pytest.mark.parametrize("config", SMALL, ids=["gpt", "llama", "llama, groups"])
def test_values_go_to_the_twin_and_come_back_unchanged(config):
    of = TWINS[config.family]
    twin = of.Twin(config)
    of.load_initial_values(twin, config, SEED, np.float64)
    back = of.mpitrain_order(twin, config)
    for p in build(config, Mesh(world()), seed=SEED, dtype=np.float64).parameters():
        np.testing.assert_array_equal(p.data, back[p.name], err_msg=p.name)


@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 7])
def test_the_learning_rates_are_the_same(warmup):
    factor = lr_factor(100, warmup)
    mine = [cosine(update, 100, warmup_updates(warmup, 100), 1.0) for update in range(101)]
    assert [factor(done) for done in range(101)] == pytest.approx(mine, abs=1e-15)


def test_the_last_batch_of_an_epoch_counts_only_its_real_targets():
    tokens = Tokens(load(), 16, SEED)
    last = tokens.order(1000).steps_per_epoch - 1
    for step in (0, last):
        assert num_targets(tokens, 1000, step) == tokens.batch_at(step, 1000).count
