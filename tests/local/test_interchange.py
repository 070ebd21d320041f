"""Weights in the layout of transformers: the same model here, the same bits back, and nothing taken on trust."""

import json
import os
import struct
import sys
import tracemalloc
from pathlib import Path

import hf_models
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpitrain import checkpoint
from mpitrain.backend import dtype_of
from mpitrain.catalog import MODELS, OF_MODEL
from mpitrain.checkpoint.tools import command
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import CheckpointError, ConfigError, UserError
from mpitrain.interchange.command import TOOLS
from mpitrain.interchange.settings import TOKENS, to_settings, tokens_of, words_and_tokens, words_of
from mpitrain.models.families import build
from mpitrain.weights import check_fit, fill, find, model_in

IDS = np.random.default_rng(7).integers(0, 61, (2, 12))
ROPE = {"rope_type": "linear", "factor": 4.0}


def tool(*words):
    return command.main([str(word) for word in words], TOOLS)


def imported(folder, config, dtype="float32", shards=1, **more):
    """A folder of theirs, and the run that it becomes."""
    held = hf_models.tensors(config, dtype, **more)
    hf_models.write(folder / "theirs", config, held, shards)
    assert tool("import", folder / "theirs", folder / "run") == 0
    return held


def model_of(run, dtype, **sizes):
    """The model in a run, on this rank."""
    mesh = Mesh(world(), **sizes)
    source = find(str(run), mesh.world)
    _, numbers = model_in(source)
    model = build(numbers, mesh, dtype=dtype_of(dtype))
    fill(model, source, mesh.world)
    return model


def refused(*words, error=CheckpointError):
    with pytest.raises(UserError) as caught:
        tool(*words)
    assert isinstance(caught.value, error)
    said = str(caught.value)
    assert len(said.splitlines()) <= 5
    return said


# ------------------------------------------------------------------------------------------------------ the same model


@pytest.mark.parametrize("name", hf_models.CASES)
def test_an_imported_model_computes_what_the_papers_say(tmp_path, name):
    config = hf_models.CASES[name]
    held = imported(tmp_path, config, "float64", shards=3 if "groups" in name else 1)
    found = model_of(tmp_path / "run", "float64").logits(IDS).data
    expected = hf_models.logits(config, held, IDS)
    assert np.abs(found - expected).max() < 1e-9 * np.abs(expected).max()


