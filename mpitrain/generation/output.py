"""What is printed of texts: one while it is written, several when all are done, or all that is known as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TextIO

import numpy as np

from mpitrain.data.tokenizer import Words

PAUSE = 0.1  # seconds in which a launcher hands on what was printed


class Texts:
    """The texts that are written, each until the word that ends it.

    Args:
        prompts: what each begins with.
        ends: words that end a text; they are no part of it.

    Attributes:
        written: the words that were added to each.
        ended: whether each has met its end.
    """

    def __init__(self, prompts: Sequence[str], ends: Collection[int]) -> None:
        self.prompts = list(prompts)
        self.written: list[list[int]] = [[] for _ in prompts]
        self.ended = [False] * len(prompts)
        self._ends = frozenset(ends)

    @property
    def over(self) -> bool:
        """Whether all have ended."""
        return all(self.ended)

    def add(self, words: np.ndarray) -> None:
        """The next word of each; what comes behind an end does not count."""
        for text, word in enumerate(words):
            self.ended[text] = self.ended[text] or int(word) in self._ends
            if not self.ended[text]:
                self.written[text].append(int(word))


class Printer:
    """Prints texts on the rank that reports.

    Args:
        out: where the texts go; what else is said goes to `err`.
        texts: the texts.
        words: how they are written.
        as_json: print nothing before `finish`.
        launched: whether a launcher hands on what is printed, and what goes to `err` by a way of its own.

    Attributes:
        unread: whether nobody reads `out` any more, or it cannot be written.
        wrong: why it cannot be written; None: it can, or nobody reads it.
    """

    def __init__(
        self, out: TextIO, err: TextIO, texts: Texts, words: Words, as_json: bool, launched: bool = False
    ) -> None:
        self._out, self._err, self._texts, self._words = out, err, texts, words
        self._live = not as_json and len(texts.prompts) == 1
        self._as_json = as_json
        self._launched = launched
        self._stream = words.stream()
        self._told = 0
        self._began = time.perf_counter()
        self._first: float | None = None
        self.unread = False
        self.wrong: OSError | None = None
        if self._live:
            self._put(texts.prompts[0])

    def add(self) -> None:
        """Another word of each text is there."""
        if self._first is None:
            self._first = time.perf_counter() - self._began
        if self._live:
            for word in self._texts.written[0][self._told :]:
                self._put(self._stream.add(word))
            self._told = len(self._texts.written[0])

    def finish(self, facts: Mapping[str, Any]) -> None:
        """The end of the texts, and how long it took.

        Args:
            facts: what else is told as JSON.
        """
        texts, seconds = self._texts, time.perf_counter() - self._began
        first = self._first or 0.0
        count = sum(map(len, texts.written))
        if self._as_json:
            self._put(f"{json.dumps(self._json(facts, first, seconds))}\n", plain=True)
            return
        if self._live:
            self._put(f"{self._stream.end()}\n")
        else:
            for number, prompt in enumerate(texts.prompts):
                text = prompt + self._decoded(number)
                self._put(f"--- {number + 1} of {len(texts.prompts)} ---\n{text}\n")
        if self._launched:
            time.sleep(PAUSE)  # or the line could overtake the end of the text
        if self.wrong is not None:
            return
        rest = max(seconds - first, 1e-9)
        later = count - sum(map(bool, texts.written))
        speed = f", then {later / rest:,.0f} a second" if later else ""
        ended = sum(texts.ended)
        why = "" if not ended else "; it ended" if len(texts.ended) == 1 else f"; {ended} of {len(texts.ended)} ended"
        self.say(f"{count:,} words in {seconds:.2f} s: the first after {first:.2f} s{speed}{why}")

    def say(self, line: str) -> None:
        """Tell people something that is no text."""
        print(_plain(line), file=self._err, flush=True)

    def _json(self, facts: Mapping[str, Any], first: float, seconds: float) -> dict[str, Any]:
        texts = [
            {"prompt": prompt, "text": self._decoded(number), "words": words, "ended": ended}
            for number, (prompt, words, ended) in enumerate(
                zip(self._texts.prompts, self._texts.written, self._texts.ended, strict=True)
            )
        ]
        return {**facts, "texts": texts, "seconds": {"first_word": round(first, 4), "all": round(seconds, 4)}}

    def _decoded(self, number: int) -> str:
        stream = self._words.stream()
        return "".join([*map(stream.add, self._texts.written[number]), stream.end()])

    def _put(self, text: str, plain: bool = False) -> None:
        if self.unread or not text:
            return
        if not plain and self._out.isatty():
            text = _plain(text)
        try:
            self._out.write(text)
            self._out.flush()
        except UnicodeEncodeError:
            encoding = self._out.encoding or "ascii"
            self._out.write(text.encode(encoding, errors="replace").decode(encoding))
            self._out.flush()
        except BrokenPipeError:
            self.unread = True
        except OSError as error:
            self.unread, self.wrong = True, error


def _plain(text: str) -> str:
    """A text without signs that tell a terminal something: a model may write any, and so may who made a prompt."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)
