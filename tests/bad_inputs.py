"""A table of what people type, write and leave lying about that cannot work; and how it must be refused.

Each row ends in one message on every rank, the same, of at most five lines, that names the option, the value and what
is allowed, within ten seconds.  Most rows are made from the table of options, so that a new option brings its own.

    python tests/bad_inputs.py [WORDS]      run all rows (or those whose name holds WORDS) under Local, and count
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from reseal import rewrite

from mpitrain.comm.local import LocalWorld
from mpitrain.config import OPTIONS, Config
from mpitrain.errors import UserError
from mpitrain.options import Option, show

SECONDS = 10.0
LINES = 5

Prepare = Callable[[Path], None]


@dataclass(frozen=True)
class BadInput:
    """One row.

    Attributes:
        name: of the row.
        argv: flags; {dir} is a folder of the row's own.
        words: what the message must hold, besides; {dir} as above.
        ranks: how many.
        prepare: makes files in the folder.
        alone: argv is everything: no flags that make a small run are put before it.
    """

    name: str
    argv: tuple[str, ...]
    words: tuple[str, ...]
    ranks: int = 2
    prepare: Prepare | None = field(default=None, compare=False)
    alone: bool = True

    def command(self, folder: Path) -> list[str]:
        """The flags with which training is started."""
        usual = (
            () if self.alone else ("--model", "gpt-tiny", "--steps", "1", "--data", "{dir}/text", "--run", "{dir}/run")
        )
        return [word.replace("{dir}", str(folder)) for word in (*usual, *self.argv)]

    def prepare_in(self, folder: Path) -> None:
        """Make the row's files, and a small text."""
        if not self.alone:
            (folder / "text").write_text("The quick brown fox jumps over the lazy dog.\n" * 500)
        if self.prepare is not None:
            self.prepare(folder)

    def complaint(self, message: str, folder: Path) -> str:
        """What is missing in a message; empty if it is as it must be."""
        lines = message.splitlines()
        if not 1 <= len(lines) <= LINES or any(len(line) > 1000 for line in lines):
            return f"{len(lines)} lines: {message!r}"
        missing = [word for word in self.words if word.replace("{dir}", str(folder)) not in message]
        return f"{missing} not in {message!r}" if missing else ""


def run_local(row: BadInput, folder: Path) -> str:
    """Train under Local with the row's flags; what is wrong with how that ends, empty for nothing."""
    from mpitrain.train import main

    row.prepare_in(folder)
    argv = row.command(folder)

    def body() -> tuple[str, str]:
        try:
            main(argv)
        except UserError as error:
            return type(error).__name__, str(error)
        except SystemExit as error:
            return "SystemExit", str(error.code)
        return "nothing", "was refused"

    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            ends = LocalWorld(row.ranks).run(body)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    if len(set(ends)) > 1:
        return f"ranks differ: {ends}"
    kind, message = ends[0]
    if not kind.endswith(("Error", "CheckpointDamaged")):
        return f"{kind} {message}"
    return row.complaint(message, folder) or (f"took {seconds:.0f} s" if seconds > SECONDS else "")


# ---------------------------------------------------------------------------------- rows made from the table of options


def _flag_rows() -> Iterator[BadInput]:
    for option in OPTIONS.values():
        wrong = list(_wrong_words(option))
        for what, word in wrong:
            words = (f"{option.flag} {show(word)}", "must be", option.allowed)
            yield BadInput(f"{option.flag} {what}", (option.flag, word), words)
        if option.kind is bool:
            for flag in (option.flag, option.off):
                yield BadInput(f"{flag} with a value", (f"{flag}=yes",), (f"{flag}=yes", "takes no value", option.off))
        else:
            yield BadInput(f"{option.flag} without value", (option.flag,), (option.flag, "missing", option.allowed))
        slip = option.flag[:-2] + option.flag[-1] + option.flag[-2]
        if slip.partition("=")[0] != option.flag:
            yield BadInput(f"{option.flag} with two letters exchanged", (slip, "1"), (slip, "no such option"))


