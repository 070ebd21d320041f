"""A small program on two ranks, its recording, and what a user does with one that came from elsewhere."""

import tempfile
from pathlib import Path

import numpy as np

from mpitrain import Executor, Mesh, one_stage, with_update, world
from mpitrain.comm.local import LocalWorld
from mpitrain.debug.recorder import record
from mpitrain.models.mlp import MLP
from mpitrain.optim import Sgd
from mpitrain.recording.lines import text_of, whole
from mpitrain.recording.outside import heard
from mpitrain.recording.reading import RankReader
from mpitrain.replay.run import replay

RANKS = 2


def messages(factor=1.0):
    """All verbs of the door once, on what they brought before; a number that depends on all of them."""
    ranks = world()
    x = np.arange(12, dtype=np.float32).reshape(4, 3) * (ranks.rank + 1) * factor
    ranks.agree(None)
    told = ranks.exchange([ranks.rank, "a" * (3 + ranks.rank)])
    x = x + ranks.all_reduce(x) * len(told)
    request = ranks.iall_gather(x, dim=1)
    x = x * ranks.broadcast(np.float64([ranks.rank + 2.0]), root=1)[0]
    y = request.wait()[:, :3] + ranks.reduce_scatter(np.concatenate([x, x]), dim=0)[0]
    half = ranks.iall_reduce(y.astype(np.float16), out=np.empty(y.shape, np.float32)).wait()
    z = ranks.all_to_all(half.reshape(4, 3)[:, :2], 0, 1) + ranks.shift(x, 1)[:, :1].repeat(2, axis=0)
    if ranks.rank == 0:
        ranks.isend(z, 1, tag=7).wait()
    else:
        z = z + ranks.recv(z.shape, z.dtype, 0, tag=7)
    ranks.barrier()
    z = z * ranks.all_reduce(np.array(0.5 + ranks.rank))
    return float(z.sum()) + float(heard("a number", lambda: 0.5))


def steps(count=4):
    """Some steps of a small network; what its weights come to."""
    mesh = Mesh(world(), dp=RANKS)
    model = MLP([3, 5, 2], mesh)
    executor = Executor(model, Sgd(model.parameters(), lr=0.1, weight_decay=0.0), mesh, with_update(one_stage(1)))
    rows = np.random.default_rng(world().rank)
    losses = []
    for _ in range(count):
        losses.append(executor.step(Rows(rows.normal(size=(4, 3)), rows.integers(0, 2, 4))))
    return losses, [p.master.copy() for p in model.shares()]


class Rows:
    """A batch of points with their classes."""

    def __init__(self, x, y):
        self.inputs, self.targets, self.count = x, y, len(y)

    def split(self, parts):
        return [Rows(x, y) for x, y in zip(np.split(self.inputs, parts), np.split(self.targets, parts), strict=True)]


PROGRAMS = {"messages": messages, "steps": steps}


def made(folder, program, **asked):
    """Record a program on ranks that are threads; what it returned on each."""

    def body():
        with record(world(), folder, **asked):
            return PROGRAMS[program]()

    return LocalWorld(RANKS, timeout=20).run(body)


def again(folder, rank, program, **more):
    """Run a rank again; how that went, and what the program returned, None if the recording ended before it."""
    returned = []
    with tempfile.TemporaryDirectory() as place:
        outcome = replay(
            RankReader(Path(folder), rank), lambda: returned.append(PROGRAMS[program]()), Path(place), **more
        )
    return outcome, returned[0] if returned else None


def lines_of(path):
    """The objects of an index."""
    return [whole(line) for line in Path(path).read_bytes().splitlines(keepends=True)]


def write_lines(path, lines):
    """An index with these objects, each with the sum that it needs."""
    Path(path).write_bytes(b"".join(text_of(line) for line in lines))
