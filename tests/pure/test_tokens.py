"""Batches: the right windows, the right targets, the same for every layout, whatever does not divide."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mpitrain.autograd.ops import IGNORE
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.errors import ConfigError, DataError, ShapeError


def counting_corpus(train=1000, val=200, kind="tokens", vocab_size=65_536):
    """Token i has the value i, so that a window says where it begins; validation counts on from 10,000."""
    return Corpus(
        np.arange(train, dtype=np.uint16),
        np.arange(10_000, 10_000 + val, dtype=np.uint16),
        vocab_size,
        kind,
        "counting",
        (),
        (),
        "",
    )


def epoch_starts(tokens, batch, epoch):
    order = tokens.order(batch)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    batches = [tokens.batch_at(step, batch) for step in steps]
    rows = [pair for b in batches for pair in zip(b.inputs, b.targets, strict=True)]
    return [int(inputs[0]) for inputs, target in rows if target[0] != IGNORE]


def test_targets_are_the_next_tokens():
    b = Tokens(counting_corpus(), 16, seed=1).batch_at(3, 4)
    assert b.inputs.dtype == b.targets.dtype == b.places.dtype == np.int64
    assert b.inputs.shape == b.targets.shape == (4, 16)
    assert np.array_equal(b.targets, b.inputs + 1)
    assert np.array_equal(b.inputs, b.inputs[:, :1] + np.arange(16))
    assert b.count == 64
    assert b.positions.tolist() == list(range(16))
    assert b.inputs.flags.c_contiguous
    assert b.targets.flags.c_contiguous


@pytest.mark.parametrize("length", [17, 18, 31, 32, 33, 47, 48, 49, 1000, 1007])
def test_windows_of_an_epoch_do_not_overlap_and_stay_inside(length):
    tokens = Tokens(counting_corpus(train=length), 16, seed=0)
    for epoch in range(5):
        starts = sorted(epoch_starts(tokens, 4, epoch))
        assert len(starts) == tokens.num_samples == max(1, length // 16 - 1)
        assert starts[0] >= 0
        assert starts[-1] + 16 < length
        assert all(b - a == 16 for a, b in pairwise(starts))


def test_each_epoch_cuts_the_text_elsewhere_and_all_epochs_together_read_all_of_it():
    tokens = Tokens(counting_corpus(train=100), 8, seed=0)
    shifts = {tokens.shift(epoch) for epoch in range(200)}
    assert shifts == set(range(100 - 8 * tokens.num_samples))
    read = {start + i for epoch in range(60) for start in epoch_starts(tokens, 4, epoch) for i in range(9)}
    assert read == set(range(100))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 10])
def test_ranks_together_hold_the_batch_of_one_rank(size):
    """C26, C22: batch 10, the last of an epoch padded; rows come back by their places, also where each has one."""
    tokens = Tokens(counting_corpus(train=700), 16, seed=4)
    for step in (0, 1, 3, 4, 9):
        whole = tokens.batch_at(step, 10)
        parts = [tokens.batch_at(step, 10, rank, size) for rank in range(size)]
        assert {p.inputs.shape for p in parts} == {(-(-10 // size), 16)}
        assert sum(p.count for p in parts) == whole.count
        for part in parts:
            for place, row, target in zip(part.places, part.inputs, part.targets, strict=True):
                if place < 10:
                    assert np.array_equal(row, whole.inputs[place])
                    assert np.array_equal(target, whole.targets[place])
                else:
                    assert (target == IGNORE).all()


def test_padded_rows_have_no_weight_and_valid_tokens():
    tokens = Tokens(counting_corpus(train=112), 16, seed=0)  # six samples
    b = tokens.batch_at(1, 4)
    assert (b.targets[2:] == IGNORE).all()
    assert (b.inputs[2:] == 0).all()
    assert b.count == 2 * 16
    assert b.places.tolist() == [0, 1, 2, 3]


def test_batches_go_on_from_any_step():
    """C71: the generator started at a step gives what the uninterrupted one gives there, over an epoch's end too."""
    tokens = Tokens(counting_corpus(train=300), 16, seed=0)
    whole = list(tokens.batches(4, stop_step=20))
    resumed = list(Tokens(counting_corpus(train=300), 16, seed=0).batches(4, start_step=7, stop_step=20))
    assert [b.step for b in resumed] == list(range(7, 20))
    assert all(np.array_equal(a.inputs, b.inputs) for a, b in zip(whole[7:], resumed, strict=True))
    assert whole[0].epoch == 0
    assert whole[19].epoch > 1
    endless = tokens.batches(4)
    assert [next(endless).step for _ in range(3)] == [0, 1, 2]


