"""What a user does with files that came from elsewhere: the calls that tests make in `confined` processes."""

import contextlib
import io
import os
from pathlib import Path

import h5py
import hostile_checkpoints

from mpitrain import checkpoint, config
from mpitrain.checkpoint import command, foreign, foreign_walk
from mpitrain.comm.world import world
from mpitrain.errors import UserError
from mpitrain.train import main


def look(path, names=None):
    """The walk itself, as the child of `foreign.open_file` makes it."""
    try:
        return list(foreign_walk._look(os.open(path, os.O_RDONLY), names))
    except foreign_walk.Refused as refused:
        raise UserError(" ".join(refused.args)) from None


def look_unhindered(path):
    """The same without the limit on open files: what the walk itself opens, others can see."""
    foreign_walk.resource.setrlimit = lambda limit, value: None
    return look(path)


def look_and_open(path, other):
    """What is left of the right to open a file once HDF5 has its own."""
    contents = foreign_walk._look(os.open(path, os.O_RDONLY), None)
    next(contents)
    return Path(other).read_bytes()


def open_file(path, names=None):
    with foreign.open_file(path, names) as file:
        return list(file.datasets)


def read_naively(path, name):
    """What a victim does."""
    with h5py.File(path) as file:
        return file[name][...].tolist()


def load(folder):
    """Loads the one tensor of `hostile_checkpoints`."""
    ref = hostile_checkpoints.slab(fill=False)
    scalars = checkpoint.load(folder, [ref], world())
    return scalars, ref.array.tolist()


def tool(*words):
    """`mpitrain checkpoint ...`."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = command.main(list(words))
    return code, said.getvalue()


def resume(run):
    return [os.fspath(path) for path in checkpoint.find("latest", run, world())]


def settings(path):
    return config.parse(["--config", path])


def settings_of(*flags):
    return config.parse(list(flags))


def train(*flags):
    with contextlib.redirect_stdout(io.StringIO()):
        return main(list(flags))
