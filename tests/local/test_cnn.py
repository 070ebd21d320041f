"""A convolutional network is the same training run on every layout: checks_cnn.py on ranks that are threads."""

import gzip
import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_cnn as checks

from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.data.digits import digits
from mpitrain.data.images import ImageBatch, Images
from mpitrain.errors import DataError, MeshError, ShapeError
from mpitrain.models.cnn import CNN
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition
from mpitrain.pipeline.passes import complete
from mpitrain.spec import INVARIANT, Shard


def run(ranks, check):
    return LocalWorld(ranks).run(lambda: check(world()))


def on_one_rank(**how):
    return CNN(Mesh(World(Alone(), "none")), **how)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_number_of_ranks_is_the_same_run(ranks):
    run(ranks, checks.equals_one_rank)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check):
    run(4, check)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_schedules_of_a_pipeline(schedule):
    stages = (1, 1, 0, 1) if schedule == "interleaved" else None
    run(2, lambda ranks: checks.equals_one_rank(ranks, pp=2, micros=4, schedule=schedule, stages=stages))


# ------------------------------------------------------------------------------------------------------------ the model


def test_the_default_is_a_network_for_the_digits():
    model = on_one_rank()
    assert {p.name: p.full_shape for p in model.parameters()} == {
        "blocks.0.conv.weight": (16, 3, 3, 1),
        "blocks.0.conv.bias": (16,),
        "blocks.1.conv.weight": (32, 3, 3, 16),
        "blocks.1.conv.bias": (32,),
        "blocks.2.conv.weight": (64, 3, 3, 32),
        "blocks.2.conv.bias": (64,),
        "head.weight": (256, 10),
        "head.bias": (10,),
    }
    assert model.num_parameters == 25_866


@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-9), (np.float32, 1e-5)])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_losses_gradients_and_ten_steps_are_those_of_pytorch(batch_norm, dtype, bound):
    """Losses and gradients of each step, every weight after ten of them, and running statistics."""
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import twin_cnn

    mesh = Mesh(World(Alone(), "none"))
    model = CNN(mesh, groups=((4, 6), (8,)), dtype=dtype, seed=5, batch_norm=batch_norm)
    network = twin_cnn.network(model)
    names = [p.name for p in model.parameters()]
    peers = dict(zip(names, network.parameters(), strict=True))
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    own = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    executor = Executor(model, own, mesh, complete("1f1b", ranks=1, microbatches=1))
    draws = np.random.default_rng(0)
    for _ in range(10):
        batch = ImageBatch(draws.standard_normal((12, 8, 8, 1)).astype(dtype), draws.integers(10, size=12), 0)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(twin_cnn.images(batch.inputs)), torch.tensor(batch.targets))
        loss.backward()
        optimizer.step()
        assert executor.step(batch) == pytest.approx(loss.item(), rel=bound)
        largest = max(p.grad.abs().max().item() for p in peers.values())
        for p in model.parameters():
            peer = twin_cnn.as_ours(p.name, peers[p.name].grad.numpy(), model)
            assert p.grad.dtype == dtype
            np.testing.assert_allclose(p.grad, peer, rtol=0, atol=bound * largest, err_msg=p.name)
    for p in model.parameters():
        peer = twin_cnn.as_ours(p.name, peers[p.name].detach().numpy(), model)
        np.testing.assert_allclose(p.data, peer, rtol=0, atol=bound * max(1.0, np.abs(peer).max()), err_msg=p.name)
    norms = [layer for layer in network if isinstance(layer, torch.nn.BatchNorm2d)]
    kept = [each.numpy() for norm in norms for each in (norm.running_mean, norm.running_var)]
    for buffer, peer in zip(model.buffers(), kept, strict=True):
        np.testing.assert_allclose(buffer.array, peer, rtol=bound, atol=bound, err_msg=buffer.name)
    network.eval()
    pixels = draws.standard_normal((3, 8, 8, 1)).astype(dtype)
    peer = network(twin_cnn.images(pixels)).detach().numpy()
    np.testing.assert_allclose(model.logits(pixels).data, peer, rtol=10 * bound, atol=10 * bound)


def test_stages_one_after_the_other_are_the_whole_model():
    batch = checks.patterns().batch_at(0, 6)
    model = on_one_rank(image=(7, 6, 2), groups=checks.GROUPS, classes=4, partition=Partition((1, 0, 1, 1)))
    made = ()
    for stage in model.stages:
        expected = [(b.shape, b.dtype) for b in model.boundary(stage, batch)]
        assert [(x.shape, x.data.dtype) for x in made] == expected
        made = model.forward_stage(stage, batch, *made)
    assert float(made[0].data) == float(model(batch).data)
    assert model.boundary(3, batch)[0].states == {"dp": Shard(0), "tp": INVARIANT}
    assert model.boundary(3, batch)[0].shape == (6, 3, 3, 5)


def test_work_is_divided_over_a_pipeline_by_what_convolutions_cost():
    found = LocalWorld(2).run(lambda: CNN(Mesh(world(), pp=2), groups=((2, 2, 2, 2), (64,))).partition.layers)
    assert found == [(4, 1), (4, 1)]


