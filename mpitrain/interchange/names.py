"""What the tensors of GPT-2 and Llama are called in transformers, and how their elements lie there.

    here     matrices are (in, out); the columns of a fused projection go head by head
    GPT-2    (in, out) as well, but the output head; columns first of all queries, then of all keys and values
    Llama    (out, in); queries, keys and values are matrices of their own

Mistral's models are Llamas with a window.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mpitrain.errors import CheckpointError
from mpitrain.interchange.pairs import Pair
from mpitrain.models.sizes import DecoderConfig

HEAD = "lm_head.weight"
_PREFIX = {"gpt": "transformer.", "llama": "model."}
_BUFFERS = {
    "gpt": re.compile(r"(transformer\.)?h\.[0-9]{1,4}\.attn\.(bias|masked_bias)"),
    "llama": re.compile(r"model\.layers\.[0-9]{1,4}\.self_attn\.rotary_emb\.inv_freq"),
}


def pairs(sizes: DecoderConfig, prefix: str | None = None) -> list[Pair]:
    """All tensors of a model.

    Args:
        sizes: of it.
        prefix: of all names there but the head's; None: the usual one, of a model with a head.

    Raises:
        CheckpointError: transformers has no such model.
    """
    if sizes.routing is not None:
        raise CheckpointError("a model with experts has no counterpart in transformers' GPT-2.")
    within = _PREFIX[sizes.family] if prefix is None else prefix
    return (_gpt if sizes.family == "gpt" else _llama)(sizes, within)


def prefix_of(family: str, names: Iterable[str]) -> str:
    """The prefix that names in a file have: files of a model without its head have none."""
    usual = _PREFIX[family]
    return usual if any(name.startswith(usual) for name in names) else ""


def is_buffer(family: str, name: str) -> bool:
    """Whether a tensor is no weight, but what old versions of transformers kept besides."""
    return _BUFFERS[family].fullmatch(name) is not None


def table_of(family: str, prefix: str) -> str:
    """The table of tokens; of a tied model the head as well."""
    return f"{prefix}{'wte' if family == 'gpt' else 'embed_tokens'}.weight"


def _gpt(sizes: DecoderConfig, prefix: str) -> list[Pair]:
    if sizes.groups != sizes.heads:
        raise CheckpointError(
            f"transformers' GPT-2 has as many heads of keys and values as of queries; this one has {sizes.groups} for"
            f" {sizes.heads}."
        )
    if sizes.window is not None:
        raise CheckpointError(f"transformers' GPT-2 has no window; this one has one of {sizes.window}.")
    lengths = {"v": sizes.vocab, "s": sizes.seq_len, "w": sizes.width, "u": sizes.units, "p": 3, "h": sizes.heads}
    lengths |= {"d": sizes.head_width, "o": sizes.width}
    found = []

    def add(ours: str, theirs: str, here: str, there: str | None = None) -> None:
        found.append(Pair(ours, (f"{prefix}{theirs}",), here, here if there is None else there, lengths))

    add("table.weight", "wte.weight", "v w")
    add("positions.weight", "wpe.weight", "s w")
    for n in range(sizes.layers):
        ours, theirs = f"blocks.{n}", f"h.{n}"
        for mine, its in (("norm1", "ln_1"), ("norm2", "ln_2")):
            add(f"{ours}.{mine}.weight", f"{theirs}.{its}.weight", "w")
            add(f"{ours}.{mine}.bias", f"{theirs}.{its}.bias", "w")
        add(f"{ours}.attention.qkv.weight", f"{theirs}.attn.c_attn.weight", "w (h p d)", "w (p h d)")
        add(f"{ours}.attention.qkv.bias", f"{theirs}.attn.c_attn.bias", "(h p d)", "(p h d)")
        for mine, its, into, out in (
            ("attention.proj", "attn.c_proj", "w", "o"),
            ("mlp.up", "mlp.c_fc", "w", "u"),
            ("mlp.down", "mlp.c_proj", "u", "w"),
        ):
            add(f"{ours}.{mine}.weight", f"{theirs}.{its}.weight", f"{into} {out}")
            add(f"{ours}.{mine}.bias", f"{theirs}.{its}.bias", out)
    add("norm.weight", "ln_f.weight", "w")
    add("norm.bias", "ln_f.bias", "w")
    return found if sizes.tied else [*found, Pair("head.weight", (HEAD,), "w v", "v w", lengths)]


def _llama(sizes: DecoderConfig, prefix: str) -> list[Pair]:
    lengths = {"v": sizes.vocab, "w": sizes.width, "u": sizes.units, "h": sizes.heads, "g": sizes.groups}
    lengths |= {"d": sizes.head_width, "p": 3, "b": 2, "o": sizes.width}
    found = []

    def add(ours: str, theirs: Iterable[str], here: str, there: str) -> None:
        found.append(Pair(ours, tuple(f"{prefix}{name}" for name in theirs), here, there, lengths))

    add("table.weight", ["embed_tokens.weight"], "v w", "v w")
    for n in range(sizes.layers):
        ours, theirs = f"blocks.{n}", f"layers.{n}"
        q, k, v = (f"{theirs}.self_attn.{which}_proj.weight" for which in "qkv")
        add(f"{ours}.norm1.weight", [f"{theirs}.input_layernorm.weight"], "w", "w")
        if sizes.groups == sizes.heads:
            add(f"{ours}.attention.qkv.weight", [q, k, v], "w (h p d)", "(h d) w")
        else:
            add(f"{ours}.attention.q.weight", [q], "w (h d)", "(h d) w")
            add(f"{ours}.attention.kv.weight", [k, v], "w (g b d)", "(g d) w")
        add(f"{ours}.attention.proj.weight", [f"{theirs}.self_attn.o_proj.weight"], "w o", "o w")
        add(f"{ours}.norm2.weight", [f"{theirs}.post_attention_layernorm.weight"], "w", "w")
        for which in ("gate", "up"):
            add(f"{ours}.mlp.{which}.weight", [f"{theirs}.mlp.{which}_proj.weight"], "w u", "u w")
        add(f"{ours}.mlp.down.weight", [f"{theirs}.mlp.down_proj.weight"], "u w", "w u")
    add("norm.weight", ["norm.weight"], "w", "w")
    return found if sizes.tied else [*found, Pair("head.weight", (HEAD,), "w v", "v w", lengths)]
