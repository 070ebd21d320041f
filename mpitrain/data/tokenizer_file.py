"""What a tokenizer.json may hold: read as data, checked part by part, before the library that runs it sees it.

A file of this kind is not trusted.  The library would take a probability with which words fall apart (no two ranks
would see the same text), cut every text after so many words, or stop in the middle of its own code at a number that
makes no sense.  So only what tokenizers of GPT-2 and Llama consist of is taken, and the rest is refused by name.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.errors import DataError
from mpitrain.options import show

NAME = "tokenizer.json"
"""What such a file is called, also in the folder of a run."""
LARGEST_FILE = 64 << 20
MOST_WORDS = 1 << 22
LONGEST_WORD = 4096
_LONGEST_PATTERN, _LONGEST_CONTENT, _MOST_PARTS = 4096, 16, 64


def read(path: str | os.PathLike[str]) -> str:
    """The text of a file; of a folder, as that of a run, its tokenizer.json.

    Raises:
        DataError: it is missing, no regular file, too large or no UTF-8.
    """
    where = Path(path)
    if where.is_dir():
        where = where / NAME
    try:
        file = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would block
        with os.fdopen(file, "rb") as content:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise DataError(f"tokenizer {show(where)}: is not a regular file; it must be a {NAME}.")
            if about.st_size > LARGEST_FILE:
                raise DataError(
                    f"tokenizer {show(where)}: has {about.st_size:,} bytes; at most {LARGEST_FILE:,} are allowed."
                )
            return content.read(LARGEST_FILE).decode()
    except OSError as error:
        raise DataError(
            f"tokenizer {show(where)}: cannot be read: {error.strerror}.  It must be a {NAME}, or a folder with one;"
            " bpe:8000 makes one from the text."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"tokenizer {show(where)}: byte {error.start} is not UTF-8, as JSON must be.") from None


def checked(text: str, where: str) -> tuple[str, int, dict[str, int]]:
    """What the library is given of a file, one more than the largest number of a word, and the words it adds.

    Left out is what belongs to models that read two texts of one length: templates, padding, cutting.

    Args:
        text: of the file.
        where: the file, for messages.

    Raises:
        DataError: it holds what is not taken; the message names it.
    """

    def refuse(what: str) -> NoReturn:
        raise DataError(f"tokenizer {show(where)}: {what}")

    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(f"is not JSON: {plain(str(error))}.")
    if not isinstance(held, dict) or not isinstance(held.get("model"), dict):
        refuse(f'is no tokenizer: it has no "model".  A {NAME} of the tokenizers library does.')
    model = held["model"]
    kind = model.get("type", "BPE")  # older files do not name it
    if kind != "BPE":
        refuse(f"its model is {show(kind)}; mpitrain takes BPE, as GPT-2 and Llama have it.")
    if model.get("dropout") not in (None, 0, 0.0):
        refuse(f"dropout {show(model['dropout'])}: one text would become other words each time; set it to null.")
    words = _words(model, refuse)
    _merges(model, words, refuse)
    added = dict(_added(held, refuse))
    size = 1 + max((*words.values(), *added.values()), default=-1)
    if not size:
        refuse("it has no word.")
    for part, allowed in (("normalizer", _NORMALIZERS), ("pre_tokenizer", _PRE_TOKENIZERS), ("decoder", _DECODERS)):
        for found in _parts(held.get(part), part, refuse):
            check = allowed.get(str(found.get("type")))
            if check is None:
                refuse(f"{part} {show(found.get('type'))} is not taken; known are {', '.join(allowed)}.")
            if wrong := check(found):
                refuse(f"{part} {found['type']}: {wrong}.")
    given = {**held, "model": {**model, "type": "BPE"}, "post_processor": None, "truncation": None, "padding": None}
    return json.dumps(given), size, added


def plain(reason: str) -> str:
    """What a library says, on one line that can be printed."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(reason.split()))[:200]


def _words(model: Mapping[str, Any], refuse: Callable[[str], NoReturn]) -> dict[str, int]:
    """The words of the model and their numbers."""
    words = model.get("vocab")
    if not isinstance(words, dict):
        refuse('its model has no "vocab", which gives each word a number.')
    for word, number in words.items():
        if type(number) is not int or not 0 <= number < MOST_WORDS:
            refuse(f"word {show(word)} has the number {show(number)}; allowed are 0 to {MOST_WORDS - 1:,}.")
        if len(word) > LONGEST_WORD:
            refuse(f"word {show(word)} has {len(word):,} letters; at most {LONGEST_WORD:,} are allowed.")
    if len(set(words.values())) < len(words):
        seen: dict[int, str] = {}
        for word, number in words.items():
            if number in seen:
                refuse(f"words {show(seen[number])} and {show(word)} have the same number, {number}.")
            seen[number] = word
    return words


