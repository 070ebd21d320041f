"""Options of offload: sizes, places, and what does not go together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpitrain.config import Config
from mpitrain.config_rules import memory_size
from mpitrain.errors import ConfigError
from mpitrain.models.gpt import GPTConfig
from mpitrain.pipeline.passes import complete
from mpitrain.plan.memory import model_state
from mpitrain.plan.memory import offload as planned
from mpitrain.plan.traffic import Step


@pytest.mark.parametrize(
    ("text", "nbytes"), [("512MiB", 512 * 2**20), ("2GiB", 2**31), ("1.5KiB", 1536), ("10B", 10), (" 1TiB ", 2**40)]
)
def test_sizes_are_read(text, nbytes):
    assert memory_size(text) == nbytes


@pytest.mark.parametrize("text", ["2GB", "2", "GiB", "-1GiB", "1e3MiB", "2 GiB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="as 2GiB"):
        Config(memory_budget=text)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"offload": "none,optimizer"}, "none must be one of optimizer, activations, parameters"),
        ({"offload": "weights"}, "weights must be one of optimizer, activations, parameters"),
        ({"offload": "optimizer", "offload_to": "disk"}, "must be host, or hdf5:DIR"),
        ({"offload": "optimizer", "offload_to": "hdf5:"}, "must be host, or hdf5:DIR"),
        ({"offload_to": "hdf5:/scratch"}, "is for --offload and --memory-budget"),
        ({"offload": "optimizer", "optimizer": "adafactor"}, "it looks at whole matrices"),
        ({"offload": "parameters", "optimizer": "adafactor"}, "it looks at whole matrices"),
        ({"offload": "parameters", "zero": 1}, "take 3, or 0"),
        ({"offload": "parameters", "reducer": "powersgd"}, "take --reducer flat"),
        ({"offload": "optimizer", "reducer": "local"}, "take another reducer"),
        ({"offload": "parameters", "tied": True, "pp": 2}, "two stages hold one table"),
        ({"offload": "parameters", "loss_scaling": "blocks"}, "take dynamic"),
        ({"offload": "parameters", "pp": 2, "schedule": "pipedream", "clip": 0.0}, "take --schedule 1f1b"),
        ({"offload": "activations", "recompute_budget": 10.0}, "both choose what waits for backward"),
        ({"offload": "activations", "experts": 4, "dropless": True}, "give --capacity-factor"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(settings, why):
    with pytest.raises(ConfigError, match=why):
        Config(**settings)


def test_what_goes_together_does():
    assert Config(offload="none", offload_to="hdf5:/scratch").offloads == frozenset()
    assert Config().offloads is None
    Config(offload="activations", optimizer="adafactor")
    Config(offload="optimizer, activations", zero=2, prefetch=3)
    Config(memory_budget="2GiB", optimizer="adafactor", offload_to="hdf5:/scratch")


SIZES = GPTConfig(vocab=1000, layers=8, width=256, heads=4, seq_len=128)


def plans(budget, step=None, choices=planned.CHOICES):
    step = Step(SIZES, 16, 4) if step is None else step
    return planned.within(step, complete("1f1b", ranks=step.pp, microbatches=4), budget, choices)


def test_less_memory_takes_more_offload_and_smaller_pieces_and_each_plan_keeps_its_budget():
    step = Step(SIZES, 16, 4)
    state = model_state(step)
    all_here = plans(10**12)
    assert not all_here.what
    assert all_here.total == sum(state) + all_here.here["activations"]
    seen = []
    for share in (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2):
        plan = plans(int(share * all_here.total))
        assert plan.total <= share * all_here.total
        seen.append(planned.CHOICES.index(plan.what))
    assert seen[0] == 0
    assert seen[-1] == len(planned.CHOICES) - 1
    assert sorted(seen) == seen


def test_a_plan_is_a_function_of_the_settings_alone_and_the_same_for_all_ranks_of_a_pipeline():
    step = Step(SIZES, 16, 4, pp=4)
    rows = complete("1f1b", ranks=4, microbatches=4)
    budget = planned.of_ranks(step, rows, ["optimizer", "activations"]).total
    found = [planned.within(replace(step, pp_rank=rank), rows, budget) for rank in range(4)]
    assert found == found[:1] * 4


def test_a_budget_that_no_plan_keeps_is_refused_with_what_is_needed():
    with pytest.raises(ConfigError, match=r"cannot be kept: a rank needs [\d,.]+ MiB with .*optimizer") as refused:
        plans(2**18)
    assert "Offload" not in str(refused.value)  # all of it was tried
    with pytest.raises(ConfigError, match="Offload activations and parameters too"):
        plans(2**20, choices=[["optimizer"]])


def test_a_budget_that_the_words_alone_are_too_much_for_names_their_flag():
    step = Step(replace(SIZES, vocab=10**6), 16, 4)
    with pytest.raises(ConfigError, match=r"\n99% of the weights belong to the 1,000,000 words: .*--vocab"):
        plans(2**20, step, [["optimizer"]])
    with pytest.raises(ConfigError, match=r"larger budget\.$"):
        plans(2**18, choices=[["optimizer"]])


def test_what_is_elsewhere_is_what_is_not_here_any_more():
    step, rows = Step(SIZES, 16, 4, np.float16), complete("1f1b", ranks=1, microbatches=4)
    state = model_state(step)
    everything = planned.of_ranks(step, rows, ["optimizer", "parameters"])
    assert planned.elsewhere(step, everything) == sum(state)
    optimizer = planned.of_ranks(step, rows, ["optimizer"])
    assert planned.elsewhere(step, optimizer) == state.optimizer + state.masters
    assert "optimizer state" not in optimizer.here
    assert optimizer.here["weights"] == state.weights
