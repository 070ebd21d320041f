"""`mpitrain train --device cuda` with every feature: the bits of the same command line on the CPU.

The host computes by NumPy's formulas here, and so does the stand-in; so a difference is no rounding but something that
went another way: a value that was read too early, a rank that took another branch, a copy that was forgotten.
"""

from __future__ import annotations

import pytest
from device_runs import Runs, assert_same_bits
from strict_stream import asynchronous

from mpitrain.verify import sweep

CASES = {
    "gpt": (1, "--dropout 0.1 --offload optimizer,activations,parameters"),
    "llama": (2, "--model llama-tiny --heads 4 --kv-heads 2 --window 5 --pp 2 --dtype float16"),
    "experts": (2, "--layers 1 --experts 4 --ep 2 --jitter 0.1 --z-loss 0.001 --zero 2 --recompute full"),
}
SLOW = {
    "data parallel": (2, "--dropout 0.1"),
    "pipeline": (2, "--pp 2"),
    "zero 3": (2, "--zero 3 --dropout 0.1"),
    "recompute": (1, "--recompute full --dropout 0.1"),
    "tied table, SGD": (1, "--tied --gelu erf --optimizer sgd"),
    "Adafactor": (2, "--optimizer adafactor --lr-groups *.bias=2"),
    "frozen": (1, "--freeze table,blocks.0"),
    "a slower start": (1, "--lr-schedule linear --warmup 0.5"),
    "dropless experts, overlapped": (
        4,
        "--experts 4 --top-k 2 --router topk --dropless --ep 2 --expert-overlap --tp 2",
    ),
    "experts in stages": (
        4,
        "--experts 2 --ep 2 --pp 2 --schedule interleaved --layers 4 --moe-every 2 --recompute full",
    ),
    "experts in halves": (4, "--experts 4 --ep 2 --zero 2 --tp 2 --dtype float16"),
    "zero bubble": (2, "--pp 2 --schedule zb-h1"),
    "interleaved": (2, "--pp 2 --schedule interleaved --layers 4 --chunks 2"),
    "GPipe, sequence parallel": (4, "--pp 2 --schedule gpipe --tp 2 --sequence-parallel"),
    "TeraPipe": (2, "--pp 2 --schedule terapipe --slices 2"),
    "PipeDream": (2, "--pp 2 --schedule pipedream --microbatches 1 --clip 0"),
    "PipeDream-2BW": (2, "--pp 2 --schedule pipedream-2bw"),
    "ZeRO 1": (2, "--zero 1"),
    "ZeRO 2 in buckets": (2, "--zero 2 --reducer bucketed"),
    "scales of branches": (1, "--dtype float16 --loss-scaling blocks"),
    "bfloat16": (2, "--dtype bfloat16"),
    "scores are kept": (1, "--recompute none"),
    "parts are made again": (1, "--recompute-modules blocks.*.mlp"),
    "a budget of activations": (1, "--recompute-budget 0.25"),
    "offload beside ZeRO 3": (2, "--offload optimizer,parameters --zero 3"),
    "offload of halves in stages": (2, "--offload optimizer,parameters,activations --dtype float16 --pp 2"),
    "offload of all": (2, "--offload optimizer,parameters,activations --zero 3 --dtype bfloat16 --recompute full"),
    "offload to a file": (1, "--offload optimizer,activations --offload-to hdf5:STORE"),
    "offload far ahead": (
        2,
        "--offload optimizer,parameters --zero 3 --prefetch 3 --offload-to hdf5:STORE --optimizer sgd",
    ),
    "a budget of memory": (1, "--memory-budget 900KiB"),
    "PowerSGD": (2, "--reducer powersgd --powersgd-rank 2"),
    "PowerSGD of halves in stages": (4, "--pp 2 --reducer powersgd --powersgd-tables --dtype float16"),
    "stale gradients": (2, "--reducer stale"),
    "stale workers": (3, "--reducer stale --stale-workers --staleness 2 --batch 6 --microbatches 1"),
    "local SGD": (2, "--reducer local --local-steps 1 --average-moments"),
    "buckets": (2, "--reducer bucketed --bucket-mib 0.01"),
    "Gist": (1, "--gist lossless"),
    "lossy Gist, offloaded": (1, "--gist 8 --offload activations"),
    "tensor and sequence parallel": (4, "--tp 2 --sequence-parallel --dropout 0.1"),
    "ring attention": (2, "--cp 2 --window 5"),
    "Ulysses": (2, "--cp 2 --cp-attention ulysses"),
    "RSA": (2, "--cp 2 --cp-attention rsa"),
    "ring attention and ZeRO 3": (4, "--cp 2 --zero 3 --dropout 0.1"),
    "packed documents over cp": (2, "--pack --tokenizer bpe:300 --cp 2"),
    "packed documents with experts": (1, "--pack --experts 2 --dropout 0.1"),
    "positions stretched": (2, "--model llama-tiny --heads 4 --rope-scaling linear:2 --tp 2 --sequence-parallel"),
    "balanced by time": (2, "--pp 2 --balance measured --stage-layers 1,1"),
    "checked, with a ledger": (2, "--check --memory"),
    "traced, with digests": (2, "--trace --digests 1 --metrics csv"),
    "saved in the background": (1, "--async-save --read-back"),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_has_the_bits_of_the_same_run_on_the_cpu(cupy, numpy_kernels, tmp_path, case):
    ranks, flags = {**CASES, **SLOW}[case]
    assert_same_bits(*Runs(tmp_path).both(flags, ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["gpt", "llama", "experts", "zero 3", "offload of all", "offload to a file", "saved in the background", "buckets"],
)
def test_nothing_is_read_or_used_again_before_the_device_is_done(cupy, numpy_kernels, tmp_path, case):
    """Every kernel and copy runs as late as a device might run it; until then its result is NaN."""
    ranks, flags = {**CASES, **SLOW}[case]
    runs = Runs(tmp_path)
    with asynchronous(seed=3):
        late = runs.train("cuda", flags, ranks)
    assert_same_bits(late, runs.train("cpu", flags, ranks))


@pytest.mark.slow
def test_random_cases_on_devices_are_the_training_run_of_one_rank(cupy, capsys):
    """The sweep of `mpitrain verify`, by CUDA kernels: layouts, schedules, precisions and features as they come."""
    assert sweep.main(8, 0, device="cuda") == 0, capsys.readouterr().out
