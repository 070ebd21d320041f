"""Attention over a sequence that ranks share against dense attention, as checks that any world can run.

Every rank makes the whole sequence, computes dense attention and its gradients from the formulas, in NumPy and with all
scores at once, and compares its own tokens' part.  The whole world is the cp axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.ops.attention import Attention
from mpitrain.backend import dtype_of
from mpitrain.comm.alone import Alone
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.errors import ConfigError, ShapeError, UserError
from mpitrain.parallel import context
from mpitrain.parallel.context import layout
from mpitrain.parallel.context.ring import ring_attention
from mpitrain.rng import Draw, keep_mask

ROUNDING = 1e-12
WAYS = ("ring", "contiguous", "ulysses", "rsa")
"""The kinds, and the ring over consecutive tokens."""


def cp_of(world: World) -> Communicator:
    return Mesh(world, cp=world.size).cp


class Problem(NamedTuple):
    """Attention of a whole sequence: what every rank knows of it."""

    qkv: np.ndarray
    grad: np.ndarray
    heads: int
    kv_heads: int
    causal: bool = True
    documents: np.ndarray | None = None
    drop: float = 0.0
    window: int | None = None

    @property
    def draw(self) -> Draw:
        b, s, _ = self.qkv.shape
        return Draw(7, 11, np.arange(b) + 5, np.arange(s))


def problem(
    n: int,
    heads: int = 0,
    kv_heads: int = 0,
    *,
    b: int = 2,
    chunk: int = 3,
    d: int = 4,
    packed: bool = False,
    dtype: Any = np.float64,
    **how: Any,
) -> Problem:
    """2n chunks of `chunk` tokens; 2n heads in n groups, unless given; `packed`: several documents and padding."""
    heads, kv_heads = heads or 2 * n, kv_heads or n
    random = np.random.default_rng((n, heads, kv_heads, d))
    s = 2 * n * chunk
    qkv = random.standard_normal((b, s, (heads + 2 * kv_heads) * d)).astype(dtype)
    grad = random.standard_normal((b, s, heads * d)).astype(dtype)
    documents = None
    if packed:
        documents = np.sort(random.integers(0, 4, (b, s)), axis=1)
        documents[0, s // 2 :] = 9  # a document over half of the sequence, so that some ranks see no key of others
        documents[:, : s // 5 + 1] = -1  # padding in front: the first blocks hold nothing that may be seen
        documents[1, -2:] = -1
    return Problem(qkv, grad, heads, kv_heads, documents=documents, **how)


def dense(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(y, gradient of qkv) in float64, from the definition.

    P = softmax(Q K^T / sqrt(d)), M the scaled dropout mask: Y = (P M) V,  dV = (P M)^T dY,  dP = M (dY V^T),
    dS = P (dP - rowsum(dP P)),  dQ = dS K / sqrt(d),  dK = dS^T Q / sqrt(d).
    """
    b, s, width = p.qkv.shape
    group, d = p.heads // p.kv_heads, width // (p.heads + 2 * p.kv_heads)
    packed = p.qkv.astype(np.float64).reshape(b, s, p.kv_heads, group + 2, d).transpose(2, 3, 0, 1, 4)
    q = packed[:, :group].reshape(p.heads, b, s, d)
    k, v = (np.repeat(packed[:, group + i], group, axis=0) for i in (0, 1))
    seen = np.tril(np.ones((s, s), bool)) if p.causal else np.ones((s, s), bool)
    if p.window is not None:
        seen = seen & ~np.tril(np.ones((s, s), bool), -p.window)
    if p.documents is not None:
        own = p.documents[:, :, None] == p.documents[:, None, :]
        seen = seen & own & (p.documents >= 0)[:, :, None]
    scores = np.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(d), -np.inf)
    top = np.maximum(scores.max(axis=3, keepdims=True), -1e300)
    probabilities = np.exp(scores - top)
    probabilities /= np.maximum(probabilities.sum(axis=3, keepdims=True), 1.0)
    kept = np.ones(1)
    if p.drop:
        rows = p.draw.attention_rows("weights", p.heads)
        kept = (keep_mask(rows, s, p.drop) / (1 - p.drop)).swapaxes(0, 1)
    y = (probabilities * kept) @ v
    g = p.grad.astype(np.float64).reshape(b, s, p.heads, d).transpose(2, 0, 1, 3)
    dv = (probabilities * kept).swapaxes(2, 3) @ g
    dp = kept * (g @ v.swapaxes(2, 3))
    ds = probabilities * (dp - (dp * probabilities).sum(axis=3, keepdims=True)) / np.sqrt(d)
    dq, dk = ds @ k, ds.swapaxes(2, 3) @ q
    of_group = (p.kv_heads, group, b, s, d)
    parts = [dq.reshape(of_group), *(x.reshape(of_group).sum(axis=1, keepdims=True) for x in (dk, dv))]
    d_qkv = np.concatenate(parts, axis=1).transpose(2, 3, 0, 1, 4).reshape(b, s, width)
    return y.transpose(1, 2, 0, 3).reshape(b, s, p.heads * d), d_qkv


