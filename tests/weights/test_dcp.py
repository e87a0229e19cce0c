"""Checkpoints of torch.distributed.checkpoint, also between real processes, which run this file."""

from __future__ import annotations

import copy
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from processes import join, launch
from tightwire.convert import compress_file

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import state_dict as state_dicts  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

Reader, Writer = tw.dcp.Reader, tw.dcp.Writer
DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
)
LOSSLESS = [c.name for c in map(tw.codec, tw.list_codecs()) if c.lossless and not c.needs_base]
SHAPES = [(), (0,), (1,), (3, 0, 2), (17,), (255, 33), (3, 5, 700)]


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to")
        yield


def tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Random values, normal for floats."""
    rng = np.random.default_rng([seed, len(shape)])
    if "float" in dtype:
        values = np.asarray(rng.standard_normal(shape) * 0.02, np.float32)
    else:
        values = np.asarray(rng.integers(0, 2, shape))
    return torch.from_numpy(values).to(getattr(torch, dtype))


def same(a: Any, b: Any) -> bool:
    """Whether two tensors, or two other values, are the same bits."""
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    bits = [torch.cat([x.detach().reshape(-1)]).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(*bits))


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """What `state` is loaded into: tensors of ones, other values."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        found[name] = "nothing"
        if isinstance(value, torch.Tensor):
            found[name] = torch.ones_like(value)
    return found


def save(state: dict[str, Any], path: Path, codec: str = "zipccl", **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(path, codec, **options), no_dist=True)


def load(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=Reader(path, **options), no_dist=True)


def state_of(seed: int = 0) -> dict[str, Any]:
    state = {f"{d}{list(s)}": tensor(d, s, seed) for d in DTYPES for s in SHAPES}
    tied = tensor("bfloat16", (300, 200), seed)
    strided = tensor("float32", (40, 60), seed).t()
    extra = {"steps": 7, "notes": "é", "a@0": tied, "b": tied, "t": strided, "empty": b""}
    return state | extra


