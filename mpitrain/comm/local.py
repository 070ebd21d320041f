"""Ranks as threads of this process: no MPI, no launcher, one debugger that sees them all.

    LocalWorld(4).run(main)             four ranks run main(); inside, world() is the rank's world
    run_script(4, "train.py", ["--dp", "4"])        the same for a script, as `mpirun -n 4 python train.py` would

Exactly one rank runs at a time and the course is always the same (baton.py); a message is complete when its partners
have posted theirs (threads.py).  The first rank that fails ends all.

The ranks share what a process shares: imported modules, `os.environ`, the working directory, `np.random`.  A script's
own globals are its rank's: every rank executes it in a module of its own, which is `sys.modules["__main__"]` while
that rank runs.
"""

from __future__ import annotations

import contextvars
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, ModuleType, TracebackType
from typing import Any

from mpitrain.comm.alone import Alone
from mpitrain.comm.baton import Debugger, Ended, RankStopped, Room
from mpitrain.comm.site import site_of
from mpitrain.comm.stalled import Glance
from mpitrain.comm.thread_rank import Rank
from mpitrain.comm.threads import Group, LocalTransport
from mpitrain.comm.transport import Mode, Transport
from mpitrain.comm.world import World, surround
from mpitrain.errors import CommError, LaunchError, UserError

GLANCE = 0.2  # seconds between looks for signals
_INTERRUPTED = 130  # exit code, as under MPI
LINGER = 5.0  # seconds that ranks have to unwind after one has failed


