"""Replicas that do not hold the same bits are found, with rank and tensor; those that do are left alone."""

import re

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.errors import ReplicaError, StateError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.models.mlp import MLP
from mpitrain.nn.share import Share
from mpitrain.optim.adam import AdamW
from mpitrain.parallel.data import FlatReducer
from mpitrain.parallel.replicas import ReplicaCheck, check_replicas
from mpitrain.parallel.zero import RowReducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.train import main

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(400))
TINY = "--model gpt-tiny --layers 2 --width 16 --batch 12 --lr 0.01 --sample-length 0 --eval-every 0".split()
SIZES = GPTConfig(vocab=11, layers=2, width=8, heads=2, seq_len=8, tied=True)


def build(spoil_rank, spoil_name):
    mesh = Mesh(world())
    model = MLP((5, 7, 3), mesh, seed=1)
    for p in model.parameters():
        if mesh.world.rank == spoil_rank and p.name == spoil_name:
            flip(p.data, 32 * p.data.size - 32)  # the lowest bit of the last element
    check_replicas(model.parameters(), mesh, "at the start")


def flip(array, bit):
    """Flip one bit of an array, counted over its bytes."""
    flat = array.reshape(-1).view(np.uint8)
    assert np.shares_memory(flat, array)
    flat[bit // 8] ^= 1 << bit % 8


def test_equal_replicas_pass():
    LocalWorld(3).run(build, -1, "")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", ["blocks.0.up.weight", "head.bias"])
def test_one_flipped_bit_is_reported_with_its_tensor_and_the_rank_that_differs_from_most(rank, name):
    """T4.4."""
    others = ",".join(str(r) for r in range(3) if r != rank)
    words = f"{name} differs between ranks that share it, at the start: rank {rank} against ranks {others}, axis dp."
    with pytest.raises(StateError, match=words):
        LocalWorld(3).run(build, rank, name)


# ------------------------------------------------------------------------------------------- flipped bits, by hundreds


def trained(zero=0, dtype=np.float32, **axes):
    """A small GPT after one step, and its check."""
    mesh = Mesh(world(), **axes)
    model = GPT(SIZES, mesh, seed=3, dtype=dtype, zero=zero)
    reducer = RowReducer(model, mesh, 1 << 30, overlap=False) if zero else FlatReducer(model.flats, mesh)
    optimizer = AdamW(model.shares(), lr=1e-3)
    rows = complete("1f1b", ranks=mesh.pp.size, microbatches=1)
    executor = Executor(model, optimizer, mesh, rows, reducer=reducer, clip=0.0)
    numbers = np.arange(4 * 9).reshape(4, 9) * 7 % 11
    here = numbers[mesh.dp.rank :: mesh.dp.size]
    executor.step(batch(here[:, :-1], here[:, 1:], mesh))
    return mesh, model, optimizer, ReplicaCheck(model, optimizer, executor.reducer, mesh, 1)


def batch(inputs, targets, mesh):
    places = np.arange(len(inputs)) * mesh.dp.size + mesh.dp.rank
    return Batch(inputs=inputs, targets=targets, places=places, positions=np.arange(inputs.shape[1]), step=0)


def shared(mesh, model, optimizer):
    """(name, array) of all that this rank holds as another one does, by the specs and by hand."""
    states = [
        (f"{kind} of {name}", t.spec, t.array)
        for kind, of in optimizer.state_tensors().items()
        for name, t in of.items()
    ]
    weights = [(p.name, p.spec, p.data) for p in model.parameters() if not p.visits]
    masters = [(f"the master of {p.name}", p.spec, p.master) for p in model.shares() if p.master is not p.data]
    parts = [(p.name, p.spec, p.data) for p in model.shares() if isinstance(p, Share) and p.whole.visits]
    return [
        (name, array)
        for name, spec, array in [*weights, *masters, *parts, *states]
        if array.size
        and (any(mesh.sizes[axis] > 1 for axis in spec.shared_axes()) or (spec.tied and mesh.sizes["pp"] > 1))
    ]


def hundred_flips(flips, seed, how):
    mesh, model, optimizer, check = trained(**how)
    here = shared(mesh, model, optimizer)
    names = mesh.world.exchange([name for name, _ in here])
    draw = np.random.default_rng(seed)  # the same on all ranks
    able = [rank for rank, of in enumerate(names) if of]
    found = 0
    check(1)
    for number in range(flips):
        rank = able[draw.integers(len(able))]
        place, bit = draw.integers(len(names[rank])), draw.random()
        name = names[rank][place]
        array = here[place][1] if mesh.world.rank == rank else None
        if array is not None:
            flip(array, int(bit * 8 * array.nbytes))
        try:
            check(2 + number)
        except ReplicaError as error:
            said = str(error).splitlines()[0]
            named = re.fullmatch(
                r"(.*) differs between ranks that share it, after step (\d+): (.*) against (.*), axis .*\.", said
            )
            assert named is not None, said
            ranks = {int(word) for part in named.group(3, 4) for word in re.findall(r"\d+", part)}
            found += named[1] == name and int(named[2]) == 2 + number and rank in ranks
        if array is not None:
            flip(array, int(bit * 8 * array.nbytes))
    check(2 + flips)
    return found


LAYOUTS = {
    "dp2": {},
    "dp2 tp2": {"tp": 2},
    "pp2, tied": {"pp": 2},
    "dp2 pp2, tied": {"pp": 2, "dp": 2},
    "ZeRO 1": {"zero": 1},
    "ZeRO 2, tp2": {"zero": 2, "tp": 2},
    "ZeRO 3, tp2": {"zero": 3, "tp": 2},
    "half": {"dtype": np.float16},
    "ZeRO 1, half, tp2": {"zero": 1, "tp": 2, "dtype": np.float16},
}
RANKS = {"dp2 tp2": 4, "dp2 pp2, tied": 4, "ZeRO 2, tp2": 4, "ZeRO 3, tp2": 4, "ZeRO 1, half, tp2": 4}


FAST = ("dp2", "dp2 tp2", "pp2, tied", "ZeRO 1")


@pytest.mark.parametrize(
    "layout", [*FAST, *(pytest.param(k, marks=pytest.mark.slow) for k in LAYOUTS if k not in FAST)]
)
def test_every_flipped_bit_is_reported_with_rank_and_tensor(layout):
    """Random ranks, tensors (weights, masters, moments) and bits: 100 of 100."""
    found = LocalWorld(RANKS.get(layout, 2)).run(hundred_flips, 100, 7, LAYOUTS[layout])
    assert found == [100] * len(found)


# ------------------------------------------------------------------------------------------- when, and what follows


def test_it_is_time_every_so_many_steps_and_before_each_save():
    class Never:
        def __getattr__(self, name):
            raise AssertionError("nothing is compared")

    def due():
        _, model, optimizer, _ = trained()
        check = ReplicaCheck(model, optimizer, FlatReducer((), Mesh(world())), Mesh(world()), 10)
        singly = [step for step in range(1, 31) if check(step, saves=step == 17)]
        in_rows = [step for step in range(4, 61, 4) if check(step, 4)]
        never = ReplicaCheck(Never(), Never(), Never(), Mesh(world()), 0)
        assert not never(10, saves=True)
        return singly, in_rows

    assert LocalWorld(2).run(due)[0] == ([10, 17, 20, 30], [12, 20, 32, 40, 52, 60])
    alone = Mesh(world())
    assert not ReplicaCheck(Never(), Never(), Never(), alone, 1)(1, saves=True)  # nobody to compare with


class Flipped:
    """A listener that flips a bit of one rank as a step begins."""

    def __init__(self, rank, step, name):
        self.rank, self.step, self.name = rank, step, name

    def __call__(self, event):
        if (
            event.kind == "action"
            and event.phase == "begin"
            and event.name.startswith("COUNT")
            and world().rank == self.rank
        ):
            self.step -= 1
            if self.step == 0:
                (p,) = (p for p in event.info["executor"].model.parameters() if p.name == self.name)
                flip(p.data, 77)


def test_a_bit_that_flips_in_training_ends_it_at_the_next_check_or_save(tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)

    def run(*flags):
        with listen(Flipped(1, 4, "blocks.0.mlp.up.weight")):
            main([*TINY, "--data", str(tmp_path / "text"), "--run", str(tmp_path / "run"), "--steps", "12", *flags])

    with pytest.raises(
        ReplicaError, match=r"blocks.0.mlp.up.weight differs .*, after step 8: rank 1 against ranks 0,2, axis dp"
    ):
        LocalWorld(3).run(run, "--check-replicas", "8")
    with pytest.raises(ReplicaError, match=r"after step 5: ") as caught:
        LocalWorld(3).run(run, "--save-every", "5", "--run", str(tmp_path / "other"))
    assert len(str(caught.value).splitlines()) <= 5
    assert not list((tmp_path / "other").rglob("step-*"))
    LocalWorld(3).run(run, "--check-replicas", "0", "--run", str(tmp_path / "unseen"))


FEW = ["--dp 2", "--tp 2 --dp 1 --sequence-parallel --optimizer adafactor", "--reducer local --local-steps 3"]
MORE = [
    "--reducer local --local-steps 1 --average-moments --optimizer sgd",
    "--reducer stale --staleness 2 --stale-workers",
    "--reducer powersgd",
    "--reducer bucketed --dtype float16",
    "--pp 2 --dp 1 --schedule pipedream-2bw --microbatches 2",
    "--pp 2 --dp 1 --microbatches 2 --zero 1",
    "--zero 1 --dtype bfloat16",
    "--zero 3",
    "--experts 2 --ep 2",
    "--cp 2 --dp 1",
    "--offload parameters",
    "--offload optimizer --tp 2 --dp 1",
]


@pytest.mark.parametrize("flags", [*FEW, *(pytest.param(flags, marks=pytest.mark.slow) for flags in MORE)])
def test_replicas_that_agree_are_left_alone(tmp_path, flags):
    """Layouts of all kinds are compared after each step of their own tests, too (checks_layouts)."""
    (tmp_path / "text").write_text(TEXT)
    words = [*TINY, "--data", str(tmp_path / "text"), "--run", str(tmp_path / "run"), "--steps", "6"]
    LocalWorld(2).run(main, [*words, "--check-replicas", "1", "--save-every", "3", *flags.split()])
