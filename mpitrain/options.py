"""What an option is, and how its value is read from the words of a command line and from a TOML file.

An `Option` is a name, a kind, an allowed range and a line of help.  It knows nothing of what it is for: the settings of
a training run, one field each, stand in config.py.  Every value, from wherever it comes, passes `Option.convert`, so
that a flag, a line of a file and an argument in Python are refused for the same reasons with the same words:

    --layers 0: must be a whole number from 1 to 1000.
    big.toml: layers = 0: must be a whole number from 1 to 1000.
    --bacth: no such option.  Did you mean --batch?  --help lists all.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import os
import re
import stat
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.errors import ConfigError

Value = int | float | str | bool | None

_MAX_FILE = 1 << 16  # bytes; a file of settings has some hundred lines
_MAX_DOTS = 1000  # on a line; the time that Python takes for a key of n parts grows with the square of n
_MAX_TEXT = 4096  # characters; the longest path that Linux opens
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`; `above` leaves out low, `below` leaves out high."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def __contains__(self, number: float) -> bool:
        """False for NaN too, which compares false with everything."""
        return (self.low < number if self.above else self.low <= number) and (
            number < self.high if self.below else number <= self.high
        )

    def __str__(self) -> str:
        return f"{'above' if self.above else 'from'} {self.low} to {'below ' if self.below else ''}{self.high}"


@dataclass(frozen=True)
class Option:
    """One setting.

    Attributes:
        kind: int, float, str or bool.
        default: its value when nobody gives one; None where leaving it out means something of its own.
        help: one line, lower case, no full stop.
        within: the allowed numbers.
        choices: the allowed words; empty for free text.
        metavar: what stands for the value in the help.
        unset: what happens when it is left out, where the default is None.
        off: bool only: the flag that says no.
        session: belongs to one start, not to the run: never written to the run's file.
    """

    name: str
    kind: type
    default: Value
    help: str
    within: Interval | None = None
    choices: tuple[str, ...] = ()
    metavar: str = ""
    unset: str = ""
    off: str = ""
    session: bool = False

    @property
    def flag(self) -> str:
        """`--seq-len` for seq_len."""
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """The allowed values, as the end of "must be ..."."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return f"UTF-8 text of 1 to {_MAX_TEXT} characters"
        return f"a {'whole number' if self.kind is int else 'number'} {self.within}"

    def parse(self, text: str, where: str) -> Value:
        """The value that a word on the command line stands for; `where` begins the message if it is refused."""
        value: Value = text
        if self.kind is int and _WHOLE.fullmatch(text):
            value = int(text)
        elif self.kind is float and _NUMBER.fullmatch(text):
            value = float(text)
        return self.convert(value, where)

    def convert(self, value: Any, where: str) -> Value:
        """The value in the option's own kind.

        Raises:
            ConfigError: it is of another kind, or outside what is allowed; the text begins with `where`.
        """
        if value is None and self.default is None:
            return None
        if self.kind is bool:
            if isinstance(value, bool):
                return value
        elif self.kind is str:
            if isinstance(value, str) and self._is_text(value):
                return value
        elif not isinstance(value, bool) and isinstance(
            value, numbers.Real if self.kind is float else numbers.Integral
        ):
            exact: Any = value
            if self.within is None or exact in self.within:
                return float(exact) if self.kind is float else int(exact)
        raise ConfigError(f"{where}: must be {self.allowed}.{suggest(value, self.choices)}")

    def _is_text(self, value: str) -> bool:
        if self.choices:
            return value in self.choices
        # A surrogate is a byte of the command line that is not UTF-8: it could not be written to config.toml.
        plain = "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)
        return plain and 0 < len(value) <= _MAX_TEXT and bool(value.strip())


# ------------------------------------------------------------------------------------- fields of a dataclass of options


def whole(default: int | None, help: str, low: int, high: int, **more: Any) -> Any:
    """A dataclass field that holds a whole number."""
    return _field(int, default, help, within=Interval(low, high), **{"metavar": "N", **more})


def number(default: float | None, help: str, within: Interval, **more: Any) -> Any:
    """A dataclass field that holds a number with a fraction."""
    return _field(float, default, help, within=within, **{"metavar": "X", **more})


def choice(default: str | None, help: str, choices: Iterable[str], **more: Any) -> Any:
    """A dataclass field that holds one of a few words."""
    return _field(str, default, help, choices=tuple(choices), **{"metavar": "NAME", **more})


def text(default: str | None, help: str, **more: Any) -> Any:
    """A dataclass field that holds free text, most often a path."""
    return _field(str, default, help, **more)


def switch(default: bool, help: str, **more: Any) -> Any:
    """A dataclass field that is on or off; `off` names the flag that says no, `--no-...` unless given."""
    return _field(bool, default, help, **more)


def _field(kind: type, default: Value, help: str, session: bool = False, **more: Any) -> Any:
    about = {"kind": kind, "default": default, "help": help, "session": session, **more}
    return field(default=default, compare=not session, metadata=about)


def option_of(name: str, about: Mapping[str, Any]) -> Option:
    """The option that a field made by `whole`, `number`, ... describes; `about` is the field's metadata."""
    off = "--" + (about.get("off") or f"no-{name.replace('_', '-')}") if about["kind"] is bool else ""
    return Option(name, **{**about, "off": off})


# ----------------------------------------------------------------------------------------------------- the command line


