"""A text in words: those of the whole text at once, kept for the next start, made anew when the file is not whole."""

import errno
import json
import math
import os
from itertools import pairwise

import numpy as np
import pytest

from mpitrain import disk
from mpitrain.data import corpus, encoded
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import DataError

pytest.importorskip("tokenizers", reason="needs the tokenizers library: the extra hf")

LINES = [f"line {n}: grüße, 世界 {n % 7}; it's 🎉\n\n   indented{n}('x')\n" for n in range(300)]
TEXT = "".join(LINES)


@pytest.fixture(scope="module")
def words():
    return Tokenizer.trained([TEXT], 330)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MPITRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoded, "PIECE", 257)
    monkeypatch.setattr(encoded, "_AT_ONCE", 700)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "tokens").iterdir())


def never(monkeypatch):
    def fails(*_):
        raise AssertionError("it was encoded again")

    monkeypatch.setattr(Tokenizer, "encode_all", fails)


def test_pieces_are_the_text_and_end_where_words_never_join(words):
    for text in (TEXT, TEXT.replace("\n", " "), TEXT.replace("\n", "").replace(" ", ""), "世" * 3000, "", "\n" * 3000):
        data = np.frombuffer(text.encode(), np.uint8)
        pieces = list(encoded.pieces(data))
        assert "".join(pieces) == text
        assert all(len(piece.encode()) <= 3 * encoded.PIECE for piece in pieces)
        if text in (TEXT, TEXT.replace("\n", " ")):
            assert len(pieces) > 20
            assert [token for piece in pieces for token in words.encode(piece)] == words.encode(text)


def test_the_words_are_those_of_the_text_at_once_and_validation_is_the_same_bytes(text, words):
    as_bytes, as_words = corpus.load(text), encoded.load(text, words)
    assert words.decode(as_words.train.tolist()) + words.decode(as_words.val.tolist()) == TEXT
    assert as_words.train.tolist() == words.encode(bytes(as_bytes.train).decode())
    assert as_words.val.tolist() == words.encode(bytes(as_bytes.val).decode())
    assert (as_words.vocab_size, as_words.kind, as_words.train.dtype) == (330, "tokens", np.dtype("<u2"))
    assert as_words.text_bytes == (len(as_bytes.train), len(as_bytes.val))
    assert "vocabulary 330, 2." in str(as_words)


def test_documents_are_encoded_each_by_itself_and_their_ends_are_known(tmp_path, words):
    folder = tmp_path / "folder"
    folder.mkdir()
    texts = ["de", "f x\n" * 100, " ", "世界" * 150, TEXT, "last"]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    as_bytes = corpus.load(folder)
    for _ in range(2):  # encoded, and mapped
        found = encoded.load(folder, words)
        tokens = [*found.train.tolist(), *found.val.tolist()]
        starts = [0, *found.ends.tolist()]
        assert found.ends.dtype == np.int64
        assert starts[-1] == len(tokens)
        documents = [tokens[start:stop] for start, stop in pairwise(starts)]
        assert [words.decode(each) for each in documents] == texts
        for place in (0, 1, 2, 3, 5):  # the fifth has the border of validation inside
            assert documents[place] == words.encode(texts[place])
        assert found.text_bytes == (len(as_bytes.train), len(as_bytes.val))
        assert found.identity != found.sha256
    (file,) = kept(tmp_path)
    _flipped(file)  # the last byte of the ends
    assert encoded.opened(encoded.Encoder(as_bytes, words).key, words) is None
    _flipped(file)
    (folder / "0.txt").write_text("def", encoding="utf-8")
    (folder / "1.txt").write_text(" x\n" + "f x\n" * 99, encoding="utf-8")  # the same text, cut in another place
    assert encoded.load(folder, words).ends.tolist() != found.ends.tolist()


def test_a_letter_over_the_border_belongs_to_neither_part(tmp_path, words):
    path = tmp_path / "wide.txt"
    path.write_bytes(b"x" + ("世" * 400).encode() + b"yz")
    as_bytes, as_words = corpus.load(path), encoded.load(path, words)
    assert as_bytes.val[0] & 0xC0 == 0x80
    found = words.decode(as_words.train.tolist()), words.decode(as_words.val.tolist())
    assert "�" not in "".join(found)
    assert len("".join(found)) == 402


