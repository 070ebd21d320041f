"""Packed documents: every target once, no row too full, and the same loss and gradients as each document alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.autograd import Tape
from mpitrain.autograd.ops import IGNORE
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data import corpus as corpora
from mpitrain.data.corpus import Corpus
from mpitrain.data.packing import PADDING, PackedTokens, pack, places_in_documents
from mpitrain.data.tokens import Batch, Tokens
from mpitrain.errors import DataError
from mpitrain.models.families import build
from mpitrain.models.gpt import GPTConfig
from mpitrain.models.llama import LlamaConfig

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def rows_of(packing):
    """Of each row its pieces, as (start, inputs)."""
    pairs = list(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    return [pairs[a:b] for a, b in zip(packing.first, packing.first[1:], strict=False)]


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 16))
def test_every_target_of_every_document_stands_in_one_row(lengths, seq_len):
    ends = np.cumsum(lengths)
    packing = pack(ends, seq_len)
    rows = rows_of(packing)
    assert len(rows) == packing.rows
    assert all(0 < sum(n for _, n in row) <= seq_len for row in rows)
    inputs = [place for row in rows for start, n in row for place in range(start, start + n)]
    assert sorted(inputs) == sorted(set(range(ends[-1])) - {end - 1 for end in ends})  # all but the last of each
    document = np.repeat(np.arange(len(lengths)), lengths)
    assert all(document[start] == document[start + n] for row in rows for start, n in row)
    assert packing.targets == sum(lengths) - len(lengths)
    assert packing.targets_of(np.arange(packing.rows)) == packing.targets
    starts = [min(start for start, _ in row) for row in rows]
    assert starts == sorted(starts)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(2, 16))
def test_no_two_rows_could_have_been_one(lengths, seq_len):
    """Best fit opens a row only where no open one has room: two that are half empty cannot be."""
    filled = [sum(n for _, n in row) for row in rows_of(pack(np.cumsum(lengths), seq_len))]
    assert sum(2 * n <= seq_len for n in filled) <= 1
    assert len(filled) <= 2 * -(-sum(filled) // seq_len) if filled else True


def test_best_fit_takes_the_fullest_row_that_has_room():
    packing = pack(np.cumsum([8, 6, 5, 4, 3]), 10)  # inputs 7 5 4 3 2: 7 + 3, 5 + 4, then 2 finds no room
    assert [sorted(n for _, n in row) for row in rows_of(packing)] == [[3, 7], [4, 5], [2]]


def test_of_two_rows_that_have_room_the_fuller_one_is_taken():
    packing = pack(np.cumsum([7, 8, 4]), 10)  # inputs 6 7 3: beside 7 there is room for 3 and no more
    assert [[n for _, n in row] for row in rows_of(packing)] == [[6], [7, 3]]


def test_a_row_is_its_pieces_one_after_the_other_and_then_padding():
    text = np.arange(100, 117)
    inputs, targets, documents = pack([6, 9, 17], 8).read(text, np.array([0, 1, -1]))
    assert inputs.tolist() == [[100, 101, 102, 103, 104, 106, 107, 0], [109, 110, 111, 112, 113, 114, 115, 0], [0] * 8]
    assert targets[0].tolist() == [101, 102, 103, 104, 105, 107, 108, IGNORE]
    assert targets[1].tolist() == [110, 111, 112, 113, 114, 115, 116, IGNORE]
    assert documents.tolist() == [[0] * 5 + [1, 1, PADDING], [0] * 7 + [PADDING], [PADDING] * 8]


def test_places_count_from_the_first_token_of_a_document():
    documents = np.array([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2], [-1, 0, 0, 1, 2, 2]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 0, 1]]
    assert places_in_documents(documents, np.arange(6)).tolist() == expected
    assert places_in_documents(documents, np.array([1, 4])).tolist() == [[1, 1], [1, 4], [0, 0]]


# ----------------------------------------------------------------------------------------------------------- batches


def documents_of(lengths, val=40, vocab=17):
    text = (np.arange(sum(lengths)) * 7919 % 104729 % vocab).astype(np.uint16)
    ends = np.cumsum(lengths).astype(np.int64)
    return Corpus(text[:-val], text[-val:], vocab, "tokens", "documents", (), (), "", ends=ends)


MANY = [5, 13, 2, 40, 7, 1, 9, 22, 16, 3, 11, 30]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_epoch_has_every_row_once_on_any_number_of_ranks(size):
    tokens = PackedTokens(documents_of(MANY), 12, seed=3)
    steps = tokens.order(5).steps_per_epoch
    found = []
    for step in range(steps):
        whole = tokens.batch_at(step, 5)
        parts = [tokens.batch_at(step, 5, rank, size) for rank in range(size)]
        rows = {int(p): part.inputs[i].tolist() for part in parts for i, p in enumerate(part.places) if p < 5}
        assert [rows[place] for place in range(5)] == whole.inputs.tolist()
        assert sum(part.count for part in parts) == whole.count
        found += [tuple(row) for row, d in zip(whole.inputs, whole.documents, strict=True) if (d >= 0).any()]
    inputs, _, _ = tokens.train.read(tokens.corpus.train, np.arange(tokens.num_samples))
    assert sorted(found) == sorted(map(tuple, inputs.tolist()))


def test_validation_has_as_many_targets_as_it_says_on_any_number_of_ranks():
    tokens = PackedTokens(documents_of(MANY, val=70), 9)
    assert tokens.num_validation_targets() == tokens.val.targets > 0
    for size in (1, 2, 3):
        parts = [list(tokens.validation(4, rank, size)) for rank in range(size)]
        assert {len(part) for part in parts} == {tokens.num_validation_batches(4)}
        assert sum(b.count for part in parts for b in part) == tokens.num_validation_targets()
        assert not any(b.training for part in parts for b in part)
    plain = Tokens(documents_of(MANY, val=70), 9)
    assert len(list(plain.validation(4))) == plain.num_validation_batches(4)


def test_files_of_a_folder_are_documents(tmp_path):
    for name, text in (("a.txt", "first file"), ("b.txt", "x"), ("c.txt", "the third one of them" * 12)):
        (tmp_path / name).write_text(text)
    found = corpora.load(tmp_path)
    assert found.ends.tolist() == [10, 11, 263]
    assert found.identity != found.sha256
    assert replace(found, ends=np.array([10, 12, 263])).identity != found.identity
    tokens = PackedTokens(found, 8)
    assert tokens.train.targets == 9 + 238  # of 250 bytes for training: no target for the last of each
    assert "documents" in str(tokens)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "alone.txt").write_text("only one file" * 9)
    for path in (tmp_path / "one", tmp_path / "one" / "alone.txt"):
        with pytest.raises(DataError, match=r"--pack: .* is one document, so there is nothing to pack"):
            PackedTokens(corpora.load(path), 8)
    with pytest.raises(DataError, match="no document of two tokens"):
        PackedTokens(replace(documents_of([1] * 60), ends=np.arange(1, 61)), 8)


# --------------------------------------------------------------------------------------- equal to each document alone

MODELS = {
    "gpt": GPTConfig(vocab=17, layers=2, width=16, heads=4, seq_len=12),
    "llama": LlamaConfig(vocab=17, layers=2, width=16, heads=4, kv_heads=2, seq_len=12, hidden=24),
    "window": LlamaConfig(vocab=17, layers=2, width=16, heads=4, kv_heads=2, seq_len=12, hidden=24, window=3),
}


def loss_and_gradients(model, batch):
    model.start_step()
    with Tape() as tape:
        loss = model(batch)
    list(tape.backward([(loss, np.ones(()))]))
    return float(loss.data), {p.name: p.grad.copy() for p in model.parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_is_each_document_alone(name):
    """T: loss and every gradient of rows of several documents are the sums over rows of one document each."""
    sizes = MODELS[name]
    corpus = documents_of(MANY)
    model = build(sizes, Mesh(World(Alone(), "none")), seed=1, dtype=np.float64)
    packing = pack(corpus.ends, sizes.seq_len)
    text = np.concatenate([corpus.train, corpus.val])
    inputs, targets, documents = packing.read(text, np.arange(packing.rows))
    assert (documents > 0).any()
    rows = np.arange(packing.rows)
    packed = Batch(inputs, targets, rows, np.arange(sizes.seq_len), 0, documents=documents)
    pieces = zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True)
    alone = [(text[start : start + n].astype(np.int64), text[start + 1 : start + n + 1]) for start, n in pieces]
    loss, gradients = loss_and_gradients(model, packed)
    sums, total = {}, 0.0
    for tokens, wanted in alone:
        row = np.full((1, sizes.seq_len), IGNORE)
        row[0, : len(wanted)] = wanted
        padded = np.pad(tokens, (0, sizes.seq_len - len(tokens)))[None]
        part, grads = loss_and_gradients(model, Batch(padded, row, np.zeros(1, int), np.arange(sizes.seq_len), 0))
        total += part
        sums = {key: grad + sums.get(key, 0.0) for key, grad in grads.items()}
    np.testing.assert_allclose(loss, total, rtol=1e-12)
    for key, grad in gradients.items():
        np.testing.assert_allclose(grad, sums[key], rtol=0, atol=1e-10 * max(1.0, np.abs(sums[key]).max()), err_msg=key)
