"""Groups of parameters: the first pattern that matches decides, decay stays off norms and biases, none is ignored."""

import numpy as np
import pytest

from mpitrain.config import Config, parse
from mpitrain.config_rules import lr_factors
from mpitrain.errors import ConfigError
from mpitrain.nn.init import normal
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import Adafactor, AdamW, Group, Sgd
from mpitrain.optim.groups import treatments
from mpitrain.optim.runs import join

AXES = ("pp", "edp", "ep", "cp", "tp")
NAMES = {"table.weight": True, "blocks.0.up.weight": True, "blocks.0.up.bias": False, "blocks.1.up.weight": True,
         "blocks.1.up.bias": False, "norm.bias": False}  # fmt: skip
KINDS = {"adamw": AdamW, "sgd": Sgd, "adafactor": Adafactor}


def parameters(dtype=np.float64):
    made = [Parameter(name, (4,), init=normal(0.5), decay=decay) for name, decay in NAMES.items()]
    materialize(made, dict.fromkeys(AXES, 0), dict.fromkeys(AXES, 1), 0, np.dtype(dtype))
    for p in made:
        p.grad[...], p.touched = np.linspace(1, 2, 4), True
    return made


def test_the_first_pattern_that_matches_wins():
    groups = (Group("*.bias", lr=2.0), Group("blocks.[0-3].*", lr=0.5), Group("*.up.*", lr=9.0), Group("table*", 3.0))
    found = treatments(parameters(), groups, 0.1)
    assert [t.rate for t in found] == [3.0, 0.5, 2.0, 0.5, 2.0, 2.0]
    assert [t.decay for t in found] == [0.1, 0.1, 0.0, 0.1, 0.0, 0.0]


def test_norms_and_biases_decay_only_where_a_group_says_so():
    groups = (Group("blocks.0.*", weight_decay=0.3), Group("blocks.1.*", lr=0.5), Group("table*", weight_decay=0.0))
    assert [t.decay for t in treatments(parameters(), groups, 0.1)] == [0.0, 0.3, 0.3, 0.1, 0.0, 0.0]


def test_letters_count_as_they_are_written():
    assert [t.rate for t in treatments(parameters(), (Group("Table.*", 2.0),), 0.0)] == [1.0] * len(NAMES)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_factor_is_a_factor_on_the_rate_of_the_schedule(kind):
    """With half the rate and its factor of two every optimizer makes the update of the whole rate."""
    made, wanted = parameters(), parameters()
    kind(made, groups=[Group("blocks.*", lr=2.0), Group("norm.*", lr=0.0)]).step(0.02)
    kind(wanted).step(0.04)
    still = parameters()
    for p, q, old in zip(made, wanted, still, strict=True):
        if p.name.startswith("blocks"):
            assert p.data.tobytes() == q.data.tobytes(), p.name
        elif p.name.startswith("norm"):
            assert p.data.tobytes() == old.data.tobytes()
        else:
            assert np.abs(p.data - q.data).max() > 1e-4, p.name


def test_a_run_holds_neighbours_of_one_treatment():
    made = parameters()

    def lengths(*groups):
        return [run.weights.size for run in join(made, treatments(made, groups, 0.1))]

    assert lengths() == [8, 4, 4, 8]
    assert lengths(Group("*", weight_decay=0.2)) == [24]
    assert lengths(Group("*.up.*", lr=2.0, weight_decay=0.0)) == [4, 16, 4]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([Group("tabel.*")], r"tabel.\* matches no parameter of the model.\nNames look like table.weight"),
        ([Group("table.*"), Group("Norm.bias")], "Norm.bias matches no parameter"),
        ([Group("*.weight"), Group("table.*")], r"table.\*: the patterns before it take all"),
        ([Group("table.*"), Group("table.*")], r"table.\*: the patterns before it take all"),
    ],
)
def test_a_group_without_a_parameter_is_refused(kind, groups, message):
    with pytest.raises(ConfigError, match=message):
        kind(parameters(), groups=groups)


@pytest.mark.parametrize("how", [{"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -0.1}, {"lr": float("inf")}])
def test_a_group_out_of_range_is_refused(how):
    with pytest.raises(ConfigError, match=r"Group a: .* out of range"):
        Group("a", **how)
    with pytest.raises(ConfigError, match="pattern"):
        Group("")


# --------------------------------------------------------------------------------------------------------- the settings


def test_a_flag_says_the_factors():
    assert lr_factors(parse(["--lr-groups", "table.*=0.5,*.bias=2"])) == [("table.*", 0.5), ("*.bias", 2.0)]
    assert lr_factors(Config()) == []
    assert lr_factors(Config(lr_groups=" a=1e-3 , b[xy]c=0")) == [("a", 1e-3), ("b[xy]c", 0.0)]


@pytest.mark.parametrize("word", ["table.*", "table.*=", "=2", "a=-1", "a=nan", "a=inf", "a=1,", ",", "a=1;b=2", "a=x"])
def test_a_flag_that_says_something_else_is_refused(word):
    with pytest.raises(ConfigError, match="--lr-groups"):
        parse(["--lr-groups", word])


def test_each_optimizer_has_a_rate_of_its_own_until_one_is_given(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('optimizer = "sgd"\nlr = 0.5\n')
    assert parse([]).lr == parse(["--optimizer", "sgd"]).lr == 2.5e-3
    assert parse(["--optimizer", "adafactor"]).lr == 0.05
    assert parse(["--optimizer", "adafactor", "--lr", "0.1"]).lr == 0.1
    assert parse(["--config", str(file)]).lr == 0.5
    assert parse(["--config", str(file), "--optimizer", "sgd"]).lr == 0.5
    assert parse(["--config", str(file), "--optimizer", "adafactor"]).lr == 0.05
    assert parse(["--config", str(file), "--optimizer", "adafactor", "--lr", "0.1"]).lr == 0.1
    assert parse(["--optimizer", "adamw"], {"lr": 0.25}).lr == parse(["--steps", "9"], {"lr": 0.25}).lr == 0.25


def test_a_schedule_without_an_end_has_no_final_rate():
    assert parse(["--lr-schedule", "linear", "--lr-final", "0.1"]).lr_final == 0.1
    for name in ("constant", "inverse-sqrt"):
        with pytest.raises(ConfigError, match=f"--lr-final 0.1 is for .*: {name} has no end"):
            parse(["--lr-schedule", name, "--lr-final", "0.1"])
