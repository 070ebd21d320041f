"""What one core can do at most: a loop of fused multiply-adds in registers, compiled here for this machine.

    python benchmarks/fma_peak.py

A training's share of it tells how much of the core is used; no program does better than 100 %.  It is measured in the
same run as what it is compared with, since the clock of a core follows load and temperature.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

STRETCH_S = 0.02


class Peak:
    """Compiles `fma_peak.c` with the machine's own instructions; a call measures one stretch.

    Attributes:
        bits: of the vectors used.

    Raises:
        SystemExit: there is no C compiler (`CC`, else cc).
    """

    def __init__(self) -> None:
        source = Path(__file__).with_suffix(".c")
        compiler = os.environ.get("CC", "cc")
        with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as folder:
            library = Path(folder, "fma_peak.so")
            flags = "-O3 -march=native -ffp-contract=fast -shared -fPIC"
            command = [*compiler.split(), *flags.split(), str(source), "-o", str(library)]
            try:
                subprocess.run(command, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(
                    f"{source.name} cannot be compiled, and without it no share of peak: {error}"
                ) from None
            loaded = ctypes.CDLL(str(library))
        self._run = loaded.fma_flops
        self._run.restype, self._run.argtypes = ctypes.c_double, [ctypes.c_double, ctypes.POINTER(ctypes.c_float)]
        self.bits = 8 * loaded.vector_bytes()

    def __call__(self) -> float:
        """Flops a second of this core, the best of three stretches."""
        sink = ctypes.c_float()
        return max(self._run(STRETCH_S, ctypes.byref(sink)) for _ in range(3))


if __name__ == "__main__":
    peak = Peak()
    print(f"{peak() / 1e9:.1f} GFLOP/s in float32 on one core, vectors of {peak.bits} bits")
