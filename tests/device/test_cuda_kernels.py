"""Every case of every CUDA kernel, on the host: the source that a GPU would run, against the reference in float64.

The cases stand in tests/kernel_cases_*.py; on a GPU tests/gpu/test_gpu_kernels.py runs the same.  Here threads and
blocks run in either order, which must change no bit.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from kernel_case import Case, measure
from kernel_cases import CASES
from strict_kernel import RawKernel, order_of_threads
from strict_stream import launches

from mpitrain import kernels
from mpitrain.kernels import cuda, reference

ORDERS = ("both", "up", "down")
"""Of the three times that `measure` runs a case."""


def _all() -> list[Any]:
    """By default each case in one precision, those of a kernel by turns in all of them; the rest is slow."""
    found, turns = [], Counter[str]()
    for name, case in CASES.items():
        turns[case.kernel] += 1
        usual = case.dtypes[turns[case.kernel] % len(case.dtypes)]
        for dtype in case.dtypes if case.cost != "gpu" else ():
            marks = [pytest.mark.slow] if case.cost == "slow" or dtype != usual else []
            found.append(pytest.param(case, dtype, id=f"{name}-{dtype}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "dtype"), _all())
def test_a_kernel_gives_what_the_reference_gives_in_float64(cuda_kernels, monkeypatch, case: Case, dtype: str):
    launched = []
    own = RawKernel.__call__

    def noted(kernel: RawKernel, *args: Any, **named: Any) -> None:
        launched.append(kernel.name)
        own(kernel, *args, **named)

    monkeypatch.setattr(RawKernel, "__call__", noted)
    with launches() as counted, ExitStack() as stack:

        def tell(time: int) -> None:
            stack.close()
            stack.enter_context(order_of_threads(ORDERS[time]))

        found = measure(case, kernels, cuda_kernels, dtype, tell)
    assert found.ok, found.problems
    launched += [name for name in counted if name.startswith("gemm")]
    assert bool(launched) != case.by_reference, launched or "nothing was launched: the reference served"


def test_every_kernel_has_cases():
    tried = {case.kernel for case in CASES.values() if not case.by_reference}
    missing = {name for name in reference.__all__ if hasattr(cuda, name)} - {"factor"} - tried  # it gives what it takes
    assert not missing, f"no case in tests/kernel_cases_*.py: {', '.join(sorted(missing))}"


def test_cases_are_named_after_their_kernels():
    for name, case in CASES.items():
        assert name.split()[0].rstrip(",:") == case.kernel, name
        assert case.kernel in reference.__all__, name
        assert case.cost in ("default", "slow", "gpu"), name


def test_some_cases_of_every_kernel_are_tried_by_default():
    tried = {case.kernel for case in CASES.values() if case.cost == "default"}
    assert tried == {case.kernel for case in CASES.values()}
