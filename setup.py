"""Everything but the compiled kernels stands in pyproject.toml; here is how those are built.

`mpitrain/kernels/csrc` is compiled once for each CPU level and precision, and the right one is chosen when it runs, so
that one wheel serves old and new machines alike.  Without a C compiler the build goes on without them: the NumPy path
then serves, and says so.
"""

import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

SOURCES = "mpitrain/kernels/csrc"
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
LEVELS = {"baseline": ("baseline", [])}
if IS_X86:
    LEVELS |= {"v3": ("x86-64-v3", ["-march=x86-64-v3"]), "v4": ("x86-64-v4", ["-march=x86-64-v4"])}
HEADERS = ("attention.h", "convolution.h", "numerics.h", "pooling.h", "rms_norm.h", "rotary.h", "swiglu.h", "table.h")
PRECISIONS = {"float": 1, "double": 0}
# NaN and infinity must survive, so no -ffast-math; these two only say that nobody reads errno or floating-point traps.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]


class Job(NamedTuple):
    """One call of the compiler."""

    folder: str
    source: str
    macros: list[tuple[str, str]]
    flags: list[str]


def jobs() -> Iterator[Job]:
    """All calls of the compiler but that for the module."""
    for suffix, (name, flags) in LEVELS.items():
        macros = [("LEVEL", suffix), ("MT_LEVEL_NAME", f'"{name}"')]
        yield Job(suffix, "halves.c", macros, flags)
        for real, is_float in PRECISIONS.items():
            both = [*macros, ("REAL", real), ("REAL_IS_FLOAT", str(is_float))]
            yield Job(f"{suffix}-{real}", "kernels.c", both, flags)


class BuildKernels(build_ext):
    """One source, one object for each level and precision."""

    def build_extension(self, ext: Extension) -> None:
        """Compile the objects of all levels, then the module with them; nothing if no source is newer than it.

        What was built before stays until then: other environments may use it, and this may be interrupted.
        """
        try:
            if self.force or newer_group([*ext.sources, *ext.depends], self.get_ext_fullpath(ext.name), "newer"):
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    ext.extra_objects = [path for paths in pool.map(self._compile, jobs()) for path in paths]
            super().build_extension(ext)
        except Exception:
            self._forget(ext)
            raise

    def _forget(self, ext: Extension) -> None:
        """Remove what was built before: where compiling has failed, old kernels must not pass for the new ones."""
        beside = os.path.join(*ext.name.split(".")[:-1], os.path.basename(self.get_ext_filename(ext.name)))
        for path in {self.get_ext_fullpath(ext.name), beside}:
            if os.path.exists(path):
                os.remove(path)

    def _compile(self, job: Job) -> list[str]:
        target = os.path.join(self.build_temp, job.folder)
        return self.compiler.compile(
            [f"{SOURCES}/{job.source}"], output_dir=target, macros=job.macros, extra_postargs=[*FLAGS, *job.flags]
        )


setup(
    ext_modules=[
        Extension(
            "mpitrain.kernels._compiled",
            [f"{SOURCES}/module.c"],
            depends=[f"{SOURCES}/{name}" for name in (*HEADERS, "halves.c", "kernels.c")],
            define_macros=[("MT_X86", "1")] if IS_X86 else [],
            extra_compile_args=FLAGS,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
