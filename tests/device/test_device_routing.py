"""Routing on device arrays: the assignment of NumPy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_assign as checks

from mpitrain.backend import to_host
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.parallel import context
from mpitrain.parallel.expert.assign import assign, choose


def run(xp: Any, padded: bool, training: bool) -> list[Any]:
    """All that is assigned, on the host."""
    axis, random, found = checks.cp_of(world()), np.random.default_rng(0), []
    here = context.positions(24, axis, "ring")
    for routing in checks.ROUTINGS:
        codes, real, lengths = checks.draw_rows(random, routing, 3, 24, padded)
        to = assign(
            xp.asarray(np.ascontiguousarray(codes[:, here])),
            routing,
            lengths=None if lengths is None else xp.asarray(lengths),
            real=None if real is None else xp.asarray(real[:, here]),
            positions=xp.asarray(here),
            axis=axis,
            training=training,
        )
        assert all(type(part) is type(xp.zeros(1)) for part in to[:5])
        assert all(type(part) is int for part in to[5:])
        found += [to_host(part) for part in to[:5]] + list(to[5:])
        p = random.random((3, 5, routing.experts)).astype(np.float32)
        found.append(to_host(choose(xp.asarray(p), routing.top_k)))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_device_arrays_have_the_assignment_of_numpy(cupy: Any, padded: bool, training: bool, ranks: int) -> None:
    on_device, on_host = (LocalWorld(ranks).run(run, xp, padded, training) for xp in (cupy, np))
    for mine, theirs in zip(on_device, on_host, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
