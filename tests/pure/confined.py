"""Calls in processes of 512 MiB and 5 s of a core each: `outcomes` for tests, and the program that it starts.

The limit on address space holds before NumPy and h5py are loaded.  They are loaded once: each call is made in a fork of
the process that has loaded them, so that hundreds take no longer than their own work.
"""

import atexit
import functools
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

MEMORY = 512 << 20  # bytes
SECONDS = 5  # of a core
PATIENCE = 60  # seconds by the clock, on a machine that does other things too: whoever waits for a pipe waits longer
SECRET = "planted-5f3a1c9e"
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CLUSTER_TOKEN": SECRET}
"""Of the processes, with something that must not come out again."""


class Outcome(NamedTuple):
    """How a call ended: "refused" by a UserError, "raised" anything else, "returned", or killed by "signal"."""

    end: str
    text: str
    kind: str = ""


def outcomes(module: str, calls: list[list[Any]], cwd: Path | None = None) -> list[Outcome]:
    """What comes of `module.function(*arguments)` for each [function, *arguments], all of which JSON can hold."""
    server = _server(module)
    told = []
    for call in calls:
        print(json.dumps([str(cwd or "/"), *call]), file=server.stdin, flush=True)
        line = server.stdout.readline()
        assert line, f"the process that makes calls has ended with {server.wait()}"
        told.append(Outcome(*json.loads(line)))
    return told


@functools.cache
def _server(module: str) -> subprocess.Popen:
    here = Path(__file__)
    paths = [str(here.parents[2]), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    server = subprocess.Popen(
        [sys.executable, str(here), module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
    )
    atexit.register(server.communicate)  # closes its input, and so ends it
    return server


def _serve() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    functions = importlib.import_module(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # what a call prints is no answer
    for line in sys.stdin:
        cwd, function, *arguments = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            os.close(answers)
            os.chdir(cwd)
            with os.fdopen(writing, "w") as told:
                json.dump(_call(getattr(functions, function), arguments), told)
                told.flush()
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            text = told.read()
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            text = json.dumps(["signal", str(os.WTERMSIG(status))])
        os.write(answers, f"{text}\n".encode())


def _call(function, arguments) -> list[str]:
    from mpitrain.errors import UserError

    signal.alarm(PATIENCE)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        return ["returned", repr(function(*arguments))[:10_000]]
    except UserError as error:
        return ["refused", str(error), type(error).__name__]
    except BaseException as error:
        return ["raised", traceback.format_exc()[-2000:], type(error).__name__]


if __name__ == "__main__":
    _serve()
