"""All cases of kernels, by name: those of the files tests/kernel_cases_TOPIC.py, put together."""

from __future__ import annotations

import importlib
from pathlib import Path

from kernel_case import Case


def _collected() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for path in sorted(Path(__file__).parent.glob("kernel_cases_*.py")):
        more: dict[str, Case] = importlib.import_module(path.stem).CASES
        assert not cases.keys() & more.keys(), f"{path.name}: {sorted(cases.keys() & more.keys())} are there already"
        cases |= more
    return cases


CASES = _collected()
