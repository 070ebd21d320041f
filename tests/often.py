"""Long lists of cases: some run always, all of them where they are asked for (-m "slow or not slow")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], one_in: int = 3) -> list[Any]:
    """The cases, of which one in so many is left without the mark `slow`; values, or what `pytest.param` makes."""
    return [case if number % one_in == 0 else _slow(case) for number, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if not hasattr(case, "marks"):
        case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
    return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
