"""What a user does with files that came from elsewhere: the calls that tests make in `confined` processes."""

import contextlib
import io
import json
import os
import sys
import tempfile
import types
from pathlib import Path

import h5py
import hostile_checkpoints
import recorded

from mpitrain import checkpoint, config
from mpitrain.checkpoint import foreign, foreign_walk
from mpitrain.checkpoint.tools import command
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.copies import Copies
from mpitrain.comm.world import world
from mpitrain.compare.report import of_walk, text_of
from mpitrain.compare.sources import source
from mpitrain.compare.walk import walk
from mpitrain.curve import loss_curve
from mpitrain.data import encoded
from mpitrain.data.corpus import load as load_corpus
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import UserError
from mpitrain.interchange import exporting, importing  # noqa: F401  # before a fork does it
from mpitrain.interchange.command import TOOLS as OF_OTHERS
from mpitrain.metrics import read_metrics
from mpitrain.metrics.sinks import Sinks
from mpitrain.train import main

WORDS = types.SimpleNamespace(vocab_size=300)


def look(path, names=None):
    """The walk itself, as the child of `foreign.open_file` makes it, without a process of its own."""
    told = json.loads(foreign_walk.answer(os.open(path, os.O_RDONLY), names))
    return list(foreign._believe(told, names, os.path.getsize(path), path))


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


def look_and_read(path):
    """What `foreign.open_file` and `ForeignFile.read` do, in this one process."""
    descriptor = os.open(path, os.O_RDONLY)
    size = os.fstat(descriptor).st_size
    told = json.loads(foreign_walk.answer(os.open(path, os.O_RDONLY), None))
    with foreign.ForeignFile(path, descriptor, size, foreign._believe(told, None, size, path)) as file:
        return {name: file.read(name).shape for name in file.datasets}


def inspect(path):
    return tool("inspect", path), tool("inspect", path, "--tensors", "*"), tool("inspect", path, "--json")


def verify(path):
    return tool("verify", path), tool("verify", path, "--json")


def read_all(path):
    source = Source.of(path)
    return {name: [values.sum() for _, values in source.pieces(name)] for name in source.manifest.tensors}


def corpus(path):
    return str(load_corpus(path))


def metrics(path, first_step):
    with Sinks(Path(path).parent, first_step, frozenset({"csv"}), {}) as writer:
        writer.write(1 << 62, loss=1.0)
    return len(loss_curve(read_metrics(path), "title", "caption"))


def imported(theirs, run):
    """Another tool's weights, as a run and written again; a refusal leaves nothing behind."""
    os.chdir(os.path.dirname(run))  # what is removed is opened by its name in a folder that is open
    before = sorted(os.listdir())
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            code = command.main(["import", theirs, run], OF_OTHERS)
        except UserError:
            assert sorted(os.listdir()) == before
            raise
        return code, command.main(["export", run, f"{run}-again"], OF_OTHERS)


def tokenizer(path):
    """A text in words and back, at once and word by word."""
    words = Tokenizer.read(path)
    tokens = words.encode("the cat, naïve 世界\n\n  x = 1 <|endoftext|>")
    stream = words.stream()
    told = "".join([stream.add(token) for token in tokens] + [stream.end()])
    assert all(0 <= token < words.vocab_size for token in tokens)
    return len(told), len(words.decode(tokens)), words.special, len(words.encode_all(["a", ""])[1])


def encoded_text(cache, key):
    """An encoded text that lies in the cache: it is whole, or there is none."""
    os.environ["MPITRAIN_CACHE"] = cache
    found = encoded.opened(key, WORDS)
    return None if found is None else (str(found), int(found.train.sum()) + int(found.val.sum()))


def exported(run, theirs):
    """A model that somebody else trained, as another tool gets it."""
    os.chdir(os.path.dirname(run))
    with contextlib.redirect_stdout(io.StringIO()):
        return command.main(["export", run, theirs], OF_OTHERS)


def board(run_folder):
    return {rank: (copy.page.current(), copy.page.calls()) for rank, copy in Copies(0).read(run_folder, [0, 1]).items()}


def replayed(folder, program):
    """Both ranks again."""
    return [recorded.again(folder, rank, program)[0] for rank in range(recorded.RANKS)]


def compared(one, other):
    """What is said of two runs with digests."""
    found = walk(source(one, 1).digests, source(other, 2).digests)
    return len(text_of(of_walk(found)))


def watched(allowed, function, *arguments):
    """Make a call in which nothing is opened, made or started but below `allowed` and where Python itself lies.

    The process that looks at a file that comes alone is started, and answers in a file without a name.
    """
    lies = (sys.prefix, sys.base_prefix, str(Path(checkpoint.__file__).parents[2]), "/dev/fd/", "/dev/null", "/proc/")
    unnamed = os.path.realpath(tempfile.gettempdir())
    fine = (allowed, *lies, os.path.join(unnamed, "tmp"))
    names = {"open": 1, "os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.symlink": 2, "os.link": 2}
    never = ("subprocess", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket", "pty")

    def see(event, told):
        for path in told[: names.get(event, 0)]:
            name = os.path.realpath(path) if isinstance(path, str | bytes | os.PathLike) else ""
            if name and name != unnamed and not os.fsdecode(name).startswith(fine):
                raise AssertionError(f"{event} of {path!r}")
        if event.startswith(never) and foreign_walk.__file__ not in repr(told):
            raise AssertionError(f"{event} {told!r}")

    sys.addaudithook(see)
    return globals()[function](*arguments)
