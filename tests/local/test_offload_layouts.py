"""The whole trainer, with whatever it has beside offload: metrics, checkpoints and sample keep every bit."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.train import main

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(400))
TINY = "--layers 4 --width 32 --heads 4 --seq-len 32 --batch 16 --lr 0.01 --dropout 0.1 --sample-length 8".split()
TINY += "--deterministic --steps 3 --save-every 3 --microbatches 4".split()
WHAT = {"o": "optimizer", "a": "activations", "p": "parameters"}

CASES = [
    # versions of weights: what waits for backward was made with some that are no more
    (2, "a", "--pp 2 --schedule pipedream --clip 0 --microbatches 1 --untied"),
    (2, "a", "--pp 2 --schedule pipedream-2bw --tied"),
    # rows that ranks cannot share evenly
    (3, "oap", "--dp 3 --batch 12 --microbatches 2 --width 20"),
    # who looks at all there is: values, weights and state, wherever they live
    (2, "oap", "--check --dtype float16"),
]
MORE = [
    (3, "a", "--pp 3 --schedule pipedream --clip 0 --microbatches 1 --untied"),
    (2, "a", "--pp 2 --schedule pipedream-2bw --check"),
    *((2, what, "--pp 2 --schedule terapipe --slices 2") for what in ("oa", "oap")),
    *((2, what, "--pp 2 --schedule interleaved --chunks 2") for what in ("o", "a", "oap")),
    *((2, what, "--pp 2 --schedule zb-h1") for what in ("oa", "oap")),
    (2, "oa", "--pp 2 --tied"),
    (4, "oap", "--pp 2 --dp 2"),
    (4, "oa", "--pp 2 --dp 2 --zero 1"),
    *((2, what, "--experts 4 --ep 2") for what in ("o", "a", "p", "oap")),
    (2, "oap", "--experts 4 --ep 2 --expert-overlap"),
    (2, "oap", "--experts 4 --pp 2"),
    (4, "oap", "--experts 6 --ep 2 --width 36"),
    (3, "oa", "--batch 12 --microbatches 2 --width 20 --zero 1"),
    (3, "oap", "--tp 3 --width 36 --heads 3 --experts 6"),
    (3, "oap", "--pp 3"),
    (2, "op", "--experts 4 --ep 2 --dropless"),
    (2, "oap", "--tp 2 --sequence-parallel"),
    *((2, "oap", f"--cp 2 --cp-attention {kind}") for kind in ("ring", "ulysses", "rsa")),
    (1, "oap", "--gist 16"),
    (2, "oa", "--gist lossless"),
    (2, "a", "--gist 8 --pp 2"),
    *((1, "oap", f"--recompute{how}") for how in (" full", " selective", "-modules blocks.1")),
    *((2, "oa", f"--zero {stage}") for stage in (1, 2, 3)),
    (2, "oap", "--reducer bucketed"),
    (2, "oa", "--reducer powersgd"),
    (2, "oa", "--reducer stale --staleness 1"),
    (2, "oa", "--reducer stale --staleness 1 --stale-workers"),
    (2, "a", "--reducer local --local-steps 1"),
    (1, "oap", "--dtype bfloat16"),
    (1, "oa", "--dtype float16 --loss-scaling blocks"),
    *((1, "oap", f"--optimizer sgd --momentum {momentum}") for momentum in (0, 0.9)),
    (1, "a", "--optimizer adafactor"),
    (1, "op", "--lr-groups table.*=0.5,*.bias=2"),
    *((1, "oap", table) for table in ("--tied", "--untied")),
    (1, "oap", "--clip 0"),
    *((2, what, "--check --tp 2") for what in ("o", "p", "oap")),
    *((2, "oap", f"--check {more}") for more in ("--pp 2", "--experts 4 --ep 2", "--gist 16")),
    (2, "oa", "--memory --check --pp 2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    return folder


@functools.cache
def outcome(folder: Path, ranks: int, flags: str):
    """Metrics without times and memory, digests of the files of tensors of the last checkpoint, the sample."""
    run = folder / hashlib.sha256(flags.encode()).hexdigest()
    LocalWorld(ranks).run(main, [*TINY, "--data", str(folder / "text.txt"), "--run", str(run), *flags.split()])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("tokens_per_s")
        record.pop("memory_peak_bytes", None)  # is what differs
    files = sorted((run / "checkpoints" / "step-00000003").glob("*.h5"))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert len(records) >= 3
    assert digests
    return records, digests, (run / "sample.txt").read_text()


def check(folder: Path, ranks: int, what: str, flags: str) -> None:
    there = f"--offload {','.join(WHAT[letter] for letter in what)} --offload-to hdf5:{folder}/disk"
    here = f"{flags} --zero 3" if "p" in what else flags
    assert outcome(folder, ranks, f"{flags} {there}") == outcome(folder, ranks, here)


@pytest.mark.parametrize(("ranks", "what", "flags"), CASES)
def test_a_run_is_the_same_with_and_without(folder, ranks, what, flags):
    check(folder, ranks, what, flags)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "what", "flags"), MORE)
def test_a_run_is_the_same_with_and_without_in_more_cases(folder, ranks, what, flags):
    check(folder, ranks, what, flags)