class LocalWorld:
    """A number of ranks that can run functions.

    Args:
        size: number of ranks.
        timeout: seconds after which ranks that only poll, while no message moves, are given up, and a rank that
            computes on while others wait for it.
        wrap: puts a transport of another behaviour around each rank's (delays, records).
        limit: elements above which messages are cut (`Mode.limit`).
        debugger: who looks on and may hold ranks; time limits do not count then.

    Attributes:
        failed: the rank that ended the last run; -1 if none did.
        failed_step: the step that it was in, 0 before the first.
        ended: of a rank that ended all by sys.exit: where, and where the others stood.
    """

    def __init__(
        self,
        size: int,
        timeout: float = 300.0,
        wrap: Callable[[Transport], Transport] | None = None,
        limit: int | None = None,
        debugger: Debugger | None = None,
    ) -> None:
        if size < 1:
            raise LaunchError(f"a world of {size} ranks cannot be started; the least is 1")
        self.size = size
        self.timeout = timeout
        self.wrap = wrap
        self.limit = limit
        self.debugger = debugger
        self.failed = -1
        self.failed_step = 0
        self.ended: tuple[str, list[str]] = "", []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(*args)` on every rank.

        Every rank has a copy of the caller's context (its event listeners, too) and its own `world()`.

        Returns:
            What the ranks returned, in rank order; None for a rank that called sys.exit(0).

        Raises:
            BaseException: what the first rank that failed raised; `failed` is that rank.
            CommError: no rank could go on, or one went on for longer than the limit; says where each stands.
        """
        return self._run([None] * self.size, lambda rank: function(*args))

    def _run(self, mains: list[ModuleType | None], body: Callable[[int], Any]) -> list[Any]:
        room = Room(self.size, self.timeout, self.debugger)
        group = Group(room, tuple(range(self.size)), "world")
        results: list[Any] = [None] * self.size
        threads = []
        for rank, main in zip(room.ranks, mains, strict=True):
            rank.main = main
            world = self._world(group, rank)
            context = contextvars.copy_context()
            context.run(surround, world)
            target = (_live, rank, body, results)
            threads.append(threading.Thread(target=context.run, args=target, name=f"rank {rank.number}", daemon=True))
        for thread in threads:
            thread.start()
        try:
            room.start()
            glance = Glance(room)
            while not room.empty.wait(
                GLANCE
            ):  # a signal that came just before an endless wait would be seen at its end
                glance()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: the rank that runs notices at its next message
            room.stop(error)
            room.empty.wait(LINGER)
            raise
        self.failed = room.failed
        self.failed_step = room.ranks[room.failed].step if room.failed >= 0 else 0
        self.ended = room.ended
        if room.error is None:
            for one in room.ranks:  # what is in flight now nobody receives
                if undone := _undone(one, all_have_ended=True):
                    self.failed = one.number
                    raise undone
        else:
            raise room.error
        return results

    def _world(self, group: Group, rank: Rank) -> World:
        transport: Transport = Alone() if self.size == 1 else LocalTransport(group, rank.number, rank)
        if self.wrap is not None:
            transport = self.wrap(transport)
        mode = Mode() if self.limit is None else Mode(limit=self.limit)
        world = World(
            transport, f"{self.size} threads of one process", rank, "a message moves when both sides ask", mode=mode
        )
        world.kind = "local"
        return world


def _live(rank: Rank, body: Callable[[int], Any], results: list[Any]) -> None:
    """A rank's life: whatever ends it is caught here."""
    room = rank.room
    try:
        room.begin(rank)
        results[rank.number] = body(rank.number)
        if undone := _undone(rank):
            room.fail(rank, undone)
    except RankStopped:
        pass
    except SystemExit as error:
        rank.left_at = _place(error)
        if error.code not in (None, 0):
            room.fail(rank, error)
        elif undone := _undone(rank):
            room.fail(rank, undone)
    except BaseException as error:
        room.fail(rank, error)
    finally:
        room.leave(rank)


def _undone(rank: Rank, all_have_ended: bool = False) -> UserError | None:
    """What a rank that ends well has not done."""
    return None if rank.at_end is None else rank.at_end(all_have_ended)


def _place(error: BaseException) -> str:
    """Where it was raised, or at least whence that was called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return site_of(frames[-1]) if frames else ""


def run_script(
    size: int,
    path: str,
    argv: list[str],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    debugger: Debugger | None = None,
) -> int:
    """Run a Python script on every rank, as `mpirun -n SIZE python PATH ARGV...` would.

    The script is compiled once and executed by each rank as a `__main__` of its own.

    Args:
        size: number of ranks.
        path: of the script.
        argv: what the script finds in sys.argv[1:].
        around: makes what each rank enters before its script and leaves after it (a listener, say).
        debugger: see `LocalWorld`.

    Returns:
        The exit code: 0 if all ranks ended well, else that of the first rank that did not.  Its traceback (or, of a
        mistake of the user, its message) has been printed, once.
    """
    try:
        code = _compile(path)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except SyntaxError:
        traceback.print_exc(limit=0)
        return 1
    mains: list[ModuleType | None] = [_main_module(path) for _ in range(size)]

    def body(rank: int) -> None:
        module = mains[rank]
        assert module is not None
        with around():
            exec(code, module.__dict__)

    local = LocalWorld(size, debugger=debugger)
    before = sys.argv, sys.path
    sys.argv = [path, *argv]
    sys.path = [os.path.dirname(os.path.abspath(path)), *sys.path]
    try:
        local._run(mains, body)
        return 0
    except Ended as error:
        return int(error.args[0])
    except SystemExit as error:
        status = _exit_code(error)
        where, others = local.ended
        print(f"rank {local.failed} of {size} ended all ranks with exit code {status}{where}", file=sys.stderr)
        print(*others, sep="\n", end="\n" if others else "", file=sys.stderr)
        return status
    except BaseException as error:
        _report(error, local, size)
        return _status(error)
    finally:
        sys.argv, sys.path = before
        if sys.stdout is not None:  # closed by whoever started this
            sys.stdout.flush()


def _compile(path: str) -> CodeType:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise LaunchError(f"cannot read the script {path}: {error.strerror}") from error
    return compile(importlib.util.decode_source(source), path, "exec", dont_inherit=True)


def _main_module(path: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    module.__dict__["__cached__"] = None
    return module


def _exit_code(error: SystemExit) -> int:
    """As the interpreter has it: text is printed and counts as 1."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _status(error: BaseException) -> int:
    """As under MPI, where a deadlock is ended from outside and counts as a crash."""
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    return error.exit_code if isinstance(error, UserError) and not isinstance(error, CommError) else 1


def _report(error: BaseException, local: LocalWorld, size: int) -> None:
    """Print what ended the run, without our own frames."""
    if sys.stdout is not None:
        sys.stdout.flush()
    step = f", step {local.failed_step}" if local.failed_step else ""
    where = f"rank {local.failed} of {size}{step}: " if local.failed >= 0 else ""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return
    if isinstance(error, UserError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return
    print(f"{where}{type(error).__name__} ended all ranks", file=sys.stderr)
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
