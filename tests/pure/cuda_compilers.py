"""Compilers of CUDA source that need no GPU: NVRTC, from a package or the system; else nvcc.

What they make is machine code for one kind of device, so what its assembler says of each kernel is known, too: how many
registers, how much shared memory, and whether registers did not suffice ("spills").
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Each source has the whole of the shared headers in front of it, and no source takes all of that.
_NEVER_REFERENCED = "177"


class Needs(NamedTuple):
    """What a kernel takes: registers of a thread, bytes of shared memory, bytes that go through memory instead."""

    registers: int
    shared: int
    spilled: int


class Compiled(NamedTuple):
    """What came out."""

    is_right: bool
    log: str

    @property
    def kernels(self) -> dict[str, Needs]:
        """By name."""
        found: dict[str, Needs] = {}
        for part in re.split(r"Compiling entry function '", self.log)[1:]:
            name = part.partition("'")[0]
            registers = re.search(r"Used (\d+) registers", part)
            assert registers is not None, part
            shared = re.search(r"(\d+) bytes smem", part)
            # A kernel's own line, not one of a function that it calls.
            spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
            spilled = max(map(int, spills.groups())) if spills else 0
            found[name] = Needs(int(registers[1]), int(shared[1]) if shared else 0, spilled)
        return found


def nvrtc() -> Any:
    """NVIDIA's run-time compiler as a library; skips the test where there is none."""
    library = _nvrtc()
    if library is None:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    return library


@functools.cache
def _nvrtc() -> Any:
    found = [path for base in sys.path for path in sorted(Path(base or ".").glob("nvidia/*/lib/libnvrtc.so.*"))]
    for name in (*found, "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            if isinstance(name, Path):  # its other half, which it looks for by name and not beside itself
                for other in name.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(other))
            return ctypes.CDLL(str(name))
        except OSError:
            continue
    return None


def compiled(text: str, options: tuple[str, ...], architecture: str) -> Compiled:
    """A source compiled for a device, such as sm_90; skips the test where there is no compiler."""
    library = _nvrtc()
    if library is not None:
        return _by_nvrtc(library, text, options, architecture)
    program = shutil.which("nvcc")
    if program is None:
        pytest.skip("neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc is installed")
    return _by_nvcc(program, text, options, architecture)


def _by_nvrtc(library: Any, text: str, options: tuple[str, ...], architecture: str) -> Compiled:
    program = ctypes.c_void_p()
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), ctypes.c_char_p(text.encode()), ctypes.c_char_p(b"source.cu"), 0, None, None
    )
    assert made == 0
    whole = (
        *options,
        f"--gpu-architecture={architecture}",
        "--ptxas-options=-v",
        f"-diag-suppress={_NEVER_REFERENCED}",
    )
    given = (ctypes.c_char_p * len(whole))(*(option.encode() for option in whole))
    try:
        failed = library.nvrtcCompileProgram(program, len(whole), given)
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        return Compiled(not failed, log.value.decode())
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _by_nvcc(program: str, text: str, options: tuple[str, ...], architecture: str) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source.cu")
        source.write_text(text)
        flags = (f"-arch={architecture}", "-cubin", "-Xptxas", "-v", f"-diag-suppress={_NEVER_REFERENCED}")
        command = [program, *options, *flags, "-o", str(source.with_suffix(".cubin")), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        return Compiled(not done.returncode, done.stdout + done.stderr)
