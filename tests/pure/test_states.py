"""Each rule of the state checker with programs that are right and programs that are wrong, on one axis of ranks."""

import contextlib
import importlib
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from one_axis import Axis, states_of

import mpitrain.autograd.ops
from mpitrain import collectives
from mpitrain.autograd import Function, Tensor, ops
from mpitrain.autograd.ops.arithmetic import Add, Div, Mul
from mpitrain.autograd.ops.convolution import Conv2d
from mpitrain.autograd.ops.experts import Combine, GroupedMatmul, Jitter, PermuteRows, TakeRows
from mpitrain.autograd.ops.fused import Linear
from mpitrain.autograd.ops.linalg import Matmul
from mpitrain.autograd.ops.reduce import Sum
from mpitrain.autograd.ops.residual import Dropout, Residual
from mpitrain.autograd.ops.rotary import Rotary
from mpitrain.autograd.ops.shape import Split, Transpose
from mpitrain.debug.states.mixing import sent
from mpitrain.debug.states.rules import elementwise
from mpitrain.debug.states.table import RULES, rule_of
from mpitrain.errors import StateError
from mpitrain.events import listen
from mpitrain.nn.rotary import frequencies, tables
from mpitrain.parallel.batch_norm import BatchStatistics
from mpitrain.parallel.expert.overlap import Mail, SendOff, arrive, send_off
from mpitrain.spec import INVARIANT, PARTIAL, REPLICATE, Shard

I, R, P = INVARIANT, REPLICATE, PARTIAL  # noqa: E741  (the tables below are read by columns)
S = Shard
TP = Axis()
ELSEWHERE = SimpleNamespace(name="edp", all_gather=lambda x, dim: x)
X = (2, 4, 6)  # (samples, tokens, columns) of this rank
PIXELS = (2, 4, 4, 6)  # (samples, rows, columns, channels)
ROWS = np.zeros((2, 4), np.uint64)
IDS = np.zeros((3, 5), np.int64)
CHOICES = np.zeros((2, 4, 2), np.int64)
PLACES = np.arange(16).reshape(2, 4, 2)


def on(program, *states, shape=X):
    """A program on inputs of one shape."""
    return program, [(shape, state) for state in states]


def einsum(letters, *states):
    """A product by letters, each of length 2 so that all shapes fit."""
    shapes = [(2,) * len(part) for part in letters.split("->")[0].split(",")]
    return (lambda *x: ops.einsum(letters, *x)), list(zip(shapes, states, strict=True))


def linear(x, w, b=None, shape=X, out=8):
    """x w + b with these states."""
    inputs = [(shape, x), ((shape[-1], out), w), *([((out,), b)] if b != "none" else [])]
    return ops.linear, inputs


def conv2d(x, w, b=None):
    """Filters on images with these states."""
    inputs = [(PIXELS, x), ((8, 3, 3, 6), w), *([((8,), b)] if b != "none" else [])]
    return (lambda *a: ops.conv2d(*a, padding=1)), inputs


def by_group(x, w, b):
    """Filters in two groups on images with these states."""
    inputs = [(PIXELS, x), ((4, 3, 3, 3), w), ((4,), b)]
    return (lambda *a: ops.conv2d(*a, padding=1, groups=2)), inputs


def batch_statistics(x, axis):
    """Statistics over the ranks of an axis."""
    return (lambda x: BatchStatistics.apply(x, axis=axis)[0]), [(PIXELS, x)]


def normalized(x, statistics, w, b):
    return ops.normalize, [(PIXELS, x), ((2, 6), statistics), ((6,), w), ((6,), b)]


def norm(x, w, b):
    return ops.layer_norm, [(X, x), ((6,), w), ((6,), b)]


def residual_norm(x, y, bias, w, b):
    program = lambda x, y, bias, w, b: ops.residual_norm(x, y, bias, w, b)  # noqa: E731
    return program, [(X, x), (X, y), ((6,), bias), ((6,), w), ((6,), b)]


def residual_rms_norm(x, y, bias, w):
    program = lambda x, y, bias, w: ops.residual_rms_norm(x, y, bias, w)  # noqa: E731
    return program, [(X, x), (X, y), ((6,), bias), ((6,), w)]


def rotary(state):
    """Of one head of a token's queries, keys and values, or of two."""
    return (lambda x: ops.rotary(x, 1, 1, *tables(np.arange(x.shape[1]), frequencies(2), np.float64))), [(X, state)]


def pack_rotary(q, kv):
    def program(q, kv):
        where = tables(np.arange(q.shape[1]), frequencies(q.shape[2]), np.float64)
        return ops.pack_rotary(q, kv, 1, 1, *where)

    return program, [((2, 4, 4), q), ((2, 4, 8), kv)]


def loss(logits, targets=None):
    program = lambda z: ops.softmax_cross_entropy(z, np.zeros((2, 4), np.int64))  # noqa: E731
    return program, [(X, logits)]


def take(state, dim=0):
    return (lambda x: ops.take(x, IDS[:, :1], dim)), [((4, 6), state)]


def sent_rows(x):
    """Slices change places."""
    return collectives.all_to_all(x, TP)


def in_halves(*rows):
    """The same, of some rows while others travel."""
    mails = [Mail(TP, [4, 4], [4, 4]) for _ in rows]
    promises = [send_off(x, TP, mail)[0] for x, mail in zip(rows, mails, strict=True)]
    return arrive(TP, *zip(promises, mails, strict=True))


def grouped(x, w, before=lambda x: x):
    """Rows (8, 6) of two groups, with what happens to them before, times matrices (2, 6, 4)."""
    return (lambda x, w: ops.grouped_matmul(before(x), w, (3, 5))), [((8, 6), x), ((2, 6, 4), w)]


def combined(out, gates, before=lambda x: x):
    """Rows (16, 6) of two choices each, with what happens to them before, and gates (2, 4, 2)."""
    return (lambda out, gates: ops.combine(before(out), gates, PLACES)), [((16, 6), out), ((2, 4, 2), gates)]


def reshape(state, shape, to):
    return (lambda x: x.reshape(to)), [(shape, state)]


