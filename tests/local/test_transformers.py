"""Beside transformers itself: its files are read, ours are read by it, and the logits are the same."""

import functools
import json

import hf_models
import numpy as np
import pytest
from test_interchange import WORDS, assert_same_files, model_of, tool

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

NAMES = {"gpt2": "GPT2", "llama": "Llama", "mistral": "Mistral"}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def made(config, dtype):
    """A model of theirs, its norms and biases not what they start as."""
    kind = NAMES[config["model_type"]]
    settings = getattr(transformers, f"{kind}Config")(**{**config, "initializer_range": 0.3})
    torch.manual_seed(3)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(settings).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def in_float64(model):
    """transformers works out the norms and the angles of a Llama in float32, also where all else is float64."""

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def angles(speeds, x, position_ids):
        both = torch.cat(2 * [position_ids[..., None].double() * speeds], -1)
        return both.cos(), both.sin()

    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = norm.__get__(part)
        if type(part).__name__.endswith("RotaryEmbedding"):
            held = dict(model.config.rope_parameters)
            sizes = {"hidden_size": 2 * part.inv_freq.numel(), "num_attention_heads": 1}
            exact = hf_models.speeds({**held, **sizes, "rope_parameters": held})
            assert np.allclose(exact, part.inv_freq.numpy(), rtol=1e-6)

            part.forward = functools.partial(angles, torch.tensor(exact))
    return model


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-9)])
@pytest.mark.parametrize("name", hf_models.CASES)
def test_logits_are_those_of_transformers_and_the_files_go_both_ways(tmp_path, name, dtype, bound):
    config = hf_models.CASES[name]
    model = made(config, dtype)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="6KB" if "groups" in name else "5GB")
    assert tool("import", tmp_path / "theirs", tmp_path / "run") == 0
    ids = np.random.default_rng(0).integers(0, 61, (3, 12))
    if dtype == "float64":
        in_float64(model)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    assert np.abs(model_of(tmp_path / "run", dtype).logits(ids).data - expected).max() < bound

    assert (
        tool("export", tmp_path / "run", tmp_path / "ours", "--shard-size", "6KiB" if "groups" in name else "5GiB") == 0
    )
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours", dtype="auto")
    state = again.state_dict()
    for key, values in model.state_dict().items():
        assert values.dtype == state[key].dtype, key
        assert torch.equal(values, state[key]), key
    one, other = model.config.to_dict(), again.config.to_dict()
    unlike = {key for key in {**one, **other} if one.get(key) != other.get(key)}
    assert unlike <= {"initializer_range", "_name_or_path", "mlp_bias", "attention_bias", "dtype"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_go_both_ways(tmp_path, dtype):
    model = made(hf_models.CASES["llama-groups"], dtype)
    model.save_pretrained(tmp_path / "theirs")
    assert tool("import", tmp_path / "theirs", tmp_path / "run") == 0
    assert tool("export", tmp_path / "run", tmp_path / "ours") == 0
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")


def test_the_tokenizer_is_loaded_by_transformers(tmp_path):
    config = hf_models.GPT2
    folder = hf_models.write(tmp_path / "theirs", config, hf_models.tensors(config))
    (folder / "tokenizer.json").write_text(json.dumps(WORDS))
    assert tool("import", folder, tmp_path / "run") == 0
    assert tool("export", tmp_path / "run", tmp_path / "ours") == 0
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert words("abba")["input_ids"] == [2, 1, 0]
    assert words.model_max_length == 12
