"""The command line: `mpitrain WORD ...`, one word a tool.

mpitrain train [options]               train a language model (also: python examples/train_gpt.py)
mpitrain local -n 8 SCRIPT [args]      run a script on 8 ranks that are threads of one process, without MPI
mpitrain verify --layout dp2,tp2 SCRIPT [args]    prove that a layout is the same training run as one rank
mpitrain schedule NAME --stages 4 --microbatches 8    print, draw and check a pipeline schedule
mpitrain checkpoint inspect|verify|diff|reshard PATH ...    look into checkpoints, prove them whole, write them anew
mpitrain doctor [--json]               what MPI, cores, BLAS, GPU and HDF5 this machine has, and what to fix
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from mpitrain.comm.launcher import is_first
from mpitrain.errors import ConfigError, UserError

PATIENCE = 3.0  # seconds
INTERRUPTED_CODE = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(words))


def guarded(command: Callable[[], int]) -> int:
    """Run a command; a mistake of the user becomes one message and its exit code, 2 for most.

    Under MPI with more than one rank the guard of `comm.guard` owns the end of the process, so the error goes on to it.
    Before MPI has started all ranks make the same mistake, and each knows from its launcher whether it is the one that
    speaks.  The others wait for it: a launcher that saw one of them end first would kill it before it has spoken.
    """
    try:
        return command()
    except UserError as error:
        if _has_guard() or _is_local_rank():
            raise
        if is_first(os.environ):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(PATIENCE)
        return error.exit_code
    except KeyboardInterrupt:
        if _has_guard() or _is_local_rank():
            raise
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED_CODE


def _dispatch(words: list[str]) -> int:
    word = words[0] if words else "--help"
    rest = words[1:]
    match word:
        case "--help" | "-h" | "help":
            print(__doc__.strip())
            return 0
        case "--version":
            from mpitrain import __version__

            print(__version__)
            return 0
        case "train":
            from mpitrain.train import main as train

            return train(rest)
        case "local":
            return _local(rest)
        case "verify":
            from mpitrain.verify.command import main as verify

            return verify(rest)
        case "schedule":
            from mpitrain.schedule.command import main as schedule

            return schedule(rest)
        case "checkpoint":
            from mpitrain.checkpoint.tools.command import main as checkpoint

            return checkpoint(rest)
        case "doctor":
            from mpitrain.doctor import main as doctor

            return doctor(rest)
        case _:
            raise ConfigError(
                f"{word!r} is no command of mpitrain.  Commands: train local verify schedule checkpoint doctor;"
                " mpitrain --help"
            )


def _local(words: list[str]) -> int:
    """`local -n N SCRIPT args`: everything after the script's name is the script's own."""
    usage = "mpitrain local -n RANKS SCRIPT [args]"
    if words[:1] in (["--help"], ["-h"]):
        print(f"usage: {usage}\n\nRuns SCRIPT on RANKS ranks that are threads of this process; no MPI is needed.")
        return 0
    if len(words) < 3 or words[0] != "-n":
        raise ConfigError(f"usage: {usage}")
    count = words[1]
    if not (count.isascii() and count.isdigit() and 1 <= int(count) <= 1024):
        raise ConfigError(f"-n {count}: the number of ranks must be a whole number from 1 to 1024")
    from mpitrain.blas import one_thread
    from mpitrain.comm.local import run_script
    from mpitrain.stopping import hear_signal

    one_thread()  # as each rank has under mpirun: the same bits in deterministic mode
    with hear_signal():  # a thread could not
        return run_script(int(count), words[2], words[3:])


def _has_guard() -> bool:
    """Whether MPI runs with more than one rank; ranks that do not see each other are each a world of one."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1


def _is_local_rank() -> bool:
    world = sys.modules.get("mpitrain.comm.world")
    found = world.SURROUNDING.get() if world is not None else None
    return found is not None and found.kind == "local"