RIGHT = [
    # Equal states pass; a Replicate value meets slices; a constant adopts.
    *[("one operand", on(op, s), s) for op in (ops.exp, ops.gelu_tanh, ops.relu, ops.abs) for s in (I, R, S(0), S(2))],
    *[("one linear operand", on(op, P), P) for op in (ops.neg, lambda x: x * 3.0, lambda x: x / 2)],
    *[("two alike", on(ops.add, s, s), s) for s in (I, R, P, S(0), S(1))],
    *[("difference", on(ops.sub, s, s), s) for s in (I, R, P, S(0))],
    *[("a constant", on(op, s, None), s) for op in (ops.add, ops.mul, ops.maximum) for s in (I, R, S(1))],
    *[("slices and a copy", on(op, R, S(1)), S(1)) for op in (ops.add, ops.mul, ops.div, ops.maximum)],
    ("a bias is aligned from the right", (ops.add, [(X, S(2)), ((6,), S(0))]), S(2)),
    ("a row of positions", (ops.add, [(X, S(1)), ((4, 6), S(0))]), S(1)),
    ("a bias of its own for all slices", (ops.gelu_tanh, [(X, S(1)), ((6,), R)]), S(1)),
    ("nothing is known", on(ops.add, None, None), None),
    ("a choice", (lambda a, b: ops.where(np.ones(6, bool), a, b), [(X, P), (X, P)]), P),
    ("a choice of nothing", (lambda a: ops.where(np.ones(6, bool), a, 0.0), [(X, P)]), P),
    ("a sum with nothing", (lambda a: a + 0.0, [(X, P)]), P),
    ("a sum with zeros", (lambda a: a + np.zeros(6), [(X, P)]), P),
    # A product with summands: linear in each factor alone.
    ("summands times a copy", on(ops.mul, P, R), P),
    ("a copy times summands", on(ops.mul, R, P), P),
    ("summands over a copy", on(ops.div, P, R), P),
    ("summands times a constant", on(ops.mul, P, None), P),
    # Matrices.
    ("column parallel", linear(R, S(1), S(0)), S(2)),
    ("row parallel", linear(S(2), S(0), "none"), P),
    ("row parallel without weight's state", linear(S(2), None, "none"), P),
    ("row parallel, summands of a bias", linear(S(2), S(0), P), P),
    ("tokens cut", linear(S(1), R, R), S(1)),
    ("samples cut", linear(S(0), R, R), S(0)),
    ("all the same", linear(I, I, I), I),
    ("copies", linear(R, R, R), R),
    ("summands", linear(P, R, "none"), P),
    ("summands of a weight", linear(R, P, P), P),
    # Images.
    ("images cut", conv2d(S(0), R, R), S(0)),
    ("each rank has filters", conv2d(R, S(0), S(0)), S(3)),
    ("each rank has channels", conv2d(S(3), S(3), "none"), P),
    ("one network everywhere", conv2d(I, I, I), I),
    ("filters on summands", conv2d(P, R, "none"), P),
    ("grouped images cut", by_group(S(0), R, R), S(0)),
    ("each rank has groups", by_group(S(3), S(0), S(0)), S(3)),
    ("a grouped network everywhere", by_group(I, I, I), I),
    ("statistics of all rows", batch_statistics(S(0), TP), R),
    ("statistics of all tokens", batch_statistics(S(1), TP), R),
    ("statistics of one value", batch_statistics(I, ELSEWHERE), I),
    ("statistics of each rank's channels", batch_statistics(S(3), ELSEWHERE), S(1)),
    ("normalized rows", normalized(S(0), R, R, R), S(0)),
    ("normalized channels", normalized(S(3), S(1), S(0), S(0)), S(3)),
    ("normalized everywhere", normalized(I, I, I, I), I),
    ("means of images", on(ops.avg_pool2d, S(0), shape=PIXELS), S(0)),
    ("means of summands", on(ops.avg_pool2d, P, shape=PIXELS), P),
    ("pooled images", on(ops.max_pool2d, S(0), shape=PIXELS), S(0)),
    ("pooled channels", on(ops.max_pool2d, S(3), shape=PIXELS), S(3)),
    ("matmul rows", (ops.matmul, [((4, 6), S(0)), ((6, 3), R)]), S(0)),
    ("matmul columns", (ops.matmul, [((4, 6), R), ((6, 3), S(1))]), S(1)),
    ("matmul columns behind a batch", (ops.matmul, [((5, 4, 6), R), ((6, 3), S(1))]), S(2)),
    ("matmul sums over slices", (ops.matmul, [((5, 4, 6), S(2)), ((6, 3), S(0))]), P),
    ("matmul of samples", (ops.matmul, [((5, 4, 6), S(0)), ((5, 6, 3), S(0))]), S(0)),
    ("matmul of samples with one matrix", (ops.matmul, [((4, 6), R), ((5, 6, 3), S(0))]), S(0)),
    ("matmul of vectors", (ops.matmul, [((6,), S(0)), ((6,), S(0))]), P),
    ("vector and matrix", (ops.matmul, [((6,), R), ((6, 3), S(1))]), S(0)),
    ("matrix and vector", (ops.matmul, [((4, 6), S(0)), ((6,), R)]), S(0)),
    ("vector and matrices", (ops.matmul, [((6,), R), ((5, 6, 3), S(0))]), S(0)),
    ("matmul of summands", (ops.matmul, [((4, 6), R), ((6, 3), P)]), P),
    ("letters of matrices", einsum("ij,jk->ik", S(0), R), S(0)),
    ("letters of columns, in another order", einsum("ij,jk->ki", R, S(1)), S(0)),
    ("letters summed over slices", einsum("ij,jk->ik", S(1), S(0)), P),
    ("letters summed over slices of constants", einsum("ij,jk->ik", S(1), None), P),
    ("letters of a batch", einsum("bij,bjk->ibk", S(0), S(0)), S(1)),
    ("letters of summands", einsum("ij,jk->ik", P, R), P),
    ("letters of three, cut along a row", einsum("ij,jk,kl->il", S(0), R, R), S(0)),
    ("letters of three, summed over slices", einsum("ij,jk,kl->il", R, S(1), S(0)), P),
    ("a letter of one alone, summed", einsum("ij,jk->k", S(0), R), P),
    ("a diagonal beside the cut", einsum("bii->bi", S(0)), S(0)),
    # Rows.
    *[("norm", norm(s, w, w), s) for s, w in ((I, I), (R, R), (S(0), R), (S(1), R), (S(1), None))],
    *[("softmax along columns", on(lambda x: ops.softmax(x, -1), s), s) for s in (I, R, S(0), S(1))],
    ("softmax along tokens", on(lambda x: ops.softmax(x, 1), S(2)), S(2)),
    ("log softmax", on(lambda x: ops.log_softmax(x), S(1)), S(1)),
    ("softmax with a mask", on(lambda x: ops.softmax(x, -1, np.ones((4, 6), bool)), S(0)), S(0)),
    *[("attention", on(lambda x: ops.attention(x, 2), s), s) for s in (I, R, S(0), S(2))],
    *[("attention of a slice", on(lambda x, y: ops.slice_attention(x, [y], 2), s, s), s) for s in (I, R, S(0), S(2))],
    ("a slice after one of which nothing is known", on(lambda x, y: ops.slice_attention(x, [y], 2), S(2), None), S(2)),
    ("residual", on(ops.residual, S(1), S(1)), S(1)),
    ("residual with a bias", (ops.residual, [(X, S(1)), (X, S(1)), ((6,), R)]), S(1)),
    ("residual of summands", (lambda x, y: ops.residual(x, y, rows=ROWS, p=0.5), [(X, P), (X, P)]), P),
    *[("residual norm", residual_norm(s, s, w, w, w), s) for s, w in ((I, I), (S(1), R), (S(0), R))],
    *[("rms norm", (ops.rms_norm, [(X, s), ((6,), w)]), s) for s, w in ((I, I), (S(1), R), (S(0), R))],
    *[("residual rms norm", residual_rms_norm(s, s, w, w), s) for s, w in ((I, I), (S(1), R), (S(0), R))],
    *[("rotary", rotary(s), s) for s in (I, R, P, S(0), S(1), S(2))],
    *[("rotary of parts", pack_rotary(s, s), s) for s in (I, R, P, S(0), S(1), S(2))],
    *[("dropout", on(lambda x: ops.dropout(x, ROWS, 0.5), s), s) for s in (I, R, P, S(0), S(1), S(2))],
    *[("loss", loss(s), t) for s, t in ((I, I), (R, R), (S(0), P), (S(1), P))],
    # Running sums, and what is made of views.
    *[("running sum", on(lambda x: ops.cumsum(x, 2), s), s) for s in (I, R, P, S(0), S(1))],
    ("flip beside the cut", on(lambda x: ops.flip(x, (0, 2)), S(1)), S(1)),
    ("roll beside the cut", on(lambda x: ops.roll(x, 1, 0), S(1)), S(1)),
    ("repeat beside the cut", on(lambda x: ops.repeat(x, 2, 0), S(1)), S(1)),
    ("the product of elements", on(lambda x: ops.prod(x, 2), S(1)), S(1)),
    ("a condition", on(lambda x: ops.where(x > 0, x, 0.1 * x), S(1)), S(1)),
    ("places of all rows", on(lambda x: x[:, [1, 0], [2, 3]], S(0)), S(0)),
    # Sums.
    ("sum over slices", on(lambda x: x.sum(1), S(1)), P),
    ("sum of everything", on(lambda x: x.sum(), S(1)), P),
    ("sum of summands", on(lambda x: x.sum(1), P), P),
    ("mean of summands", on(lambda x: x.mean(1), P), P),
    ("sum before the dim", on(lambda x: x.sum(0), S(1)), S(0)),
    ("sum behind the dim", on(lambda x: x.sum(2), S(1)), S(1)),
    ("sum that keeps dims", on(lambda x: x.sum(0, keepdims=True), S(1)), S(1)),
    *[
        ("reduce", on(lambda x, f=f: f(x, (0, 2)), S(1)), S(0))
        for f in (ops.mean, ops.max, ops.min, ops.logsumexp, ops.var, ops.std)
    ],
    # Where dims go.
    ("heads apart", reshape(S(2), (2, 4, 6), (2, 4, 3, 2)), S(2)),
    ("heads together", reshape(S(2), (2, 4, 3, 2), (2, 4, 6)), S(2)),
    ("rows together", reshape(S(0), (2, 4, 6), (8, 6)), S(0)),
    ("rows apart", reshape(S(0), (8, 6), (2, 4, 6)), S(0)),
    ("not touched", reshape(S(1), (2, 4, 6), (2, 4, 3, 2)), S(1)),
    ("summands", reshape(P, (2, 4, 6), (48,)), P),
    ("a new dim", (lambda x, y: ops.expand(x, 1) + y, [(X, S(1)), ((2, 1, 4, 6), S(2))]), S(2)),
    ("one head", (lambda x, y: x.reshape(2, 4, 1, 6) * y, [(X, S(2)), ((2, 4, 1, 6), S(2))]), S(2)),
    ("one head, all its columns", (lambda x: ops.softmax(x.reshape(2, 4, 1, 6), -1), [(X, S(2))]), S(2)),
    ("one head, and back", (lambda x: x.reshape(2, 4, 1, 6).reshape(2, 4, 6), [(X, S(2))]), S(2)),
    ("one dim less", (lambda x: x.squeeze(0), [((1, 4, 6), S(1))]), S(0)),
    ("transpose", on(lambda x: x.transpose(2, 0, 1), S(1)), S(2)),
    ("swap", on(lambda x: x.swap(0, 2), S(0)), S(2)),
    ("repeat", (lambda x: ops.broadcast_to(x, (3, 4, 6)), [((4, 6), S(0))]), S(1)),
    ("concat beside the dim", on(lambda *x: ops.concat(x, 0), S(1), S(1)), S(1)),
    ("concat of slices", on(lambda *x: ops.concat(x, 1), S(1), S(1)), S(1)),
    ("concat of slices and copies", on(lambda *x: ops.concat(x, 2), S(2), R), S(2)),
    ("concat of summands", on(lambda *x: ops.concat(x, 2), P, P), P),
    ("concat of rows and many", (lambda *x: ops.concat(x, 0), [((1, 6), S(1)), ((4, 6), S(1))]), S(1)),
    ("split of slices", on(lambda x: ops.split(x, 2, 2), S(2)), S(2)),
    ("split beside the dim", on(lambda x: ops.split(x, 2, 0), S(2)), S(2)),
    ("stack", on(lambda *x: ops.stack(x, 0), S(1), S(1)), S(2)),
    ("pad", on(lambda x: ops.pad(x, [(1, 0), (0, 0), (0, 2)], 7.0), S(1)), S(1)),
    ("pad of summands", on(lambda x: ops.pad(x, [(1, 0), (0, 0), (0, 2)]), P), P),
    ("cast", on(lambda x: x.astype("float32"), P), P),
    ("the whole dim", on(lambda x: x[0, :], S(1)), S(0)),
    ("the whole dim, counted", on(lambda x: x[:, 0:4, 2:3], S(1)), S(1)),
    ("dots", on(lambda x: x[..., 0], S(1)), S(1)),
    ("dots in the middle", on(lambda x: x[0, ..., None, 1:], S(1)), S(0)),
    ("a part of a copy", on(lambda x: x[:, 1:2], R), R),
    ("rows of a table", take(R), R),
    ("rows of a cut table", take(S(1)), S(2)),
    ("rows of summands", take(P), P),
    ("columns of a cut table", take(S(0), 1), S(0)),
    ("one of each row", on(lambda x: ops.gather_along(x, np.zeros((2, 4, 1), np.int64)), S(1)), S(1)),
    # Rows that go to experts.
    *[("gates", on(lambda p: ops.gates(p, CHOICES), s), s) for s in (I, R, P, S(0), S(1))],
    *[("gates over their sum", on(lambda p: ops.gates(p, CHOICES, True), s), s) for s in (I, R, S(0), S(1))],
    *[
        ("rows of tokens", on(lambda x: ops.take_rows(x, np.arange(9) % 8), s), t)
        for s, t in ((I, I), (R, R), (P, P), (S(0), S(0)), (S(1), S(0)), (S(2), S(1)), (None, None))
    ],
    *[
        ("rows in another order", on(lambda x: ops.permute_rows(x, np.arange(8)[::-1]), s, shape=(8, 6)), s)
        for s in (I, P, S(0), S(1))
    ],
    *[("jitter", on(lambda x: ops.jitter(x, ROWS, 0.1), s), s) for s in (I, P, S(1))],
    ("to experts", on(sent_rows, S(0), shape=(8, 6)), sent(S(0))),
    ("to experts and back", on(lambda x: sent_rows(ops.gelu_tanh(sent_rows(x))), S(0), shape=(8, 6)), S(0)),
    ("experts here", grouped(S(0), S(0), sent_rows), sent(S(0))),
    ("experts everywhere", grouped(S(0), R), S(0)),
    ("columns of experts", grouped(R, S(2)), S(1)),
    ("rows of experts", grouped(S(1), S(1)), P),
    ("summands through experts", grouped(P, R), P),
    ("experts of one value", grouped(I, I), I),
    ("nothing is known of rows", grouped(None, S(0)), S(0)),
    ("nothing is known of experts", grouped(S(0), None, sent_rows), sent(S(0))),
    *[
        ("combine", combined(s, g), t)
        for s, g, t in ((S(0), S(0), S(0)), (S(0), S(1), S(1)), (P, R, P), (R, P, P), (S(1), R, S(2)), (I, I, I))
    ],
    ("combine with what came back", combined(S(0), S(1), lambda x: sent_rows(sent_rows(x))), S(1)),
    ("combine with constants", combined(None, S(1)), S(1)),
    (
        "combine with gates of which nothing is known",
        (lambda out, x: ops.combine(out, Tensor(np.ones((2, 4, 2))), PLACES) + x, [((16, 6), S(0)), (X, S(1))]),
        S(1),
    ),
    ("to experts in halves", on(in_halves, S(0), S(0), shape=(8, 6)), sent(S(0))),
    ("to experts in halves and back", on(lambda *x: sent_rows(in_halves(*x)), S(0), S(0), shape=(8, 6)), S(0)),
    ("back in halves", on(lambda *x: in_halves(*map(sent_rows, x)), S(0), S(0), shape=(8, 6)), S(0)),
    # Slices that changed places, in any op.
    ("columns of what was sent", on(lambda x: sent_rows(x).transpose(1, 0)[None], S(0), shape=(8, 6)), sent(S(2))),
    ("a sum of what was sent", on(lambda x: sent_rows(x).sum(), S(0), shape=(8, 6)), P),
    # Messages.
    ("copy", on(lambda x: collectives.copy(x, TP), I), R),
    ("all_reduce", on(lambda x: collectives.all_reduce(x, TP), P), I),
    ("sum_everywhere", on(lambda x: collectives.sum_everywhere(x, TP), P), R),
    ("all_gather", on(lambda x: collectives.all_gather(x, TP, 1), S(1)), R),
    ("all_gather, last dim", on(lambda x: collectives.all_gather(x, TP, -1), S(2)), R),
    ("reduce_scatter", on(lambda x: collectives.reduce_scatter(x, TP, -1), P), S(2)),
    ("gather", on(lambda x: collectives.gather(x, TP, 0), S(0)), I),
    ("split", on(lambda x: collectives.split(x, TP, 1), I), S(1)),
    ("pick", on(lambda x: collectives.pick(x, TP, 2, 1, 3), R), S(2)),
    ("all_to_all", on(lambda x: collectives.all_to_all(x, TP, 1, 2), S(1)), S(2)),
    ("shift", on(lambda x: collectives.shift(x, TP, 1, 1), S(1)), S(1)),
    ("a message about a constant", on(lambda x: collectives.all_reduce(x, TP), None), I),
    ("a statistic", on(lambda x: x - collectives.max_over(x, TP), S(1)), S(1)),
]


