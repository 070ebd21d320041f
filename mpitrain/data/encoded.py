"""A text in the words of a tokenizer: encoded once, kept, and mapped by all ranks of a host.

    CACHE/tokens/KEY.tokens        KEY: hash of the text, the tokenizer and what reads them

CACHE is $MPITRAIN_CACHE, else mpitrain in the user's folder of caches.  Where nothing can be written, every rank
encodes for itself.  What has not been used for longest goes when all of them together take more than `LARGEST_CACHE`.

Documents, the files of a folder, are encoded each by itself.  A long one is cut where byte-level tokenizers never join:
before a line end, or else a space, behind a letter or a digit.  So its words are those of all of it at once, and of any
length it takes little memory.  Validation is the same bytes of the text with every tokenizer, and without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain import disk
from mpitrain.data import corpus as corpora
from mpitrain.data.corpus import Corpus, fingerprint
from mpitrain.data.tokenizer import Tokenizer, load_library

VARIABLE = "MPITRAIN_CACHE"
LARGEST_CACHE = 16 << 30  # bytes
PIECE = 1 << 16  # bytes of text that are encoded by themselves
LARGEST_TRAINING = 64 << 20  # bytes of text of which a tokenizer is made; of a longer one that much, evenly spread
_AT_ONCE = 2 << 20  # bytes of text, about, that are encoded at once
_FORMAT, _LONGEST_HEADER, _ROOM = b"mptok001", 32 << 20, 4096
_MEASURED = 1 << 16  # tokens of a token file that are decoded to learn how many bytes a token is
_BORDERS = re.compile(rb"[0-9A-Za-z]\n"), re.compile(rb"[0-9A-Za-z] "), re.compile(rb"(?s).\n")  # the best first


def cache_folder() -> Path:
    """Where encoded texts are kept."""
    if given := os.environ.get(VARIABLE):
        return Path(given) / "tokens"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "mpitrain" / "tokens"


def load(path: str | os.PathLike[str] | None, tokenizer: Tokenizer) -> Corpus:
    """A corpus in the words of a tokenizer; token files are taken as its.

    Args:
        path: as `corpus.load` has it.
        tokenizer: of a vocabulary of more than 65,536 words, token files are uint32.

    Raises:
        DataError: as `corpus.load`.
    """
    text = corpora.load(path, tokenizer.vocab_size, wide=is_wide(tokenizer))
    if text.kind == "tokens":
        return with_tokenizer(text, tokenizer)
    encoder = Encoder(text, tokenizer)
    found = opened(encoder.key, tokenizer)
    if found is None:
        encoder.work()
        found = encoder.result()
    return found


def is_wide(tokenizer: Tokenizer) -> bool:
    """Whether numbers of words need more than two bytes."""
    return tokenizer.vocab_size > 1 << 16


def _dtype_of(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u4" if is_wide(tokenizer) else "<u2")


def with_tokenizer(tokens: Corpus, tokenizer: Tokenizer) -> Corpus:
    """The corpus of a token file whose words are known; how many bytes a token is, is measured at the beginning."""
    lengths = []
    for part in (tokens.train, tokens.val):
        start = part[:_MEASURED]
        known = start[start < tokenizer.vocab_size]  # what is beyond is refused when it is used
        lengths.append(round(len(tokenizer.decode(known.tolist()).encode()) * len(part) / max(1, len(start))))
    return replace(tokens, tokenizer=tokenizer, text_bytes=(lengths[0], lengths[1]))


def pieces(text: np.ndarray) -> Iterator[str]:
    """A text, uint8, as pieces of about `PIECE` bytes."""
    start = 0
    while start < len(text):
        stop = min(start + PIECE, len(text))
        if stop < len(text):
            ahead = text[stop : stop + PIECE].tobytes()
            border = next(filter(None, (kind.search(ahead) for kind in _BORDERS)), None)
            stop += border.start() + 1 if border else 0
            stop += _continued(text[stop:])
        yield text[start:stop].tobytes().decode(errors="replace")
        start = stop


def training_pieces(text: Corpus) -> Iterator[str]:
    """Of what a tokenizer is made: the training text, or of a long one evenly spread pieces."""
    train = text.train
    if len(train) <= LARGEST_TRAINING:
        yield from pieces(train)
        return
    count = LARGEST_TRAINING // PIECE
    for start in np.linspace(0, len(train) - PIECE, count).astype(np.int64):
        yield train[start : start + PIECE].tobytes().decode(errors="ignore")


def _continued(text: np.ndarray) -> int:
    """How many bytes at the start belong to a letter before them."""
    return next((number for number, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)


@dataclass(frozen=True)
class _About:
    """What stands at the beginning of a file of tokens.

    Attributes:
        tokens: of training and of validation.
        nbytes: of the text that they stand for.
        documents: whose ends stand behind the tokens; None: nobody knows of any.
        sha256: of the tokens; sha256_of_ends: of these.
    """

    source: str
    files: tuple[str, ...]
    skipped: tuple[str, ...]
    tokens: tuple[int, int]
    nbytes: tuple[int, int]
    documents: int | None
    sha256: str
    sha256_of_ends: str


class _Unit(NamedTuple):
    """What is encoded by itself, of training (0) or validation (1); or the end of a document."""

    part: int
    text: str
    ends: bool


class Encoder:
    """Encodes a text, as long as it is told to, into a file of the cache or into memory.

    Args:
        text: in bytes.
        tokenizer: its words.

    Attributes:
        key: of text and tokenizer; the same on all hosts.
        begun, done: whether it has, and whether all is encoded.

    Raises:
        DataError: the tokenizer fails on this text.
    """

    def __init__(self, text: Corpus, tokenizer: Tokenizer) -> None:
        assert text.kind == "bytes", text.kind
        train, val, self._begins = text.train, text.val, (0, len(text.train))
        if split := _continued(val):  # a letter lies over the border: it belongs to neither
            train, val = train[: len(train) - _continued(train[::-1]) - 1], val[split:]
            self._begins = (0, len(text.train) + split)
        self._text, self._tokenizer, self._parts = text, tokenizer, (train, val)
        self._dtype = _dtype_of(tokenizer)
        self.key = _key(text, tokenizer)
        self._rest, self._counts, self._ends = self._units(), [0, 0], list[int]()
        self._room = _room_of(self._about("", ""))
        self._file, self._path = -1, Path()
        self._kept: list[list[np.ndarray]] | None = None
        self._read = 0
        self.begun = self.done = False

    @property
    def share(self) -> float:
        """How much of the text is encoded; 1 when all is done."""
        return 1.0 if self.done else min(0.999, self._read / max(1, sum(map(len, self._parts))))

    def _units(self) -> Iterator[_Unit]:
        """The text in the order in which it is encoded."""
        ends = [] if self._text.ends is None else self._text.ends.tolist()
        number = 0
        for part, (text, begin) in enumerate(zip(self._parts, self._begins, strict=True)):
            start = 0
            while number < len(ends) and ends[number] <= begin + len(text):
                stop = max(start, ends[number] - begin)  # it may end in the letter that was left out
                yield from (_Unit(part, piece, False) for piece in pieces(text[start:stop]))
                yield _Unit(part, "", True)
                start, number = stop, number + 1
            yield from (_Unit(part, piece, False) for piece in pieces(text[start:]))

    def work(self, seconds: float = float("inf")) -> bool:
        """Encode for about so long; whether all is done.

        Raises:
            DataError: the tokenizer fails.
        """
        if not self.begun:
            self.begun = True
            self._begin()
        try:
            self._work(time.monotonic() + seconds)
        except BaseException:
            if self._kept is None:
                self._drop()
            raise
        return self.done

    def _work(self, end: float) -> None:
        while not self.done:
            units, size = list[_Unit](), 0
            for unit in self._rest:
                units.append(unit)
                size += len(unit.text.encode())
                if size >= _AT_ONCE:
                    break
            self._add(units)
            self._read += size
            self.done = not units
            if time.monotonic() >= end:
                break

    def result(self) -> Corpus:
        """The corpus, when all is done."""
        assert self.done
        if self._kept is None:
            self._publish()
        if self._kept is None:
            train, val = _mapped(self._path, self._dtype, self._room, self._counts)
        else:
            train, val = (np.concatenate([np.zeros(0, self._dtype), *kept]) for kept in self._kept)
        return _corpus(self._described(train, val), train, val, self._ends_in_tokens(), self._tokenizer)

    def _ends_in_tokens(self) -> np.ndarray | None:
        return None if self._text.ends is None else np.array(self._ends, np.int64)

    def _begin(self) -> None:
        folder = cache_folder()
        self._path = folder / f".{self.key}-{secrets.token_hex(8)}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = disk.create(self._path)
        except OSError:  # a home that cannot be written, or none
            self._kept = [[], []]

    def _add(self, units: Sequence[_Unit]) -> None:
        """Encode these, and keep their words."""
        words = iter(self._tokenizer.encode_all([unit.text for unit in units if not unit.ends]))
        found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        count = sum(self._counts)
        for unit in units:
            if unit.ends:
                self._ends.append(count)
            else:
                found[unit.part].append(next(words).astype(self._dtype))
                count += len(found[unit.part][-1])
        for part, arrays in enumerate(found):
            if arrays:
                self._keep(part, np.concatenate(arrays))

    def _keep(self, part: int, tokens: np.ndarray) -> None:
        if self._kept is None and len(tokens):
            try:
                self._write(sum(self._counts), tokens)
            except OSError:  # a full disk
                self._give_up()
        if self._kept is not None:
            self._kept[part].append(tokens)
        self._counts[part] += len(tokens)

    def _write(self, count: int, values: np.ndarray) -> None:
        """Write behind so many tokens."""
        if values.size:
            disk.write(self._file, self._path, values, self._room + count * self._dtype.itemsize)

    def _give_up(self) -> None:
        """Take into memory what was written, and the file away."""
        self._kept = [[np.array(part)] for part in _mapped(self._path, self._dtype, self._room, self._counts)]
        self._drop()

    def _drop(self) -> None:
        os.close(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _publish(self) -> None:
        """Give the file its name."""
        parts = _mapped(self._path, self._dtype, self._room, self._counts)
        target = self._path.with_name(f"{self.key}.tokens")
        try:
            if (ends := self._ends_in_tokens()) is not None:
                self._write(sum(self._counts), ends.astype("<i8"))
            disk.write(self._file, self._path, _header(self._described(*parts), self._room), 0)
            disk.sync(self._file, self._path)
            disk.rename(self._path, target)
        except OSError:
            self._give_up()
            return
        os.close(self._file)
        self._path = target
        _prune(target)

    def _described(self, train: np.ndarray, val: np.ndarray) -> _About:
        return self._about(fingerprint(train, val), _sha256_of(self._ends_in_tokens()))

    def _about(self, sha256: str, of_ends: str) -> _About:
        text = self._text
        tokens, lengths = (self._counts[0], self._counts[1]), (len(self._parts[0]), len(self._parts[1]))
        documents = None if text.ends is None else len(text.ends)
        return _About(text.source, text.files, text.skipped, tokens, lengths, documents, sha256, of_ends)


def _sha256_of(ends: np.ndarray | None) -> str:
    return "" if ends is None else hashlib.sha256(ends.astype("<i8").data).hexdigest()


def _key(text: Corpus, tokenizer: Tokenizer) -> str:
    """What the encoded text depends on."""
    digest = hashlib.sha256(_FORMAT)
    named = [text.source, text.files, text.skipped, tokenizer.sha256, load_library().__version__, len(text.train)]
    digest.update(json.dumps(named).encode())
    digest.update(_sha256_of(text.ends).encode())
    for part in (text.train, text.val):
        digest.update(part.data)  # all of it, also where the corpus's own hash takes samples
    return digest.hexdigest()


def opened(key: str, tokenizer: Tokenizer) -> Corpus | None:
    """The encoded text that is kept under a key, mapped; None: there is none, or it is not whole."""
    path = cache_folder() / f"{key}.tokens"
    dtype = _dtype_of(tokenizer)
    try:
        with disk.opened(path) as file:
            found = os.fstat(file)
            if found.st_uid != os.geteuid():
                return None
            about, room = _read_header(file, path, found.st_size)
            end = room + sum(about.tokens) * dtype.itemsize
            if found.st_size != end + 8 * (about.documents or 0):
                return None
            train, val = _mapped(path, dtype, room, about.tokens)
            ends = None if about.documents is None else np.zeros(about.documents, "<i8")
            if ends is not None and ends.size:
                disk.read(file, path, ends, end)
        if (fingerprint(train, val), _sha256_of(ends)) != (about.sha256, about.sha256_of_ends):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used just now
        return _corpus(about, train, val, ends, tokenizer)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _corpus(about: _About, train: np.ndarray, val: np.ndarray, ends: np.ndarray | None, tokenizer: Tokenizer) -> Corpus:
    return Corpus(
        train,
        val,
        tokenizer.vocab_size,
        "tokens",
        about.source,
        about.files,
        about.skipped,
        about.sha256,
        tokenizer,
        about.nbytes,
        ends,
    )


def _mapped(path: Path, dtype: np.dtype, room: int, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Both parts of the tokens in a file."""
    if not sum(counts):
        return np.zeros(0, dtype), np.zeros(0, dtype)
    tokens = np.memmap(path, dtype, "r", room, (sum(counts),))
    return tokens[: counts[0]], tokens[counts[0] :]


