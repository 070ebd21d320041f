"""What GPUs can do at most, and which share of it a training step makes (MFU).

The figures are those that NVIDIA's data sheets give for dense products, without sparsity: float32 without tensor cores
(and without TF32), halves on tensor cores with sums in float32, as mpitrain and PyTorch have them by default.  Boards
that run at a lower clock or power limit reach less.  They were written down from memory of these sheets: look yours up
before you quote a share.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mpitrain.plan.memory.paper import flops


class Chip(NamedTuple):
    """A chip by words of its name; TFLOP/s in float32 and in halves, and GB/s of its memory."""

    words: tuple[str, ...]
    single: float
    half: float
    memory: float
    brain: bool = True  # whether bfloat16 is as fast as float16


CHIPS = (
    Chip(("B200",), 75.0, 2250.0, 8000.0),
    Chip(("GH200",), 67.0, 989.0, 4000.0),
    Chip(("H200", "NVL"), 60.0, 835.0, 4800.0),
    Chip(("H200",), 67.0, 989.0, 4800.0),
    Chip(("H100", "NVL"), 60.0, 835.0, 3900.0),
    Chip(("H100", "PCIe"), 51.0, 756.0, 2000.0),
    Chip(("H100",), 67.0, 989.0, 3350.0),
    Chip(("H20",), 44.0, 148.0, 4000.0),
    Chip(("A100", "80GB"), 19.5, 312.0, 2039.0),
    Chip(("A100",), 19.5, 312.0, 1555.0),
    Chip(("A800",), 19.5, 312.0, 2039.0),
    Chip(("A30",), 10.3, 165.0, 933.0),
    Chip(("A40",), 37.4, 149.7, 696.0),
    Chip(("RTX A6000",), 38.7, 154.8, 768.0),
    Chip(("A10G",), 31.5, 70.0, 600.0),
    Chip(("A10",), 31.2, 125.0, 600.0),
    Chip(("L40S",), 91.6, 362.0, 864.0),
    Chip(("L40",), 90.5, 181.0, 864.0),
    Chip(("L4",), 30.3, 121.0, 300.0),
    Chip(("RTX 5090",), 104.8, 209.5, 1792.0),
    Chip(("RTX 4090",), 82.6, 165.2, 1008.0),
    Chip(("RTX 3090",), 35.6, 71.0, 936.0),
    Chip(("V100", "SXM2"), 15.7, 125.0, 900.0, brain=False),
    Chip(("V100",), 14.0, 112.0, 900.0, brain=False),
    Chip(("T4",), 8.1, 65.0, 320.0, brain=False),
)
"""The first whose words a name has."""


def chip_of(name: str) -> Chip | None:
    """The chip of a device's name; None: it is not in the table."""
    return next((c for c in CHIPS if all(re.search(rf"\b{word}\b", name) for word in c.words)), None)


def peak(name: str, dtype: str) -> float | None:
    """FLOP/s that a device can make at most in products of a dtype; None: not known, or the chip lacks the dtype."""
    chip = chip_of(name)
    if chip is None or dtype not in ("float32", "float16", "bfloat16") or (dtype == "bfloat16" and not chip.brain):
        return None
    return 1e12 * (chip.single if dtype == "float32" else chip.half)


def step_flops(*, batch: int, seq_len: int, width: int, layers: int, vocab: int) -> int:
    """FLOPs of a step's matrix products, forward and backward, attention counted as if it were dense.

    72 B L s h^2 (1 + s / (6 h) + V / (12 h L)); what is computed a second time counts once.
    """
    return int(flops(batch=batch, s=seq_len, h=width, layers=layers, vocab=vocab))


def mfu(done: float, seconds: float, most: float | None) -> float | None:
    """Model FLOPs utilisation: the share of what the device can do at most."""
    return None if most is None or seconds <= 0 else done / seconds / most
