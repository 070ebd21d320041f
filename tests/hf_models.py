"""Small models in the layout of transformers: folders with random weights, and what they compute, in plain NumPy.

`logits` reads the tensors by their names there and follows the papers, without a line of mpitrain.
"""

import json
import math

import ml_dtypes  # noqa: F401  # bfloat16
import numpy as np
from safetensors.numpy import save_file

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 61,
    "n_positions": 12,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "eos_token_id": 60,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "max_position_embeddings": 12,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 300.0,
    "attention_bias": False,
}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0}
CASES = {
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False, "n_inner": 24, "activation_function": "gelu", "n_layer": 3},
    "llama": LLAMA,
    "llama-groups": {
        **LLAMA,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_scaling": {**SCALING, "original_max_position_embeddings": 8},
    },
    "llama-linear": {
        **LLAMA,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 90.0, "factor": 2.5},
    },
    "mistral-whole": {**LLAMA, **MISTRAL, "num_key_value_heads": 4, "sliding_window": None},
    "mistral": {**LLAMA, **MISTRAL, "num_key_value_heads": 2, "sliding_window": 5},
}


def shapes(config, prefix=None):
    """Name -> shape of all tensors."""
    found = {}
    if config["model_type"] == "gpt2":
        w, u = config["n_embd"], config.get("n_inner") or 4 * config["n_embd"]
        p = "transformer." if prefix is None else prefix
        found[f"{p}wte.weight"], found[f"{p}wpe.weight"] = (config["vocab_size"], w), (config["n_positions"], w)
        for n in range(config["n_layer"]):
            for name, shape in (
                ("attn.c_attn", (w, 3 * w)),
                ("attn.c_proj", (w, w)),
                ("mlp.c_fc", (w, u)),
                ("mlp.c_proj", (u, w)),
            ):
                found[f"{p}h.{n}.{name}.weight"], found[f"{p}h.{n}.{name}.bias"] = shape, shape[1:]
            found |= {f"{p}h.{n}.{norm}.{kind}": (w,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        found |= {f"{p}ln_f.{kind}": (w,) for kind in ("weight", "bias")}
        tied = config.get("tie_word_embeddings", True)
    else:
        w, u = config["hidden_size"], config["intermediate_size"]
        kv = w // config["num_attention_heads"] * config.get("num_key_value_heads", config["num_attention_heads"])
        found["model.embed_tokens.weight"], found["model.norm.weight"] = (config["vocab_size"], w), (w,)
        for n in range(config["num_hidden_layers"]):
            p = f"model.layers.{n}"
            rows = {
                "self_attn.q": w,
                "self_attn.k": kv,
                "self_attn.v": kv,
                "self_attn.o": w,
                "mlp.gate": u,
                "mlp.up": u,
            }
            found |= {f"{p}.{name}_proj.weight": (out, w) for name, out in rows.items()}
            found[f"{p}.mlp.down_proj.weight"] = (w, u)
            found |= {f"{p}.{norm}_layernorm.weight": (w,) for norm in ("input", "post_attention")}
        tied = config.get("tie_word_embeddings", False)
    return found if tied else {**found, "lm_head.weight": (config["vocab_size"], w)}


def tensors(config, dtype="float32", prefix=None, seed=0):
    draw = np.random.default_rng(seed)
    return {
        name: (0.4 * draw.standard_normal(shape) + (len(shape) == 1 and name.endswith("weight"))).astype(dtype)
        for name, shape in shapes(config, prefix).items()
    }


def write(folder, config, held, shards=1):
    """The folder, as transformers writes it; maybe over several files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(held, folder / "model.safetensors", {"format": "pt"})
        return folder
    files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    for n, file in enumerate(files):
        save_file({name: held[name] for name in sorted(held)[n::shards]}, folder / file, {"format": "pt"})
    mapped = {name: files[place % shards] for place, name in enumerate(sorted(held))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    return folder


def logits(config, held, ids):
    """Scores of the next token, in float64."""
    t = {name.removeprefix("transformer."): values.astype(np.float64) for name, values in held.items()}
    return (_gpt2 if config["model_type"] == "gpt2" else _llama)(config, t, ids)


def _gpt2(config, t, ids):
    heads, erf = config["n_head"], np.vectorize(math.erf)

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_epsilon"])
        return centred / scale * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(x, name):
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    def gelu(x):
        if config["activation_function"] == "gelu":
            return 0.5 * x * (1 + erf(x / math.sqrt(2)))
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = t["wte.weight"][ids] + t["wpe.weight"][: ids.shape[1]]
    for n in range(config["n_layer"]):
        q, k, v = (
            _heads(part, heads) for part in np.split(linear(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn"), 3, -1)
        )
        x = x + linear(_attention(q, k, v), f"h.{n}.attn.c_proj")
        x = x + linear(gelu(linear(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc")), f"h.{n}.mlp.c_proj")
    return norm(x, "ln_f") @ t.get("lm_head.weight", t["wte.weight"]).T


def _llama(config, t, ids):
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    angles = np.arange(ids.shape[1])[:, None] * speeds(config)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * t[f"{name}.weight"]

    def turned(x):
        one, two = np.split(x, 2, -1)
        return np.concatenate(
            [one * np.cos(angles) - two * np.sin(angles), two * np.cos(angles) + one * np.sin(angles)], -1
        )

    x = t["model.embed_tokens.weight"][ids]
    for n in range(config["num_hidden_layers"]):
        p = f"model.layers.{n}"
        y = norm(x, f"{p}.input_layernorm")
        q, k, v = (y @ t[f"{p}.self_attn.{which}_proj.weight"].T for which in "qkv")
        q, k, v = turned(_heads(q, heads)), turned(_heads(k, groups)), _heads(v, groups)
        k, v = (np.repeat(each, heads // groups, axis=1) for each in (k, v))
        x = x + _attention(q, k, v, config.get("sliding_window")) @ t[f"{p}.self_attn.o_proj.weight"].T
        y = norm(x, f"{p}.post_attention_layernorm")
        gate, up = (y @ t[f"{p}.mlp.{which}_proj.weight"].T for which in ("gate", "up"))
        x = x + gate / (1 + np.exp(-gate)) * up @ t[f"{p}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T


def speeds(config):
    about = config.get("rope_parameters") or config.get("rope_scaling") or {}
    d = config["hidden_size"] // config["num_attention_heads"]
    theta = about.get("rope_theta", config["rope_theta"])
    speeds = theta ** (-np.arange(0, d, 2) / d)
    if about.get("rope_type") == "linear":
        return speeds / about["factor"]
    if about.get("rope_type") == "llama3":
        length = about["original_max_position_embeddings"]
        waves = 2 * np.pi / speeds
        low, high = about["low_freq_factor"], about["high_freq_factor"]
        smooth = (length / waves - low) / (high - low)
        between = (1 - smooth) * speeds / about["factor"] + smooth * speeds
        slow = np.where(waves > length / low, speeds / about["factor"], between)
        return np.where(waves < length / high, speeds, slow)
    return speeds


def _heads(x, heads):
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _attention(q, k, v, window=None):
    """Scores of later keys, and of those before the window, do not count."""
    s = q.shape[2]
    back = np.arange(s)[:, None] - np.arange(s)
    hidden = (back < 0) | (back >= (window or s))
    scores = np.where(hidden, -np.inf, q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = weights / weights.sum(-1, keepdims=True) @ v
    return y.transpose(0, 2, 1, 3).reshape(len(y), s, -1)