def here(p: Problem, axis: Communicator, way: str) -> np.ndarray:
    return context.positions(p.qkv.shape[1], axis, "rsa" if way == "contiguous" else way)


def attend(p: Problem, axis: Communicator, way: str, qkv: Tensor) -> Tensor:
    """This rank's part of the result; `qkv` is its part of the input."""
    rows = None
    if p.drop:
        mine = p.draw._replace(positions=here(p, axis, way))
        rows = context.attention_rows(mine, "weights", np.arange(p.heads), axis, way)
    if way == "contiguous" and axis.size > 1:
        how: dict[str, Any] = {"window": p.window, "zigzag": False}
        return ring_attention(qkv, p.heads, p.kv_heads, axis, p.causal, p.documents, rows, p.drop, **how)
    kind = "ring" if way == "contiguous" else way
    how = {"causal": p.causal, "documents": p.documents, "rows": rows, "drop": p.drop, "window": p.window}
    return context.attention(qkv, p.heads, p.kv_heads, axis, kind, **how)


def run(p: Problem, axis: Communicator, way: str) -> tuple[np.ndarray, np.ndarray, Tape]:
    """(y, gradient of qkv) of this rank's tokens, and the tape before it was walked."""
    part = here(p, axis, way)
    qkv = Tensor(np.ascontiguousarray(p.qkv[:, part]), requires_grad=True)
    before = qkv.data.copy()
    with Tape() as tape:
        y = attend(p, axis, way, qkv)
    value = y.data.copy()
    d_qkv = tape.run_backward([(y, np.ascontiguousarray(p.grad[:, part]))])[qkv]
    assert np.array_equal(qkv.data, before), "the input was written"
    assert np.array_equal(y.data, value), "backward wrote into the result"
    assert (value.dtype, d_qkv.dtype) == (p.qkv.dtype, p.qkv.dtype)
    return value, d_qkv, tape


def equals_dense(p: Problem, axis: Communicator, way: str, tolerance: float = ROUNDING) -> None:
    part = here(p, axis, way)
    y, d_qkv, _ = run(p, axis, way)
    for name, mine, truth in zip(("y", "d_qkv"), (y, d_qkv), dense(p), strict=True):
        assert mine.shape == truth[:, part].shape
        error = np.abs(mine - truth[:, part]).max() / max(1.0, np.abs(truth).max())
        assert error <= tolerance, f"{way} on {axis.size} ranks: {name} is off by {error:.2e}"
        if p.documents is not None:
            padding = p.documents[:, part] < 0
            assert padding.any() or axis.size > 1
            assert not mine[padding].any(), f"{way}: {name} of padding is not 0"


# -- the same numbers


def every_way_equals_dense_attention(world: World) -> None:
    """T14.1: output and the gradients of queries, keys and values."""
    axis = cp_of(world)
    for way in WAYS:
        for causal in (True, False):
            equals_dense(problem(axis.size, causal=causal), axis, way)
            equals_dense(problem(axis.size, kv_heads=2 * axis.size, causal=causal), axis, way)


def a_ring_takes_any_number_of_heads(world: World) -> None:
    axis = cp_of(world)
    for way in ("ring", "contiguous", "rsa"):
        for heads, kv_heads in ((1, 1), (3, 1), (3, 3), (6, 2)):
            equals_dense(problem(axis.size, heads, kv_heads), axis, way)
            equals_dense(problem(axis.size, heads, kv_heads, b=1, chunk=1, d=1), axis, way)


