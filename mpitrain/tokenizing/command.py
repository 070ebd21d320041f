"""The command line of `mpitrain tokenizer`: make words of a text, and look at those of a file.

One process does it, without MPI.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import disk
from mpitrain.config_rules import FEWEST_WORDS, MOST_WORDS
from mpitrain.data import corpus as corpora
from mpitrain.data import encoded, tokenizer_file
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import ConfigError, DataError
from mpitrain.options import Interval, Option, Value, help_text, read_flags, show

MEASURED = 4 << 20  # bytes of a text that are encoded to learn how many a word stands for
LONGEST = 8  # words that are shown
WIDTH = 96  # columns of a text that is shown in words

TRAIN = """usage: mpitrain tokenizer train [DATA] OUT [options]

Makes byte-level BPE words of a text, a file or a folder; without DATA of the source of Python's standard library.  OUT
is a file NAME.json, or a folder into which tokenizer.json is written.  Train with it: mpitrain train --tokenizer OUT"""
SHOW = """usage: mpitrain tokenizer show PATH [options]

Tells what words a tokenizer.json has, that of a run, or of any folder with one."""
TITLE = f"{TRAIN}\n\n{SHOW}"

_VOCAB = Option(
    "vocab", int, 8000, "words, with the bytes and a special one", Interval(FEWEST_WORDS, MOST_WORDS), metavar="N"
)
_FORCE = Option("force", bool, False, "replace a file that is there", off="--no-force")
_TEXT = Option("text", str, None, "show a text in its words", metavar="TEXT", unset="default: none")
_DATA = Option(
    "data", str, None, "tell how many bytes of a text a word stands for", metavar="PATH", unset="default: not measured"
)
_JSON = Option("json", bool, False, "print all of it as one JSON object", off="--no-json")


def main(argv: Sequence[str]) -> int:
    """Run `mpitrain tokenizer`.

    Args:
        argv: words behind `tokenizer`.

    Returns:
        0.

    Raises:
        UserError: the command line, the text or the file is wrong, or the library is not installed.
    """
    words = list(argv)
    tool = words.pop(0) if words else "--help"
    tools = {"train": (_train, TRAIN, (_VOCAB, _FORCE)), "show": (_show, SHOW, (_TEXT, _DATA, _JSON))}
    if tool in ("--help", "-h"):
        print(TITLE)
        return 0
    if tool not in tools:
        raise ConfigError(f"mpitrain tokenizer {show(tool)}: the words are train and show; mpitrain tokenizer --help")
    run, title, options = tools[tool]
    if "--help" in words or "-h" in words:
        print(help_text(title, {option.name: option for option in options}, {options[0].name: "Options"}))
        return 0
    paths, given = _parted(words, options)
    run(paths, given)
    return 0


def _parted(words: list[str], options: Sequence[Option]) -> tuple[list[str], Mapping[str, Value]]:
    """Paths and options, which may stand in any order."""
    valued = {option.flag for option in options if option.kind is not bool}
    paths: list[str] = []
    flags: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            paths.append(word)
        elif word in valued and (value := next(rest, None)) is not None:
            flags.append(f"{word}={value}")  # also one that looks like an option: a text may
        else:
            flags.append(word)
    return paths, {option.name: option.default for option in options} | read_flags(flags, options)


# ------------------------------------------------------------------------------------------------------------- train


def _train(paths: Sequence[str], given: Mapping[str, Value]) -> None:
    if not 1 <= len(paths) <= 2:
        raise ConfigError("mpitrain tokenizer train [DATA] OUT: one text at most, and where to; --help tells more")
    data, out = (paths[0] if len(paths) == 2 else None), Path(paths[-1])
    target = out if out.suffix == ".json" else out / tokenizer_file.NAME
    if target != out and out.is_file():
        missing = "" if data is not None else f"\nIs it the text?  mpitrain tokenizer train {show(paths[0])} OUT"
        raise ConfigError(f"{show(out)}: is a file; OUT must be a folder, or a file NAME.json.{missing}")
    if os.path.lexists(target) and not given["force"]:
        raise ConfigError(f"{show(target)}: is there already; --force replaces it.")
    text = corpora.load(data)
    if text.kind != "bytes":
        raise DataError(f"{text.source}: holds tokens; a tokenizer is made of text.")
    began = time.perf_counter()
    asked = given["vocab"]
    assert isinstance(asked, int)
    made = Tokenizer.trained(encoded.training_pieces(text), asked)
    seconds = time.perf_counter() - began
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(target, made.text.encode())
    except OSError as error:
        raise DataError(f"{show(target)}: cannot be written: {error.strerror}.") from None
    fewer = "" if made.vocab_size == asked else f", not {asked:,}: no other pair of them occurs twice"
    print(f"{target}: {made.vocab_size:,} words{fewer}, made of {len(text.train):,} bytes in {seconds:.1f} s")
    print(f"{_ratio(made, text):.2f} bytes a word on the validation text, which they are not made of")


# -------------------------------------------------------------------------------------------------------------- show


def _show(paths: Sequence[str], given: Mapping[str, Value]) -> None:
    if len(paths) != 1:
        raise ConfigError(
            "mpitrain tokenizer show PATH: one file, or a folder with a tokenizer.json; --help tells more"
        )
    path = Path(paths[0])
    if (path / "config.toml").is_file() and not os.path.lexists(path / tokenizer_file.NAME):
        raise DataError(
            f"{show(path)}: is a run without a {tokenizer_file.NAME}: its words are bytes, or those of the token file"
            " that it was trained on.\nA run has one where it was trained with --tokenizer."
        )
    words = Tokenizer.read(path)
    text, data = given["text"], given["data"]
    about: dict[str, Any] = {
        "path": paths[0],
        "words": words.vocab_size,
        "special": words.special,
        "longest": _longest(words),
        "sha256": words.sha256,
    }
    if isinstance(data, str):
        corpus = corpora.load(data)
        if corpus.kind != "bytes":
            raise DataError(f"{corpus.source}: holds tokens; bytes are counted in a text.")
        about["data"] = {"source": corpus.source, "bytes_per_word": _ratio(words, corpus)}
    if isinstance(text, str):
        tokens = words.encode(text)
        about["text"] = {
            "words": [words.decode([token]) for token in tokens],
            "numbers": tokens,
            "bytes_per_word": len(text.encode()) / max(1, len(tokens)),
            "comes_back": words.decode(tokens) == text,
        }
    print(json.dumps(about, indent=2, ensure_ascii=False) if given["json"] else _told(about))


def _longest(words: Tokenizer) -> list[str]:
    """The longest words with a letter, each as the text that it stands for."""
    special = {*words.special.values()}
    others = (token for token in range(words.vocab_size) if token not in special)
    found: list[str] = []
    for token in sorted(others, key=lambda token: (-len(words.word(token)), token)):
        if len(found) == LONGEST:
            break
        text = words.decode([token])
        if any(letter.isalpha() for letter in text):
            found.append(text)
    return found


def _ratio(words: Tokenizer, text: Corpus) -> float:
    """Bytes of a text's validation part that a word stands for."""
    part: np.ndarray = text.val[:MEASURED]
    count = sum(len(words.encode(piece)) for piece in encoded.pieces(part))
    return len(part) / max(1, count)