def after(message, state, op=ops.add, other=I):
    """What a message makes of x meets another value."""
    return (lambda x, y: op(message(x, TP), y)), [(X, state), (X, other)]


def rows(message):
    return lambda x, axis: message(x, axis, 1)


MISSING_SUM = "an all_reduce or reduce_scatter is missing before it"
COPY = "a copy of the Invariant one is missing"

WRONG = [
    # Summands.
    ("nonlinear", on(ops.gelu_tanh, P), f"gelu_tanh of a Partial value over tp; {MISSING_SUM}"),
    *[
        ("nonlinear", on(op, P), f"of a Partial value over tp; {MISSING_SUM}")
        for op in (ops.exp, ops.relu, lambda x: x**2, lambda x: 1 / x, lambda x: ops.clip(x, 0, 1), ops.softmax)
    ],
    ("square", on(lambda x: x * x, P), f"mul of two Partial values over tp; {MISSING_SUM}"),
    ("matmul of summands", on(ops.matmul, P, P, shape=(4, 4)), "matmul of two Partial values over tp"),
    ("larger of two", on(ops.maximum, P, P), "maximum of a Partial value"),
    *[
        (
            "what every rank adds",
            on(ops.add, P, s),
            rf"add of a Partial value and {words} one over tp; every rank would",
        )
        for s, words in ((I, "an Invariant"), (R, "a Replicate"), (S(1), r"a Shard\(1\)"))
    ],
    ("what every rank adds", on(ops.sub, I, P), "every rank would add the other one: an all_reduce or reduce_scatter"),
    ("zeros that learn", on(lambda x: x + Tensor(np.zeros(6), requires_grad=True), P), "Partial value and a constant"),
    ("a number", on(lambda x: x + 1.0, P), "add of a Partial value and a constant over tp; every rank would add"),
    (
        "a choice of a number",
        on(lambda x: ops.where(np.ones(6, bool), x, 1.0), P),
        "where of a Partial value and a const",
    ),
    ("times an Invariant", on(ops.mul, P, I), f"mul of an Invariant and a Partial value over tp; {COPY}"),
    ("times slices", on(ops.mul, P, S(1)), r"mul of a Partial value and a Shard\(1\) one over tp"),
    ("over summands", on(ops.div, R, P), "div of a Partial value"),
    (
        "a padding of ones",
        on(lambda x: ops.pad(x, [(0, 0), (0, 0), (0, 2)], 1.0), P),
        "pad with 1.0 of a Partial value",
    ),
    ("concat with others", on(lambda *x: ops.concat(x, 1), P, I), "concat of a Partial value and an Invariant one"),
    (
        "letters, half cut",
        einsum("ij,jk->ik", S(1), R),
        r"contract sums over dim 1 of a Shard\(1\) value, which is cut",
    ),
    ("letters, no copy", einsum("ij,jk->ik", I, S(1)), "contract of an Invariant and a .* value over tp; a copy"),
    ("letters of two summands", einsum("ij,jk->ik", P, P), f"contract of two Partial values over tp; {MISSING_SUM}"),
    ("running sum over slices", on(lambda x: ops.cumsum(x, 1), S(1)), r"cumsum along dim 1 of a Shard\(1\) value"),
    ("product over slices", on(lambda x: ops.prod(x, 1), S(1)), r"prod along dim 1 of a Shard\(1\) value"),
    ("product of summands", on(lambda x: ops.prod(x, 2), P), f"prod of a Partial value over tp; {MISSING_SUM}"),
    ("deviation of slices", on(lambda x: ops.std(x, 1), S(1)), r"std along dim 1 of a Shard\(1\) value"),
    ("flip of slices", on(lambda x: ops.flip(x, 1), S(1)), r"getitem of a part of dim 1 of a Shard\(1\) value"),
    # Invariant and others.
    *[("no copy", on(ops.add, I, s), f"add of an Invariant and a {s.name}.* value over tp; {COPY}") for s in (R, S(1))],
    (
        "no copy before a column",
        linear(I, S(1), S(0)),
        r"linear of an Invariant and a Shard\(2\) value over tp; a copy",
    ),
    ("no copy of a weight", linear(S(1), I, "none"), COPY),
    ("no copy of a bias", linear(S(1), R, I), COPY),
    ("no copy of a norm", norm(S(1), I, R), COPY),
    ("no copy of a norm's bias", norm(S(1), R, I), COPY),
    ("no copy of a branch's bias", residual_norm(S(1), S(1), I, R, R), COPY),
    ("no copy of the norm after a branch", residual_norm(S(1), S(1), R, R, I), COPY),
    ("no copy of a branch's bias before an rms norm", residual_rms_norm(S(1), S(1), I, R), COPY),
    ("no copy of the rms norm after a branch", residual_rms_norm(S(1), S(1), R, I), COPY),
    ("no copy of an rms norm", (ops.rms_norm, [(X, S(1)), ((6,), I)]), COPY),
    ("no copy of keys and values", pack_rotary(S(2), I), COPY),
    ("no copy of the stream", on(ops.residual, I, S(1)), COPY),
    ("branch not summed", on(ops.residual, I, P), "residual of a Partial value and an Invariant one"),
    # Invariant and others, of which a message made one: its twin makes both fit.
    *[
        ("another message", program, rf" of an Invariant and a {state} value over tp; {twin} gives {state_of_twin} \(")
        for program, state, twin, state_of_twin in (
            (
                after(collectives.sum_everywhere, P, ops.residual),
                "Replicate",
                "all_reduce in place of sum_everywhere",
                "Invariant",
            ),
            (after(rows(collectives.all_gather), S(1)), "Replicate", "gather in place of all_gather", "Invariant"),
            (
                after(rows(collectives.reduce_scatter), P),
                r"Shard\(1\)",
                "all_reduce in place of reduce_scatter",
                "Invariant",
            ),
            (
                after(collectives.all_reduce, P, other=S(1)),
                r"Shard\(1\)",
                "reduce_scatter in place of all_reduce",
                "Shard.1.",
            ),
            (
                after(rows(collectives.gather), S(1), other=S(2)),
                r"Shard\(2\)",
                "all_gather in place of gather",
                "Replicate",
            ),
        )
    ],
    (
        "a statistic for all",
        (lambda x: x / collectives.all_reduce(x.sum(-1, keepdims=True), TP), [(X, S(2))]),
        "; sum_everywhere in place of all_reduce gives Replicate",
    ),
    (
        "a sum that other ops have changed since",
        (lambda x, y: collectives.all_reduce(x, TP) * 2.0 + y, [(X, P), (X, S(1))]),
        rf"add of an Invariant and a Shard\(1\) value over tp; {COPY}, or a gather of the other \(Invariant from all_r",
    ),
    (
        "a copy of a copy",
        on(lambda x: collectives.copy(collectives.copy(x, TP), TP), I),
        r"copy of a Replicate value over tp; this copy is doubled: .* already \(from copy at",
    ),
    ("a copy for all", after(collectives.copy, I), "; the value before that copy is Invariant"),
    (
        "copied after a sum",
        on(lambda x: collectives.copy(collectives.sum_everywhere(x, TP), TP), P),
        "copy of a Replicate value over tp; all_reduce in place of sum_everywhere gives Invariant",
    ),
    # Slices.
    ("other slices", on(ops.add, S(0), S(1)), r"add of a Shard\(0\) and a Shard\(1\) value over tp; an all_to_all or"),
    ("other slices of a bias", (ops.add, [(X, S(2)), ((4, 6), S(0))]), r"add of a Shard\(2\) and a Shard\(1\) value"),
    ("stretched", (ops.add, [((1, 6), S(0)), ((4, 6), R)]), r"add repeats dim 0 of a Shard\(0\) value"),
    ("repeated", (lambda x: ops.broadcast_to(x, (4, 6)), [((1, 6), S(0))]), r"broadcast_to repeats dim 0 of a Shard"),
    ("concat of other slices", on(lambda *x: ops.concat(x, 0), S(1), S(2)), r"concat of a Shard\(1\) and a Shard\(2\)"),
    (
        "columns and tokens",
        linear(S(1), S(1), "none"),
        r"linear of a Shard\(1\) and a Shard\(2\) value over tp; an all_to",
    ),
    # Products that sum over slices.
    (
        "half a contraction",
        linear(S(2), R, "none"),
        r"linear sums over dim 2 of a Shard\(2\) value, which is cut, with a Rep",
    ),
    (
        "half a contraction",
        linear(I, S(0), "none"),
        r"linear sums over dim 0 of a Shard\(0\) value, which is cut, with an Inv",
    ),
    ("half a contraction", linear(P, S(0), "none"), "an all_gather of it is missing, or the other must be Shard"),
    (
        "a bias in summands",
        linear(S(2), S(0), I),
        "linear adds a bias to a Partial product over tp; every rank would add it",
    ),
    ("a bias in summands", linear(S(2), S(0), R), "add the bias after an all_reduce or reduce_scatter"),
    ("a bias in summands", linear(P, R, None), "linear adds a bias to a Partial product"),
    # Images.
    (
        "a part of each image",
        conv2d(S(1), R, R),
        r"conv2d among the pixels of a Shard\(1\) value, a part of each image over tp; an all_gather is missing",
    ),
    (
        "pooled parts",
        on(ops.max_pool2d, S(2), shape=(2, 4, 4, 6)),
        r"max_pool2d among the pixels of a Shard\(2\) value",
    ),
    (
        "pooled summands",
        on(ops.max_pool2d, P, shape=(2, 4, 4, 6)),
        f"max_pool2d of a Partial value over tp; {MISSING_SUM}",
    ),
    ("channels of some groups", by_group(S(3), R, R), r"conv2d in 2 groups with a Shard\(3\) value as input 0 over tp"),
    ("filters of some groups", by_group(R, S(0), R), r"conv2d in 2 groups with a Shard\(0\) value as input 1 over tp"),
    (
        "statistics of this rank's rows",
        batch_statistics(S(0), ELSEWHERE),
        r"batch_statistics of a Shard\(0\) value, over the rows of this rank alone over tp; its axis must have all",
    ),
    ("statistics of channels for rows", batch_statistics(S(3), TP), r"batch_statistics of a Shard\(3\) value over tp"),
    ("statistics of summands", batch_statistics(P, ELSEWHERE), "batch_statistics of a Partial value over tp"),
    ("normalized summands", normalized(P, R, R, R), "normalize of a Partial value over tp"),
    ("channels without their statistics", normalized(S(3), I, S(0), S(0)), "normalize of .* Invariant"),
    ("parts of means", on(ops.avg_pool2d, S(2), shape=PIXELS), r"avg_pool2d among the pixels of a Shard\(2\) value"),
    ("windows cut", conv2d(R, S(1), R), r"a Shard\(1\) value over tp; Shard\(0\) cuts between filters"),
    (
        "half the channels",
        conv2d(S(3), R, "none"),
        r"conv2d sums over dim 3 of a Shard\(3\) value, which is cut, with a Rep",
    ),
    ("filters without a copy of the images", conv2d(I, S(0), S(0)), r"conv2d of an Invariant and a Shard\(3\) value"),
    (
        "a bias in summands",
        conv2d(S(3), S(3), R),
        "conv2d adds a bias to a Partial product over tp; every rank would add",
    ),
    ("half a matmul", (ops.matmul, [((4, 6), R), ((6, 3), S(0))]), "matmul sums over dim 0"),
    ("outer product", (ops.matmul, [((4, 6), S(0)), ((6, 3), S(1))]), r"matmul of a Shard\(0\) and a Shard\(1\) value"),
    # Rows.
    (
        "norm along slices",
        norm(S(2), R, R),
        r"layer_norm along dim 2 of a Shard\(2\) value over tp; an all_gather is missing",
    ),
    ("norm of summands", norm(P, R, R), f"layer_norm of a Partial value over tp; {MISSING_SUM}"),
    ("norm after a branch", residual_norm(S(2), S(2), S(0), R, R), r"residual_norm along dim 2 of a Shard\(2\) value"),
    ("norm after summands", residual_norm(P, P, P, R, R), f"residual_norm of a Partial value over tp; {MISSING_SUM}"),
    (
        "rms norm of summands",
        (ops.rms_norm, [(X, P), ((6,), R)]),
        f"rms_norm of a Partial value over tp; {MISSING_SUM}",
    ),
    ("rms norm along slices", (ops.rms_norm, [(X, S(2)), ((6,), R)]), r"rms_norm along dim 2 of a Shard\(2\) value"),
    ("rms norm after a branch", residual_rms_norm(S(2), S(2), S(0), R), "residual_rms_norm along dim 2 of a Shard"),
    ("gate and up of summands", on(ops.swiglu, P, P), f"swiglu of a Partial value over tp; {MISSING_SUM}"),
    ("softmax along slices", on(ops.softmax, S(2)), r"softmax along dim 2 of a Shard\(2\) value"),
    ("log softmax along slices", on(lambda x: ops.log_softmax(x, 0), S(0)), r"log_softmax along dim 0 of a Shard\(0\)"),
    (
        "attention among tokens",
        on(lambda x: ops.attention(x, 2), S(1)),
        r"attention over axis tp is missing \(parallel\.context",
    ),
    (
        "attention to cut earlier tokens",
        on(lambda x, y: ops.slice_attention(x, [y], 2), None, S(1)),
        "slice_attention among the tokens of a Shard",
    ),
    ("attention to summands", on(lambda x, y: ops.slice_attention(x, [y], 2), I, P), "slice_attention of a Partial"),
    (
        "other heads of an earlier slice",
        on(lambda x, y: ops.slice_attention(x, [y], 2), S(2), I),
        "slice_attention of an Invariant and a Shard",
    ),
    ("attention of summands", on(lambda x: ops.attention(x, 2), P), "attention of a Partial value"),
    (
        "loss over slices",
        loss(S(2)),
        r"softmax_cross_entropy over the classes of a Shard\(2\) value over tp; the loss over a cut",
    ),
    ("loss of summands", loss(P), "softmax_cross_entropy of a Partial value"),
    # Sums.
    ("mean over slices", on(lambda x: x.mean(1), S(1)), "the mean of a part is not a part of the mean"),
    *[
        ("over slices", on(lambda x, f=f: f(x, 1), S(1)), rf"{f.__name__} along dim 1 of a Shard\(1\) value")
        for f in (ops.max, ops.min, ops.logsumexp, ops.var)
    ],
    ("largest summand", on(lambda x: x.max(1), P), "max of a Partial value"),
    # Where dims go.
    (
        "tokens among rows",
        reshape(S(1), (2, 4, 6), (8, 6)),
        r"reshape of a Shard\(1\) value to 2 dims over tp",
    ),
    ("q|k|v before heads", reshape(S(3), (2, 4, 3, 2), (2, 4, 6)), "its slices would not be slices of the result"),
    (
        "padded slices",
        on(lambda x: ops.pad(x, [(0, 0), (1, 0), (0, 0)]), S(1)),
        r"pad along dim 1 of a Shard\(1\) value",
    ),
    *[
        ("a part of the dim", on(lambda x, i=i: x[i], S(1)), r"getitem of a part of dim 1 of a Shard\(1\) value")
        for i in (
            (slice(None), 0),
            (0, slice(1, None)),
            (..., slice(0, 3), slice(None)),
            (None, 0, slice(None, None, 2)),
        )
    ],
    (
        "a cut table",
        take(S(0)),
        r"take by number along dim 0 of a Shard\(0\) value over tp; a lookup over the axis is missing",
    ),
    (
        "of slices one",
        on(lambda x: ops.gather_along(x, np.zeros((2, 4, 1), np.int64)), S(2)),
        "gather_along along dim 2",
    ),
    # Messages.
    (
        "summed twice",
        on(lambda x: collectives.all_reduce(x, TP), I),
        "this all_reduce is doubled: the value is summed already",
    ),
    ("a sum of copies", on(lambda x: collectives.all_reduce(x, TP), R), "the sum would be a multiple of it"),
    (
        "a sum of slices",
        on(lambda x: collectives.all_reduce(x, TP), S(1)),
        "slices, not summands: an all_gather or gather",
    ),
    ("scattered twice", on(lambda x: collectives.reduce_scatter(x, TP, 1), I), "this reduce_scatter is doubled"),
    ("scattered slices", on(lambda x: collectives.reduce_scatter(x, TP, 1), S(1)), "slices, not summands"),
    ("summed everywhere twice", on(lambda x: collectives.sum_everywhere(x, TP), R), "a multiple of it"),
    (
        "copied twice",
        on(lambda x: collectives.copy(x, TP), R),
        "this copy is doubled: each rank has a copy of its own already",
    ),
    (
        "copied summands",
        on(lambda x: collectives.copy(x, TP), P),
        "copy of a Partial value over tp; an all_reduce is missing",
    ),
    ("copied slices", on(lambda x: collectives.copy(x, TP), S(1)), "a gather is missing before it"),
    (
        "gathered twice",
        on(lambda x: collectives.all_gather(x, TP, 1), R),
        "this all_gather is doubled: every rank holds the whole",
    ),
    ("gathered twice", on(lambda x: collectives.gather(x, TP, 1), I), "this gather is doubled"),
    ("gathered summands", on(lambda x: collectives.all_gather(x, TP, 1), P), "a reduce_scatter is meant"),
    (
        "gathered along another",
        on(lambda x: collectives.all_gather(x, TP, 1), S(2)),
        "cut along dim 2, not along dim 1",
    ),
    ("split twice", on(lambda x: collectives.split(x, TP, 1), S(1)), "slices of it already"),
    ("a copy split", on(lambda x: collectives.split(x, TP, 1), R), "this split is doubled: each rank has a copy"),
    ("picked from one value", on(lambda x: collectives.pick(x, TP, 2, 0, 1), I), "a copy is missing before it"),
    ("picked from slices", on(lambda x: collectives.pick(x, TP, 2, 0, 1), S(2)), "an all_gather is missing before it"),
    (
        "picked from summands",
        on(lambda x: collectives.pick(x, TP, 2, 0, 1), P),
        "a sum_everywhere is missing before it",
    ),
    (
        "exchanged along another",
        on(lambda x: collectives.all_to_all(x, TP, 1, 2), S(2)),
        "cut along dim 2, not along dim 1",
    ),
    # Rows that go to experts.
    ("gates of cut experts", on(lambda p: ops.gates(p, CHOICES), S(2)), r"gates along dim 2 of a Shard\(2\) value"),
    (
        "gates over a sum of cut experts",
        on(lambda p: ops.gates(p, CHOICES, True), S(2)),
        r"normalized_gates along dim 2 of a Shard\(2\) value",
    ),
    ("gates over a sum of summands", on(lambda p: ops.gates(p, CHOICES, True), P), "normalized_gates of a Partial"),
    (
        "rows that were not sent",
        grouped(S(0), S(0)),
        r"grouped_matmul of a Shard\(0\) value by experts of which each rank has some over tp; an all_to_all of",
    ),
    *[("rows that nobody cut", grouped(s, S(0)), "an all_to_all of the rows to their experts is") for s in (I, R, P)],
    (
        "rows that were sent twice",
        grouped(S(0), S(0), lambda x: sent_rows(sent_rows(x))),
        "an all_to_all of the rows to their experts is missing",
    ),
    *[
        (
            "experts that all ranks have",
            grouped(S(0), w, sent_rows),
            rf"grouped_matmul of a Sent\(0\) value, rows that were sent to their experts, by {a} {w} weight over tp; "
            r"the weight must be Shard\(0\), each rank has its own experts",
        )
        for w, a in ((R, "a"), (I, "an"))
    ],
    (
        "no copy before experts",
        grouped(I, S(2)),
        rf"grouped_matmul of an Invariant and a Shard\(1\) value over tp; {COPY}",
    ),
    (
        "slices of experts' rows",
        grouped(R, S(1)),
        r"sums over dim 1 of a Shard\(1\) value, which is cut, with a Replicate",
    ),
    (
        "rows of tokens and columns of experts",
        grouped(S(0), S(2)),
        r"grouped_matmul of a Shard\(0\) and a Shard\(1\) value",
    ),
    (
        "combined where the experts are",
        combined(S(0), S(0), sent_rows),
        r"combine of a Sent\(0\) value, rows that are with their experts over tp; an all_to_all back to",
    ),
    ("gates that are not copied", combined(P, I), f"combine of an Invariant and a Partial value over tp; {COPY}"),
    (
        "gates that are not gathered",
        combined(P, S(1)),
        r"combine of a Partial value with a Shard\(1\) one as its gates over tp; .* an all_gather of the gates is",
    ),
    ("gates of all tokens", combined(S(0), R), "the rows are those of this rank's tokens, the gates those of all"),
    (
        "gates of some choices",
        combined(R, S(2)),
        r"combine over the choices of a Shard\(2\) value over tp; an all_gather",
    ),
    ("summands with summands", combined(P, P), "combine of two Partial values"),
    (
        "what was sent and what was not",
        on(lambda x: x + sent_rows(x), S(0), shape=(8, 6)),
        r"add of a Shard\(0\) and a Sent\(0\) value over tp; an all_to_all",
    ),
    (
        "what was sent, gathered",
        on(lambda x: collectives.all_gather(sent_rows(x), TP), S(0), shape=(8, 6)),
        r"all_gather of a Sent\(0\) value over tp; its slices are where an all_to_all has brought them: one back is",
    ),
    (
        "halves that are not both sent",
        on(lambda x, y: in_halves(sent_rows(x), y), S(0), S(0), shape=(8, 6)),
        "as input 1",
    ),
    (
        "whole halves to experts",
        on(in_halves, R, R, shape=(8, 6)),
        "this arrive is doubled: every rank holds the whole",
    ),
    ("whole rows to experts", on(sent_rows, R, shape=(8, 6)), "this all_to_all is doubled: every rank holds the whole"),
    ("passed on whole", on(lambda x: collectives.shift(x, TP, 1, 1), R), "this shift is doubled"),
    ("exchanged whole", on(lambda x: collectives.all_to_all(x, TP, 1, 2), R), "this all_to_all is doubled"),
]