def _wrong_words(option: Option) -> Iterator[tuple[str, str]]:
    """What the value of a flag must not be."""
    if option.choices:
        yield "misspelled", option.choices[0] + "x"
        yield "in capitals", option.choices[0].upper()
        yield "empty", ""
    elif option.kind is str:
        yield "empty", ""
        yield "blank", "  "
        yield "endless", "x" * 5000
    elif option.within is not None:
        low, high = option.within.low, option.within.high
        yield "too small", str(low if option.within.above else low - 1)
        yield "too large", str(high if option.within.below else high + 1)
        yield "enormous", "9" * 400
        yield "empty", ""
        yield "a word", "many"
        yield "not a number", "nan"
        yield "infinite", "-inf"
        if option.kind is int:
            yield "a fraction", "1.5"


def _file_rows() -> Iterator[BadInput]:
    for option in OPTIONS.values():
        texts = {
            int: ("2.5", '"2"', "[2]"),
            float: ('"2"', "nan", "2020-01-01"),
            str: ("1", '""'),
            bool: ("1", '"true"'),
        }
        for value in (*texts[option.kind], "{a = 1}"):
            yield BadInput(
                f"file: {option.name} = {value}",
                ("--config", "{dir}/run.toml"),
                ("{dir}/run.toml", option.name, option.allowed),
                prepare=_writes(
                    "run.toml",
                    f"steps = 5\n{option.name} = {value}\n"
                    if option.name != "steps"
                    else f"batch = 5\nsteps = {value}\n",
                ),
            )


def _writes(name: str, content: str | bytes) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


# ------------------------------------------------------------------------------------------------------- rows by hand

_FLAGS = [
    ("a stray word", ("train",), ("train", "belongs to no option")),
    ("an empty word", ("",), ("''", "belongs to no option")),
    ("one dash", ("-layers", "2"), ("-layers", "Did you mean --layers?")),
    ("an underscore", ("--seq_len", "2"), ("--seq_len", "Did you mean --seq-len?")),
    ("an abbreviation", ("--layer", "2"), ("--layer", "Did you mean --layers?")),
    ("two dashes alone", ("--", "2"), ("--: no such option.  --help",)),
    ("a flag for a value", ("--layers", "--heads", "2"), ("--layers", "missing")),
    ("digits of another script", ("--steps", "١٢"), ("--steps ١٢", "whole number")),
    ("digits in groups", ("--steps", "1_000"), ("--steps 1_000", "whole number")),
    ("a comma", ("--lr", "0,001"), ("--lr 0,001", "from 0 to 10")),
    ("hexadecimal", ("--seed", "0x1F"), ("--seed 0x1F", "whole number")),
    ("a value on two lines", ("--steps", "1\n2"), ("--steps '1\\n2'", "whole number")),
    ("control characters", ("--dtype", "\x1b[31m"), ("--dtype '\\x1b[31m'", "float32, float64")),
    ("bytes that are not UTF-8", ("--run", "a\udcff"), ("--run 'a\\udcff'", "UTF-8")),
    ("heads that do not divide", ("--width", "100", "--heads", "3"), ("--width 100", "--heads 3", "Try --width 99")),
    ("more heads than width", ("--width", "2", "--heads", "4"), ("--width 2", "--heads 4", "Try --width 4")),
    ("micro-batches that do not divide", ("--batch", "6", "--microbatches", "4"), ("--batch 6", "--microbatches 4")),
    ("more micro-batches than batch", ("--batch", "2", "--microbatches", "4"), ("--batch 2", "Try --batch 4")),
    ("steps and budget", ("--steps", "5", "--budget", "9"), ("--steps 5", "--budget 9", "one of the two")),
    ("warm-up longer than the run", ("--steps", "5", "--warmup", "6"), ("--warmup 6", "5")),
    ("a broken number of warm-up steps", ("--warmup", "2.5"), ("--warmup 2.5", "whole number")),
    ("a final rate of a schedule without an end", ("--lr-schedule", "constant", "--lr-final", "0.5"),
     ("--lr-final 0.5", "constant")),
    ("a group without a factor", ("--lr-groups", "table.*"), ("--lr-groups table.*", "factor")),
    ("a group of nothing", ("--lr-groups", "a=1,=2"), ("--lr-groups a=1,=2", "pattern")),
    ("a negative factor", ("--lr-groups", "*.bias=-2"), ("--lr-groups *.bias=-2", "0 or more")),
    ("a scale that is used nowhere", ("--loss-scale", "1024"), ("--loss-scale 1024", "dynamic and static", "float32")),
    ("one scale for branches", ("--loss-scaling", "blocks", "--loss-scale", "1024"), ("--loss-scale 1024", "blocks")),
    ("a window of a fixed scale", ("--loss-scaling", "static", "--loss-scale-window", "9"),
     ("--loss-scale-window 9", "static")),
    ("a scale that rounds", ("--dtype", "float16", "--loss-scale", "1000"), ("--loss-scale 1000", "power of two")),
    ("resume latest of no run", ("--resume", "latest"), ("--resume latest", "--run DIR")),
    ("a negative rate with exponent", ("--lr", "-1e-3"), ("--lr -1e-3", "from 0 to 10")),
]  # fmt: skip

