"""Freezing on one rank: what is computed, kept and updated of weights that nobody trains, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
from checks_layouts import SIZES, numbers

from mpitrain.autograd import ops
from mpitrain.autograd.recompute import recompute
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT
from mpitrain.nn.freezing import is_frozen
from mpitrain.nn.layers import Embedding, LayerNorm, Linear, Relu
from mpitrain.nn.module import Module, mark_recompute
from mpitrain.nn.parameter import Widened
from mpitrain.optim.adam import AdamW
from mpitrain.optim.clip import clip
from mpitrain.optim.scaler import BlockScaler
from mpitrain.pipeline.action import parse_row, row_text
from mpitrain.pipeline.check import check, peak_in_flight
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete, without_backward

MESH = Mesh(world())


class Net(Module):
    """A table, two layers with a norm between, and the table again as the head."""

    def __init__(self) -> None:
        super().__init__("net")
        self.table = Embedding("table", 11, 6)
        self.inner = Linear("inner", 6, 6)
        self.norm = LayerNorm("norm", 6)
        self.relu = Relu()
        self.last = Linear("last", 6, 6)
        self.head = Linear("head", 6, 11, bias=False, tied=self.table.weight)

    def forward(self, ids: np.ndarray) -> Tensor:
        x = self.relu(self.norm(self.inner(self.table(ids))))
        return self.head(self.last(x))


def net(*patterns: str, dtype: Any = np.float64) -> Net:
    model = Net()
    if patterns:
        model.freeze(*patterns)
    model.materialize(MESH, seed=1, dtype=dtype)
    return model


def gpt(freeze: Sequence[str] = (), dtype: Any = np.float64, **how: Any) -> GPT:
    return GPT(SIZES, MESH, dtype=dtype, seed=3, freeze=freeze, **how)


def batch() -> Any:
    return next(iter(numbers(SIZES).batches(4, 0, 1, stop_step=1)))


# ------------------------------------------------------------------------------------------------------ against PyTorch


@pytest.mark.parametrize("patterns", [("table",), ("inner", "*.bias"), ("*", "!last"), ("norm.weight", "last.bias")])
def test_ten_steps_are_those_of_torch(patterns: tuple[str, ...]) -> None:
    """Loss, norm, gradients and weights of AdamW with decay and clipping, where torch's requires_grad is False."""
    torch = pytest.importorskip("torch")
    model = net(*patterns)
    twins = {p.name: torch.tensor(p.data.copy(), requires_grad=not p.frozen) for p in model.parameters()}
    trained = [t for t in twins.values() if t.requires_grad]
    mine = AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    decays, others = ([twins[p.name] for p in mine.parameters if p.decay == which] for which in (True, False))
    theirs = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.99)
    )
    rng = np.random.default_rng(0)
    for _ in range(10):
        ids, targets = rng.integers(0, 11, (2, 3, 4))
        model.start_step()
        with Tape() as tape:
            loss = ops.softmax_cross_entropy(model(ids), targets)
        tape.run_backward([(loss, np.ones(()))])
        norm = clip([p.grad for p in model.shares()], [p.grad for p in model.shares()], 1.0, float).norm
        x = twins["table.weight"][torch.tensor(ids)] @ twins["inner.weight"] + twins["inner.bias"]
        x = torch.relu(torch.nn.functional.layer_norm(x, (6,), twins["norm.weight"], twins["norm.bias"]))
        scores = (x @ twins["last.weight"] + twins["last.bias"]) @ twins["table.weight"].T
        theirs_loss = torch.nn.functional.cross_entropy(
            scores.reshape(-1, 11), torch.tensor(targets).reshape(-1), reduction="sum"
        )
        theirs.zero_grad()
        theirs_loss.backward()
        assert float(loss.data) == pytest.approx(theirs_loss.item(), abs=1e-9)
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(trained, 1.0).item(), rel=1e-6)
        for p in model.shares():
            np.testing.assert_allclose(p.grad, twins[p.name].grad.numpy(), atol=1e-9, rtol=1e-5)
        mine.step()
        theirs.step()
    for p in model.parameters():
        np.testing.assert_allclose(p.data, twins[p.name].detach().numpy(), atol=1e-8)
        assert (p.grad is None) == p.frozen == (not twins[p.name].requires_grad)


# ----------------------------------------------------------------------------------------- what backward does and keeps


