"""The command line: `mpitrain WORD ...`, one word a tool.

mpitrain train [options]               train a language model (also: python examples/train_gpt.py)
mpitrain local -n 8 SCRIPT [args]      run a script on 8 ranks that are threads of one process, without MPI
mpitrain debug -n 8 SCRIPT [args]      the same in a console: stop, step and look at all ranks together
mpitrain verify --layout dp2,tp2 SCRIPT [args]    prove that a layout is the same training run as one rank
mpitrain schedule NAME --stages 4 --microbatches 8    print, draw and check a pipeline schedule
mpitrain trace RUN [--html FILE]       where the time of a traced run went, what it sent, who waited for whom
mpitrain compare RUN1 RUN2             the first op, message or parameter at which two runs part
mpitrain checkpoint inspect|verify|diff|reshard PATH ...    look into checkpoints, prove them whole, write them anew
mpitrain checkpoint import|export FROM TO    GPT-2 and Llama weights as transformers keeps them, and back
mpitrain generate CHECKPOINT --prompt TEXT    write what a model says after a text, on one rank or on any layout
mpitrain tokenizer train|show          make words of a text, and look at those of a tokenizer.json
mpitrain replay DIR --rank 3 [--pdb]   one recorded rank again, alone and without MPI, the same bits
mpitrain doctor [--json]               what MPI, cores, BLAS, GPU and HDF5 this machine has, and what to fix
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from mpitrain.comm.launcher import is_first
from mpitrain.errors import ConfigError, UserError

PATIENCE = 3.0  # seconds
INTERRUPTED_CODE = 130  # 128 + SIGINT, as shells have it
UNREAD = 141  # 128 + SIGPIPE
OF_RANKS = ("train", "generate")
"""Commands that run on as many ranks as they are started with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(words))