@pytest.mark.parametrize(
    ("ranks", "mine", "asked", "taken"),
    [
        (None, 8, None, 8),
        ("4", 8, None, 2),
        # What a rank is bound to is its own.
        ("4", 2, None, 2),
        ("16", 8, None, 1),
        ("", 8, None, 8),
        ("4", 8, 3, 3),
    ],
)
def test_ranks_of_a_host_share_its_processors(
    ranks: str | None,
    mine: int,
    asked: int | None,
    taken: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []

    def save_file(*args: Any, threads: int, **kwargs: Any) -> None:
        found.append(threads)
        tw.save_file(*args, threads=threads, **kwargs)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("tightwire.arguments.cpu_count", lambda: mine)
    monkeypatch.setattr("tightwire.adapters.weights.dcp.save_file", save_file)
    writer = Writer(tmp_path / "saved", threads=asked)
    dcp.save({"x": tensor("bfloat16", (17,))}, storage_writer=writer, no_dist=True)
    assert found == [taken]


@pytest.mark.parametrize("codec", LOSSLESS)
def test_what_is_saved_is_loaded(tmp_path: Path, codec: str) -> None:
    state = state_of()
    save(state, tmp_path / "a", codec)
    found = blank(state)
    load(found, tmp_path / "a")
    assert [name for name in state if not same(state[name], found[name])] == []


def test_files_are_compressed_safetensors(tmp_path: Path) -> None:
    state = {"w": tensor("bfloat16", (512, 512)), "w@1": tensor("bfloat16", (512, 512), 1)}
    save(state, tmp_path)
    (path,) = tmp_path.glob("*.tw.safetensors")
    with tw.open(path, like="torch") as file:
        assert sorted(file) == ["w", "w@@1"]
        assert same(file["w@@1"].load(), state["w@1"])
    assert path.stat().st_size < 0.72 * 2 * 512 * 512 * 2


def test_strided_and_other_dtypes_are_filled(tmp_path: Path) -> None:
    x = tensor("bfloat16", (64, 48))
    save({"x": x, "y": x}, tmp_path)
    found = {"x": torch.zeros(48, 64, dtype=torch.bfloat16).t(), "y": torch.zeros(64, 48)}
    load(found, tmp_path)
    assert same(found["x"].contiguous(), x)
    assert same(found["y"], x.float())


def test_checkpoints_of_the_plain_writer_are_read(tmp_path: Path) -> None:
    state = state_of()
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = blank(state)
    load(found, tmp_path)
    assert all(same(state[name], found[name]) for name in state)


def test_the_plain_reader_refuses(tmp_path: Path) -> None:
    save({"x": tensor("bfloat16", (64, 48))}, tmp_path)
    with pytest.raises(CheckpointException, match=r"extension.*tightwire"):
        dcp.load({"x": torch.zeros(64, 48)}, checkpoint_id=tmp_path, no_dist=True)


def test_an_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(31, 127), torch.nn.Linear(127, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 31, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = dict(zip(("model", "optim"), state_dicts.get_state_dict(model, optimizer), strict=True))
    want = copy.deepcopy(state)
    save(state, tmp_path)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load(state, tmp_path)
    assert want["model"].keys() == state["model"].keys()
    assert all(same(want["model"][n], state["model"][n]) for n in want["model"])
    flat = want["optim"]["state"]
    assert all(same(flat[n][k], state["optim"]["state"][n][k]) for n in flat for k in flat[n])


class Pieces(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """Asks for a part of a stored tensor."""

    def __init__(self, at: tuple[int, ...], shape: tuple[int, ...]) -> None:
        super().__init__()
        self._at, self._shape = at, shape

    def create_local_plan(self) -> Any:
        from dataclasses import replace

        plan = super().create_local_plan()
        (item,) = plan.items
        zeros = torch.Size([0] * len(self._at))
        return replace(
            plan,
            items=[
                replace(
                    item,
                    storage_offsets=torch.Size(self._at),
                    dest_offsets=zeros,
                    lengths=torch.Size(self._shape),
                )
            ],
        )


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    ("at", "shape"), [((0, 0), (1, 33)), ((254, 3), (1, 7)), ((7, 0), (100, 1)), ((3, 3), (0, 2))]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "int64"])
def test_parts(
    tmp_path: Path, dtype: str, at: tuple[int, int], shape: tuple[int, int], verify: bool
) -> None:
    x = tensor(dtype, (255, 33))
    save({"x": x}, tmp_path)
    found = {"x": torch.ones_like(x)}
    reader = Reader(tmp_path, verify=verify)
    dcp.load(found, storage_reader=reader, planner=Pieces(at, shape), no_dist=True)
    want = torch.ones_like(x)
    rows, columns = (slice(a, a + n) for a, n in zip(at, shape, strict=True))
    want[: shape[0], : shape[1]] = x[rows, columns]
    assert same(found["x"], want)


def test_parts_decode_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensor("bfloat16", (4096, 512))
    save({"x": x}, tmp_path)
    ranges = []
    module = sys.modules["tightwire.adapters.weights.dcp"]
    decode = module.decode

    def counting(*args: Any, **options: Any) -> Any:
        ranges.append((options["start"], options["stop"]))
        return decode(*args, **options)

    monkeypatch.setattr(module, "decode", counting)
    found = {"x": torch.zeros_like(x)}
    planner = Pieces((1000, 5), (10, 7))
    reader = Reader(tmp_path, verify=False)
    dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
    assert ranges == [(1000 * 512, 1010 * 512)]
    assert same(found["x"][:10, :7].contiguous(), x[1000:1010, 5:12].contiguous())


def damaged(path: Path, at: float = 0.6) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    path.write_bytes(data)


def test_damage_is_named(tmp_path: Path) -> None:
    state = {"x": tensor("bfloat16", (512, 512))}
    save(state, tmp_path)
    (path,) = tmp_path.glob("*.tw.safetensors")
    damaged(path)
    with pytest.raises(CheckpointException, match=r"FormatError.*'x'"):
        load(blank(state), tmp_path)


def test_another_file_in_its_place(tmp_path: Path) -> None:
    state = {"x": tensor("bfloat16", (512, 512))}
    save(state, tmp_path)
    (path,) = tmp_path.glob("*.tw.safetensors")
    tw.save_file({"y": state["x"]}, path)
    with pytest.raises(CheckpointException, match="'x' is missing"):
        load(blank(state), tmp_path)
    tw.save_file({"x": state["x"][:5].clone()}, path)
    with pytest.raises((CheckpointException, ValueError), match="shape"):
        load(blank(state), tmp_path)


def test_a_later_save_replaces_an_earlier_one(tmp_path: Path) -> None:
    first, second = state_of(0), state_of(1)
    save(first, tmp_path)
    earlier = set(tmp_path.glob("*.safetensors"))
    with pytest.warns(UserWarning, match="overwriting"):
        save(second, tmp_path)
    assert not any(path.exists() for path in earlier)
    found = blank(second)
    load(found, tmp_path)
    assert all(same(second[name], found[name]) for name in second)
    with pytest.raises(CheckpointException, match="already exists"):
        save(first, tmp_path, overwrite=False)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("step", ["save_file", "atomic_file"])
@pytest.mark.parametrize("late", [False, True])
def test_what_fails_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, late: bool
) -> None:
    first = state_of(0)
    save(first, tmp_path)
    module = sys.modules["tightwire.adapters.weights.dcp"]
    real: Callable[..., Any] = getattr(module, step)

    def fails(*args: Any, **options: Any) -> Any:
        if late and step == "save_file":
            real(*args, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, step, fails)
    with pytest.raises((CheckpointException, OSError), match="No space left"):
        save(state_of(1), tmp_path)
    monkeypatch.undo()
    found = blank(first)
    load(found, tmp_path)
    assert all(same(first[name], found[name]) for name in first)