@pytest.mark.parametrize(
    ("program", "state"), [case[1:] for case in RIGHT], ids=[f"{i} {case[0]}" for i, case in enumerate(RIGHT)]
)
def test_a_program_that_is_right_passes_with_its_state(program, state):
    run, inputs = program
    assert states_of(run, *inputs) == state


@pytest.mark.parametrize(
    ("program", "words"), [case[1:] for case in WRONG], ids=[f"{i} {case[0]}" for i, case in enumerate(WRONG)]
)
def test_a_program_that_is_wrong_is_refused_with_the_message_that_it_lacks(program, words):
    run, inputs = program
    with pytest.raises(StateError, match=words) as caught:
        states_of(run, *inputs)
    text = str(caught.value)
    assert text.startswith(("at test_states.py:", "at one_axis.py:", "at overlap.py:")), text
    assert "over tp" in text
    assert text.count("\n") <= 2


def test_parts_that_arrive_lie_alike_on_axes_over_which_they_do_not_travel():
    rows = (8, 6)
    assert states_of(in_halves, (rows, S(0)), (rows, S(0)), axis="cp") == S(0)
    assert states_of(in_halves, (rows, P), (rows, P), axis="cp") == P
    with pytest.raises(StateError, match=r"arrive of a Shard\(0\) and a Replicate value over cp; all parts must be in"):
        states_of(in_halves, (rows, S(0)), (rows, R), axis="cp")