def dropout_is_that_of_the_whole_sequence(world: World) -> None:
    """A weight's mask is a function of (sample, head, query, key), all of them global."""
    axis = cp_of(world)
    for way in WAYS:
        for causal in (True, False):
            equals_dense(problem(axis.size, causal=causal, drop=0.3), axis, way)
        equals_dense(problem(axis.size, kv_heads=2 * axis.size, drop=0.3), axis, way)


def documents_see_only_themselves_and_padding_nothing(world: World) -> None:
    """T14.5, C08: no NaN, and padding has exactly 0."""
    axis = cp_of(world)
    for way in WAYS:
        for causal in (True, False):
            equals_dense(problem(axis.size, packed=True, causal=causal), axis, way)
        equals_dense(problem(axis.size, packed=True, drop=0.3), axis, way)


def a_sliding_window_is_that_of_the_whole_sequence(world: World) -> None:
    """Windows within a chunk, over its borders, over several chunks, and over all."""
    axis = cp_of(world)
    for way in WAYS:
        for window in (1, 2, 3, 4, 7, 100):
            equals_dense(problem(axis.size, window=window), axis, way)
        for window in (2, 5):
            equals_dense(problem(axis.size, packed=True, window=window), axis, way)
            equals_dense(problem(axis.size, kv_heads=2 * axis.size, drop=0.3, window=window), axis, way)


def a_sequence_of_padding_gives_exactly_zero(world: World) -> None:
    axis = cp_of(world)
    for way in WAYS:
        p = problem(axis.size)
        p = p._replace(documents=np.full(p.qkv.shape[:2], -1))
        y, d_qkv, _ = run(p, axis, way)
        assert not y.any()
        assert not d_qkv.any()


def single_and_half_precision(world: World) -> None:
    axis = cp_of(world)
    for dtype, tolerance in ((np.float32, 3e-6), (np.float16, 3e-3), (dtype_of("bfloat16"), 2e-2)):
        for way in WAYS:
            equals_dense(problem(axis.size, dtype=dtype, drop=0.3), axis, way, tolerance)
            equals_dense(problem(axis.size, dtype=dtype, packed=True), axis, way, tolerance)


def halves_on_many_ranks_are_those_of_one(world: World) -> None:
    """What goes around is merged, and added up, in float32: no element is off by more than a rounding of its own.

    The bound is one unit in the last place of an element, and a sixteenth of one of the largest.  Only rsa's gradients
    may be off by a whole one: its softmax is at hand in backward, while all others have the result, which is rounded.
    """
    axis = cp_of(world)
    for half, place in ((np.dtype(np.float16), 2.0**-10), (dtype_of("bfloat16"), 2.0**-7)):
        for how in ({"drop": 0.3}, {"packed": True}, {"causal": False}, {"window": 11}):
            p = problem(axis.size, chunk=8, d=16, dtype=half, **how)
            whole, d_whole, _ = run(p, Alone(), "ring")
            for way in WAYS:
                part = here(p, axis, way)
                for name, mine, all_of in zip(("y", "d_qkv"), run(p, axis, way), (whole, d_whole), strict=False):
                    assert mine.dtype == half
                    expected = all_of.astype(np.float64)
                    other = 1 if (way, name) == ("rsa", "d_qkv") else 1 / 16
                    bound = place * (np.abs(expected[:, part]) + other * np.abs(expected).max())
                    error = np.abs(mine.astype(np.float64) - expected[:, part])
                    assert (error <= bound).all(), (way, name, half, how, (error / bound).max())