def read_flags(words: Sequence[str], options: Iterable[Option]) -> dict[str, Value]:
    """The values that a command line gives: `--name value`, `--name=value`, `--switch`; of two the later one counts.

    The words are read here and not by argparse, whose texts for what is wrong differ between versions of Python, name
    no range, and take `--lr -1e-3` for an option.

    Raises:
        ConfigError: an unknown option, a missing or wrong value, a word that belongs to no option.
    """
    known = {option.flag: option for option in options}
    known.update({option.off: option for option in known.values() if option.off})
    given: dict[str, Value] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        option = known.get(flag)
        if option is None:
            raise ConfigError(_unknown(word, known))
        if option.kind is bool:
            if equals:
                raise ConfigError(f"{show(word)}: takes no value; write {option.flag} or {option.off}.")
            given[option.name] = flag != option.off
            continue
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise ConfigError(f"{flag}: its value is missing; it must be {option.allowed}.")
        given[option.name] = option.parse(value, f"{flag} {show(value)}")
    return given


def _unknown(word: str, known: Iterable[str]) -> str:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return f"{show(word)}: a word that belongs to no option; options are written --name value.  --help lists all."
    near = suggest("--" + name.lstrip("-").replace("_", "-"), known) if name.strip("-") else ""
    return f"{show(name)}: no such option.{near}  --help lists all."


MEANT = {"gpu": "cuda", "nvidia": "cuda", "cuda:0": "cuda"}
"""Words that look like another known one than the one that is meant."""


def suggest(wrong: object, known: Iterable[str]) -> str:
    """The end of a message that asks for the known word which looks like the wrong one; empty where none does."""
    word, words = str(wrong)[:100], list(known)
    meant = MEANT.get(word.lower())
    near = [meant] if meant in words else difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"  Did you mean {near[0]}?" if near else ""


def show(value: object) -> str:
    """A value in a message: on one line, short, visible also where it is empty or has spaces or control characters."""
    word = str(value)
    if not word or not word.isprintable() or " " in word:
        word = repr(value)
    # Of a long path the end says most.
    return word if len(word) <= 200 else f"{word[:40]}...{word[-40:]} ({len(word)} characters)"


def help_text(title: str, options: Mapping[str, Option], groups: Mapping[str, str]) -> str:
    """What `--help` prints.

    Args:
        title: the lines at the top.
        options: by name, in order.
        groups: name of the first option of a group -> heading.
    """
    lines = [title]
    for name, option in options.items():
        if name in groups:
            lines += ["", groups[name]]
        left = f"  {option.flag} {option.metavar}".rstrip()
        if option.off:
            left += f", {option.off}"
        default = option.unset or f"default {_word(option.default)}"
        span = f": {', '.join(option.choices)}" if option.choices else f", {option.within}" if option.within else ""
        wrapped = textwrap.wrap(f"{option.help}{span} ({default})", 74, break_on_hyphens=False)
        indent = " " * 26
        first = [f"{left:<25} {wrapped[0]}"] if len(left) <= 25 else [left, indent + wrapped[0]]
        lines += first + [indent + line for line in wrapped[1:]]
    return "\n".join(lines)


def _word(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------------------- files


def read_file(path: str, options: Mapping[str, Option]) -> dict[str, Value]:
    """The values that a TOML file gives, keys at the top level, `seq_len` or `seq-len`.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or holds a key or a value that is not allowed; the text names
            the file and the key.
    """
    shown = show(path)
    given: dict[str, Value] = {}
    for key, value in _load_toml(path, shown).items():
        name = key.replace("-", "_")
        option = options.get(name)
        if option is None:
            raise ConfigError(f"{shown}: {show(key)}: no such setting.{suggest(name, options)}  --help lists all.")
        if isinstance(value, dict):
            raise ConfigError(f"{shown}: {show(key)} is a table; it must be {option.allowed}, at the top level.")
        if name in given:
            raise ConfigError(f"{shown}: {show(key)} stands twice, with '-' and with '_'; keep one.")
        given[name] = option.convert(value, f"{shown}: {key} = {show(_toml(value))}")
    return given


def _load_toml(path: str, shown: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):  # a pipe would block, a device would never end
            raise ConfigError(f"--config {shown}: is not a regular file; it must be a TOML file.")
        if about.st_size > _MAX_FILE:
            raise ConfigError(f"--config {shown}: has {about.st_size} bytes; at most {_MAX_FILE} are allowed.")
        with open(path, "rb") as file:
            content = file.read(_MAX_FILE).decode("utf-8-sig")
        if any(line.count(".") > _MAX_DOTS for line in content.split("\n")):
            raise ConfigError(f"--config {shown}: has a line with more than {_MAX_DOTS} dots, which is no setting.")
        values: dict[str, Any] = tomllib.loads(content)
        return values
    except OSError as error:
        raise ConfigError(f"--config {shown}: cannot be read: {error.strerror}.  It must be a TOML file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {shown}: byte {error.start} is not UTF-8, as a TOML file must be.") from None
    except RecursionError:
        raise ConfigError(f"--config {shown}: is nested too deeply; settings are lines like layers = 2.") from None
    except ConfigError:
        raise
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than Python converts
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(f"--config {shown}: is not TOML: {reason}.") from None


def file_text(values: Mapping[str, Value], options: Mapping[str, Option], groups: Mapping[str, str]) -> str:
    """Values as a TOML file that `read_file` reads back; what is unset stands as a comment."""
    lines = ["# The settings of a run of mpitrain.  Read again with --config FILE; flags win over the file."]
    for name, option in options.items():
        if name in groups:
            lines += ["", f"# {groups[name]}"]
        if not option.session:
            value = values[name]
            lines.append(f"# {name}: {option.unset}" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A scalar in TOML; anything else as Python shows it, which only messages need."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return repr(value)
