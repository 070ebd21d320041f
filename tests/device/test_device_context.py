"""Context parallelism on device arrays: the bits of NumPy, and only messages cross."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strict_array import crossings, ndarray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_context as checks

from mpitrain.autograd import Tape, Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.parallel import context

CASES = {
    "plain": {},
    "not causal": {"causal": False},
    "dropout": {"drop": 0.3},
    "documents": {"packed": True},
    "window": {"window": 4},
    "float16": {"dtype": np.float16, "drop": 0.3, "packed": True},
}


def run(xp: Any, way: str, how: dict[str, Any]) -> tuple[Any, Any]:
    """(y, gradient of qkv) where `xp` computes, and how often something crossed there and back."""
    axis = checks.cp_of(world())
    p = checks.problem(axis.size, **how)
    part = checks.here(p, axis, way)
    x = Tensor(xp.asarray(p.qkv[:, part]), requires_grad=True)
    grad = xp.asarray(p.grad[:, part])
    rows = None
    if p.drop:
        draw = p.draw._replace(places=xp.asarray(p.draw.places), positions=xp.asarray(part))
        rows = context.attention_rows(draw, "weights", xp.arange(p.heads), axis, way)
    documents = None if p.documents is None else xp.asarray(p.documents)
    with crossings() as counted:
        with Tape() as tape:
            how = {"causal": p.causal, "documents": documents, "rows": rows, "drop": p.drop, "window": p.window}
            y = context.attention(x, p.heads, p.kv_heads, axis, way, **how)
        d_qkv = tape.run_backward([(y, grad)])[x]
    if xp is not np:
        assert isinstance(y.data, ndarray)
        assert isinstance(d_qkv, ndarray)
        c = axis.size
        messages = {"ring": 2 * (c - 1) + c, "ulysses": 4, "rsa": 4 * (c - 1) + 2}[way] if c > 1 else 0
        assert (counted["get"], counted["set"]) == (messages, messages)
        assert counted.keys() <= {"get", "set", "asarray"}
        return y.data.get(), d_qkv.get()
    return y.data, d_qkv


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("way", context.KINDS)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_has_the_bits_of_numpy_and_only_messages_cross(cupy, numpy_kernels, case, way, ranks):
    on_device, on_host = (LocalWorld(ranks).run(run, xp, way, CASES[case]) for xp in (cupy, np))
    for mine, theirs in zip(on_device, on_host, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.tobytes() == b.tobytes()
