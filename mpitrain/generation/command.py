"""The command line of `mpitrain generate`: what a checkpoint's model writes after a prompt.

One text is printed while it is written; several are written together and printed when all are done.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mpitrain.backend import DTYPES
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.device_messages import use_device_messages
from mpitrain.comm.devices import device_of_rank
from mpitrain.comm.launcher import announced, is_first
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.comm.world import World, world
from mpitrain.config import OPTIONS as OF_TRAINING
from mpitrain.config import Config
from mpitrain.data.tokenizer import END, Tokenizer, Words
from mpitrain.errors import ConfigError, DataError
from mpitrain.generation.output import Printer, Texts
from mpitrain.generation.prompts import MOST, read_prompts, words_of
from mpitrain.generation.turns import in_turns, writes
from mpitrain.generation.weights import load
from mpitrain.models.generate import check_prompts, write
from mpitrain.models.sampling import Sampling
from mpitrain.models.sizes import DecoderConfig
from mpitrain.options import Interval, Option, Value, help_text, read_flags, show
from mpitrain.parallel.replicas import agree_on_arithmetic
from mpitrain.weights import find, model_in, run_of, said_besides

UNREAD = 128 + signal.SIGPIPE  # exit code, as shells have it

TITLE = """usage: mpitrain generate CHECKPOINT --prompt TEXT [options]

