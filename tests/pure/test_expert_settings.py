"""The options of a mixture of experts, and what a step says of it."""

from dataclasses import replace

import numpy as np
import pytest

from mpitrain import config as settings
from mpitrain.autograd.ops import IGNORE
from mpitrain.config import Config
from mpitrain.config_rules import check_layout
from mpitrain.data.tokens import Batch
from mpitrain.errors import ConfigError
from mpitrain.parallel.expert.counted import for_metrics, in_words, length, of_model, read, vector
from mpitrain.routing import Routing


def test_without_experts_there_is_no_routing_and_their_options_say_what_is_missing():
    assert Config().routing is None
    for flags in (
        ["--top-k", "2"],
        ["--dropless"],
        ["--capacity-factor", "2"],
        ["--ep", "2"],
        ["--balance-loss", "0.1"],
        ["--moe-every", "2"],
        ["--jitter", "0.1"],
        ["--z-loss", "0.1"],
        ["--router", "topk"],
        ["--renormalize"],
    ):
        with pytest.raises(ConfigError, match=f"{flags[0]}.*--experts"):
            settings.parse(flags)


@pytest.mark.parametrize(
    ("flags", "router", "factor", "balance"),
    [
        ("--experts 8", "switch", 1.25, 0.01),
        ("--experts 8 --top-k 2", "gshard", 1.25, 0.64),
        ("--experts 8 --top-k 3 --capacity-factor 2", "topk", 2.0, 0.01),
        ("--experts 8 --top-k 2 --router topk --dropless", "topk", None, 0.01),
        ("--experts 8 --top-k 2 --balance-loss 0", "gshard", 1.25, 0.0),
        ("--experts 8 --router gshard", "gshard", 1.25, 0.64),
    ],
)
def test_the_number_of_experts_a_token_decides_what_is_not_given(flags, router, factor, balance):
    routing = settings.parse(flags.split()).routing
    assert (routing.router, routing.capacity_factor, routing.balance_loss) == (router, factor, balance)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--experts 4 --top-k 5", "--top-k 5 of --experts 4"),
        ("--experts 4 --router switch --top-k 2", "--router switch and --top-k 2: its tokens have --top-k 1"),
        ("--experts 4 --router gshard --top-k 1", "--router gshard and --top-k 1: its tokens have --top-k 2"),
        ("--experts 4 --renormalize", "the router would learn nothing"),
        ("--experts 4 --top-k 2 --renormalize", "gshard's weights sum to 1 anyway"),
        ("--experts 4 --dropless --capacity-factor 2", "leave one of the two out"),
        ("--experts 4 --capacity-factor 0", "--capacity-factor 0"),
        ("--experts 4 --moe-every 3", "--moe-every 3: no block of --layers 2"),
        ("--experts 6 --ep 4", "--experts 6 is not divisible by --ep 4"),
        ("--experts 0", "--experts 0"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(flags, text):
    with pytest.raises(ConfigError) as error:
        settings.parse(flags.split())
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--schedule pipedream --clip 0 --microbatches 1", "--schedule pipedream and --experts 4"),
        ("--schedule pipedream-2bw --microbatches 4", "--schedule pipedream-2bw and --experts 4"),
        ("--schedule terapipe", "--schedule terapipe and --experts 4"),
        ("--schedule terapipe --dropless", "--schedule terapipe and --experts 4"),
    ],
)
def test_pipelines_that_cannot_have_experts_say_so(flags, text):
    with pytest.raises(ConfigError) as error:
        check_layout(settings.parse(f"--experts 4 --pp 2 {flags}".split()), 1)
    assert text in str(error.value)


def test_slices_can_have_experts_that_know_no_sequence():
    check_layout(settings.parse("--experts 4 --pp 2 --schedule terapipe --dropless --balance-loss 0".split()), 1)


