"""Cases of products of matrices: every way in which factors and results lie, and sums of dims before the last two."""

from __future__ import annotations

from typing import Any

import numpy as np
from kernel_case import Case, Wide, normal


def _factors(rng: np.random.Generator, a: tuple[int, ...], b: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"a": normal(rng, *a), "b": normal(rng, *b), **more}


def _case(a: tuple[int, ...], b: tuple[int, ...], call: Any = None, **about: Any) -> Case:
    made = about.pop("make", lambda rng: _factors(rng, a, b))
    return Case("matmul", made, call or (lambda k, x: k.matmul(x.a, x.b)), by_address=True, **about)


def _nan(x: Any, *shape: int, dtype: Any = None) -> Any:
    """A place to write to, in which nothing may be read."""
    return x.xp.full(shape, float("nan"), x.dtype if dtype is None else dtype)


def _into(k: Any, x: Any) -> Any:
    out = _nan(x, 5, 7)
    assert k.matmul(x.a, x.b, out=out) is out
    return out


def _into_columns(k: Any, x: Any) -> Any:
    out = _nan(x, 7, 5).T
    k.matmul(x.a, x.b, out=out)
    return out


def _into_a_part(k: Any, x: Any) -> Any:
    out = x.xp.zeros((8, 12), x.dtype)
    k.matmul(x.a, x.b, out=out[2:7, 3:10])
    return out


def _into_every_second(k: Any, x: Any) -> Any:
    out = x.xp.zeros((5, 14), x.dtype)
    k.matmul(x.a, x.b, out=out[:, ::2])
    return out


def _gradient(k: Any, x: Any) -> Any:
    """x.T @ grad, added to a buffer that is at least float32."""
    k.matmul(x.a.T, x.b, out=x.total, add=True)
    return x.total


def _added(k: Any, x: Any) -> Any:
    k.matmul(x.a, x.b, out=x.total[:, ::2], add=True)
    return x.total


def _nothing_added(k: Any, x: Any) -> Any:
    return k.matmul(x.a, x.b), k.matmul(x.a, x.b, out=x.total, add=True)


def _by_heads(k: Any, x: Any) -> Any:
    """(b, t, h, d) as (b, h, t, d), twice, the second one turned."""
    return k.matmul(x.a.transpose(0, 2, 1, 3), x.b.transpose(0, 2, 3, 1))


def _out_by_heads(k: Any, x: Any) -> Any:
    out = _nan(x, 3, 4, 2, 5)
    k.matmul(x.a, x.b, out=out.swapaxes(1, 2))
    return out


def _linear(x: tuple[int, ...], m: int, **about: Any) -> Case:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        return {"x": normal(rng, *x), "w": normal(rng, x[-1], m), "bias": 3 * normal(rng, m)}

    call = about.pop("call", lambda k, a: k.linear(a.x, a.w, a.bias))
    return Case("linear", make, call, by_address=True, **about)