PUBLISHED = {  # config.json of models in use, but for what says nothing about the weights
    "gpt2": {
        **{
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
        },
        **{
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024,
        },
        **{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1},
        **{"summary_first_dropout": 0.1, "task_specific_params": {"text-generation": {"max_length": 50}}},
        **{"vocab_size": 50257},
    },
    "tinyllama-1.1b": {
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2},
        **{"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048},
        **{"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4},
        **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0},
        **{"tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True, "vocab_size": 32000},
    },
    "llama2-7b": {
        **{
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
        },
        **{"max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32},
        **{
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "vocab_size": 32000,
        },
    },
    "llama3.2-1b": {
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64},
        **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 2048},
        **{"intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama"},
        **{"num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05},
        "rope_scaling": {
            **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
            **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
        **{"rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128256},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_those_of_the_model_of_that_name(name):
    found = to_settings(PUBLISHED[name], Path("config.json"))
    usual = (
        {"kv_heads": found["heads"], "rope_theta": 10000.0, "norm_eps": 1e-5} if "llama" in name else {"norm_eps": 1e-5}
    )
    known = {**dict.fromkeys(OF_MODEL), **usual, **MODELS[name]}
    assert {key: found.get(key) for key in OF_MODEL} == known
    assert found["vocab"] == PUBLISHED[name]["vocab_size"]
    assert found["tied"] == (name in ("gpt2", "llama3.2-1b"))
    assert tokens_of(PUBLISHED[name]) == {key: PUBLISHED[name][key] for key in TOKENS if key in PUBLISHED[name]}


def test_names_without_a_prefix_and_what_old_versions_kept_besides(tmp_path, capsys):
    config = hf_models.GPT2
    held = hf_models.tensors(config, "float64", prefix="")
    masks = {
        f"h.{n}.attn.{kind}": np.ones((1, 1, 4, 4), np.uint8) for n in range(2) for kind in ("bias", "masked_bias")
    }
    hf_models.write(tmp_path / "theirs", config, {**held, **masks, "lm_head.weight": held["wte.weight"].copy()})
    assert tool("import", tmp_path / "theirs", tmp_path / "run") == 0
    assert "left out, since no weights: h.0.attn.bias, h.0.attn.masked_bias and 2 more" in capsys.readouterr().out
    found = model_of(tmp_path / "run", "float64").logits(IDS).data
    assert np.abs(found - hf_models.logits(config, held, IDS)).max() < 1e-9


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gpt2", {"tp": 2, "pp": 2}), ("llama-groups", {"tp": 2, "dp": 2}), ("llama", {"pp": 2, "cp": 2})],
)
def test_weights_are_the_same_on_every_layout(tmp_path, name, sizes):
    imported(tmp_path, hf_models.CASES[name])

    def save_again():
        mesh = Mesh(world(), **sizes)
        source = find(str(tmp_path / "run"), mesh.world)
        _, numbers = model_in(source)
        zero = 3 if sizes.get("dp") else 0
        model = build(numbers, mesh, dtype=np.float32, zero=zero)
        fill(model, source, mesh.world)
        slabs = checkpoint.slabs_of(model.shares(), {}, mesh)
        checkpoint.save(tmp_path / "again", 0, slabs, source.manifest.scalars, mesh.world, layout=mesh.sizes)

    LocalWorld(4).run(save_again)
    assert tool("diff", tmp_path / "run", tmp_path / "again", "--tensors", "weight/*") == 0
    assert tool("export", tmp_path / "again" / "checkpoints" / "step-00000000", tmp_path / "back") == 0
    assert_same_files(tmp_path / "theirs", tmp_path / "back")


# --------------------------------------------------------------------------------------------------- the same bits back


def tensors_in(folder):
    return {name: values for path in folder.glob("*.safetensors") for name, values in load_file(path).items()}


def assert_same_files(one, other):
    a, b = tensors_in(one), tensors_in(other)
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float64", "float32", "float16"))]
)
def test_there_and_back_gives_the_same_bits(tmp_path, dtype):
    for name in ("gpt2-untied", "llama-groups"):
        place = tmp_path / name
        held = imported(place, hf_models.CASES[name], dtype, shards=2)
        source = Source.of(str(place / "run"))
        assert source.manifest.scalars["config"]["dtype"] == dtype
        wanted = "float64" if dtype == "float64" else "float32"
        assert {tensor.dtype for tensor in source.manifest.tensors.values()} == {wanted}
        assert tool("export", place / "run", place / "back", "--shard-size", "4KiB") == 0
        assert_same_files(place / "theirs", place / "back")
        index = json.loads((place / "back" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == held.keys()
        assert index["metadata"]["total_size"] == sum(values.nbytes for values in held.values())
        largest = max(values.nbytes for values in held.values())
        for path in (place / "back").glob("*.safetensors"):
            of_file = load_file(path)
            assert set(of_file) == {key for key, file in index["weight_map"].items() if file == path.name}
            assert sum(values.nbytes for values in of_file.values()) <= max(4096, largest)


def test_settings_come_back_and_go_into_a_second_run(tmp_path):
    for name, config in hf_models.CASES.items():
        imported(tmp_path / name, config)
        assert tool("export", tmp_path / name / "run", tmp_path / name / "back") == 0
        back = json.loads((tmp_path / name / "back" / "config.json").read_text())
        for key, value in config.items():
            assert back[key] == value or key in ("rope_theta", "rope_parameters"), (name, key)
        assert back["dtype"] == "float32"
        assert tool("import", tmp_path / name / "back", tmp_path / name / "second") == 0
        one, two = (Source.of(str(tmp_path / name / run)).manifest for run in ("run", "second"))
        assert one.scalars == two.scalars
        assert (tmp_path / name / "run" / "config.toml").read_text() == (
            tmp_path / name / "second" / "config.toml"
        ).read_text()


def test_another_dtype_rounds_once_and_never_to_infinity(tmp_path):
    held = imported(tmp_path, hf_models.LLAMA, "float64")
    assert tool("import", tmp_path / "theirs", tmp_path / "single", "--dtype", "bfloat16") == 0
    assert tool("export", tmp_path / "single", tmp_path / "half") == 0
    half = tensors_in(tmp_path / "half")
    for name, values in held.items():
        assert half[name].dtype == dtype_of("bfloat16")
        assert np.array_equal(half[name], values.astype(np.float32).astype(half[name].dtype)), name
    for others, wanted in (("float16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")):
        mixed = {name: values.astype("bfloat16" if values.ndim == 2 else others) for name, values in held.items()}
        hf_models.write(tmp_path / f"with-{others}", hf_models.LLAMA, mixed)
        assert tool("import", tmp_path / f"with-{others}", tmp_path / f"{others}-run") == 0
        assert Source.of(str(tmp_path / f"{others}-run")).manifest.scalars["config"]["dtype"] == wanted
    held["model.norm.weight"][3] = 70000.0
    hf_models.write(tmp_path / "large", hf_models.LLAMA, held)
    assert tool("import", tmp_path / "large", tmp_path / "large-run") == 0
    said = refused("export", tmp_path / "large-run", tmp_path / "none", "--dtype", "float16", "--shard-size", "1KiB")
    assert "weight/norm.weight holds 7e+04, which is too large for float16" in said
    assert not [path for path in tmp_path.iterdir() if "none" in path.name]
    held["model.norm.weight"][3] = 1e300
    hf_models.write(tmp_path / "huge", hf_models.LLAMA, held)
    assert "model.norm.weight holds 1e+300" in refused(
        "import", tmp_path / "huge", tmp_path / "none", "--dtype", "float32"
    )
    assert not [path for path in tmp_path.iterdir() if "none" in path.name]


def test_the_run_is_one_for_all_tools(tmp_path, capsys):
    imported(tmp_path, hf_models.GPT2)
    run = tmp_path / "run"
    assert tool("verify", run) == 0
    assert tool("diff", run, run) == 0
    assert tool("inspect", run) == 0
    assert tool("inspect", run / "checkpoints" / "step-00000000") == 0
    assert "--model gpt" in capsys.readouterr().out
    assert not list(run.rglob(".tmp*"))
    assert "is there already" in refused("import", tmp_path / "theirs", run)
    assert "is there already" in refused("export", run, tmp_path / "theirs")
    assert "no such file" in refused("import", tmp_path / "nothing", tmp_path / "new")
    assert "lies in the checkpoint" in refused("export", run, run / "checkpoints" / "step-00000000" / "new")
    said = refused("export", run, tmp_path / "new", "--shard-size", "5GB", error=ConfigError)
    assert "--shard-size 5GB: must be a number of B, KiB, MiB, GiB or TiB" in said
    assert tool("import", tmp_path / "theirs" / "model.safetensors", tmp_path / "of-a-file") == 0
    assert tool("diff", run, tmp_path / "of-a-file") == 0


def test_memory_is_that_of_one_tensor(tmp_path):
    config = {**hf_models.LLAMA, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 2}
    config["vocab_size"] = 4096
    held = hf_models.tensors(config)
    largest = max(values.nbytes for values in held.values())
    total = sum(values.nbytes for values in held.values())
    hf_models.write(tmp_path / "theirs", config, held)
    del held
    peaks = []
    for words in (("import", tmp_path / "theirs", tmp_path / "run"), ("export", tmp_path / "run", tmp_path / "back")):
        tracemalloc.start()
        tool(*words)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert total > 6 * largest
    assert peaks[0] < 2 * largest + (24 << 20) < total, (peaks, largest, total)
    assert peaks[1] < largest + (4 << 20), (peaks, largest, total)


def test_who_lacks_the_library_is_told_how_to_get_it(tmp_path, monkeypatch):
    hf_models.write(tmp_path / "theirs", hf_models.GPT2, hf_models.tensors(hf_models.GPT2))

    monkeypatch.setitem(sys.modules, "safetensors", None)
    said = refused("import", tmp_path / "theirs", tmp_path / "run", error=ConfigError)
    assert 'pip install "mpitrain[hf]"' in said
    assert not [path for path in tmp_path.iterdir() if "run" in path.name]


# --------------------------------------------------------------------------------------------------- the tokenizer


WORDS = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def test_a_tokenizer_is_passed_along(tmp_path, capsys):
    held = hf_models.tensors(hf_models.GPT2)
    for name, content, said in (
        ("good", json.dumps(WORDS), ""),
        ("bad", json.dumps({**WORDS, "model": {"type": "Unigram"}}), "its model is Unigram"),
        (
            "many",
            json.dumps({**WORDS, "model": {**WORDS["model"], "vocab": {"a": 0, "b": 1, "ab": 99}}}),
            "has 100 words",
        ),
    ):
        folder = hf_models.write(tmp_path / name, hf_models.GPT2, held)
        (folder / "tokenizer.json").write_text(content)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "a"' + (", broken" if name == "good" else "}"))
        assert tool("import", folder, tmp_path / f"{name}-run") == 0
        assert (said or "tokenizer.json goes along") in capsys.readouterr().out
        assert (tmp_path / f"{name}-run" / "tokenizer.json").exists() == (not said)
    assert (tmp_path / "good-run" / "tokenizer.json").read_text() == json.dumps(WORDS)
    assert tool("export", tmp_path / "good-run", tmp_path / "back") == 0
    assert (tmp_path / "back" / "tokenizer.json").read_text() == json.dumps(WORDS)
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["model_max_length"] == 12
    (tmp_path / "secret").write_text(json.dumps(WORDS))
    folder = hf_models.write(tmp_path / "link", hf_models.GPT2, held)
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert "is a link" in refused("import", folder, tmp_path / "new")


def test_special_words_are_named_by_word_or_by_number():
    special = {"<s>": 1, "</s>": 2, "<|endoftext|>": 3}
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<s>", "pad_token": "none such"}
    assert words_of({**named, "other": "x"}, special) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    assert words_and_tokens({"eos_token": "</s>", "bos_token_id": 1}, special) == (
        {"eos_token": "</s>", "bos_token": "<s>"},
        {"bos_token_id": 1, "eos_token_id": 2},
    )
    assert words_and_tokens({"eos_token_id": [2, 1]}, special) == ({"eos_token": "</s>"}, {"eos_token_id": [2, 1]})
    assert words_and_tokens({}, special) == ({"eos_token": "<|endoftext|>"}, {"eos_token_id": 3})
    assert words_and_tokens({"eos_token": 7, "eos_token_id": "x"}, {}) == ({}, {})


def test_what_a_folder_is_instead_and_what_to_do(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        assert "is neither a checkpoint" in refused("export", run, tmp_path / "out")
        (run / name).write_text("")
    assert "--save-every N" in refused("export", run, tmp_path / "out")
    (run / "checkpoints").mkdir()
    assert "--save-every N" in refused("export", run, tmp_path / "out")
    theirs = hf_models.write(tmp_path / "theirs", hf_models.GPT2, hf_models.tensors(hf_models.GPT2))
    for path in (theirs, theirs / "model.safetensors"):
        assert f"mpitrain checkpoint import {theirs} OUT" in refused("export", path, tmp_path / "out")


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpt2", {"model_type": "bert"}, "model_type is bert: models of gpt2, llama, mistral are read"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type"),
        ("gpt2", {"n_layer": None}, "n_layer is None: it must be a whole number"),
        ("gpt2", {"n_layer": 10**9}, "--layers 1000000000: must be a whole number from 1 to 1000"),
        ("gpt2", {"n_layer": 3}, "missing in it: transformer.h.2."),
        ("gpt2", {"n_layer": 1}, "unexpected in it: transformer.h.1."),
        ("gpt2", {"n_embd": 20}, "transformer.wte.weight is (61, 16), the model wants (61, 20)"),
        ("gpt2", {"n_embd": 18}, "--width 18"),
        ("gpt2", {"vocab_size": True}, "vocab_size is True"),
        ("gpt2", {"vocab_size": 1 << 30}, "--vocab"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is relu: MLPs of a gpt have one of gelu_new"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True: models here have False",
        ),
        ("gpt2", {"activation_function": ["gelu"]}, "activation_function"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"tie_word_embeddings": False}, "missing in it: lm_head.weight"),
        ("gpt2", {"tie_word_embeddings": "no"}, "tie_word_embeddings is no: it must be true or false"),
        ("gpt2", {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon is -1.0"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"attention_bias": True}, "attention_bias is True: models here have False"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu: models here have 'silu' or 'swish'"),
        ("llama", {"head_dim": 8}, "head_dim is 8: heads here are 16 / 4 = 4 wide"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"sliding_window": 5}, "sliding_window is 5"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llama", {"layer_types": 7}, "layer_types is 7"),
        ("llama", {"num_key_value_heads": 3}, "3"),
        ("llama", {"num_key_value_heads": 2}, "k_proj.weight is (16, 16), the model wants (8, 16)"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type yarn is not one of default, linear, llama3",
        ),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "--rope-scaling"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is linear: it must be an object"),
        ("llama", {"rope_theta": "10000"}, "rope_theta"),
        ("llama", {"rope_parameters": ROPE, "rope_scaling": {**ROPE, "factor": 2.0}}, "which is something else"),
        ("llama", {"rope_parameters": {**ROPE, "rope_theta": 5e5}, "rope_scaling": ROPE}, "which is something else"),
        ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": ROPE}, "which is something else"),
        ("llama", {"rope_parameters": ROPE, "rope_scaling": {**ROPE, "rope_type": "yarn"}}, "rope_type yarn"),
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn"}, "rope_scaling": ROPE}, "rope_type yarn"),
        ("llama", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": {"full_attention": ROPE}}, "all layers here are alike"),
        ("mistral", {"num_key_value_heads": None}, "num_key_value_heads"),
    ],
)
def test_a_model_that_is_none_of_these_is_refused_by_its_key(tmp_path, name, change, words):
    config = hf_models.CASES[name]
    hf_models.write(tmp_path / "theirs", {**config, **change}, hf_models.tensors(config))
    assert words in refused("import", tmp_path / "theirs", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_rotary_positions_may_be_said_for_both_versions_of_transformers():
    for said in ({"rope_parameters": ROPE}, {"rope_scaling": ROPE}, {"rope_parameters": ROPE, "rope_scaling": ROPE}):
        config = {**hf_models.LLAMA, "rope_parameters": {}, "rope_scaling": None, **said}
        found = to_settings(config, Path("config.json"))
        assert (found["rope_theta"], found["rope_scaling"]) == (300.0, "linear:4")


def test_what_transformers_does_not_have_is_not_exported(tmp_path):
    from mpitrain.interchange.names import pairs
    from mpitrain.models.gpt import GPTConfig
    from mpitrain.routing import Routing

    for sizes, words in (
        (GPTConfig(routing=Routing(4)), "experts"),
        (GPTConfig(kv_heads=2), "2 for 4"),
        (GPTConfig(window=8), "window"),
    ):
        with pytest.raises(CheckpointError, match=words):
            pairs(sizes)


def raw(held, change=None, values=None, length=None):
    """A file of weights with a header of one's own."""
    header, data = {}, b""
    for name, array in held.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    if change is not None:
        header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (
        struct.pack("<Q", len(text) if length is None else length) + text + (data if values is None else values(data))
    )


NORM = "transformer.ln_f.weight"


def moved(header, by):
    header[NORM]["data_offsets"] = [offset + by for offset in header[NORM]["data_offsets"]]


FILES = {
    "cut off in a tensor": (lambda held: raw(held)[:-5], "was cut off or grew"),
    "cut off in the header": (lambda held: raw(held)[:200], "was cut off"),
    "cut off in its length": (lambda held: raw(held)[:5], "was cut off"),
    "nothing": (lambda held: b"", "was cut off"),
    "more than it says": (lambda held: raw(held) + b"12345", "was cut off or grew"),
    "a header of an exabyte": (lambda held: raw(held, length=1 << 60), "was cut off"),
    "a header too large": (
        lambda held: raw(held, lambda h: json.dumps(h).encode().ljust(5 << 20)),
        "5242880 bytes; at most",
    ),
    "overlapping": (lambda held: raw(held, lambda h: moved(h, -4)), f"and {NORM} lie over each other"),
    "a gap": (lambda held: raw(held, lambda h: moved(h, 4)), "belong to no tensor"),
    "an absurd shape": (lambda held: raw(held, lambda h: h[NORM].update(shape=[1 << 40, 1 << 40])), f"{NORM} of shape"),
    "an impossible shape": (lambda held: raw(held, lambda h: h[NORM].update(shape=[-16])), f"{NORM} has a shape"),
    "no numbers": (lambda held: raw(held, lambda h: h[NORM].update(shape="16")), f"{NORM} has a shape"),
    "many dims": (lambda held: raw(held, lambda h: h[NORM].update(shape=[1] * 60 + [16])), f"{NORM} has a shape"),
    "an unknown dtype": (lambda held: raw(held, lambda h: h[NORM].update(dtype="F99")), f"{NORM} has dtype F99"),
    "a place that is none": (lambda held: raw(held, lambda h: h[NORM].pop("data_offsets") and None), f"{NORM} lacks"),
    "backwards": (
        lambda held: raw(held, lambda h: h[NORM]["data_offsets"].reverse()),
        f"{NORM} has a shape or a place",
    ),
    "metadata of numbers": (
        lambda held: raw(held, lambda h: h.update(__metadata__={"a": 1})),
        "its __metadata__ is no",
    ),
    "no JSON": (lambda held: raw(held, lambda h: b"{" + b" " * 90), "its header is no JSON object"),
    "deep JSON": (lambda held: raw(held, lambda h: b'{"a":' + b"[" * 100000), "its header is no JSON object"),
    "a name twice": (
        lambda held: raw(held, lambda h: json.dumps(h).replace("transformer.ln_f.bias", NORM).encode()),
        f"{NORM} stands twice",
    ),
    "a name that moves the cursor": (lambda held: raw({"\x1b[2J": np.zeros(1, np.float32), **held}), r"'\x1b[2J'"),
    "integers": (lambda held: raw(held, lambda h: h[NORM].update(dtype="I32")), f"{NORM} is I32"),
    "the shape turned": (
        lambda held: raw(held, lambda h: h["transformer.wte.weight"]["shape"].reverse()),
        "transformer.wte.weight is (16, 61), the model wants (61, 16)",
    ),
    "a tensor too few": (lambda held: raw({k: v for k, v in held.items() if k != NORM}), f"missing in it: {NORM}"),
    "a tensor too many": (
        lambda held: raw({**held, "score.weight": np.zeros(2, np.float32)}),
        "unexpected in it: score.weight",
    ),
    "another head": (
        lambda held: raw({**held, "lm_head.weight": held["transformer.wte.weight"] + 1}),
        "lm_head.weight is not transformer.wte.weight",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_right_is_refused_by_name(tmp_path, name):
    make, words = FILES[name]
    folder = hf_models.write(tmp_path / "theirs", hf_models.GPT2, held := hf_models.tensors(hf_models.GPT2))
    (folder / "model.safetensors").write_bytes(make(held))
    said = refused("import", folder, tmp_path / "run")
    assert words in said, said
    assert "theirs" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def indexed(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_index_names_files_beside_it_only(tmp_path):
    config, held = hf_models.LLAMA, hf_models.tensors(hf_models.LLAMA)
    save_file(held, tmp_path / "outside.safetensors")
    for number, (file, words) in enumerate(
        (
            ("../outside.safetensors", "it must be the name of a file beside the index"),
            (str(tmp_path / "outside.safetensors"), "it must be the name of a file beside the index"),
            ("..", "it must be the name"),
            (7, "it must be the name"),
            ("model.bin", "it must be the name"),
            ("model-00009-of-00009.safetensors", "lacks model-00009-of-00009.safetensors"),
            ("model-00002-of-00002.safetensors", "should be in model-00002-of-00002.safetensors, which lacks it"),
        )
    ):
        folder = hf_models.write(tmp_path / f"{number}", config, held, shards=2)
        indexed(folder, lambda mapped, file=file: mapped.update({"lm_head.weight": file}))
        assert words in refused("import", folder, tmp_path / "run")
    folder = hf_models.write(tmp_path / "linked", config, held, shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert "is a link to" in refused("import", folder, tmp_path / "run")
    folder = hf_models.write(tmp_path / "twice", config, held, shards=2)
    save_file(held, folder / "model-00001-of-00002.safetensors")
    assert "is both in" in refused("import", folder, tmp_path / "run")
    folder = hf_models.write(tmp_path / "pickled", config, held)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickles (*.bin, *.pth) are not read" in refused("import", folder, tmp_path / "run")
    os.mkfifo(folder / "model.safetensors")
    assert "not a regular file" in refused("import", folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_cache_of_the_hub_is_made_of_links(tmp_path):
    held = hf_models.tensors(hf_models.GPT2)
    home = tmp_path / "models--x" / "snapshots" / "abc"
    hf_models.write(home, hf_models.GPT2, held)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(list(home.iterdir())):
        path.rename(blobs / f"{number}")
        path.symlink_to(f"../../blobs/{number}")
    assert tool("import", home, tmp_path / "run") == 0
    (tmp_path / "other").mkdir()
    (blobs / "0").rename(tmp_path / "other" / "0")
    path = next(path for path in home.iterdir() if not path.exists())
    path.unlink()
    path.symlink_to(tmp_path / "other" / "0")
    assert "is a link to" in refused("import", home, tmp_path / "second")


def test_weights_of_another_model_do_not_fit(tmp_path):
    imported(tmp_path, hf_models.GPT2)

    def try_it():
        source = find(str(tmp_path / "run"), world())
        _, numbers = model_in(source)
        from dataclasses import replace

        check_fit(build(replace(numbers, hidden=32), Mesh(world(), tp=2)), source, world())

    with pytest.raises(CheckpointError, match=r"mlp\.up\.weight is \(16, 64\), the model wants \(16, 32\)"):
        LocalWorld(2).run(try_it)
