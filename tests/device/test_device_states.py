"""The state checker on device arrays: it knows a batch that went to the device, and compares what lives there."""

from dataclasses import replace

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.states import StateChecker
from mpitrain.debug.states.digests import digest
from mpitrain.errors import StateError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.sgd import Sgd
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

SIZES = GPTConfig(vocab=17, layers=1, width=8, heads=4, seq_len=8, dropout=0.2)
NUMBERS = (np.arange(500) * 7919 % 104729 % 17).astype(np.uint8)
TOKENS = Tokens(Corpus(NUMBERS[:400], NUMBERS[400:], 17, "bytes", "numbers", (), (), ""), SIZES.seq_len)


def told(ranks, cupy, meddle=None, sp=False, sizes=SIZES, **axes):
    """What each rank is told in two steps."""

    def main():
        mesh = Mesh(world(), **axes)
        model = GPT(sizes, mesh, sequence_parallel=sp, dtype=np.float64, xp=cupy)
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, with_update(one_stage(1)))
        if meddle is not None:
            meddle(model, mesh)
        with listen(StateChecker(model.parameters(), mesh)):
            for rows in TOKENS.batches(8, mesh.dp.rank, mesh.dp.size, stop_step=2):
                try:
                    executor.step(rows.part(model.positions_here))
                except StateError as error:
                    return str(error)
        return ""

    texts = set(LocalWorld(ranks).run(main))
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, {"tp": 2}),
        (2, {"dp": 2}),
        (2, {"cp": 2}),
        (4, {"tp": 2, "cp": 2, "sp": True, "sizes": replace(SIZES, tied=True)}),
    ],
)
def test_training_on_a_device_raises_no_alarm(cupy, ranks, how):
    assert told(ranks, cupy, **how) == ""


def test_a_mask_that_is_another_on_one_rank_is_found_on_a_device(cupy):
    def meddle(model, mesh):
        if mesh.tp.rank:
            model.drop.name = "other"

    assert "the value of dropout is Invariant over tp, but rank 1 holds another one" in told(2, cupy, meddle, tp=2)


def test_a_digest_is_that_of_the_host(cupy):
    host = np.arange(12.0).reshape(3, 4)
    assert digest(cupy.asarray(host).T) == digest(host.T)
