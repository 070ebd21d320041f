"""Batch norm: the whole batch on any ranks, running statistics that are kept, and what is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_batch_norm as checks
import checks_cnn

from mpitrain import checkpoint
from mpitrain.autograd import Tape, Tensor
from mpitrain.autograd.gradcheck import check
from mpitrain.autograd.ops import IGNORE
from mpitrain.autograd.recompute import recompute
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.data.images import ImageBatch
from mpitrain.debug.capture import recording
from mpitrain.errors import ConfigError, ReplicaError, ShapeError
from mpitrain.models.cnn import CNN
from mpitrain.optim import AdamW
from mpitrain.parallel.batch_norm import BatchNorm
from mpitrain.parallel.replicas import ReplicaCheck
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

NORMS = {"batch_norm": True}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("one", checks.CHECKS, ids=lambda one: one.__name__)
def test_on_ranks_that_are_threads(one, ranks):
    LocalWorld(ranks).run(lambda: one(world()))


def alone():
    return World(Alone(), "none")


@pytest.mark.parametrize("rows", [None, checks.COUNTS])
def test_gradients_are_right(rows):
    norm = checks.layer(alone())
    check(lambda x, w, b: _with(norm, w, b)(x, rows), checks.X, checks.WEIGHT, checks.BIAS)


def _with(norm, weight, bias):
    norm.weight, norm.bias = weight, bias
    return norm


@pytest.mark.parametrize(("dtype", "atol"), [(np.float64, 1e-11), (np.float32, 1e-5)])
def test_it_is_pytorchs(dtype, atol):
    """Ten passes of training with their running statistics, then evaluation by them."""
    torch = pytest.importorskip("torch")
    norm = checks.layer(alone(), dtype, eps=1e-3, momentum=0.3)
    peer = torch.nn.BatchNorm2d(checks.CHANNELS, eps=1e-3, momentum=0.3, dtype=torch.tensor(np.zeros(0, dtype)).dtype)
    peer.weight.data, peer.bias.data = torch.tensor(norm.weight.data), torch.tensor(norm.bias.data)
    draws = np.random.default_rng(0)
    for number in range(10):
        images, grad = draws.standard_normal((2, 5, 4, 3, checks.CHANNELS)).astype(dtype)
        images = images * dtype(number + 1) + dtype(number)
        x, t = Tensor(images, requires_grad=True), torch.tensor(images.transpose(0, 3, 1, 2), requires_grad=True)
        norm.start_step()
        peer.zero_grad()
        with Tape() as tape:
            y = norm(x)
        tape.run_backward([(y, grad)])
        z = peer(t)
        z.backward(torch.tensor(grad.transpose(0, 3, 1, 2)))
        for mine, theirs in (
            (y.data, z.detach().numpy().transpose(0, 2, 3, 1)),
            (tape.grads[x], t.grad.numpy().transpose(0, 2, 3, 1)),
            (norm.weight.grad, peer.weight.grad.numpy()),
            (norm.bias.grad, peer.bias.grad.numpy()),
            (norm.mean.array, peer.running_mean.numpy()),
            (norm.variance.array, peer.running_var.numpy()),
        ):
            assert mine.dtype == theirs.dtype
            np.testing.assert_allclose(mine, theirs, rtol=atol, atol=atol * max(1.0, np.abs(theirs).max()))
    peer.eval()
    y = norm(Tensor(images), training=False).data
    np.testing.assert_allclose(y.transpose(0, 3, 1, 2), peer(t).detach().numpy(), rtol=atol, atol=atol)


def test_a_large_mean_costs_no_digits_of_the_variance():
    """Sums of squares would lose all of them in single precision."""

    def main():
        axis = world()
        norm = checks.layer(axis, np.float32)
        norm(Tensor((checks.X + 4096.0).astype(np.float32)[axis.rank :: axis.size]))
        return norm.variance.array

    exact = checks.by_hand(checks.X, np.ones(checks.ROWS, bool), checks.GRAD)["variance"]
    for found in LocalWorld(4).run(main):
        np.testing.assert_allclose(found, exact, rtol=2e-3)


def test_halves_are_measured_in_single_precision():
    norm = checks.layer(alone(), np.float16)
    x = np.full((2, 64, 64, 3), 20.0, np.float16)  # of these the sum and the squares are beyond halves
    x[::2] += np.float16(100.0)
    y = norm(Tensor(x))
    assert (y.dtype, norm.mean.array.dtype) == (np.float16, np.float32)
    np.testing.assert_allclose(norm.mean.array, 7.0)
    np.testing.assert_allclose(norm.variance.array, 0.9 + 0.1 * 2500.0 * 8192 / 8191)
    signs = np.where(np.arange(2) % 2 == 0, 1.0, -1.0)[:, None, None, None]
    assert np.abs(y.data - (signs * checks.WEIGHT + checks.BIAS)).max() < 2e-3


@pytest.mark.parametrize(
    "x",
    [np.ones((1, 1, 1, 3)), np.zeros((0, 2, 2, 3)), np.full((2, 2, 2, 3), np.inf)],
    ids=["one number a channel", "none", "infinity"],
)
def test_what_has_no_variance_leaves_the_running_statistics_alone(x):
    norm = checks.layer(alone())
    with Tape() as tape, np.errstate(invalid="ignore"):
        x = Tensor(x, requires_grad=True)
        y = norm(x)
        tape.run_backward([(y, np.ones(y.shape))])
    assert norm.mean.array.tolist() == [0.0] * 3
    assert norm.variance.array.tolist() == [1.0] * 3
    if np.isfinite(x.data).all():
        np.testing.assert_array_equal(y.data, np.broadcast_to(checks.BIAS, y.shape))
        assert np.isfinite(tape.grads[x]).all()


def test_a_second_forward_does_not_count():
    norm = checks.layer(alone())
    x = Tensor(checks.X, requires_grad=True)
    with Tape() as tape:
        y = recompute(norm, x)
    once = norm.mean.array.copy()
    tape.run_backward([(y, checks.GRAD)])
    np.testing.assert_array_equal(norm.mean.array, once)
    np.testing.assert_allclose(
        tape.grads[x], checks.by_hand(checks.X, np.ones(10, bool), checks.GRAD)["dx"], atol=1e-12
    )


def test_a_forward_pass_writes_into_no_array_that_a_tape_may_have_saved():
    norm = checks.layer(alone())
    kept = norm.mean.array
    norm(Tensor(checks.X))
    assert kept.tolist() == [0.0] * 3


def test_messages_are_one_of_two_numbers_a_channel_each_way_and_none_in_evaluation():
    """2 c + 1 doubles to each rank forward, an all-reduce of 2 c numbers backward."""

    def main():
        axis = world()
        norm, x = checks.layer(axis), Tensor(checks.X[axis.rank :: axis.size], requires_grad=True)
        axis.all_reduce(np.zeros(1))  # what is set up at the first message
        before = axis.sent_bytes
        with Tape() as tape:
            y = norm(x)
        forward = axis.sent_bytes
        tape.run_backward([(y, y.data)])
        after = axis.sent_bytes
        norm(x, training=False)
        assert axis.sent_bytes == after
        return before, forward, after

    for before, forward, after in LocalWorld(2).run(main):
        assert forward["all_gather"] - before.get("all_gather", 0) == 8 * (2 * 3 + 1)
        assert after["all_reduce"] - forward["all_reduce"] == 8 * 2 * 3


# ----------------------------------------------------------------------------------------------------------- in a model


def test_another_number_of_micro_batches_is_refused_and_may_be_asked_for():
    """On all ranks alike, also on stages without a norm, and only where there are several."""

    def main(micros, **norms):
        return checks_cnn.train(world(), micros=micros, norms=norms, pp=2, stages=(3, 0))["told"]["steps"]

    def refused():
        words = r"blocks\.0\.norm \(BatchNorm\).*goes through in 3 parts.*\n.*per_microbatch=True"
        with pytest.raises(ConfigError, match=words) as error:
            main(3, batch_norm=True)
        return str(error.value)

    assert len(set(LocalWorld(2).run(refused))) == 1
    alone = checks_cnn.alone(batch_norm=True)["told"]["steps"]
    one, three = (LocalWorld(2).run(lambda m=m: main(m, batch_norm=True, per_microbatch=True))[0] for m in (1, 3))
    np.testing.assert_allclose(one[:, :2], alone[:, :2], rtol=1e-10)
    assert np.abs(three[:, 0] - alone[:, 0]).max() > 1e-3


def test_ranks_with_other_norms_are_found():
    def main():
        with pytest.raises(ConfigError, match="another model than rank 0: batch_norm is False, not True"):
            checks_cnn.train(world(), norms={"batch_norm": world().rank == 0})

    LocalWorld(2).run(main)


class Training:
    """The network of the checks, from a seed of its own, on a layout of the surrounding ranks."""

    def __init__(self, seed, **axes):
        self.mesh = Mesh(world(), **axes)
        self.model = CNN(
            self.mesh, (7, 6, 2), checks_cnn.GROUPS, checks_cnn.CLASSES, seed=seed, dtype=np.float64, **NORMS
        )
        self.optimizer = AdamW(self.model.shares(), lr=3e-3)
        rows = complete("1f1b", ranks=self.mesh.pp.size, microbatches=1)
        self.executor = Executor(self.model, self.optimizer, self.mesh, rows)

    def slabs(self):
        states = self.optimizer.state_tensors()
        return checkpoint.slabs_of(self.model.shares(), states, self.mesh, buffers=self.model.buffers())

    def run(self, start, stop):
        images, dp = checks_cnn.patterns(), self.mesh.dp
        return [self.executor.step(batch) for batch in images.batches(12, dp.rank, dp.size, start, stop)]

    def load(self, path):
        self.optimizer.updates = checkpoint.load(path, self.slabs(), world())["updates"]


def test_running_statistics_are_saved_and_go_on_on_another_layout(tmp_path):
    def first():
        training = Training(3)
        training.run(0, 3)
        scalars = {"updates": training.optimizer.updates}
        path = checkpoint.save(str(tmp_path), 3, training.slabs(), scalars, world())
        return path, training.run(3, 6), {b.name: b.array for b in training.model.buffers()}

    def second(**axes):
        training = Training(8, **axes)
        training.load(path)
        losses = training.run(3, 6)
        evaluated = training.executor.evaluate(
            checks_cnn.patterns().test(5, training.mesh.dp.rank, training.mesh.dp.size)
        )
        return losses, {b.name: b.array for b in training.model.buffers()}, evaluated

    path, losses, kept = LocalWorld(4).run(first)[0]
    names = {f"buffer/blocks.{i}.norm.{what}" for i in range(3) for what in ("mean", "variance")}
    assert names == {name for name in checkpoint.read_manifest(path).tensors if name.startswith("buffer/")}
    told = []
    for ranks, axes in ((4, {}), (1, {}), (2, {"pp": 2})):
        found = LocalWorld(ranks).run(lambda axes=axes: second(**axes))
        np.testing.assert_allclose(found[0][0], losses, rtol=1e-11)
        here = {name: array for _, arrays, _ in found for name, array in arrays.items()}
        assert here.keys() == kept.keys()
        for name, array in here.items():
            np.testing.assert_allclose(array, kept[name], rtol=1e-10, atol=1e-12)
        told.append(found[0][2])
    np.testing.assert_allclose(told, told[0], rtol=1e-10)


def test_replicas_that_keep_other_statistics_are_found():
    def main():
        training = Training(3)
        check = ReplicaCheck(training.model, training.optimizer, training.executor.reducer, training.mesh, 1)
        training.run(0, 1)
        assert check(1)
        if world().rank == 1:
            (buffer, *_) = training.model.buffers()
            buffer.array = np.nextafter(buffer.array, 1.0)
        with pytest.raises(ReplicaError, match=r"blocks\.0\.norm\.mean"):
            check(2)

    LocalWorld(2).run(main)


def test_rows_of_padding_change_nothing():
    """The last batch of an epoch has some; five ranks have some in every batch, which one rank has not."""
    images = checks_cnn.patterns()
    whole = images.batch_at(3, 12)
    real = whole.targets != IGNORE
    assert 0 < real.sum() < 12
    found = []
    for batch in (whole, ImageBatch(whole.inputs[real], whole.targets[real], 3)):
        model = CNN(Mesh(alone()), (7, 6, 2), checks_cnn.GROUPS, checks_cnn.CLASSES, dtype=np.float64, **NORMS)
        found.append([float(model(batch).data), *(buffer.array for buffer in model.buffers())])
    for padded, plain in zip(*found, strict=True):
        np.testing.assert_allclose(padded, plain, rtol=1e-12)
    LocalWorld(5).run(lambda: checks_cnn.equals_one_rank(world(), norms=NORMS))


def test_a_proof_of_layouts_looks_at_running_statistics():
    records = []

    def main():
        with recording(world(), records.append):
            training = Training(3)
            training.run(0, 2)
        return {b.name: b.array for b in training.model.buffers()}

    [kept] = LocalWorld(1).run(main)
    begin, *steps = records
    assert [place[0] for place in begin.facts["states"]["buffer"]] == list(kept)
    np.testing.assert_array_equal(steps[-1].arrays["buffer"], np.concatenate([each.ravel() for each in kept.values()]))
    assert not np.array_equal(steps[0].arrays["buffer"], steps[1].arrays["buffer"])


def test_evaluation_takes_running_statistics_and_padding_takes_no_part():
    training = checks_cnn.train(alone(), norms=NORMS)
    images = checks_cnn.patterns()
    model = CNN(Mesh(alone()), (7, 6, 2), checks_cnn.GROUPS, checks_cnn.CLASSES, seed=3, dtype=np.float64, **NORMS)
    for p in model.parameters():
        p.data[...] = training["weights"][p.name]
    for buffer in model.buffers():
        buffer.array = training["kept"][buffer.name]
    scores = model.logits(images.test_images).data
    np.testing.assert_allclose(scores[3:5], model.logits(images.test_images[3:5]).data, rtol=1e-12)
    right = (scores.argmax(-1) == images.test_labels).mean()
    assert training["told"]["test"][1] == pytest.approx(right)
    assert all((b.array == training["kept"][b.name]).all() for b in model.buffers())


@pytest.mark.parametrize(
    ("x", "rows", "why"),
    [
        (np.ones((2, 4)), None, r"n: x \(2, 4\) is not \(b, ..., 3\)"),
        (np.ones(3), None, r"n: x \(3,\) is not"),
        (np.ones((2, 3), int), None, "n: x is int64"),
        (np.ones((2, 3)), np.ones(3, bool), r"n: rows \(3,\) for x \(2, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(x, rows, why, monkeypatch):
    norm = BatchNorm("n", 3, alone())
    monkeypatch.setattr(norm.axis, "all_gather", None)
    with pytest.raises(ShapeError, match=why):
        norm(Tensor(x), rows)


def test_layers_that_cannot_be_are_refused():
    for how in ({"momentum": 0.0}, {"momentum": 1.5}, {"eps": 0.0}):
        with pytest.raises(ConfigError, match=r"n: momentum .*, eps .*; momentum is in \(0, 1\]"):
            BatchNorm("n", 3, alone(), **how)