def _told(about: Mapping[str, Any]) -> str:
    """What `show` prints."""
    special = about["special"]
    named = ", ".join(f"{show(word)} {number}" for word, number in list(special.items())[:LONGEST])
    more = f" and {len(special) - LONGEST} more" if len(special) > LONGEST else ""
    lines = [
        show(about["path"]),
        f"  words     {about['words']:,}",
        f"  special   {named}{more}" if special else "  special   none",
        f"  longest   {_folded([repr(word) for word in about['longest']])}",
        f"  sha256    {about['sha256']}",
    ]
    if "data" in about:
        data = about["data"]
        lines.append(f"  text      {data['bytes_per_word']:.2f} bytes a word in {show(data['source'])} (validation)")
    if "text" in about:
        text = about["text"]
        back = "" if text["comes_back"] else "; it does not come back as it was"
        lines += [
            f"  in words  {_folded([repr(word)[1:-1] for word in text['words']], '|')}",
            f"  numbers   {_folded([str(number) for number in text['numbers']], ' ')}",
            f"  that is   {len(text['words']):,} words, {text['bytes_per_word']:.2f} bytes each{back}",
        ]
    return "\n".join(lines)


def _folded(words: Sequence[str], between: str = "  ") -> str:
    """Words in lines that stand under one another behind a label."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(between) + len(word) > WIDTH - 12:
            lines.append("")
        lines[-1] += f"{between if lines[-1] else ''}{word}"
    return ("\n" + " " * 12).join(lines)