class Heard:
    """Ops that backward walked, and those of their gradients that nobody had asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.unasked: list[str] = []

    def __call__(self, event: Any) -> None:
        if event.kind == "op" and event.phase == "end" and "grads" in event.info and event.info["grads"]:
            self.paths.append(event.info["path"])
            if event.info["function"].undivided:
                return  # one pass makes the gradients of all its inputs, of which those of a norm are vectors
            pairs = zip(event.info["grads"], event.info["wanted"], strict=True)
            self.unasked += [event.name for grad, wanted in pairs if grad is not None and not wanted]


@pytest.mark.parametrize("again", [(), ("blocks.*",), ("blocks.1.mlp",)])
def test_no_gradient_of_a_frozen_weight_is_computed(again: tuple[str, ...]) -> None:
    heard = Heard()
    model = gpt(["table", "positions", "blocks.0", "blocks.1.attention.qkv", "blocks.1.mlp.down.*", "norm.bias"])
    mark_recompute(model, again)
    with Tape() as tape:
        loss = model(batch())
    with listen(heard):
        tape.run_backward([(loss, np.ones(()))])
    assert not heard.unasked
    assert {path.split(".")[1] for path in heard.paths if path.startswith("blocks")} == {"1"}
    assert not {"table", "positions", "drop"} & set(heard.paths)
    assert all(p.touched for p in model.shares())
    assert not any(p.touched for p in model.parameters() if p.frozen)


def test_nothing_waits_for_gradients_that_nobody_wants() -> None:
    """Below the lowest trained weight nothing is kept; above it not the input of a product whose weight is frozen."""
    found = {}
    for patterns in ([], ["*", "!head"], ["*", "!positions"]):
        model = gpt(patterns)
        with Tape() as tape:
            model(batch())
        found[len(patterns), patterns[-1:] == ["!head"]] = tape.nbytes, len(tape)
    rows, width, vocab = 4 * 16, SIZES.width, SIZES.vocab
    everything, head, below = found[0, False], found[2, True], found[2, False]
    assert head == ((rows * (width + vocab) + 2 * rows) * 8, 2)  # the head's input, scores, targets, a number a row
    # Inputs of products go: of qkv, up and down in each block, and of the head; with them the ids of the table.  That
    # of proj is what attention has made, which it needs itself.
    assert everything[0] - below[0] == (2 * (1 + 1 + 4) * rows * width + rows * width + rows) * 8
    assert below[1] < everything[1]


def test_a_part_that_is_made_again_keeps_nothing_where_all_is_frozen() -> None:
    model = net("*", "!last")
    with Tape() as tape:
        x = recompute(lambda ids: model.norm(model.inner(model.table(ids))), np.arange(3))
        model.last(x)
    assert not x.requires_grad
    assert [node.function.title() for node in tape.nodes] == ["linear"]


def test_a_frozen_weight_must_not_be_written_between_forward_and_backward() -> None:
    from mpitrain.errors import GraphError

    model = net("inner")
    with Tape() as tape:
        y = model(np.arange(3))
    model.inner.weight.version += 1
    with pytest.raises(GraphError, match=r"inner\.weight was written between"):
        tape.run_backward([(y, np.ones(y.shape))])


# --------------------------------------------------------------------------------------------------- memory and masters


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_frozen_weights_have_no_gradient_and_no_master(dtype: str) -> None:
    whole, model = net(dtype=np.dtype(dtype)), net("inner", "*.bias", dtype=np.dtype(dtype))
    (flat,), (fixed,) = model.flats, model.frozen_flats
    count = sum(p.data.size for p in model.parameters() if p.frozen)
    assert (fixed.weights.size, fixed.grads.size, fixed.updated) == (count, 0, [])
    assert fixed.masters is fixed.weights
    assert flat.grads.size == flat.masters.size == model.num_parameters - count
    for p, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert p.data.tobytes() == other.data.tobytes()  # the same initial values, rounded once
        assert p.master.dtype == np.float32
    assert model.kept() == model.parameters()
    assert model.shares() == [p for p in model.parameters() if not p.frozen]
    optimizer = AdamW(model.parameters(), lr=1e-3)
    assert [*optimizer.state_dict()["first_moment"]] == [p.name for p in model.shares()]


def test_a_frozen_half_is_read_and_written_as_float32() -> None:
    p = net("inner", dtype=np.float16).inner.weight
    master = p.master
    assert isinstance(master, Widened)
    assert master.shape == (6, 6)
    assert master.ndim == 2
    assert master.size == 36
    assert (np.asarray(master) == p.data.astype(np.float32)).all()
    master[...] = np.full((6, 6), 1 / 3, np.float32)
    assert (p.data == np.float16(1 / 3)).all()
    assert (master[1:2] == np.float32(np.float16(1 / 3))).all()
    master[0] = 70000.0 * np.ones(6)
    assert np.isinf(p.data[0]).all()


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_freezing_later_keeps_the_values(dtype: str) -> None:
    model = net(dtype=np.dtype(dtype))
    for p in model.parameters():
        p.master[...] += 0.25
        p.refresh()
    before = {p.name: (p.data.copy(), np.array(p.master)) for p in model.parameters()}
    assert model.freeze("table", "*.bias", "!norm.bias") == ["table.weight", "inner.bias", "last.bias"]
    for p in model.parameters():
        data, master = before[p.name]
        assert (p.data == data).all()
        assert p.frozen or (np.asarray(p.master) == master).all()
    assert [len(flat.parameters) for flat in (*model.flats, *model.frozen_flats)] == [4, 3]
    assert model.freeze("!*") == []
    assert not model.frozen_flats
    assert all((p.data == before[p.name][0]).all() for p in model.parameters())


# --------------------------------------------------------------------------------------------------------- by what name


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["blocks.1"], {"blocks.1.mlp.up.weight"}),
        (["*.up.*"], {"blocks.1.mlp.up.weight", "blocks.10.mlp.up.weight"}),
        (["*", "!blocks.1"], {"blocks.10.mlp.up.weight", "head.weight"}),
        (["!head", "*"], {"blocks.1.mlp.up.weight", "blocks.10.mlp.up.weight", "head.weight"}),
        (["blocks.1?"], {"blocks.10.mlp.up.weight"}),
        (["head.weight"], {"head.weight"}),
        (["Head"], set()),
    ],
)
def test_the_last_pattern_that_means_a_parameter_decides(patterns: list[str], frozen: set[str]) -> None:
    names = ["blocks.1.mlp.up.weight", "blocks.10.mlp.up.weight", "head.weight"]
    assert {name for name in names if is_frozen(name, patterns)} == frozen


def test_frozen_is_told_where_a_model_is_printed() -> None:
    assert "weight (6, 6) [frozen], bias (6,)" in repr(net("inner.weight"))
    assert repr(net("inner.weight").inner.weight) == "Parameter(inner.weight (6, 6), Spec(), frozen)"


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(text: str, work: Any) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        work()
    assert len(str(caught.value).splitlines()) <= 5


def test_mistakes_are_told() -> None:
    model = net()
    refused(r"'blocks.7' means no parameter of the model", lambda: model.freeze("inner", "blocks.7"))
    assert not any(p.frozen for p in model.parameters())  # nothing of a call that is refused
    refused("all parameters of the model are frozen", lambda: model.freeze("*"))

    def by_hand() -> None:
        net().inner.weight.frozen = True

    refused(r"say model\.freeze\('inner\.weight'\)|Say model\.freeze\('inner\.weight'\)", by_hand)
    refused("a part of a model that has its weights", lambda: net().inner.freeze("inner.weight"))


def one_step(model: Module, optimizer: Any) -> Executor:
    return Executor(model, optimizer, MESH, complete("1f1b", ranks=1, microbatches=1))


def test_what_comes_too_late_or_by_half_is_refused() -> None:
    model = gpt()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model.freeze("table")
    refused("the optimizer was made before table.weight was frozen", lambda: one_step(model, optimizer))
    one_step(model, AdamW(model.parameters(), lr=1e-3))
    refused("an Executor trains the model already", lambda: model.freeze("blocks.0"))
    model = gpt()
    model.blocks[0].mlp.up.weight.requires_grad = False
    refused(r"blocks\.0\.mlp\.up\.weight\.requires_grad is False", lambda: one_step(model, AdamW(model.shares(), lr=1)))
    scales = BlockScaler([f"blocks.{n}.{part}." for n in range(2) for part in ("attention", "mlp")])
    model = gpt(["blocks.0"], np.float32, scales=scales)
    refused("have scales .BlockScaler.", lambda: one_step(model, AdamW(model.shares(), lr=1e-3)))


# -------------------------------------------------------------------------------------------------------- what a row is


def test_nothing_goes_back_into_frozen_stages() -> None:
    rows = complete("1f1b", ranks=3, microbatches=2)
    assert without_backward(rows, 0) is rows
    first, second, third = (row_text(row) for row in without_backward(rows, 2))
    assert first == "LOAD0@0 LOAD1@0 COUNT@0 F0@0 SEND_F0@0 F1@0 SEND_F1@0 REDUCE@0 STEP@0"
    assert second == ("LOAD0@1 LOAD1@1 COUNT@1 RECV_F0@1 F0@1 SEND_F0@1 RECV_F1@1 F1@1 SEND_F1@1 REDUCE@1 STEP@1")
    assert third == "LOAD0@2 LOAD1@2 COUNT@2 RECV_F0@2 F0@2 B0@2 RECV_F1@2 F1@2 B1@2 REDUCE@2 STEP@2"
    checked = check(without_backward(rows, 2), 2)
    assert checked.peaks == (0, 0, 1)
    for name, chunks in (("zb-h1", 1), ("interleaved", 2), ("gpipe", 1)):
        rows = complete(name, ranks=2, microbatches=4, chunks=chunks, offload=1)
        for stages in range(2 * chunks):
            found = without_backward(rows, stages)
            check(found, stages)
            assert without_backward(found, stages) == found
            assert all(peak_in_flight(row, trains_from=stages) >= 0 for row in found)


def test_a_row_must_go_back_exactly_as_far_as_there_is_something_to_train() -> None:
    rows = complete("1f1b", ranks=2, microbatches=1)
    with pytest.raises(ScheduleError, match=r"B0@0 at place .* goes back where all weights are frozen, before stage 1"):
        check(rows, 1)
    with pytest.raises(ScheduleError, match=r"row 0: B0@0 is missing"):
        check(without_backward(rows, 1))
    rows[0] = parse_row(row_text(rows[0]).replace("RECV_B0@0 B0@0 ", ""))
    with pytest.raises(ScheduleError, match=r"SEND_B0@1 at place .* goes back where all weights are frozen"):
        check(rows, 1)
