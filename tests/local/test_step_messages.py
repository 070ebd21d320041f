"""What a data-parallel step sends: counted at the door, and equal to the formula."""

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.adam import AdamW
from mpitrain.parallel.data import BucketedReducer, FlatReducer
from mpitrain.pipeline.executor import DATA_AXES, Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage


def run(micros, bucket_bytes=None):
    """(events of one step on this rank, bytes of gradient sums, parameters' elements, steps of the row)."""
    mesh = Mesh(world())
    model = GPT(GPTConfig(vocab=16, layers=1, width=16, heads=2, seq_len=4), mesh)
    reducer = FlatReducer(model.flats, mesh)
    if bucket_bytes:
        reducer = BucketedReducer(model.flats, mesh, bucket_bytes)
    executor = Executor(model, AdamW(model.parameters()), mesh, with_update(one_stage(micros)), reducer=reducer)
    tokens = np.arange(400, dtype=np.uint8) % 16
    data = Tokens(Corpus(tokens, tokens, 16, "bytes", "numbers", (), (), ""), 4)
    events = []
    axis = mesh.merged(DATA_AXES)
    before = axis.sent_bytes.get("all_reduce", 0)
    with listen(lambda event: events.append((event.kind, event.phase, event.name))):
        executor.step(data.batch_at(0, 24, mesh.dp.rank, mesh.dp.size))
    sent = axis.sent_bytes["all_reduce"] - before
    return events, sent, model.num_parameters, executor.row


@pytest.mark.parametrize("micros", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bytes_of_a_step_do_not_depend_on_the_number_of_micro_batches(ranks, micros):
    """T4.2: 2 (n-1)/n of the gradients, and 8 bytes of COUNT."""
    for _, sent, elements, _ in LocalWorld(ranks).run(run, micros):
        assert sent == round(2 * (ranks - 1) / ranks * (4 * elements + 8))


@pytest.mark.parametrize("micros", [1, 3])
def test_each_bucket_is_reduced_once_a_step_and_the_buckets_together_are_the_gradients(micros):
    events, sent, elements, _ = LocalWorld(2).run(run, micros, 2048)[0]
    starts = [name for kind, phase, name in events if (kind, phase) == ("message", "begin")]
    assert starts.count("iall_reduce") > 2
    assert sent == 4 * elements + 8
    assert LocalWorld(2).run(run, 1, 2048)[0][0].count(("message", "begin", "iall_reduce")) == starts.count(
        "iall_reduce"
    )


def test_buckets_leave_while_backward_still_runs():
    events = LocalWorld(2).run(run, 2, 2048)[0][0]
    names = [name for kind, phase, name in events if phase == "begin"]
    first = names.index("iall_reduce")
    last_op = max(place for place, name in enumerate(names) if name.endswith(".backward"))
    assert first < last_op
    assert names.index("B0@0") < names.index("F1@0") < first  # only the last micro-batch's gradients are final


def test_a_listener_sees_every_action_op_and_message_begin_and_end():
    events, _, _, row = LocalWorld(2).run(run, 2)[0]
    actions = [name for kind, phase, name in events if (kind, phase) == ("action", "begin")]
    assert actions == [str(action) for action in row]
    for kind in ("action", "op", "message"):
        begins = [name for k, phase, name in events if (k, phase) == (kind, "begin")]
        ends = [name for k, phase, name in events if (k, phase) == (kind, "end")]
        assert sorted(begins) == sorted(ends) != []
    ops = [name for kind, phase, name in events if (kind, phase) == ("op", "begin")]
    forward = [name for name in ops if not name.endswith(".backward")]
    half = len(forward) // 2  # ops of one micro-batch
    assert [f"{name}.backward" for name in reversed(forward[:half])] == ops[half : 2 * half]
