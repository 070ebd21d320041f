"""Ranks compute alike: one level of kernels for all, and a word where their BLAS libraries differ."""

import warnings

import pytest

from mpitrain import kernels
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ConfigError, StateError
from mpitrain.models.mlp import MLP
from mpitrain.optim import Sgd
from mpitrain.parallel import replicas
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage


def by_rank(*values):
    """A function that answers with the surrounding rank's value."""
    return lambda *_: values[world().rank]


def agree(deterministic=False):
    if deterministic:
        world().set_deterministic()
    replicas.agree_on_arithmetic(world())


def said_by(ranks, *args):
    """The warnings of all ranks: they are threads, and what is caught is caught for all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LocalWorld(ranks).run(agree, *args)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("lowest", kernels.levels())
def test_ranks_take_the_highest_level_that_all_of_them_have(lowest, monkeypatch):
    best = kernels.levels()[-1]
    monkeypatch.setattr(kernels, "wanted", by_rank(best, lowest, best))
    LocalWorld(3).run(agree)
    assert kernels.level() == lowest


def test_an_executor_makes_its_ranks_agree(monkeypatch):
    monkeypatch.setattr(kernels, "wanted", by_rank(kernels.levels()[-1], "numpy"))

    def build():
        mesh = Mesh(world())
        model = MLP((5, 7, 3), mesh)
        Executor(model, Sgd(model.parameters()), mesh, with_update(one_stage(1)))

    LocalWorld(2).run(build)
    assert kernels.level() == "numpy"


def test_a_level_that_one_rank_lacks_is_refused_on_all(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "x86-64-v9")

    def refused():
        with pytest.raises(ConfigError, match=r"MPITRAIN_KERNELS=x86-64-v9: this CPU .* numpy"):
            agree()

    LocalWorld(2).run(refused)


def test_processors_that_compute_alike_are_nobodys_business(monkeypatch):
    monkeypatch.setattr(replicas, "_processor", by_rank("Zen 4", "Zen 4", "Zen 3"))
    monkeypatch.setattr(
        replicas, "library", by_rank("openblas 0.3 Haswell", "openblas 0.3 Haswell", "openblas 0.3 Haswell")
    )
    assert said_by(3) == said_by(3, True) == []


def test_equal_processors_ask_no_blas(monkeypatch):
    monkeypatch.setattr(replicas, "library", by_rank())  # would fail
    assert said_by(2) == []


def test_a_blas_that_computes_otherwise_is_a_warning_said_once(monkeypatch):
    monkeypatch.setattr(replicas, "_processor", by_rank("a", "a", "b"))
    monkeypatch.setattr(replicas, "library", by_rank("openblas SkylakeX", "openblas SkylakeX", "openblas Haswell"))
    (said,) = said_by(3)  # once, not once a rank
    assert "BLAS of rank 2 (openblas Haswell)" in said
    assert "OPENBLAS_CORETYPE" in said


def test_in_deterministic_mode_it_is_an_error_on_every_rank(monkeypatch):
    monkeypatch.setattr(replicas, "_processor", by_rank("a", "b"))
    monkeypatch.setattr(replicas, "library", by_rank("openblas SkylakeX", "openblas Haswell"))

    def refused():
        with pytest.raises(StateError, match="BLAS of rank 1"):
            agree(deterministic=True)

    LocalWorld(2).run(refused)


def test_the_processor_is_told_apart_by_what_a_blas_looks_at(monkeypatch):
    mine = replicas._processor()
    assert mine == replicas._processor()
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert replicas._processor() != mine
