"""Encodings of saved arrays: their bytes, and what comes back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mpitrain.autograd.needs import EXACT, SIGN
from mpitrain.backend import dtype_of
from mpitrain.memory.gist import Narrow, Planes, Sparse
from mpitrain.memory.gist.narrow import BLOCK
from mpitrain.memory.gist.planes import signs_of
from mpitrain.memory.gist.sparse import filled_in, sparse_bytes

MIB = 2**20
FORMATS = (16, 10, 8)
DTYPES = ("float32", "float64", "float16", "bfloat16")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def relu(*shape, zeros=0.5, seed=0):
    """A share of zeros, the rest positive."""
    rng = np.random.default_rng(seed)
    x = np.abs(rng.standard_normal(shape)) + 0.1
    x[rng.permutation(x.size).reshape(shape) < round(zeros * x.size)] = 0
    return x.astype(np.float32)


def nbytes(parts):
    return sum(part.nbytes for part in parts)


def sparse(x, narrow=None):
    flat = x.reshape(-1)
    filled = filled_in(flat)
    encoding = Sparse(narrow)
    return encoding, encoding.encode(flat, filled, int(filled.sum()))


# -- planes


def test_signs_take_a_bit_and_maxima_of_a_2_by_2_pool_two():
    """T27.2."""
    assert nbytes(Planes(2).encode(signs_of(relu(MIB)))) == 131_072
    where = np.random.default_rng(0).integers(0, 4, 2**18, np.uint8)
    assert nbytes(Planes(4).encode(where)) == 65_536


@pytest.mark.parametrize(("count", "bits"), [(1, 1), (2, 1), (3, 2), (4, 2), (6, 3), (9, 4), (256, 8), (300, 9)])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (9, 3), (2, 0), (3, 5, 16)])
def test_numbers_come_back_from_as_many_planes_as_they_have_bits(count, bits, shape):
    numbers = np.random.default_rng(1).integers(0, count, shape).astype(np.min_scalar_type(count - 1))
    planes = Planes(count)
    (encoded,) = planes.encode(numbers)
    assert encoded.shape == (bits, -(-numbers.size // 8))
    back = planes.decode((encoded,), EXACT, numbers.shape, numbers.dtype)
    assert back.dtype == numbers.dtype
    np.testing.assert_array_equal(back, numbers)


def test_each_element_has_its_own_bit():
    for place in range(19):
        mask = np.zeros(19, bool)
        mask[place] = True
        back = Planes(2).decode(Planes(2).encode(mask), EXACT, (19,), mask.dtype)
        assert back.dtype == bool
        assert np.flatnonzero(back).tolist() == [place]


def test_zero_minus_zero_and_nan_have_no_sign_and_the_smallest_number_has():
    x = np.array([0.0, -0.0, np.nan, 1e-45, -1e-45, np.inf, -np.inf], np.float32)
    assert signs_of(x).tolist() == [False, False, False, True, False, True, False]
    for encoding, parts in (sparse(x), sparse(x, Narrow(8)), (Planes(2), Planes(2).encode(signs_of(x)))):
        assert encoding.decode(parts, SIGN, x.shape, x.dtype).tolist() == signs_of(x).tolist()


# -- sparse


def test_three_quarters_of_zeros_leave_the_bytes_of_the_formula():
    """T27.3."""
    x = relu(MIB, zeros=0.75)
    encoding, parts = sparse(x)
    assert nbytes(parts) == 5 * 2**18 + 4 * 4097 == 1_327_108
    assert x.nbytes / nbytes(parts) > 3.16
    assert encoding.decode(parts, EXACT, x.shape, x.dtype).tobytes() == x.tobytes()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (255,), (256,), (257,), (5, 16, 9), (65536 + 300,), (200_001,)])
@pytest.mark.parametrize("zeros", [0.0, 0.3, 0.99, 1.0])
def test_what_is_stored_sparse_comes_back_to_the_last_bit(name, shape, zeros):
    x = relu(*shape, zeros=zeros).astype(dtype_of(name))
    x.reshape(-1)[:: 2 * 7] *= -1
    encoding, parts = sparse(x)
    back = encoding.decode(parts, EXACT, x.shape, x.dtype)
    assert back.dtype == x.dtype
    assert back.shape == x.shape
    assert back.tobytes() == x.tobytes()
    filled = int((x != 0).sum() + np.signbit(x[x == 0].astype(np.float32)).sum())
    assert nbytes(parts) == sparse_bytes(x.size, filled, filled * x.dtype.itemsize)


@settings(max_examples=60, deadline=None)
@given(arrays(np.uint32, st.integers(1, 700), elements=st.sampled_from([0, 0, 0, 1, 2**31, 0x7FC00001, 0x3F800000])))
def test_any_bits_come_back_from_sparse_storage(bits):
    x = bits.view(np.float32)
    encoding, parts = sparse(x)
    assert encoding.decode(parts, EXACT, x.shape, x.dtype).tobytes() == x.tobytes()


@pytest.mark.parametrize("bits", FORMATS)
def test_values_of_sparse_storage_may_be_rounded_and_keep_their_places(bits):
    x, narrow = relu(3000, zeros=0.6), Narrow(bits)
    x[x > 0] *= np.float32(1e-3)  # some are rounded to zero
    encoding, parts = sparse(x, narrow)
    count = int((x > 0).sum())
    assert nbytes(parts) == sparse_bytes(x.size, count, narrow.nbytes(count))
    back = encoding.decode(parts, EXACT, x.shape, x.dtype)
    np.testing.assert_array_equal(back, narrow.decode(narrow.encode(x), x.shape, x.dtype))
    signs = encoding.decode(parts, SIGN, x.shape, x.dtype)
    np.testing.assert_array_equal(signs, x > 0)
    assert (bits != 8) or (back[x > 0] == 0).any()


# -- narrow


def oracle(x, exponent, mantissa):
    """The format by its definition: the nearest of all its numbers, of two the one whose code is even."""
    bias = 2 ** (exponent - 1) - 1
    codes = np.arange((2**exponent - 1) << mantissa)
    e, m = codes >> mantissa, codes % 2**mantissa
    values = np.where(e > 0, (1 + m / 2**mantissa) * 2.0 ** (e - bias), m / 2**mantissa * 2.0 ** (1 - bias))
    size = np.abs(np.asarray(x, np.float64))
    above = np.minimum(np.searchsorted(values, size), len(values) - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    nearer = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(values[np.where(size >= values[-1], len(values) - 1, nearer)], x)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_to_the_nearest_ties_to_even(bits, dtype):
    narrow = Narrow(bits)
    codes = np.arange(1 << bits)
    values = narrow.decode(_words(codes, bits), codes.shape, np.float64)
    values = np.sort(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / 2
    near = np.concatenate([values, ties, np.nextafter(ties.astype(dtype), np.inf), np.nextafter(ties.astype(dtype), 0)])
    x = np.concatenate([near, normal(5000), 10.0 ** (normal(5000) * 3), [0.0, -0.0]]).astype(dtype)
    back = narrow.decode(narrow.encode(x), x.shape, dtype)
    assert back.dtype == dtype
    right = oracle(x, narrow.exponent, narrow.mantissa)
    np.testing.assert_array_equal(back, right)
    np.testing.assert_array_equal(np.signbit(back), np.signbit(x))


def _words(codes, bits):
    """Codes as words, by the layout that is promised: the first in the lowest bits."""
    per = 32 // bits
    codes = np.concatenate([codes, np.zeros(-len(codes) % per, np.int64)]).reshape(-1, per)
    return (codes << np.arange(per) * bits).sum(1).astype(np.uint32)


@pytest.mark.parametrize(("bits", "largest", "least", "step"), [
    (16, 65504.0, 2.0**-14, 2.0**-24), (10, 63488.0, 2.0**-14, 2.0**-18), (8, 240.0, 2.0**-6, 2.0**-9),
])  # fmt: skip
def test_what_is_out_of_range_saturates_and_what_is_below_half_a_step_is_zero(bits, largest, least, step):
    """T27.4."""
    narrow = Narrow(bits)
    assert (narrow.largest, narrow.least, narrow.step) == (largest, least, step)
    x = np.array([largest * 1.001, 1e30, np.inf, -np.inf, step * 0.5, step * 0.51, -step, np.nan], np.float32)
    back = narrow.decode(narrow.encode(x), x.shape, x.dtype)
    assert back[:-1].tolist() == [largest, largest, largest, -largest, 0.0, step, -step]
    assert np.isnan(back[-1])
    nans = np.array([0x7FC00001, 0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(narrow.decode(narrow.encode(nans), nans.shape, nans.dtype)).all()


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("name", DTYPES)
def test_the_error_is_half_a_step_and_for_16_bits_2_to_the_minus_11(bits, name):
    """T27.4."""
    narrow = Narrow(bits)
    x = np.clip(normal(7, 1001) * 8, -200, 200).astype(dtype_of(name))
    back = narrow.decode(narrow.encode(x), x.shape, x.dtype)
    assert back.dtype == x.dtype
    x, back = x.astype(np.float64), back.astype(np.float64)
    assert (np.abs(back - x) <= narrow.error(x)).all()
    normal_ones = np.abs(x) >= narrow.least
    worst = (np.abs(back - x) / np.abs(x))[normal_ones].max()
    assert worst <= {16: 2.0**-11, 10: 2.0**-5, 8: 2.0**-4}[bits]
    if name in ("float32", "float64"):
        assert worst > 0.9 * 2.0 ** -(narrow.mantissa + 1)  # it is that format and no finer one


@pytest.mark.parametrize(("bits", "per_word"), [(16, 2), (10, 3), (8, 4)])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 11, BLOCK - 1, BLOCK, BLOCK + 1])
def test_elements_are_packed_into_words_of_32_bits(bits, per_word, size):
    narrow = Narrow(bits)
    x = normal(size).astype(np.float32)
    words = narrow.encode(x)
    assert words.dtype == np.uint32
    assert words.nbytes == narrow.nbytes(size) == 4 * -(-size // per_word)
    right = oracle(x, narrow.exponent, narrow.mantissa) if size else x
    np.testing.assert_array_equal(narrow.decode(words, x.shape, x.dtype), right)


def test_words_have_the_first_element_in_the_lowest_bits():
    x = np.array([1.0, 2.0, -1.0], np.float32)
    one = {16: 15 << 10, 10: 15 << 4, 8: 7 << 3}
    two = {16: 16 << 10, 10: 16 << 4, 8: 8 << 3}
    for bits in FORMATS:
        (first, *_) = Narrow(bits).encode(x)
        third = 0 if bits == 16 else ((1 << (bits - 1)) | one[bits]) << 2 * bits
        assert first == one[bits] | two[bits] << bits | third


def test_a_strided_array_is_encoded_in_its_own_order():
    x = normal(6, 8).astype(np.float32).T[::2]
    for bits in FORMATS:
        narrow = Narrow(bits)
        back = narrow.decode(narrow.encode(x), x.shape, x.dtype)
        np.testing.assert_array_equal(back, oracle(x, narrow.exponent, narrow.mantissa))