Writes what the model of a checkpoint, or of the newest one of a run, says after a prompt; on as many ranks as it is
started with: mpirun -n 4 mpitrain generate ... --tp 2, or without MPI mpitrain local -n 4 generate ... --tp 2"""

_LAYOUT = "dp pp tp ep cp sequence_parallel zero device device_messages timeout start_timeout".split()

OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option("prompt", str, None, "the text to go on with", metavar="TEXT", unset="default: that of --prompt-file"),
        Option("prompt_file", str, None, "its file; - is standard input", metavar="FILE", unset="default: --prompt"),
        Option("by_line", bool, False, "every line of the file is a prompt of its own", off="--no-by-line"),
        Option("samples", int, 1, "texts for each prompt", Interval(1, 1024), metavar="N"),
        Option(
            "words",
            str,
            None,
            "what words are: bytes, numbers, or those of a tokenizer.json",
            metavar="WORDS",
            unset="default: those of the run's tokenizer.json, else bytes",
        ),
        Option("length", int, 200, "words to write", Interval(1, 10**6), metavar="N"),
        Option("past_end", bool, False, "go on behind the word that ends a text", off="--no-past-end"),
        Option(
            "temperature",
            float,
            0.8,
            "0: the likeliest word every time; more is wilder",
            Interval(0, 1000),
            metavar="T",
        ),
        Option(
            "top_k", int, None, "draw from the K likeliest only", Interval(1, 2**24), metavar="K", unset="default: all"
        ),
        Option(
            "top_p",
            float,
            None,
            "draw from the fewest, likeliest first, whose chances come to this",
            Interval(0, 1, above=True),
            metavar="P",
            unset="default: all",
        ),
        Option("seed", int, 0, "of the draws", Interval(0, 2**63 - 1), metavar="N"),
        Option(
            "slide",
            int,
            1,
            "words that a text which is longer than the model sees forgets at a time; more is faster",
            Interval(1, 2**20),
            metavar="N",
        ),
        Option("json", bool, False, "print one JSON object when all is written", off="--no-json"),
        Option(
            "dtype",
            str,
            None,
            "precision of weights and activations",
            choices=tuple(DTYPES),
            metavar="NAME",
            unset="default: that of the run",
        ),
        *(OF_TRAINING[name] for name in _LAYOUT),
    )
}
GROUPS = {"prompt": "Text", "temperature": "How words are chosen", "json": "Output and precision", "dp": "Ranks"}


def main(argv: Sequence[str]) -> int:
    """Run `mpitrain generate`; every rank calls it.

    Args:
        argv: words behind `generate`.

    Returns:
        0; 141 if whoever read the output is gone (`| head`).

    Raises:
        UserError: the command line, the checkpoint, the prompt or the layout is wrong; the same on all ranks.  Or the
            output cannot be written; on the rank that writes it.
    """
    words = list(argv)
    if "--help" in words or "-h" in words or not words:
        if is_first(os.environ):
            print(help_text(TITLE, OPTIONS, GROUPS))
        return 0
    path, given = _read(words)
    return _generate(path, given)


def _read(words: list[str]) -> tuple[str, dict[str, Value]]:
    """The checkpoint and the options, which may stand in any order."""
    takes_value = {option.flag for option in OPTIONS.values() if option.kind is not bool}
    paths: list[str] = []
    flags: list[str] = []
    rest = iter(words)
    for item in rest:
        if item.startswith("-") and item != "-":
            flags.append(item)
            if item in takes_value and (value := next(rest, None)) is not None:
                flags[-1] = f"{item}={value}"  # also one that looks like an option: a prompt may
        else:
            paths.append(item)
    given = read_flags(flags, OPTIONS.values())
    if len(paths) != 1 or not paths[0]:
        found = f": {' '.join(map(show, paths))}" if paths else ""
        raise ConfigError(
            f"mpitrain generate: takes one checkpoint or run, not {len(paths)}{found}.\n"
            "usage: mpitrain generate CHECKPOINT --prompt TEXT [options]"
        )
    return paths[0], {option.name: given.get(option.name, option.default) for option in OPTIONS.values()}


def _generate(path: str, given: Mapping[str, Any]) -> int:
    sampling = Sampling(given["temperature"], given["top_k"], given["top_p"], given["seed"])
    ranks = world(given["start_timeout"])
    ranks.board.limit = given["timeout"]
    agree_on_arithmetic(ranks)
    source = find(path, ranks)
    asked = {name: given[name] for name in (*_LAYOUT, "dtype") if given[name] is not None}
    of_run, sizes = model_in(source)
    config = replace(of_run, dropout=0.0, **asked)
    words, texts, prompts = _prompts(ranks, source, sizes.vocab, given)
    check_prompts(prompts, sizes, given["slide"])
    device = device_of_rank(ranks, config.device)
    use_device_messages(ranks, config.device_messages, device)
    mesh = Mesh(ranks, pp=config.pp, dp=config.dp, cp=config.cp, tp=config.tp, ep=config.ep)
    longest = min(sizes.seq_len, sizes.window or sizes.seq_len, max(map(len, prompts)) + given["length"])
    model = load(source, config, sizes, mesh, kept=len(prompts) * longest, device=device)
    written = Texts(texts, () if given["past_end"] else _ends(source, words))
    launched = announced(os.environ) is not None and ranks.kind != "local"
    printer = Printer(sys.stdout, sys.stderr, written, words, given["json"], launched) if mesh.is_reporter else None
    if printer is not None:
        for note in Source.of(path).notes:  # of newer checkpoints of the run
            printer.say(f"passed over: {note}")
    tokens = write(model, prompts, given["length"], sampling, given["slide"])
    length, here, timeout = given["length"], writes(model, mesh), given["timeout"]
    unread = (lambda: False) if printer is None else (lambda: printer.unread)
    for chosen in in_turns(tokens, length, mesh, here, timeout, lambda: written.over, unread):
        written.add(chosen)
        if printer is not None:
            printer.add()
            if printer.unread and ranks.size == 1:  # no other one has to hear of it
                break
    if printer is None:
        return 0
    printer.finish(_facts(source, config, sizes, mesh, sampling))
    if printer.unread:
        _drop_output()
    if printer.wrong is not None:
        raise ConfigError(f"the output cannot be written: {printer.wrong.strerror}.")
    return UNREAD if printer.unread else 0


def _prompts(
    ranks: World, source: Source, vocab: int, given: Mapping[str, Any]
) -> tuple[Words, list[str], list[list[int]]]:
    """How words are written, and each text as it stands and in words; the same on all ranks."""
    how = given["prompt"], given["prompt_file"], given["by_line"]
    found = together(ranks, lambda: read_prompts(*how), here=ranks.rank == 0)  # the file may be on one host only
    texts = [text for text in ranks.exchange(found)[0] for _ in range(given["samples"])]
    if len(texts) > MOST:
        raise ConfigError(
            f"--samples {given['samples']}: that makes {len(texts):,} texts; at most {MOST:,} go together."
        )
    words = together(ranks, lambda: words_of(given["words"], run_of(source), vocab))
    assert words is not None
    prompts = together(ranks, lambda: list(map(words.encode, texts)))
    assert prompts is not None
    said = ranks.exchange(hashlib.sha256(json.dumps(prompts).encode()).hexdigest())
    odd = next((rank for rank, other in enumerate(said) if other != said[0]), None)
    if odd is not None:
        raise DataError(f"rank {odd} reads the prompt as other words than rank 0: give all hosts the same tokenizer.")
    return words, texts, prompts


def _ends(source: Source, words: Words) -> list[int]:
    """The words that end a text: as the settings say that a model was brought with, else the tokenizer's own."""
    found = said_besides(source).get("eos_token_id")
    if isinstance(found, list):
        return [word for word in found if type(word) is int]
    if type(found) is int:
        return [found]
    return [words.special[END]] if isinstance(words, Tokenizer) and END in words.special else []


def _facts(source: Source, config: Config, sizes: DecoderConfig, mesh: Mesh, sampling: Sampling) -> dict[str, Any]:
    """What JSON tells besides the texts."""
    return {
        "checkpoint": str(source),
        "step": source.manifest.step,
        "model": config.model,
        "parameters": sizes.num_parameters,
        "dtype": config.dtype,
        "ranks": mesh.world.size,
        "sampling": asdict(sampling),
    }


def _drop_output() -> None:
    """What is still to be flushed at the end goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
