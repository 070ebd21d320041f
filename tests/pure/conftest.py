"""The levels of the compiled kernels, one after the other, each put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpitrain import kernels

COMPILED = [name for name in kernels.levels() if name != "numpy"]


@pytest.fixture(autouse=True)
def same_level_after() -> Iterator[None]:
    """Whatever level a test selects, the next one starts with the process's own."""
    before = kernels.level()
    yield
    if kernels.level() != before:
        kernels.select(before)


@pytest.fixture(params=kernels.levels())
def level(request: pytest.FixtureRequest) -> str:
    """Each level of this machine, the references (`numpy`) among them."""
    kernels.select(request.param)
    return request.param


@pytest.fixture(
    params=COMPILED or [pytest.param("none", marks=pytest.mark.skip(reason="mpitrain was built without a C compiler"))]
)
def compiled_level(request: pytest.FixtureRequest) -> str:
    """Each compiled level of this machine."""
    kernels.select(request.param)
    return request.param