def test_the_errors_that_the_page_shows_are_those_of_today():
    """States and duals: the examples that need neither a parameter nor another axis."""
    said = set()
    for _, (program, inputs), _ in WRONG:
        with pytest.raises(StateError) as caught:
            states_of(program, *inputs)
        said.add(re.sub(r"^at \S+ | \((\S+ )?from .*", "", str(caught.value).splitlines()[0]))
    page = (Path(__file__).parents[2] / "docs/explanation/states-and-duals.md").read_text(encoding="utf-8")
    lines = [line.replace(" over ep; ", " over tp; ") for line in page.splitlines()]  # rules are the same on every axis
    others = ("at ", "an auxiliary loss")
    shown = [line for line in lines if " over tp; " in line and "spec of" not in line and not line.startswith(others)]
    assert len(shown) == 8
    for line in shown:
        words = re.sub(r" \((\S+ )?from .*", "", line)
        assert words in said


def called(table):
    """The ops that programs call: of those that are wrong the last one, which was refused."""
    found = set()
    for _, (program, inputs), outcome in table:
        events = []
        with listen(events.append), contextlib.suppress(StateError):
            states_of(program, *inputs)
        found.update(event.info["function"] for event in (events[-1:] if isinstance(outcome, str) else events))
    return found


def test_every_rule_and_every_arrow_has_programs_that_are_right():
    assert set(RULES) - called(RIGHT) == set()
    assert set(collectives.ARROWS) - called(RIGHT) == set()