KILLED = """
import os, signal, sys
import torch, torch.distributed.checkpoint as dcp
import tightwire as tw
from tightwire import storage
replace, left = os.replace, [int(sys.argv[2])]
def stop(*args):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    replace(*args)
storage.os.replace = stop
state = {"x": torch.zeros(512, 512)}
dcp.save(state, storage_writer=tw.dcp.Writer(sys.argv[1]), no_dist=True)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("renamed", [0, 1])
def test_a_killed_save(tmp_path: Path, renamed: int) -> None:
    """Before its first file is there, and before ``.metadata`` names it."""
    state = {"x": tensor("float32", (512, 512))}
    save(state, tmp_path)
    words = [sys.executable, "-c", KILLED, str(tmp_path), str(renamed)]
    ended = subprocess.run(words, capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    found = blank(state)
    load(found, tmp_path)
    assert same(found["x"], state["x"])
    save(state, tmp_path)


def test_metadata_that_names_files_elsewhere(tmp_path: Path) -> None:
    """Files of an earlier checkpoint are removed from its directory alone."""
    state = {"x": tensor("bfloat16", (512, 512))}
    outside = tmp_path / "precious"
    outside.write_bytes(b"1")
    save(state, tmp_path / "a")
    path = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../precious"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.warns(UserWarning, match="overwriting"):
        save(state, tmp_path / "a")
    assert outside.exists()


def changed(state: dict[str, Any], share: float = 0.01, seed: int = 0) -> dict[str, Any]:
    """A copy of which a share of the elements of each tensor of floats is one unit higher."""
    rng = np.random.default_rng([7, seed])
    found = dict(state)
    for name, x in state.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
            found[name] = torch.clone(x, memory_format=torch.contiguous_format)
            chosen = torch.from_numpy(np.asarray(rng.random(tuple(x.shape)) < share))
            found[name].view(kind)[chosen] += 1
    return found


def of(path: Path) -> int:
    """Bytes of the tensors' files of a checkpoint."""
    return sum(file.stat().st_size for file in path.glob("*.tw.safetensors"))


def test_deltas(tmp_path: Path) -> None:
    """Three checkpoints, each against the one before."""
    states = [state_of()]
    states += [changed(states[0], seed=1)]
    states += [changed(states[1], seed=2)]
    states[2]["bfloat16[17]"] = tensor("bfloat16", (18,))
    del states[2]["float32[17]"]
    states[2]["new"] = tensor("float16", (9, 9))
    for i, state in enumerate(states):
        save(state, tmp_path / f"{i}", base=tmp_path / f"{i - 1}" if i else None)
    for i, state in enumerate(states):
        found = blank(state)
        load(found, tmp_path / f"{i}")
        assert [name for name in state if not same(state[name], found[name])] == []
    # What is wanted in another layout or dtype.
    x = states[2]["bfloat16[255, 33]"]
    found = {"bfloat16[255, 33]": torch.zeros(33, 255).t()}
    load(found, tmp_path / "2")
    assert same(found["bfloat16[255, 33]"].contiguous(), x.float())


