"""Rotary positions: what they do to scores, whose numbers they are, and what is refused."""

import math

import numpy as np
import pytest

from mpitrain.autograd import Tensor, ops
from mpitrain.autograd.gradcheck import check
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn.rotary import Scaling, frequencies, tables

RNG = np.random.default_rng(7)


def normal(*shape):
    return RNG.standard_normal(shape)


def parts(packed, heads, kv_heads):
    """Queries (b, s, kv, g, d), keys and values (b, s, kv, d)."""
    b, s, width = packed.shape
    whole = packed.reshape(b, s, kv_heads, heads // kv_heads + 2, width // (heads + 2 * kv_heads))
    return whole[..., :-2, :], whole[..., -2, :], whole[..., -1, :]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_pairs_are_turned_as_numbers_of_the_plane(heads, kv_heads, level):
    """Elements i and i + d/2 as a complex number, times e^(i angle); values stay."""
    d, positions = 6, np.array([0, 1, 5, 1000])
    qkv = normal(2, 4, (heads + 2 * kv_heads) * d)
    speeds = frequencies(d)
    y = ops.rotary(Tensor(qkv), heads, kv_heads, *tables(positions, speeds, np.float64)).data
    turn = np.exp(1j * positions[:, None] * np.array(speeds))
    (q, k, v), (new_q, new_k, new_v) = parts(qkv, heads, kv_heads), parts(y, heads, kv_heads)
    for old, new, by in ((q, new_q, turn[:, None, None]), (k, new_k, turn[:, None])):
        z = (old[..., :3] + 1j * old[..., 3:]) * by
        np.testing.assert_allclose(new, np.concatenate([z.real, z.imag], -1), rtol=1e-12, atol=1e-12)
    assert np.array_equal(new_v, v)


def test_a_score_depends_on_the_distance_alone(level):
    qkv = np.repeat(normal(1, 1, 24), 40, axis=1)  # the same token everywhere
    q, k, _ = parts(ops.rotary(Tensor(qkv), 1, 1, *tables(np.arange(40), frequencies(8), np.float64)).data, 1, 1)
    scores = q[0, :, 0, 0] @ k[0, :, 0].T
    for distance in range(-39, 40):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=0, atol=1e-11)
    assert np.ptp(scores) > 1


def test_gradients(level):
    where = tables(np.arange(5) + 3, frequencies(4), np.float64)
    check(lambda x: ops.rotary(x, 2, 1, *where), normal(2, 5, 16))
    own = tables(np.array([[0, 4, 1], [9, 2, 2]]), frequencies(4), np.float64)
    check(lambda x: ops.rotary(x, 2, 2, *own), normal(2, 3, 24))


def test_parts_are_packed_as_attention_takes_them(level):
    """Value, gradients, and the same bits as packing first."""
    where = tables(np.arange(5), frequencies(4), np.float64)
    check(lambda q, kv: ops.pack_rotary(q, kv, 4, 2, *where), normal(2, 5, 16), normal(2, 5, 16))
    q, kv = Tensor(normal(2, 5, 12)), Tensor(normal(2, 5, 8))
    first = ops.concat([q, kv], 2)
    y = ops.pack_rotary(q, kv, 3, 1, *where)
    assert np.array_equal(y.data, ops.rotary(first, 3, 1, *where).data)


def test_tables_are_exact_where_angles_are_large():
    """An angle of 10^6 radians has lost 6 of the 7 digits of single precision; its cosine may not."""
    position, speed = 1_000_003, frequencies(2)[0]
    for dtype, kept in ((np.float32, np.float32), (np.float64, np.float64), (np.float16, np.float32)):
        cos, sin = tables(np.array([position]), (speed,), dtype)
        assert cos.dtype == sin.dtype == kept
        assert abs(float(cos[0, 0]) - math.cos(position * speed)) <= np.finfo(kept).eps
        assert abs(float(sin[0, 0]) - math.sin(position * speed)) <= np.finfo(kept).eps


