"""Small models train as they would in PyTorch: logits, loss, every gradient, and the weights after ten steps of AdamW.

The models in PyTorch are written from that library's own layers, so the two share nothing but the initial weights.
"""

import math

import numpy as np
import pytest

from mpitrain.autograd import Tape
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.models.llama import Llama, LlamaConfig
from mpitrain.nn.rotary import Scaling
from mpitrain.optim.adam import AdamW

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

VOCAB, LAYERS, WIDTH, HEADS, LENGTH = 19, 2, 24, 3, 11
STEPS, ROWS, LR, DECAY = 10, 4, 1e-2, 0.1
EPS = 1e-6  # with the usual 1e-8 AdamW makes steps of the rounding of gradients that are zero, a key bias's
# Relative to the largest element of a tensor, or to a part of the largest of its kind: a key bias has gradient zero.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
FLOOR = {"float64": 1e-6, "float32": 1e-2}


def batches():
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1))
        targets = np.where(rng.random((ROWS, LENGTH)) < 0.2, -100, tokens[:, 1:])
        yield Batch(tokens[:, :-1], targets, np.arange(ROWS), np.arange(LENGTH), step)


class Theirs(torch.nn.Module):
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

    def bias(self, name):
        return self.w(f"{name}.bias") if f"{name}.bias".replace(".", "/") in self.weights else None

    def linear(self, name, x):
        return F.linear(x, self.w(f"{name}.weight"), self.bias(name))

    def head(self, x):
        return F.linear(self.norm("norm", x), self.w("table.weight" if self.config.tied else "head.weight"))


class TheirGPT(Theirs):
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
        return self.head(x)


class TheirLlama(Theirs):
    """Pairs of a head's elements are complex numbers, turned by a product with those of length 1."""

    def norm(self, name, x):
        return F.rms_norm(x, (WIDTH,), self.w(f"{name}.weight"), self.config.eps)

    def turned(self, x):
        half = x.shape[-1] // 2
        speeds = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        scaling = self.config.rope_scaling
        if scaling is not None:
            speeds = torch.tensor([slower(float(speed), scaling) for speed in speeds], dtype=torch.float64)
        angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * speeds
        pairs = torch.complex(x[..., :half], x[..., half:])
        pairs = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)
        return torch.cat([pairs.real, pairs.imag], -1)

    def attention(self, name, x):
        b, s, kv_heads, d = *x.shape[:2], self.config.groups, WIDTH // HEADS
        group = HEADS // kv_heads
        if kv_heads == HEADS:
            qkv = self.linear(f"{name}.qkv", x).view(b, s, HEADS, 3, d).permute(3, 0, 2, 1, 4)
            q, k, v = qkv
        else:
            q = self.linear(f"{name}.q", x).view(b, s, HEADS, d).transpose(1, 2)
            k, v = self.linear(f"{name}.kv", x).view(b, s, kv_heads, 2, d).permute(3, 0, 2, 1, 4)
            k, v = (each.repeat_interleave(group, 1) for each in (k, v))
        place = torch.arange(s)
        seen = place[:, None] >= place
        if self.config.window is not None:
            seen &= place[:, None] - place < self.config.window
        scores = self.turned(q) @ self.turned(k).transpose(-1, -2) / math.sqrt(d)
        y = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v
        return self.linear(f"{name}.proj", y.transpose(1, 2).reshape(b, s, WIDTH))

    def forward(self, inputs):
        x = F.embedding(inputs, self.w("table.weight"))
        for i in range(LAYERS):
            name = f"blocks.{i}"
            x = x + self.attention(f"{name}.attention", self.norm(f"{name}.norm1", x))
            normed = self.norm(f"{name}.norm2", x)
            gate, up = self.linear(f"{name}.mlp.gate", normed), self.linear(f"{name}.mlp.up", normed)
            x = x + self.linear(f"{name}.mlp.down", F.silu(gate) * up)
        return self.head(x)


def slower(speed, scaling):
    """The speed of a pair as Llama 3 has it: whole turns that a sequence holds decide how much it is slowed."""
    turns = scaling.original * speed / (2 * math.pi)
    if scaling.kind == "linear":
        return speed / scaling.factor
    share = min(max((turns - scaling.low) / (scaling.high - scaling.low), 0.0), 1.0)
    return (1 - share) * speed / scaling.factor + share * speed