_FILES: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("not TOML", "layers 2", ("not TOML",)),
    ("a key twice", "lr = 1\nlr = 2", ("not TOML",)),
    ("an unknown key", "layer = 2", ("layer", "Did you mean layers?")),
    ("a table", "[training]\nlr = 1", ("training", "no such setting")),
    ("a list of tables", "[[lr]]\nx = 1", ("lr", "from 0 to 10")),
    ("a key in both spellings", "seq_len = 1\nseq-len = 2", ("seq-len", "twice")),
    ("not UTF-8", b'data = "\xff"', ("UTF-8",)),
    ("UTF-16", "lr = 1".encode("utf-16"), ("UTF-8",)),
    ("binary", bytes(range(256)), ("UTF-8",)),
    ("too large", b"#" * (2 << 20), ("bytes", "at most")),
    ("deeply nested", "lr = " + "[" * 5000, ("nested",)),
    ("too many digits", "steps = " + "9" * 5000, ("not TOML",)),
    ("beyond 64 bits", "seed = 9223372036854775808", ("seed", "9223372036854775807")),
    ("a zero byte in a path", 'data = "a\\u0000b"', ("data", "text of")),
    ("sizes that do not divide", "width = 10\nheads = 3", ("--width 10", "--heads 3")),
    ("steps and budget", "steps = 3\nbudget = 9.0", ("--steps 3", "--budget 9")),
    ("itself", 'config = "run.toml"', ("config", "no such setting")),
]


def _hand_rows() -> Iterator[BadInput]:
    for name, argv, words in _FLAGS:
        yield BadInput(name, argv, words)
    for name, content, words in _FILES:
        yield BadInput(f"file: {name}", ("--config", "{dir}/run.toml"), words, prepare=_writes("run.toml", content))
    yield BadInput(
        "file: a blank and an umlaut in its path",
        ("--config", "{dir}/a ü/run.toml"),
        ("a ü", "layers"),
        prepare=_writes("a ü/run.toml", "layers = 0"),
    )
    for name, path, words in (
        ("missing", "{dir}/none.toml", ("No such file",)),
        ("a folder", "{dir}", ("regular file",)),
        ("endless", "/dev/zero", ("regular file",)),
        ("below a file", "{dir}/run.toml/x", ("Not a directory",)),
        ("a long name", "{dir}/" + "x" * 300, ("File name too long",)),
    ):
        yield BadInput(f"file: {name}", ("--config", path), ("--config", *words), prepare=_writes("run.toml", ""))
    yield BadInput(
        "file: a pipe", ("--config", "{dir}/pipe"), ("regular file",), prepare=lambda folder: os.mkfifo(folder / "pipe")
    )
    yield BadInput(
        "file: a link to itself",
        ("--config", "{dir}/loop"),
        ("--config", "symbolic links"),
        prepare=lambda folder: (folder / "loop").symlink_to("loop"),
    )


_PP = ("--pp", "2")


