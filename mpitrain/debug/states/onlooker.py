"""The rules of states for who only wants to know: each value's state, and no judgement that ends a program.

It sends nothing and raises nothing, so a program takes the same course with it as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpitrain.autograd.tape import Tape
from mpitrain.debug.states.checker import StateChecker
from mpitrain.debug.states.known import Known
from mpitrain.errors import StateError
from mpitrain.events import Event
from mpitrain.spec import State


class Onlooker(StateChecker):
    """A checker that is asked.  Arguments as of a `StateChecker`.

    Attributes:
        trouble: the first error that a checker would have raised; "" while there is none.

    Cost: some tens of microseconds an op; no digests, no messages.
    """

    trouble: str = ""

    def __call__(self, event: Event) -> None:
        try:
            super().__call__(event)
        except StateError as error:
            self.trouble = self.trouble or str(error)
            _let_go(error)

    def confirm(self) -> None:
        """Nothing is compared."""

    def _note(self, values: Sequence[Any], axes: Iterable[str], what: Callable[[str], str]) -> None:
        """No digest is taken."""

    def known(self, x: Any) -> Known | None:
        """What is known of a tensor, or of an array of the micro-batch; None: nothing, as of a constant."""
        return self._look_up(x)

    def known_at(self, tape: Tape, slot: int) -> Known | None:
        """What is known of a value by its number on a tape, also when its array is gone."""
        found = self._slots.get(tape, {}).get(slot)
        if found is None:
            leaf = tape.leaf(slot)
            found = None if leaf is None else self._look_up(leaf)
        return found

    def named(self, states: Mapping[str, State] | Known) -> str:
        """States as people read them: `dp Shard(0), tp Replicate`, of the axes with more than one rank."""
        texts = []
        for axis in self._axes:
            if isinstance(states, Known):
                texts += [f"{self._names[axis]} {states.on(axis)}"] if axis in states.states else []
            elif axis in states:
                texts.append(f"{self._names[axis]} {states[axis]}")
        return ", ".join(texts)


def _let_go(error: BaseException) -> None:
    """Have an error that was caught keep no frame alive: it may be part of a cycle, and with it all that ops made."""
    following: BaseException | None = error
    while following is not None:
        following.__traceback__ = None
        following = following.__context__