MATRICES = ("qkv", "q", "kv", "proj", "gate", "up", "down", "head")


def is_matrix(name):
    return name.endswith("weight") and any(f".{part}." in f".{name}" for part in MATRICES)


MODELS = {
    "gpt, tanh": (GPT, TheirGPT, GPTConfig(VOCAB, LAYERS, WIDTH, HEADS, LENGTH)),
    "gpt, erf": (GPT, TheirGPT, GPTConfig(VOCAB, LAYERS, WIDTH, HEADS, LENGTH, gelu="erf")),
    "gpt, tanh, tied": (GPT, TheirGPT, GPTConfig(VOCAB, LAYERS, WIDTH, HEADS, LENGTH, tied=True)),
    "gpt, erf, tied": (GPT, TheirGPT, GPTConfig(VOCAB, LAYERS, WIDTH, HEADS, LENGTH, tied=True, gelu="erf")),
    "llama": (Llama, TheirLlama, LlamaConfig(VOCAB, LAYERS, WIDTH, HEADS, LENGTH, hidden=40)),
    "llama, groups, tied": (
        *(Llama, TheirLlama),
        LlamaConfig(VOCAB, LAYERS, WIDTH, HEADS, LENGTH, kv_heads=1, hidden=40, tied=True, rope_theta=500.0),
    ),
    "llama, groups, window, slower": (
        *(Llama, TheirLlama),
        LlamaConfig(
            *(VOCAB, LAYERS, WIDTH, HEADS, LENGTH),
            kv_heads=1,
            window=4,
            eps=1e-4,
            rope_scaling=Scaling("llama3", 4.0, 1.0, 3.0, 12),
        ),
    ),
}


ONCE = ("gpt, erf", "gpt, tanh, tied", "gpt, erf, tied")  # in float64 they are tried by default
CASES = [
    pytest.param(name, dtype, marks=[pytest.mark.slow] if name in ONCE and dtype == "float32" else [])
    for name in MODELS
    for dtype in TOLERANCE
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_model_trains_as_in_pytorch(name, dtype):
    family, twin, config = MODELS[name]
    model = family(config, Mesh(world()), seed=1, dtype=np.dtype(dtype))
    theirs = twin(model)
    # In float32 the first steps would be the signs of gradients, of which rounding decides those that are nearly zero.
    eps = EPS if dtype == "float64" else 1e-2
    optimizer = AdamW(model.parameters(), lr=LR, eps=eps, weight_decay=DECAY)
    decayed = [p.name.replace(".", "/") for p in model.parameters() if p.decay]
    groups = [
        {"params": [theirs.weights[name] for name in decayed], "weight_decay": DECAY},
        {"params": [p for name, p in theirs.weights.items() if name not in decayed], "weight_decay": 0.0},
    ]
    their_optimizer = torch.optim.AdamW(groups, lr=LR, eps=eps)

    def assert_all_close(ours, expected):
        floor = FLOOR[dtype] * max(np.abs(value).max() for value in expected.values())
        for name, value in expected.items():
            scale = max(np.abs(value).max(), floor)
            assert ours[name].dtype == np.dtype(dtype)
            assert np.abs(ours[name] - value).max() <= TOLERANCE[dtype] * scale, name

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
        for _ in tape.backward([(loss, np.asarray(1.0 / batch.count, dtype))]):
            pass

        logits = theirs(torch.from_numpy(batch.inputs))
        their_loss = F.cross_entropy(logits.view(-1, VOCAB), torch.from_numpy(batch.targets).view(-1))
        their_optimizer.zero_grad()
        their_loss.backward()

        assert_all_close({"logits": model.logits(batch.inputs).data}, {"logits": logits.detach().numpy()})
        assert loss.item() / batch.count == pytest.approx(their_loss.item(), rel=TOLERANCE[dtype])
        compare(lambda p: p.grad, lambda w: w.grad)
        optimizer.step()
        their_optimizer.step()
    compare(lambda p: p.data, lambda w: w)