def test_deltas_are_small(tmp_path: Path) -> None:
    state = {"x": tensor("bfloat16", (1 << 10, 1 << 10))}
    save(state, tmp_path / "a")
    later = changed(state)
    save(later, tmp_path / "b", base=tmp_path / "a")
    assert of(tmp_path / "b") < 0.02 * of(tmp_path / "a")
    # Where nothing is equal, it is stored whole.
    other = {"x": tensor("bfloat16", (1 << 10, 1 << 10), 1)}
    save(other, tmp_path / "c", base=tmp_path / "a")
    assert of(tmp_path / "c") == pytest.approx(of(tmp_path / "a"), rel=0.01)
    (tmp_path / "a").rename(tmp_path / "d")
    found = blank(state)
    load(found, tmp_path / "c")
    assert same(found["x"], other["x"])
    load(found, tmp_path / "b", base=tmp_path / "d")
    assert same(found["x"], later["x"])
    with pytest.raises(CheckpointException, match=r"no such checkpoint.*Needed: base"):
        load(found, tmp_path / "b")


@pytest.mark.parametrize(
    ("at", "shape"),
    [((0, 0), (1, 33)), ((254, 3), (1, 7)), ((7, 0), (100, 1)), ((0, 0), (255, 33))],
)
def test_parts_of_deltas(tmp_path: Path, at: tuple[int, int], shape: tuple[int, int]) -> None:
    x = tensor("bfloat16", (255, 33))
    y = changed({"x": x})["x"]
    save({"x": x}, tmp_path / "a")
    save({"x": y}, tmp_path / "b", base=tmp_path / "a")
    found = {"x": torch.ones_like(x)}
    reader = Reader(tmp_path / "b")
    dcp.load(found, storage_reader=reader, planner=Pieces(at, shape), no_dist=True)
    want = torch.ones_like(x)
    rows, columns = (slice(a, a + n) for a, n in zip(at, shape, strict=True))
    want[: shape[0], : shape[1]] = y[rows, columns]
    assert same(found["x"], want)


def test_another_base(tmp_path: Path) -> None:
    """Refused by its digest, and a missing tensor by its name."""
    x = tensor("bfloat16", (512, 512))
    save({"x": x}, tmp_path / "a")
    save(changed({"x": x}), tmp_path / "b", base=tmp_path / "a")
    save(changed({"x": x}, seed=1), tmp_path / "c")
    save({"y": x}, tmp_path / "d")
    for other in "cd":
        with pytest.raises(CheckpointException, match="base_mismatch"):
            load({"x": torch.zeros_like(x)}, tmp_path / "b", base=tmp_path / other)
    (path,) = (tmp_path / "a").glob("*.tw.safetensors")
    damaged(path)
    with pytest.raises(CheckpointException, match=r"FormatError.*'x'"):
        load({"x": torch.zeros_like(x)}, tmp_path / "b")
    with pytest.raises(CheckpointException, match=r"FormatError.*'x'"):
        save(changed({"x": x}), tmp_path / "e", base=tmp_path / "a")


def test_after_some_deltas_all_is_whole(tmp_path: Path) -> None:
    state = {"x": tensor("bfloat16", (512, 512))}
    for i in range(5):
        base = tmp_path / f"{i - 1}" if i else None
        save(state, tmp_path / f"{i}", base=base, chain_limit=2)
    sizes = [of(tmp_path / f"{i}") for i in range(5)]
    assert [size > sizes[0] / 2 for size in sizes] == [True, False, False, True, False]


@pytest.mark.parametrize(
    "note",
    [
        {"name": "../a", "deltas": 1},
        {"name": "..", "deltas": 1},
        {"name": 3, "deltas": 1},
        {"name": "a", "deltas": 0},
        {"name": "a", "deltas": 257},
        {"name": "a"},
        ["a", 1],
    ],
)
def test_a_base_that_is_none(tmp_path: Path, note: Any) -> None:
    state = {"x": tensor("bfloat16", (512, 512))}
    save(state, tmp_path / "a")
    save(state, tmp_path / "b", base=tmp_path / "a")
    path = tmp_path / "b" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.tightwire_base = note
    path.write_bytes(pickle.dumps(metadata))
    text = rf"bad_container: {path}: (names|has|counts) .* Allowed: .*\. Needed: a copy"
    with pytest.raises(CheckpointException, match=text):
        load(blank(state), tmp_path / "b")
    with pytest.raises(tw.FormatError, match=text):
        Writer(tmp_path / "c", base=tmp_path / "b")