def _merges(model: Mapping[str, Any], words: Mapping[str, int], refuse: Callable[[str], NoReturn]) -> None:
    """Pairs that become one word: each a text `a b` or a list of two, all three of them words."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        refuse('its model has no "merges", which say how letters become words.')
    prefix = model.get("continuing_subword_prefix") or ""
    if not isinstance(prefix, str):
        refuse(f"continuing_subword_prefix {show(prefix)} is no text.")
    for number, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(word, str) for word in pair):
            refuse(f"merge {number} is {show(merge)}; it must be two words.")
        if not pair[1].startswith(prefix):
            refuse(f"merge {number}, {show(' '.join(pair))}: its second word does not begin with {show(prefix)}.")
        joined = pair[0] + pair[1].removeprefix(prefix)
        if missing := [word for word in (*pair, joined) if word not in words]:
            refuse(f"merge {number}, {show(' '.join(pair))}: {show(missing[0])} is not among its words.")
    unknown = model.get("unk_token")
    if unknown is not None and (not isinstance(unknown, str) or unknown not in words):
        refuse(f"unk_token {show(unknown)} is not among its words.")


def _added(held: Mapping[str, Any], refuse: Callable[[str], NoReturn]) -> Iterator[tuple[str, int]]:
    """Words besides the model's and their numbers."""
    added = held.get("added_tokens") or []
    if not isinstance(added, list):
        refuse("added_tokens is no list.")
    for each in added:
        number, content = (each.get("id"), each.get("content")) if isinstance(each, dict) else (None, None)
        if not isinstance(content, str) or not 0 < len(content) <= LONGEST_WORD:
            refuse(f"added token {show(content)} is no text of 1 to {LONGEST_WORD:,} letters.")
        if type(number) is not int or not 0 <= number < MOST_WORDS:
            refuse(f"added token {show(content)} has the number {show(number)}; allowed are 0 to {MOST_WORDS - 1:,}.")
        yield content, number


def _parts(found: Any, part: str, refuse: Callable[[str], NoReturn]) -> Iterator[Mapping[str, Any]]:
    """What a normalizer, pre_tokenizer or decoder consists of, sequences taken apart."""
    waiting, count = [] if found is None else [found], 0
    while waiting:
        each = waiting.pop()
        count += 1
        if not isinstance(each, dict):
            refuse(f"{part} {show(each)} is no part of a tokenizer.")
        if count > _MOST_PARTS:
            refuse(f"{part} has more than {_MOST_PARTS} parts.")
        if each.get("type") == "Sequence":
            within = next((each[name] for name in ("normalizers", "pretokenizers", "decoders") if name in each), None)
            if not isinstance(within, list):
                refuse(f"{part} Sequence has no list of parts.")
            waiting += within
        else:
            yield each


# ------------------------------------------------------------ what is wrong with a part; "": nothing


def _anything(_: Mapping[str, Any]) -> str:
    return ""


def _replace(part: Mapping[str, Any]) -> str:
    pattern, content = part.get("pattern"), part.get("content")
    old = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(old, str) or not 0 < len(old) <= _LONGEST_CONTENT:
        return f"its pattern must be a String of 1 to {_LONGEST_CONTENT} letters"
    return _content(content, 0)


def _content(content: Any, least: int) -> str:
    fits = isinstance(content, str) and least <= len(content) <= _LONGEST_CONTENT
    return "" if fits else f"its text must have {least} to {_LONGEST_CONTENT} letters"


def _split(part: Mapping[str, Any]) -> str:
    pattern = part.get("pattern")
    given = [pattern.get(name) for name in ("String", "Regex") if name in pattern] if isinstance(pattern, dict) else []
    if len(given) == 1 and isinstance(given[0], str) and 0 < len(given[0]) <= _LONGEST_PATTERN:
        return ""
    return f"its pattern must be a String or a Regex of 1 to {_LONGEST_PATTERN:,} letters"


def _strip(part: Mapping[str, Any]) -> str:
    cut = part.get("start"), part.get("stop")
    known = all(type(number) is int for number in cut) and cut[0] in (0, 1) and cut[1] == 0
    return "" if known else "it takes away more than one letter at the start, or some at the end"


_NORMALIZERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "ByteLevel"), _anything),
    "Prepend": lambda part: _content(part.get("prepend"), 1),
    "Replace": _replace,
}
_PRE_TOKENIZERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    **dict.fromkeys(("ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation"), _anything),
    "Split": _split,
}
_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    **dict.fromkeys(("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "BPEDecoder"), _anything),
    "Replace": _replace,
    "Strip": _strip,
}
