"""What csrc/module.c offers.  Arrays are C-contiguous and of one precision; what is written stands last.

Where the arrays are halves (float16; bfloat16 as uint16), vectors of weights, statistics and sums are float32, and
`spare` is float32, in which blocks of so many operands as the kernel has are computed with; else it is None.
"""

from typing import Any

from mpitrain.backend import Array

def levels() -> list[str]: ...
def use(level: str) -> None: ...
def sum_rows(x: Array, total: Array, group: Array, spare: Array | None) -> None: ...
def gelu(exact: int, x: Array, bias: Array | None, y: Array, slope: Array, spare: Array | None) -> None: ...
def gelu_backward(
    grad: Array, slope: Array, dx: Array, db: Array | None, group: Array, spare: Array | None
) -> None: ...
def dropout(x: Array, hashes: Array, threshold: int, keep_scale: float, out: Array, spare: Array | None) -> None: ...
def residual(
    x: Array,
    y: Array,
    bias: Array | None,
    hashes: Array | None,
    threshold: int,
    keep_scale: float,
    out: Array,
    spare: Array | None,
) -> None: ...
def layer_norm(
    x: Array, weight: Array, bias: Array, eps: float, y: Array, center: Array, rstd: Array, spare: Array | None
) -> None: ...
def residual_norm(
    x: Array,
    y: Array,
    branch_bias: Array | None,
    hashes: Array | None,
    threshold: int,
    keep_scale: float,
    weight: Array,
    bias: Array,
    eps: float,
    total: Array,
    out: Array,
    center: Array,
    rstd: Array,
    spare: Array | None,
) -> None: ...
def layer_norm_backward(
    grad: Array,
    extra: Array | None,
    x: Array,
    center: Array,
    rstd: Array,
    weight: Array,
    dx: Array,
    dw: Array,
    db: Array,
    groups: Array,
    spare: Array | None,
) -> None: ...
def rms_norm(x: Array, weight: Array, eps: float, y: Array, rstd: Array, spare: Array | None) -> None: ...
def residual_rms_norm(
    x: Array,
    y: Array,
    branch_bias: Array | None,
    hashes: Array | None,
    threshold: int,
    keep_scale: float,
    weight: Array,
    eps: float,
    total: Array,
    out: Array,
    rstd: Array,
    spare: Array | None,
) -> None: ...
def rms_norm_backward(
    grad: Array,
    extra: Array | None,
    x: Array,
    rstd: Array,
    weight: Array,
    dx: Array,
    dw: Array,
    group: Array,
    spare: Array | None,
) -> None: ...
def swiglu(gate: Array, up: Array, y: Array, spare: Array | None) -> None: ...
def swiglu_backward(grad: Array, gate: Array, up: Array, d_gate: Array, d_up: Array, spare: Array | None) -> None: ...
def rotary(x: Array, members: int, cos: Array, sin: Array, y: Array, spare: Array | None) -> None: ...
def rotary_pack(q: Array, kv: Array, groups: int, cos: Array, sin: Array, y: Array) -> None: ...
def rotary_unpack(x: Array, groups: int, cos: Array, sin: Array, q: Array, kv: Array) -> None: ...
def softmax(x: Array, y: Array, spare: Array | None) -> None: ...
def softmax_backward(grad: Array, y: Array, dx: Array, spare: Array | None) -> None: ...
def cross_entropy(logits: Array, targets: Array, ignore: int, lse: Array, spare: Array | None) -> float: ...
def cross_entropy_backward(
    grad: float, logits: Array, targets: Array, lse: Array, ignore: int, out: Array, spare: Array | None
) -> None: ...
def row_sum(ids: Array, rows: Array, out: Array, spare: Array | None) -> None: ...
def combine(out: Array, gates: Array, places: Array, y: Array, spare: Array | None) -> None: ...
def combine_backward(
    grad: Array,
    out: Array,
    gates: Array,
    places: Array,
    d_out: Array,
    d_gates: Array,
    spare: Array | None,
) -> None: ...
def jitter(x: Array, hashes: Array, amount: float, out: Array, spare: Array | None) -> None: ...
def adamw(p: Array, g: Array, m: Array, v: Array, *numbers: float) -> None: ...
def sum_of_squares(x: Array, spare: Array | None) -> float: ...
def convolution_scratch(backward: bool, itemsize: int, *geometry: int) -> int: ...
def conv2d(x: Array, w: Array, bias: Array | None, y: Array, turned: bool, scratch: Array, *geometry: int) -> None: ...
def conv2d_filters(x: Array, grad: Array, out: Array, add: bool, scratch: Array, *geometry: int) -> None: ...
def max_pool2d(x: Array, y: Array, where: Array, *geometry: int) -> None: ...
def max_pool2d_backward(grad: Array, where: Array, dx: Array, *geometry: int) -> None: ...
def attention_scratch(s: int, t: int, d: int, itemsize: int, backward: bool) -> int: ...
def attention(lse: Array, q: Array, k: Array, v: Array, out: Array, *setting: Any) -> None: ...
def attention_backward(
    lse: Array,
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    *setting: Any,
) -> None: ...
def widen(brain: bool, x: Array, y: Array) -> None: ...
def narrow(brain: bool, x: Array, y: Array) -> None: ...
