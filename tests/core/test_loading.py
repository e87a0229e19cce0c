"""Files into memory that is there. Without a GPU the interpreter runs its kernels on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw

torch = pytest.importorskip("torch")

from tightwire import loading, pinned  # noqa: E402
from tightwire.contents import Contents  # noqa: E402

PLACES = ["host", "kernels", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where tensors are: on the host, there for kernels that the interpreter runs, or on a GPU."""
    if request.param == "host":
        return torch.device("cpu")
    gpu_files = pytest.importorskip("tightwire.gpu_files")
    monkeypatch.setattr(gpu_files, "WINDOW_NBYTES", 20_000)
    if request.param == "cuda":
        return torch.device("cuda", 0)
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    monkeypatch.setattr(
        loading,
        "_gpu_of",
        lambda info: gpu_files.place_of(info) if info.library == "torch" else None,
    )
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def slots_come_back() -> Iterator[None]:
    yield
    for slots in pinned._pools.values():
        assert len(slots._free) == slots._made


def state() -> dict[str, Any]:
    """Tensors that are decoded in batches, alone and from plain bytes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(3, 4096, generator=generator).bfloat16(),
        "more": torch.randn(3, 4096, generator=generator).bfloat16(),
        "float32": torch.randn(3000, generator=generator),
        "float64": torch.randn(300, generator=generator).double(),
        "ids": torch.arange(3000),
        "mask": torch.rand(777, generator=generator) > 0.5,
        "small": torch.randn(7, generator=generator),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }


def like(x: Any, device: Any, **changes: Any) -> Any:
    """Memory for a tensor, full of ones."""
    return torch.ones(x.shape, dtype=changes.get("dtype", x.dtype), device=device)


def equal(x: Any, y: Any) -> bool:
    return bool(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.detach().cpu(), y))


def test_out_of_the_same_kind_is_filled(device: Any, tmp_path: Path) -> None:
    tensors = state()
    tw.save_file(tensors, tmp_path / "x")
    out = {name: like(x, device) for name, x in reversed(tensors.items())}
    found = tw.load_file(tmp_path / "x", out=out)
    assert list(found) == list(tensors)
    for name, x in tensors.items():
        assert found[name] is out[name]
        assert equal(out[name], x), name


def test_straight_means_no_second_copy(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contiguous views of the right dtype get no temporary tensor, wherever they start."""
    tensors = {k: x for k, x in state().items() if k in ("weight", "more", "float32", "ids")}
    tw.save_file(tensors, tmp_path / "x")
    rooms = {k: torch.ones(x.numel() + 9, dtype=x.dtype, device=device) for k, x in tensors.items()}
    out = {k: rooms[k][i : i - 9].view(x.shape) for i, (k, x) in enumerate(tensors.items(), 1)}

    def refused(*args: Any, **options: Any) -> Any:
        raise AssertionError("a temporary tensor")

    monkeypatch.setattr(Contents, "tensor", refused)
    monkeypatch.setattr(torch.Tensor, "copy_", _bytes_only(torch.Tensor.copy_, rooms.values()))
    tw.load_file(tmp_path / "x", out=out)
    for i, (k, x) in enumerate(tensors.items(), 1):
        assert equal(out[k], x)
        assert (rooms[k][:i] == 1).all()
        assert (rooms[k][i - 9 :] == 1).all()


def _bytes_only(copy: Any, rooms: Iterable[Any]) -> Any:
    """`copy`, which is refused if it copies elements, and not bytes, into some of `rooms`."""
    spans = [(room.data_ptr(), room.data_ptr() + room.nbytes) for room in rooms]

    def copied(self: Any, source: Any, *args: Any, **options: Any) -> Any:
        inside = any(start <= self.data_ptr() < stop for start, stop in spans)
        assert self.dtype == torch.uint8 or not inside, "a copy of decoded elements"
        return copy(self, source, *args, **options)

    return copied