def test_bases_in_a_circle(tmp_path: Path) -> None:
    state = {"x": tensor("bfloat16", (512, 512))}
    save(state, tmp_path / "a")
    save(state, tmp_path / "b", base=tmp_path / "a")
    with pytest.raises(CheckpointException, match="in a row"):
        load(blank(state), tmp_path / "b", base=tmp_path / "b")


def test_what_a_base_needs_is_not_replaced(tmp_path: Path) -> None:
    """Directories that are used in turn: the save is refused, and all of them still load."""
    states = [{"x": tensor("bfloat16", (512, 512))}]
    save(states[0], tmp_path / "0")
    for i in (1, 2):
        states.append(changed(states[-1], seed=i))
        save(states[-1], tmp_path / f"{i}", base=tmp_path / f"{i - 1}")
    (tmp_path / "link").symlink_to("0")
    (tmp_path / "x").mkdir()
    for name in ("2", "1", "0", "link", "x/../0"):
        with pytest.raises(ValueError, match=r"neither would be left\. Allowed: another path"):
            Writer(tmp_path / name, base=tmp_path / "2", chain_limit=1)
        # dcp.save may name the directory, too.
        writer = Writer(tmp_path / "3", base=tmp_path / "2")
        with pytest.raises(ValueError, match="neither would be left"):
            dcp.save(states[0], checkpoint_id=tmp_path / name, storage_writer=writer, no_dist=True)
    with pytest.raises(ValueError, match="neither would be left"):
        Writer(tmp_path / "2", base=tmp_path / "x" / ".." / "2")
    for i, state in enumerate(states):
        found = blank(state)
        load(found, tmp_path / f"{i}")
        assert same(found["x"], state["x"])


