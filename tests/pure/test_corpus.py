"""Corpora: what is read, in which order, how it is cut, and what is said when it cannot be read."""

import hashlib
import os
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from mpitrain.data import corpus
from mpitrain.errors import DataError


def refused(path):
    with pytest.raises(DataError) as caught:
        corpus.load(path)
    text = str(caught.value)
    assert str(path) in text
    assert len(text.splitlines()) <= 5
    return text


def whole(loaded):
    return bytes(loaded.train) + bytes(loaded.val)


# ------------------------------------------------------------------------------------------------- the standard library


def test_the_default_is_the_source_of_the_standard_library_without_its_tests():
    loaded = corpus.load()
    root = Path(sysconfig.get_paths()["stdlib"])
    out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    expected = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not out & set(path.relative_to(root).parts[:-1])
    )
    assert list(loaded.files) == expected
    assert {"ast.py", "json/decoder.py"} <= set(expected)
    text = b"".join((root / name).read_bytes() for name in expected)
    assert whole(loaded) == text
    assert len(loaded.val) == len(text) // 20
    assert loaded.sha256 == hashlib.sha256(text).hexdigest()
    assert (loaded.vocab_size, loaded.kind, loaded.source) == (256, "bytes", "Python standard library")
    assert f"{len(expected):,} files, {len(text):,} bytes" in str(loaded)
    assert loaded.sha256[:12] in str(loaded)


def test_the_default_is_quick_to_read():
    """Eight ranks do it at once on perhaps two cores: 0.03 s of a core each."""
    corpus.load()
    assert min(_core_seconds(corpus.load) for _ in range(3)) < 0.25


def _core_seconds(call):
    start = time.thread_time()
    call()
    return time.thread_time() - start


def test_an_installation_without_source_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"no source text.*--data PATH"):
        corpus.load()


# ------------------------------------------------------------------------------------------------------------- text


def test_a_text_file_is_its_bytes_and_the_last_twentieth_is_validation(tmp_path):
    text = ("grüße, 世界\n" * 100).encode()
    (tmp_path / "a.txt").write_bytes(text)
    loaded = corpus.load(tmp_path / "a.txt")
    assert whole(loaded) == text
    assert len(loaded.val) == len(text) // 20
    assert loaded.files == ("a.txt",)
    assert loaded.sha256 == hashlib.sha256(text).hexdigest()
    assert corpus.load(str(tmp_path / "a.txt")).sha256 == loaded.sha256


def test_a_folder_is_its_text_files_sorted_by_path(tmp_path):
    for name, text in {"b.txt": "B" * 40, "a/z.md": "Z" * 40, "a/b/c.rst": "C" * 40, "a.txt": "A" * 40}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a" / "circle").symlink_to(tmp_path)
    loaded = corpus.load(tmp_path)
    assert loaded.files == ("a.txt", "a/b/c.rst", "a/z.md", "b.txt")
    assert whole(loaded) == b"A" * 40 + b"C" * 40 + b"Z" * 40 + b"B" * 40
    assert loaded.skipped == ("picture.png",)
    assert "4 files, 1 more left out as no text (picture.png)" in str(loaded)


def test_the_hash_tells_texts_apart(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "b.txt").write_text("x" * 999 + "y")
    assert corpus.load(tmp_path / "a.txt").sha256 != corpus.load(tmp_path / "b.txt").sha256


def test_a_long_text_is_hashed_at_evenly_spread_places(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_WHOLE", 1000)
    monkeypatch.setattr(corpus, "_PIECE", 100)
    text = bytearray(b"x" * 100_000)
    hashes = set()
    for place in (None, 0, 94_999, 99_999):
        changed = bytearray(text)
        if place is not None:
            changed[place] = ord("y")
        (tmp_path / "a.txt").write_bytes(changed)
        hashes.add(corpus.load(tmp_path / "a.txt").sha256)
    (tmp_path / "a.txt").write_bytes(text + b"x")
    hashes.add(corpus.load(tmp_path / "a.txt").sha256)
    assert len(hashes) == 5


def test_a_character_cut_at_the_end_of_the_look_is_still_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 65_535 + "é".encode() * 10)
    assert len(whole(corpus.load(tmp_path / "a.txt"))) == 65_555


# ------------------------------------------------------------------------------------------------------------ tokens


def test_a_token_file_is_flat_uint16_in_little_endian_order(tmp_path):
    tokens = np.arange(1000).astype("<u2") * 50
    tokens.tofile(tmp_path / "t.bin")
    loaded = corpus.load(tmp_path / "t.bin")
    assert np.array_equal(np.concatenate([loaded.train, loaded.val]), tokens)
    assert len(loaded.val) == 50
    assert loaded.vocab_size == 999 * 50 + 1
    assert loaded.kind == "tokens"
    assert corpus.load(tmp_path / "t.bin", vocab_size=50_304).vocab_size == 50_304


def test_a_folder_with_train_and_val_keeps_their_split(tmp_path):
    np.arange(300).astype("<u2").tofile(tmp_path / "train.bin")
    assert len(corpus.load(tmp_path).val) == 15
    np.full(40, 7, "<u2").tofile(tmp_path / "val.bin")
    loaded = corpus.load(tmp_path)
    assert len(loaded.train) == 300
    assert loaded.val.tolist() == [7] * 40
    assert loaded.files == ("train.bin", "val.bin")
    assert loaded.vocab_size == 300


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path):
    assert "there is no such file or folder" in refused(tmp_path / "nothing.txt")
    (tmp_path / "empty.txt").write_text("")
    assert "the file is empty" in refused(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    assert "not UTF-8 text (byte 0xef at 2)" in refused(tmp_path / "latin.txt")
    (tmp_path / "zero.txt").write_bytes(b"ab\0c")
    assert "a zero byte at 2" in refused(tmp_path / "zero.txt")
    (tmp_path / "cut.txt").write_bytes("é".encode()[:1])
    assert "not UTF-8 text" in refused(tmp_path / "cut.txt")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    assert "3 bytes is an odd number" in refused(tmp_path / "odd.bin")
    (tmp_path / "none.bin").write_bytes(b"")
    assert "the token file is empty" in refused(tmp_path / "none.bin")
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe")


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "bare").mkdir()
    assert "holds no file with text" in refused(tmp_path / "bare")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x.o").write_bytes(b"\x7fELF\0")
    assert "1 files, none of them UTF-8 text" in refused(tmp_path / "binary")


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    """Root may read everything, so the refusal of the operating system is put in its place."""
    (tmp_path / "a.txt").write_text("text")

    def deny(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", deny)
    monkeypatch.setattr(corpus, "open", deny, raising=False)
    assert "Permission denied" in refused(tmp_path / "a.txt")
    assert "Permission denied" in refused(tmp_path)
