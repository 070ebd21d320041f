"""A vocabulary cut over ranks that are threads: checks_vocabulary.py on 1 to 8, and what MPI need not repeat."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_vocabulary as checks

from mpitrain import checkpoint, kernels
from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.collectives import Arrow
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ShapeError
from mpitrain.optim.optimizer import StateTensor
from mpitrain.parallel.vocabulary import TakeOwnRows, VocabularyCrossEntropy, cross_entropy
from mpitrain.spec import INVARIANT, PARTIAL, Shard


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_vocabulary(check, ranks):
    LocalWorld(ranks).run(lambda: check(world()))


@pytest.mark.parametrize("check", checks.CHECKS[:5], ids=lambda check: check.__name__)
def test_the_loss_by_the_reference_kernels(check):
    kernels.select("numpy")
    LocalWorld(8).run(lambda: check(world()))


def test_sums_in_rank_order_change_nothing():
    def main():
        world().set_deterministic(True)
        for check in (checks.the_loss_and_its_gradient_are_those_of_the_whole, checks.layers_equal_the_serial_ones):
            check(world())

    LocalWorld(4).run(main)


def test_every_check_is_in_the_list():
    functions = [
        name
        for name, item in vars(checks).items()
        if getattr(item, "__module__", "") == "checks_vocabulary"
        and list(getattr(item, "__annotations__", {})) == ["world", "return"]
        and item.__annotations__["return"] == "None"
    ]
    assert sorted(functions) == sorted(check.__name__ for check in checks.CHECKS)


@pytest.mark.parametrize("how", checks.LAYOUTS, ids=str)
def test_on_one_rank_the_layers_are_the_serial_ops_to_the_last_bit(how):
    def main():
        mesh = Mesh(world())
        model = checks.made(checks.Words(mesh, 13, **how), mesh)
        table, own = model.table.weight, model.head.weight
        with Tape() as tape:
            loss = model(checks.IDS, checks.TARGETS)
        tape.run_backward([(loss, np.array(0.5))])
        grads = [p.grad.copy() for p in model.parameters()]
        model.start_step()
        with Tape() as plain:
            stream = ops.tanh(ops.take(table, checks.IDS))
            again = ops.softmax_cross_entropy(ops.linear(stream, table.T if own is None else own), checks.TARGETS)
        plain.run_backward([(again, np.array(0.5))])
        assert [node.function for node in tape.nodes] == [node.function for node in plain.nodes]
        assert loss.data.tobytes() == again.data.tobytes()
        for grad, p in zip(grads, model.parameters(), strict=True):
            assert grad.tobytes() == p.grad.tobytes()

    LocalWorld(1).run(main)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_holds_every_word_once_and_loads_on_one_rank(tmp_path, ranks, tied):
    """C34: 13 rows, whatever they were cut into; gradients stand for an optimizer's state."""

    def slabs(model, mesh):
        moment = {p.name: StateTensor(p.grad, p.full_shape, p.rectangle, p.spec) for p in model.parameters()}
        return checkpoint.slabs_of(model.parameters(), {"moment": moment}, mesh)

    def save():
        mesh = Mesh(world(), tp=ranks)
        _, model = checks.train(mesh, 13, tied=tied)
        return checkpoint.save(tmp_path, 1, slabs(model, mesh), {}, mesh.world)

    path = LocalWorld(ranks).run(save)[0]
    rows = {"weight/table.weight": 0, "moment/table.weight": 0}
    for name in checkpoint.read_manifest(path).files:
        with h5py.File(path / name, "r") as file:
            for tensor in rows:
                rows[tensor] += file[tensor].shape[0] if tensor in file else 0
    assert rows == {"weight/table.weight": 13, "moment/table.weight": 13}

    def load():
        mesh = Mesh(world())
        expected, trained = checks.train(mesh, 13, tied=tied)
        model = checks.made(checks.Words(mesh, 13, tied=tied), mesh, seed=77)
        checkpoint.load(path, slabs(model, mesh), mesh.world)
        for p, q in zip(model.parameters(), trained.parameters(), strict=True):
            assert p.data.tobytes() == q.data.tobytes()
            assert np.abs(p.grad - q.grad).max() <= 1e-12
        assert float(model(*checks.micro_batches(13)[0]).data) == expected[0]

    LocalWorld(1).run(load)


