"""Adafactor learns as well as AdamW, with a hundredth of its memory."""

import functools
import json

import numpy as np
import pytest

from mpitrain import train
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import Adafactor, AdamW
from mpitrain.optim.lr import cosine
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

WORDS, LENGTH, STEPS = 64, 32, 80
ENTROPY = 1.2130  # nats a word: of 1/2, 1/4, 1/8, 1/8


@functools.cache
def a_chain():
    """A language in which every word is followed by one of four others."""
    rng = np.random.default_rng(0)
    followers = rng.integers(WORDS, size=(WORDS, 4))
    text = [0]
    for pick in np.minimum(rng.geometric(0.5, size=20_000) - 1, 3):
        text.append(followers[text[-1], pick])
    words = np.array(text, np.uint16)
    return Tokens(Corpus(words[:16_000], words[16_000:], WORDS, "tokens", "a chain", (), (), ""), LENGTH, seed=5)


def learned(kind, lr, **hyper):
    """The validation loss after a short run."""
    mesh = Mesh(World(Alone(), "none"))
    model = GPT(GPTConfig(vocab=WORDS, layers=2, width=32, heads=4, seq_len=LENGTH), mesh, seed=3)
    method = kind(model.parameters(), weight_decay=0.1, mesh=mesh, **hyper)
    rows = complete("1f1b", ranks=1, microbatches=1)
    executor = Executor(model, method, mesh, rows, clip=1.0, lr=lambda update: cosine(update, STEPS, 4, lr))
    tokens = a_chain()
    for batch in tokens.batches(16, 0, 1, stop_step=STEPS):
        executor.step(batch)
    return executor.evaluate(list(tokens.validation(30, 0, 1))[:4])


def test_a_short_run_ends_as_low_as_with_adamw_and_near_the_best_that_there_is():
    adamw, adafactor = learned(AdamW, 5e-3, betas=(0.9, 0.99)), learned(Adafactor, 0.05)
    assert adafactor < 1.02 * adamw
    assert ENTROPY < adafactor < 1.1 * ENTROPY


@pytest.mark.slow
def test_300_steps_of_the_default_model_end_within_2_percent_of_adamw(tmp_path):
    losses = {}
    for name in ("adamw", "adafactor"):
        train.main(["--steps", "300", "--optimizer", name, "--sample-length", "0", "--run", str(tmp_path / name)])
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = json.loads(lines[-1])["val_loss"]
    assert losses["adafactor"] < 1.02 * losses["adamw"]
