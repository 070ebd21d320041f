"""Bytes that a rank holds while it trains a decoder, predicted: every array has a line and every line a formula.

    step = Step(GPTConfig(...), batch=8, tp=2, recompute="full")          # as plan.traffic takes it
    of_stage(step, 0)                    # what one micro-batch keeps for backward: path, name, shape, dtype, why
    model_state(step, "adamw")           # weights, masters, gradients, optimizer state
    peak(step, rows)                     # the largest sum of the micro-batches in flight of a schedule
    predicted_block_bytes(config, ...)   # one block kept, one block made again

A `debug.memory.MemoryLedger` measures the same, and the two agree to the byte.

    activations.py   the arrays of a micro-batch     peak.py     micro-batches in flight, and the choice of blocks
    state.py         what stays between steps        experts.py  the arrays of a layer of experts
    saved.py         an array                        zero.py     weights that come and go, and the paper's table
    paper.py         the figures of other papers     powersgd.py  what compression holds
"""

from __future__ import annotations

from mpitrain.plan.memory.activations import by_path, freed, of_stage, total
from mpitrain.plan.memory.peak import BlockBytes, block_table, peak, predicted_block_bytes, scratch, segments_of
from mpitrain.plan.memory.powersgd import left_out
from mpitrain.plan.memory.saved import Saved
from mpitrain.plan.memory.state import State, model_state
from mpitrain.plan.memory.zero import gathered

__all__ = [
    "BlockBytes",
    "Saved",
    "State",
    "block_table",
    "by_path",
    "freed",
    "gathered",
    "left_out",
    "model_state",
    "of_stage",
    "peak",
    "predicted_block_bytes",
    "scratch",
    "segments_of",
    "total",
]