def test_a_second_start_maps_what_the_first_one_wrote(text, words, tmp_path, monkeypatch):
    first = encoded.load(text, words)
    (file,) = kept(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    never(monkeypatch)
    second = encoded.load(text, words)
    assert isinstance(second.train, np.memmap)
    assert second.train.tolist() == first.train.tolist()
    assert (second.sha256, second.files, second.text_bytes, str(second)) == (
        first.sha256,
        first.files,
        first.text_bytes,
        str(first),
    )


def test_another_text_or_tokenizer_is_encoded_by_itself(text, words, tmp_path):
    first = encoded.load(text, words)
    text.write_text(TEXT.replace("line 299", "line 298"), encoding="utf-8")
    assert encoded.load(text, words).sha256 != first.sha256
    assert encoded.load(text, Tokenizer.trained([TEXT], 300)).vocab_size == 300
    assert len(kept(tmp_path)) == 3


def _cut(file):
    os.truncate(file, file.stat().st_size - 2)


def _longer(file):
    file.write_bytes(file.read_bytes() + b"\0\0")


def _flipped(file):
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)


def _other_header(file):
    held = file.read_bytes()
    file.write_bytes(held[:16] + held[16:].replace(b'"sha256": "', b'"sha256": "0', 1)[: len(held) - 16])


def _counts(file):
    held = file.read_bytes()
    about = json.loads(held[16:4096])
    about["tokens"] = [1 << 40, -5]
    file.write_bytes(held[:16] + json.dumps(about).encode().ljust(4080) + held[4096:])


def _garbage(file):
    file.write_bytes(b"mptok001" + b"\xff" * 5000)


def _link(file):
    moved = file.with_name("moved")
    file.rename(moved)
    file.symlink_to(moved)


@pytest.mark.parametrize("harm", [_cut, _longer, _flipped, _other_header, _counts, _garbage, _link])
def test_a_file_that_is_not_whole_is_made_anew(text, words, tmp_path, harm):
    first = encoded.load(text, words)
    tokens = first.train.tolist()
    del first  # it is mapped
    harm(next(file for file in kept(tmp_path) if file.suffix == ".tokens"))
    encoder = encoded.Encoder(corpus.load(text), words)
    assert encoded.opened(encoder.key, words) is None
    again = encoded.load(text, words)
    assert again.train.tolist() == tokens
    assert encoded.opened(encoder.key, words).sha256 == again.sha256


def test_where_nothing_can_be_written_it_is_in_memory(text, words, tmp_path, monkeypatch):
    expected = encoded.load(text, words)
    monkeypatch.setenv("MPITRAIN_CACHE", "/dev/null/nowhere")
    found = encoded.load(text, words)
    assert found.train.tolist() == expected.train.tolist()
    assert found.val.tolist() == expected.val.tolist()
    assert found.sha256 == expected.sha256


@pytest.mark.parametrize("at", [0, 1, 15, -1])
def test_a_disk_that_fills_up_leaves_the_same_words_and_no_file(text, words, tmp_path, monkeypatch, at):
    expected, count, write = encoded.load(text, words), [0], disk.write
    monkeypatch.setenv("MPITRAIN_CACHE", str(tmp_path / "full"))

    def fails(*args):
        count[0] += 1
        if count[0] > at >= 0 or (at < 0 and args[3] == 0):  # the header comes last, to the front
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(disk, "write", fails)
    found = encoded.load(text, words)
    assert found.train.tolist() == expected.train.tolist()
    assert found.val.tolist() == expected.val.tolist()
    assert list((tmp_path / "full" / "tokens").iterdir()) == []


def test_a_tokenizer_that_fails_leaves_no_file(text, words, tmp_path, monkeypatch):
    count, encode = [0], Tokenizer.encode_all

    def fails(*args):
        count[0] += 1
        if count[0] > 4:
            raise DataError("refused")
        return encode(*args)

    monkeypatch.setattr(Tokenizer, "encode_all", fails)
    with pytest.raises(DataError, match="refused"):
        encoded.load(text, words)
    assert kept(tmp_path) == []


def test_it_can_be_done_bit_by_bit(text, words):
    expected = encoded.load(text, words)
    encoder = encoded.Encoder(corpus.load(text), words)
    shares = [encoder.share]
    while not encoder.work(0.0):
        shares.append(encoder.share)
    assert len(shares) > 10
    assert shares == sorted(set(shares))
    assert (shares[0], encoder.share) == (0.0, 1.0)
    assert max(shares) < 1
    assert encoder.result().train.tolist() == expected.train.tolist()


