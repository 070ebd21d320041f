"""The comparison of kernels finds what is wrong with one: each mistake here is made on purpose."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_case import DTYPES, Case, Wide, measure, normal

from mpitrain.backend import dtype_of
from mpitrain.kernels import reference


def make(rng):
    return {
        "x": normal(rng, 5, 33) + 3,
        "w": Wide(normal(rng, 33)),
        "b": normal(rng, 33),
        "ids": np.arange(5),
    }


NORM = Case("layer_norm", make, lambda k, a: k.layer_norm(a.x, a.w, a.b, 1e-5))
SUM = Case("row_sum", make, lambda k, a: [k.row_sum(a.ids[:1], a.x[:1], a.x[1:2]), a.x], writes=("x",))
LOSS = Case(
    "cross_entropy",
    lambda rng: {"x": np.where(np.arange(4)[:, None] < 2, -np.inf, normal(rng, 4, 3)), "t": np.arange(4) % 3},
    lambda k, a: k.cross_entropy(a.x, a.t, 1)[1],
)
DROPOUT = Case(
    "dropout",
    lambda rng: {"x": normal(rng, 9, 40), "rows": np.arange(9, dtype=np.uint64)},
    lambda k, a: k.dropout(a.x, a.rows, 0.5),
    masks=(0,),
)
LARGE = Case("residual", lambda rng: {"x": np.array([[6e4, 1.0]])}, lambda k, a: k.residual(a.x, a.x, None, None, 0.0))


@pytest.mark.parametrize("case", [NORM, SUM, LOSS, DROPOUT, LARGE], ids=lambda case: case.kernel)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_within_the_bound(case, dtype):
    found = measure(case, reference, np, dtype)
    assert found.ok, found.problems


def wrong(kernel):
    """The reference with one kernel made anew of its own."""
    own = getattr(reference, kernel)

    def decorate(function):
        return SimpleNamespace(**{**vars(reference), kernel: lambda *args: function(own, *args)})

    return decorate


@wrong("layer_norm")
def imprecise(own, x, w, b, eps):
    y, center, rstd = own(x, w, b, eps)
    y[0, 0] += np.abs(y).max() * (3e-5 if y.itemsize == 4 else 1e-11 if y.itemsize == 8 else 0.02)
    return y, center, rstd


@wrong("layer_norm")
def of_another_dtype(own, x, w, b, eps):
    y, center, rstd = own(x, w, b, eps)
    return y.astype(np.float64 if y.itemsize < 8 else np.float32), center, rstd


@wrong("layer_norm")
def not_a_number(own, x, w, b, eps):
    y, center, rstd = own(x, w, b, eps)
    y[-1, -1] = np.nan
    return y, center, rstd


@wrong("layer_norm")
def writing_its_input(own, x, w, b, eps):
    results = own(x, w, b, eps)
    x[2, 2] = -1
    return results


@wrong("layer_norm")
def writing_beside_it(own, x, w, b, eps):
    np.lib.stride_tricks.as_strided(x, (x.size + 1,), (x.itemsize,))[-1] = 0
    return own(x, w, b, eps)


times = 0


@wrong("layer_norm")
def another_time_another_result(own, x, w, b, eps):
    global times
    times += 1
    y, center, rstd = own(x, w, b, eps)
    y.view(np.uint8)[0, 0] ^= times & 1
    return y, center, rstd


@wrong("layer_norm")
def in_need_of_alignment(own, x, w, b, eps):
    y, center, rstd = own(x, w, b, eps)
    if x.ctypes.data % 16:
        y.view(np.uint8)[0, 0] ^= 1
    return y, center, rstd


@wrong("layer_norm")
def short_of_a_result(own, *args):
    return own(*args)[:2]


WRONG = [
    (imprecise, "elements"),
    (of_another_dtype, "the reference's"),
    (not_a_number, "nan for"),
    (writing_its_input, "x was written"),
    (writing_beside_it, "beside x"),
    (another_time_another_result, "when run again"),
    (in_need_of_alignment, "one element further"),
    (short_of_a_result, "2 results"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_mistake_is_found(dtype):
    for kernels, words in WRONG:
        found = measure(NORM, kernels, np, dtype)
        assert any(words in problem for problem in found.problems), (words, found)


def test_one_word_of_a_mask_that_is_wrong_is_found():
    @wrong("dropout")
    def with_another_mask(own, x, rows, p):
        return own(x, rows ^ np.uint64(1), p)

    assert any("zeros elsewhere" in problem for problem in measure(DROPOUT, with_another_mask, np, "float16").problems)


def test_none_and_infinity_must_be_those_of_the_reference():
    @wrong("cross_entropy")
    def finite(own, x, t, ignore):
        total, lse = own(x, t, ignore)
        lse[0] = -1e30
        return total, lse

    assert not measure(LOSS, finite, np, "float32").ok

    @wrong("residual")
    def saturated(own, *args):
        return np.minimum(own(*args), dtype_of("float16").type(65504))

    assert not measure(LARGE, saturated, np, "float16").ok


def test_bits_of_the_reference_can_be_asked_for():
    @wrong("dropout")
    def nearly(own, x, rows, p):
        return np.nextafter(own(x, rows, p), x.dtype.type(np.inf))

    found = measure(replace(DROPOUT, exact=(0,)), nearly, np, "float32")
    assert any("bits" in problem for problem in found.problems)
    assert measure(replace(DROPOUT, exact=(0,)), reference, np, "float32").ok
