"""A pipeline is the same training run as one rank, whatever its schedule, stages, micro-batches and partition."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_layouts as checks
from often import some

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.errors import ScheduleError
from mpitrain.models.gpt import GPTConfig
from mpitrain.pipeline.passes import complete

SMALL = GPTConfig(vocab=11, layers=4, width=8, heads=2, seq_len=4, dropout=0.2)
LONGER = replace(SMALL, layers=8, seq_len=6)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "terapipe")
MICROS = range(1, 10)


def run(ranks, *hows, **all_of_them):
    """Each of some ways to train, compared with one rank."""

    def main():
        for how in hows or [{}]:
            checks.equals_one_rank(world(), **all_of_them, **how)

    LocalWorld(ranks).run(main)


def ways(schedule, pp, sizes, chunks=(2, 3), slices=((3, 1),), micros=MICROS):
    """Every number of these micro-batches that a schedule takes, with one row each, in so many chunks or slices."""
    for m in micros:
        how = {"sizes": sizes, "schedule": schedule, "pp": pp, "micros": m, "batch": m}
        if schedule == "interleaved":
            yield from ({**how, "chunks": v} for v in chunks if v == 1 or m % pp == 0)
        elif schedule == "terapipe":
            yield from ({**how, "slices": lengths} for lengths in slices)
        else:
            yield how


# --------------------------------------------------------------------------------------------- every schedule, p and m


@pytest.mark.parametrize("pp", some([3, 4, 8, 2]))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_the_same_run_as_one_rank_for_any_number_of_micro_batches(schedule, pp):
    """T6.3, T7.3, C42: one, fewer than stages, about as many, and more; on 8 ranks half of the stages hold no block."""
    run(pp, *ways(schedule, pp, SMALL, micros=sorted({1, 2, pp - 1, pp, pp + 1, min(2 * pp, 9)})), steps=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_on_one_rank(schedule):
    """T6.3; with chunks, that rank hands on from stage to stage by itself."""
    run(1, *(how for how in ways(schedule, 1, SMALL) if how["micros"] in (1, 4, 8)), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_whole_cross_of_schedules_stages_micro_batches_chunks_and_slices(schedule, pp, tied):
    slices = [(6,), (4, 2), (3, 2, 1)]
    run(pp, *ways(schedule, pp, LONGER, chunks=(1, 2, 3), slices=slices), tied=tied)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_chunks_of_two_ranks(chunks):
    """T9.5; with 4 chunks each of 8 stages holds one block."""
    ways = [{"micros": m, "batch": 8} for m in (2, 4, 8)]
    run(2, *ways, sizes=replace(SMALL, layers=8), pp=2, chunks=chunks, schedule="interleaved")


def test_interleaved_with_one_chunk_is_1f1b():
    for p in (1, 2, 3, 4, 8):
        for m in MICROS:
            assert complete("interleaved", ranks=p, microbatches=m, chunks=1) == complete(
                "1f1b", ranks=p, microbatches=m
            )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_may_use_the_same_tags_again(schedule, monkeypatch):
    """Two ranks send and receive in the same order, so that a row may be longer than there are tags."""
    monkeypatch.setattr("mpitrain.parallel.stages.TAGS", 6)
    run(4, next(how for how in ways(schedule, 4, SMALL) if how["micros"] == 8), steps=3)


@pytest.mark.parametrize(("pp", "m"), [(2, 1), (2, 3), (3, 4), (4, 6), (8, 4)])
def test_interleaved_refuses_micro_batches_that_do_not_divide_on_every_rank_before_any_message(pp, m):
    """C42."""
    told = []

    def main():
        ranks = world()
        with pytest.raises(ScheduleError, match="interleaved takes micro-batches in groups") as error:
            checks.train(ranks, sizes=SMALL, schedule="interleaved", pp=pp, micros=m, batch=m, chunks=2)
        told.append(str(error.value))

    LocalWorld(pp).run(main)
    assert len(told) == pp
    assert len(set(told)) == 1
    assert f"{m} do not divide by {pp}" in told[0]


@pytest.mark.parametrize(
    "slices", [(6,), (3, 3), (5, 1), (1, 5), (1, 1, 1, 1, 1, 1)], ids=lambda lengths: "-".join(map(str, lengths))
)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_any_slices_give_the_same_run(pp, slices):
    """T15.1."""
    run(pp, sizes=replace(LONGER, layers=2), schedule="terapipe", slices=slices, pp=pp, micros=3, batch=6, steps=3)


def test_gpipe_1f1b_and_zb_h1_agree():
    """T10.4: gradients equal to 1e-12, and to the last bit where micro-batches are added up in the same order."""

    def main(schedule):
        return checks.train(world(), sizes=SMALL, schedule=schedule, pp=4, micros=6, batch=6, steps=1)["gradients"]

    gpipe, one, zero = (LocalWorld(4).run(main, name)[0] for name in ("gpipe", "1f1b", "zb-h1"))
    for name, gradient in one.items():
        np.testing.assert_array_equal(zero[name], gradient, err_msg=name)
        largest = np.abs(gradient).max()
        assert np.abs(gpipe[name] - gradient).max() <= 1e-12 * max(largest, 1e-6), name


# ----------------------------------------------------------------------------------------------------------- partitions


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "terapipe"])
@pytest.mark.parametrize("blocks", [(2, 1, 1, 1), (1, 1, 1, 2), (0, 5, 0, 0), (5, 0, 0, 0), (0, 0, 0, 5)])
def test_five_blocks_on_four_stages(blocks, schedule):
    """C46: uneven stages, and stages that hold none."""
    how = {"slices": (3, 1)} if schedule == "terapipe" else {}
    run(4, sizes=replace(SMALL, layers=5), blocks=blocks, schedule=schedule, pp=4, micros=5, batch=5, steps=2, **how)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("blocks", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_stage_without_parameters_takes_part(schedule, blocks, tied):
    """C46: (1, 0, 0) is embedding and block, nothing at all, head; the norm for clipping needs all three."""
    run(
        3, sizes=replace(SMALL, layers=1), tied=tied, blocks=blocks, schedule=schedule, pp=3, micros=4, batch=4, steps=2
    )


def test_empty_stages_with_buckets_over_data_ranks():
    """C46: a rank without parameters sends no bucket, and waits for none."""
    run(6, sizes=replace(SMALL, layers=1), blocks=(1, 0, 0), pp=3, dp=2, micros=3, batch=6, bucket_bytes=256)


@pytest.mark.parametrize("blocks", [(0, 0, 1, 0, 0, 1, 0, 0), (1, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 2, 0, 0, 0, 0)])
def test_more_stages_than_blocks(blocks):
    two = replace(SMALL, layers=2)
    run(8, {"schedule": "1f1b"}, {"schedule": "zb-h1"}, sizes=two, blocks=blocks, pp=8, micros=3, batch=3, steps=2)
    run(4, sizes=two, blocks=blocks, schedule="interleaved", chunks=2, pp=4, micros=4, batch=4, steps=2)


# ------------------------------------------------------------------------------------------- together with all the rest


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, {"pp": 2, "micros": 4, "sgd": True}),
        (4, {"pp": 4, "micros": 4, "sgd": True, "schedule": "zb-h1", "tied": True}),
        (4, {"pp": 2, "dp": 2, "micros": 3, "bucket_bytes": 2048}),
        (
            4,
            {"pp": 2, "dp": 2, "micros": 4, "bucket_bytes": 2048, "schedule": "interleaved", "chunks": 2, "tied": True},
        ),
        (4, {"pp": 2, "dp": 2, "micros": 3, "bucket_bytes": 2048, "schedule": "zb-h1"}),
        (2, {"dp": 2, "micros": 2, "bucket_bytes": 2048, "schedule": "interleaved", "chunks": 2, "tied": True}),
        (2, {"pp": 2, "micros": 4, "documents": True}),
        (8, {"pp": 4, "dp": 2, "micros": 3, "documents": True, "schedule": "zb-h1"}),
        (4, {"pp": 2, "cp": 2, "micros": 4, "documents": True, "schedule": "zb-h1"}),
        (4, {"pp": 2, "tp": 2, "micros": 4, "sp": True, "documents": True, "schedule": "gpipe"}),
        (2, {"pp": 2, "micros": 4, "sizes": replace(checks.SIZES, kv_heads=2)}),
        (8, {"pp": 2, "tp": 4, "micros": 4, "sizes": replace(checks.SIZES, kv_heads=2), "sp": True}),
        (4, {"pp": 2, "tp": 2, "micros": 2, "sp": True, "tied": True, "schedule": "interleaved", "chunks": 2}),
        (4, {"pp": 2, "cp": 2, "micros": 4, "kind": "ulysses", "schedule": "zb-h1"}),
        (4, {"pp": 2, "cp": 2, "micros": 4, "kind": "rsa", "schedule": "zb-h1"}),
        (8, {"pp": 4, "cp": 2, "micros": 6, "kind": "ring", "schedule": "zb-h1", "tied": True}),
        (8, {"pp": 2, "cp": 2, "dp": 2, "micros": 4, "kind": "ulysses", "schedule": "interleaved", "chunks": 2}),
        (4, {"pp": 2, "dp": 2, "micros": 3, "schedule": "terapipe", "slices": (7, 5, 4)}),
        (4, {"pp": 2, "tp": 2, "micros": 3, "schedule": "terapipe", "slices": (7, 5, 4), "tied": True}),
        (8, {"pp": 2, "dp": 2, "tp": 2, "micros": 2, "schedule": "terapipe", "slices": (9, 7), "documents": True}),
        (3, {"pp": 3, "micros": 2, "sizes": replace(checks.SIZES, vocab=1003), "tied": True}),
    ],
    ids=lambda value: (
        " ".join(f"{k}-{v}" if not isinstance(v, GPTConfig) else k for k, v in value.items())
        if isinstance(value, dict)
        else str(value)
    ),
)
def test_with_optimizers_buckets_documents_heads_and_other_axes(ranks, how):
    """Documents end in padding, so that micro-batches have different numbers of targets."""
    run(ranks, steps=3, **how)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_buckets_give_the_bits_of_one_message_in_deterministic_mode(schedule):
    def main(bucket_bytes):
        ranks = world()
        ranks.set_deterministic(True)
        return checks.train(ranks, pp=2, dp=2, micros=3, schedule=schedule, bucket_bytes=bucket_bytes, steps=3)

    flat, cut = (LocalWorld(4).run(main, size)[0] for size in (0, 2048))
    for kind, tensors in flat.items():
        for name, array in tensors.items():
            assert array.tobytes() == cut[kind][name].tobytes(), (kind, name)