def test_every_rule_and_every_arrow_has_programs_that_are_wrong():
    pass_all = {collectives.MaxOver, SendOff, Split, Transpose, Sum, Dropout, TakeRows, PermuteRows, Jitter, Rotary}
    assert set(RULES) - called(WRONG) == pass_all
    assert set(collectives.ARROWS) - called(WRONG) == set()


ELEMENTWISE = """Abs Add Cast Clip Cos Div EnterBranch Erf Exp GeluErf GeluTanh LeaveBranch Log Maximum Minimum Mul Neg
    Pow Power Relu Scale Sigmoid Silu Sin Softplus Sqrt Sub Swiglu Tanh Where""".split()


def test_every_op_has_a_rule_or_works_element_by_element():
    """Fails for a new op until its rule is thought of: in RULES, or in the list above."""
    found = {
        value
        for module in pkgutil.iter_modules(mpitrain.autograd.ops.__path__)
        for value in vars(importlib.import_module(f"mpitrain.autograd.ops.{module.name}")).values()
        if isinstance(value, type) and issubclass(value, Function) and value is not Function
    }
    assert sorted(f.__name__ for f in found if rule_of(f) is elementwise) == ELEMENTWISE


def test_factors_may_change_places_in_products_only():
    products = [Mul, Matmul, Linear, GroupedMatmul, Combine, Conv2d]
    assert [f for f in (*products, Add, Div, Residual) if f.bilinear] == products
