"""Every layer with inputs, and the same layer in PyTorch: what each test that is about all of them goes through.

`LAYERS` has a case for each class of modules that is no container and no whole model; a test counts.  On one rank the
layers of `mpitrain.parallel` are the serial ones.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mpitrain.models
import mpitrain.nn
import mpitrain.parallel
from mpitrain.autograd import Tensor, ops
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models import cnn, gpt, llama, mlp, transformer
from mpitrain.nn import conv, layers
from mpitrain.nn.containers import ModuleList, Sequential
from mpitrain.nn.module import Module
from mpitrain.nn.norm import RMSNorm
from mpitrain.nn.rotary import tables
from mpitrain.parallel import grouped, tensor, vocabulary
from mpitrain.parallel.batch_norm import BatchNorm
from mpitrain.parallel.expert.experts import Experts
from mpitrain.parallel.expert.moe import OF_EVALUATION, Moe
from mpitrain.parallel.expert.router import Router
from mpitrain.rng import Draw, keep_mask
from mpitrain.routing import Routing

RNG = np.random.default_rng(41)
B, S, H, V = 2, 5, 12, 9
DRAW = Draw(7, 3, np.arange(B), np.arange(S))
IDS = np.array([[3, 0, 3, 8, 1], [2, 2, 7, 0, 5]])
WHOLE = (ModuleList, mpitrain.models.decoder.Decoder, gpt.GPT, llama.Llama, mlp.MLP, cnn.CNN)
"""A list, which is not called, and models, which have tests of their own: ten steps of training as in PyTorch."""


@dataclass
class Layer:
    """One layer.

    build: makes it, on a mesh of one rank;  arrays: its inputs, float64 ones as Tensors;  torch(t, p, *inputs): the
    same in PyTorch, with its parameters by the part of their names behind the layer's, and in our orientation;  call:
    how it is called, where not just with its inputs;  holds: classes that are tried within it.
    """

    build: Callable[[Mesh], Module]
    arrays: tuple[np.ndarray, ...]
    torch: Callable[..., Any]
    call: Callable[..., Any] | None = None
    holds: tuple[type[Module], ...] = field(default=())

    def made(self, dtype: Any = np.float64) -> Module:
        """The layer with random values everywhere: biases and norms that start as nothing would hide mistakes."""
        mesh = Mesh(world())
        layer = self.build(mesh)
        layer.materialize(mesh, seed=3, dtype=dtype)
        rng = np.random.default_rng(5)
        for p in layer.parameters():
            p.data += (0.3 * rng.standard_normal(p.data.shape)).astype(p.data.dtype)
        return layer

    def run(self, layer: Module, *inputs: Any) -> Any:
        return layer(*inputs) if self.call is None else self.call(layer, *inputs)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def kept(name: str, p: float) -> np.ndarray:
    """By what a dropout multiplies (b, s, h)."""
    return keep_mask(DRAW.rows(name), H, p) / (1 - p)


def linear(t: Any, p: dict[str, Any], x: Any, name: str = "") -> Any:
    return t.nn.functional.linear(x, p[f"{name}weight"].T, p.get(f"{name}bias"))


def norm(t: Any, p: dict[str, Any], x: Any, name: str = "") -> Any:
    if f"{name}bias" in p:
        return t.nn.functional.layer_norm(x, x.shape[-1:], p[f"{name}weight"], p[f"{name}bias"], 1e-5)
    return t.nn.functional.rms_norm(x, x.shape[-1:], p[f"{name}weight"], 1e-5)


def images(t: Any, pool: Callable[..., Any], x: Any, *args: Any, **how: Any) -> Any:
    """What works on channels first, on channels last."""
    return pool(x.permute(0, 3, 1, 2), *args, **how).permute(0, 2, 3, 1)


def convolution(t: Any, p: dict[str, Any], x: Any, name: str = "", **how: Any) -> Any:
    return images(t, t.nn.functional.conv2d, x, p[f"{name}weight"].permute(0, 3, 1, 2), p.get(f"{name}bias"), **how)


def heads_of(t: Any, packed: Any, heads: int, kv_heads: int) -> tuple[Any, Any, Any]:
    """Queries, keys and values (b, heads, s, d) of what is packed by groups."""
    b, s, width = packed.shape
    group, d = heads // kv_heads, width // (heads + 2 * kv_heads)
    parts = packed.reshape(b, s, kv_heads, group + 2, d).permute(0, 2, 3, 1, 4)
    q = parts[:, :, :group].reshape(b, heads, s, d)
    return q, *(parts[:, :, i].repeat_interleave(group, 1) for i in (group, group + 1))


def grouped_columns(t: Any, p: dict[str, Any], x: Any, heads: int, kv_heads: int, name: str = "") -> Any:
    """Both projections, packed as attention takes them."""
    b, s, width = x.shape
    d = width // heads
    q = linear(t, p, x, f"{name}q.").reshape(b, s, kv_heads, heads // kv_heads, d)
    kv = linear(t, p, x, f"{name}kv.").reshape(b, s, kv_heads, 2, d)
    return t.cat([q, kv], 3).reshape(b, s, -1)


COS, SIN = tables(np.arange(S), [1.0, 0.3], np.float64)
"""The angles of heads of four elements."""


def turned(t: Any, x: Any) -> Any:
    """Queries or keys (b, heads, s, 4) turned by their positions."""
    cos, sin = t.from_numpy(COS).to(x.dtype), t.from_numpy(SIN).to(x.dtype)
    one, other = x[..., :2], x[..., 2:]
    return t.cat([one * cos - other * sin, other * cos + one * sin], -1)


def attention(t: Any, p: dict[str, Any], x: Any, kv_heads: int, rotary: bool, name: str = "") -> Any:
    """Causal attention of three heads."""
    if kv_heads == 3:
        packed = linear(t, p, x, f"{name}qkv.")
    else:
        packed = grouped_columns(t, p, x, 3, kv_heads, name)
    q, k, v = heads_of(t, packed, 3, kv_heads)
    if rotary:
        q, k = turned(t, q), turned(t, k)
    y = t.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(t, p, y.transpose(1, 2).reshape(x.shape), f"{name}proj.")


def gelu_mlp(t: Any, p: dict[str, Any], x: Any, name: str = "") -> Any:
    h = t.nn.functional.gelu(linear(t, p, x, f"{name}up."), approximate="tanh")
    return linear(t, p, h, f"{name}down.")


def gated_mlp(t: Any, p: dict[str, Any], x: Any, name: str = "") -> Any:
    return (t.nn.functional.silu(x @ p[f"{name}gate.weight"]) * (x @ p[f"{name}up.weight"])) @ p[f"{name}down.weight"]


def gpt_block(t: Any, p: dict[str, Any], x: Any) -> Any:
    x = x + attention(t, p, norm(t, p, x, "norm1."), 3, False, "attention.")
    return x + gelu_mlp(t, p, norm(t, p, x, "norm2."), "mlp.")


def llama_block(t: Any, p: dict[str, Any], x: Any) -> Any:
    x = x + attention(t, p, norm(t, p, x, "norm1."), 1, True, "attention.")
    return x + gated_mlp(t, p, norm(t, p, x, "norm2."), "mlp.")


def moe(t: Any, p: dict[str, Any], x: Any) -> Any:
    """Each token through its two best experts, whose shares sum to 1."""
    probabilities = t.softmax(x @ p["router.weight"], -1)
    best, ids = probabilities.topk(2, -1)
    gates = best / best.sum(-1, keepdim=True)
    every = t.stack(
        [
            t.nn.functional.gelu(x @ up, approximate="tanh") @ down
            for up, down in zip(p["experts.up"], p["experts.down"], strict=True)
        ],
        -2,
    )
    chosen = t.gather(every, 2, ids.unsqueeze(-1).expand(*ids.shape, x.shape[-1]))
    return (chosen * gates.unsqueeze(-1)).sum(-2)


def with_last_bias(layer: Module, x: Tensor, *rest: Any) -> Tensor:
    """What the block does with the end of a branch."""
    last: Any = layer.proj if hasattr(layer, "proj") else layer.down  # type: ignore[attr-defined]
    return layer(x, *rest) + last.bias


def cuts(mesh: Mesh) -> transformer.Cuts:
    return transformer.Cuts(mesh, False, "ring")


GPT = gpt.GPTConfig(V, 2, H, 3, S)
LLAMA = llama.LlamaConfig(V, 2, H, 3, S, kv_heads=1, hidden=16)
THIS = transformer.Pass()
TURNED = transformer.Pass(turns=(COS, SIN))
IMAGES = normal(2, 6, 5, 4)
X = normal(B, S, H)


def batch_norm(t: Any, p: dict[str, Any], x: Any) -> Any:
    how = {"weight": p["weight"], "bias": p["bias"], "training": True}
    return images(t, t.nn.functional.batch_norm, x, None, None, **how)


LAYERS: dict[str, Layer] = {
    "Linear": Layer(lambda _: layers.Linear("l", H, 7), (X,), linear),
    "Linear without bias": Layer(lambda _: layers.Linear("l", H, 7, bias=False), (X,), linear),
    "Embedding": Layer(
        lambda _: layers.Embedding("l", V, 4), (IDS,), lambda t, p, ids: t.nn.functional.embedding(ids, p["weight"])
    ),
    "LayerNorm": Layer(lambda _: layers.LayerNorm("l", H), (X,), norm),
    "RMSNorm": Layer(lambda _: RMSNorm("l", H), (X,), norm),
    "RMSNorm of a sum": Layer(
        lambda _: RMSNorm("l", H),
        (X, normal(B, S, H)),
        lambda t, p, x, y: (x + y, norm(t, p, x + y)),
        call=lambda layer, x, y: layer.of_sum(x, y, None),
    ),
    "Dropout": Layer(
        lambda _: layers.Dropout("l", 0.4),
        (X,),
        lambda t, p, x: x * t.from_numpy(kept("l", 0.4)).to(x.dtype),
        call=lambda layer, x: layer(x, DRAW),
    ),
    "Residual": Layer(
        lambda _: layers.Residual("l", 0.4),
        (X, normal(B, S, H), normal(H)),
        lambda t, p, x, y, bias: x + (y + bias) * t.from_numpy(kept("l", 0.4)).to(x.dtype),
        call=lambda layer, x, y, bias: layer(x, y, bias, DRAW),
    ),
    "Gelu tanh": Layer(lambda _: layers.Gelu(), (X,), lambda t, p, x: t.nn.functional.gelu(x, approximate="tanh")),
    "Gelu erf": Layer(lambda _: layers.Gelu("erf"), (X,), lambda t, p, x: t.nn.functional.gelu(x)),
    "SiLU": Layer(lambda _: layers.SiLU(), (X,), lambda t, p, x: t.nn.functional.silu(x)),
    "SwiGLU": Layer(
        lambda _: layers.SwiGLU(), (X, normal(B, S, H)), lambda t, p, gate, up: t.nn.functional.silu(gate) * up
    ),
    "Relu": Layer(lambda _: layers.Relu(), (X,), lambda t, p, x: t.relu(x)),
    "Sequential": Layer(
        lambda _: Sequential("l", layers.Linear("l.0", H, 7), ops.tanh, layers.Linear("l.1", 7, 3)),
        (X,),
        lambda t, p, x: linear(t, p, t.tanh(linear(t, p, x, "0.")), "1."),
    ),
    "Conv2d": Layer(
        lambda _: conv.Conv2d("l", 4, 6, kernel=3, padding=1),
        (IMAGES,),
        lambda t, p, x: convolution(t, p, x, padding=1),
    ),
    "Conv2d in groups, with holes": Layer(
        lambda _: conv.Conv2d("l", 4, 6, kernel=(3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2),
        (IMAGES,),
        lambda t, p, x: convolution(t, p, x, stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2),
    ),
    "Conv2d by channel": Layer(
        lambda _: conv.Conv2d("l", 4, 4, kernel=3, groups=4, bias=False),
        (IMAGES,),
        lambda t, p, x: convolution(t, p, x, groups=4),
    ),
    "MaxPool2d": Layer(
        lambda _: conv.MaxPool2d(3, 2, 1), (IMAGES,), lambda t, p, x: images(t, t.nn.functional.max_pool2d, x, 3, 2, 1)
    ),
    "AvgPool2d": Layer(
        lambda _: conv.AvgPool2d(3, 2, 1), (IMAGES,), lambda t, p, x: images(t, t.nn.functional.avg_pool2d, x, 3, 2, 1)
    ),
    "AvgPool2d of pixels": Layer(
        lambda _: conv.AvgPool2d(3, 2, 1, count_padding=False),
        (IMAGES,),
        lambda t, p, x: images(t, t.nn.functional.avg_pool2d, x, 3, 2, 1, count_include_pad=False),
    ),
    "Flatten": Layer(lambda _: conv.Flatten(), (IMAGES,), lambda t, p, x: x.flatten(1)),
    "BatchNorm": Layer(lambda mesh: BatchNorm("l", 4, mesh.merged(("edp", "ep", "cp"))), (IMAGES,), batch_norm),
    "BatchNorm in evaluation": Layer(
        lambda mesh: BatchNorm("l", 4, mesh.merged(("edp", "ep", "cp"))),
        (IMAGES,),
        lambda t, p, x: x / math.sqrt(1 + 1e-5) * p["weight"] + p["bias"],
        call=lambda layer, x: layer(x, training=False),
    ),
    "ColumnLinear": Layer(lambda mesh: tensor.ColumnLinear("l", H, 7, mesh.tp), (X,), linear),
    "RowLinear": Layer(lambda mesh: tensor.RowLinear("l", H, 7, mesh.tp), (X,), linear),
    "GroupedColumns": Layer(
        lambda mesh: grouped.GroupedColumns("l", H, 6, 2, mesh.tp),
        (X,),
        lambda t, p, x: grouped_columns(t, p, x, 6, 2),
    ),
    "VocabularyEmbedding": Layer(
        lambda mesh: vocabulary.VocabularyEmbedding("l", V, 4, mesh.tp),
        (IDS,),
        lambda t, p, ids: t.nn.functional.embedding(ids, p["weight"]),
    ),
    "VocabularyHead": Layer(lambda mesh: vocabulary.VocabularyHead("l", H, V, mesh.tp), (X,), linear),
    "Router": Layer(lambda _: Router("l", H, Routing(4, 2)), (X,), linear),
    "Moe": Layer(
        lambda mesh: Moe("l", Routing(4, 2, "topk", renormalize=True), H, 8, mesh),
        (X,),
        moe,
        call=lambda layer, x: layer(x, OF_EVALUATION)[0],
        holds=(Experts,),
    ),
    "Positions": Layer(
        lambda mesh: GPT.positions("l", mesh.tp, 0.02, False),
        (normal(B, 3, H),),
        lambda t, p, x: x + p["weight"][:3],
        call=lambda layer, x: layer(x, 3, slice(0, 3), None),
    ),
    "Mlp": Layer(lambda mesh: gpt.Mlp("l", GPT, cuts(mesh)), (X,), gelu_mlp, call=with_last_bias),
    "GatedMlp": Layer(lambda mesh: llama.GatedMlp("l", LLAMA, cuts(mesh)), (X,), gated_mlp),
    "Attention": Layer(
        lambda mesh: transformer.Attention("l", GPT, cuts(mesh)),
        (X,),
        lambda t, p, x: attention(t, p, x, 3, False),
        call=lambda layer, x: with_last_bias(layer, x, THIS),
    ),
    "Attention, turned and grouped": Layer(
        lambda mesh: transformer.Attention("l", LLAMA, cuts(mesh)),
        (X,),
        lambda t, p, x: attention(t, p, x, 1, True),
        call=lambda layer, x: layer(x, TURNED),
    ),
    "Block of GPT": Layer(
        lambda mesh: transformer.Block(0, GPT, cuts(mesh)), (X,), gpt_block, call=lambda layer, x: layer(x, THIS)
    ),
    "Block of Llama": Layer(
        lambda mesh: transformer.Block(0, LLAMA, cuts(mesh)), (X,), llama_block, call=lambda layer, x: layer(x, TURNED)
    ),
    "Block of MLP": Layer(lambda mesh: mlp.Block("l", H, 8, mesh.tp), (X,), gelu_mlp),
    "Block of CNN": Layer(
        lambda mesh: cnn.Block("l", 4, 6, True),
        (IMAGES,),
        lambda t, p, x: images(t, t.nn.functional.max_pool2d, t.relu(convolution(t, p, x, "conv.", padding=1)), 2),
    ),
}


def classes() -> Iterator[type[Module]]:
    """All classes of modules that the library defines."""
    for package in (mpitrain.nn, mpitrain.parallel, mpitrain.models):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, Module) and value.__module__ == module.__name__:
                    yield value


def tried() -> set[type[Module]]:
    """Those of them that have a case."""
    mesh = Mesh(world())
    return {cls for layer in LAYERS.values() for cls in (type(layer.build(mesh)), *layer.holds)}


def short(layer: Module, name: str) -> str:
    """The name of a parameter without that of its layer."""
    return name.removeprefix(f"{layer.name}.")


def tensors(arrays: tuple[np.ndarray, ...], dtype: Any) -> list[Any]:
    """Inputs of a dtype, whose gradients are wanted; integers as they are."""
    return [Tensor(a.astype(dtype), requires_grad=True) if a.dtype.kind == "f" else a for a in arrays]