def test_more_than_65536_words_take_four_bytes(text, words):
    held = json.loads(words.text)
    vocab = held["model"]["vocab"]
    held["added_tokens"] = [
        {"id": 350, "content": "世", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": False}
    ]
    many = {f"word{n}": 351 + n for n in range(70_000)}
    held["model"]["vocab"] = {**vocab, "世": 350, **many} | {"世": 70_400, "last": 350}
    held["added_tokens"][0]["id"] = 70_400
    wide = Tokenizer(json.dumps(held))
    assert wide.vocab_size == 70_401
    found = encoded.load(text, wide)
    assert found.train.dtype == np.dtype("<u4")
    assert int(found.train.max()) == 70_400
    assert wide.decode(found.train.tolist()) + wide.decode(found.val.tolist()) == TEXT
    assert encoded.load(text, wide).sha256 == found.sha256


def test_what_was_not_used_for_longest_goes_when_there_is_too_much(text, words, tmp_path, monkeypatch):
    paths = []
    for n in range(3):
        other = tmp_path / f"text{n}.txt"
        other.write_text(TEXT, encoding="utf-8")
        before = set(kept(tmp_path)) if paths else set()
        encoded.load(other, words)
        (new,) = set(kept(tmp_path)) - before
        os.utime(new, (1000 + n, 1000 + n))
        paths.append(new)
    left = tmp_path / "cache" / "tokens" / ".killed"
    left.write_text("x")
    os.utime(left, (5, 5))
    size = paths[0].stat().st_size
    monkeypatch.setattr(encoded, "LARGEST_CACHE", 2 * size + 100)
    encoded.load(tmp_path / "text0.txt", words)  # used just now
    encoded.load(text, words)
    assert not left.exists()
    assert [path.exists() for path in paths] == [True, False, False]
    monkeypatch.setattr(encoded, "LARGEST_CACHE", 10)
    encoded.load(tmp_path / "text1.txt", words)
    assert [path.exists() for path in paths] == [False, True, False]  # what was just written stays


def test_a_loss_a_byte_is_that_of_the_text_whatever_the_words_are(text, words):
    as_bytes, as_words = corpus.load(text), encoded.load(text, words)
    assert as_bytes.bits_per_byte(3 * math.log(2)) == pytest.approx(3)
    for val, part, nbytes in ((False, as_words.train, as_bytes.train), (True, as_words.val, as_bytes.val)):
        assert as_words.bits_per_byte(math.log(330), val=val) == pytest.approx(math.log2(330) * len(part) / len(nbytes))
    numbers = corpus.Corpus(np.arange(9), np.arange(9), 9, "tokens", "", (), (), "")
    assert numbers.bits_per_byte(1.0) is None


def test_a_token_file_has_the_words_of_its_tokenizer(tmp_path, words):
    tokens = np.array(words.encode(TEXT))
    tokens.astype("<u2").tofile(tmp_path / "t.bin")
    found = encoded.load(tmp_path / "t.bin", words)
    assert (found.vocab_size, found.kind, found.tokenizer) == (330, "tokens", words)
    assert sum(found.text_bytes) == pytest.approx(len(TEXT.encode()), rel=1e-3)
    assert found.words.decode(found.train.tolist()) + found.words.decode(found.val.tolist()) == TEXT
    as_wide = type("Wide", (), {"vocab_size": 70_000, "decode": words.decode})()
    tokens.astype("<u4").tofile(tmp_path / "wide.bin")
    wide = encoded.load(tmp_path / "wide.bin", as_wide)
    assert np.array_equal(np.concatenate([wide.train, wide.val]), tokens)
    (tmp_path / "odd.bin").write_bytes(b"\0" * 6)
    with pytest.raises(DataError, match="four bytes a token"):
        encoded.load(tmp_path / "odd.bin", as_wide)


def test_of_a_long_text_a_tokenizer_is_made_of_spread_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(encoded, "LARGEST_TRAINING", 257 * 8)
    path = tmp_path / "long.txt"
    path.write_bytes(b"".join(b"%c" % (97 + n) * 1000 for n in range(20)))
    pieces = list(encoded.training_pieces(corpus.load(path)))
    assert sum(map(len, pieces)) == 257 * 8
    assert pieces[0][0] == "a"
    assert pieces[-1][-1] == "s"  # the last of the training part
