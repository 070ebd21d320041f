"""The proofs are sharp: every known bug of distributed training, put into the library, is found.

Found means: `mpitrain verify`'s judge says that the layout is not the same training run, or the check of states (rules
and digests) raises before a step is over.  And where nothing is wrong, neither says a word.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the mutations are
from mutations import MUTATIONS, Mutation

from mpitrain.assemble import build_executor, build_model, build_optimizer
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import Config
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.debug.capture import Record
from mpitrain.debug.states.around import checking_states
from mpitrain.errors import StateError
from mpitrain.verify.here import record_on
from mpitrain.verify.judge import judge
from mpitrain.verify.layouts import Layout, parse
from mpitrain.verify.sweep import case_of
from mpitrain.verify.sweep import train as train_case

STEPS = 3
BASE: dict[str, Any] = {
    "layers": 2, "width": 16, "heads": 4, "seq_len": 16, "batch": 8, "lr": 1e-3, "steps": STEPS, "dropout": 0.0
}  # fmt: skip


def short_of_targets(batch: Batch) -> Batch:
    """The same batch with other numbers of valid targets in its rows."""
    keep = np.arange(batch.targets.shape[1]) < 2 + 3 * batch.places[:, None]
    return replace(batch, targets=np.where(keep, batch.targets, -100))


def train(layout: Layout, options: dict[str, Any]) -> None:
    """Three steps of a small GPT on the ranks of the surrounding world."""
    options = dict(options)
    padded = options.pop("padded", False)
    sizes = {axis: layout.sizes.get(axis, 1) for axis in ("dp", "tp", "cp")}
    kind = next((way for way in layout.ways if way in ("ulysses", "rsa")), "ring")
    config = Config(**{**BASE, **options}, **sizes, cp_attention=kind, sequence_parallel="sp" in layout.ways)
    mesh = Mesh(world(), dp=config.dp, cp=config.cp, tp=config.tp)
    text = np.random.default_rng(7).integers(14, size=2000, dtype=np.uint16)
    corpus = Corpus(text[:1500], text[1500:], 14, "tokens", "random numbers", (), (), "")
    tokens = Tokens(corpus, config.seq_len, config.seed)
    model = build_model(config, corpus, mesh)
    executor = build_executor(config, model, build_optimizer(config, model), mesh, STEPS)
    for batch in tokens.batches(config.batch, mesh.dp.rank, mesh.dp.size, 0, STEPS):
        executor.step((short_of_targets(batch) if padded else batch).part(model.positions_here))


def checked(work: Callable[[], None]) -> None:
    """Do something under a check of states."""
    with checking_states(world()):
        work()


def recorded(ranks: int, work: Callable[[], None]) -> list[list[Record]]:
    kept: list[list[Record]] = [[] for _ in range(ranks)]
    record_on(kept, work)
    return kept


def found_by(mutation: Mutation) -> dict[str, str]:
    """Who finds it, and what they say."""
    layout = parse(mutation.layout)
    alone = recorded(1, lambda: train(Layout(()), mutation.options))[0]
    found = {}
    kept: list[list[Record]] = [[] for _ in range(layout.ranks)]
    with mutation.patch(), contextlib.suppress(Exception):
        record_on(kept, lambda: train(layout, mutation.options))
    verdict = judge(alone, kept)
    if not verdict.ok:
        found["verify"] = str(verdict.first)
    with mutation.patch():
        try:
            recorded(layout.ranks, lambda: checked(lambda: train(layout, mutation.options)))
        except StateError as error:
            found["states"] = str(error)
        except Exception as error:
            found.setdefault("verify", f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_known_bug_is_found(mutation: Mutation) -> None:
    found = found_by(mutation)
    assert "verify" in found
    assert "states" in found or not mutation.seen


def test_there_are_enough_of_them_and_none_twice() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 25


@pytest.mark.parametrize("layout", sorted({mutation.layout for mutation in MUTATIONS}))
def test_without_a_bug_nobody_complains(layout: str) -> None:
    for options in ({}, {"dropout": 0.3, "padded": True, "microbatches": 2}, {"kv_heads": 2, "tied": True}):
        ran = parse(layout)
        if "ulysses" in layout and options.get("kv_heads"):
            options = {**options, "kv_heads": 4}
        alone = recorded(1, lambda options=options: train(Layout(()), options))[0]
        verdict = judge(
            alone, recorded(ran.ranks, lambda options=options, ran=ran: checked(lambda: train(ran, options)))
        )
        assert verdict.ok, str(verdict.first)


@pytest.mark.parametrize("seed", range(100))
def test_no_false_alarm_over_random_configurations(seed: int) -> None:
    """The cases of `mpitrain verify --sweep`, under the check of states."""
    case = case_of(seed)
    alone = recorded(1, lambda: train_case(case, Layout(())))[0]
    verdict = judge(alone, recorded(case.layout.ranks, lambda: checked(lambda: train_case(case, case.layout))))
    assert verdict.ok, f"{case}\n{verdict.first}"


if __name__ == "__main__":
    for each in MUTATIONS:
        names = found_by(each)
        print(f"{' + '.join(names) or 'NOBODY':16s} {each.layout:12s} {each.name}  {each.case}")
        for who, text in names.items():
            print(f"        {who}: {text.splitlines()[0][:170]}")
