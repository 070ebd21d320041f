"""Training with encoded activations: without loss the same bits, rounded the same run on every layout."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_cnn
import checks_layouts
import checks_recompute

from mpitrain.assemble import build_policy
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.config import Config
from mpitrain.data.images import Images
from mpitrain.debug.compare import compare
from mpitrain.debug.memory import MemoryLedger
from mpitrain.debug.owners import ACTIVATIONS, ARRIVED
from mpitrain.errors import ConfigError
from mpitrain.events import listen
from mpitrain.memory.gist import Gist
from mpitrain.memory.policy import Keep
from mpitrain.models.cnn import CNN
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.routing import Routing

slow = pytest.mark.slow
CNNS = [
    {},
    {"dp": 2},
    {"pp": 2, "micros": 4},
    {"pp": 2, "micros": 4, "schedule": "zb-h1"},
    {"dp": 2, "zero": 3},
]
EXPERTS = replace(checks_layouts.SIZES, layers=1, routing=Routing(experts=4, router="topk", top_k=2))
QUICK = ["one_rank", "dp2", "tp2_sp", "pp2_1f1b", "pp2_zb_h1", "pp2_terapipe"]


def some(names):
    return [pytest.param(n, marks=() if n in QUICK else slow) for n in names]


def ranks_of(layout):
    return layout.get("pp", 1) * layout.get("dp", 1)


def same_bits(one, other):
    assert one.keys() == other.keys()
    for kind, tensors in one.items():
        for name, array in tensors.items():
            assert array.tobytes() == other[kind][name].tobytes(), (kind, name)


# -- without loss


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layout", CNNS, ids=str)
def test_a_cnn_learns_the_same_bits(layout, dtype):
    """T27.1."""

    def main():
        return [checks_cnn.train(world(), policy=policy, dtype=dtype, **layout) for policy in (None, Gist(), Keep())]

    for plain, lossless, kept in LocalWorld(ranks_of(layout)).run(main):
        same_bits(lossless, plain)
        same_bits(kept, plain)


@pytest.mark.parametrize("recomputed", [(), ("blocks.*.mlp",)], ids=["plain", "recomputed"])
@pytest.mark.parametrize("name", some(checks_recompute.LAYOUTS))
def test_a_gpt_learns_the_same_bits(name, recomputed):
    layout = checks_recompute.LAYOUTS[name]

    def main():
        plain, _ = checks_recompute.trained(world(), recomputed, **layout)
        lossless, _ = checks_recompute.trained(world(), recomputed, policy=Gist(), **layout)
        return [name for name, found in plain.items() if lossless[name] != found]

    for different in LocalWorld(checks_recompute.ranks_of(layout), timeout=60).run(main):
        assert not different


# -- rounded


@functools.cache
def alone(bits):
    return checks_cnn.train(World(Alone(), "none"), policy=Gist(bits))


@pytest.mark.parametrize("bits", [16, pytest.param(8, marks=slow)])
@pytest.mark.parametrize("layout", CNNS[1:4], ids=str)
def test_rounding_is_the_same_on_every_layout_of_a_cnn(layout, bits):
    """Elements are rounded one by one, so who holds which of them does not matter."""
    whole = alone(bits)
    plain = checks_cnn.train(World(Alone(), "none"))
    assert not compare(whole["weights"], plain["weights"])[0].ok  # it is another run than without
    for found in LocalWorld(ranks_of(layout)).run(lambda: checks_cnn.train(world(), policy=Gist(bits), **layout)):
        for kind in whole:
            worst = compare(found[kind], {name: whole[kind][name] for name in found[kind]})[0]
            assert worst.ok, f"{kind}: {worst}"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"tp": 2}),
        (2, {"tp": 2, "sp": True, "documents": True}),
        (2, {"cp": 2}),
        (2, {"pp": 2, "micros": 4, "schedule": "zb-h1"}),
        (2, {"dp": 2, "zero": 3}),
        (2, {"tp": 2, "sizes": EXPERTS}),
        pytest.param(8, {"dp": 2, "tp": 2, "pp": 2, "micros": 2, "tied": True}, marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("bits", [16, pytest.param(8, marks=slow)])
def test_rounding_is_the_same_on_every_layout_of_a_gpt(ranks, layout, bits):
    """Also what tensor parallelism cuts is rounded alike."""
    LocalWorld(ranks).run(lambda: checks_layouts.equals_one_rank(world(), gist=bits, **layout))


@pytest.mark.parametrize("bits", [16, 8])
def test_recomputed_blocks_are_rounded_inside_as_those_that_wait(bits):
    """What they run again on is exact, so making them again changes no bit."""

    def main():
        plain, whole = checks_recompute.trained(world(), (), policy=Gist(bits))
        again, kept = checks_recompute.trained(world(), ("blocks.*",), policy=Gist(bits))
        return [name for name, found in plain.items() if again[name] != found], sum(kept) < sum(whole)

    assert main_alone(main) == ([], True)


def main_alone(main):
    (found,) = LocalWorld(1).run(main)
    return found


# -- bytes


def test_the_ledger_sees_less_waiting_and_what_a_stage_is_sent_is_let_go():
    """The stage's input waits as its nodes have it; the array that came is let go."""

    def main(policy):
        mesh = Mesh(world(), pp=2)
        model = CNN(mesh, (16, 16, 1), ((8, 8), (8, 8)), 10, seed=3)
        rows = complete("gpipe", ranks=2, microbatches=4)
        executor = Executor(model, AdamW(model.parameters(), lr=1e-3), mesh, rows, policy=policy)
        rng = np.random.default_rng(0)
        images = Images(rng.standard_normal((32, 16, 16, 1)).astype(np.float32), np.arange(32) % 10,
                        np.zeros((1, 16, 16, 1), np.float32), np.zeros(1, np.int64))  # fmt: skip
        ledger, arrived = MemoryLedger(), []

        def note(event):
            if event.kind == "action" and event.phase == "end" and event.name[0] == "F":
                ledger.settle()
                arrived.append(ledger.now.get(ARRIVED, 0))

        with listen(ledger), listen(note):
            executor.step(images.batch_at(0, 32))
        return ledger.largest[ACTIVATIONS], ledger.peak, max(arrived)

    found = {}
    for name, policy in (("none", None), ("lossless", Gist()), ("16", Gist(16))):
        found[name] = LocalWorld(2).run(functools.partial(main, policy))
    for rank in range(2):
        plain, lossless, rounded = (found[name][rank][0] for name in ("none", "lossless", "16"))
        assert plain > 1.6 * lossless > 1.6 * 1.1 * rounded
        less = found["none"][rank][1] - found["lossless"][rank][1]  # of all that is alive
        assert less > 0.8 * (plain - lossless)
    assert [came for _, _, came in found["16"]] == [0, 0]


# -- from the command line


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gist": "16", "recompute": "none"}, r"--gist 16 and --recompute none.*\n.*--gist lossless"),
        ({"gist": "8", "cp": 2, "cp_attention": "rsa"}, r"--cp-attention rsa.*\n.*--gist lossless"),
        ({"gist": "10", "pp": 2, "schedule": "terapipe"}, r"slices.*\n.*--gist lossless"),
        ({"gist": "12"}, "gist"),
    ],
)
def test_what_would_be_another_run_is_refused(how, message):
    with pytest.raises(ConfigError, match=message):
        Config(**how)
    Config(**{**how, "gist": "lossless"})


def test_policies_follow_the_settings():
    assert build_policy(Config()) is None
    assert [build_policy(Config(gist=kind)).bits for kind in ("lossless", "16", "10", "8")] == [None, 16, 10, 8]
