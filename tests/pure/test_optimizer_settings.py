"""From settings to optimizer and learning rates: no flag is read and forgotten."""

from types import SimpleNamespace

import pytest

from mpitrain import assemble
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import Adafactor, AdamW, Sgd

SIZES = {"layers": 1, "width": 8, "heads": 2, "seq_len": 8}


def built(**settings):
    """The mesh, the model and the optimizer of a run."""
    config = Config(**SIZES, steps=100, warmup=10, **settings)
    mesh = Mesh(World(Alone(), "none"))
    model = GPT(GPTConfig(vocab=5, **SIZES), mesh)
    return config, mesh, model, assemble.build_optimizer(config, model, mesh)


def test_each_optimizer_takes_its_own_flags():
    common = {"lr": 0.25, "weight_decay": 0.5}
    adamw = built(optimizer="adamw", beta1=0.5, beta2=0.75, eps=1e-3, **common)[-1]
    assert isinstance(adamw, AdamW)
    assert (adamw.beta1, adamw.beta2, adamw.eps, adamw.lr, adamw.weight_decay) == (0.5, 0.75, 1e-3, 0.25, 0.5)
    sgd = built(optimizer="sgd", momentum=0.5, **common)[-1]
    assert isinstance(sgd, Sgd)
    assert (sgd.momentum, sgd.lr, sgd.weight_decay) == (0.5, 0.25, 0.5)
    adafactor = built(optimizer="adafactor", eps=1e-3, **common)[-1]
    assert isinstance(adafactor, Adafactor)
    assert (adafactor.lr, adafactor.weight_decay, adafactor.eps) == (0.25, 0.5, (1e-6, 1e-3))
    with pytest.raises(ConfigError, match="--eps 1e-20"):
        Config(optimizer="adafactor", eps=1e-20)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_groups_reach_every_optimizer(name):
    _, _, model, optimizer = built(optimizer=name, lr_groups="*.bias=2,table.*=0.5")
    rates = {p.name: t.rate for p, t in zip(model.parameters(), optimizer.treatments, strict=True)}
    assert rates["table.weight"] == 0.5
    assert rates["blocks.0.mlp.up.bias"] == rates["norm.bias"] == 2.0
    assert rates["blocks.0.mlp.up.weight"] == 1.0


@pytest.mark.parametrize(
    ("schedule", "final", "expected"),
    [
        ("cosine", 0.2, {4: 0.5, 9: 1.0, 10: 1.0, 55: 0.6, 100: 0.2}),
        ("linear", 0.5, {4: 0.5, 10: 1.0, 55: 0.75, 100: 0.5}),
        ("constant", 0.0, {4: 0.5, 10: 1.0, 55: 1.0, 100: 1.0}),
        ("inverse-sqrt", 0.0, {4: 0.5, 9: 1.0, 39: 0.5, 89: 1 / 3}),
    ],
)
def test_the_schedule_is_the_one_that_was_asked_for(schedule, final, expected, monkeypatch):
    monkeypatch.setattr(assemble, "Executor", lambda *args, **how: SimpleNamespace(**how))
    config, mesh, model, optimizer = built(lr=0.4, lr_schedule=schedule, lr_final=final)
    rate = assemble.build_executor(config, model, optimizer, mesh, 100).lr
    taken = {update: rate(update) / 0.4 for update in expected}
    assert taken == pytest.approx(expected)
