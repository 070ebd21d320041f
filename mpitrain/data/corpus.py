"""Where the text comes from: the standard library's own source, a text file, a folder of text, or a token file.

    nothing                 the .py files of this Python's standard library, without its tests: 11 to 13 MB of source
                            text that every machine has, in 0.05 s and without a download
    a text file             its UTF-8 bytes
    a folder                the UTF-8 bytes of its text files, one after the other, sorted by path
    NAME.bin                tokens: flat little-endian uint16, as nanoGPT writes them
    a folder with train.bin tokens, and val.bin for validation where it exists

Text is read byte by byte: the vocabulary is the 256 bytes.  `encoded` makes words of a tokenizer of it.  Token files of
a tokenizer with more than 65,536 words are uint32.  The last 5 % are validation.  Files are memory-mapped where
they are used as they lie, so the ranks of one host share them; only several files are joined in memory.

Ranks that read different texts would train on nonsense without an error, so a corpus carries a hash for comparison.
"""

from __future__ import annotations

import codecs
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mpitrain.data.tokenizer import Bytes, Tokenizer, Words
from mpitrain.errors import DataError

BYTE_VOCABULARY = 256
_NO_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_SNIFF = 65_536  # bytes at a file's start that decide whether it is text
_PIECE, _WHOLE, _SAMPLES = 1 << 20, 256 << 20, 64  # hashing, bytes: up to _WHOLE a corpus is hashed whole


@dataclass(frozen=True)
class Corpus:
    """A text as numbers, and what a person wants to know about it.

    Attributes:
        train, val: 1-d arrays of uint8 (bytes), uint16 or uint32 (tokens), perhaps memory-mapped; read only.
        vocab_size: one more than the largest token that can occur.
        kind: "bytes" or "tokens".
        source: what the corpus is, for messages: the path, or "Python standard library".
        files: the files read, as paths below the source, in order.
        skipped: files of the folder that are not text.
        sha256: of all tokens in order, or of 64 evenly spread MiB and the length where there are more than 256 MiB.
        tokenizer: which made the tokens; None: bytes, or nobody said.
        text_bytes: bytes of the text that train and val stand for; None: nobody knows.
        ends: int64 (documents,), where each document, a file, of train and val together ends, in tokens, ascending;
            None: they are one document.
    """

    train: np.ndarray
    val: np.ndarray
    vocab_size: int
    kind: str
    source: str
    files: tuple[str, ...]
    skipped: tuple[str, ...]
    sha256: str
    tokenizer: Tokenizer | None = None
    text_bytes: tuple[int, int] | None = None
    ends: np.ndarray | None = None

    @property
    def identity(self) -> str:
        """What is the same where the tokens are, and the documents begin in the same places."""
        if self.ends is None:
            return self.sha256
        return f"{self.sha256}-{hashlib.sha256(self.ends.astype('<i8').data).hexdigest()[:16]}"

    @property
    def words(self) -> Words | None:
        """Makes text of the numbers; None: they are those of nobody knows what."""
        return Bytes() if self.kind == "bytes" else self.tokenizer

    def bits_per_byte(self, loss: float, *, val: bool = False) -> float | None:
        """A loss in nats a token as bits a byte of the text, so that runs with other words compare.

        Args:
            loss: mean over targets.
            val: it is that of validation.

        Returns:
            None: how many bytes the tokens stand for is not known.
        """
        if self.kind == "bytes":
            return loss / math.log(2)
        if self.text_bytes is None:
            return None
        tokens, nbytes = len(self.val if val else self.train), self.text_bytes[val]
        return loss / math.log(2) * tokens / nbytes if nbytes else None

    def __str__(self) -> str:
        names = f"{len(self.files):,} files" if len(self.files) != 1 else "1 file"
        if 1 < len(self.files) <= 3:
            names += f" ({', '.join(self.files)})"
        if self.skipped:
            more = ", ..." if len(self.skipped) > 1 else ""
            names += f", {len(self.skipped)} more left out as no text ({self.skipped[0]}{more})"
        total = len(self.train) + len(self.val)
        return (
            f"{self.source}: {names}, {total:,} {self.kind}, the last {len(self.val):,} for validation, "
            f"vocabulary {self.vocab_size:,}{self._bytes_per_token()}, sha256 {self.sha256[:12]}"
        )

    def _bytes_per_token(self) -> str:
        if self.text_bytes is None:
            return ""
        return f", {sum(self.text_bytes) / max(1, len(self.train) + len(self.val)):.2f} bytes a token"


def load(path: str | os.PathLike[str] | None = None, vocab_size: int | None = None, *, wide: bool = False) -> Corpus:
    """Read a corpus.

    Args:
        path: a file or folder as in the table above; None or "" for the standard library.
        vocab_size: declared vocabulary of a token file; without it the file is read once for its largest token.
        wide: a token file is uint32.

    Raises:
        DataError: the path is missing, empty, unreadable, holds no text, or is no token file.

    Cost: the standard library takes about 0.03 s of a core; a mapped file its hash, at 0.5 to 2 GB/s.
    """
    if not path:
        return _standard_library()
    root = Path(path)
    try:
        if root.is_dir():
            return _token_folder(root, vocab_size, wide) if (root / "train.bin").is_file() else _text_folder(root)
        if not root.exists():
            raise DataError(f"--data {root}: there is no such file or folder (looked from {Path.cwd()}).")
        if not root.is_file():
            raise DataError(f"--data {root}: is neither a file nor a folder.")
        if root.suffix == ".bin":
            return _corpus(*_split(_map_tokens(root, wide)), str(root), (root.name,), vocab_size=vocab_size)
        return _text_file(root)
    except OSError as error:
        raise DataError(f"--data {root}: cannot read {error.filename or root}: {error.strerror or error}.") from None


