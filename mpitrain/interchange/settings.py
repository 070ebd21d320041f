"""What config.json of transformers says, as settings of a run, and back.

Whatever would change what a model computes is either a setting here too, or must have the value that is right for the
models here, or the file is refused by the name of the key.  Other keys say nothing about the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.data.tokenizer import END
from mpitrain.errors import CheckpointError
from mpitrain.models.sizes import DecoderConfig
from mpitrain.options import show

FILE = "config.json"
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"}
"""Names of activations there, and here."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that say which tokens begin, end and fill up a text: they are handed on."""
WORDS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Keys of tokenizer_config.json that say which words these are, and the one in the place of words that are unknown."""
OF_WORDS = "tokenizer_config.json"
OF_GENERATION = "generation_config.json"
KINDS = ("gpt2", "llama", "mistral")


class Found:
    """The keys of config.json.

    Args:
        values: of it.
        path: of it, for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values, self._path = values, path

    def get(self, key: str) -> Any:
        """The value of a key; None: it has none."""
        return self._values.get(key)

    def whole(self, key: str, unset: int | None = None) -> int:
        """A positive whole number."""
        value = self._values.get(key)
        value = unset if value is None else value
        if type(value) is not int or not 0 < value < 1 << 40:
            self.refuse(key, "it must be a whole number above 0")
        return value

    def number(self, key: str, unset: float) -> float:
        """A number."""
        value = self._values.get(key)
        value = unset if value is None else value
        if type(value) not in (int, float) or not 0 <= value < 1e15:
            self.refuse(key, "it must be a number")
        return float(value)

    def flag(self, key: str, unset: bool) -> bool:
        """True or false."""
        value = self._values.get(key)
        value = unset if value is None else value
        if type(value) is not bool:
            self.refuse(key, "it must be true or false")
        return value

    def must(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse the file if a key is there with another value than one of these, None besides."""
        for key, values in allowed.items():
            value = self._values.get(key)
            if value is not None and not any(type(value) is type(one) and value == one for one in values):
                self.refuse(key, f"models here have {' or '.join(map(repr, values)) if values else 'no such thing'}")

    def refuse(self, key: str, why: str) -> NoReturn:
        """Refuse the file because of a key."""
        said = show(self._values.get(key)) if key in self._values else "missing"
        raise CheckpointError(f"{show(self._path)}: {key} is {said}: {why}.")


def to_settings(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings that config.json means.

    Raises:
        CheckpointError: a model of another kind, or a key whose value is not right for those here.
    """
    found = Found(values, path)
    kind = found.get("model_type")
    if kind not in KINDS:
        found.refuse("model_type", f"models of {', '.join(KINDS)} are read")
    found.must({"quantization_config": (), "is_encoder_decoder": (False,), "add_cross_attention": (False,)})
    return _from_gpt2(found) if kind == "gpt2" else _from_llama(found, kind)


def tokens_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of tokens that begin and end a text, as far as it can be."""

    def is_token(value: object) -> bool:
        return type(value) is int and 0 <= value < 1 << 31

    said = {key: values.get(key) for key in TOKENS}
    return {
        key: value
        for key, value in said.items()
        if is_token(value) or (isinstance(value, list) and 0 < len(value) <= 64 and all(map(is_token, value)))
    }


def words_of(values: Mapping[str, Any], special: Mapping[str, int]) -> dict[str, str]:
    """What tokenizer_config.json says of special words, as far as the tokenizer has them.

    Args:
        values: of the file.
        special: the tokenizer's special words and their numbers.
    """
    said = {key: values.get(key) for key in WORDS}
    words = {key: value.get("content") if isinstance(value, dict) else value for key, value in said.items()}
    return {key: word for key, word in words.items() if isinstance(word, str) and word in special}


def words_and_tokens(said: Mapping[str, Any], special: Mapping[str, int]) -> tuple[dict[str, str], dict[str, Any]]:
    """The special words, and the numbers of those that begin, end and fill up a text.

    What only one of them says, the other one says, too; where nobody says which word ends a text, it is the one that
    tokenizers made here have for it.
    """
    words, tokens = words_of(said, special), tokens_of(said)
    named = {number: word for word, number in special.items()}
    for key in TOKENS:
        of_word = key.removesuffix("_id")
        numbers = tokens.get(key)
        number = numbers[0] if isinstance(numbers, list) else numbers
        if of_word not in words and number in named:
            words[of_word] = named[number]
        if numbers is None and of_word in words:
            tokens[key] = special[words[of_word]]
    if "eos_token_id" not in tokens and END in special:
        words["eos_token"], tokens["eos_token_id"] = END, special[END]
    return words, tokens


def _from_gpt2(found: Found) -> dict[str, Any]:
    found.must({"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)})
    activation = found.get("activation_function") or "gelu_new"
    if not isinstance(activation, str) or activation not in GELUS:
        found.refuse("activation_function", f"MLPs of a gpt have one of {', '.join(GELUS)}")
    width = found.whole("n_embd")
    hidden = found.whole("n_inner", 4 * width)
    drops = {found.number(f"{where}_pdrop", 0.1) for where in ("resid", "embd", "attn")}
    return {
        "model": "gpt",
        "layers": found.whole("n_layer"),
        "width": width,
        "heads": found.whole("n_head"),
        "seq_len": found.whole("n_positions"),
        "hidden": None if hidden == 4 * width else hidden,
        "vocab": found.whole("vocab_size"),
        "tied": found.flag("tie_word_embeddings", True),
        "gelu": GELUS[activation],
        "norm_eps": found.number("layer_norm_epsilon", 1e-5),
        "dropout": drops.pop() if len(drops) == 1 else 0.0,
    }


def _from_llama(found: Found, kind: str) -> dict[str, Any]:
    found.must(
        {
            "hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "partial_rotary_factor": (1, 1.0),
            "use_sliding_window": (False,),
        }
    )
    width, heads, window = found.whole("hidden_size"), found.whole("num_attention_heads"), None
    if width % heads or found.whole("head_dim", width // heads) != width // heads:
        found.refuse("head_dim", f"heads here are {width} / {heads} = {width / heads:g} wide, hidden_size by heads")
    kinds = found.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(layer == "full_attention" for layer in kinds)):
        found.refuse("layer_types", "all layers here are alike")
    if found.get("sliding_window") is not None:
        if kind == "llama":
            found.refuse("sliding_window", "a llama of transformers sees everything before it; mistral has a window")
        window = found.whole("sliding_window")
    if kind == "mistral" and found.get("num_key_value_heads") is None:
        found.refuse("num_key_value_heads", "it must be said")
    theta, scaling = _rope(found)
    return {
        "model": "llama",
        "layers": found.whole("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "seq_len": found.whole("max_position_embeddings"),
        "kv_heads": found.whole("num_key_value_heads", heads),
        "hidden": found.whole("intermediate_size"),
        "window": window,
        "vocab": found.whole("vocab_size"),
        "tied": found.flag("tie_word_embeddings", False),
        "norm_eps": found.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(found: Found) -> tuple[float, str | None]:
    """Base and scaling of rotary positions: transformers 5 has them in `rope_parameters`, 4 in `rope_scaling`.

    Files for both have them twice, and a `rope_scaling` that says something else than `rope_parameters` is refused:
    transformers of one version would follow it, another one not.
    """
    keys = [key for key in ("rope_scaling", "rope_parameters") if found.get(key) not in (None, {})]
    said = [_rope_in(found, key) for key in keys]
    if len(said) == 2 and said[0] != said[1]:
        found.refuse(keys[0], f"{keys[1]} is {show(found.get(keys[1]))}, which is something else")
    return said[0] if said else (found.number("rope_theta", 10000.0), None)


def _rope_in(found: Found, key: str) -> tuple[float, str | None]:
    """What one of the keys says."""
    about = found.get(key)
    if not isinstance(about, dict):
        found.refuse(key, "it must be an object")
    inner = Found(about, Path(f"{FILE}: {key}"))
    inner.must({"partial_rotary_factor": (1, 1.0)})
    if any(isinstance(value, dict) for value in about.values()):
        found.refuse(key, "all layers here are alike")
    theta = inner.number("rope_theta", found.number("rope_theta", 10000.0))
    kind = about.get("rope_type", about.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in _SCALINGS:
        found.refuse(key, f"its rope_type {show(kind)} is not one of default, {', '.join(_SCALINGS)}")
    numbers = [inner.number(name, 0.0) for name in _SCALINGS[kind]]
    return theta, f"{kind}:{','.join(map(_short, numbers))}"


def _short(number: float) -> str:
    """The shortest text that is this number."""
    return str(int(number)) if number == int(number) else repr(number)


def of_model(sizes: DecoderConfig, dtype: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model.

    Args:
        sizes: of it.
        dtype: of the weights.
        said: what that of the model said from which it came, if from one: its `model_type`, and of tokens.
    """
    shared = {
        "tie_word_embeddings": sizes.tied,
        "vocab_size": sizes.vocab,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same for transformers 4
        **dict.fromkeys(TOKENS),
        **tokens_of(said),
    }
    own = _gpt2(sizes) if sizes.family == "gpt" else _llama(sizes, said.get("model_type") == "mistral")
    return {**own, **shared}


def _gpt2(sizes: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": sizes.layers,
        "n_embd": sizes.width,
        "n_head": sizes.heads,
        "n_positions": sizes.seq_len,
        "n_inner": None if sizes.units == 4 * sizes.width else sizes.units,
        "activation_function": {"tanh": "gelu_new", "erf": "gelu"}[sizes.gelu],
        "layer_norm_epsilon": sizes.eps,
        **{f"{where}_pdrop": sizes.dropout for where in ("resid", "embd", "attn")},
    }


def _llama(sizes: Any, was_mistral: bool) -> dict[str, Any]:
    name = "mistral" if was_mistral or sizes.window is not None else "llama"
    scaling = sizes.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        values = (scaling.factor, scaling.low, scaling.high, int(scaling.original))
        rope = {"rope_type": scaling.kind, **dict(zip(_SCALINGS[scaling.kind], values, strict=False))}
    return {
        "model_type": name,
        "architectures": [f"{name.capitalize()}ForCausalLM"],
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.width,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.head_width,
        "intermediate_size": sizes.units,
        "max_position_embeddings": sizes.seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.eps,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        **({"sliding_window": sizes.window} if name == "mistral" else {}),
        "rope_parameters": {**rope, "rope_theta": sizes.rope_theta},
        "rope_theta": sizes.rope_theta,  # this and the next for transformers 4
        "rope_scaling": None if scaling is None else rope,
    }
