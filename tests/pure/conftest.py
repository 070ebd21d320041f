"""The levels of the compiled kernels, one after the other, and references in small blocks."""

from __future__ import annotations

import pytest

from mpitrain import kernels
from mpitrain.kernels import blocks

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


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few elements in the references, so that small arrays have many, the last one shorter."""
    assert kernels.level() == "numpy"
    monkeypatch.setattr(blocks, "BLOCK", 7)
    monkeypatch.setattr(blocks, "QUERIES", 3)
    monkeypatch.setattr(blocks, "SCORES", 30)
