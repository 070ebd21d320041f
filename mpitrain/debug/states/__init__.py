"""States of values across ranks, checked by rule while a program runs.

    checker.py   the listener: follows each value from op to op, and says at which line a message is missing or doubled
    rules.py     what ops do to a state
    routed.py    what they do to the states of rows that go to experts
    table.py     which op has which rule
    mixing.py    how the states of several values meet in one op
    arrows.py    what a message takes and gives
    advice.py    what to change: where a value got its state, or where it meets another
    known.py     what is known of a value, and where it got it
    around.py    a checker for each executor of a script
    digests.py   do all ranks hold the same values where they should?

The theory: docs/explanation/states-and-duals.md.
"""

from mpitrain.debug.states.checker import StateChecker

__all__ = ["StateChecker"]
