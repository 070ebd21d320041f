"""The operations that make a step, one by one: the same work for mpitrain's kernels and for PyTorch's.

Each entry makes, for a size and a dtype, a function without arguments; it says which bytes must move and which products
must be made at least, so that a time becomes a share of what the chip can do.  PyTorch's side calls what its modules
call; where it has no single operation for it there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from mpitrain.backend import dtype_of

Work = Callable[[], Any]


class Size(NamedTuple):
    """Of the step whose operations are measured."""

    batch: int
    seq_len: int
    width: int
    heads: int
    vocab: int
    weights: int  # of one update

    @property
    def rows(self) -> int:
        return self.batch * self.seq_len


class Op(NamedTuple):
    """One operation.

    mine: (xp, kernels, dtype, size) -> work;  torchs: (torch, dtype, size, device) -> work, or None;  moved: elements
    that are read and written;  done: FLOPs of products.
    """

    mine: Callable[[Any, Any, Any, Size], Work]
    torchs: Callable[[Any, Any, Size, str], Work] | None
    moved: Callable[[Size], float] = lambda size: 0.0
    done: Callable[[Size], float] = lambda size: 0.0


def _random(xp: Any, dtype: Any, *shape: int) -> Any:
    """Numbers in [-1, 1) that are no pattern to a cache, made where they shall lie."""
    x = (xp.arange(math.prod(shape), dtype="uint32") * xp.uint32(2654435761)).astype("float32")
    x *= 2.0**-31
    x -= 1.0
    return x.reshape(shape).astype(dtype)


def _heads(xp: Any, dtype: Any, size: Size) -> list[Any]:
    """q, k and v as views of one projection, as the model has them."""
    qkv = _random(xp, dtype, size.batch, size.seq_len, size.heads, 3, size.width // size.heads)
    return [qkv[:, :, :, part].transpose(0, 2, 1, 3) for part in range(3)]


def _attention(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    q, k, v = _heads(xp, dtype, size)
    out = xp.empty(q.shape, q.dtype)
    return lambda: kernels.attention(q, k, v, out, **_how(size))


def _attention_backward(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    (q, k, v), into = _heads(xp, dtype, size), _heads(xp, dtype, size)
    out = xp.empty(q.shape, q.dtype)
    lse, grad = kernels.attention(q, k, v, out, **_how(size)), _random(xp, dtype, *q.shape)
    return lambda: kernels.attention_backward(grad, q, k, v, out, lse, *into, **_how(size))


def _how(size: Size) -> dict[str, Any]:
    scale = 1.0 / math.sqrt(size.width // size.heads)
    return {"scale": scale, "causal": True, "mask": None, "rows": None, "drop": 0.0}


def _t_attention(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    q, k, v = (x.detach() for x in _t_heads(torch, dtype, size, device))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _t_attention_backward(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    given = _t_heads(torch, dtype, size, device)
    y = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    grad = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, given, grad, retain_graph=True)


def _t_heads(torch: Any, dtype: Any, size: Size, device: str) -> list[Any]:
    x = torch.randn(size.batch, size.seq_len, 3 * size.width, device=device, dtype=dtype)
    parts = x.split(size.width, dim=2)
    return [p.view(*x.shape[:2], size.heads, -1).transpose(1, 2).requires_grad_() for p in parts]


def _norm(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    x, w = _random(xp, dtype, size.rows, size.width), _random(xp, dtype, size.width)
    return lambda: kernels.layer_norm(x, w, w, 1e-5)


def _norm_backward(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    x, w = _random(xp, dtype, size.rows, size.width), _random(xp, dtype, size.width)
    _, center, rstd = kernels.layer_norm(x, w, w, 1e-5)
    return lambda: kernels.layer_norm_backward(x, x, center, rstd, w, x)


def _t_norm(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    x, w = _t(torch, dtype, device, size.rows, size.width), _t(torch, dtype, device, size.width)
    return lambda: torch.native_layer_norm(x, [size.width], w, w, 1e-5)


def _t_norm_backward(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    x, w = _t(torch, dtype, device, size.rows, size.width), _t(torch, dtype, device, size.width)
    _, mean, rstd = torch.native_layer_norm(x, [size.width], w, w, 1e-5)
    mask = [True, True, True]
    return lambda: torch.ops.aten.native_layer_norm_backward(x, x, [size.width], mean, rstd, w, w, mask)


def _t(torch: Any, dtype: Any, device: str, *shape: int) -> Any:
    return torch.randn(*shape, device=device, dtype=dtype)


def _residual_norm(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    x, w = _random(xp, dtype, size.rows, size.width), _random(xp, dtype, size.width)
    return lambda: kernels.residual_norm(x, x, w, None, 0.0, w, w, 1e-5)


def _gelu(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    x, bias = _random(xp, dtype, size.rows, 4 * size.width), _random(xp, dtype, 4 * size.width)
    return lambda: kernels.gelu_tanh(x, bias)


def _gelu_backward(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    x = _random(xp, dtype, size.rows, 4 * size.width)
    return lambda: kernels.gelu_backward(x, x, True)


def _t_gelu(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    x = _t(torch, dtype, device, size.rows, 4 * size.width)
    return lambda: torch.nn.functional.gelu(x, approximate="tanh")


def _t_gelu_backward(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    x = _t(torch, dtype, device, size.rows, 4 * size.width)
    return lambda: torch.ops.aten.gelu_backward(x, x, approximate="tanh")


def _swiglu(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    x = _random(xp, dtype, size.rows, 4 * size.width)
    return lambda: kernels.swiglu(x, x)


def _loss(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    logits, targets = _random(xp, dtype, size.rows, size.vocab), xp.arange(size.rows) % size.vocab
    return lambda: kernels.cross_entropy(logits, targets, -100)


def _loss_backward(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    logits, targets = _random(xp, dtype, size.rows, size.vocab), xp.arange(size.rows) % size.vocab
    total, lse = kernels.cross_entropy(logits, targets, -100)
    grad = xp.ones((), total.dtype)
    return lambda: kernels.cross_entropy_backward(grad, logits, targets, lse, -100)


def _t_loss(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    logits = _t(torch, dtype, device, size.rows, size.vocab)
    targets = torch.arange(size.rows, device=device) % size.vocab
    return lambda: torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def _table(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    rows, ids = _random(xp, dtype, size.rows, size.width), xp.arange(size.rows) * 7919 % size.vocab
    table = xp.zeros((size.vocab, size.width), "float32")
    return lambda: kernels.row_sum(ids, rows, table)


def _t_table(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    rows = _t(torch, dtype, device, size.rows, size.width)
    ids = torch.arange(size.rows, device=device) * 7919 % size.vocab
    return lambda: torch.ops.aten.embedding_dense_backward(rows, ids, size.vocab, -1, False)


def _update(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    p, g, m, v = (_random(xp, "float32", size.weights) for _ in range(4))
    v *= v
    how = {"update": 3, "lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    return lambda: kernels.adamw(p, g, m, v, **how)


def _t_update(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    p = torch.nn.Parameter(torch.randn(size.weights, device=device))
    p.grad = torch.randn_like(p)
    return torch.optim.AdamW([p], lr=1e-3, fused=True).step


def _squares(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    x = _random(xp, "float32", size.weights)
    return lambda: kernels.sum_of_squares(x)


def _t_squares(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    x = torch.randn(size.weights, device=device)
    return lambda: torch.linalg.vector_norm(x)


def _product(rows: Callable[[Size], int], inner: Callable[[Size], int], columns: Callable[[Size], int]) -> Op:
    def mine(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
        a, b = _random(xp, dtype, rows(size), inner(size)), _random(xp, dtype, inner(size), columns(size))
        return lambda: kernels.matmul(a, b)

    def torchs(torch: Any, dtype: Any, size: Size, device: str) -> Work:
        a = _t(torch, dtype, device, rows(size), inner(size))
        b = _t(torch, dtype, device, inner(size), columns(size))
        return lambda: torch.mm(a, b)

    return Op(mine, torchs, done=lambda size: 2.0 * rows(size) * inner(size) * columns(size))


def _weight_gradient(xp: Any, kernels: Any, dtype: Any, size: Size) -> Work:
    x, g = _random(xp, dtype, size.rows, size.width), _random(xp, dtype, size.rows, 4 * size.width)
    out = xp.empty((size.width, 4 * size.width), "float32")
    return lambda: kernels.matmul(x.T, g, out=out)


def _t_weight_gradient(torch: Any, dtype: Any, size: Size, device: str) -> Work:
    x, g = _t(torch, dtype, device, size.rows, size.width), _t(torch, dtype, device, size.rows, 4 * size.width)
    return lambda: torch.mm(x.T, g)


def _of_attention(size: Size) -> float:
    """Of q k^T and of its product with v, the half that a causal mask leaves."""
    return 2.0 * size.batch * size.seq_len**2 * size.width


OPS: dict[str, Op] = {
    "large product": _product(lambda s: 8 * s.seq_len, lambda s: 8 * s.seq_len, lambda s: 8 * s.seq_len),
    "q, k, v": _product(lambda s: s.rows, lambda s: s.width, lambda s: 3 * s.width),
    "logits": _product(lambda s: s.rows, lambda s: s.width, lambda s: s.vocab),
    "gradient of a weight": Op(_weight_gradient, _t_weight_gradient, done=lambda s: 8.0 * s.rows * s.width**2),
    "attention": Op(_attention, _t_attention, done=_of_attention),
    "attention, backward": Op(_attention_backward, _t_attention_backward, done=lambda s: 2.5 * _of_attention(s)),
    "layer norm": Op(_norm, _t_norm, lambda s: 2.0 * s.rows * s.width),
    "layer norm, backward": Op(_norm_backward, _t_norm_backward, lambda s: 4.0 * s.rows * s.width),
    "residual and norm": Op(_residual_norm, None, lambda s: 4.0 * s.rows * s.width),
    "GELU": Op(_gelu, _t_gelu, lambda s: 12.0 * s.rows * s.width),
    "GELU, backward": Op(_gelu_backward, _t_gelu_backward, lambda s: 12.0 * s.rows * s.width),
    "SwiGLU": Op(_swiglu, None, lambda s: 12.0 * s.rows * s.width),
    "loss": Op(_loss, _t_loss, lambda s: 1.0 * s.rows * s.vocab),
    "loss, backward": Op(_loss_backward, None, lambda s: 2.0 * s.rows * s.vocab),
    "gradient of the table": Op(_table, _t_table, lambda s: 1.0 * s.rows * s.width),
    "AdamW (float32)": Op(_update, _t_update, lambda s: 7.0 * s.weights),
    "norm of gradients (float32)": Op(_squares, _t_squares, lambda s: 1.0 * s.weights),
}


def itemsize(op: str, dtype: str) -> int:
    """Bytes of an element of what an operation moves."""
    return 4 if op.endswith("(float32)") else int(dtype_of(dtype).itemsize)