# ------------------------------------------------------------------------------------------------------------- text


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [name for name in _walk(root, _NO_SOURCE) if name.endswith(".py")]
    if not files:
        raise DataError(f"The Python standard library at {root} has no source text (.py).  Give a text: --data PATH.")
    try:
        texts = [_content(f"{root}/{name}") for name in files]
    except OSError as error:
        raise DataError(f"The standard library's {error.filename} cannot be read: {error.strerror}.") from None
    return _joined(texts, "Python standard library", files)


def _text_file(path: Path) -> Corpus:
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"--data {path}: the file is empty.")
    with path.open("rb") as file:
        complaint = _not_text(file.read(_SNIFF), whole=size <= _SNIFF)
    if complaint:
        raise DataError(
            f"--data {path}: not UTF-8 text ({complaint}).  "
            f"Convert it (iconv -t UTF-8), or name it NAME.bin if it holds uint16 tokens."
        )
    return _corpus(*_split(np.memmap(path, np.uint8, "r")), str(path), (path.name,))


def _text_folder(root: Path) -> Corpus:
    texts, files, skipped = [], [], []
    for name in _walk(root, set()):
        text = _content(f"{root}/{name}")
        if _not_text(text[:_SNIFF], whole=len(text) <= _SNIFF):
            skipped.append(name)
        elif text:
            texts.append(text)
            files.append(name)
    if not files:
        found = f"{len(skipped)} files, none of them UTF-8 text" if skipped else "no file with text"
        raise DataError(f"--data {root}: the folder holds {found} (hidden files and folders do not count).")
    return _joined(texts, str(root), files, skipped)


def _joined(texts: list[bytes], source: str, files: list[str], skipped: Sequence[str] = ()) -> Corpus:
    """The corpus of several files, each a document."""
    text = _corpus(*_split(_as_bytes(b"".join(texts))), source, tuple(files), tuple(skipped))
    return replace(text, ends=np.cumsum([len(each) for each in texts], dtype=np.int64))


def _content(path: str) -> bytes:
    """What a file holds; of a thousand small files `Path.read_bytes` takes twice the time."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _walk(root: Path, left_out: set[str]) -> list[str]:
    """Paths of the regular files below `root`, with `/` between parts, sorted; hidden and `left_out` ones not."""
    names, folders = [], [""]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):  # a link to a folder may lead round in a circle
                    if entry.name not in left_out:
                        folders.append(f"{folder}{entry.name}/")
                elif entry.is_file():
                    names.append(folder + entry.name)
    return sorted(names)


def _not_text(start: bytes, whole: bool) -> str:
    """Why the start of a file is not UTF-8 text; empty where it is.  `whole`: nothing follows the start."""
    if (zero := start.find(b"\0")) >= 0:
        return f"a zero byte at {zero}"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start, final=whole)
    except UnicodeDecodeError as error:
        return f"byte 0x{start[error.start]:02x} at {error.start}"
    return ""


def _as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


# ------------------------------------------------------------------------------------------------------------ tokens


def _map_tokens(path: Path, wide: bool) -> np.ndarray:
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"--data {path}: the token file is empty.")
    if size % (4 if wide else 2):
        kind = "is no multiple of four; a token file of so many words is flat uint32, four bytes a token."
        if not wide:
            kind = "is an odd number; a token file is flat uint16, two bytes a token."
        raise DataError(
            f"--data {path}: {size:,} bytes {kind}  It may be cut off, or not a token file (text must not end in .bin)."
        )
    return np.memmap(path, "<u4" if wide else "<u2", "r")


def _token_folder(root: Path, vocab_size: int | None, wide: bool) -> Corpus:
    train = _map_tokens(root / "train.bin", wide)
    if not (root / "val.bin").is_file():
        return _corpus(*_split(train), str(root), ("train.bin",), vocab_size=vocab_size)
    val = _map_tokens(root / "val.bin", wide)
    return _corpus(train, val, str(root), ("train.bin", "val.bin"), vocab_size=vocab_size)


def _pieces(tokens: np.ndarray, length: int) -> Iterator[np.ndarray]:
    return (tokens[start : start + length] for start in range(0, len(tokens), length))


# ------------------------------------------------------------------------------------------------------- both kinds


def _split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation part: the last twentieth, rounded down, is validation."""
    cut = len(tokens) - len(tokens) // 20
    return tokens[:cut], tokens[cut:]


def _corpus(
    train: np.ndarray,
    val: np.ndarray,
    source: str,
    files: tuple[str, ...],
    skipped: tuple[str, ...] = (),
    vocab_size: int | None = None,
) -> Corpus:
    kind = "bytes" if train.dtype == np.uint8 else "tokens"
    if kind == "bytes":
        vocab_size = BYTE_VOCABULARY
    elif vocab_size is None:
        vocab_size = 1 + max(int(piece.max()) for part in (train, val) for piece in _pieces(part, _PIECE))
    return Corpus(train, val, vocab_size, kind, source, files, skipped, fingerprint(train, val))


def fingerprint(*parts: np.ndarray) -> str:
    """SHA-256 of arrays, or of evenly spread parts of them where they are large."""
    digest = hashlib.sha256()
    if sum(part.nbytes for part in parts) <= _WHOLE:
        for part in parts:
            digest.update(part.data)
        return digest.hexdigest()
    for part in parts:
        length = _PIECE // part.itemsize
        digest.update(len(part).to_bytes(8, "little"))
        for start in np.linspace(0, max(0, len(part) - length), _SAMPLES).astype(np.int64):
            digest.update(part[start : start + length].data)
    return digest.hexdigest()
