"""transformers loads compressed directories: every parameter bit for bit, or an error that names
what is wrong.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from support import needs
from tightwire.convert import compress_file

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, needs("transformers", (5, 21))]

INDEX = "model.safetensors.index.json"

#: What makes each model small.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
}
#: Experts are one parameter in memory and many tensors in the files.
SIZES["mixtral"] = SIZES["llama"] | {"num_local_experts": 4}


@pytest.fixture(scope="module")
def hf() -> Iterator[Any]:
    """The adapter. Importing transformers takes seconds, so tests of other modules need not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield importlib.import_module("tightwire.adapters.weights.hugging_face")


def make_model(kind: str, **settings: Any) -> Any:
    """A small model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **(SIZES[kind] | settings))
    return AutoModelForCausalLM.from_config(config)


def load(hf: Any, path: Path, **arguments: Any) -> Any:
    """The model of a compressed directory."""
    from transformers import AutoModelForCausalLM

    config = hf.TightwireConfig()
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **arguments)


def compress_directory(source: Path, target: Path) -> None:
    """Compress a model's files and name them in an index."""
    target.mkdir()
    weight_map: dict[str, str] = {}
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            file = target / f"{path.stem}.tw.safetensors"
            names = [report.name for report in compress_file(path, file)]
            weight_map |= dict.fromkeys(names, file.name)
        elif path.name != INDEX:
            shutil.copy(path, target)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def saved(model: Any, folder: Path, **arguments: Any) -> Path:
    """A compressed directory of the model, beside a plain one named "plain"."""
    model.save_pretrained(folder / "plain", **arguments)
    compress_directory(folder / "plain", folder / "packed")
    return folder / "packed"


def read_state(path: Path) -> dict[str, Any]:
    """Every tensor of a compressed directory."""
    state: dict[str, Any] = {}
    for file in path.glob("*.tw.safetensors"):
        state |= tw.load_file(file, like="torch")
    return state


def edit_config(path: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | fields
    kept = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))


def assert_same(loaded: Any, model: Any, dtype: Any = None) -> None:
    """Both hold the same parameters and buffers, bit for bit, in `dtype` if it is given."""
    expected, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        wanted = tensor.to(dtype)
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name].view(torch.uint8), wanted.view(torch.uint8)), name


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_every_parameter_arrives(hf: Any, tmp_path: Path, kind: str, shard: str) -> None:
    model = make_model(kind)
    path = saved(model, tmp_path, max_shard_size=shard)
    assert (len(list(path.glob("*.tw.safetensors"))) > 1) == (shard == "20KB")
    loaded, info = load(hf, path, output_loading_info=True)
    assert not any(info.values())
    assert_same(loaded, model)
    assert all(x.requires_grad for x in loaded.parameters())


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_dtypes(hf: Any, tmp_path: Path, kind: str, stored: str, dtype: str) -> None:
    model = make_model(kind).to(getattr(torch, stored))
    path = saved(model, tmp_path)
    assert_same(load(hf, path, dtype=dtype), model, getattr(torch, dtype))


def test_tied_embeddings_stay_tied(hf: Any, tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    loaded = load(hf, saved(model, tmp_path))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(loaded, model)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"model": "cpu", "lm_head": "cpu"}])
def test_device_maps(hf: Any, tmp_path: Path, device_map: Any) -> None:
    model = make_model("mixtral")
    assert_same(load(hf, saved(model, tmp_path), device_map=device_map), model)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SIZES)
def test_loading_to_a_gpu(hf: Any, tmp_path: Path, kind: str) -> None:
    model = make_model(kind)
    loaded = load(hf, saved(model, tmp_path), device_map="cuda")
    assert {x.device.type for x in loaded.state_dict().values()} == {"cuda"}
    assert_same(loaded.to("cpu"), model)


def test_files_read_into_memory(hf: Any, tmp_path: Path) -> None:
    model = make_model("llama")
    assert_same(load(hf, saved(model, tmp_path), disable_mmap=True), model)


def test_base_model_of_a_causal_model(hf: Any, tmp_path: Path) -> None:
    from transformers import AutoModel

    model = make_model("llama")
    path = saved(model, tmp_path)
    loaded = AutoModel.from_pretrained(path, quantization_config=hf.TightwireConfig())
    assert_same(loaded, model.model)


