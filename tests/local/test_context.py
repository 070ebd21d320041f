"""Context parallelism on ranks that are threads: checks_context.py, and what only one process can see of all ranks."""

from __future__ import annotations

import sys
import time
import tracemalloc
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_context as checks
from delay import delayed

from mpitrain import kernels
from mpitrain.autograd import Tape
from mpitrain.autograd.ops.attention import merge
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.events import Event, listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.parallel.context import layout


def run(check: Any, ranks: int, **how: Any) -> list[Any]:
    return LocalWorld(ranks, timeout=60, **how).run(lambda: check(world()))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_check(check: Any, ranks: int) -> None:
    run(check, ranks)


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("check", checks.CHECKS[:4], ids=lambda check: check.__name__)
def test_other_numbers_of_ranks_give_the_same_numbers(check: Any, ranks: int) -> None:
    run(check, ranks)


def test_messages_that_are_cut_change_nothing() -> None:
    """C75."""
    for check in (checks.every_way_equals_dense_attention, checks.dropout_is_that_of_the_whole_sequence):
        run(check, 3, limit=50)


# -- who computes what


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_hold_exactly_what_queries_see(size: int, zigzag: bool, causal: bool) -> None:
    length = 6
    of = [layout.positions(size * length, size, rank, zigzag) for rank in range(size)]
    for rank in range(size):
        for source in range(size):
            seen = np.zeros((length, length), bool)
            part = layout.visible(rank, source, length, zigzag=zigzag, causal=causal)
            if part is not None:
                count = part.queries.stop - part.queries.start
                seen[part.queries, part.keys] = np.tril(np.ones((count, count), bool)) if part.causal else True
                assert part.pairs == seen.sum()
            truth = of[rank][:, None] >= of[source] if causal else np.ones((length, length), bool)
            assert (seen == truth).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("zigzag", [False, True])
def test_parts_of_a_window_hold_exactly_what_queries_see(size: int, zigzag: bool) -> None:
    length = 6
    of = [layout.positions(size * length, size, rank, zigzag) for rank in range(size)]
    for rank in range(size):
        for source in range(size):
            for window in range(1, size * length + 3):
                seen, pairs = np.zeros((length, length), int), 0
                parts = layout.parts(
                    rank, source, length, zigzag=zigzag, causal=True, size=size, window=window if window < 20 else None
                )
                for part in parts:
                    num_queries, num_keys = (cut.stop - cut.start for cut in (part.queries, part.keys))
                    places = np.arange(num_keys)
                    inside = np.ones((num_queries, num_keys), bool)
                    if part.causal:
                        inside &= places <= np.arange(num_queries)[:, None]
                    if part.since is not None:
                        inside &= places >= part.since + np.arange(num_queries)[:, None]
                    assert part.pairs == inside.sum() > 0
                    seen[part.queries, part.keys] += inside
                    pairs += part.pairs
                ahead = of[rank][:, None] - of[source]
                assert (seen == ((ahead >= 0) & ((ahead < window) | (window >= 20)))).all()


