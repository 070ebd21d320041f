"""The console: commands while all ranks stand, and what starts and ends them.

Ranks are threads, and the run that they are in is one more; the main thread reads commands, since signals and the
keyboard are its.  A rank that stands hands the prompt over and waits until it is done:

    rank 2   an event, a breakpoint ... prompt(why) -> main.do(...) ............................ goes on
    main                                              where, show %7, step: how far all of them go

Exactly one of all these threads works at a time, so a command looks at every rank as it stands.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.comm.local import run_script
from mpitrain.comm.world import World
from mpitrain.debug.console import commands, completion, failure, source, stopping
from mpitrain.debug.console.breakpoints import Breakpoints
from mpitrain.debug.console.follow import Follow
from mpitrain.debug.console.main_thread import MainThread
from mpitrain.debug.console.rank_pdb import RankPdb
from mpitrain.debug.console.terminal import Line, Terminal
from mpitrain.debug.console.watch import Watch
from mpitrain.debug.console.where import table
from mpitrain.debug.stepper import Stepper, View
from mpitrain.errors import ConsoleError, UserError
from mpitrain.events import Event

WRONG, STANDING, INTERRUPTED = 2, 3, 130
"""Exit codes: a command cannot be done; the commands are used up and ranks still stand; Ctrl-C."""

_PATIENCE = 10.0  # seconds in which ranks are to end once that was asked for: some catch everything, and go on
_MOST_MISSED = 10  # breakpoints that are named at the end of a run
_NAMES = 2  # the Ctrl-C of a run that names the rank which does not stop; the next one ends it


class Console:
    """A session: the ranks of a script, and who looks at them.

    Args:
        size: number of ranks.
        path: of the script.
        argv: its arguments.
        terminal: where commands come from and answers go.

    Attributes:
        stepper: holds the ranks.
        breakpoints: those of the session.
        watches: by rank, what the inspectors look at.
        follows: parameters whose touches are told, by name.
        over: why the run is over, where all can still be looked at: a failure; "" before.
        repeats: the command that an empty line stands for; "" if there is none.
        remark: what to say at the next prompt.
        aim: where ranks go, in words, if that was said by a condition; "" if not.
    """

    def __init__(self, size: int, path: str, argv: Sequence[str], terminal: Terminal) -> None:
        self.size = size
        self.path = path
        self.argv = list(argv)
        self.terminal = terminal
        self.stepper = Stepper(size, self._prompt, self._companions)
        self.stepper.pdb = self._enter_pdb
        self.watches: dict[int, Watch] = {}
        self.breakpoints = Breakpoints(lambda rank: self.watches[rank].trouble)
        self.stepper.breaks.append(self._halt)
        self.follows: dict[str, Follow] = {}
        self.over = ""
        self.repeats = ""
        self.remark = ""
        self.aim = ""
        self._shown_trouble = False
        self._code = 0
        self._last_call: threading.Timer | None = None
        self._main = MainThread(self._interrupt)

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the script to its end, or until the session is over; the exit code."""
        run = {"around": self.stepper.around, "debugger": self.stepper}
        try:
            code = self._main.serve(lambda: run_script(self.size, self.path, self.argv, **run))  # type: ignore[arg-type]
        finally:
            if self._last_call is not None:
                self._last_call.cancel()
        self._end()
        return int(code)

    def _end(self) -> None:
        if self.over or not self.stepper.views:  # quit, or a script that cannot be run, of which the reason was told
            return
        for text in self._never():
            self.say(self.terminal.quiet(text))
        left = self.terminal.left
        if left:
            self.say(self.terminal.quiet(f"all ranks have ended; {left} command{'s' if left > 1 else ''} not done"))
        elif self.terminal.is_interactive:
            self.say(self.terminal.quiet("all ranks have ended"))

    def _never(self) -> list[str]:
        """What did not happen until the end of the run, though it was waited for."""
        steps = max(view.step for view in self.stepper.views.values())
        had = f": the run had {steps} step{'s' * (steps > 1)}" if steps else ""
        texts = [f"{self.aim} was never reached{had}"] if self.aim else []
        missed = [point for point in self.breakpoints if point.enabled and not point.hits]
        texts += [f"breakpoint {point.number} ({point.condition}) was never hit" for point in missed[:_MOST_MISSED]]
        if len(missed) > _MOST_MISSED:
            texts.append(f"nor were {len(missed) - _MOST_MISSED} more")
        return texts

    def _interrupt(self, times: int) -> None:
        """Ctrl-C while ranks run."""
        self.stepper.interrupted = True
        if times == 1:
            self.say("\nstops at the next event; Ctrl-C again says where it is")
        if times == _NAMES:
            for view in self.stepper.views.values():
                if view.rank.room.holder is view.rank:
                    where = f"rank {view.number} runs at {view.site}, and stops at its next op or message"
                    self.say(f"\n{where}; Ctrl-C once more ends all ranks")
        elif times > _NAMES:
            self.say("interrupted")
            os._exit(INTERRUPTED)  # a rank that never comes back to an op or a message cannot be ended otherwise

    # -- what ranks call ----------------------------------------------------------------------------------------------

    def _companions(self, world: World) -> list[Callable[[Event], None]]:
        watch = self.watches[world.rank] = Watch(world)

        def follow(event: Event) -> None:
            for each in list(self.follows.values()):
                each.hear(watch, event)

        return [self._forgiven(watch), self._forgiven(follow)]

    def _forgiven(self, listener: Callable[[Event], None]) -> Callable[[Event], None]:
        """A listener whose mistake costs what it knows, and not the run that is looked at."""
        failed, thread = False, threading.get_ident()

        def hear(event: Event) -> None:
            nonlocal failed
            if failed or threading.get_ident() != thread:  # of a world of its own within the script, say
                return
            try:
                listener(event)
            except Exception as error:
                failed = True
                self.terminal.warn(
                    f"a mistake of the console, which from here on knows less: {failure.place_of(error)}"
                )

        return hear

    def _halt(self, view: View, event: Event) -> str:
        """Why to stop; a condition that cannot be asked costs its breakpoints, and not the run."""
        try:
            if event.kind == "action" and (text := stopping.settle(self)):
                return text
            return self.breakpoints.halt(view, event)
        except Exception as error:
            for point in self.breakpoints:
                point.enabled = False
            self.terminal.warn(f"a mistake of the console; breakpoints are off: {failure.place_of(error)}")
            return ""

    def _prompt(self, why: str) -> None:
        self._main.do(lambda: self._stand(why))

    def _enter_pdb(self, view: View) -> None:
        """pdb in a rank's own thread, which this is."""
        debugger = RankPdb(view.number, self.ask, turn=lambda what: self._turn_of_pdb(view, what))
        frame = view.frame
        if view.event is None or frame is None:
            debugger.begin()
        else:
            debugger.enter(frame)

    def _turn_of_pdb(self, view: View, what: str) -> bool:
        """pdb asks in the thread of a rank, which the others now serve; or it is left."""
        stepper = self.stepper
        if what == "asks":
            stepper.focus = stepper.served = view.number
            stepper.go(None, only={view.number})
            return False
        stepper.served = -1
        if what == "goes":
            stepper.go(None)
            return False
        stepper.arrived(view)
        return view.takes_pdb()

    def ask(self, prompt: str, completer: Callable[[str, int], Any]) -> str:
        """A line of the keyboard, from whichever thread."""
        while True:
            try:
                return str(self._main.do(lambda: self.terminal.ask(prompt, completer)))
            except KeyboardInterrupt:
                self.say("")

    def look_by_pdb(self, view: View) -> None:
        """pdb on a rank that cannot be stepped: one that waits, or has failed."""
        found = source.frames(view)
        if not found:
            raise ConsoleError(f"rank {view.number} is in no line of its script")
        trace = view.error.__traceback__ if view.error is not None else None
        while trace is not None and trace.tb_frame is not found[-1][0]:
            trace = trace.tb_next
        RankPdb(view.number, self.ask, live=False).look(None if trace else found[0][0], trace)

    # -- the prompt ---------------------------------------------------------------------------------------------------

    @property
    def focus(self) -> int:
        """The rank that commands are about unless they name another."""
        return self.stepper.focus

    @focus.setter
    def focus(self, rank: int) -> None:
        self.stepper.focus = rank

    @property
    def view(self) -> View:
        """Of the focus.

        Raises:
            ConsoleError: it has not begun.
        """
        return self.view_of(self.focus)

    def view_of(self, rank: int) -> View:
        """Of a rank.

        Raises:
            ConsoleError: it has not begun, or there is none.
        """
        if not 0 <= rank < self.size:
            raise ConsoleError(f"there is no rank {rank}: ranks are 0 to {self.size - 1}")
        view = self.stepper.views.get(rank)
        if view is None:
            raise ConsoleError(f"rank {rank} has not begun its script")
        return view

    def say(self, text: str) -> None:
        """Print an answer."""
        self.terminal.say(text)

    def show_places(self, every: bool = False) -> None:
        """Say where all ranks stand."""
        terminal = self.terminal
        marks = {"mark": terminal.strong, "quiet": terminal.quiet}
        self.say(table(self.stepper.views, self.size, self.focus, terminal.width, every, **marks))

    @property
    def code(self) -> int:
        """The exit code of a session that ends now: 0, or that of the failure."""
        return self._code if self.over else 0

    def end(self, code: int) -> None:
        """End all ranks, with an exit code, when the prompt returns."""
        self.over = self.over or "quit"
        self.terminal.forget_script()
        self.stepper.end(code)
        if self._last_call is None:
            self._last_call = threading.Timer(_PATIENCE, self._end_at_once, (code,))
            self._last_call.daemon = True
            self._last_call.start()

    def _end_at_once(self, code: int) -> None:
        going = [view for view in self.stepper.views.values() if not view.rank.left]
        where = ", ".join(f"rank {view.number} at {view.site}" for view in going[:4])
        self.terminal.warn(f"after {_PATIENCE:.0f} s ranks have not ended, which catch all errors: {where}; ended now")
        os._exit(code)

    def _stand(self, why: str) -> None:
        """One stay at the prompt; returns when ranks are to go on."""
        self.aim = ""
        try:
            self._greet(why)
        except KeyboardInterrupt:
            pass
        except Exception as error:  # of what is looked at: it must not cost the session
            self.terminal.warn(f"a mistake of the console: {failure.place_of(error)}")
        while not self._obey(self._next_line()):
            pass

    def _greet(self, why: str) -> None:
        terminal = self.terminal
        if why == "start":
            many = "the rank" if self.size == 1 else f"{self.size} ranks"
            self.say(terminal.quiet(f"{many} of {self.path}, before the first line; help lists the commands"))
            return
        self._tell_trouble()
        if self.remark:
            terminal.warn(self.remark)
            self.remark = ""
        if why == "failed":
            self._tell_failure()
        elif why == "interrupted":
            self.say(terminal.alarm(f"interrupted at rank {self.focus}"))
        elif why != "stopped":
            first, *rest = why.split("\n")
            self.say("\n".join([terminal.alarm(f"rank {self.focus}, {first}"), *rest]))
        self.show_places()

    def _tell_trouble(self) -> None:
        """Say once what the rules of states have to object."""
        for watch in self.watches.values():
            if watch.trouble and not self._shown_trouble:
                self._shown_trouble = True
                self.terminal.warn(watch.trouble)

    def _tell_failure(self) -> None:
        self.over, self._code = "failed", 1
        view = self.stepper.views.get(self.focus)
        if view is None or view.error is None:
            self.terminal.warn("a rank failed before its first line")
            return
        self._code = failure.code_of(view.error)
        if failure.has_traceback(view.error):
            self.say(failure.traceback_of(view))
        self.terminal.warn(failure.told(view))
        self.say(self.terminal.quiet("this is the end of the run: all ranks stand as they were; quit leaves"))

    def _next_line(self) -> Line:
        """The next command; at the end of input what ends the session."""
        prompt = f"rank {self.focus}> "
        while True:
            try:
                line = self.terminal.command(prompt, completion.completer(self))
            except KeyboardInterrupt:
                self.say("" if self.over else "\n(continue lets ranks run, quit ends them)")
                continue
            except EOFError:
                if self.terminal.is_interactive:
                    self.say("")
                    return Line("quit", "")
                return Line(f"quit {self._code if self.over else STANDING}", "")
            if line.text.strip():
                return line
            if self.repeats and not line.place:
                return Line(self.repeats, "")

    def _obey(self, line: Line) -> bool:
        """Do one command; whether ranks are to go on."""
        self.repeats = ""
        try:
            return commands.obey(self, line.text)
        except KeyboardInterrupt:
            self.say("\ninterrupted")
        except UserError as error:
            self.terminal.warn(str(error))
        except Exception as error:  # a mistake of ours must not cost the session
            self.terminal.warn(f"{line.text.split()[0]} failed by a mistake of the console, {failure.place_of(error)}")
        if not line.place and self.terminal.left:  # the rest of a typed line
            self.say(self.terminal.quiet("what follows it is left out"))
            self.terminal.forget_script()
        if line.place:
            self.terminal.warn(f"{line.place}: this command cannot be done; what follows it is left out")
            self.terminal.forget_script()
            if not self.terminal.is_interactive:
                self.end(WRONG)
                return True
        return False