def test_bad_calls(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chain_limit"):
        Writer(tmp_path, chain_limit=0)
    with pytest.raises(FileNotFoundError):
        Writer(tmp_path, base=tmp_path / "none")
    with pytest.raises(ValueError, match="codec is 'mx'; allowed: lossless"):
        Writer(tmp_path, "mx")
    with pytest.raises(ValueError, match="codec is 'delta'"):
        Writer(tmp_path, "delta")
    with pytest.raises(ValueError, match="threads"):
        Writer(tmp_path, threads=0)
    with pytest.raises(ValueError, match="max_nbytes"):
        Reader(tmp_path, max_nbytes=-1)
    save({"x": tensor("bfloat16", (512, 512))}, tmp_path)
    with pytest.raises(CheckpointException, match="limit_exceeded"):
        load({"x": torch.zeros(512, 512)}, tmp_path, max_nbytes=1000)


def test_models_of_hugging_face(tmp_path: Path) -> None:
    state = {n: tensor(d, (255, 33)) for n, d in zip("abc", DTYPES, strict=False)}
    tw.save(state, tmp_path, max_shard_nbytes=20_000)
    assert len(list(tmp_path.glob("*.tw.safetensors"))) > 1
    found = blank(state)
    dcp.load(found, storage_reader=tw.dcp.HuggingFaceReader(tmp_path), no_dist=True)
    assert all(same(state[name], found[name]) for name in state)
    part = {"b": torch.zeros_like(state["b"])}
    reader = tw.dcp.HuggingFaceReader(tmp_path)
    dcp.load(part, storage_reader=reader, planner=Pieces((9, 1), (30, 5)), no_dist=True)
    assert same(part["b"][:30, :5].contiguous(), state["b"][9:39, 1:6].contiguous())


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_metadata_that_is_damaged(tmp_path: Path) -> None:
    """It may be replaced, and is refused by name where it is read."""
    state = {"x": tensor("bfloat16", (512, 512))}
    for data in (b"garbage", b"", pickle.dumps({})):
        save(state, tmp_path / "a")
        (tmp_path / "a" / ".metadata").write_bytes(data)
        with pytest.raises(tw.FormatError, match=r"\.metadata is damaged"):
            Writer(tmp_path / "b", base=tmp_path / "a")
        with pytest.raises(CheckpointException, match=r"\.metadata is damaged"):
            load(blank(state), tmp_path / "a")
        save(state, tmp_path / "a")
        found = blank(state)
        load(found, tmp_path / "a")
        assert same(found["x"], state["x"])


def test_bases_that_give_no_deltas(tmp_path: Path) -> None:
    """They are not noted, so that the chain does not grow and they are not needed."""
    first, other = ({"x": tensor("bfloat16", (512, 512), seed)} for seed in range(2))
    save(first, tmp_path / "a")
    save(other, tmp_path / "b", base=tmp_path / "a")
    assert Reader(tmp_path / "b").checkpoint().note is None
    save(changed(other), tmp_path / "c", base=tmp_path / "b")
    note = Reader(tmp_path / "c").checkpoint().note
    assert note is not None
    assert tuple(note) == ("b", 1)
    dcp.save(first, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(ValueError, match=r"base is .*plain', with no compressed tensor"):
        Writer(tmp_path / "d", base=tmp_path / "plain")


def test_urls_are_refused(tmp_path: Path) -> None:
    save({"x": tensor("bfloat16", (512, 512))}, tmp_path / "a")
    url = "s3://bucket/x"
    calls: list[Callable[[], Any]] = [
        lambda: Writer(url),
        lambda: Writer(tmp_path / "b", base=url),
        lambda: Reader(url),
        lambda: Reader(tmp_path / "a", base=[tmp_path, url]),
        lambda: tw.dcp.HuggingFaceReader(url),
        lambda: dcp.save({}, checkpoint_id=url, storage_writer=Writer(tmp_path), no_dist=True),
        lambda: dcp.load({}, checkpoint_id=url, storage_reader=Reader(tmp_path), no_dist=True),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is 's3://bucket/x'; allowed: paths"):
            call()
    with pytest.raises(TypeError, match="base is a int"):
        Reader(tmp_path / "a", base=[3])  # type: ignore[list-item]


def test_bases_that_have_moved(tmp_path: Path) -> None:
    states = [{"x": tensor("bfloat16", (512, 512))}]
    save(states[0], tmp_path / "0")
    for i in (1, 2, 3):
        states.append(changed(states[-1], seed=i))
        save(states[-1], tmp_path / f"{i}", base=tmp_path / f"{i - 1}")
    for i in (0, 1):
        (tmp_path / f"moved{i}").mkdir()
        (tmp_path / f"{i}").rename(tmp_path / f"moved{i}" / "here")
    found = blank(states[3])
    bases = [tmp_path / "2", tmp_path / "moved1" / "here", tmp_path / "moved0" / "here"]
    load(found, tmp_path / "3", base=bases)
    assert same(found["x"], states[3]["x"])
    with pytest.raises(CheckpointException, match="no such checkpoint"):
        load(found, tmp_path / "3", base=bases[:2])


def test_metadata_that_reads_files_elsewhere(tmp_path: Path) -> None:
    state = {"x": tensor("bfloat16", (512, 512))}
    save(state, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.tw.safetensors")
    path = tmp_path / "a" / ".metadata"
    for name in (f"../{file.name}", str(tmp_path / file.name), ".", ""):
        file.rename(tmp_path / file.name)
        metadata = pickle.loads(path.read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = name
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointException, match=r"bad_container.*not a file in it"):
            load(blank(state), tmp_path / "a")
        (tmp_path / file.name).rename(file)


def test_pairs_of_4_bit_floats(tmp_path: Path) -> None:
    kind = getattr(torch, "float4_e2m1fn_x2", None)
    if kind is None:
        pytest.skip("this PyTorch has no 4-bit floats")
    data = torch.arange(64 * 40, dtype=torch.int32).to(torch.uint8).reshape(64, 40)
    state = {"x": data.view(kind), "w": tensor("bfloat16", (40, 50))}
    save(state, tmp_path / "a")
    save(state, tmp_path / "b", base=tmp_path / "a")
    tw.save(state, tmp_path / "c")
    readers = [Reader(tmp_path / "a"), Reader(tmp_path / "b")]
    for reader in [*readers, tw.dcp.HuggingFaceReader(tmp_path / "c")]:
        found = {"x": torch.zeros_like(data).view(kind), "w": torch.zeros(40, 50).bfloat16()}
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert all(same(found[name], x) for name, x in state.items())
        part = {"x": torch.zeros_like(data).view(kind)}
        dcp.load(part, storage_reader=reader, planner=Pieces((7, 3), (30, 20)), no_dist=True)
        assert torch.equal(part["x"].view(torch.uint8)[:30, :20], data[7:37, 3:23])


def test_dtypes_of_files_that_pytorch_lacks(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F6_E2M3","shape":[8],"data_offsets":[0,6]}}'
    source, path = tmp_path / "model.safetensors", tmp_path / "model.tw.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    compress_file(source, path, tw.codec("zipccl"))
    with pytest.raises(tw.FormatError, match=r"'x' has the dtype F6_E2M3, which this PyTorch"):
        tw.dcp.HuggingFaceReader(path).read_metadata()


SIZES = {"first": (61, 127), "second": (127, 61), "bias": (3,), "one": ()}


def full_state() -> dict[str, Any]:
    return {name: tensor("bfloat16", shape) for name, shape in SIZES.items()}


def sharded(device: Any, placement: str) -> dict[str, Any]:
    """The state on this rank, by FSDP's and tensor parallel placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if placement == "2d" else (ranks,)
    names = ("dp", "tp")[: len(shape)]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    places = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "replicated": [Replicate()],
        "2d": [Shard(0), Shard(1)],
    }[placement]
    state: dict[str, Any] = {"plain": tensor("float32", (40, 9)), "steps": 3}
    for name, x in full_state().items():
        kept = [p if not isinstance(p, Shard) or p.dim < x.ndim else Replicate() for p in places]
        state[name] = distribute_tensor(x.to(device), mesh, kept)
    return state


def local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def saves(device: Any) -> list[Any]:
    """Save with every placement, in the foreground and in the background."""
    folder = Path(sys.argv[4]).parent
    for placement in ("rows", "columns", "replicated", "2d"):
        dcp.save(sharded(device, placement), storage_writer=Writer(folder / placement))
    future = dcp.async_save(sharded(device, "rows"), storage_writer=Writer(folder / "async"))
    future.result()
    for kind, placement in (("deltas", "rows"), ("other_deltas", "columns")):
        writer = Writer(folder / kind, base=folder / "rows")
        dcp.async_save(sharded(device, placement), storage_writer=writer).result()
    return []


def loads(device: Any) -> list[str]:
    """Load what was saved into every placement: what was not as it should be."""
    folder = Path(sys.argv[4]).parent.parent / "saved"
    wrong = []
    for saved in ("rows", "columns", "replicated", "2d", "async", "deltas", "other_deltas"):
        for placement in ("rows", "columns", "2d"):
            want = sharded(device, placement)
            found = sharded(device, placement)
            for value in found.values():
                if isinstance(value, torch.Tensor):
                    local(value).fill_(1)
            found["steps"] = 0
            dcp.load(found, storage_reader=Reader(folder / saved))
            wrong += [
                f"{saved} as {placement}: {name}"
                for name in want
                if not same(local(want[name]), local(found[name]))
            ]
    return wrong


def trains(device: Any) -> list[str]:
    """States of DDP and of FSDP2, model and optimizer, saved and loaded."""
    from torch.distributed.fsdp import fully_shard

    folder = Path(sys.argv[4]).parent
    wrong = []
    for kind in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(61, 127), torch.nn.Linear(127, 3))
        model = torch.nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        model = fully_shard(model) if kind == "fsdp" else model
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 61)).sum().backward()
        optimizer.step()
        pair = state_dicts.get_state_dict(model, optimizer)
        state = {"model": pair[0], "optim": pair[1]}
        want = copy.deepcopy(state)
        dcp.save(state, storage_writer=Writer(folder / kind))
        for part in (state["model"], *state["optim"]["state"].values()):
            for value in part.values():
                local(value).detach().fill_(1)
        dcp.load(state, storage_reader=Reader(folder / kind))
        pairs = [("model", want["model"], state["model"])]
        pairs += [
            (n, want["optim"]["state"][n], found) for n, found in state["optim"]["state"].items()
        ]
        wrong += [
            f"{kind} {n} {name}"
            for n, a, b in pairs
            for name in a
            if not same(local(a[name]), local(b[name]))
        ]
    return wrong


TASKS = {"saves": saves, "loads": loads, "trains": trains}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_sharded_states(tmp_path: Path, before: int, after: int) -> None:
    for name in ("saved", "loaded"):
        (tmp_path / name).mkdir()
    launch(__file__, "saves", before, tmp_path / "saved", warnings="default")
    found = launch(__file__, "loads", after, tmp_path / "loaded", warnings="default")
    assert found == [[]] * after


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_states_of_training(tmp_path: Path, ranks: int) -> None:
    assert launch(__file__, "trains", ranks, tmp_path, warnings="default") == [[]] * ranks


if __name__ == "__main__":
    join(TASKS, sys.argv[1:])