def messages_above_the_eager_limit(world: World) -> None:
    """Blocks of 1 MiB: a blocking send would wait for ever."""
    axis = cp_of(world)
    p = problem(axis.size, 2 * axis.size, 2 * axis.size, b=1, chunk=-(-64 // axis.size), d=256)
    for way in WAYS:
        equals_dense(p, axis, way)


def gradients_are_those_of_finite_differences(world: World) -> None:
    """<v, f(x + h u) - f(x - h u)> / 2h = <u, vjp(v)> with u, v over all ranks."""
    axis = cp_of(world)
    for way in WAYS:
        for how in ({}, {"drop": 0.3}, {"packed": True, "window": 5}, {"causal": False}):
            p = problem(axis.size, **how)
            part = here(p, axis, way)
            _, d_qkv, _ = run(p, axis, way)
            u = np.random.default_rng(axis.size).standard_normal(p.qkv.shape)
            h = 1e-5
            two = [attend(p, axis, way, Tensor(np.ascontiguousarray((p.qkv + e * u)[:, part]))).data for e in (h, -h)]
            change = ((two[0] - two[1]) * p.grad[:, part]).sum() / (2 * h)
            both = axis.all_reduce(np.array([change, (u[:, part] * d_qkv).sum()]))
            assert abs(both[0] - both[1]) <= 1e-7 * np.sqrt(p.qkv.size), (way, how, both)


# -- what is sent and kept


@contextmanager
def counted(axis: Communicator) -> Iterator[dict[str, int]]:
    """Bytes sent inside the block, by verb."""
    before = axis.sent_bytes
    sent: dict[str, int] = {}
    yield sent
    sent.update({verb: n - before.get(verb, 0) for verb, n in axis.sent_bytes.items() if n != before.get(verb, 0)})


def bytes_are_those_of_the_formulas(world: World) -> None:
    """T14.4, exactly; gradients of keys and values travel in at least float32."""
    axis = cp_of(world)
    c = axis.size
    for dtype in (np.float64, np.float32, np.float16):
        p = problem(c, dtype=dtype)
        b, s, _ = p.qkv.shape
        size, wide = np.dtype(dtype).itemsize, max(4, np.dtype(dtype).itemsize)
        of_kv, of_h = b * (s // c) * p.kv_heads * 4, b * (s // c) * p.heads * 4  # elements; 4 is the width of a head
        forward, backward = (c - 1) * 2 * size * of_kv, (c - 1) * 2 * size * of_kv + c * 2 * wide * of_kv
        expected = {
            "ring": ({"send": forward}, {"send": backward}),
            "contiguous": ({"send": forward}, {"send": backward}),
            "rsa": (
                {"shift": forward},
                {"shift": forward, "reduce_scatter": 2 * (c - 1) * wide * of_kv},
            ),
            "ulysses": ({"all_to_all": (c - 1) * size * (2 * of_kv + 2 * of_h) // c},) * 2,
        }
        for way in WAYS:
            part = here(p, axis, way)
            x = Tensor(np.ascontiguousarray(p.qkv[:, part]), requires_grad=True)
            with counted(axis) as there, Tape() as tape:
                y = attend(p, axis, way, x)
            with counted(axis) as back:
                tape.run_backward([(y, np.ascontiguousarray(p.grad[:, part]))])
            assert (there, back) == (expected[way] if c > 1 else ({}, {})), (way, dtype, there, back)


def the_tape_keeps_a_share(world: World) -> None:
    """Of what one rank keeps for backward: 1/c, also with dropout; nothing grows with the square of the sequence."""
    axis = cp_of(world)
    for drop, dtype in ((0.0, np.float64), (0.3, np.float64), (0.3, np.float16)):
        p = problem(axis.size, chunk=8, drop=drop, dtype=dtype)
        b, s, width = p.qkv.shape
        rows = p.draw.attention_rows("weights", p.heads) if drop else None
        with Tape() as whole:
            ops.attention(Tensor(p.qkv, requires_grad=True), p.heads, p.kv_heads, rows=rows, drop=drop)
        for way in ("ring", "contiguous", "ulysses"):
            x = Tensor(np.ascontiguousarray(p.qkv[:, here(p, axis, way)]), requires_grad=True)
            with Tape() as tape:
                attend(p, axis, way, x)
            assert tape.nbytes * axis.size == whole.nbytes, (way, tape.nbytes, whole.nbytes)
        size = np.dtype(dtype).itemsize
        of_a_token = size * (width + p.heads * 4) + max(4, size) * p.heads + (8 * p.heads if drop else 0)
        assert whole.nbytes == b * s * of_a_token


def a_second_pass_has_the_same_bits(world: World) -> None:
    axis = cp_of(world)
    for way in WAYS:
        p = problem(axis.size, drop=0.3)
        first, second = run(p, axis, way)[:2], run(p, axis, way)[:2]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


# -- edges


def one_rank_is_plain_attention(world: World) -> None:
    """On an axis of one rank: the same op, the same bits, the same memory, no message."""
    axis = Mesh(world).cp
    p = problem(2, drop=0.3, packed=True)
    rows = p.draw.attention_rows("weights", p.heads)
    mask = layout.seen_by(p.documents, causal=True)
    with Tape() as tape:
        x = Tensor(p.qkv, requires_grad=True)
        y = ops.attention(x, p.heads, p.kv_heads, mask=mask, rows=rows, drop=0.3)
    kept = tape.nbytes
    d_qkv = tape.run_backward([(y, p.grad)])[x]
    for kind in context.KINDS:
        assert np.array_equal(context.positions(24, axis, kind), np.arange(24))
        mine, its_gradient, _ = run(p, axis, kind)
        assert mine.tobytes() == y.data.tobytes()
        assert its_gradient.tobytes() == d_qkv.tobytes()
        with Tape() as other:
            attend(p, axis, kind, Tensor(p.qkv, requires_grad=True))
        assert other.nbytes == kept
        assert [node.function for node in other.nodes] == [Attention]
    assert axis.sent_bytes == {}


def sizes_that_do_not_divide_are_refused_before_any_message(world: World) -> None:
    axis = cp_of(world)
    c = axis.size

    def refused(error: type[UserError], words: tuple[str, ...], call: Callable[[], object]) -> None:
        said = ""
        with counted(axis) as sent:
            try:
                call()
            except error as trouble:
                said = str(trouble)
        assert sent == {}
        assert said, words
        assert len(said.splitlines()) <= 5
        assert all(word in said for word in words), said

    def sizes(kind: str, s: int, heads: int = c, kv: int = c) -> Callable[[], object]:
        return lambda: context.check(s, heads, kv, axis, kind)

    refused(ConfigError, ("'star'", "ring, ulysses, rsa"), sizes("star", 2 * c))
    for kind in context.KINDS:
        context.check(2 * c, c, c, axis, kind)
    if c == 1:
        context.check(7, 3, 1, axis, "ring")
        return
    refused(ShapeError, (f"seq_len {5 * c} ", f"not divisible by {2 * c}", f"{4 * c} or {6 * c}"), sizes("ring", 5 * c))
    refused(ShapeError, (f"seq_len {2 * c + 1} ", f"not divisible by {c}"), sizes("ulysses", 2 * c + 1))
    refused(ShapeError, ("seq_len 1 ", f"Take {c},"), sizes("rsa", 1))
    refused(ShapeError, (f"{c + 1} query heads", "ring attention"), sizes("ulysses", 2 * c, c + 1, c + 1))
    refused(ShapeError, ("1 heads of keys",), sizes("ulysses", 2 * c, c, 1))
    p = problem(c)
    x = Tensor(p.qkv[:, here(p, axis, "ring")])

    def attention(heads: int = p.heads, **how: Any) -> Callable[[], object]:
        return lambda: context.attention(x, heads, p.kv_heads, axis, "ring", **how)

    refused(ShapeError, ("documents (2, 5)", f"(2, {6 * c})"), attention(documents=np.zeros((2, 5), int)))
    refused(ShapeError, ("no rows",), attention(drop=0.3))
    refused(ShapeError, (f"rows (2, {p.heads}, 1)",), attention(drop=0.3, rows=np.zeros((2, p.heads, 1), np.uint64)))
    refused(ShapeError, (f"{c + 1} heads",), attention(c + 1))
    refused(ShapeError, ("qkv",), lambda: context.attention(x, 3 * c, c, axis, "ring"))


def every_token_is_somewhere(world: World) -> None:
    axis = cp_of(world)
    for kind in context.KINDS:
        mine = context.positions(12 * axis.size, axis, kind)
        assert mine.dtype == np.int64
        assert (np.diff(mine) > 0).all()
        assert sorted(axis.all_gather(mine)) == list(range(12 * axis.size))


CHECKS: list[Callable[[World], None]] = [
    every_way_equals_dense_attention,
    a_ring_takes_any_number_of_heads,
    dropout_is_that_of_the_whole_sequence,
    documents_see_only_themselves_and_padding_nothing,
    a_sliding_window_is_that_of_the_whole_sequence,
    a_sequence_of_padding_gives_exactly_zero,
    single_and_half_precision,
    halves_on_many_ranks_are_those_of_one,
    messages_above_the_eager_limit,
    gradients_are_those_of_finite_differences,
    bytes_are_those_of_the_formulas,
    the_tape_keeps_a_share,
    a_second_pass_has_the_same_bits,
    one_rank_is_plain_attention,
    sizes_that_do_not_divide_are_refused_before_any_message,
    every_token_is_somewhere,
]