def test_seeds_and_steps_read_different_windows():
    corpus = counting_corpus(train=10_000)
    first = Tokens(corpus, 16, seed=0).batch_at(0, 8).inputs[:, 0].tolist()
    assert first != Tokens(corpus, 16, seed=1).batch_at(0, 8).inputs[:, 0].tolist()
    assert first != Tokens(corpus, 16, seed=0).batch_at(1, 8).inputs[:, 0].tolist()


def test_micro_batches_are_consecutive_rows_with_their_places():
    b = Tokens(counting_corpus(), 16, seed=1).batch_at(0, 12, rank=1, size=2)
    parts = b.split(3)
    assert [p.places.tolist() for p in parts] == [[1, 3], [5, 7], [9, 11]]
    assert np.array_equal(np.concatenate([p.inputs for p in parts]), b.inputs)
    assert np.array_equal(np.concatenate([p.targets for p in parts]), b.targets)
    assert sum(p.count for p in parts) == b.count
    assert b.split(1)[0].places.tolist() == b.places.tolist()
    for wrong in (0, 4, 7):
        with pytest.raises(ConfigError, match=f"--microbatches {wrong}: 6 sequences a rank"):
            b.split(wrong)


def test_the_draw_of_a_micro_batch_is_part_of_the_draw_of_the_batch():
    b = Tokens(counting_corpus(), 16, seed=1).batch_at(5, 12, rank=1, size=2)
    rows = b.draw(9).rows("drop")
    parts = [p.draw(9).rows("drop") for p in b.split(3)]
    assert np.array_equal(np.concatenate(parts), rows)
    assert np.array_equal(Tokens(counting_corpus(), 16, seed=1).batch_at(5, 12).draw(9).rows("drop")[1::2], rows)