def _layout_rows() -> Iterator[BadInput]:
    for name, ranks, argv, words in (
        ("more dp than ranks", 2, ("--dp", "4"), ("dp 4", "2")),
        ("less dp than ranks", 2, ("--dp", "1"), ("dp 1", "2")),
        ("dp that does not divide the ranks", 4, ("--dp", "3"), ("dp 3", "4")),
        ("a batch that does not divide", 3, (), ("--batch 16", "3", "Try --batch 15")),
        ("a batch smaller than the ranks", 3, ("--batch", "2"), ("--batch 2", "--dp 3", "Try --batch 3")),
        ("micro-batches of ranks", 2, ("--microbatches", "16"), ("--batch 16", "32", "--microbatches 16")),
        ("a model larger than memory", 2, ("--layers", "1000", "--width", "65536"), ("--layers 1000", "GiB")),
        ("a batch larger than memory", 2, ("--batch", "16777216", "--width", "8192"), ("--batch 16777216", "GiB")),
        ("sequences longer than the text", 2, ("--seq-len", "1048576"), ("1048576",)),
        ("sequences longer than the validation text", 2, ("--seq-len", "5000"), ("5000",)),
        ("more pp than ranks", 2, ("--pp", "4"), ("--pp 4", "4 ranks", "2")),
        ("pp that does not divide the ranks", 4, ("--pp", "3"), ("--pp 3", "4", "-n 3")),
        ("pp and dp for more than the ranks", 4, ("--pp", "2", "--dp", "4"), ("--pp 2 --dp 4", "8 ranks")),
        ("groups of interleaved", 2, (*_PP, "--schedule", "interleaved", "--microbatches", "1"),
         ("--schedule interleaved", "--microbatches 1", "--pp 2", "Try --microbatches 2")),
        ("micro-batches of pipedream", 2, (*_PP, "--schedule", "pipedream", "--microbatches", "2", "--clip", "0"),
         ("--schedule pipedream", "--microbatches 2", "must be 1", "pipedream-2bw")),
        ("clipping with pipedream", 2, (*_PP, "--schedule", "pipedream"),
         ("--schedule pipedream", "--clip 1", "--clip 0")),
        ("a tied table with pipedream", 2, (*_PP, "--schedule", "pipedream", "--clip", "0", "--tied"),
         ("--schedule pipedream", "--tied", "--untied")),
        ("few micro-batches of pipedream-2bw", 2, (*_PP, "--schedule", "pipedream-2bw"),
         ("--schedule pipedream-2bw", "--microbatches 1", "--pp 2")),
        ("cp with pipedream", 4, (*_PP, "--schedule", "pipedream", "--clip", "0", "--cp", "2"),
         ("--schedule pipedream", "--cp 2")),
        ("cp with pipedream-2bw", 4, (*_PP, "--schedule", "pipedream-2bw", "--microbatches", "2", "--cp", "2"),
         ("--schedule pipedream-2bw", "--cp 2")),
        ("cp with terapipe", 4, (*_PP, "--schedule", "terapipe", "--cp", "2"), ("--schedule terapipe", "--cp 2")),
        ("sequence parallelism with terapipe", 4,
         (*_PP, "--schedule", "terapipe", "--tp", "2", "--sequence-parallel"),
         ("--schedule terapipe", "--sequence-parallel")),
        ("more slices than tokens", 2, (*_PP, "--schedule", "terapipe", "--slices", "99"), ("--slices 99", "32")),
        ("blocks of too few stages", 2, (*_PP, "--stage-layers", "2"), ("--stage-layers 2", "1 of 2 stages")),
        ("blocks of too many stages", 2, (*_PP, "--stage-layers", "1,1,0"), ("--stage-layers 1,1,0", "3 of 2 stages")),
        ("blocks of another model", 2, (*_PP, "--stage-layers", "2,1"), ("--stage-layers 2,1", "3 of the model's 2")),
        ("blocks below none", 2, (*_PP, "--stage-layers", "3,-1"), ("--stage-layers 3,-1", "whole numbers")),
        ("blocks in words", 2, (*_PP, "--stage-layers", "one,two"), ("--stage-layers one,two", "whole numbers")),
        ("blocks that end in a comma", 2, (*_PP, "--stage-layers", "1,1,"), ("--stage-layers 1,1,", "whole numbers")),
        ("blocks in another script", 2, (*_PP, "--stage-layers", "١,١"), ("--stage-layers ١,١", "whole numbers")),
        ("blocks of enormous numbers", 2, (*_PP, "--stage-layers", "9" * 400 + ",1"), ("whole numbers",)),
        ("blocks of the stages of interleaved", 2,
         (*_PP, "--schedule", "interleaved", "--microbatches", "2", "--stage-layers", "1,1"),
         ("--stage-layers 1,1", "2 of 4 stages")),
        ("blocks of stages without a pipeline", 2, ("--stage-layers", "1,1"), ("--stage-layers 1,1", "2 of 1 stages")),
        ("blocks in words without a pipeline", 2, ("--stage-layers", "one"), ("--stage-layers one", "whole numbers")),
        ("blocks of the chunks of one stage", 2, ("--schedule", "interleaved", "--stage-layers", "1,1"),
         ("--stage-layers 1,1", "2 of 1 stages")),
        ("a group of no parameter of any stage", 2, (*_PP, "--lr-groups", "table.*=2,tabel.*=2"),
         ("tabel.*", "no parameter", "table.weight")),
        ("a group of what others have taken", 2, (*_PP, "--lr-groups", "*=2,head.*=2"), ("head.*", "before it")),
        ("a batch that does not divide over pipelines", 6, (*_PP, "--dp", "3"), ("--batch 16", "3", "Try --batch 15")),
    ):  # fmt: skip
        yield BadInput(name, argv, words, ranks, alone=False)