def _room_of(about: _About) -> int:
    """Bytes before the tokens: what the text is takes as many however many tokens it has."""
    length = 16 + len(json.dumps(about.__dict__)) + 2 * 64 + 4 * 20
    return -(-length // _ROOM) * _ROOM


def _header(about: _About, room: int) -> bytes:
    text = json.dumps(about.__dict__).encode()
    assert len(text) <= room - 16, (len(text), room)
    return _FORMAT + room.to_bytes(8, "little") + text.ljust(room - 16)


def _read_header(file: int, path: Path, size: int) -> tuple[_About, int]:
    """What stands at the beginning of a file, and how long that is.

    Raises:
        ValueError, TypeError, KeyError: it is none of ours.
    """
    start = bytearray(16)
    disk.read(file, path, start, 0)
    room = int.from_bytes(start[8:], "little")
    if start[:8] != _FORMAT or not 16 < room <= min(size, _LONGEST_HEADER):
        raise ValueError("no file of tokens")
    text = bytearray(room - 16)
    disk.read(file, path, text, 16)
    held: dict[str, Any] = json.loads(text)
    (train, val), (of_train, of_val) = held["tokens"], held["nbytes"]
    if not all(type(number) is int and 0 <= number < 1 << 60 for number in (train, val, of_train, of_val)):
        raise ValueError("no numbers of tokens")
    documents = held["documents"]
    if documents is not None and not (type(documents) is int and 0 <= 8 * documents <= size):
        raise ValueError("no number of documents")
    files, skipped = (tuple(str(name) for name in held[kind]) for kind in ("files", "skipped"))
    hashes = str(held["sha256"]), str(held["sha256_of_ends"])
    return _About(str(held["source"]), files, skipped, (train, val), (of_train, of_val), documents, *hashes), room


def _prune(kept: Path) -> None:
    """Remove what was not used for longest while all takes too much, and what killed ranks left a day ago."""
    with contextlib.suppress(OSError):
        found = [(path, path.stat(follow_symlinks=False)) for path in kept.parent.iterdir()]
        left = time.time() - 24 * 3600
        for path, about in found:
            if path.name.startswith(".") and about.st_mtime < left:
                path.unlink()
        whole = sorted((about.st_mtime, path, about.st_size) for path, about in found if path.suffix == ".tokens")
        total = sum(size for _, _, size in whole)
        for _, path, size in whole:
            if total <= LARGEST_CACHE:
                break
            if path != kept:
                path.unlink()
                total -= size