def test_out_of_other_kinds_is_converted(device: Any, tmp_path: Path) -> None:
    tensors = state()
    other = torch.device("cpu")
    out = {
        "weight": like(tensors["weight"], device, dtype=torch.float32),
        "more": torch.ones(4096, 3, dtype=torch.bfloat16, device=device).t(),
        "float32": torch.ones(6000, dtype=torch.float16, device=device)[::2],
        "float64": np.ones(300, ">f4"),
        "ids": np.ones((3000, 2), np.int32)[:, 0],
        "mask": like(tensors["mask"], other, dtype=torch.uint8),
        "small": like(tensors["small"], device, dtype=torch.float64),
        "scalar": np.ones((), np.float32),
        "empty": np.ones((0, 4), ml_dtypes.bfloat16),
    }
    tensors["column"] = torch.randn(1, 600)
    out["column"] = torch.from_numpy(np.ones(600, np.float32)[None])
    tw.save_file(tensors, tmp_path / "x")
    found = tw.load_file(tmp_path / "x", out=out)
    for name, x in tensors.items():
        if isinstance(out[name], np.ndarray):
            expected = x.numpy().astype(out[name].dtype)
            assert np.array_equal(found[name], expected), name
        else:
            assert equal(found[name], x.to(out[name].dtype)), name
        assert found[name] is out[name]


def test_numpy_gets_types_that_it_has_no_name_for(tmp_path: Path) -> None:
    tensors = state()
    tw.save_file(tensors, tmp_path / "x")
    out = {
        k: np.ones(x.shape, tw.codec("raw").plan(x.shape, str(x.dtype)[6:]).dtype.numpy)
        for k, x in tensors.items()
    }
    tw.load_file(tmp_path / "x", out=out)
    for name, x in tw.load_file(tmp_path / "x").items():
        assert out[name].tobytes() == x.tobytes(), name