SCALINGS = {
    "none": (None, {"rope_type": "default"}),
    "linear": (Scaling("linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        Scaling("llama3", 8.0, 1.0, 4.0, 64),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.slow  # the import alone takes seconds
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_turns_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    scaling, theirs = SCALINGS[name]
    theta, d, positions = 500.0, 16, np.arange(7) + 50
    config = LlamaConfig(hidden_size=4 * d, num_attention_heads=4, rope_parameters={**theirs, "rope_theta": theta})
    peer = llama.LlamaRotaryEmbedding(config)
    speeds = frequencies(d, theta, scaling)
    np.testing.assert_allclose(speeds, peer.inv_freq.numpy(), rtol=2e-7)
    q, k = (torch.from_numpy(normal(2, 4, 7, d).astype(np.float32)) for _ in range(2))
    turned = llama.apply_rotary_pos_emb(q, k, *peer(q, torch.from_numpy(positions)[None]))
    whole = np.stack([x.numpy().transpose(0, 2, 1, 3) for x in (q, k, k)], 3).reshape(2, 7, -1)  # (head, q|k|v, d)
    y = ops.rotary(Tensor(whole), 4, 4, *tables(positions, speeds, np.float32)).data.reshape(2, 7, 4, 3, d)
    for i, x in enumerate(turned):
        np.testing.assert_allclose(y[:, :, :, i].transpose(0, 2, 1, 3), x.numpy(), rtol=0, atol=3e-5)


def test_scaling_by_wavelength_is_that_of_llama_3():
    """As its authors wrote it down: by the tokens that a turn takes."""
    factor, low, high, original = 8.0, 1.0, 4.0, 8192
    waves = [2 * math.pi / f for f in frequencies(128, 500_000.0)]
    expected = []
    for wave in waves:
        smooth = (original / wave - low) / (high - low)
        within = 1 if wave < original / high else 0 if wave > original / low else smooth
        expected.append(2 * math.pi * ((1 - within) / factor + within) / wave)
    given = frequencies(128, 500_000.0, Scaling("llama3", factor, low, high, original))
    np.testing.assert_allclose(given, expected, rtol=1e-14)
    assert 0 < sum(original / high < wave < original / low for wave in waves) < 20


def test_scaling_slows_long_waves_and_leaves_short_ones():
    plain, slow = frequencies(64, 500_000.0), frequencies(64, 500_000.0, Scaling("llama3", 32.0))
    share = np.array(slow) / np.array(plain)
    assert share[0] == 1.0
    assert share[-1] == pytest.approx(1 / 32)
    assert (np.diff(share) <= 1e-15).all()
    assert ((share > 1 / 32 + 1e-9) & (share < 1 - 1e-9)).any()
    assert frequencies(8, scaling=Scaling("linear", 2.0)) == tuple(f / 2 for f in frequencies(8))


def test_what_makes_no_sense_is_refused():
    for dim in (0, 1, 7):
        with pytest.raises(ConfigError, match=f"heads of width {dim} are not made of pairs"):
            frequencies(dim)
    for theta in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="theta is"):
            frequencies(4, theta)
    with pytest.raises(ConfigError, match="scaling 'yarn'; there are linear and llama3"):
        Scaling("yarn", 2.0)
    for factor in (0.5, math.inf, math.nan):
        with pytest.raises(ConfigError, match="a scaling factor of"):
            Scaling("linear", factor)
    for low, high, original in ((4.0, 1.0, 8), (0.0, 1.0, 8), (1.0, 4.0, 0), (1.0, 1.0, 8)):
        with pytest.raises(ConfigError, match="it wants 0 < low < high"):
            Scaling("llama3", 2.0, low, high, original)


def test_arrays_that_do_not_fit_are_refused():
    cos, sin = tables(np.arange(5), frequencies(4), np.float64)
    x = Tensor(normal(2, 5, 16))
    with pytest.raises(ShapeError, match=r"^rotary: 3 heads of queries in 2 groups"):
        ops.rotary(x, 3, 2, cos, sin)
    with pytest.raises(ShapeError, match=r"^rotary: qkv .* is not"):
        ops.rotary(x, 5, 1, cos, sin)
    with pytest.raises(ShapeError, match=r"^rotary: heads of an odd width 1"):
        ops.rotary(x, 12, 2, cos, sin)
    q, kv = Tensor(normal(2, 5, 8)), Tensor(normal(2, 5, 8))
    with pytest.raises(ShapeError, match=r"^pack_rotary: 3 heads of queries in 2 groups"):
        ops.pack_rotary(q, kv, 3, 2, cos, sin)
    for other in (normal(2, 5, 12), normal(2, 4, 8), normal(5, 8), normal(2, 5, 8).astype(np.float32)):
        with pytest.raises(ShapeError, match=r"^pack_rotary: q .* and kv .* are not 2 heads of queries and 1 of keys"):
            ops.pack_rotary(q, Tensor(other), 2, 1, cos, sin)
    with pytest.raises(ShapeError, match=r"^pack_rotary: cos .* and sin .* are neither"):
        ops.pack_rotary(q, kv, 2, 1, cos[:, :1], sin)
    for tables_of in ((cos[:4], sin[:4]), (cos, sin[:4]), (cos[:, :1], sin[:, :1]), (cos[None], sin[None])):
        with pytest.raises(ShapeError, match=r"^rotary: cos .* and sin .* are neither"):
            ops.rotary(x, 2, 1, *tables_of)
