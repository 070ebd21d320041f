"""The guard: however one rank ends, no other waits for it for ever.

MPI_Finalize, which mpi4py calls at exit, waits for all ranks; so a rank that ends early, by an exception or by
sys.exit, usually leaves the job hanging.  The guard owns the end of every rank of a job with more than one:

    an exception, in any thread    its traceback is printed once, with rank and step, and all ranks end at once
    a UserError                    its message is printed once, and the ranks end with its code (2 for most), together
                                   if all raise it
    sys.exit(n), raise SystemExit,
    the end of the script          the rank posts LEFT on the flight board and waits until all others left too; whoever
                                   waits for it meanwhile ends the job (watch.py)
    os._exit(n)                    the same
    the end with code 0, but requests are open that were made in checked mode      as a UserError
    SIGKILL, SIGSEGV ...           the launcher sees it; where it does not, the lock of the dead rank's page tells
    the launcher dies              the kernel kills the ranks

It is installed by `world()` when MPI has more than one rank, never by an import.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from mpitrain.comm.board import FlightBoard
from mpitrain.comm.launcher import is_task_of_slurm
from mpitrain.comm.lifeline import Lifeline
from mpitrain.comm.page import UNKNOWN_CODE, stable_hash
from mpitrain.comm.site import site_of
from mpitrain.comm.watch import Watch, say
from mpitrain.errors import UserError

INTERRUPTED_CODE = 128 + signal.SIGINT
PATIENCE = 5.0  # seconds that a rank which left with an error gives the others to leave too
NEWS_AFTER = 1.0  # seconds until a rank that left tells the other hosts, and says what rank 0's host did not say
_PR_SET_PDEATHSIG = 1


class Guard:
    """The end of this rank."""

    def __init__(self, board: FlightBoard, watch: Watch, lifeline: Lifeline, parent: int) -> None:
        """`parent`: process id of the launcher as it was before MPI started."""
        self._board, self._watch, self._lifeline = board, watch, lifeline
        self._parent = parent
        self._pid = os.getpid()  # a forked child inherits the hooks, but it is no rank
        self._code = UNKNOWN_CODE
        self._where = ""
        self._left = False
        self._exit = sys.exit
        self._hard_exit = os._exit
        self._excepthook = sys.excepthook
        self._thread_excepthook = threading.excepthook

    def install(self, mpi: ModuleType) -> None:
        """Take over all ways out."""
        self._die_with_launcher()
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        sys.exit = self._on_exit
        os._exit = self._on_hard_exit  # type: ignore[assignment]
        atexit.register(self._at_exit)
        mpi._set_abort_status = self.note_code  # type: ignore[attr-defined]  # what `python -m mpi4py` calls
        if not faulthandler.is_enabled():
            # A stderr that is no file gets no stack of a crash.
            with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
                faulthandler.enable()

    def note_code(self, status: Any) -> None:
        """Learn the exit code of a program that is about to end (a SystemExit's code, or the exception itself)."""
        code = getattr(status, "code", status)
        self._code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1

    # -- ways out

    def _on_exit(self, code: Any = None) -> NoReturn:
        """sys.exit, remembered if it ends the program."""
        raise _Exit(code, self, site_of(sys._getframe(1)))

    def _on_hard_exit(self, code: int) -> NoReturn:
        """os._exit, which would leave MPI without a word."""
        try:
            if os.getpid() == self._pid and not self._left:
                self._where = site_of(sys._getframe(1))
                if self._board.current is not None or threading.current_thread() is not threading.main_thread():
                    self._post(code & 0xFF, spoke=False)
                    self._lifeline.abort(code & 0xFF or 1)
                self._leave(code & 0xFF)
        finally:
            self._hard_exit(code)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        undone = self._undone(all_have_ended=False) if self._code <= 0 and not self._left else None
        if undone is None:
            self._leave(self._code)
            return
        self._leave(undone.exit_code, f"{type(undone).__name__}: {undone}\n")
        _flush()
        self._hard_exit(undone.exit_code)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid or _is_called_inside_the_program(sys._getframe()):
            self._excepthook(kind, error, trace)
            return
        try:
            if isinstance(error, UserError):
                atexit.unregister(self._at_exit)
                self._leave(error.exit_code, f"{kind.__name__}: {error}\n")
                atexit._run_exitfuncs()
                _flush()
                self._hard_exit(error.exit_code)
            self._print(kind, error, trace, self._excepthook, sys.__excepthook__)
        finally:
            self._post(1, spoke=True)
            self._lifeline.abort(INTERRUPTED_CODE if issubclass(kind, KeyboardInterrupt) else 1)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        kind, error = args.exc_type, args.exc_value
        if os.getpid() != self._pid or issubclass(kind, SystemExit) or error is None:
            self._thread_excepthook(args)
            return
        code = error.exit_code if isinstance(error, UserError) else 1
        try:
            if isinstance(error, UserError):
                self._say_once(f"{kind.__name__}: {error}\n")
            else:
                self._print(kind, error, args.exc_traceback)
        finally:
            self._post(1, spoke=True)
            self._lifeline.abort(code)

    # -- what they share

    def _post(self, code: int, *, spoke: bool) -> None:
        self._board.leave(code, spoke=spoke, where=self._where)

    def _leave(self, code: int, words: str = "") -> None:
        """Post LEFT, wait until all have left, leave MPI.

        `words` are said once: at once where rank 0 lives, elsewhere only if other ranks do not say the same.  A rank
        with an exit code other than 0 does not wait long: if the others do not leave too it ends them.  Where the
        launcher would make another exit code of theirs, rank 0 aborts in the name of all.
        """
        if self._left:
            return
        self._left = True
        try:
            hosts, rank = self._board.hosts, self._board.rank
            if words and hosts[rank] == hosts[0]:
                self._say_once(words)
            self._post(code, spoke=bool(words))
            result = self._lifeline.farewell(code, stable_hash(words))
            began, pause, told = time.monotonic(), 0.0002, False
            while (all_ := result()) is None:
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
                waited = time.monotonic() - began
                if waited > NEWS_AFTER and not told:
                    told = True
                    self._say_once(words)
                    others = [other for other, host in enumerate(hosts) if host != hosts[rank]]
                    self._lifeline.tell(self._board.page.gone(), others)
                if code > 0 and waited > PATIENCE:
                    self._lifeline.abort(code)
            if not all_.same_words:
                self._say_once(words)
            if all_.highest <= 0 and (undone := self._undone(all_have_ended=True)):
                self._say_once(f"{type(undone).__name__}: {undone}\n")
                self._lifeline.abort(undone.exit_code)
            if all_.highest > 0 and not (all_.lowest == all_.highest and self._lifeline.keeps_codes):
                _flush()
                if rank == 0:
                    self._lifeline.abort(all_.highest)
                time.sleep(PATIENCE)
            self._watch.stop()
            self._lifeline.finalize()
        except BaseException as error:
            self._print(type(error), error, error.__traceback__)
            self._lifeline.abort(code if code > 0 else 1)

    def _undone(self, all_have_ended: bool) -> UserError | None:
        """What this rank has left undone, if it ends well."""
        return None if self._board.at_end is None else self._board.at_end(all_have_ended)

    def _say_once(self, text: str) -> None:
        if text and self._board.claim(text):
            say(text)

    def _print(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        hook: Callable[..., Any] | None = None,
        plain_hook: Callable[..., Any] | None = None,
    ) -> None:
        """`[rank 3, step 12] Traceback ...`, unless a rank of this host printed the same; a user's hook comes first."""
        step = self._board.step
        head = f"[rank {self._board.rank}{f', step {step}' if step else ''}]"
        try:
            text = "".join(traceback.format_exception(kind, error, _without_runner(trace)))
            if not self._board.claim(text):
                return
            if hook is not None and hook is not plain_hook:
                say(f"{head}\n")
                hook(kind, error, trace)
            else:
                say(f"{head} {text}")
        except BaseException:  # no memory left even for this
            os.write(2, b"%s %s\n" % (head.encode(), kind.__name__.encode()))

    def _die_with_launcher(self) -> None:
        """Have the kernel kill this rank when the launcher dies (Open MPI's ranks would live on)."""
        if is_task_of_slurm(self._parent):  # it ends its ranks itself, and its threads come and go
            return
        try:
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        except (OSError, AttributeError):  # not Linux
            return
        if os.getppid() != self._parent:  # it died before the kernel was told
            os.kill(self._pid, signal.SIGKILL)


class _Exit(SystemExit):
    """What sys.exit raises: tells the guard its code, if it was not caught.

    An exception that ends the program dies when no Python frame is left; one that was caught dies in its catcher.
    """

    def __init__(self, code: Any, guard: Guard, where: str) -> None:
        super().__init__(code)
        self._guard, self._where = guard, where

    def __del__(self) -> None:
        if sys._getframe(0).f_back is None:
            self._guard.note_code(self.code)
            self._guard._where = self._where


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first line on, where `python -m mpi4py` has run it."""
    own = trace
    while own is not None and _is_runner(own.tb_frame.f_code.co_filename):
        own = own.tb_next
    return own or trace


def _is_runner(file: str) -> bool:
    return file in ("<frozen runpy>", runpy.__file__) or os.path.basename(os.path.dirname(file)) == "mpi4py"


def _is_called_inside_the_program(hook: FrameType) -> bool:
    """True where C code reports through sys.excepthook what it cannot raise (HDF5 does): nothing ends then."""
    return hook.f_back is not None
