"""Lesson 6: a sequence that is cut over ranks, of which each token still sees all before it.

    mpitrain local -n 4 examples/06_context_parallel.py         (or: mpirun -n 4 python examples/06_context_parallel.py)

Only attention mixes tokens, so only attention sends anything.  Prints which tokens a rank holds and how much of each
block of keys it computes; then, for three kinds of attention, what they send, what they keep for backward, and how far
they are from attention on one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpitrain.autograd import Tape, Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.parallel import context
from mpitrain.parallel.context import layout
from mpitrain.rng import Draw

BATCH, WIDTH, DROP = 2, 8, 0.1


class Pass(NamedTuple):
    """What attention gives, forward and backward, for the tokens that a rank holds."""

    positions: np.ndarray
    y: np.ndarray
    d_qkv: np.ndarray
    sent: tuple[int, int]  # bytes, forward and backward
    kept: int  # bytes that wait for backward
    tape: str


def run(kind: str, n: int) -> Pass:
    """One pass over the surrounding world; the problem is that of n ranks, also where one rank solves it."""
    cp = Mesh(world(), cp=world().size).cp
    seq_len, heads, kv_heads = 16 * n, 2 * n, n  # two heads of queries share one of keys and values
    random = np.random.default_rng(1)
    qkv = random.normal(size=(BATCH, seq_len, (heads + 2 * kv_heads) * WIDTH))
    seed = random.normal(size=(BATCH, seq_len, heads * WIDTH))

    context.check(seq_len, heads, kv_heads, cp, kind)
    here = context.positions(seq_len, cp, kind)
    draw = Draw(seed=1, step=0, places=np.arange(BATCH), positions=here)  # dropout, by global position
    rows = context.attention_rows(draw, "weights", np.arange(heads), cp, kind)
    mine = Tensor(np.ascontiguousarray(qkv[:, here]), requires_grad=True)
    with Tape() as tape:
        y = context.attention(mine, heads, kv_heads, cp, kind, rows=rows, drop=DROP)
    text, kept, forward = str(tape), tape.nbytes, sum(cp.sent_bytes.values())
    d_qkv = tape.run_backward([(y, np.ascontiguousarray(seed[:, here]))])[mine]
    return Pass(here, y.data, d_qkv, (forward, sum(cp.sent_bytes.values()) - forward), kept, text)


def holders(n: int, zigzag: bool) -> str:
    """Who holds which of 2n chunks."""
    owner = {int(p): rank for rank in range(n) for p in layout.positions(2 * n, n, rank, zigzag)}
    return " ".join(str(owner[chunk]) for chunk in range(2 * n))


def lock_step(n: int, zigzag: bool) -> list[int]:
    """What the busiest rank computes at each hop, in pairs of chunks; the ring goes at its pace."""
    chunk = 1000
    hops = []
    for hop in range(n):
        parts = [layout.visible(rank, (rank - hop) % n, 2 * chunk, zigzag=zigzag, causal=True) for rank in range(n)]
        hops.append(round(max(part.pairs for part in parts if part is not None) / chunk**2))
    return hops


def gap(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative to the largest element."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def main() -> float:
    """Print the lesson; return the largest difference of a value or gradient, on any rank, to those of one rank."""
    ranks = world()
    n = ranks.size
    say = print if ranks.rank == 0 else lambda *text: None
    say(
        f"{n} rank{'s' * (n > 1)}.  Who holds which part of each sequence, and what the busiest computes, hop by hop:\n"
    )
    for name, zigzag in (("contiguous", False), ("zig-zag", True)):
        hops = lock_step(n, zigzag)
        say(f"    {name:<11} {holders(n, zigzag)}    {' + '.join(map(str, hops))} = {sum(hops)} pairs of chunks")
    say("\n                 sent forward, backward      kept for backward       difference to one rank")
    worst = 0.0
    for kind in context.KINDS:
        mine = run(kind, n)
        [one] = LocalWorld(1).run(run, kind, n)  # the same function, in a world of one rank
        pairs = ((mine.y, one.y), (mine.d_qkv, one.d_qkv))
        far = max(gap(part, whole[:, mine.positions]) for part, whole in pairs)
        far = float(ranks.all_reduce(np.array(far), "max"))
        forward, backward = mine.sent
        kept = f"{mine.kept:,} of {one.kept:,}"
        say(f"    {kind:<9} {forward:>10,} {backward:>10,} bytes  {kept:>24}    {far:.0e}")
        worst = max(worst, far)
    if n > 1:
        say("\nUlysses is two messages around ordinary attention; its tape on rank 0:\n")
        say("\n".join(f"    {line}" for line in run("ulysses", n).tape.splitlines()))
    say(f"\nlargest difference of a value or gradient to those of one rank: {worst:.1e}")
    assert worst < 1e-12, worst
    return worst


if __name__ == "__main__":
    main()