def test_a_checkpoint_of_one_rank_loads_on_ranks_without_a_word(tmp_path):
    """C34, the other way; eight ranks save what four had loaded."""

    def pass_on(ranks, source, step):
        def main():
            mesh = Mesh(world(), tp=ranks)
            model = checks.made(checks.Words(mesh, 13), mesh, seed=5 if source is None else 6)
            slabs = checkpoint.slabs_of(model.parameters(), {}, mesh)
            if source is not None:
                checkpoint.load(source, slabs, mesh.world)
            loss = float(model(checks.IDS, checks.TARGETS).data)
            return checkpoint.save(tmp_path, step, slabs, {}, mesh.world), loss

        found = LocalWorld(ranks).run(main)
        assert len({loss for _, loss in found}) == 1
        return found[0]

    path, losses = None, []
    for step, ranks in enumerate((1, 4, 8, 2, 1)):
        path, loss = pass_on(ranks, path, step)
        losses.append(loss)
    assert losses[0] == losses[-1]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-13)


def test_what_sends_inside_states_its_arrow_as_a_whole():
    arrows = {
        TakeOwnRows: (Shard(0), PARTIAL, ops.take),
        VocabularyCrossEntropy: (Shard(-1), INVARIANT, ops.softmax_cross_entropy),
    }
    for function, (start, end, like) in arrows.items():
        assert issubclass(function, Arrow)
        assert function.states(axis=None, vocab=13) == (start, end)
        assert function.arrow_text(axis=None, vocab=13) == f"{start} -> {end}"
        with Tape() as tape:
            if like is ops.take:
                like(Tensor(np.ones((2, 2)), requires_grad=True), np.array([0]))
            else:
                like(Tensor(np.ones((2, 2)), requires_grad=True), np.array([0, 1]))
        assert tape.nodes[0].function is function.like
        assert function.linear == function.like.linear


def test_the_tape_shows_where_the_vocabulary_is_cut():
    def main():
        mesh = Mesh(world(), tp=2)
        model = checks.made(checks.Words(mesh, 13, tied=True), mesh, np.float32)
        with Tape() as tape:
            model(checks.IDS, checks.TARGETS)
        return str(tape)

    text = LocalWorld(2).run(main)[1]
    for line in (
        "take_own_rows(%0, const; tp, vocab=13)  Shard(0) -> Partial  (2, 8, 6) float32  table",
        "all_reduce(%1; tp)  Partial -> Invariant",
        "transpose(%0; dims=(1, 0))  (6, 6) float32  head",
        "vocabulary_cross_entropy(%6, const; tp, vocab=13, ignore=-100)  Shard(-1) -> Invariant  () float32",
    ):
        assert line in text, text


def test_a_sequence_that_does_not_divide_is_refused():
    def main():
        mesh = Mesh(world(), tp=2)
        model = checks.made(checks.Words(mesh, 13, sequence_parallel=True), mesh)
        with pytest.raises(ShapeError, match=r"dim 1 of shape .* is not divisible by axis tp of size 2"):
            model(checks.IDS[:, :3], checks.TARGETS[:, :3])

    LocalWorld(2).run(main)


def test_what_waits_for_backward_is_this_ranks_logits_and_two_numbers_a_row():
    def main():
        axis = Mesh(world(), tp=4).tp
        logits = Tensor(np.zeros((2, 8, 25), np.float32), requires_grad=True)
        with Tape() as tape:
            cross_entropy(logits, checks.TARGETS, axis, vocab=100)
        return tape.nbytes

    assert LocalWorld(4).run(main) == [16 * (25 * 4 + 8 + 4)] * 4
