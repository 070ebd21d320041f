"""The twin: mpitrain's GPT or Llama trained in PyTorch, on the same batches from the same initial values.

    python benchmarks/twin.py --ranks 8 --budget 255        under DDP: 8 processes, gloo on loopback

It is written as PyTorch users write it (eager, scaled_dot_product_attention, fused AdamW, DistributedDataParallel), so
that it can stand beside mpitrain in two ways: as an oracle (in float64 the losses of both agree to rounding) and as the
peer whose speed and quality mpitrain is measured against.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
import twin_gpt
import twin_llama
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain import config as settings
from mpitrain.data import corpus
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.errors import ConfigError
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.sizes import DecoderConfig
from mpitrain.train import BUDGET_SHARE

TWINS: Mapping[str, Any] = {"gpt": twin_gpt, "llama": twin_llama}
"""Modules with the twin of a family of models, `Twin`."""

TRIAL_STEPS = 10  # as mpitrain's: the later half of them is what counts
VALIDATION_ROWS = 32  # sequences that a process evaluates at once


class TwinTrainer:
    """Steps of the twin on one process, or on one of several under DDP if torch.distributed is initialised.

    Args:
        config: the sizes.
        steps: what the cosine ends at; None keeps the learning rate constant (for measuring speed).
        lr, warmup, weight_decay, clip, betas: as mpitrain's flags; weight decay on matrices and embeddings only.
        seed: of initial values (and PyTorch's own dropout masks).
        dtype: a NumPy dtype.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        steps: int | None = None,
        lr: float = 2.5e-3,
        warmup: float = 0.03,
        weight_decay: float = 0.1,
        clip: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.99),
        seed: int = 0,
        dtype: Any = np.float32,
    ) -> None:
        torch.manual_seed(seed)
        self.clip = clip
        self.model: nn.Module = TWINS[config.family].Twin(config)
        TWINS[config.family].load_initial_values(self.model, config, seed, dtype)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_factor(steps, warmup))
        self.processes = dist.get_world_size() if dist.is_initialized() else 1
        self.forward: nn.Module = self.model
        if self.processes > 1:
            self.forward = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def step(self, batch: Batch, targets: int) -> torch.Tensor:
        """One step on this process's rows.

        Args:
            batch: this process's rows of the global batch.
            targets: valid targets of the global batch; DDP takes the mean over processes, the loss that over targets.

        Returns:
            () this process's share of the mean loss; the sum over processes is the loss.
        """
        loss = self.forward(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)) / targets
        self.optimizer.zero_grad()
        (loss * self.processes).backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the valid targets of all processes' batches; the same on every process."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            loss = self.model(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets))
            sums += torch.tensor([loss.item(), batch.count], dtype=torch.float64)
        self.model.train()
        return float(total(sums)[0] / sums[1])


def lr_factor(steps: int | None, warmup: float) -> Callable[[int], float]:
    """Warm-up to 1 over a fraction (or, from 1 on, a number) of the steps, then half a cosine to 0; 1 without steps."""
    if steps is None:
        return lambda done: 1.0
    rise = min(steps, round(warmup * steps) if warmup < 1 else round(warmup))

    def factor(done: int) -> float:
        if done < rise:
            return (done + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (done - rise) / (steps - rise))) if done < steps else 0.0

    return factor


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum over processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def num_targets(tokens: Tokens, batch: int, step: int) -> int:
    """Valid targets of a step's global batch: the last one of an epoch may be padded."""
    order = tokens.order(batch)
    _, first = order.locate(step)
    return min(batch, order.num_samples - first) * tokens.seq_len


# --------------------------------------------------------------------------------------------------------------- a run


def sizes_of(config: settings.Config, vocab: int) -> GPTConfig:
    """The model that the settings of a run name."""
    names = ("layers", "width", "heads", "seq_len", "dropout", "tied", "gelu")
    return GPTConfig(vocab=vocab, **{name: getattr(config, name) for name in names})


def trainer_of(config: settings.Config, vocab: int) -> TwinTrainer:
    """A fresh training with the settings of a run."""
    return TwinTrainer(
        sizes_of(config, vocab),
        steps=config.steps,
        lr=config.lr,
        warmup=config.warmup,
        weight_decay=config.weight_decay,
        clip=config.clip,
        betas=(config.beta1, config.beta2),
        seed=config.seed,
        dtype=config.dtype,
    )


