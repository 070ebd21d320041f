"""A vocabulary cut over ranks against the whole one, as checks that any world can run: threads here, MPI's ranks too.

Every rank also computes alone (a world of one needs no partner) or by NumPy's formulas, so the reference is made where
it is used.  The whole world is the tp axis; of 13 words eight ranks hold 2 2 2 2 2 2 1 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.comm.alone import Alone
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.debug.compare import compare
from mpitrain.errors import UserError
from mpitrain.nn import init
from mpitrain.nn.module import Module
from mpitrain.parallel.vocabulary import (
    TakeOwnRows,
    VocabularyEmbedding,
    VocabularyHead,
    cross_entropy,
)
from mpitrain.spec import cut

VOCABS = (3, 13, 257, 1003, 50257)
WIDTH = 6
IDS = np.array([[3, 12, 3, 0, 7, 12, 4, 3], [1, 6, -1, 11, 3, -13, 5, 12]])  # -1 is the last word, -13 the first
TARGETS = np.array([[12, 3, ops.IGNORE, 7, 12, 4, 3, 3], [6, 0, 11, 3, ops.IGNORE, 5, 12, 9]])


def tp_of(world: World) -> Communicator:
    return Mesh(world, tp=world.size).tp


def alone() -> World:
    return World(Alone(), "none")


def words_of(axis: Communicator, vocab: int) -> slice:
    return slice(*cut(vocab, axis.size, axis.rank))


def logits_and_targets(vocab: int, scale: float, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """The same on all ranks; each seventh target does not count, and the first and last words are among the others."""
    draw = np.random.default_rng((vocab, int(scale)))
    targets = draw.integers(0, vocab, rows)
    targets[1], targets[2], targets[::7] = 0, vocab - 1, ops.IGNORE
    return (scale * draw.uniform(-1, 1, (rows, vocab))).reshape(4, -1, vocab), targets.reshape(4, -1)


def by_formula(logits: np.ndarray, targets: np.ndarray, ignore: int = ops.IGNORE) -> tuple[float, np.ndarray]:
    """(loss, gradient of the logits) in float64, from the definition."""
    z = logits.astype(np.float64).reshape(-1, logits.shape[-1])
    flat = targets.reshape(-1)
    counts = flat != ignore
    column = np.where(counts, flat, 0)
    rows = np.arange(flat.size)
    z = z - z.max(axis=1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    grad = np.exp(log_p)
    grad[rows, column] -= 1
    grad[~counts] = 0
    return float(-log_p[rows, column][counts].sum()), grad.reshape(logits.shape)


def loss_of(
    axis: Communicator, whole: np.ndarray, targets: np.ndarray, seed: float = 1.0, ignore: int = ops.IGNORE
) -> tuple[np.ndarray, np.ndarray]:
    """(loss, gradient of this rank's logits)."""
    vocab = whole.shape[-1]
    logits = Tensor(np.ascontiguousarray(whole[..., words_of(axis, vocab)]), requires_grad=True)
    with Tape() as tape:
        loss = cross_entropy(logits, targets, axis, vocab=vocab, ignore=ignore)
    grads = tape.run_backward([(loss, np.asarray(seed, loss.dtype))])
    return loss.data, grads[logits]


def agree(axis: Communicator, array: np.ndarray) -> None:
    """The same bits on all ranks."""
    found = axis.exchange([str(array.dtype), array.tobytes().hex()])
    assert all(other == found[0] for other in found)


# -- the loss


def the_loss_and_its_gradient_are_those_of_the_whole(world: World) -> None:
    """T12.1, T12.5: any vocabulary, empty slabs, logits up to +-1e4."""
    axis = tp_of(world)
    for vocab in VOCABS:
        for scale in (1.0, 1e4):
            whole, targets = logits_and_targets(vocab, scale)
            loss, grad = loss_of(axis, whole, targets, seed=0.25)
            truth, d_logits = by_formula(whole, targets)
            assert abs(float(loss) - truth) <= 1e-10 * truth, (vocab, scale)
            mine = 0.25 * d_logits[..., words_of(axis, vocab)]
            assert grad.shape == mine.shape
            assert np.abs(grad - mine).max(initial=0) <= 1e-10, (vocab, scale)
            agree(axis, loss)


def lower_precisions_keep_statistics_in_float32(world: World) -> None:
    axis = tp_of(world)
    for dtype, bound in ((np.float32, 2e-6), (np.float16, 2e-3)):
        for vocab in (13, 1003):
            whole, targets = logits_and_targets(vocab, 8.0)
            whole = whole.astype(dtype)
            before = axis.sent_bytes.get("all_reduce", 0)
            loss, grad = loss_of(axis, whole, targets)
            truth, d_logits = by_formula(whole, targets)
            assert (loss.dtype, grad.dtype) == (np.float32, dtype)
            assert abs(float(loss) - truth) <= 1e-6 * truth, (dtype, vocab)
            assert np.abs(grad - d_logits[..., words_of(axis, vocab)]).max(initial=0) <= bound, (dtype, vocab)
            agree(axis, loss)
            sent = axis.sent_bytes.get("all_reduce", 0) - before
            assert sent == 3 * 2 * (axis.size - 1) * 4 * targets.size // axis.size
    whole = np.full((1, 2, 13), 6e4, np.float16)  # sums of exponentials would overflow a half, and so would their sum
    loss, _ = loss_of(axis, whole, np.array([[0, 12]]))
    assert abs(float(loss) - 2 * np.log(13)) < 0.01  # at 6e4 a float32 has steps of 0.004


def without_a_target_that_counts_all_is_zero(world: World) -> None:
    """C09: also if the logits are not numbers."""
    axis = tp_of(world)
    for filling in (0.0, np.nan, np.inf):
        for rows in (0, 3):
            with np.errstate(invalid="ignore"):
                loss, grad = loss_of(axis, np.full((2, rows, 13), filling), np.full((2, rows), ops.IGNORE))
            assert float(loss) == 0.0
            assert not grad.any()


def a_logit_that_is_not_finite_makes_the_loss_of_all_ranks_nan(world: World) -> None:
    """Whichever rank holds it; a word whose logit is -inf has probability 0, and the others share the rest."""
    axis = tp_of(world)
    whole, targets = logits_and_targets(13, 2.0)
    for word in (0, 12):
        for bad in (np.nan, np.inf):
            broken = whole.copy()
            broken[1, 1, word] = bad
            with np.errstate(invalid="ignore"):
                loss, _ = loss_of(axis, broken, targets)
            assert np.isnan(loss)
    masked = whole.copy()
    masked[..., 5:] = -np.inf  # from two ranks on, some rank has nothing else
    among = np.where(targets == ops.IGNORE, ops.IGNORE, targets % 5)
    loss, grad = loss_of(axis, masked, among)
    truth, d_logits = by_formula(masked[..., :5], among)
    full = np.zeros(whole.shape)
    full[..., :5] = d_logits
    assert abs(float(loss) - truth) <= 1e-12 * truth
    assert np.abs(grad - full[..., words_of(axis, 13)]).max(initial=0) <= 1e-12


def any_number_may_mean_ignore(world: World) -> None:
    """Also that of a word, and one that is the place of a word in a later rank's slab."""
    axis = tp_of(world)
    whole, targets = logits_and_targets(13, 2.0)
    for ignore in (*range(13), 13, -1, -2, 99):
        marked = np.where(targets == ops.IGNORE, ignore, targets)
        loss, grad = loss_of(axis, whole, marked, ignore=ignore)
        truth, d_logits = by_formula(whole, marked, ignore)
        assert abs(float(loss) - truth) <= 1e-12 * truth, ignore
        assert np.abs(grad - d_logits[..., words_of(axis, 13)]).max(initial=0) <= 1e-12, ignore


def targets_of_every_integer_kind_are_taken(world: World) -> None:
    axis = tp_of(world)
    whole, _ = logits_and_targets(257, 2.0)
    targets = np.random.default_rng(3).integers(0, 128, whole.shape[:-1])
    truth, _ = by_formula(whole, targets)
    for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"):
        assert abs(float(loss_of(axis, whole, targets.astype(kind))[0]) - truth) <= 1e-12 * truth, kind


def the_gradient_is_the_derivative(world: World) -> None:
    """<J v, g> = <v, J* g>: the loss is Invariant and counts once, v is Shard(-1) and its product sums over ranks."""
    axis = tp_of(world)
    whole, targets = logits_and_targets(13, 1.0)
    mine = whole[..., words_of(axis, 13)]
    loss, grad = loss_of(axis, whole, targets, seed=-1.5)
    step = 1e-5
    for seed in range(3):
        v = np.random.default_rng((seed, axis.rank)).standard_normal(mine.shape)
        above, below = (cross_entropy(Tensor(mine + h * v), targets, axis, vocab=13).data for h in (step, -step))
        left = float(above - below) / (2 * step) * -1.5
        right = float(axis.all_reduce(np.asarray((v * grad).sum())))
        assert abs(left - right) <= 1e-7 * max(1.0, abs(left)), (left, right)
    agree(axis, loss)


# -- what is refused


def said_by(function: Callable[[], Any]) -> list[str]:
    """[kind, text] of the mistake; what it says alone and on an axis must be the same."""
    try:
        function()
    except UserError as error:
        return [type(error).__name__, str(error)]
    return ["", "nothing was refused"]


def wrong_targets_are_refused_on_all_ranks_as_by_the_serial_op(world: World) -> None:
    axis = tp_of(world)
    whole, targets = logits_and_targets(13, 1.0)
    mine = Tensor(whole[..., words_of(axis, 13)])
    before = axis.sent_bytes
    for wrong in (13, -1, -101, 10**12):
        marked = targets.copy()
        marked[2, 3] = wrong
        serial = said_by(lambda marked=marked: ops.softmax_cross_entropy(Tensor(whole), marked))
        here = said_by(lambda marked=marked: cross_entropy(mine, marked, axis, vocab=13))
        assert here == serial
        assert here[0] == "DataError"
        assert f"target {wrong}" in here[1]
    short = targets[:, 1:]
    here = said_by(lambda: cross_entropy(mine, short, axis, vocab=13))
    assert here[0] == "ShapeError"
    assert f"and targets {short.shape}" in here[1]
    here = said_by(lambda: cross_entropy(mine, targets, axis, vocab=26 * axis.size))
    assert here == [
        "ShapeError",
        f"cross_entropy: logits {mine.shape} on rank {axis.rank} of axis tp, which holds 26 of {26 * axis.size} words",
    ]
    assert axis.sent_bytes == before


def wrong_ids_are_refused_on_all_ranks_as_by_the_serial_op(world: World) -> None:
    mesh = Mesh(world, tp=world.size)
    table, serial = (made(VocabularyEmbedding("table", 13, WIDTH, m.tp), m) for m in (mesh, Mesh(alone())))
    before = mesh.tp.sent_bytes
    for ids in ([[0, 13]], [[5, -14]], [[10**12, 2]], [[0.5, 1.0]]):
        here, there = (said_by(lambda layer=layer, ids=ids: layer(np.array(ids))) for layer in (table, serial))
        assert here == there
        assert here[0] == "ShapeError"
    assert mesh.tp.sent_bytes == before
    assert said_by(lambda: VocabularyHead("head", WIDTH, 12, mesh.tp, table.weight)) == [
        "ShapeError",
        f"head (VocabularyHead): the table is (13, {WIDTH}), wanted is (12, {WIDTH})",
    ]


# -- the table


def made(module: Any, mesh: Mesh, dtype: Any = np.float64, seed: int = 0) -> Any:
    module.materialize(mesh, seed=seed, dtype=dtype)
    module.start_step()
    return module


def the_gradient_of_the_table_is_that_of_a_one_hot_product(world: World) -> None:
    """T12.4: repeated words add up, words that are not looked up get 0, a second micro-batch is added."""
    mesh = Mesh(world, tp=world.size)
    for dtype, bound in ((np.float64, 1e-13), (np.float32, 1e-5), (np.float16, 2e-2)):
        table = made(VocabularyEmbedding("table", 13, WIDTH, mesh.tp, init=init.normal(1.0)), mesh, dtype)
        full = made(
            VocabularyEmbedding("table", 13, WIDTH, Mesh(alone()).tp, init=init.normal(1.0)), Mesh(alone()), dtype
        )
        truth = np.zeros((13, WIDTH))
        for micro in range(2):
            ids = IDS + micro * (IDS < 0)  # -1 and -13 become 0 and -12
            seed = np.random.default_rng(micro).integers(-4, 5, (*ids.shape, WIDTH)).astype(dtype)
            with Tape() as tape:
                y = table(ids)
            assert y.data.tobytes() == (full.weight.data[ids] + 0.0).tobytes()
            tape.run_backward([(y, seed)])
            one_hot = np.eye(13)[ids.reshape(-1) % 13]
            truth += one_hot.T @ seed.reshape(-1, WIDTH)
            mine = truth[table.weight.rectangle]
            assert np.abs(table.weight.grad - mine).max(initial=0) <= bound * np.abs(truth).max()


def words_of_other_ranks_are_zeros_whatever_lies_here(world: World) -> None:
    """No row is read in their place: not one with NaN, and none where a rank holds no word at all."""
    axis = tp_of(world)
    length = words_of(axis, 13)
    table = np.full((length.stop - length.start, WIDTH), np.nan)
    ids = np.array([word for word in range(13) if not length.start <= word < length.stop], np.int64)
    rows, saved = TakeOwnRows.forward(table, ids, axis=axis, vocab=13)
    assert rows.shape == (ids.size, WIDTH)
    assert not rows.any()
    grad, _ = TakeOwnRows.backward(np.ones(rows.shape), *saved, wanted=(True, False), axis=axis, vocab=13)
    assert (grad.ids < 0).all()
    assert not grad.array().any()
    out = np.full(table.shape, 7.0)
    grad.write(out, add=True)
    assert (out == 7).all()
    grad.write(out, add=False)
    assert not out.any()


def taking_rows_is_the_adjoint_of_its_backward(world: World) -> None:
    """<F x, g> = <x, F* g>: x Shard(0), F x Partial, g Replicate: both products sum over the ranks."""
    axis = tp_of(world)
    words = words_of(axis, 13)
    x = np.random.default_rng(axis.rank).standard_normal((words.stop - words.start, WIDTH))
    y, saved = TakeOwnRows.forward(x, IDS, axis=axis, vocab=13)
    g = np.random.default_rng(99).standard_normal(y.shape)
    back, _ = TakeOwnRows.backward(g, *saved, wanted=(True, False), axis=axis, vocab=13)
    left, right = (float(axis.all_reduce(np.asarray((a * b).sum()))) for a, b in ((y, g), (x, back.array())))
    assert abs(left - right) <= 1e-12 * max(1.0, abs(left))


# -- the layers


class Words(Module):
    """tanh of the rows of words, then the loss of the next ones: everything that the vocabulary is in."""

    def __init__(self, mesh: Mesh, vocab: int, *, tied: bool = False, sequence_parallel: bool = False) -> None:
        super().__init__("words")
        self.vocab = vocab
        self.axis = mesh.tp
        how = {"sequence_parallel": sequence_parallel}
        self.table = VocabularyEmbedding("table", vocab, WIDTH, mesh.tp, init=init.normal(0.7), **how)
        self.head = VocabularyHead("head", WIDTH, vocab, mesh.tp, self.table.weight if tied else None, **how)

    def forward(self, ids: np.ndarray, targets: np.ndarray) -> Tensor:
        stream = ops.tanh(self.table(ids))
        return cross_entropy(self.head(stream), targets, self.axis, vocab=self.vocab)


LAYOUTS = [{"tied": tied, "sequence_parallel": sequence} for tied in (False, True) for sequence in (False, True)]


def micro_batches(vocab: int) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(vocab)
    more = draw.integers(0, vocab, (2, *IDS.shape))
    return [(IDS, TARGETS), (more[0], more[1])]


def train(
    mesh: Mesh, vocab: int, *, dtype: Any = np.float64, split_backward: bool = False, **how: Any
) -> tuple[np.ndarray, Words]:
    """Losses of two micro-batches, and the model with their gradients."""
    model = made(Words(mesh, vocab, **how), mesh, dtype, seed=5)
    losses = []
    for ids, targets in micro_batches(vocab):
        with Tape() as tape:
            loss = model(ids, targets)
        seeds = [(loss, np.asarray(0.125, loss.dtype))]
        if split_backward:
            touched = [p.touched for p in model.parameters()]
            tape.backward_inputs(seeds)
            assert [p.touched for p in model.parameters()] == touched
            for _ in tape.backward_weights():
                pass
        else:
            tape.run_backward(seeds)
        losses.append(loss.data)
    return np.array(losses), model


def equals_the_serial_model(world: World, vocab: int, bound: float = 1e-10, **how: Any) -> None:
    losses, model = train(Mesh(world, tp=world.size), vocab, **how)
    serial = {name: value for name, value in how.items() if name not in ("sequence_parallel", "split_backward")}
    expected, whole = train(Mesh(alone()), vocab, **serial)
    assert (losses.dtype, losses.shape) == (expected.dtype, expected.shape)
    assert (np.abs(losses - expected) <= bound * expected).all(), (vocab, how)
    mine = {p.name: p.grad for p in model.parameters()}
    slabs = {p.name: q.grad[p.rectangle] for p, q in zip(model.parameters(), whole.parameters(), strict=True)}
    largest = {q.name: np.abs(q.grad).max() for q in whole.parameters()}
    for worst in compare(mine, slabs, bound):
        assert worst.error <= bound * largest[worst.name], (vocab, how, str(worst))
    agree(world, losses)


def layers_equal_the_serial_ones(world: World) -> None:
    """C34: any vocabulary, tied or not, the stream whole or cut along the sequence."""
    for how in LAYOUTS:
        for vocab in (13, 257, 1003):
            equals_the_serial_model(world, vocab, **how)


def the_vocabulary_of_gpt2_equals_the_serial_one(world: World) -> None:
    equals_the_serial_model(world, 50257, tied=True, sequence_parallel=True)


def layers_equal_the_serial_ones_in_lower_precision(world: World) -> None:
    for how in LAYOUTS:
        equals_the_serial_model(world, 13, bound=1e-5, dtype=np.float32, **how)
        equals_the_serial_model(world, 13, bound=1e-2, dtype=np.float16, **how)


def a_backward_in_two_halves_gives_the_same_gradients(world: World) -> None:
    """No weight is touched in the first: the transpose of a tied table is weight-side."""
    for how in LAYOUTS:
        equals_the_serial_model(world, 13, split_backward=True, **how)


def messages_have_the_bytes_of_the_formulas(world: World) -> None:
    """T30.10's terms, a micro-batch: loss 3 * 2(t-1)/t * 4 b s; table and head's input 2(t-1)/t * beta b s h each."""
    mesh = Mesh(world, tp=world.size)
    axis, t = mesh.tp, world.size
    (b, s), micros = IDS.shape, 2
    for dtype, beta in ((np.float64, 8), (np.float32, 4), (np.float16, 2)):
        for how in LAYOUTS:
            before = axis.sent_bytes
            train(mesh, 13, dtype=dtype, **how)
            sent = {verb: count - before.get(verb, 0) for verb, count in axis.sent_bytes.items()}
            statistics = micros * 3 * 2 * (t - 1) * max(beta, 4) * b * s // t
            stream = micros * (t - 1) * beta * b * s * WIDTH // t
            if t == 1:
                expected = {}
            elif how["sequence_parallel"]:
                expected = {"all_reduce": statistics, "reduce_scatter": 2 * stream, "all_gather": 2 * stream}
            else:
                expected = {"all_reduce": statistics + 4 * stream}
            assert {verb: count for verb, count in sent.items() if count} == expected, (dtype, how)


CHECKS: list[Callable[[World], None]] = [
    the_loss_and_its_gradient_are_those_of_the_whole,
    lower_precisions_keep_statistics_in_float32,
    without_a_target_that_counts_all_is_zero,
    a_logit_that_is_not_finite_makes_the_loss_of_all_ranks_nan,
    any_number_may_mean_ignore,
    targets_of_every_integer_kind_are_taken,
    the_gradient_is_the_derivative,
    wrong_targets_are_refused_on_all_ranks_as_by_the_serial_op,
    wrong_ids_are_refused_on_all_ranks_as_by_the_serial_op,
    the_gradient_of_the_table_is_that_of_a_one_hot_product,
    words_of_other_ranks_are_zeros_whatever_lies_here,
    taking_rows_is_the_adjoint_of_its_backward,
    layers_equal_the_serial_ones,
    the_vocabulary_of_gpt2_equals_the_serial_one,
    layers_equal_the_serial_ones_in_lower_precision,
    a_backward_in_two_halves_gives_the_same_gradients,
    messages_have_the_bytes_of_the_formulas,
]
