"""Models with Hugging Face's names: plain files, compressed ones and both, into any sharding."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from tightwire.convert import compress_file

torch = pytest.importorskip("torch")
if not pytest.importorskip("torch.distributed").is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)
safetensors = pytest.importorskip("safetensors.torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # noqa: E402
from torch.distributed.checkpoint.planner import LoadPlan  # noqa: E402

INDEX = "model.safetensors.index.json"
State = dict[str, Any]


class Rows(DefaultLoadPlanner):  # type: ignore[misc]
    """Asks for some rows and columns of each matrix alone, as a shard does."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if len(item.lengths) == 2:
                object.__setattr__(item, "storage_offsets", torch.Size((3, 2)))
                object.__setattr__(item, "lengths", torch.Size((4, 5)))
        return plan

    def resolve_tensor(self, read_item: Any) -> Any:
        x = self.lookup_tensor(read_item.dest_index)
        return x[:4, :5] if len(read_item.lengths) == 2 else x


def state() -> State:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(60, 50, generator=generator)
    found = {
        "bfloat16": normal.bfloat16(),
        "float32": normal * 2,
        "float16": normal.half().T.contiguous(),
        "float8": normal.to(torch.float8_e4m3fn),
        "bool": normal > 0,
        "int64": torch.arange(7),
        "scalar": torch.tensor(0.5),
        "empty": torch.zeros(0, 3),
    }
    return found


def write(kind: str, folder: Path) -> None:
    """The state in two files, both plain, both compressed, or one of each."""
    tensors, weight_map = state(), dict[str, str]()
    for number, names in enumerate((list(tensors)[:4], list(tensors)[4:])):
        name = f"model-{number}.safetensors"
        safetensors.save_file({n: tensors[n] for n in names}, folder / name)
        if kind == "compressed" or (kind == "both" and number):
            packed = name.replace(".safetensors", ".tw.safetensors")
            compress_file(folder / name, folder / packed)
            (folder / name).unlink()
            name = packed
        weight_map |= dict.fromkeys(names, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(tensors: State, path: Path, **options: Any) -> State:
    reader = tw.dcp.HuggingFaceReader(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to")
        dcp.load(tensors, storage_reader=reader, no_dist=True, **options)
    return tensors


def blank() -> State:
    return {name: torch.ones_like(x) for name, x in state().items()}


def same(a: Any, b: Any) -> bool:
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(*bits))


@pytest.mark.parametrize("kind", ["plain", "both", "compressed"])
def test_files_of_any_kind_are_loaded(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path)
    found = load(blank(), tmp_path)
    assert [name for name, x in state().items() if not same(found[name], x)] == []
    # Another dtype and layout of the state.
    other = {"float32": torch.ones(50, 60, dtype=torch.float64).T}
    assert torch.equal(load(other, tmp_path)["float32"], state()["float32"].double())


@pytest.mark.parametrize("kind", ["plain", "both"])
def test_some_rows_are_loaded(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path)
    found = load(blank(), tmp_path, planner=Rows())
    for name, x in state().items():
        if name not in ("int64", "scalar", "empty"):
            assert same(found[name][:4, :5], x[3:7, 2:7]), name
            assert same(found[name][4:], torch.ones_like(x)[4:]), name


def test_one_plain_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.save_file(state(), path)
    for source in (path, tmp_path):
        found = load(blank(), source)
        assert all(same(found[name], x) for name, x in state().items())


def test_plain_files_that_are_cut_short_or_too_large_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.save_file(state(), path)
    data = path.read_bytes()
    with pytest.raises(tw.FormatError, match="limit_exceeded"):
        tw.dcp.HuggingFaceReader(path, max_nbytes=1000).read_metadata()
    for size in (0, 7, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        tensors = blank()
        with pytest.raises(CheckpointException, match=r"model\.safetensors: "):
            load(tensors, path)
        assert all(same(tensors[name], x) for name, x in blank().items())


def test_a_plain_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.save_file(state(), path)
    reader = tw.dcp.HuggingFaceReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(blank(), metadata, True)
    plan = planner.create_local_plan()
    safetensors.save_file(state() | {"int64": torch.arange(8)}, path)
    with pytest.raises(tw.FormatError, match="'int64' changed while it was read"):
        reader.read_data(plan, planner)
    tw.save_file(state(), path)
    with pytest.raises(tw.FormatError, match="changed while it was read"):
        reader.read_data(plan, planner)


def test_pairs_of_4_bit_floats_in_plain_files(tmp_path: Path) -> None:
    kind = getattr(torch, "float4_e2m1fn_x2", None)
    if kind is None:
        pytest.skip("this PyTorch has no 4-bit floats")
    data = torch.arange(10 * 8, dtype=torch.uint8).reshape(10, 8)
    header = b'{"x":{"dtype":"F4","shape":[10,16],"data_offsets":[0,80]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data.numpy().tobytes())
    found = load({"x": torch.zeros_like(data).view(kind)}, path)
    assert torch.equal(found["x"].view(torch.uint8), data)
    part = load({"x": torch.zeros_like(data).view(kind)}, path, planner=Rows())
    assert torch.equal(part["x"].view(torch.uint8)[:4, :5], data[3:7, 2:7])


@pytest.mark.parametrize("names", [("model", "model"), ("b", "a")])
def test_both_kinds_need_an_index(tmp_path: Path, names: tuple[str, str]) -> None:
    packed = tmp_path / f"{names[0]}.tw.safetensors"
    plain = tmp_path / f"{names[1]}.safetensors"
    safetensors.save_file(state(), plain)
    compress_file(plain, packed)
    with pytest.raises(CheckpointException, match=rf"{packed.name} and {plain.name}.*an index"):
        load(blank(), tmp_path)
    assert same(load(blank(), packed)["float32"], state()["float32"])
    packed.unlink()
    assert same(load(blank(), tmp_path)["float32"], state()["float32"])
