"""Text to numbers of words and back: a byte is a word, or what a tokenizer.json says.

    Bytes()                          256 words
    Tokenizer.read(PATH)             BPE words of a tokenizer.json, as GPT-2 and Llama have them
    Tokenizer.trained(pieces, 8000)  BPE words made of a text: byte-level, so that any text comes back as it was
    of_run(RUN)                      the one of a run: that of its folder, else bytes

The `tokenizers` library does the work, and is imported when it is used (`pip install "mpitrain[hf]"`).  A text is
encoded without the words that a template would put around it.  A special word, as <|endoftext|>, is found where it
stands in a text.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from mpitrain import disk
from mpitrain.data import tokenizer_file
from mpitrain.errors import ConfigError, DataError
from mpitrain.options import show

T = TypeVar("T")

_NO_LETTER = "\ufffd"  # stands for bytes that are no UTF-8
END = "<|endoftext|>"
"""The special word that a trained tokenizer has, with the number 0."""


class Words(Protocol):
    """How text becomes numbers, and numbers text."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The numbers of a text's words."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of words; where their bytes are no UTF-8, a sign that says so."""
        ...

    def stream(self) -> Stream:
        """Decodes words that come one by one."""
        ...


class Stream:
    """The text of words that come one by one, told as soon as it is certain.

    A word may be part of a letter, and how one is written may depend on those before it.

    Args:
        decode: makes the text of words.
    """

    _FEW = 16  # words of certain text that are decoded again with what follows
    _LONGEST = 24  # words that wait for the end of a letter; what needs more is none

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._words: list[int] = []
        self._told = 0  # letters of the text of `_words`
        self._waiting = 0

    def add(self, token: int) -> str:
        """What can be told now."""
        self._words.append(int(token))
        text = self._decode(self._words)
        certain = len(text.rstrip(_NO_LETTER))  # behind it are bytes of a letter that may not be whole yet
        self._waiting = self._waiting + 1 if certain < len(text) else 0
        if self._waiting > self._LONGEST:
            certain = len(text)
        more = text[self._told : certain]
        self._told = max(self._told, certain)
        if len(self._words) >= 2 * self._FEW and not self._waiting:
            self._forget(text)
        return more

    def _forget(self, text: str) -> None:
        """Leave out the first words, if the text of the others is the end of what it was."""
        for size in range(self._FEW, self._FEW + 4):  # one of them begins with a letter
            end = self._decode(self._words[-size:])
            if text.endswith(end):
                self._words, self._told = self._words[-size:], len(end)
                return

    def end(self) -> str:
        """What is left when no word follows."""
        return self._decode(self._words)[self._told :] if self._words else ""


class Bytes:
    """The words are the bytes of UTF-8."""

    vocab_size = 256

    def __str__(self) -> str:
        return "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < self.vocab_size).decode(errors="replace")

    def stream(self) -> Stream:
        return _ByteStream(self.decode)


class _ByteStream(Stream):
    """The same for bytes, whose letters end where UTF-8 says."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(decode)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self._utf8.decode(bytes([token]) if token < Bytes.vocab_size else b"")

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


class Tokenizer:
    """The words of a tokenizer.json.

    Args:
        text: of the file.
        where: what it is, for messages.

    Attributes:
        text: of the file, as it was read.
        vocab_size: one more than the largest number of a word.
        sha256: of the text.

    Raises:
        ConfigError: the library is not installed.
        DataError: the file is not what is taken (`tokenizer_file`).
    """

    def __init__(self, text: str, where: str = tokenizer_file.NAME) -> None:
        library = load_library()
        self.text, self.where = text, where
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        given, self.vocab_size, added = tokenizer_file.checked(text, where)
        self._words: Any = self._asked(lambda: library.Tokenizer.from_str(given))
        for word, number in added.items():
            if (found := self._words.token_to_id(word)) != number:  # the library gives its own number without a word
                raise DataError(
                    f"tokenizer {show(where)}: added token {show(word)} has the number {number}, but would be {found}:"
                    " numbers must follow those of the model's words without a gap."
                )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """That of a file, or of the tokenizer.json in a folder.

        Raises:
            ConfigError: the library is not installed.
            DataError: the file cannot be read or is not what is taken.
        """
        return cls(tokenizer_file.read(path), str(path))

    @classmethod
    def trained(cls, pieces: Iterable[str], vocab_size: int) -> Tokenizer:
        """Byte-level BPE words of a text: at most so many, fewer where no pair occurs twice.

        The same text gives the same words, with the same version of the library.

        Args:
            pieces: of the text.
            vocab_size: at least 257, the bytes and `END`.

        Cost: about 0.2 s of a core for each MB of text.
        """
        assert vocab_size > Bytes.vocab_size, vocab_size
        library = load_library()
        words = library.Tokenizer(library.models.BPE())
        words.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        words.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[END],
            show_progress=False,
        )
        words.train_from_iterator(iter(pieces), trainer)
        return cls(words.to_str(), f"bpe:{vocab_size}")

    def __str__(self) -> str:
        return f"{self.vocab_size:,} words, sha256 {self.sha256[:12]}"

    def encode(self, text: str) -> list[int]:
        encoded = self._asked(lambda: self._words.encode(text, add_special_tokens=False))
        return list(encoded.ids)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers of the words of several texts, each in uint32.

        Cost: 2 to 6 MB/s on two cores; it takes all that there are.
        """
        found = self._asked(lambda: self._words.encode_batch_fast(list(texts), add_special_tokens=False))
        return [np.array(each.ids, np.uint32) for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        numbers = [int(token) for token in tokens]
        return str(self._asked(lambda: self._words.decode(numbers, skip_special_tokens=False)))

    def stream(self) -> Stream:
        return Stream(self.decode)

    def word(self, token: int) -> str:
        """A word as the file writes it; empty where the number has none."""
        return str(self._words.id_to_token(int(token)) or "")

    def number(self, word: str) -> int | None:
        """The number of a word that the file writes so."""
        found = self._words.token_to_id(word)
        return None if found is None else int(found)

    @property
    def special(self) -> dict[str, int]:
        """Special words and their numbers."""
        added = self._words.get_added_tokens_decoder()
        return {word.content: int(number) for number, word in sorted(added.items()) if word.special}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file as it was read, whole or not at all, in the place of one that is there."""
        disk.replace(Path(path), self.text.encode())

    def _asked(self, ask: Callable[[], T]) -> T:
        """An answer of the library; whatever goes wrong in it is the file's fault."""
        try:
            return ask()
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # what it did not foresee is no Exception
            raise DataError(
                f"tokenizer {show(self.where)}: the tokenizers library refuses it: {tokenizer_file.plain(str(error))}."
            ) from None


def load_library() -> Any:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            f"a tokenizer needs the tokenizers library, which cannot be loaded: {error}.\n"
            'Install it: pip install "mpitrain[hf]".  Without one the words are bytes.'
        ) from None
    return tokenizers


def of_run(run: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer in the folder of a run; None: it has none, and its words are bytes or those of a token file.

    Raises:
        ConfigError: the library is not installed.
        DataError: the file cannot be read, is a link, or is not what is taken.
    """
    path = Path(run) / tokenizer_file.NAME
    if not os.path.lexists(path):
        return None
    if path.is_symlink():
        raise DataError(f"tokenizer {show(path)}: is a link; a run's own lies in its folder.")
    return Tokenizer.read(path)