_DATA: list[tuple[str, str, Prepare | None, tuple[str, ...]]] = [
    ("missing", "{dir}/none", None, ("--data {dir}/none", "no such file")),
    ("missing, with a blank and an umlaut", "{dir}/kein ü", None, ("no such file",)),
    ("below a file", "{dir}/text/x", None, ("text/x",)),
    ("a long name", "x" * 300, None, ("--data xxx", "too long")),
    ("empty", "{dir}/d.txt", _writes("d.txt", b""), ("empty",)),
    ("one byte", "{dir}/d.txt", _writes("d.txt", b"x"), ("d.txt",)),
    ("too short", "{dir}/d.txt", _writes("d.txt", b"hello " * 8), ("d.txt",)),
    ("binary", "{dir}/d.txt", _writes("d.txt", bytes(range(256)) * 40), ("d.txt", "UTF-8")),
    ("latin-1", "{dir}/d.txt", _writes("d.txt", "für immer\n".encode("latin-1") * 900), ("d.txt", "UTF-8")),
    ("an empty folder", "{dir}/d", lambda folder: (folder / "d").mkdir(), ("{dir}/d", "folder")),
    ("a folder of binaries", "{dir}/d", _writes("d/x.bin", b"\0\1\2" * 900), ("{dir}/d", "folder")),
    ("a token file of an odd size", "{dir}/d.bin", _writes("d.bin", b"\0" * 9999), ("d.bin", "odd")),
    ("an empty token file", "{dir}/d.bin", _writes("d.bin", b""), ("d.bin", "empty")),
    ("a short token file", "{dir}/d.bin", _writes("d.bin", b"\1\0" * 10), ("d.bin",)),
    ("a pipe", "{dir}/pipe", lambda folder: os.mkfifo(folder / "pipe"), ("pipe", "neither")),
    ("a device", "/dev/zero", None, ("/dev/zero", "neither")),
    ("a link to itself", "{dir}/loop", lambda folder: (folder / "loop").symlink_to("loop"), ("loop",)),
]


def _data_rows() -> Iterator[BadInput]:
    for name, path, prepare, words in _DATA:
        yield BadInput(f"data: {name}", ("--data", path), words, prepare=prepare, alone=False)


def _checkpoint(change: Callable[[dict[str, object]], None] | None = None, **files: bytes | None) -> Prepare:
    """A checkpoint of a made-up model; `change` spoils its manifest, `files` its files."""

    def prepare(folder: Path) -> None:
        from mpitrain import checkpoint

        def save() -> None:
            from mpitrain.comm.world import world

            array = __import__("numpy").ones(3)
            slab = checkpoint.SlabRef("weight/x", (3,), (slice(0, 3),), array, (0, 1))
            settings = Config(model="gpt-tiny", steps=1)
            scalars = {"config": {name: getattr(settings, name) for name in OPTIONS}, "updates": 7, "seen": 0}
            checkpoint.save(folder / "old", 7, [slab], scalars, world())

        LocalWorld(1).run(save)
        path = folder / "old" / "checkpoints" / "step-00000007"
        if change is not None:
            rewrite(path, change)
        for name, content in files.items():
            if content is None:
                (path / name.replace("_", ".")).unlink()
            else:
                (path / name.replace("_", ".")).write_bytes(content)

    return prepare