def train(config: settings.Config, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Train the twin on this process; returns what `--json` keeps, the same on every process."""
    tokens = Tokens(corpus.load(config.data), config.seq_len, config.seed)
    start = time.perf_counter()
    if config.steps is None:
        config = config.fixed(_steps_in_budget(config, tokens, rank, ranks))
    trainer = trainer_of(config, tokens.vocab_size)
    steps, every = config.steps, config.eval_interval(config.steps)
    if rank == 0:
        print(f"{steps} steps of {config.batch} x {config.seq_len} tokens on {ranks} processes", flush=True)
    val_loss = math.nan
    for step in range(steps):
        batch = tokens.batch_at(step, config.batch, rank, ranks)
        share = trainer.step(batch, num_targets(tokens, config.batch, step))
        last = step + 1 == steps
        if (step + 1) % config.log_interval(steps) == 0 or last:
            loss, seconds = float(total(share)), time.perf_counter() - start
            if rank == 0:
                print(f"step {step + 1:>6}  loss {loss:.4f}  {seconds:6.1f} s", flush=True)
        if last or (every and (step + 1) % every == 0):
            val_loss = trainer.evaluate(tokens.validation(VALIDATION_ROWS * ranks, rank, ranks))
            if rank == 0:
                print(f"step {step + 1:>6}  val_loss {val_loss:.4f}", flush=True)
    return {
        "val_loss": val_loss,
        "steps": steps,
        "seconds": time.perf_counter() - start,
        "ranks": ranks,
        "torch": torch.__version__,
        "config": asdict(config),
    }


def _steps_in_budget(config: settings.Config, tokens: Tokens, rank: int, ranks: int) -> int:
    """How many steps the budget pays for, as mpitrain finds it: ten on a training that is thrown away are timed."""
    trainer = trainer_of(config.fixed(TRIAL_STEPS), tokens.vocab_size)
    times = []
    for step in range(TRIAL_STEPS):
        batch = tokens.batch_at(step, config.batch, rank, ranks)
        start = time.perf_counter()
        trainer.step(batch, num_targets(tokens, config.batch, step))
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    trainer.evaluate(tokens.validation(VALIDATION_ROWS * ranks, rank, ranks))
    slowest = torch.tensor([np.mean(times[TRIAL_STEPS // 2 :]), time.perf_counter() - start])
    if ranks > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    per_step, per_validation = slowest.tolist()
    budget = max(0.0, config.budget - (5 if config.eval_every is None else 1) * per_validation)
    if config.eval_every:
        per_step += per_validation / config.eval_every
    return max(1, int(BUDGET_SHARE * budget / per_step))


# ---------------------------------------------------------------------------------------------------- the command line

USAGE = """usage: python benchmarks/twin.py [--ranks N] [--json FILE] [options of a training run]

Trains mpitrain's GPT in PyTorch under DDP: N processes (default 8) with one thread each, gloo on loopback.
Options of model, data and training are those of mpitrain, with the same defaults (mpitrain's --help lists them)."""

UNDERSTOOD = """
    model layers width heads seq_len tied gelu dropout dtype data seed batch steps budget lr warmup weight_decay
    beta1 beta2 clip log_every eval_every
""".split()


def _process(rank: int, ranks: int, config: settings.Config, rendezvous: str, json_path: str | None) -> None:
    """What each of the processes does."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    result = train(config, rank, ranks)
    if rank == 0 and json_path:
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
    if ranks > 1:
        dist.destroy_process_group()


def main(argv: list[str]) -> None:
    """Read flags, start processes, wait for them."""
    if settings.wants_help(argv):
        print(USAGE)
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json")
    own, others = parser.parse_known_args(argv)
    config = settings.parse(others)
    _refuse_what_the_twin_lacks(config)
    if own.ranks < 1 or config.batch % own.ranks:
        raise ConfigError(f"--ranks {own.ranks}: must be a whole number that divides --batch {config.batch}.")
    ranks = own.ranks
    os.environ |= machine.rank_environment(ranks, tuned_malloc=True)  # what the processes start with
    with tempfile.TemporaryDirectory(prefix="mpitrain-twin-") as folder:
        torch.multiprocessing.spawn(_process, (ranks, config, f"{folder}/rendezvous", own.json), nprocs=ranks)


def _refuse_what_the_twin_lacks(config: settings.Config) -> None:
    """An option that would do nothing here must not be accepted."""
    usual = settings.Config(model=config.model)
    for name, option in settings.OPTIONS.items():
        if name not in UNDERSTOOD and getattr(config, name) != getattr(usual, name):
            raise ConfigError(f"{option.flag}: the twin has no such option.")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:  # mpitrain's words for a mistake on the command line
        sys.exit(f"{type(error).__name__}: {error}")