class Counted:
    """Kernels that note, a rank, how many pairs of query and key each call computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward: dict[int, list[float]] = {}
        self.backward: dict[int, list[float]] = {}
        monkeypatch.setattr(kernels, "attention", self._noting(kernels.attention, self.forward, 0))
        monkeypatch.setattr(kernels, "attention_backward", self._noting(kernels.attention_backward, self.backward, 1))

    @staticmethod
    def _noting(kernel: Any, calls: dict[int, list[float]], at: int) -> Any:
        def noting(*arrays: Any, **how: Any) -> Any:
            b, h, s, _ = arrays[at].shape
            t = arrays[at + 1].shape[2]
            calls.setdefault(world().rank, []).append(b * h * (s * (s + 1) // 2 if how["causal"] else s * t))
            return kernel(*arrays, **how)

        return noting


@pytest.mark.parametrize(
    ("way", "pairs"), [("contiguous", [36, 100, 164, 228]), ("ring", [132] * 4), ("ulysses", [528 // 4 * 4] * 4)]
)
def test_zigzag_gives_all_ranks_the_same_work(way: str, pairs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """T14.3: pairs of query and key that the kernel is given, of 32 tokens on 4 ranks; Ulysses has them by heads."""
    counted = Counted(monkeypatch)
    heads = 4 if way == "ulysses" else 1
    p = checks.problem(4, heads, heads, b=1, chunk=4)
    run(lambda w: checks.run(p, checks.cp_of(w), way), 4)
    for calls in (counted.forward, counted.backward):
        assert [sum(calls[rank]) for rank in range(4)] == pairs


def test_every_hop_of_zigzag_has_two_pairs_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """T14.3: in lock-step the contiguous layout takes 2+4+4+4 = 14 chunk pairs, zig-zag 4 x 2 = 8."""
    long = {}
    for way in ("contiguous", "ring"):
        counted = Counted(monkeypatch)
        p = checks.problem(4, 1, 1, b=1, chunk=64)
        run(lambda w, p=p, way=way: checks.run(p, checks.cp_of(w), way), 4)
        chunk_pairs = [[round(n / 64**2) for n in counted.forward[rank]] for rank in range(4)]
        hops = [[row[hop] if hop < len(row) else 0 for row in chunk_pairs] for hop in range(4)]
        long[way] = [max(hop) for hop in hops]
        if way == "ring":
            assert chunk_pairs == [[2, 2, 2, 2]] * 4
        monkeypatch.undo()
    assert sum(long["contiguous"]) == 14
    assert sum(long["ring"]) == 8


def test_blocks_without_a_key_of_the_same_document_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    p = checks.problem(4, 1, 1, b=1, chunk=4)
    p = p._replace(documents=np.arange(32)[None] // 8)
    y, d_qkv = checks.dense(p)

    def compare(w: Any) -> None:
        axis = checks.cp_of(w)
        mine, its_gradient, _ = checks.run(p, axis, "contiguous")
        part = checks.here(p, axis, "contiguous")
        np.testing.assert_allclose(mine, y[:, part], atol=1e-12)
        np.testing.assert_allclose(its_gradient, d_qkv[:, part], atol=1e-12)

    run(compare, 4)
    for calls in (counted.forward, counted.backward):
        assert calls == {rank: [36] for rank in range(4)}


def test_documents_that_go_on_behind_others_have_no_first_keys() -> None:
    """Where each lies together a query has one, and padding sees nothing; else there is a mask by query and key."""
    together = np.array([[3, 3, 0, 0, 0, -1], [-1, 1, 2, 2, -1, -1]])
    assert layout.first_keys(together) is not None
    assert layout.seen_by(together, causal=True).tolist() == [[0, 0, 2, 2, 2, 6], [1, 1, 2, 2, 5, 6]]
    apart = np.array([[3, 3, 0, 0, 3, -1], [0, 0, 0, 0, 0, 0]])
    assert layout.first_keys(apart) is None
    for documents, causal in ((apart, True), (together, False)):
        assert np.array_equal(layout.seen_by(documents, causal), layout.same_document(documents, documents))


@pytest.mark.parametrize("way", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_documents_in_any_order(ranks: int, way: str) -> None:
    p = checks.problem(ranks, 2 * ranks, ranks, packed=True)
    assert p.documents is not None
    p = p._replace(documents=np.random.default_rng(0).permutation(p.documents, axis=1))
    run(lambda w: checks.equals_dense(p, checks.cp_of(w), way), ranks)


def test_hops_beyond_a_window_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 tokens on 4 ranks in windows of 3: a rank computes with its own block, and the end of the one before."""
    counted = Counted(monkeypatch)
    p = checks.problem(4, 1, 1, b=1, chunk=4, window=3)
    run(lambda w: checks.equals_dense(p, checks.cp_of(w), "contiguous"), 4)
    for calls in (counted.forward, counted.backward):
        assert calls == {0: [36], 1: [36, 2 * 2], 2: [36, 2 * 2], 3: [36, 2 * 2]}