def test_tied_names(device: Any, tmp_path: Path) -> None:
    """One memory or several, of one dtype or not: all of them are right."""
    x = torch.randn(5000).bfloat16()
    tw.save_file({"a": x, "b": x, "c": x, "d": x}, tmp_path / "x")
    one = like(x, device)
    out = {"a": one, "b": one, "c": like(x, device), "d": like(x, device, dtype=torch.float32)}
    tw.load_file(tmp_path / "x", out=out)
    assert equal(one, x)
    assert equal(out["c"], x)
    assert equal(out["d"], x.float())
    lossy = {k: like(x, device) for k in "bcd"} | {"a": like(x, device, dtype=torch.float8_e5m2)}
    tw.load_file(tmp_path / "x", out=lossy)
    assert all(equal(lossy[k], x) for k in "bcd")
    assert equal(lossy["a"].float(), x.to(torch.float8_e5m2).float())


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here")
def test_arrays_of_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pipeline for each device; all heads are read before the first one starts."""
    gpu_files = pytest.importorskip("tightwire.gpu_files")
    tensors = state()
    devices = {"torch.bfloat16": torch.device("cpu"), "torch.float32": torch.device("cpu", 0)}
    tw.save_file(tensors, tmp_path / "x")
    out = {name: like(x, "cpu") for name, x in tensors.items()}
    steps: list[Any] = []

    def logged(function: Any) -> Any:
        def call(*args: Any) -> Any:
            steps.append(args[-1] if function.__name__ == "load_into" else function.__name__)
            return function(*args)

        return call

    monkeypatch.setattr(loading, "_gpu_of", lambda info: devices.get(f"torch.{info.dtype.name}"))
    for name in ("read_heads", "load_into"):
        monkeypatch.setattr(gpu_files, name, logged(getattr(gpu_files, name)))
    tw.load_file(tmp_path / "x", out=out)
    assert all(equal(out[name], x) for name, x in tensors.items())
    assert steps == ["read_heads", "read_heads", *devices.values()]


@pytest.mark.gpu
def test_arrays_of_all_gpus_and_libraries(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    count = torch.cuda.device_count()
    x = torch.randn(50_000)
    tensors = {str(i): x + i for i in range(count + 4)}
    tw.save_file(tensors, tmp_path / "x")
    out: dict[str, Any] = {str(i): torch.ones(50_000, device=f"cuda:{i}") for i in range(count)}
    out |= {str(count): torch.ones(50_000), str(count + 1): np.ones(50_000, np.float32)}
    out[str(count + 2)] = cupy.ones(50_000, np.float32)
    out[str(count + 3)] = cupy.ones((50_000, 2), np.float64)[:, 1]
    tw.load_file(tmp_path / "x", out=out)
    for name, x in tensors.items():
        found = out[name].get() if isinstance(out[name], cupy.ndarray) else out[name]
        assert torch.equal(torch.as_tensor(found).cpu().float(), x)


def test_two_tensors_for_one_memory_do_not_mix(device: Any, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(20_000).bfloat16(), "b": torch.randn(20_000).bfloat16()}
    tw.save_file(tensors, tmp_path / "x")
    one = like(tensors["a"], device)
    tw.load_file(tmp_path / "x", out={"a": one, "b": one})
    assert any(equal(one, x) for x in tensors.values())


def test_names_of_a_nested_state(device: Any, tmp_path: Path) -> None:
    tree: Any = {"model": {"w": torch.randn(4000)}, "steps": [torch.arange(900), 3]}
    tw.save_file(tree, tmp_path / "x")
    out = {
        "model.w": torch.ones(4000, device=device),
        "steps.0": torch.ones(900, device=device).long(),
    }
    assert tw.load_file(tmp_path / "x", out=out) == out
    assert equal(out["model.w"], tree["model"]["w"])
    assert equal(out["steps.0"], tree["steps"][0])


FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)


@pytest.mark.skipif(FLOAT4 is None, reason="this PyTorch has no pairs of 4-bit floats")
def test_pairs_of_small_floats(device: Any, tmp_path: Path) -> None:
    x = torch.randint(0, 256, (6, 8), dtype=torch.uint8).view(FLOAT4)
    tw.save_file({"x": x, "y": torch.zeros(6, 8)}, tmp_path / "x")
    y = torch.ones(6, 8, device=device)
    pairs = torch.zeros(6, 8, dtype=torch.uint8, device=device).view(FLOAT4)
    flat = torch.zeros(48, dtype=torch.uint8, device=device)
    for out in (pairs, flat):
        tw.load_file(tmp_path / "x", out={"x": out, "y": y})
        assert torch.equal(out.view(torch.uint8).cpu().reshape(-1), x.view(torch.uint8).reshape(-1))
    for bad in ({"x": y, "y": y}, {"x": flat, "y": pairs}):
        with pytest.raises(TypeError, match=r"out\['[xy]'\] is .* not converted"):
            tw.load_file(tmp_path / "x", out=bad)


def bad_calls() -> dict[str, Any]:
    good = {"a": torch.ones(3000), "b": torch.ones(40)}
    meta = torch.ones(3000, device="meta")
    frozen = np.ones(3000, np.float32)
    frozen.flags.writeable = False
    return {
        "a name less": ({"a": good["a"]}, ValueError, r"out lacks 'b'"),
        "a name more": (good | {"c": 1, "d": 2}, ValueError, r"the file lacks 'c', 'd'"),
        "many": ({str(i): 1 for i in range(9)}, ValueError, r"'4' and 4 more"),
        "shape": (good | {"b": torch.ones(41)}, ValueError, r"out\['b'\] has shape \[41\].*\[40\]"),
        "other shape": (good | {"a": torch.ones(1, 3000)}, ValueError, r"\[1, 3000\].*\[3000\]"),
        "list": ([torch.ones(2)], TypeError, "out is a list"),
        "no array": (good | {"b": 1}, TypeError, r"out\['b'\]: Expected an array, got int"),
        "meta": (good | {"a": meta}, TypeError, r"out\['a'\]: a meta tensor"),
        "read-only": (good | {"a": frozen}, ValueError, r"out\['a'\] is read-only"),
        "grad": (good | {"a": torch.ones(3000, requires_grad=True)}, ValueError, "requires grad"),
        "broadcast": (good | {"a": torch.ones(1).expand(3000)}, ValueError, "in one place"),
        "scalar": (good | {"b": np.float32(1)}, ValueError, "scalar"),
    }


@pytest.mark.parametrize("what", bad_calls())
def test_nothing_is_written_by_a_bad_call(what: str, device: Any, tmp_path: Path) -> None:
    tw.save_file({"a": torch.randn(3000), "b": torch.randn(40)}, tmp_path / "x")
    out, error, match = bad_calls()[what]
    if isinstance(out, dict):
        movable = {k: x for k, x in out.items() if type(x) is torch.Tensor and not x.is_meta}
        moved = {k: x.to(device) for k, x in movable.items() if x.is_contiguous() and x.is_leaf}
        out = out | {k: x for k, x in moved.items() if not x.requires_grad}
    with pytest.raises(error, match=match):
        tw.load_file(tmp_path / "x", out=out)
    for x in out.values() if isinstance(out, dict) else out:
        if isinstance(x, np.ndarray) or (isinstance(x, torch.Tensor) and not x.is_meta):
            assert bool((x == 1).all())


def test_like_or_out(tmp_path: Path) -> None:
    tw.save_file({"a": torch.randn(3000)}, tmp_path / "x")
    with pytest.raises(ValueError, match="like and out"):
        tw.load_file(tmp_path / "x", like="torch", out={"a": torch.ones(3000)})
    assert isinstance(tw.load_file(tmp_path / "x", like=None)["a"], np.ndarray)


def test_a_bad_head_is_found_before_anything_is_written(device: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    tw.save_file({"a": torch.randn(3000), "b": torch.randn(3000)}, path)
    with tw.open(path) as file:
        at = path.read_bytes().index(file.buffer("b").tobytes())
    data = bytearray(path.read_bytes())
    data[at + 40] ^= 1
    path.write_bytes(data)
    out = {name: torch.ones(3000, device=device) for name in "ab"}
    with pytest.raises(tw.FormatError, match=f"{path}: tensor 'b'"):
        tw.load_file(path, out=out)
    assert (out["a"] == 1).all()


def test_autograd_sees_the_write(device: Any, tmp_path: Path) -> None:
    tw.save_file({"a": torch.randn(3000)}, tmp_path / "x")
    out = torch.ones(3000, device=device)
    factor = torch.ones(3000, device=device, requires_grad=True)
    loss = (out * factor).sum()
    tw.load_file(tmp_path / "x", out={"a": out})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    leaf = torch.ones(3000, device=device, requires_grad=True)
    with torch.no_grad():
        tw.load_file(tmp_path / "x", out={"a": leaf})
    assert leaf.detach().cpu().numpy().tobytes() == tw.load_file(tmp_path / "x")["a"].tobytes()


def test_tensors_of_inference_mode(device: Any, tmp_path: Path) -> None:
    """They are written to outside of it too; the version of other tensors still counts."""
    tensors = state()
    tw.save_file(tensors, tmp_path / "x")
    with torch.inference_mode():
        out = {name: like(x, device) for name, x in tensors.items()}
        out["weight"] = out["weight"].float()
    out["small"] = like(tensors["small"], device)
    out["more"] = like(tensors["more"], device, dtype=torch.float32)
    versions = {name: out[name]._version for name in ("small", "more")}
    tw.load_file(tmp_path / "x", out=out)
    for name, x in tensors.items():
        assert equal(out[name], x.to(out[name].dtype))
    assert all(out[name]._version > version for name, version in versions.items())


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Parameters, persistent and other buffers, and an embedding tied to the head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.head = torch.nn.Linear(32, 40, bias=False)
        self.register_buffer("table", torch.randn(300), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def same_state(model: Any, state: dict[str, Any]) -> bool:
    return all(equal(x, state[name]) for name, x in model.state_dict().items())


def test_load_into_a_model(device: Any, tmp_path: Path) -> None:
    model, other = Net(), Net().to(device)
    tw.save_file(model.state_dict(), tmp_path / "x.tw.safetensors")
    before = {name: x.data_ptr() for name, x in other.named_parameters()}
    table = other.table.clone()
    assert tw.load_into(other, tmp_path / "x.tw.safetensors") == ([], [])
    assert same_state(other, model.state_dict())
    assert {name: x.data_ptr() for name, x in other.named_parameters()} == before
    assert torch.equal(other.table, table)
    assert other.embed.weight.requires_grad
    assert other.embed.weight.grad_fn is None


def test_load_into_other_dtypes(device: Any, tmp_path: Path) -> None:
    model, other = Net(), Net().to(device)
    other.embed.half()
    tw.save_file(model.state_dict(), tmp_path / "x")
    tw.load_into(other, tmp_path / "x")
    assert equal(other.head.weight, model.head.weight.half())
    assert equal(other.norm.running_var, model.norm.running_var)


def test_load_into_from_a_directory(device: Any, tmp_path: Path) -> None:
    model, other = Net(tied=False), Net(tied=False).to(device)
    parts: list[dict[str, Any]] = [{}, {}]
    for i, (name, x) in enumerate(model.state_dict().items()):
        parts[i % 2][name] = x
    for i, part in enumerate(parts):
        tw.save_file(part, tmp_path / f"model-{i}.tw.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert tw.load_into(other, tmp_path) == ([], [])
    assert same_state(other, model.state_dict())
    tw.save_file({"head.weight": model.head.weight.detach()}, tmp_path / "z.tw.safetensors")
    with pytest.raises(tw.FormatError, match=r"'head.weight' is in .* and in") as error:
        tw.load_into(other, tmp_path)
    assert error.value.reason == "bad_container"
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no"):
        tw.load_into(other, tmp_path / "empty")


def test_names_of_a_model(device: Any, tmp_path: Path) -> None:
    """As load_state_dict: strict refuses, else what both have is loaded and the rest is told."""
    path = tmp_path / "x"
    tensors = {k: x for k, x in Net(False).state_dict().items() if not k.startswith("norm.w")}
    tw.save_file(tensors | {"odd": torch.ones(9000)}, path)
    model = Net(False).to(device)
    before = {k: x.clone().cpu() for k, x in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Net: missing: 'norm.weight'; unexpected: 'odd'"):
        tw.load_into(model, path)
    assert same_state(model, before)
    keys = tw.load_into(model, path, strict=False)
    expected = model.load_state_dict(tensors | {"odd": torch.ones(1)}, strict=False)
    assert keys.missing_keys == expected.missing_keys == ["norm.weight"]
    assert keys.unexpected_keys == expected.unexpected_keys == ["odd"]
    assert same_state(model, {"norm.weight": before["norm.weight"]} | tensors)


def test_a_tied_name_may_be_missing_in_the_file(device: Any, tmp_path: Path) -> None:
    model, other = Net(), Net().to(device)
    tensors = {k: x for k, x in model.state_dict().items() if k != "head.weight"}
    tw.save_file(tensors, tmp_path / "x")
    assert tw.load_into(other, tmp_path / "x") == ([], [])
    assert same_state(other, model.state_dict())


def test_what_cannot_be_loaded_into(device: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    tw.save_file(Net().state_dict(), path)
    wide = Net().to(device)
    wide.norm = torch.nn.BatchNorm1d(33).to(device)
    before = {k: x.clone().cpu() for k, x in wide.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"Net\['norm.weight'\] has shape \[33\].*\[32\]"):
            tw.load_into(wide, path, strict=strict)
    assert same_state(wide, before)
    with pytest.raises(ValueError, match="to_empty"):
        tw.load_into(Net().to("meta"), path)
    with pytest.raises(TypeError, match="model is a dict"):
        tw.load_into({}, path)
    hooked = Net().to(device)
    hooked.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({k: x.clone() for k, x in state.items()})
    )
    with pytest.raises(TypeError, match="hook"):
        tw.load_into(hooked, path)


class _Extra(Net):
    def get_extra_state(self) -> Any:
        return {"step": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


def test_extra_state_is_missing_in_a_file(tmp_path: Path) -> None:
    tw.save_file(Net().state_dict(), tmp_path / "x")
    assert tw.load_into(_Extra(), tmp_path / "x", strict=False).missing_keys == ["_extra_state"]