@pytest.mark.parametrize(("seq_len", "val"), [(16, 200), (7, 200), (64, 131_073), (100, 150_000), (64, 400_000)])
def test_validation_windows_are_spread_evenly_and_counted_exactly(seq_len, val):
    corpus = counting_corpus()
    corpus = Corpus(corpus.train, np.arange(val, dtype=np.int64), 2**40, "bytes", "counting", (), (), "")
    tokens = Tokens(corpus, seq_len)
    expected = min(131_072, (val - 1) // seq_len * seq_len)
    assert tokens.num_validation_targets() == expected
    targets = [t for b in tokens.validation(64) for t in b.targets[b.targets != IGNORE].tolist()]
    assert len(targets) == len(set(targets)) == expected
    assert max(targets) < val
    rows = [pair for b in tokens.validation(64) for pair in zip(b.inputs, b.targets, strict=True)]
    windows = sorted(int(inputs[0]) for inputs, target in rows if target[0] != IGNORE)
    gaps = np.diff(windows)
    assert gaps.min() >= seq_len
    assert gaps.max() - gaps.min() <= seq_len
    assert windows[0] == 0
    assert val - windows[-1] < 2 * gaps.max() + 2 * seq_len


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_share_the_validation_and_make_equally_many_batches(size):
    tokens = Tokens(counting_corpus(val=1000), 16)
    alone = list(tokens.validation(10))
    shared = [list(tokens.validation(10, rank, size)) for rank in range(size)]
    assert {len(batches) for batches in shared} == {len(alone)}
    for number, whole in enumerate(alone):
        rows = {int(p): t for r in shared for p, t in zip(r[number].places, r[number].targets, strict=True)}
        assert all(np.array_equal(rows[place], whole.targets[place]) for place in range(10))
    assert sum(b.count for r in shared for b in r) == tokens.num_validation_targets()


def test_a_part_keeps_targets_with_their_inputs_and_the_positions_of_the_whole():
    whole = Tokens(counting_corpus(), 16).batch_at(0, 4)
    part = whole.part(np.array([0, 1, 14, 15]))
    assert np.array_equal(part.inputs, whole.inputs[:, [0, 1, 14, 15]])
    assert np.array_equal(part.targets, part.inputs + 1)
    assert part.positions.tolist() == [0, 1, 14, 15]
    assert whole.part(None) is whole
    assert whole.part([3]).inputs.shape == (4, 1)


def test_slices_are_consecutive_tokens_of_every_sequence_with_their_positions():
    whole = Tokens(counting_corpus(), 16).batch_at(3, 4)
    slices = whole.slices([7, 1, 8])
    assert [each.positions.tolist() for each in slices] == [[*range(7)], [7], [*range(8, 16)]]
    for name in ("inputs", "targets"):
        parts = [getattr(each, name) for each in slices]
        assert all(part.flags.c_contiguous for part in parts)
        assert np.array_equal(np.concatenate(parts, 1), getattr(whole, name))
    assert all(each.places is whole.places and each.step == 3 for each in slices)
    assert sum(each.count for each in slices) == whole.count
    rows = [each.draw(9).rows("drop") for each in slices]
    assert np.array_equal(np.concatenate(rows, 1), whole.draw(9).rows("drop"))
    assert whole.slices([16]) == [whole]


def test_slices_keep_the_documents_of_the_whole_sequence():
    whole = Tokens(counting_corpus(), 16).batch_at(0, 4)
    whole = replace(whole, documents=np.arange(64).reshape(4, 16) // 5)
    assert all(each.documents is whole.documents for each in whole.slices([9, 7]))


@pytest.mark.parametrize("lengths", [[], [15], [16, 0], [17, -1], [8, 9]], ids=str)
def test_slices_that_are_not_the_sequence_are_refused(lengths):
    with pytest.raises(ShapeError, match=rf"together {sum(lengths)}: .* at least 1 token whose sum is .* 16"):
        Tokens(counting_corpus(), 16).batch_at(0, 4).slices(lengths)


@pytest.mark.parametrize(
    "positions",
    [[0, 16], [-1, 0], [1, 0], [1, 1], [0.0, 1.0], [True] * 16, [[0, 1]], np.array([3, 2], np.uint8)],
    ids=str,
)
def test_what_is_no_part_of_a_batch_is_refused(positions):
    with pytest.raises(ShapeError, match="a batch of 16 positions has no such part"):
        Tokens(counting_corpus(), 16).batch_at(0, 4).part(np.array(positions))


def test_a_part_cannot_be_cut_again():
    late = np.arange(8, 16)
    with pytest.raises(ShapeError, match=r"a batch of 8 positions .* from 8 to 15.\nWas it cut before"):
        Tokens(counting_corpus(), 16).batch_at(0, 4).part(late).part(late)


def test_validation_draws_no_noise():
    tokens = Tokens(counting_corpus(), 16)
    assert all(b.draw(0) is None for b in tokens.validation(4))
    assert tokens.batch_at(0, 4).draw(0) is not None


def test_a_text_too_short_is_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"too short: 16 tokens for training.*--seq-len 16 needs 17 for training"):
        Tokens(counting_corpus(train=16), 16)
    with pytest.raises(DataError, match=r"16 for validation, but --seq-len 16 needs 17 for validation"):
        Tokens(counting_corpus(val=16), 16)
    Tokens(counting_corpus(train=17, val=17), 16).batch_at(0, 1)
    with pytest.raises(ConfigError, match="--seq-len 0"):
        Tokens(counting_corpus(), 0)


def test_a_token_beyond_the_declared_vocabulary_is_refused():
    tokens = Tokens(counting_corpus(train=1000, val=20, vocab_size=500), 16)
    with pytest.raises(DataError, match="is not below the declared vocabulary of 500"):
        list(tokens.batches(64, stop_step=1))
