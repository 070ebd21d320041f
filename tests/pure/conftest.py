"""The levels of the compiled kernels, one after the other."""

from __future__ import annotations

import pytest

from mpitrain import kernels

COMPILED = [name for name in kernels.levels() if name != "numpy"]


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
