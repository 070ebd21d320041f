"""The stand-in under CuPy's name, for processes of their own: PYTHONPATH=tests/device/as_cupy mpirun -n 2 python ...

STRICT_DEVICES=4      so many devices are there, else one
STRICT_LATE=1         they run late, to the end of the process
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from strict_cupy import StrictCupy, modules
from strict_stream import machine, timeline

machine.devices = int(os.environ.get("STRICT_DEVICES", "1"))
if os.environ.get("STRICT_LATE"):
    timeline.begin(None)
sys.modules.update(modules(StrictCupy()))
