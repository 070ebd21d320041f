"""A small GPT trains as it would in PyTorch: logits, loss, every gradient, and the weights after ten steps of AdamW.

The model in PyTorch is written from that library's own layers, so the two share nothing but the initial weights.
"""

import numpy as np
import pytest

from mpitrain.autograd import Tape
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.adam import AdamW

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

VOCAB, LAYERS, WIDTH, HEADS, LENGTH = 19, 2, 24, 3, 11
STEPS, ROWS, LR, DECAY = 10, 4, 1e-2, 0.1
EPS = 1e-6  # with the usual 1e-8 AdamW makes steps of the rounding of gradients that are zero, a key bias's
# Relative to the largest element of a tensor, or to 1e-6 of the largest of its kind: a key bias has gradient zero.
TOLERANCE, FLOOR = 1e-9, 1e-6


def batches():
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1))
        targets = np.where(rng.random((ROWS, LENGTH)) < 0.2, -100, tokens[:, 1:])
        yield Batch(tokens[:, :-1], targets, np.arange(ROWS), np.arange(LENGTH), step)


class TheirGPT(torch.nn.Module):
    """Weights by our names, each a parameter of PyTorch's orientation (out, in)."""

    def __init__(self, model):
        super().__init__()
        self.config = model.config
        self.weights = torch.nn.ParameterDict()
        for p in model.parameters():
            value = p.data.T if is_matrix(p.name) else p.data
            self.weights[p.name.replace(".", "/")] = torch.nn.Parameter(torch.tensor(np.ascontiguousarray(value)))

    def w(self, name):
        return self.weights[name.replace(".", "/")]

    def linear(self, name, x):
        return F.linear(x, self.w(f"{name}.weight"), self.w(f"{name}.bias"))

    def norm(self, name, x):
        return F.layer_norm(x, (WIDTH,), self.w(f"{name}.weight"), self.w(f"{name}.bias"), 1e-5)

    def forward(self, inputs):
        x = F.embedding(inputs, self.w("table.weight")) + self.w("positions.weight")
        for i in range(LAYERS):
            name = f"blocks.{i}"
            qkv = self.linear(f"{name}.attention.qkv", self.norm(f"{name}.norm1", x))
            q, k, v = qkv.view(*x.shape[:2], HEADS, 3, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
            x = x + self.linear(f"{name}.attention.proj", y)
            h = self.linear(f"{name}.mlp.up", self.norm(f"{name}.norm2", x))
            h = F.gelu(h, approximate="tanh" if self.config.gelu == "tanh" else "none")
            x = x + self.linear(f"{name}.mlp.down", h)
        return F.linear(self.norm("norm", x), self.w("table.weight" if self.config.tied else "head.weight"))


def is_matrix(name):
    return name.endswith("weight") and any(f".{part}." in f".{name}" for part in ("qkv", "proj", "up", "down", "head"))


def assert_all_close(ours, theirs):
    floor = FLOOR * max(np.abs(value).max() for value in theirs.values())
    for name, value in theirs.items():
        scale = max(np.abs(value).max(), floor)
        assert np.abs(ours[name] - value).max() <= TOLERANCE * scale, name


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_a_gpt_trains_as_in_pytorch(gelu, tied):
    config = GPTConfig(VOCAB, LAYERS, WIDTH, HEADS, LENGTH, tied=tied, gelu=gelu)
    model = GPT(config, Mesh(world()), seed=1, dtype=np.float64)
    theirs = TheirGPT(model)
    optimizer = AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=DECAY)
    decayed = [p.name.replace(".", "/") for p in model.parameters() if p.decay]
    groups = [
        {"params": [theirs.weights[name] for name in decayed], "weight_decay": DECAY},
        {"params": [p for name, p in theirs.weights.items() if name not in decayed], "weight_decay": 0.0},
    ]
    their_optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPS)

    def compare(ours, attribute):
        expected = {
            p.name: (array.T if is_matrix(p.name) else array)
            for p in model.parameters()
            for array in [attribute(theirs.w(p.name)).detach().numpy()]
        }
        assert_all_close({p.name: ours(p) for p in model.parameters()}, expected)

    for batch in batches():
        model.start_step()
        with Tape() as tape:
            loss = model(batch)
        for _ in tape.backward([(loss, np.asarray(1.0 / batch.count))]):
            pass

        logits = theirs(torch.from_numpy(batch.inputs))
        their_loss = F.cross_entropy(logits.view(-1, VOCAB), torch.from_numpy(batch.targets).view(-1))
        their_optimizer.zero_grad()
        their_loss.backward()

        assert_all_close({"logits": model.logits(batch.inputs).data}, {"logits": logits.detach().numpy()})
        assert loss.item() / batch.count == pytest.approx(their_loss.item(), rel=TOLERANCE)
        compare(lambda p: p.grad, lambda w: w.grad)
        optimizer.step()
        their_optimizer.step()
    compare(lambda p: p.data, lambda w: w)
