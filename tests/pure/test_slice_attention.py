"""T15.1 for attention: any slicing of a sequence gives the values and gradients of the whole."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from op_calls import BOTH_ENDS, assert_same, run

from mpitrain import kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.autograd.carry import Carry
from mpitrain.autograd.gradcheck import check
from mpitrain.backend import dtype_of
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.tokens import Batch
from mpitrain.errors import ShapeError
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.pipeline.partition import Partition
from mpitrain.rng import Draw

S = 12
SLICINGS = {
    "whole": [12],
    "halves": [6, 6],
    "later ones shorter": [5, 4, 3],
    "uneven": [1, 7, 1, 3],
    "single tokens": [1] * 12,
}
HEADS = {"own keys": (3, 3), "groups": (6, 2), "one group": (4, 1)}
EACH_SLICING = pytest.mark.parametrize("lengths", SLICINGS.values(), ids=SLICINGS)
EACH_HEADS = pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)


@pytest.fixture(autouse=True, params=BOTH_ENDS)
def level(request):
    kernels.select(request.param)
    return request.param


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def packed(heads, kv_heads, s=S, d=4):
    return normal(2, s, (heads + 2 * kv_heads) * d)


def draw(start=0, stop=S):
    return Draw(1, 2, np.arange(2), np.arange(start, stop))


def places(lengths):
    return list(itertools.pairwise([0, *itertools.accumulate(lengths)]))


def options(heads, drop, start=0, stop=S):
    """Dropout of the places from start to stop, drawn as a slice of a batch draws it."""
    return {"rows": draw(start, stop).attention_rows("w", heads), "drop": drop} if drop else {}


def in_slices(lengths, heads, kv_heads, drop=0.0, mask=None, window=None):
    """The whole by its slices, on one tape."""

    def function(qkv):
        slices = [qkv[:, start:stop] for start, stop in places(lengths)]
        parts = []
        for i, (start, stop) in enumerate(places(lengths)):
            how = options(heads, drop, start, stop)
            how["mask"] = None if mask is None else mask[:, start:stop, :stop]
            parts.append(ops.slice_attention(slices[i], slices[:i], heads, kv_heads, window=window, **how))
        return ops.concat(parts, 1)

    return function


@EACH_SLICING
@EACH_HEADS
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_any_slicing_is_the_whole(lengths, heads, kv_heads, drop):
    qkv = packed(heads, kv_heads)
    whole = run(lambda x: ops.attention(x, heads, kv_heads, **options(heads, drop)), qkv)
    assert_same(run(in_slices(lengths, heads, kv_heads, drop), qkv), whole)


@EACH_SLICING
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_documents_in_slices_are_those_of_the_whole(lengths, drop):
    """Some slices see nothing of the earlier ones, and padding (the last two of sample 1) sees nothing at all."""
    documents = np.array([[0] * 6 + [1] * 6, [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, -1, -1]])
    mask = (documents[:, :, None] == documents[:, None]) & (documents[:, :, None] >= 0)
    qkv = packed(4, 2)
    whole = run(lambda x: ops.attention(x, 4, 2, mask=mask, **options(4, drop)), qkv)
    assert_same(run(in_slices(lengths, 4, 2, drop, mask), qkv), whole)


@EACH_SLICING
@pytest.mark.parametrize("window", [1, 2, 5, 11])
def test_slices_of_a_sliding_window_are_those_of_the_whole(lengths, window):
    """Also those of which no query of a later slice sees a key, with dropout by place and a mask."""
    qkv, mask = packed(4, 2), normal(2, S, S) > -1
    for how in ({}, {"drop": 0.3}, {"mask": mask}, {"mask": mask, "drop": 0.3}):
        drop = how.get("drop", 0.0)
        whole = run(lambda x, how=how, drop=drop: ops.attention(x, 4, 2, window=window, **how | options(4, drop)), qkv)
        assert_same(run(in_slices(lengths, 4, 2, window=window, **how), qkv), whole)


def test_slices_before_the_window_are_not_touched():
    slices = [Tensor(packed(1, 1, 4), requires_grad=True) for _ in range(4)]
    with Tape() as tape:
        y = ops.slice_attention(slices[3], slices[:3], 1, window=3)
    assert not any(array is slices[1].data for array in tape.saved_of(tape.nodes[-1]))
    grads = tape.run_backward([(y, np.ones(y.shape))])
    assert [each in grads for each in slices] == [False, False, True, True]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@EACH_SLICING
def test_slices_of_halves_are_merged_in_single_precision(half, lengths):
    """A result is off by a last place of its own and little more; a gradient, the sum of those of slices, by two of the
    largest."""
    half = dtype_of(half)
    place = 2.0 ** (-10 if half == np.float16 else -7)
    qkv = packed(4, 2).astype(half)
    (y, (dx,)), (z, (dz,)) = (run(f, qkv) for f in (in_slices(lengths, 4, 2, 0.3), in_slices([S], 4, 2, 0.3)))
    assert y.dtype == dx.dtype == half
    y, z, dx, dz = (x.astype(np.float64) for x in (y, z, dx, dz))
    assert (np.abs(y - z) <= place * (np.abs(z) + np.abs(z).max() / 64)).all()
    assert np.abs(dx - dz).max() <= 2 * place * np.abs(dz).max()


def test_long_slices_have_several_blocks_of_queries():
    qkv = packed(2, 1, s=300)
    whole = run(lambda x: ops.attention(x, 2, 1), qkv)
    assert_same(run(in_slices([170, 100, 30], 2, 1), qkv), whole)


@EACH_SLICING
def test_slices_on_tapes_of_their_own_are_the_whole(lengths):
    """Through a Carry: each slice forward on its own tape, then backward from the last to the first."""
    heads, kv_heads, drop = 6, 2, 0.3
    x, weight = normal(2, S, 5), normal(5, (heads + 2 * kv_heads) * 4)
    seed = normal(2, S, heads * 4, seed=1)
    how = options(heads, drop)
    whole = run(lambda x, w: ops.attention(x @ w, heads, kv_heads, **how), x, weight, seed=seed)

    w = Tensor(weight, requires_grad=True)
    carry, flying, d_weight = Carry(), [], 0.0
    d_x = np.full(x.shape, np.nan)
    for part, (start, stop) in enumerate(places(lengths)):
        with Tape() as tape:
            carry.begin(part)
            inputs = Tensor(x[:, start:stop], requires_grad=True)
            qkv = inputs @ w
            past = carry.earlier("qkv")
            carry.keep("qkv", qkv)
            y = ops.slice_attention(qkv, past, heads, kv_heads, **options(heads, drop, start, stop))
        flying.append((tape, inputs, y))
    values = np.concatenate([y.data for _, _, y in flying], 1)
    for part, (start, stop) in reversed(list(enumerate(places(lengths)))):
        tape, inputs, y = flying.pop()
        grads = tape.run_backward([(y, seed[:, start:stop]), *carry.seeds(part)])
        carry.pass_back(part, tape)
        assert set(grads) == {inputs, w}
        d_x[:, start:stop] = grads[inputs]
        d_weight = d_weight + grads[w]
    assert_same((values, [d_x, d_weight]), whole)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "b", "lengths", "d"),
    [
        (2, 2, 2, [2, 1, 3], 3),
        (4, 2, 1, [3, 2], 2),
        (2, 1, 0, [2, 2], 2),
        (2, 1, 1, [2, 0], 2),
        (2, 1, 1, [0, 3, 2], 1),
    ],
)
def test_gradient_of_a_slice(heads, kv_heads, b, lengths, d):
    width = (heads + 2 * kv_heads) * d
    check(
        lambda x, *past: ops.slice_attention(x, past, heads, kv_heads),
        normal(b, lengths[-1], width),
        *(normal(b, length, width, seed=i) for i, length in enumerate(lengths[:-1])),
    )


def test_gradient_of_a_slice_with_everything():
    rows = draw(4, 7).attention_rows("w", 4)
    mask = np.random.default_rng(3).random((2, 4, 3, 7)) > 0.3
    check(
        lambda x, *past: ops.slice_attention(x, past, 4, 2, mask=mask, rows=rows, drop=0.5),
        normal(2, 3, 24),
        normal(2, 1, 24, seed=1),
        normal(2, 3, 24, seed=2),
    )


@pytest.mark.parametrize("shape", [(2, 7), (2, 3, 7), (1, 1, 1, 7), (2, 1, 3, 1)])
def test_masks_broadcast_as_for_attention(shape):
    mask = np.random.default_rng(4).random(shape) > 0.3
    wide = mask[:, None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
    qkv, past = normal(2, 3, 24), normal(2, 4, 24, seed=1)
    full = np.ascontiguousarray(np.broadcast_to(wide, (2, 4, 3, 7)))
    one, other = (run(lambda x, p, m=m: ops.slice_attention(x, [p], 4, 2, mask=m), qkv, past) for m in (mask, full))
    assert_same(one, other, 1e-14)


def test_queries_of_earlier_slices_are_not_looked_at():
    qkv, past = normal(2, 3, 24), normal(2, 4, 24, seed=1)
    other = past.copy().reshape(2, 4, 2, 4, 3)
    other[:, :, :, :2] = np.nan
    (y, (dx, dp)), (z, (dz, dq)) = (
        run(lambda x, p: ops.slice_attention(x, [p], 4, 2), qkv, p) for p in (past, other.reshape(past.shape))
    )
    for mine, theirs in ((y, z), (dx, dz), (dp, dq)):
        np.testing.assert_array_equal(mine, theirs)
    assert not dp.reshape(other.shape)[:, :, :, :2].any()


def test_the_first_slice_is_attention_to_the_last_bit():
    qkv = packed(4, 2)
    (y, (dx,)), (z, (dz,)) = (
        run(f, qkv) for f in (lambda x: ops.slice_attention(x, [], 4, 2), lambda x: ops.attention(x, 4, 2))
    )
    np.testing.assert_array_equal(y, z)
    np.testing.assert_array_equal(dx, dz)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_slices_in_other_precisions(dtype):
    qkv = packed(4, 2).astype(dtype)
    y, (dx,) = run(in_slices([5, 4, 3], 4, 2, 0.3), qkv)
    z, (dz,) = run(in_slices([5, 4, 3], 4, 2, 0.3), qkv.astype(np.float64))
    assert y.dtype == dx.dtype == dtype
    tolerance = 5e-3 if dtype is np.float16 else 1e-5
    np.testing.assert_allclose(y, z, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(dx, dz, rtol=tolerance, atol=tolerance)


def test_a_slice_keeps_only_its_own_result_besides_what_exists():
    past = [Tensor(np.zeros((2, length, 24), np.float32), requires_grad=True) for length in (64, 32)]
    with Tape() as tape:
        ops.slice_attention(Tensor(np.zeros((2, 16, 24), np.float32), requires_grad=True), past, 2)
    earlier = sum(each.data.nbytes for each in past)
    assert tape.nbytes == earlier + (2 * 16 * 24 + 2 * 16 * 8 + 2 * 2 * 16) * 4  # qkv, output, a number a query


def test_what_is_no_earlier_slice_is_refused():
    qkv = Tensor(np.zeros((2, 3, 24)))
    for wrong in (np.zeros((1, 4, 24)), np.zeros((2, 4, 12)), np.zeros((2, 4, 24), np.float32), np.zeros((2, 24))):
        with pytest.raises(
            ShapeError, match=r"slice attention: earlier slice 1 is \(.*wanted is \(2, any length, 24\)"
        ):
            ops.slice_attention(qkv, [qkv, Tensor(wrong)], 4, 2)
    with pytest.raises(ShapeError, match=r"rows \(2, 4, 7\); wanted is .* \(2, 4, 3\)"):
        ops.slice_attention(qkv, [qkv], 4, 2, rows=np.zeros((2, 4, 7), np.uint64), drop=0.1)
    with pytest.raises(ShapeError, match=r"\(2, 6\) by key or \(2, 3, 6\) by query and key"):
        ops.slice_attention(qkv, [qkv], 4, 2, mask=np.ones((2, 3), bool))


# ------------------------------------------------------------------------------------------------------ a whole model


@pytest.fixture
def documents():
    """Several a row; the first row ends in padding, which has no targets."""
    numbers = np.arange(3 * S).reshape(3, S) * 5 % 17 // 6
    numbers.sort(axis=1)
    numbers[0, -2:] = -1
    return numbers


def model_and_batch(documents, kv_heads):
    sizes = GPTConfig(vocab=11, layers=3, width=12, heads=4, seq_len=S, dropout=0.2, kv_heads=kv_heads, tied=True)
    model = GPT(sizes, Mesh(World(Alone(), "none")), partition=Partition((1, 2)), seed=3, dtype=np.float64)
    tokens = np.random.default_rng(0).integers(0, 11, (3, S + 1))
    targets = np.where(documents < 0, ops.IGNORE, tokens[:, 1:]) if documents is not None else tokens[:, 1:]
    batch = Batch(tokens[:, :-1], targets, np.arange(3), np.arange(S), step=4, documents=documents)
    return model, batch


def gradients(model):
    return {p.name: p.grad.copy() for p in model.parameters()}


def loss_and_gradients(model, batch, lengths):
    """Every stage on a tape of its own for every slice; backward from the last slice to the first."""
    model.start_step()
    carries, flying, total = [Carry() for _ in model.stages], [], 0.0
    for part, one in enumerate(batch.slices(lengths)):
        outputs = ()
        for stage, carry in enumerate(carries):
            inputs = tuple(Tensor(y.data, requires_grad=True) for y in outputs)
            with Tape() as tape:
                carry.begin(part)
                outputs = model.forward_stage(stage, one, *inputs, carry=carry)
            flying.append((part, stage, tape, inputs, outputs))
        total += float(outputs[0].data)
    grads = {}
    for part, stage, tape, inputs, outputs in reversed(flying):
        seeds = [np.ones(())] if stage == len(carries) - 1 else [grads.pop((part, stage))]
        tape.run_backward([*zip(outputs, seeds, strict=True), *carries[stage].seeds(part)])
        carries[stage].pass_back(part, tape)
        if inputs:
            grads[part, stage - 1] = tape.grads[inputs[0]]
    return total, gradients(model)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("lengths", [[12], [6, 6], [5, 3, 3, 1]], ids=str)
@pytest.mark.parametrize("several", [False, True], ids=["one document", "documents"])
def test_a_model_in_slices_is_the_model(documents, kv_heads, lengths, several):
    """T15.1, with dropout everywhere: loss and every gradient."""
    model, batch = model_and_batch(documents if several else None, kv_heads)
    with Tape() as tape:
        loss = model(batch)
    tape.run_backward([(loss, np.ones(()))])
    expected = gradients(model)
    total, found = loss_and_gradients(model, batch, lengths)
    assert total == pytest.approx(float(loss.data), rel=1e-13)
    for name, grad in expected.items():
        np.testing.assert_allclose(found[name], grad, rtol=1e-10, atol=1e-12 * abs(grad).max(initial=1.0), err_msg=name)


def test_evaluation_in_slices_is_evaluation(documents):
    model, batch = model_and_batch(documents, 2)
    batch = replace(batch, training=False)
    carries, total = [Carry() for _ in model.stages], 0.0
    for part, one in enumerate(batch.slices([5, 4, 3])):
        outputs = ()
        for stage, carry in enumerate(carries):
            carry.begin(part)
            outputs = model.forward_stage(stage, one, *outputs, carry=carry)
        total += float(outputs[0].data)
    assert total == pytest.approx(float(model(batch).data), rel=1e-13)