def _run_rows() -> Iterator[BadInput]:
    step = "{dir}/old/checkpoints/step-00000007"
    for name, argv, prepare, words in (
        ("run: a file", ("--run", "{dir}/text"), None, ("--run {dir}/text", "must be a folder")),
        ("run: below a file", ("--run", "{dir}/text/run"), None, ("text/run", "Not a directory")),
        ("run: a long name", ("--run", "{dir}/" + "x" * 300), None, ("too long",)),
        ("run: of another run", ("--run", "{dir}/old"), _checkpoint(), ("{dir}/old", "--resume latest")),
        ("run: settings are a folder", ("--run", "{dir}/r"), _writes("r/config.toml/x", ""), ("config.toml",)),
        ("run: metrics are a folder", ("--run", "{dir}/r"), _writes("r/metrics.jsonl/x", ""), ("metrics.jsonl",)),
        ("run: metrics are a pipe", ("--run", "{dir}/r"),
         lambda folder: (_writes("r/x", "")(folder), os.mkfifo(folder / "r" / "metrics.jsonl")), ("metrics.jsonl",)),
        ("resume: no such run", ("--resume", "latest"), None, ("--resume latest", "no complete checkpoint")),
        ("resume: no such folder", ("--resume", "{dir}/x"), None, ("--resume {dir}/x", "does not exist")),
        ("resume: a file", ("--resume", "{dir}/text"), None, ("--resume {dir}/text", "not a folder")),
        ("resume: no checkpoint", ("--resume", "{dir}"), None, ("not a checkpoint",)),
        ("resume: another model", ("--resume", step), _checkpoint(), ("step-00000007",)),
        ("resume: not JSON", ("--resume", step), _checkpoint(manifest_json=b"{"), ("manifest.json", "damaged")),
        ("resume: no manifest", ("--resume", step), _checkpoint(manifest_json=None), ("manifest.json",)),
        ("resume: cut manifest", ("--resume", step), _checkpoint(lambda w: w.pop("tensors")), ("damaged", "tensors")),
        ("resume: newer format", ("--resume", step), _checkpoint(lambda w: w.update(format=9)), ("format 9", "2")),
        ("resume: no settings in it", ("--resume", step), _checkpoint(lambda w: w.update(scalars={})), ("settings",)),
        ("resume: cut file", ("--resume", step), _checkpoint(**{"rank-00000_h5": b"x"}), ("rank-00000.h5", "bytes")),
        ("resume: missing file", ("--resume", step), _checkpoint(**{"rank-00000_h5": None}), ("rank-00000.h5",)),
        ("resume: all damaged", ("--resume", "latest", "--run", "{dir}/old"), _checkpoint(manifest_json=b"["),
         ("--resume latest", "damaged")),
    ):  # fmt: skip
        yield BadInput(name, argv, words, prepare=prepare, alone=False)


TABLE: tuple[BadInput, ...] = (
    *_flag_rows(),
    *_file_rows(),
    *_hand_rows(),
    *_layout_rows(),
    *_data_rows(),
    *_run_rows(),
)
"""All rows."""

NEEDS_RANKS = (*_layout_rows(), *_data_rows(), *_run_rows())
"""Those that are found after the ranks have met."""


def main(words: str = "") -> int:
    """Run rows under Local, print what fails and the share that holds."""
    rows = [row for row in TABLE if words in row.name]
    bad = 0
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            wrong = run_local(row, Path(folder))
        if wrong:
            bad += 1
            print(f"{row.name}: {wrong}")
    print(
        f"{len(rows) - bad} of {len(rows)} bad inputs are refused as they must be ({100 * (1 - bad / len(rows)):.1f} %)"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