def test_settings_of_experts_survive_the_file(tmp_path):
    config = settings.parse("--experts 8 --top-k 2 --capacity-factor 1.5 --moe-every 2 --z-loss 0.001 --ep 2".split())
    settings.write(config, str(tmp_path / "c.toml"))
    assert settings.load(str(tmp_path / "c.toml")) == config
    assert settings.load(str(tmp_path / "c.toml")).routing == config.routing


def test_every_other_block_is_the_second_of_each_pair():
    assert Routing(4, every=2).layers(5) == [1, 3]
    assert Routing(4).layers(3) == [0, 1, 2]
    assert Routing(4, every=3).layers(7) == [2, 5]


def test_a_batch_knows_which_of_its_tokens_are_no_padding_also_when_it_is_cut():
    targets = np.array([[1, 2, IGNORE, 3], [IGNORE] * 4, [4, IGNORE, IGNORE, IGNORE]])
    whole = Batch(np.zeros((3, 4), np.int64), targets, np.arange(3), np.arange(4), 0)
    np.testing.assert_array_equal(whole.row_lengths, [4, 0, 4])
    assert whole.rows == 2
    np.testing.assert_array_equal(whole.real, [[True] * 4, [False] * 4, [True] * 4])
    part = whole.part(np.array([2, 3]))  # of the last row no target is here
    np.testing.assert_array_equal(part.lengths, [4, 0, 4])
    np.testing.assert_array_equal(part.real, [[True] * 2, [False] * 2, [True] * 2])
    assert [micro.rows for micro in whole.split(3)] == [1, 0, 1]
    assert [part.row_lengths.tolist() for part in whole.slices([1, 3])] == [[4, 0, 4], [4, 0, 4]]
    shorter = replace(whole, documents=np.array([[0, 0, 0, -1], [-1] * 4, [0, 1, 1, 1]]))
    np.testing.assert_array_equal(shorter.row_lengths, [3, 0, 4])
    full = Batch(np.zeros((1, 4), np.int64), targets[:1], np.arange(1), np.arange(4), 0)
    assert full.real is None
    packed = Batch(
        np.zeros((2, 4), np.int64),
        targets[:2],
        np.arange(2),
        np.arange(4),
        0,
        documents=np.array([[0, 0, 1, -1], [-1, -1, -1, -1]]),
    )
    np.testing.assert_array_equal(packed.row_lengths, [3, 0])
    np.testing.assert_array_equal(packed.real, [[True, True, True, False], [False] * 4])
    np.testing.assert_array_equal(packed.part(np.array([1, 3])).real, [[True, False], [False] * 2])


def test_what_a_step_counted_is_read_back():
    numbers = vector(np.array([6, 2, 0, 0]), dropped=3, tokens=8.0, entropy=4.0, balance=5.0, z=2.0)
    assert len(numbers) == length(4)
    load = read(tuple(numbers), rows=2)
    assert load == ((6, 2, 0, 0), 3, 0, 0.5, 2.5, 1.0)
    assert load.dropped_share == 3 / 8
    assert load.busiest == 3.0
    loads = of_model({"blocks.1.mlp": tuple(numbers), "blocks.3.mlp": tuple(vector(np.zeros(4)))}, 2)
    metrics = for_metrics(loads)
    assert metrics["balance_loss"] == 1.25
    assert metrics["z_loss"] == 0.5
    assert metrics["routing"]["blocks.1.mlp"] == {"load": [6, 2, 0, 0], "dropped": 3, "held_back": 0, "entropy": 0.5}
    assert "3.00 times" in in_words(loads, Routing(4))
    assert "37.5 %" in in_words(loads, Routing(4))
    assert for_metrics({}) == {}
    alone = for_metrics(of_model({"blocks.1.mlp": tuple(vector(np.array([6, 2]), tokens=8.0, balance=2.0))}, 2))
    assert "z_loss" not in alone  # which nobody has asked for
    assert read(tuple(vector(np.zeros(4))), rows=0).dropped_share == 0.0  # a step without a token divides by nothing