def guarded(command: Callable[[], int]) -> int:
    """Run a command; a mistake of the user becomes one message and its exit code, 2 for most.

    Where nobody reads the output any more the code is 141, as shells have it, and where it was closed from the start.
    An output that cannot be written for another reason, a full disk say, is one message, too.

    Under MPI with more than one rank the guard of `comm.guard` owns the end of the process, so the error goes on to it.
    Before MPI has started all ranks make the same mistake, and each knows from its launcher whether it is the one that
    speaks.  The others wait for it: a launcher that saw one of them end first would kill it before it has spoken.
    """
    if sys.stdout is None:
        sys.stdout = _read_by_nobody()
    try:
        return _to_the_end(command)
    except UserError as error:
        if _has_guard() or _is_local_rank():
            raise
        if is_first(os.environ):
            print(folded(f"{type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        else:
            time.sleep(PATIENCE)
        return error.exit_code
    except KeyboardInterrupt:
        if _has_guard() or _is_local_rank():
            raise
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED_CODE


def _to_the_end(command: Callable[[], int]) -> int:
    """Run a command until all that it has printed is written; its code, or that of an output that nobody reads."""
    try:
        code = command()
        if not sys.stdout.closed:
            sys.stdout.flush()
        return code
    except OSError as error:
        if not _is_of_output(error):
            raise
        if isinstance(error, BrokenPipeError):
            return UNREAD
        raise ConfigError(f"the output cannot be written: {error.strerror}.") from None


def folded(text: str) -> str:
    """A message as standard error shows it: a terminal would break its lines in the middle of words."""
    if not sys.stderr.isatty():
        return text
    width = max(20, shutil.get_terminal_size().columns)
    return "\n".join(
        textwrap.fill(line, width, replace_whitespace=False, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


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
        case "debug":
            from mpitrain.debug.console.command import main as debug
            from mpitrain.stopping import hear_signal

            with hear_signal():
                return debug(rest)
        case "verify":
            from mpitrain.verify.command import main as verify

            return verify(rest)
        case "schedule":
            from mpitrain.schedule.command import main as schedule

            return schedule(rest)
        case "trace":
            from mpitrain.trace.command import main as trace

            return trace(rest)
        case "compare":
            from mpitrain.compare.command import main as compare

            return compare(rest)
        case "checkpoint":
            from mpitrain.checkpoint.tools.command import main as checkpoint
            from mpitrain.interchange.command import TOOLS as OF_OTHERS

            return checkpoint(rest, OF_OTHERS)
        case "generate":
            from mpitrain.generation.command import main as generate

            return generate(rest)
        case "tokenizer":
            from mpitrain.tokenizing.command import main as tokenizer

            return tokenizer(rest)
        case "replay":
            from mpitrain.replay.command import main as replay

            return replay(rest)
        case "doctor":
            from mpitrain.doctor import main as doctor

            return doctor(rest)
        case _:
            raise ConfigError(
                f"{word!r} is no command of mpitrain.  Commands: train local debug verify schedule trace replay compare"
                " checkpoint generate tokenizer doctor; mpitrain --help"
            )


def _local(words: list[str]) -> int:
    """`local -n N SCRIPT args`: everything after the script's name is the script's own."""
    usage = "mpitrain local -n RANKS [--record DIR] SCRIPT [args]"
    if words[:1] in (["--help"], ["-h"]):
        print(
            f"usage: {usage}\n\nRuns SCRIPT on RANKS ranks that are threads of this process; no MPI is needed.\n"
            f"In the place of SCRIPT may stand {' or '.join(OF_RANKS)}: that command of mpitrain.\n"
            "--record DIR keeps what every rank sends and receives, for mpitrain replay."
        )
        return 0
    if len(words) < 3 or words[0] != "-n":
        raise ConfigError(f"usage: {usage}")
    count = words[1]
    if not (count.isascii() and count.isdigit() and 1 <= int(count) <= 1024):
        raise ConfigError(f"-n {count}: the number of ranks must be a whole number from 1 to 1024")
    folder, words = (words[3], words[4:]) if words[2] == "--record" and len(words) > 4 else (None, words[2:])
    if words[0] == "--record" or folder == "":
        raise ConfigError(f"usage: {usage}")
    if words[0] in OF_RANKS and not os.path.isfile(words[0]):
        words = [os.path.join(os.path.dirname(__file__), "__main__.py"), *words]
    from mpitrain.blas import one_thread
    from mpitrain.comm.local import run_script
    from mpitrain.stopping import hear_signal

    one_thread()  # as each rank has under mpirun: the same bits in deterministic mode
    with hear_signal():  # a thread could not
        return run_script(int(count), words[0], words[1:], _around(folder, words))


def _around(folder: str | None, words: Sequence[str]) -> Callable[[], AbstractContextManager[object]]:
    """What is around the script of each rank: a recorder, if there is a folder for it."""
    if folder is None:
        return nullcontext
    from mpitrain.comm.world import world
    from mpitrain.debug.recorder import record

    return lambda: record(world(), folder, words=words)


def _read_by_nobody() -> TextIO:
    """In the place of an output that whoever started this has closed: one whose reader has gone.

    Where its number is free it gets it, or the next file that is opened would, and be written to as an output.
    """
    reader, writer = os.pipe()
    os.close(reader)
    try:
        os.fstat(1)
    except OSError:
        os.dup2(writer, 1)
        os.close(writer)
        writer = 1
    return open(writer, "w", encoding="utf-8")


def _is_of_output(error: OSError) -> bool:
    """Whether an error is one of standard output; then what is still to be flushed at the end goes nowhere."""
    if error.filename is not None or sys.stdout.closed:
        return False
    try:
        sys.stdout.flush()
        sys.stdout.write("\n")  # of a text that is longer than the buffer nothing is kept for another try
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _has_guard() -> bool:
    """Whether MPI runs with more than one rank; ranks that do not see each other are each a world of one."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1


def _is_local_rank() -> bool:
    world = sys.modules.get("mpitrain.comm.world")
    found = world.SURROUNDING.get() if world is not None else None
    return found is not None and found.kind == "local"
