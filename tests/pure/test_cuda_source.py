"""All CUDA source: what launchers ask for is there, and it compiles for devices of today, without a GPU.

The values of kernels are tested elsewhere (tests/device by a host compiler, tests/gpu on a device).  What only a
compiler for devices can say stands here: it takes the source without a warning, and each kernel finds registers and
shared memory.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from cuda_compilers import compiled

from mpitrain.backend import DTYPES, dtype_of
from mpitrain.kernels import cuda
from mpitrain.kernels.cuda import launch

FOLDER = Path(cuda.__file__).parent
ARCHITECTURES = ("sm_80", "sm_90")
KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")
SHARED = 48 << 10  # bytes that a block has without asking for more
SPILLED = 128  # bytes of a thread that may lie in memory for want of registers
SPILLS = {"attention_floats_64": 256, "attention_floats_128": 1024}
"""Sources whose kernels may keep more there: these are held to 128 registers, so that two blocks work at a time."""


def launches() -> list[tuple[str, str, str]]:
    """(launcher, source, kernel) of each call of `launch` whose source and kernel are plain words."""
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch":
                words = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
                if len(words) == 2:
                    found.append((path.name, words[0], words[1]))
    return found


def test_launchers_name_sources_and_kernels_that_exist():
    assert len(launches()) > 10
    for launcher, source, kernel in launches():
        assert source in launch.sources(), f"{launcher}: csrc/{source}.cu"
        assert re.search(rf"\b{kernel}\b", launch.text(source)), f"{launcher}: {kernel} in csrc/{source}.cu"


def test_sources_need_no_header_of_a_toolkit():
    assert len(launch.sources()) > 10
    for source in launch.sources():
        text = launch.text(source)
        assert "#include" not in text, source
        assert text.isascii(), source


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", launch.sources())
def test_a_source_compiles(source: str, dtype: str, architecture: str):
    made = compiled(launch.text(source), launch.options(dtype_of(dtype)), architecture)
    assert made.is_right, made.log
    assert "warning" not in made.log, made.log
    assert made.kernels, made.log
    for name, needs in made.kernels.items():
        assert needs.shared <= SHARED, f"{name}: {needs}"
        assert needs.spilled <= SPILLS.get(source, SPILLED), f"{name}: {needs}"
