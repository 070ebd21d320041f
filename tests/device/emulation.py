"""Compiles CUDA source for the host and runs its kernels there: g++, `cuda_emulation.h` and `emulator.cpp`.

What was compiled is kept in build/cuda_emulation for a month, by a digest of everything that went into it, so that all
processes of a test run, and the next run, compile nothing twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_HEADER, _EMULATOR = HERE / "cuda_emulation.h", HERE / "emulator.cpp"
KEPT = 30 * 24 * 3600  # seconds
PATIENCE = 1.0
"""Seconds that the kernels of a source may take in all before it is compiled once more, with optimisation."""
_PLAIN, _OPTIMISED = "-O0", "-O1"  # the first compiles in a quarter of the time, which most tests never make up for
_FLAGS = ("-fno-math-errno", "-ffp-contract=off", "-fwrapv", "-w")  # both give the same bits
_FLAGS += ("-fvisibility=hidden", "-fno-exceptions", "-fno-rtti")
_FLAGS += ("-fsanitize=bounds,alignment", "-fsanitize-undefined-trap-on-error")
_BOUNDS = r"(?:__attribute__\(\(launch_bounds\((.*?)\)\)\)\s*)?"  # before or behind `void`
_KERNEL = re.compile(
    r"__attribute__\(\(noinline, used\)\)\s*" + _BOUNDS + r"[^;{}()]*?\bvoid\s+" + _BOUNDS + r"(\w+)\s*\("
)


class Parameter(NamedTuple):
    """Of a kernel: kind is i, u, f (numbers), s (a struct) or p (a pointer, to `of`); size in bytes of the number."""

    kind: str
    size: int
    of: str
    is_const: bool


class _Parameter(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_char), ("size", ctypes.c_byte), ("of", ctypes.c_char), ("is_const", ctypes.c_byte))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("invoke", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_int),
        ("threads", ctypes.c_int),
    )


class Region(ctypes.Structure):
    """A stretch of memory that a kernel is given, `offset` bytes behind the beginning of the array that owns it."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("is_written", ctypes.c_longlong),
        ("offset", ctypes.c_longlong),
    )


class Argument(ctypes.Structure):
    """The bits of a number (region -1), or a place in a region."""

    _fields_ = (("region", ctypes.c_longlong), ("value", ctypes.c_ulonglong))


class Module:
    """The kernels of one CUDA source, compiled for the host.

    Args:
        code: the source.
        options: of a compiler of CUDA; it is told of those that define something.

    Raises:
        EmulationError: with the compiler's words.
    """

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        self._source = code, options
        self._spent = 0.0  # seconds, or infinite where nothing faster can be made
        fast = self._target(_OPTIMISED)
        self._load(fast if fast.exists() else self._build(_PLAIN))
        if fast.exists():
            self._spent = math.inf

    def _target(self, level: str) -> Path:
        return _target("kernel", "\0".join((level, self._source[0], *self._source[1])))

    def _build(self, level: str) -> Path:
        return _built(self._target(level), lambda to: _compile(*self._source, level, to))

    def _load(self, library: Path) -> None:
        found = ctypes.PyDLL(str(library))
        found.emu_kernels.restype = ctypes.POINTER(_Kernel)
        found.emu_attach(ctypes.c_void_p(_emulator().emulator()))
        number = ctypes.c_int()
        kernels = {kernel.name.decode(): kernel for kernel in found.emu_kernels(ctypes.byref(number))[: number.value]}
        self.threads = {name: kernel.threads for name, kernel in kernels.items()}  # that __launch_bounds__ allows, or 0
        self.parameters = {
            name: [
                Parameter(p.kind.decode(), p.size, p.of.decode(), bool(p.is_const))
                for p in kernel.parameters[: kernel.count]
            ]
            for name, kernel in kernels.items()
        }
        bounds = (ctypes.c_void_p * 2)()  # of the shared memory of all kernels of the source
        found.emu_shared_memory(bounds)
        # At once: another thread may be about to run a kernel.
        self._loaded = {name: kernel.invoke for name, kernel in kernels.items()}, bounds[0], bounds[1]

    def run(
        self, name: str, shape: tuple[int, ...], shared: int, order: str, regions: list[Region], args: list[Argument]
    ) -> None:
        """Run a kernel until it ends.

        Args:
            shape: of the grid and of a block, six numbers.
            shared: bytes of dynamic shared memory.
            order: of threads, warps and blocks: "up", "down", or "both", which must give the same.

        Raises:
            EmulationError: it did what a kernel must not do.
        """
        if PATIENCE < self._spent < math.inf:
            self._load(self._build(_OPTIMISED))
            self._spent = math.inf
        invoke, shared_begins, shared_ends = self._loaded
        began = time.thread_time()
        why = _emulator().emulate(
            ctypes.c_void_p(invoke[name]),
            (ctypes.c_uint * 6)(*shape),
            ctypes.c_void_p(shared_begins),
            ctypes.c_void_p(shared_ends),
            ctypes.c_size_t(shared),
            ("up", "down", "both").index(order),
            (Region * len(regions))(*regions),
            len(regions),
            (Argument * len(args))(*args),
            len(args),
        )
        self._spent += time.thread_time() - began
        if why:
            raise EmulationError(f"{name}: {why.decode()}")