def test_training_and_test_images_are_told_apart():
    """Of 16 test images as many are right as a look at the scores says; those of steps are counted in each."""
    images = checks.patterns()
    found = run(3, lambda ranks: checks.train(ranks)["told"])
    assert all(np.array_equal(each["test"], found[0]["test"]) for each in found)
    assert (found[0]["test"][1] * 16) % 1 == pytest.approx(0)
    steps = found[0]["steps"][:, 2]
    assert ((steps >= 0) & (steps <= checks.BATCH) & (steps % 1 == 0)).all()
    model = on_one_rank(image=(7, 6, 2), groups=checks.GROUPS, classes=4, seed=3, dtype=np.float64)
    first = images.batch_at(0, checks.BATCH)
    assert steps[0] == (model.logits(first.inputs).data.argmax(-1) == first.targets).sum()


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_an_axis_along_which_nothing_is_cut_is_refused(axis):
    def main():
        with pytest.raises(MeshError, match=rf"--{axis} 2: nothing of a CNN is cut along axis {axis}.*\n.*--dp"):
            CNN(Mesh(world(), **{axis: 2}))

    LocalWorld(2).run(main)


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="2 pools halve images of 3 x 8 pixels to nothing"):
        on_one_rank(image=(3, 8, 1))
    with pytest.raises(ShapeError, match=r"images \(8, 8, 3\).*made for \(8, 8, 1\)"):
        on_one_rank().logits(np.zeros((2, 8, 8, 3)))


# ------------------------------------------------------------------------------------------------------------- the data


def numbered(count=10, test=4):
    """Images whose pixels are their number."""
    numbers = np.arange(count + test)
    pixels = numbers[:, None, None, None] + np.zeros((1, 2, 2, 1))
    return Images(pixels[:count], numbers[:count], pixels[count:], numbers[count:])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_reads_every_image_once_in_an_order_that_no_layout_changes(ranks):
    images = numbered()
    for step in range(6):
        parts = [images.batch_at(step, 4, rank, ranks) for rank in range(ranks)]
        targets = np.full((len(parts[0].targets), ranks), -100)
        for rank, part in enumerate(parts):
            targets[:, rank] = part.targets
            real = part.targets >= 0
            assert (part.inputs[real, 0, 0, 0] == part.targets[real]).all()
            assert not part.inputs[~real].any()
            assert part.count == real.sum()
        whole = images.batch_at(step, 4).targets
        assert sorted(targets.ravel()[targets.ravel() >= 0]) == sorted(whole[whole >= 0])
    epoch = np.concatenate([images.batch_at(step, 4).targets for step in range(3)])
    assert sorted(epoch[epoch >= 0]) == list(range(10))
    assert images.batch_at(3, 4).epoch == 1
    other = np.concatenate([images.batch_at(step, 4).targets for step in range(3, 6)])
    assert not np.array_equal(epoch, other)


@pytest.mark.parametrize("ranks", [1, 3])
def test_test_images_are_each_read_once_with_as_many_batches_everywhere(ranks):
    parts = [list(numbered(test=5).test(2, rank, ranks)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {3}
    read = np.concatenate([batch.targets for part in parts for batch in part])
    assert sorted(read[read >= 0]) == [10, 11, 12, 13, 14]


@pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed, which brings the digits")
def test_the_digits_are_split_in_one_way_and_scaled():
    found = digits()
    assert found.images.shape == (1437, 8, 8, 1)
    assert found.test_images.shape == (360, 8, 8, 1)
    assert found.images.dtype == np.float32
    assert (found.images.min(), found.images.max()) == (-1.0, 1.0)
    assert np.bincount(found.test_labels).min() > 25
    assert np.array_equal(found.test_images, digits(seed=1).test_images)
    assert hashlib.sha256(found.test_labels.astype(np.uint8).tobytes()).hexdigest()[:12] == "f848d499475e"


def test_digits_that_are_not_installed_or_not_theirs_are_a_mistake_that_says_how_to_mend_it(monkeypatch, tmp_path):
    monkeypatch.setattr("mpitrain.data.digits.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits()
    monkeypatch.setattr(
        "mpitrain.data.digits.find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    )
    with pytest.raises(DataError, match=r"digits.csv.gz.*\n.*pip install scikit-learn"):
        digits()
    (tmp_path / "datasets" / "data").mkdir(parents=True)
    with gzip.open(tmp_path / "datasets" / "data" / "digits.csv.gz", "wt") as file:
        file.write("1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match=r"\(2, 3\) numbers, but 1797 digits of 8 x 8 pixels are wanted"):
        digits()


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        (((20, 4), 20, (5, 4), 5), r"images of shape \(20, 4\): wanted are images \(n, h, w, c\)"),
        (((20, 2, 2, 1), 20, (5, 4), 5), r"test_images of shape \(5, 4\): wanted are images \(n, h, w, c\)"),
        (((20, 2, 2, 1), 19, (5, 2, 2, 1), 5), r"20 images with labels of shape \(19,\)"),
        (((20, 2, 2, 1), 20, (5, 2, 3, 1), 5), "height, width and channels must be the same"),
        (((0, 2, 2, 1), 0, (5, 2, 2, 1), 5), "no images to learn from"),
    ],
)
def test_images_that_are_none_are_refused(shapes, why):
    with pytest.raises(ShapeError, match=why):
        Images(*(np.zeros(shape) for shape in shapes))
