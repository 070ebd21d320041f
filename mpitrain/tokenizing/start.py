"""Which tokenizer a run uses, and the text in its words: the same on all ranks.

    --tokenizer PATH       every host reads the file
    --tokenizer bpe:8000   rank 0 makes one of the text and tells the others
    a run that goes on     that of its folder: DIR/tokenizer.json, wherever it came from

The folder of a run has a copy, so nothing else is needed to go on with it or to write text with its weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mpitrain import checkpoint
from mpitrain.comm.together import together
from mpitrain.comm.world import World
from mpitrain.config import Config
from mpitrain.config_rules import words_asked
from mpitrain.data import corpus as corpora
from mpitrain.data import encoded, tokenizer_file
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import CheckpointError, DataError
from mpitrain.options import show
from mpitrain.recording.outside import heard

SHARE = 0.1  # of the longest that a message may wait: for about so long ranks that only wait hear nothing


def tokenizer_of(
    config: Config, world: World, found: Sequence[Path] = (), beside: Path | None = None
) -> Tokenizer | None:
    """The tokenizer that the settings ask for; None: there is none.  Collective over the world.

    Args:
        config: the settings.
        world: all ranks.
        found: the checkpoint that the run goes on from, first.
        beside: the tokenizer.json that lies with the weights that the run begins with, if it does and there is one.

    Raises:
        ConfigError: the library is not installed on some host.
        DataError: the file is not what is taken, or not the same on all ranks; the text holds tokens.
        CheckpointError: it is not the one of the run that goes on, or of the weights.
    """
    asked = config.tokenizer
    if asked is None:
        return None
    kept = heard("the tokenizer of the run", lambda: _kept(asked, found[0])) if found else ""
    words = words_asked(asked)
    if kept or words is None:
        tokenizer = together(world, lambda: Tokenizer.read(kept or asked))
    else:
        tokenizer = _told(world, together(world, lambda: _made(config, asked, words), here=world.rank == 0))
    assert tokenizer is not None
    hashes = world.exchange(tokenizer.sha256)
    odd = [rank for rank, sha256 in enumerate(hashes) if sha256 != hashes[0]]
    if odd:
        raise DataError(
            f"--tokenizer {kept or asked}: is not the same file on all ranks: rank {odd[0]} reads sha256"
            f" {hashes[odd[0]][:12]}, rank 0 {hashes[0][:12]}.\nGive every host the same one."
        )
    if found:
        _check_same(found[0], tokenizer, asked)
    if not found:
        _check_of_weights(beside, world, tokenizer, asked)
    return tokenizer


def read_words(
    config: Config, world: World, tokenizer: Tokenizer, say: Callable[[str], None] = lambda text: None
) -> Corpus:
    """The text in the words of the tokenizer.  Collective over the world.

    One rank of each host encodes it, unless it was before, and all of them map what it wrote.  While it does, the
    others hear of it every now and then, so that however long the text is no message waits for too long.

    Args:
        config: the settings.
        world: all ranks.
        tokenizer: the same on all of them.
        say: tells people how far it is, where it takes long.

    Raises:
        DataError: the text cannot be read, or the tokenizer fails on it.
    """
    hosts = world.exchange(world.host)
    leader = hosts.index(hosts[world.rank])
    leads = world.rank == leader
    text = together(
        world,
        lambda: corpora.load(config.data, tokenizer.vocab_size, wide=encoded.is_wide(tokenizer)),
        here=leads,
    )
    is_text = world.exchange(text is not None and text.kind == "bytes")[leader]
    if not is_text:
        corpus = together(world, lambda: encoded.load(config.data, tokenizer))
        assert corpus is not None
        return corpus
    encoder = encoded.Encoder(text, tokenizer) if text is not None else None
    key = world.exchange("" if encoder is None else encoder.key)[leader]

    def works() -> float:
        if encoder is None or (not encoder.begun and encoded.opened(key, tokenizer) is not None):
            return 1.0
        encoder.work(SHARE * config.timeout)
        return encoder.share

    while (done := min(world.exchange(together(world, lambda: heard("how much of the text is encoded", works))))) < 1:
        say(f"{100 * done:.0f} % of the text is encoded")

    def the_corpus() -> Corpus:
        if encoder is not None and encoder.done:
            return encoder.result()
        return encoded.opened(key, tokenizer) or encoded.load(config.data, tokenizer)

    mine = together(world, the_corpus, here=leads)
    corpus = together(world, the_corpus, here=not leads)
    found = mine if mine is not None else corpus
    assert found is not None
    return found


def save_copy(tokenizer: Tokenizer | None, run: Path) -> None:
    """Write the tokenizer into the folder of its run; one rank calls it."""
    if tokenizer is not None:
        tokenizer.save(run / tokenizer_file.NAME)


def _made(config: Config, asked: str, words: int) -> Tokenizer:
    """A tokenizer of the text."""
    text = corpora.load(config.data)
    if text.kind != "bytes":
        raise DataError(
            f"--tokenizer {asked}: {text.source} holds tokens, and a tokenizer is made of text.\n"
            "Give the text, or the tokenizer.json that made the tokens, or leave --tokenizer out."
        )
    return Tokenizer.trained(encoded.training_pieces(text), words)


def _told(world: World, made: Tokenizer | None) -> Tokenizer | None:
    """The tokenizer that rank 0 made, on all ranks."""
    mine = np.frombuffer(b"" if made is None else made.text.encode(), np.uint8)
    length = int(world.exchange(len(mine))[0])
    whole = world.broadcast(mine if world.rank == 0 else np.empty(length, np.uint8))
    return together(world, lambda: made or Tokenizer(whole.tobytes().decode(), "of rank 0"))


def _kept(asked: str, found: Path) -> str:
    """The file in the folder of the run that goes on, where it was started with the same option; else ""."""
    saved = checkpoint.read_manifest(found).scalars.get("config")
    run = found.parent.parent if found.parent.name == "checkpoints" else found.parent
    path = run / tokenizer_file.NAME
    same = isinstance(saved, dict) and saved.get("tokenizer") == asked
    return str(path) if same and path.is_file() and not path.is_symlink() else ""


def _check_same(found: Path, tokenizer: Tokenizer, asked: str) -> None:
    """Refuse to go on with other words than those that the weights know."""
    data = checkpoint.read_manifest(found).scalars.get("data")
    before = data.get("tokenizer") if isinstance(data, dict) else None
    if before != tokenizer.sha256:
        was = f"with another tokenizer (sha256 {before[:12]})" if isinstance(before, str) else "without a tokenizer"
        raise CheckpointError(
            f"{found} was trained {was}, and --tokenizer {asked} is sha256 {tokenizer.sha256[:12]}.\n"
            "Leave --tokenizer out: the run's own is in its folder.  Or start a new run."
        )


def _check_of_weights(beside: Path | None, world: World, tokenizer: Tokenizer, asked: str) -> None:
    """Refuse to begin with weights that know other words; rank 0 looks."""

    def sha256() -> str:
        return "" if beside is None else hashlib.sha256(tokenizer_file.read(beside).encode()).hexdigest()

    mine = together(world, lambda: heard("the tokenizer of the weights", sha256), here=world.rank == 0)
    before, path = world.exchange([mine, str(beside)])[0]
    if before and before != tokenizer.sha256:
        raise CheckpointError(
            f"--tokenizer {show(asked)} is sha256 {tokenizer.sha256[:12]}, and the weights of --init know the words of"
            f" {show(path)} (sha256 {before[:12]}).\nLeave --tokenizer out: that one comes with the weights.\n"
            "If both have the same words, put yours in the place of that file."
        )