class EmulationError(Exception):
    """A kernel did what it must not do, or does not compile."""


compiled = functools.cache(Module)
"""The module of a source and its options, made once."""


@functools.cache
def _emulator() -> ctypes.PyDLL:
    def build(to: Path) -> None:
        _call("-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(to), str(_EMULATOR))

    library = ctypes.PyDLL(str(_built(_target("emulator", ""), build)))  # Python's lock is held: one kernel at a time
    library.emulator.restype = ctypes.c_void_p
    library.emulate.restype = ctypes.c_char_p
    return library


def _compile(code: str, options: tuple[str, ...], level: str, to: Path) -> None:
    """Preprocess the source, find its kernels, and compile it with a table of them."""
    standard = "-std=c++17"  # for the header; CUDA source that is C++14 is C++17
    defines = [option for option in options if option.startswith("-D")]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.cu"
        source.write_text(f"namespace {{\n#line 1\n{code}\n}}\n")
        flags = (standard, "-x", "c++", "-E", "-include", str(_HEADER), *defines)
        text = _call(*flags, str(source))
        kernels = {name: before or behind or "0" for before, behind, name in _KERNEL.findall(text)}
        whole = Path(folder) / "whole.ii"
        whole.write_text(text + _table(kernels))
        _call(standard, level, *_FLAGS, "-fPIC", "-shared", "-o", str(to), str(whole))


def _table(kernels: dict[str, str]) -> str:
    """C++ that tells what kernels there are; their __launch_bounds__ by name."""
    entries = "".join(
        f'{{"{name}", emu_call<{name}>::invoke, emu_call<{name}>::parameters, emu_call<{name}>::count,'
        f" emu_first({bounds})}},"
        for name, bounds in kernels.items()
    )
    export = 'extern "C" __attribute__((visibility("default")))'
    return f"""
static const emu_kernel emu_table[] = {{{entries} {{"", nullptr, nullptr, 0, 0}}}};
{export} const emu_kernel *emu_kernels(int *count) {{ *count = {len(kernels)}; return emu_table; }}
{export} void emu_attach(void *emulator) {{ emu = (struct emulator *)emulator; }}
extern "C" __attribute__((weak, visibility("hidden"))) char __start_emu_shared[], __stop_emu_shared[];
{export} void emu_shared_memory(char **bounds) {{ bounds[0] = __start_emu_shared; bounds[1] = __stop_emu_shared; }}
"""


def _call(*args: str) -> str:
    program = shutil.which("g++")
    assert program is not None, "the emulation of CUDA needs g++"
    done = subprocess.run([program, *args], capture_output=True, text=True)
    if done.returncode:
        raise EmulationError(f"g++ says:\n{done.stderr}")
    return done.stdout


def _target(name: str, key: str) -> Path:
    """Where what was made of a key lies, or will."""
    digest = hashlib.sha256(f"{_toolchain()}\0{key}".encode()).hexdigest()[:24]
    return _folder() / f"{name}-{digest}.so"


def _built(target: Path, build: Callable[[Path], None]) -> Path:
    """The target, which `build` writes: by one process, and once for all who ask."""
    if target.exists():
        return target
    with _locked(target.with_suffix(".lock")):
        if not target.exists():
            fresh = target.with_suffix(f".{os.getpid()}")
            build(fresh)
            fresh.replace(target)
            for file in target.parent.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process has removed it
                    if file.stat().st_mtime < time.time() - KEPT:
                        file.unlink()
    target.with_suffix(".lock").unlink(missing_ok=True)
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _folder() -> Path:
    """build/cuda_emulation of the working tree, or where that cannot be written, a folder that is gone some day."""
    folder = HERE.parents[1] / "build" / "cuda_emulation"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"cuda_emulation-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp())


@functools.cache
def _toolchain() -> str:
    return _call("--version") + "".join(path.read_text() for path in (Path(__file__), _HEADER, _EMULATOR))
