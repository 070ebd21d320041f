"""What digests cost: steps with and without them in turns, in processor time of each rank, and the bytes written.

    python benchmarks/digests.py                     the default model on one rank, and on two
    python benchmarks/digests.py -n 4 --dp 2 --tp 2

Ranks are threads of this process, of which one computes at a time.  The figures stand in
docs/how-to/compare-two-runs.md.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from mpitrain.assemble import build_executor, build_model, build_optimizer, read_corpus
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import parse
from mpitrain.data.tokens import Tokens
from mpitrain.debug.digests import Digester
from mpitrain.debug.digests.files import name_of
from mpitrain.debug.digests.writing import Writer
from mpitrain.events import listen

STEPS, WARM = 24, 4


def measured(flags: list[str], folder: Path) -> tuple[float, float, float]:
    """Seconds of a step without digests and with them, and bytes of one with them, of this rank."""
    ranks = world()
    config = parse(["--steps", str(STEPS), *flags])
    mesh = Mesh(ranks, pp=config.pp, dp=config.dp, cp=config.cp, tp=config.tp, ep=config.ep)
    corpus = read_corpus(config, ranks)
    tokens = Tokens(corpus, config.seq_len, config.seed)
    model = build_model(config, corpus, mesh)
    executor = build_executor(config, model, build_optimizer(config, model, mesh), mesh, STEPS)
    path = folder / name_of(ranks.rank)
    digester = Digester(ranks, Writer(path, 1 << 30, True))
    times: tuple[list[float], list[float]] = [], []
    dp = mesh.dp
    for step, batch in enumerate(tokens.batches(config.batch, dp.rank, dp.size, 0, STEPS, model.positions_here)):
        began = time.thread_time()
        if step % 2:
            with listen(digester, ops=False):
                executor.step(batch)
        else:
            executor.step(batch)
        if step >= WARM:
            times[step % 2].append(time.thread_time() - began)
    return statistics.median(times[0]), statistics.median(times[1]), path.stat().st_size / (STEPS / 2)


def main(words: list[str]) -> None:
    asked = [(int(words[1]), words[2:])] if words[:1] == ["-n"] else [(1, words), (2, [*words, "--dp", "2"])]
    for ranks, flags in asked:
        with tempfile.TemporaryDirectory() as folder:
            found = LocalWorld(ranks).run(measured, flags, Path(folder))
        plain, digested, nbytes = max(found)
        print(
            f"{ranks} rank{'s' * (ranks > 1)}: {plain * 1e3:.1f} ms a step, {digested * 1e3:.1f} ms with digests:"
            f" {digested / plain:.2f} times; {nbytes / 1e3:.1f} kB a rank and step"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