CASES = {
    "matmul 5x3 by 3x7": _case((5, 3), (3, 7)),
    "matmul 1x1 by 1x1": _case((1, 1), (1, 1)),
    "matmul 33x65 by 65x17, both turned": _case((65, 33), (17, 65), lambda k, x: k.matmul(x.a.T, x.b.T)),
    "matmul of a part of the rows and columns": _case(
        (9, 11), (8, 9), lambda k, x: k.matmul(x.a[2:7, 3:9], x.b[1:7, 2:9])
    ),
    "matmul backwards and by steps": _case((5, 6), (3, 7), lambda k, x: k.matmul(x.a[::-1, ::2], x.b[:, ::-1])),
    "matmul of one row for all": _case((1, 3), (3, 7), lambda k, x: k.matmul(x.xp.broadcast_to(x.a, (5, 3)), x.b)),
    "matmul into out": _case((5, 3), (3, 7), _into),
    "matmul into columns": _case((5, 3), (3, 7), _into_columns),
    "matmul into a part": _case((5, 3), (3, 7), _into_a_part),
    "matmul into every second column": _case((5, 3), (3, 7), _into_every_second),
    "matmul as a gradient, added": _case(
        (9, 5),
        (9, 7),
        _gradient,
        make=lambda rng: _factors(rng, (9, 5), (9, 7), total=Wide(normal(rng, 5, 7))),
        writes=("total",),
    ),
    "matmul added to every second column": _case(
        (5, 3),
        (3, 7),
        _added,
        make=lambda rng: _factors(rng, (5, 3), (3, 7), total=normal(rng, 5, 14)),
        writes=("total",),
        rounded=1.0,
    ),
    "matmul of nothing": _case(
        (5, 0),
        (0, 7),
        _nothing_added,
        make=lambda rng: _factors(rng, (5, 0), (0, 7), total=normal(rng, 5, 7)),
        writes=("total",),
        by_reference=True,
    ),
    "matmul of no rows": _case((0, 3), (3, 7), by_reference=True),
    "matmul wide": _case(
        (5, 3),
        (3, 7),
        lambda k, x: k.matmul(
            x.a, x.b, dtype=np.result_type(x.dtype, np.float32) if x.dtype.kind == "f" else np.float32
        ),
    ),
    "matmul of a half and a float": _case(
        (5, 3),
        (3, 7),
        lambda k, x: (k.matmul(x.a, x.wide), k.matmul(x.wide.T, x.a.T, dtype=x.dtype)),
        make=lambda rng: {"a": normal(rng, 5, 3), "wide": Wide(normal(rng, 3, 7))},
        factor=100.0,  # TF32
    ),
    "matmul of vectors": _case(
        (3,),
        (3,),
        lambda k, x: (k.matmul(x.a, x.b), k.matmul(x.a, x.m), k.matmul(x.m.T, x.b), k.matmul(x.stack, x.b)),
        make=lambda rng: _factors(rng, (3,), (3,), m=normal(rng, 3, 7), stack=normal(rng, 2, 4, 3)),
    ),
    "matmul of a stack by one matrix": _case((2, 4, 3), (3, 7)),
    "matmul of a part of a stack by one matrix": _case(
        (3, 5, 4),
        (4, 7),
        lambda k, x: (k.matmul(x.a[:, 1:3], x.b), k.matmul(x.a[:, ::4], x.b), k.matmul(x.a[:, :1], x.b)),
    ),
    "matmul of stacks backwards": _case((3, 2, 4), (3, 4, 2), lambda k, x: k.matmul(x.a[::-1], x.b)),
    "matmul of rows of a stack by one matrix": _case((6, 1, 3), (3, 7)),
    "matmul of one matrix by a stack": _case((5, 3), (4, 3, 7)),
    "matmul of stacks that broadcast": _case((2, 1, 5, 3), (4, 3, 2)),
    "matmul of heads": _case((3, 4, 2, 5), (3, 6, 2, 5), _by_heads),
    "matmul into heads": _case((3, 2, 4, 6), (3, 2, 6, 5), _out_by_heads),
    "matmul of many stacks": _case(
        (5, 2, 4, 3),
        (5, 3, 4, 2),
        lambda k, x: k.matmul(x.a.transpose(2, 0, 1, 3), x.b.transpose(2, 0, 1, 3)),
        cost="slow",
    ),
    "matmul with infinities": _case(
        (2, 3),
        (3, 2),
        make=lambda rng: {"a": np.array([[1.0, 2, 3], [np.nan, 0, 0]]), "b": np.array([[np.inf, 1], [0, 1], [0, 1.0]])},
    ),
    "matmul 257x129 by 129x255": _case((257, 129), (129, 255), factor=4.0),
    "matmul 4096x768 by 768x3072": _case((4096, 768), (768, 3072), factor=8.0, cost="gpu"),
    "linear 4x3 by 3x7": _linear((4, 3), 7),
    "linear 2x5x33 by 33x17": _linear((2, 5, 33), 17, factor=2.0),
    "linear of no rows": _linear((0, 3), 7, by_reference=True),
    "linear wide": _linear((4, 3), 7, call=lambda k, a: k.linear(a.x, a.w, a.bias, np.float64), dtypes=("float64",)),
    "linear of halves in float32": _linear(
        (4, 3), 7, call=lambda k, a: k.linear(a.x, a.w, a.bias, np.float32), dtypes=("float16", "bfloat16")
    ),
}
