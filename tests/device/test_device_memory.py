"""The memory ledger on device arrays: the same bytes as on the host, and nothing crosses for it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from strict_array import crossings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_memory as checks

from mpitrain.comm.alone import Alone
from mpitrain.comm.world import World
from mpitrain.debug import owners
from mpitrain.debug.memory import MemoryLedger
from mpitrain.events import listen
from mpitrain.plan.memory import model_state, of_stage, total
from mpitrain.plan.traffic import Step


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_step_on_a_device_holds_what_was_predicted(cupy, numpy_kernels, recompute):
    """Ids and targets wait there too: on the host they are the batch's own."""
    step = Step(checks.SIZES, 16, 2, recompute=recompute)

    def run(xp, listens):
        _, executor, tokens = checks.built(World(Alone(), "none"), step, optimizer="adamw", xp=xp)
        ledger = MemoryLedger()
        with listen(ledger if listens else lambda event: None), crossings() as crossed:
            executor.step(tokens.batch_at(0, 16))
        return ledger, crossed

    (host, _), (device, crossed), (_, without) = run(np, True), run(cupy, True), run(cupy, False)
    assert crossed == without
    assert device.largest[owners.ACTIVATIONS] == total(of_stage(step, 0)) + 2 * 8 * step.b * step.s
    assert host.largest[owners.ACTIVATIONS] == total(of_stage(step, 0))
    for owner in (owners.WEIGHTS, owners.GRADIENTS, owners.STATE, owners.SCRATCH):
        assert device.largest.get(owner) == host.largest.get(owner)
    state = model_state(step, "adamw")
    assert (device.now[owners.WEIGHTS], device.now[owners.STATE]) == (state.weights, state.optimizer)
