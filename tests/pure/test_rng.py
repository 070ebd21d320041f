"""Random numbers: the right hash, the right statistics, and the same number for an element on every layout."""

import hashlib
import math
import warnings

import numpy as np
import pytest

from mpitrain import rng

WORD = 1 << 64


def integer_splitmix64(x):
    z = (x + 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z // 2**27)) * 0x94D049BB133111EB % WORD
    return z ^ (z // 2**31)


def integer_lowbias32(x):
    x = (x ^ (x // 2**16)) * 0x7FEB352D % 2**32
    x = (x ^ (x // 2**15)) * 0x846CA68B % 2**32
    return x ^ (x // 2**16)


def integer_key(seed, stream, *numbers):
    name = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
    key = integer_splitmix64(integer_splitmix64(seed % WORD) ^ name)
    for number in numbers:
        key = integer_splitmix64(key ^ (number % WORD))
    return key


def integer_word(row, column):
    folded = (row % 2**32) ^ (row // 2**32)
    return integer_lowbias32(folded ^ integer_lowbias32(column + 1))


def draw(step=3, b=4, s=6, seed=1):
    return rng.Draw(seed, step, np.arange(b), np.arange(s))


def full(shape):
    return tuple(slice(0, length) for length in shape)


# ------------------------------------------------------------------------------------------------------- golden values


def test_splitmix64_gives_the_published_sequence():
    """The first outputs of the reference generator from the states 0 and 1234567."""
    assert rng.splitmix64(0) == 0xE220A8397B1DCDAF
    golden = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    states = [1234567 + i * 0x9E3779B97F4A7C15 for i in range(5)]
    assert [rng.splitmix64(state) for state in states] == golden
    assert rng.splitmix64(np.array([state % WORD for state in states], np.uint64)).tolist() == golden


def test_lowbias32_equals_integer_arithmetic():
    x = np.array([0, 1, 2, 77, 2**16, 2**31, 2**32 - 1], np.uint32)
    assert rng.lowbias32(x).tolist() == [integer_lowbias32(int(value)) for value in x]
    assert rng.lowbias32(x)[0] == 0  # why a column is hashed as index + 1


def test_words_of_a_draw_equal_integer_arithmetic():
    key = integer_key(7, "blocks.3.drop", 11)
    rows = rng.Draw(7, 11, np.array([5, 0]), np.array([2, 9])).rows("blocks.3.drop")
    words = rng.words32(rows, 3, first=4)
    for i, place in enumerate((5, 0)):
        for j, position in enumerate((2, 9)):
            row = integer_splitmix64(integer_splitmix64(key ^ place) ^ position)
            assert int(rows[i, j]) == row
            assert words[i, j].tolist() == [integer_word(row, column) for column in (4, 5, 6)]


def test_words_are_frozen():
    """A change of any constant or of the order of the chain changes every run: it must be meant."""
    assert int(rng.stream_key(0, "x")) == integer_key(0, "x")
    rows = draw().rows("x")
    assert hashlib.sha256(rng.words32(rows, 8).tobytes()).hexdigest()[:16] == "4f8e48993ae488db"
    bits = np.round(rng.normal(0, "w", (5, 7), full((5, 7))) * 1e9).astype(np.int64)
    assert hashlib.sha256(bits.tobytes()).hexdigest()[:16] == "7dc250ff248a6671"


def test_normal_equals_box_muller_in_scalar_arithmetic():
    values = rng.normal(3, "w", (4, 2, 5), full((4, 2, 5)))
    key = integer_key(3, "w")
    for a, b, column in ((0, 0, 0), (3, 1, 4), (2, 0, 1)):
        word = integer_splitmix64(integer_splitmix64(key ^ (a * 2 + b)) ^ integer_splitmix64(column + 1))
        u1, u2 = (word // 2**32 + 0.5) / 2**32, (word % 2**32 + 0.5) / 2**32
        expected = math.sqrt(-2 * math.log(u1)) * math.cos(2 * math.pi * u2)
        assert values[a, b, column] == pytest.approx(expected, rel=1e-13)


# ---------------------------------------------------------------------------------------- any slice is drawn as a slice


@pytest.mark.parametrize("columns", [1, 7, 64, 20_000])
def test_mask_of_a_slice_is_the_slice_of_the_mask(columns):
    """T29.1: rows, columns and samples may be cut anywhere."""
    whole = draw(b=5, s=9)
    mask = rng.keep_mask(whole.rows("drop"), columns, 0.3)
    assert mask.shape == (5, 9, columns)
    part = whole.select(slice(1, 4))._replace(positions=np.array([8, 2, 3]))
    first = columns // 3
    cut = rng.keep_mask(part.rows("drop"), columns - first, 0.3, first=first)
    assert np.array_equal(cut, mask[1:4][:, [8, 2, 3], first:])
    chosen = np.array([columns - 1, 0])
    assert np.array_equal(rng.keep_mask(whole.rows("drop"), chosen, 0.3), mask[:, :, chosen])


def test_one_element_has_one_word_whatever_is_drawn_around_it():
    """T29.1: token 17, channel 5 of layer 3, alone or in the middle of anything."""
    alone = rng.words32(rng.Draw(1, 0, np.array([2]), np.array([17])).rows("blocks.3.drop"), 1, first=5)
    wide = rng.words32(draw(step=0, b=4, s=32).rows("blocks.3.drop"), 4096)
    assert alone.item() == wide[2, 17, 5]
    assert alone.item() == rng.words32(draw(step=0, b=4, s=32).rows("blocks.3.drop"), np.array([9, 5]))[2, 17, 1]


@pytest.mark.parametrize("shape", [(), (1,), (11,), (13, 7), (3, 5, 4), (2, 3, 4, 5), (300, 130)])
def test_weights_of_a_slab_are_the_slab_of_the_weights(shape):
    """T29.1, bit for bit: a value must not depend on where it lies in a vector register."""
    whole = rng.normal(5, "w", shape, full(shape))
    assert whole.shape == shape
    generator = np.random.default_rng(0)
    for _ in range(10):
        ends = [sorted(generator.integers(0, length + 1, 2)) for length in shape]
        slab = tuple(slice(int(start), int(stop)) for start, stop in ends)
        assert np.array_equal(rng.normal(5, "w", shape, slab), whole[slab])


def test_attention_rows_follow_sample_head_and_query_not_the_layout():
    whole = draw(b=4, s=6)
    rows = whole.attention_rows("attn", 8)
    assert rows.shape == (4, 8, 6)
    part = whole.select(slice(2, 4)).attention_rows("attn", np.arange(4, 8), np.array([5, 0]))
    assert np.array_equal(part, rows[2:4, 4:][:, :, [5, 0]])
    assert np.unique(rows).size == rows.size


def test_the_number_of_a_row_depends_on_each_part_of_its_key():
    rows = draw().rows("a")
    others = [draw(seed=2).rows("a"), draw(step=4).rows("a"), draw().rows("b"), draw().rows("a ")]
    values = np.concatenate([r.reshape(-1) for r in (rows, *others)])
    assert np.unique(values).size == values.size
    assert rng.stream_key(1, "x", 1) != rng.stream_key(1, "x", 1, 0)
    assert rng.stream_key(1, "x", 1, 2) != rng.stream_key(1, "x", 2, 1)


def test_integers_and_arrays_absorb_alike_and_without_warnings():
    key = rng.stream_key(0, "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in (0, 1, 2**40, -1):
            expected = integer_splitmix64(int(key) ^ (number % WORD))
            assert int(rng.absorb(key, number)) == expected
            assert rng.absorb(key, np.array([number])).tolist() == [expected]
            assert int(rng.absorb(rng.absorb(key, number), 5)) == integer_splitmix64(expected ^ 5)
        assert int(rng.stream_key(-3, "x")) == integer_key(-3, "x")
        assert int(rng.stream_key(2**64 + 5, "x")) == integer_key(5, "x")


def test_inputs_are_left_alone():
    rows = draw().rows("x")
    before = rows.copy()
    words = rows.astype(np.uint32)
    for function, argument in ((rng.splitmix64, rows), (rng.fold32, rows), (rng.lowbias32, words)):
        function(argument)
    rng.words32(rows, 3)
    rng.absorb(rows, rows)
    assert np.array_equal(rows, before)
    assert np.array_equal(words, before.astype(np.uint32))


# ----------------------------------------------------------------------------------------------------------- edge cases


def test_probability_zero_keeps_all_and_one_keeps_none():
    rows = draw(b=64, s=64).rows("x")
    assert rng.keep_mask(rows, 33, 0.0).all()
    assert not rng.keep_mask(rows, 33, 1.0).any()


def test_a_word_equal_to_the_threshold_is_kept():
    rows = draw().rows("x")
    word = int(rng.words32(rows, 1)[0, 0, 0])
    assert rng.keep_mask(rows, 1, word / 2**32)[0, 0, 0]
    assert not rng.keep_mask(rows, 1, (word + 1) / 2**32)[0, 0, 0]


def test_no_rows_and_no_columns_give_empty_results():
    empty = draw(b=0).rows("x")
    assert rng.keep_mask(empty, 5, 0.5).shape == (0, 6, 5)
    assert rng.uniform(draw().rows("x"), 0).shape == (4, 6, 0)
    assert rng.words32(empty, 5).shape == (0, 6, 5)
    assert rng.normal(0, "w", (6, 4), (slice(3, 3), slice(0, 4))).shape == (0, 4)
    assert rng.normal(0, "w", (6, 4), (slice(0, 6), slice(4, 4))).shape == (6, 0)


def test_uniform_numbers_lie_strictly_between_zero_and_one():
    values = rng.uniform(draw(b=64, s=64).rows("u"), 100)
    assert values.dtype == np.float64
    assert 0 < values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    assert np.array_equal(values, (rng.words32(draw(b=64, s=64).rows("u"), 100) + 0.5) / 2**32)


# ----------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_drop_rate_is_within_four_standard_deviations(p):
    """T29.2, over all and along each direction."""
    dropped = ~rng.keep_mask(draw(b=64, s=64).rows("drop"), 256, p)
    for axes in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        rate = dropped.mean(axis=axes)
        sigma = math.sqrt(p * (1 - p) * rate.size / dropped.size)
        limit = 4 if axes == (0, 1, 2) else 5  # the largest of up to 256 deviations
        assert np.abs(rate - p).max() < limit * sigma


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_neighbours_differ_as_independent_masks_do(p):
    """T29.2: steps, streams, seeds, samples, positions and columns: 2p(1-p) of the places differ."""
    expected = 2 * p * (1 - p)

    def mask(d, stream="blocks.0.drop"):
        return rng.keep_mask(d.rows(stream), 128, p)

    base = mask(draw(b=32, s=64))
    pairs = {
        "step": (base, mask(draw(step=4, b=32, s=64))),
        "seed": (base, mask(draw(seed=2, b=32, s=64))),
        "stream": (base, mask(draw(b=32, s=64), "blocks.1.drop")),
        "sample": (base[:-1], base[1:]),
        "data-parallel rank": (base[:16], base[16:]),
        "position": (base[:, :-1], base[:, 1:]),
        "column": (base[:, :, :-1], base[:, :, 1:]),
        "two columns on": (base[:, :, :-2], base[:, :, 2:]),
        "half a row on": (base[:, :, :64], base[:, :, 64:]),
        "diagonal": (base[:, :-1, :-1], base[:, 1:, 1:]),
        "columns swapped in pairs": (base[:, :-1], base[:, 1:].reshape(32, 63, 64, 2)[..., ::-1].reshape(32, 63, 128)),
    }
    for name, (a, b) in pairs.items():
        rate = np.mean(a != b)
        sigma = math.sqrt(expected * (1 - expected) / a.size)
        assert abs(rate - expected) < 5 * sigma, name


def test_words_are_uniform_in_every_byte_and_bit():
    words = rng.words32(draw(b=64, s=64).rows("w"), 256).reshape(-1)
    for shift in (0, 8, 16, 24):
        counts = np.bincount((words >> np.uint32(shift)) & np.uint32(255), minlength=256)
        expected = words.size / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    for bit in range(32):
        ones = np.count_nonzero(words & np.uint32(1 << bit))
        assert abs(ones - words.size / 2) < 5 * math.sqrt(words.size) / 2


def test_pairs_of_neighbouring_uniforms_fill_the_square_evenly():
    u = rng.uniform(draw(b=64, s=64).rows("u"), 256)
    pairs = {"columns": (u[..., :-1], u[..., 1:]), "rows": (u[:, :-1], u[:, 1:]), "samples": (u[:-1], u[1:])}
    for name, (a, b) in pairs.items():
        cell = (a * 16).astype(np.int64) * 16 + (b * 16).astype(np.int64)
        expected = cell.size / 256
        chi_square = float(((np.bincount(cell.reshape(-1), minlength=256) - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255), name


def test_initial_weights_are_normal_and_uncorrelated():
    w = rng.normal(0, "w", (1000, 500), full((1000, 500)))
    n = w.size
    assert abs(w.mean()) < 4 / math.sqrt(n)
    assert abs(w.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((w**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((w**4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert abs(np.mean(np.abs(w) < 1) - 0.6826895) < 4 * math.sqrt(0.6827 * 0.3173 / n)
    other = rng.normal(0, "v", (1000, 500), full((1000, 500)))
    for a, b in ((w[:, 1:], w[:, :-1]), (w[1:], w[:-1]), (w, other)):
        assert abs((a * b).mean()) < 4.5 / math.sqrt(a.size)
    gram = w @ w.T / 500  # no two rows alike
    assert np.abs(gram - np.diag(np.diag(gram))).max() < 6 / math.sqrt(500)