# -- merging


def softmaxes(scores: np.ndarray, values: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(y, lse) of each block, as the kernel gives them."""
    found = []
    for s, v in zip(scores, values, strict=True):
        y, lowest = np.zeros((s.shape[0], v.shape[1])), np.finfo(float).min
        lse = np.full(s.shape[0], lowest)
        live = s.max(axis=1) > -np.inf
        lse[live] = np.log(np.exp(s[live]).sum(axis=1))
        y[live] = np.exp(s[live] - lse[live, None]) @ v
        found.append((y, lse))
    return found


def test_the_order_of_blocks_does_not_matter() -> None:
    """T14.2, T14.5: any order, also where a query sees nothing in the first blocks, or nothing at all."""
    random = np.random.default_rng(0)
    scores, values = random.normal(0, 8, (4, 9, 5)), random.standard_normal((4, 5, 3))
    scores[0, 2] = scores[1, 2] = scores[3, 4] = -np.inf
    scores[:, 7] = -np.inf
    joined = np.concatenate(list(scores), axis=1)
    ((truth, truth_lse),) = softmaxes(joined[None], values.reshape(1, 20, 3))
    for order in permutations(range(4)):
        blocks = softmaxes(scores, values)
        y, lse = (x.copy() for x in blocks[order[0]])
        for block in order[1:]:
            merge(y, lse, *blocks[block])
        np.testing.assert_allclose(y, truth, rtol=0, atol=1e-13)
        np.testing.assert_allclose(lse, truth_lse, rtol=1e-14)
        assert not y[7].any()


def test_merging_has_no_infinity_on_its_way() -> None:
    for dtype in (np.float32, np.float64):
        lowest, y = np.full(1, np.finfo(dtype).min), np.zeros((1, 2), dtype)
        with np.errstate(all="raise", under="ignore"):
            lse = lowest.copy()
            merge(y, lse, np.zeros((1, 2), dtype), lowest.copy())
            assert not y.any()
            merge(y, lse, np.ones((1, 2), dtype), np.full(1, 1e30, dtype))
            assert (y == 1).all()
            merge(y, lse, np.zeros((1, 2), dtype), lowest.copy())
            assert (y == 1).all()
            assert (lse == np.full(1, 1e30, dtype)).all()


# -- messages


def course(way: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What rank 1 of 3 does, in order: messages as they are posted, and `compute`."""
    log: list[str] = []

    def noting(kernel: Any) -> Any:
        def noted(*arrays: Any, **how: Any) -> Any:
            if world().rank == 1:
                log.append("compute")
            return kernel(*arrays, **how)

        return noted

    def heard(event: Event) -> None:
        if event.kind == "message" and event.phase == "begin" and not event.name.startswith("wait"):
            log.append(f"{event.name} {event.info['how'][-1]}")

    def main() -> None:
        axis = checks.cp_of(world())
        p = checks.problem(3, 3, 3)
        if axis.rank != 1:
            checks.run(p, axis, way)
            return
        with listen(heard):
            checks.run(p, axis, way)

    monkeypatch.setattr(kernels, "attention", noting(kernels.attention))
    monkeypatch.setattr(kernels, "attention_backward", noting(kernels.attention_backward))
    LocalWorld(3).run(main)
    return log


def test_the_next_block_is_on_its_way_before_this_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """T14.4: c-1 hops forward, c-1 back, and c for the gradients; each message has a tag of its own."""
    assert course("ring", monkeypatch) == [
        *("irecv 0", "isend 0", "compute", "irecv 3", "isend 3", "compute", "compute"),
        *("irecv 1", "isend 1", "compute", "isend 2"),
        *("irecv 4", "isend 4", "irecv 2", "compute", "isend 5"),
        *("irecv 5", "compute", "isend 8", "irecv 8"),
    ]


DELAY = 0.01


def waited(way: str) -> float:
    """Seconds for which this rank waits for messages that are `DELAY` late, there and back."""
    axis = checks.cp_of(world())
    before = axis.transport.waited
    checks.run(checks.problem(4), axis, way)
    return axis.transport.waited - before


def test_the_ring_hides_its_messages_behind_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to compute while the last sum comes home; the other nine hops hide behind a block each.

    Computing a block takes longer than a message here.  Ranks take turns, so while one waits the others' messages get
    due, too: their waits are added up.
    """

    def slowly(kernel: Any) -> Any:
        def slow(*arrays: Any, **how: Any) -> Any:
            time.sleep(1.5 * DELAY / 2)  # of each of the two heads that a group has
            return kernel(*arrays, **how)

        return slow

    monkeypatch.setattr(kernels, "attention", slowly(kernels.attention))
    monkeypatch.setattr(kernels, "attention_backward", slowly(kernels.attention_backward))
    ring, rsa = (sum(LocalWorld(4, wrap=delayed(DELAY)).run(waited, way)) for way in ("ring", "rsa"))
    print(f"two rings wait {1000 * rsa:.0f} ms, the ring {1000 * ring:.0f} ms")
    assert rsa >= 12 * DELAY
    assert ring <= 0.3 * rsa


# -- memory


def one_step(kind: str) -> tuple[int, int]:
    """Forward and backward of a GPT whose sequences are cut over all ranks.

    Returns:
        Bytes that this rank's tape kept, and how many all ranks together took besides their models at the most.
    """
    ranks = world()
    mesh = Mesh(ranks, cp=ranks.size)
    model = GPT(GPTConfig(vocab=32, layers=6, width=32, heads=4, seq_len=512), mesh, cp_attention=kind)
    here = np.arange(512) if model.positions_here is None else model.positions_here
    ids = np.arange(513) * 7919 % 31
    batch = Batch(ids[None, here], ids[None, here + 1], np.zeros(1, np.int64), here, 0)
    model.start_step()
    ranks.barrier()  # all models are there
    before = tracemalloc.get_traced_memory()[0]
    ranks.barrier()
    with Tape() as tape:
        loss = model(batch)
    kept = tape.nbytes
    ranks.barrier()  # all tapes are there
    tape.run_backward([(loss, np.ones((), np.float32))])
    ranks.barrier()
    return kept, tracemalloc.get_traced_memory()[1] - before


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_each_rank_holds_its_share_of_the_activations(kind: str) -> None:
    """What all ranks take together at the most is what one rank takes alone, so each has 1/c of it."""

    def step(ranks: int) -> tuple[list[int], int]:
        tracemalloc.start()
        try:
            kept, peaks = zip(*LocalWorld(ranks).run(one_step, kind), strict=True)
        finally:
            tracemalloc.stop()
        return list(kept), peaks[0]

    [kept_alone], alone = step(1)
    for ranks in (2, 4):
        kept, peak = step(ranks)
        print(f"{kind}: {alone:,} bytes on one rank, {peak // ranks:,} on each of {ranks}")
        assert len(set(kept)) == 1
        assert kept[0] * ranks <= 1.1 * kept_alone
        assert peak <= 1.2 * alone


def test_the_tape_says_what_it_is() -> None:
    def main() -> str:
        axis = checks.cp_of(world())
        p = checks.problem(2)
        _, _, tape = checks.run(p, axis, "ring")
        return str(tape)

    printed, _ = LocalWorld(2).run(main)
    assert (
        "ring_attention(%0, const, const; heads=4, kv_heads=2, causal=True, drop=0.0, window=None, zigzag=True, cp)"
        in printed
    )
    assert "Shard(1) -> Shard(1)  (2, 6, 16) float64" in printed
