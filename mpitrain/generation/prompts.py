"""What is to be continued, and how words become numbers and numbers words."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain.data.tokenizer import Bytes, Stream, Tokenizer, Words, of_run
from mpitrain.errors import ConfigError, DataError
from mpitrain.options import show

LONGEST = 1 << 21
"""Bytes of a file of prompts; all ranks are told them in one message."""
MOST = 1024
"""Texts that are written at once."""


class Numbers:
    """Words are written as their numbers, with spaces between; commas may stand there, too.

    Args:
        vocab_size: of the model.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """The numbers in a text.

        Raises:
            DataError: a word is no number.
        """
        words = text.replace(",", " ").split()
        for word in words:
            if not (word.isascii() and word.isdigit() and len(word) < 10):
                raise DataError(f"--words numbers: {show(word)} is no number of a word.")
        return [int(word) for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def stream(self) -> Stream:
        return _Parted(self.decode)


class _Parted(Stream):
    """A number behind a space."""

    def add(self, token: int) -> str:
        return f" {token}"

    def end(self) -> str:
        return ""


def words_of(asked: str | None, run: Path | None, vocab: int) -> Words:
    """How the words of a model are written.

    Args:
        asked: `bytes`, `numbers`, or a tokenizer.json or the folder of one; None: that of the run, else bytes if the
            model has as many words.
        run: folder of the run that the checkpoint is of; None: of none.
        vocab: words of the model.

    Raises:
        ConfigError: nobody said, and nothing lies there; or the tokenizers library is missing.
        DataError: the tokenizer cannot be read, or has more words than the model.
    """
    match asked:
        case "bytes":
            return Bytes()
        case "numbers":
            return Numbers(vocab)
        case None:
            found: Words | None = None if run is None else of_run(run)
            if found is None and vocab == Bytes.vocab_size:
                found = Bytes()
            if found is None:
                raise ConfigError(
                    f"the model has {vocab:,} words, and no tokenizer.json lies with it that says which they are.\n"
                    "Give one with --words PATH/tokenizer.json, or write words as numbers with --words numbers."
                )
        case _:
            found = Tokenizer.read(asked)
    if found.vocab_size > vocab:
        raise DataError(
            f"the tokenizer has {found.vocab_size:,} words and the model {vocab:,}: it belongs to another model."
        )
    return found


def read_prompts(prompt: str | None, file: str | None, by_line: bool) -> list[str]:
    """The texts to be continued.

    Args:
        prompt: the text itself.
        file: of a text; "-" is standard input.
        by_line: every line of the file that is not empty is a text of its own.

    Raises:
        ConfigError: none is given, or two are.
        DataError: the file cannot be read, is too long, no UTF-8, or empty, or has too many lines.
    """
    if (prompt is None) == (file is None):
        raise ConfigError("mpitrain generate: give either --prompt TEXT or --prompt-file FILE (- is standard input).")
    if prompt is not None:
        return [prompt]
    text = _read(str(file))
    texts = [line for line in text.splitlines() if line] if by_line else [text]
    if not any(texts):
        raise DataError(f"--prompt-file {show(file)}: is empty; a model of next words needs one to begin with.")
    if len(texts) > MOST:
        raise DataError(f"--prompt-file {show(file)}: has {len(texts):,} lines; at most {MOST:,} texts go together.")
    return texts


def _read(file: str) -> str:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(LONGEST + 1)
        else:
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
            with os.fdopen(descriptor, "rb") as stream:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise DataError(f"--prompt-file {show(file)}: is not a regular file; - is standard input.")
                data = stream.read(LONGEST + 1)
    except OSError as error:
        raise DataError(f"--prompt-file {show(file)}: cannot be read: {error.strerror}.") from None
    if len(data) > LONGEST:
        raise DataError(f"--prompt-file {show(file)}: has more than {LONGEST:,} bytes.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"--prompt-file {show(file)}: byte {error.start} is not UTF-8.") from None