def test_buffers_of_other_types(hf: Any, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    class WithBuffers(GPT2LMHeadModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("table", torch.arange(700, dtype=torch.int64))
            self.register_buffer("codes", torch.arange(700).to(torch.uint8))
            self.register_buffer("few", torch.tensor([True, False]))

        def _init_weights(self, module: Any) -> None:
            """Nothing: what is not loaded stays empty."""

    model = WithBuffers(GPT2Config(**SIZES["gpt2"]))
    path = saved(model, tmp_path)
    config = hf.TightwireConfig()
    loaded = WithBuffers.from_pretrained(path, quantization_config=config, dtype=torch.float32)
    assert_same(loaded, model)


def test_config_json_names_the_method(hf: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model("llama")
    path = saved(model, tmp_path)
    edit_config(path, quantization_config={"quant_method": "tightwire"})
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert_same(loaded, model)
    assert not hasattr(loaded.config, "quantization_config")


@pytest.mark.parametrize("kind", SIZES)
def test_the_loaded_model_is_an_ordinary_one(hf: Any, tmp_path: Path, kind: str) -> None:
    loaded = load(hf, saved(make_model(kind), tmp_path))
    assert not loaded.is_quantized
    assert not hasattr(loaded, "hf_quantizer")
    loaded.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in (tmp_path / "again" / "config.json").read_text()
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@pytest.mark.parametrize(
    "end", ["up_proj.weight", "gate.weight", "experts.2.w3.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("deactivate", ["0", "1"])
def test_damage_is_named(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, deactivate: str
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", deactivate)
    model = make_model("llama" if end == "up_proj.weight" else "mixtral")
    torch.nn.init.normal_(model.model.norm.weight)
    path = saved(model, tmp_path)
    (file,) = path.glob("*.tw.safetensors")
    with tw.open(file) as opened:
        name = next(name for name in opened if name.endswith(end))
        stored = opened.buffer(name).tobytes()
    data = bytearray(file.read_bytes())
    data[data.find(stored) + len(stored) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(tw.FormatError, match=name) as caught:
        load(hf, path)
    assert caught.value.reason == "checksum_mismatch"


def test_every_file_is_a_compressed_one(hf: Any, tmp_path: Path) -> None:
    path = saved(make_model("llama"), tmp_path, max_shard_size="20KB")
    file = min(path.glob("*.tw.safetensors"))
    shutil.copy(tmp_path / "plain" / file.name.replace(".tw.", "."), file)
    with pytest.raises(tw.FormatError, match=file.name):
        load(hf, path)


def test_arguments_that_cannot_be_served(hf: Any, tmp_path: Path) -> None:
    path = saved(make_model("llama"), tmp_path)
    with pytest.raises(ValueError, match="offloads to disk"):
        load(hf, path, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path)
    with pytest.raises(ValueError, match="state_dict="):
        load(hf, path, key_mapping={r"^model\.norm": "elsewhere"})
    with pytest.raises(ValueError, match="'other'; allowed: 'tightwire'"):
        hf.TightwireConfig(quant_method="other")


def test_distributed_loading_is_refused(hf: Any) -> None:
    model = make_model("llama")
    model.config.distributed_config = {"tp_size": 2}
    quantizer = hf.TightwireQuantizer(hf.TightwireConfig())
    with pytest.raises(ValueError, match="state_dict="):
        quantizer.preprocess_model(model, checkpoint_files=["model.tw.safetensors"])


def test_a_config_without_dtype(hf: Any, tmp_path: Path) -> None:
    # The dtype of tensors that are stored as they are, which are small, would be found.
    model = make_model("llama", hidden_size=1024, head_dim=8, num_hidden_layers=1)
    path = saved(model, tmp_path)
    edit_config(path, dtype=None)
    with pytest.raises(ValueError, match="pass dtype="):
        load(hf, path)
    assert_same(load(hf, path, dtype=torch.float32), model)


def test_quantized_models_keep_their_own_config(hf: Any, tmp_path: Path) -> None:
    path = saved(make_model("llama"), tmp_path)
    edit_config(path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="FineGrainedFP8Config"):
        load(hf, path)


def test_an_unregistered_method_loads_nothing(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import auto

    path = saved(make_model("llama"), tmp_path)
    edit_config(path, quantization_config={"quant_method": "tightwire"})
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "tightwire")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("module", [True, False])
def test_an_older_transformers(hf: Any, monkeypatch: pytest.MonkeyPatch, module: bool) -> None:
    if module:
        monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    else:
        monkeypatch.delattr("transformers.quantizers.HfQuantizer.get_new_dtype")
    spec = importlib.util.spec_from_file_location("older", hf.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"needs transformers>=5\.21"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("named", [True, False])
def test_loading_by_a_state_dict(hf: Any, tmp_path: Path, kind: str, named: bool) -> None:
    from transformers import AutoConfig

    model = make_model(kind)
    path = saved(model, tmp_path, max_shard_size="20KB")
    if named:
        edit_config(path, quantization_config={"quant_method": "tightwire"})
    config, state = AutoConfig.from_pretrained(path), read_state(path)
    loaded = type(model).from_pretrained(None, config=config, state_dict=state)
    assert_same(loaded, model)


@pytest.mark.parametrize("tied", [True, False])
def test_loading_by_load_state_dict(hf: Any, tmp_path: Path, tied: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = make_model("llama", tie_word_embeddings=tied)
    path = saved(model, tmp_path)
    loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    missing, unexpected = loaded.load_state_dict(read_state(path), strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    loaded.tie_weights()
    assert_same(loaded, model)
