"""Delta directories: versions come back bit for bit; faults and bad input change nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw
from tightwire import delta_files
from tightwire.contents import read_header
from tightwire.delta_files import DeltaFile, file_name, route
from tightwire.formats.container import (
    STATE_KEY,
    BaseNote,
    StateNote,
    base_note,
    read_directory,
    state_note,
)
from tightwire.patches import patch_of

N = 40_007
State = dict[str, Any]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def first_state() -> State:
    rng = np.random.default_rng(0)
    embed = rng.normal(0, 0.02, N).astype(ml_dtypes.bfloat16)
    return {
        "embed": embed,
        "head": embed,
        "v": rng.normal(0, 0.02, (77, 53)).astype(np.float32),
        "ids": np.arange(3000),
        "fp8": rng.normal(size=2500).astype(ml_dtypes.float8_e4m3fn),
        "tiny": np.ones(3, np.float32),
        "scale": np.array(0.5, np.float32),
        "none": np.empty((0, 4), np.float16),
    }


def stepped(state: State, seed: int) -> State:
    """The state after a step of training: some elements of some tensors change."""
    rng = np.random.default_rng(seed)
    new = {name: x.copy() for name, x in state.items() if name != "head"}
    bits = new["embed"].view(np.int16)
    bits[rng.integers(0, N, N // 100)] += 1
    new["v"][seed % 77, 5] = np.nan
    new["tiny"][seed % 3] += 1
    new["head"] = new["embed"]
    return {name: new[name] for name in state}


def copied(state: State) -> State:
    made = {id(x): x.copy() for x in state.values()}
    return {name: made[id(x)] for name, x in state.items()}


def raw(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(x.dtype), x.shape, x.tobytes()


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(raw(a[name]) == raw(b[name]) for name in a)


def make(folder: Path, count: int, **options: Any) -> list[State]:
    """Versions 0 to `count`, 0 whole."""
    states = [first_state()]
    assert tw.save_delta(states[0], None, folder) == 0
    for i in range(1, count + 1):
        states.append(stepped(states[-1], i))
        assert tw.save_delta(states[-1], states[-2], folder, **options) == i
    return states


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


@pytest.mark.parametrize("form", ["adaptive", "difference", "overwrite"])
def test_tensors_are_brought_to_any_later_version_in_place(tmp_path: Path, form: str) -> None:
    states = make(tmp_path, 4, form=form, chain_limit=3)
    assert [len(list(tmp_path.glob(f"weight_v{i:06}*"))) for i in range(5)] == [1, 1, 1, 2, 1]
    for first in range(5):
        for last in range(first, 5):
            tensors = copied(states[first])
            arrays = dict(tensors)
            assert tw.apply_delta(tensors, tmp_path, version=last) == last
            assert same(tensors, states[last])
            assert all(tensors[name] is x for name, x in arrays.items())
            assert same(tw.load_delta(tmp_path, version=last), states[last])
    delta, whole = (tmp_path / file_name(4, 3)).stat(), (tmp_path / file_name(0)).stat()
    assert delta.st_size < whole.st_size / 8


def test_the_newest_version_is_left_alone(tmp_path: Path) -> None:
    tensors = make(tmp_path, 1)[1]
    for x in tensors.values():
        x.flags.writeable = False
    assert tw.apply_delta(tensors, tmp_path) == 1
    assert tw.prepare_delta(tensors, tmp_path).names == []


def test_applied_twice_out_of_order_and_to_another_base(tmp_path: Path) -> None:
    states = make(tmp_path, 3)
    tensors = copied(states[1])
    assert tw.apply_delta(tensors, tmp_path, since=1, version=2) == 2
    with pytest.raises(
        tw.FormatError, match=r"version 2 of .* and not 1; leave out since"
    ) as error:
        tw.apply_delta(tensors, tmp_path, since=1, version=2)
    assert error.value.reason == "base_mismatch"
    with pytest.raises(ValueError, match=r"version 2 of .*, which is after 1; whole=True"):
        tw.apply_delta(tensors, tmp_path, version=1)
    assert same(tensors, states[2])
    # What no delta touches counts, too.
    tensors["ids"][7] += 1
    changed = copied(tensors)
    with pytest.raises(tw.FormatError, match=r"lacks the version .*'ids'.*whole=True") as error:
        tw.apply_delta(tensors, tmp_path)
    assert error.value.reason == "base_mismatch"
    assert same(tensors, changed)
    assert tw.apply_delta(tensors, tmp_path, whole=True) == 3
    assert same(tensors, states[3])
    assert tw.apply_delta(tensors, tmp_path, version=1, whole=True) == 1
    assert same(tensors, states[1])


def test_tensors_that_are_several_versions(tmp_path: Path) -> None:
    a, b = first_state(), stepped(first_state(), 1)
    for new, base in ((a, None), (b, a), (a, b), (b, a)):
        tw.save_delta(new, base, tmp_path)
    for goal, since in ((0, 0), (1, 0), (2, 2), (3, 2), (None, 2)):
        update = tw.prepare_delta(copied(a), tmp_path, version=goal)
        assert (update.version, update.since) == (3 if goal is None else goal, since)
    with pytest.raises(ValueError, match=r"version 1 of .*, which is after 0"):
        tw.apply_delta(copied(b), tmp_path, version=0)


def test_a_base_that_is_not_stored(tmp_path: Path) -> None:
    old = first_state()
    new = stepped(old, 1)
    assert tw.save_delta(new, old, tmp_path) == 1
    tensors = copied(old)
    assert tw.apply_delta(tensors, tmp_path) == 1
    assert same(tensors, new)
    with pytest.raises(ValueError, match="no version up to 1 is stored whole"):
        tw.load_delta(tmp_path)
    tensors["tiny"][0] = 9
    with pytest.raises(ValueError, match="no version up to 1 is stored whole"):
        tw.apply_delta(tensors, tmp_path, whole=True)


def test_names_dtypes_and_shapes_that_change(tmp_path: Path) -> None:
    old = first_state()
    new = stepped(old, 1)
    del new["ids"], new["tiny"]
    new["v"] = new["v"].astype(np.float64)
    new["fp8"] = new["fp8"][:1000]
    new["more"] = np.arange(5000, dtype=np.int16)
    new["head"] = new["embed"].copy()
    new["head"].view(np.int16)[5] ^= 3
    for name in ("same", "again"):
        new[name] = new["more"] if name == "again" else np.ones(2000, np.float32)
    tw.save_delta(old, None, tmp_path)
    tw.save_delta(new, old, tmp_path)
    tensors = {name: x.copy() for name, x in old.items()}
    tw.apply_delta(tensors, tmp_path)
    assert same(tensors, {name: new[name] for name in tensors})
    assert tensors.keys() == new.keys()
    assert tensors["again"] is tensors["more"]
    tied = copied(old)
    before = copied(tied)
    with pytest.raises(ValueError, match="'embed' and 'head' share memory"):
        tw.apply_delta(tied, tmp_path)
    assert same(tied, before)


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    states = make(tmp_path, 1)
    with tw.open(tmp_path / file_name(0)) as f:
        assert f["head"].stored_name == "embed"
    loaded = tw.load_delta(tmp_path)
    assert loaded["head"] is loaded["embed"]
    # A receiver that holds them apart.
    tensors = {name: x.copy() for name, x in states[0].items()}
    assert tw.apply_delta(tensors, tmp_path) == 1
    assert same(tensors, states[1])


def test_files_and_directories_as_states(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    old, new = ({"w": x, "n": np.arange(900)} for x in (np.ones(N), np.ones(N)))
    new["w"] = new["w"].copy()
    new["w"][::50] = 2
    save_file(old, tmp_path / "old.safetensors")
    tw.save(new, tmp_path / "new", max_shard_nbytes=8000)
    versions = tmp_path / "versions"
    tw.save_delta(tmp_path / "old.safetensors", None, versions)
    assert tw.save_delta(tmp_path / "new", versions, versions) == 1
    assert tw.apply_delta(old, versions) == 1
    assert same(old, new)
    with tw.open(versions / file_name(0)) as f:
        assert tw.save_delta(f, versions, versions) == 2
    assert raw(tw.load_delta(versions)["w"]) == raw(np.ones(N))


def test_modules(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    models = [torch.nn.Sequential(torch.nn.Linear(64, 50), torch.nn.BatchNorm1d(50)) for _ in "abc"]
    for model in models:
        model.to(torch.bfloat16)
    a, b, receiver = models
    b.load_state_dict(a.state_dict())
    receiver.load_state_dict(a.state_dict())
    with torch.no_grad():
        b[0].weight[3, 5:9] *= 1.01
        b[1].running_mean += 1
    tw.save_delta(a, None, tmp_path)
    tw.save_delta(b, a, tmp_path)
    weight, count = receiver[0].weight, receiver[0].weight._version
    assert tw.apply_delta(receiver, tmp_path) == 1
    assert receiver[0].weight is weight
    assert weight._version > count
    wanted = b.state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in receiver.state_dict().items())
    larger = torch.nn.Sequential(torch.nn.Linear(65, 50), torch.nn.BatchNorm1d(50)).bfloat16()
    with pytest.raises(ValueError, match=r"'0.weight' of Sequential is bfloat16\[50, 65\]"):
        tw.apply_delta(larger, tmp_path, whole=True)
    with pytest.raises(ValueError, match="only in the version: names of a module must match"):
        tw.apply_delta(torch.nn.Sequential(b[0]), tmp_path, whole=True)


def test_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    old = torch.arange(60 * 70, dtype=torch.float32).reshape(60, 70)
    new = old.clone()
    new[3, 4] = -1
    dense = torch.randn(60, 70)
    tw.save_delta({"w": old}, None, tmp_path)
    tw.save_delta({"w": new}, tmp_path, tmp_path)
    tw.save_delta({"w": dense}, tmp_path, tmp_path)
    across = torch.empty(70, 60).T
    across.copy_(old)
    tw.apply_delta({"w": across}, tmp_path, version=1)
    assert torch.equal(across, new)
    tw.apply_delta({"w": across}, tmp_path)
    assert torch.equal(across, dense)
    host = np.empty((70, 60), ">f4").T
    host[:] = old.numpy()
    tw.apply_delta({"w": host}, tmp_path)
    assert np.array_equal(host, dense.numpy())


def test_elements_of_half_a_byte_and_of_16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this PyTorch has no 4-bit floats")
    packed = torch.arange(60 * 50, dtype=torch.int32).to(torch.uint8).reshape(60, 50)
    new = packed.clone()
    new[3] ^= 1

    def state(data: Any, last: float) -> State:
        wide = torch.arange(3000).to(torch.complex128)
        wide[-1] = last
        return {"q": data.clone().view(torch.float4_e2m1fn_x2), "c": wide, "w": torch.ones(9)}

    def parts(tensors: State) -> list[Any]:
        return [tensors["q"].view(torch.uint8), tensors["c"], tensors["w"]]

    tw.save_delta(state(packed, 0), None, tmp_path)
    tw.save_delta(state(new, 1), tmp_path, tmp_path)
    tensors = state(packed, 0)
    assert tw.apply_delta(tensors, tmp_path) == 1
    for found in (tensors, tw.load_delta(tmp_path, like="torch")):
        assert all(map(torch.equal, parts(found), parts(state(new, 1))))


@pytest.mark.parametrize("bad", ["read-only", "windows", "jax"])
def test_targets_that_cannot_be_written_to(tmp_path: Path, bad: str) -> None:
    states = make(tmp_path, 1)
    tensors = copied(states[0])
    if bad == "read-only":
        tensors["v"].flags.writeable = False
    elif bad == "windows":
        one = np.zeros(8000, np.float32)
        tw.save_delta({"v": one}, None, tmp_path / "w")
        tw.save_delta({"v": one + 1}, {"v": one}, tmp_path / "w")
        tensors = {"v": np.broadcast_to(np.float32(0), 8000)}
        with pytest.raises(ValueError, match="'v'"):
            tw.apply_delta(tensors, tmp_path / "w")
        return
    else:
        jax = pytest.importorskip("jax.numpy")
        tensors["tiny"] = jax.asarray(tensors["tiny"])
    before = copied({name: np.asarray(x) for name, x in tensors.items()})
    with pytest.raises((TypeError, ValueError), match="target"):
        tw.apply_delta(tensors, tmp_path)
    assert same({name: np.asarray(x) for name, x in tensors.items()}, before)


def test_prepare_writes_nothing_and_write_needs_no_file(tmp_path: Path) -> None:
    states = make(tmp_path, 2)
    tensors = copied(states[0])
    update = tw.prepare_delta(tensors, tmp_path)
    assert same(tensors, states[0])
    assert (update.since, update.version) == (0, 2)
    assert update.names == ["embed", "v", "tiny"]
    assert 0 < update.nbytes < states[0]["embed"].nbytes
    for path in tmp_path.glob("weight*"):
        path.unlink()
    update.write()
    assert same(tensors, states[2])
    with pytest.raises(ValueError, match="have been written"):
        update.write()


def test_a_save_that_is_repeated(tmp_path: Path) -> None:
    states = make(tmp_path, 2)
    before = files(tmp_path)
    assert tw.save_delta(states[2], states[1], tmp_path) == 2
    assert tw.save_delta(states[2], states[1], tmp_path, version=2) == 2
    assert tw.save_delta(states[2], states[2], tmp_path) == 2
    assert tw.save_delta(states[2], tmp_path, tmp_path, version=2) == 2
    assert files(tmp_path) == before
    with pytest.raises(ValueError, match=r"base is not version 2, the newest .*base=None"):
        tw.save_delta(states[0], states[1], tmp_path)
    with pytest.raises(ValueError, match=r"version is 2, and .* has 2; allowed: a later one"):
        tw.save_delta(states[0], states[2], tmp_path, version=2)
    assert files(tmp_path) == before
    assert tw.save_delta(states[0], states[2], tmp_path, version=7) == 7
    tensors = copied(states[1])
    assert tw.apply_delta(tensors, tmp_path) == 7
    assert same(tensors, states[0])
    assert tw.save_delta(states[0], tmp_path, tmp_path, version=8) == 8
    assert tw.save_delta(states[1], tmp_path, tmp_path) == 9
    assert tw.save_delta(states[1], tmp_path, tmp_path) == 9


def test_a_whole_save_that_is_repeated(tmp_path: Path) -> None:
    states = make(tmp_path, 1)
    before = files(tmp_path)
    assert tw.save_delta(states[1], None, tmp_path) == 1
    assert files(tmp_path).keys() - before.keys() == {file_name(1)}
    after = files(tmp_path)
    assert [tw.save_delta(states[1], None, tmp_path, version=v) for v in (None, 1)] == [1, 1]
    assert files(tmp_path) == after
    # A damaged one is not these tensors.
    (tmp_path / file_name(1)).write_bytes(b"damaged")
    assert tw.save_delta(states[1], None, tmp_path) == 2


def test_calls_that_fail_leave_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "versions"
    with pytest.raises(TypeError):
        tw.save_delta({"a": object()}, None, folder)
    with pytest.raises(FileNotFoundError):
        tw.save_delta(first_state(), tmp_path / "none.safetensors", folder)
    assert not folder.exists()
    with pytest.raises(ValueError, match="holds no versions"):
        tw.fold_deltas(tmp_path, 0)
    assert tw.prune_deltas(tmp_path) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"codec": "mx"}, ValueError),
        ({"codec": "delta"}, ValueError),
        ({"form": "xor"}, ValueError),
        ({"chain_limit": 0}, ValueError),
        ({"version": -1}, ValueError),
        ({"version": 10**18}, ValueError),
        ({"version": 1.5}, TypeError),
        ({"threads": 0}, ValueError),
    ],
)
def test_bad_arguments_of_save(tmp_path: Path, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        tw.save_delta({"w": np.ones(9)}, None, tmp_path / "versions", **options)
    assert not (tmp_path / "versions").exists()


def test_bad_calls(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with pytest.raises(TypeError, match="target is a list"):
        tw.apply_delta([np.ones(3)], tmp_path)
    with pytest.raises(TypeError, match="new is a list"):
        tw.save_delta([np.ones(3)], None, tmp_path)
    with pytest.raises(TypeError, match="directory is 7"):
        tw.apply_delta({}, 7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no version 5: it holds 0 to 1"):
        tw.load_delta(tmp_path, version=5)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no versions"):
        tw.apply_delta({}, tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        tw.load_delta(tmp_path / "none")


def test_fold(tmp_path: Path) -> None:
    states = make(tmp_path, 4)
    path = tw.fold_deltas(tmp_path, 1, 4)
    assert path == tmp_path / "weight_v000004.from_v000001.tw.safetensors"
    for i in (2, 3):
        (tmp_path / file_name(i, i - 1)).unlink()
    tensors = copied(states[1])
    assert tw.apply_delta(tensors, tmp_path) == 4
    assert same(tensors, states[4])
    with pytest.raises(tw.FormatError, match="lacks the version"):
        tw.apply_delta(copied(stepped(states[4], 9)), tmp_path)
    (tmp_path / file_name(4, 1)).unlink()
    with pytest.raises(ValueError, match="no deltas lead from version 1 to 4"):
        tw.apply_delta(copied(states[1]), tmp_path)
    with pytest.raises(ValueError, match="first is 4, last 4"):
        tw.fold_deltas(tmp_path, 4)


def test_a_fold_replaces_no_file(tmp_path: Path) -> None:
    """The file between two versions in a row is the only one that has the later one."""
    make(tmp_path, 1)
    before = files(tmp_path)
    for codec in ("mx", "delta"):
        with pytest.raises(ValueError, match=f"codec is '{codec}'; allowed: lossless"):
            tw.fold_deltas(tmp_path, 0, 1, codec=codec)
    assert tw.fold_deltas(tmp_path, 0, 1, form="overwrite") == tmp_path / file_name(1, 0)
    assert files(tmp_path) == before


def test_prune(tmp_path: Path) -> None:
    states = make(tmp_path, 7, chain_limit=3)
    assert tw.prune_deltas(tmp_path, keep=7) == []
    removed = tw.prune_deltas(tmp_path, keep=3)
    left = sorted(files(tmp_path))
    assert left == sorted([file_name(3), *(file_name(i, i - 1) for i in range(4, 8)), file_name(6)])
    assert len(removed) == 4
    for i in range(3, 8):
        tensors = copied(states[i])
        assert tw.apply_delta(tensors, tmp_path) == 7
        assert same(tensors, states[7])
    with pytest.raises(tw.FormatError, match="whole=True"):
        tw.apply_delta(copied(states[1]), tmp_path)
    tw.prune_deltas(tmp_path, keep=0)
    assert sorted(files(tmp_path)) == sorted([file_name(6), file_name(7, 6)])
    (tmp_path / file_name(6)).unlink()
    assert tw.prune_deltas(tmp_path, keep=0) == []


def test_the_cheapest_way_is_taken() -> None:
    def file(version: int, base: int | None, nbytes: int) -> DeltaFile:
        return DeltaFile(Path(), version, base, nbytes)

    known = [file(0, None, 100), file(1, 0, 5), file(2, 1, 5), file(2, 0, 9), file(3, 2, 5)]
    known += [file(2, None, 100), file(3, 1, 11)]

    def way(target: int, since: int | None) -> list[tuple[int, int | None]] | None:
        found = route(known, target, since)
        return None if found is None else [(f.version, f.base_version) for f in found]

    assert way(3, 0) == [(2, 0), (3, 2)]
    assert way(3, 1) == [(2, 1), (3, 2)]
    assert way(3, None) == [(2, None), (3, 2)]
    assert way(0, 3) is None
    assert way(4, None) is None


def faults() -> Iterator[tuple[str, str, bool]]:
    yield "fsync", "fsync", False
    yield "replace", "replace", False
    yield "renamed", "replace", True


@pytest.mark.parametrize(("where", "name", "after"), list(faults()))
def test_a_failing_save_leaves_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str, after: bool
) -> None:
    states = make(tmp_path, 1)
    before = files(tmp_path)
    real: Callable[..., Any] = getattr(os, name)

    def failing(*args: Any) -> Any:
        if after:
            real(*args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    new = stepped(states[1], 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            tw.save_delta(new, states[1], tmp_path)
    tensors = copied(states[0])
    if after:
        # The version was there when the error came: it is whole.
        assert tw.apply_delta(tensors, tmp_path) == 2
        assert same(tensors, new)
    else:
        assert {p.name for p in tmp_path.iterdir()} == {*before, ".tightwire.lock"}
        assert files(tmp_path) == before
        assert tw.apply_delta(tensors, tmp_path) == 1
        assert same(tensors, states[1])
    assert tw.save_delta(new, states[1], tmp_path) == 2
    assert same(tw.load_delta(tmp_path), new)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = make(tmp_path, 1)
    before = files(tmp_path)
    new = stepped(states[1], 2)
    writer = os.fdopen

    class Full:
        def __init__(self, file: Any, room: int) -> None:
            self.file, self.room = file, room

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.close()

        def write(self, data: Any) -> int:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(self.file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    for room in (0, 100, 2000):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdopen", lambda *a, r=room: Full(writer(*a), r))
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                tw.save_delta(new, states[1], tmp_path)
        assert files(tmp_path) == before
        assert {p.name for p in tmp_path.iterdir()} == {*before, ".tightwire.lock"}


@pytest.mark.slow
def test_a_killed_writer(tmp_path: Path) -> None:
    make(tmp_path, 0)
    program = """
import os, signal, sys
import numpy as np
import tightwire as tw
from tightwire import storage
storage.os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
state = tw.load_delta(sys.argv[1])
state["ids"] = state["ids"] + 1
tw.save_delta(state, sys.argv[1], sys.argv[1])
"""
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".weight*.tmp"))) == 1
    state = tw.load_delta(tmp_path)
    assert same(state, first_state())
    assert tw.save_delta(stepped(first_state(), 1), tmp_path, tmp_path) == 1
    assert not list(tmp_path.glob(".weight*.tmp"))


def test_two_writers(tmp_path: Path) -> None:
    states = make(tmp_path, 1)
    with (
        delta_files.writing_to(tmp_path),
        pytest.raises(BlockingIOError, match=r"another process writes .* try again"),
    ):
        tw.save_delta(stepped(states[1], 2), states[1], tmp_path)
    # Each believes that the newest version is its own.
    tw.save_delta(stepped(states[1], 2), states[1], tmp_path)
    with pytest.raises(ValueError, match="base is not version 2"):
        tw.save_delta(stepped(states[1], 3), states[1], tmp_path)


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def test_damage_anywhere_changes_nothing(tmp_path: Path) -> None:
    states = make(tmp_path, 2)
    path = tmp_path / file_name(2, 1)
    data = path.read_bytes()
    rng = np.random.default_rng(3)
    for at in [*rng.integers(0, len(data), 60).tolist(), len(data) - 1]:
        path.write_bytes(damaged(data, at))
        tensors = copied(states[0])
        try:
            tw.apply_delta(tensors, tmp_path)
        except tw.FormatError:
            assert same(tensors, states[0])
        else:
            # Padding in a header, or the buffer of a tensor that did not change.
            assert same(tensors, states[2])
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(tw.FormatError):
            tw.apply_delta(copied(states[0]), tmp_path)
    path.write_bytes(data)


def test_failing_reads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = make(tmp_path, 1)
    real = os.preadv
    calls = []

    def counting(*args: Any) -> int:
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(os, "preadv", counting)
    tw.apply_delta(copied(states[0]), tmp_path)
    for failing in range(len(calls)):
        left = [failing]

        def read(*args: Any, left: list[int] = left) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args)

        monkeypatch.setattr(os, "preadv", read)
        tensors = copied(states[0])
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            tw.apply_delta(tensors, tmp_path)
        assert same(tensors, states[0])


def test_files_that_were_renamed_or_are_of_another_directory(tmp_path: Path) -> None:
    states = make(tmp_path / "a", 2)
    old = tmp_path / "a" / file_name(2, 1)
    data = old.read_bytes()
    old.rename(tmp_path / "a" / file_name(3, 1))
    with pytest.raises(tw.FormatError, match="it was renamed"):
        tw.apply_delta(copied(states[1]), tmp_path / "a", version=3)
    other = tmp_path / "b"
    tw.save_delta(states[0], None, other)
    tw.save_delta(stepped(states[0], 8), states[0], other)
    (other / file_name(2, 1)).write_bytes(data)
    tensors = copied(states[0])
    with pytest.raises(tw.FormatError, match="made against another version 1") as error:
        tw.apply_delta(tensors, other)
    assert error.value.reason == "base_mismatch"
    assert same(tensors, states[0])
    tw.save_file(states[0], other / file_name(5))
    with pytest.raises(tw.FormatError, match=f"no {STATE_KEY}"):
        tw.apply_delta(copied(states[1]), other)


def note_of(text: str) -> StateNote:
    entries = json.dumps({"__metadata__": {STATE_KEY: text}}).encode()
    return state_note(read_directory(memoryview(len(entries).to_bytes(8, "little") + entries)))


GOOD = {"version": 3, "base_version": 2, "tensors": {"../../w": ["0" * 16, "1" * 16]}}


@pytest.mark.parametrize(
    "changed",
    [
        {"version": -1},
        {"version": 2},
        {"version": True},
        {"version": "3"},
        {"version": 10**18},
        {"version": 3.0},
        {"base_version": 3},
        {"base_version": "2"},
        {"base_version": None},
        {"tensors": None},
        {"tensors": [["w", None]]},
        {"tensors": {"w": None}},
        {"tensors": {"w": ["0" * 16]}},
        {"tensors": {"w": ["0" * 15, "0" * 16]}},
        {"tensors": {"w": ["0" * 16, "G" * 16]}},
        {"tensors": {"w": [0, 1]}},
        {"more": 1},
    ],
)
def test_hostile_notes(changed: dict[str, Any]) -> None:
    assert note_of(json.dumps(GOOD)) == StateNote(3, 2, GOOD["tensors"])  # type: ignore[arg-type]
    with pytest.raises(tw.FormatError) as error:
        note_of(json.dumps(GOOD | changed))
    assert error.value.reason == "bad_container"


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "{}", "7", '{"version":1}'])
def test_notes_that_are_none(text: str) -> None:
    with pytest.raises(tw.FormatError) as error:
        note_of(text)
    assert error.value.reason == "bad_container"


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path, 1)
    others = [
        "weight_v1.tw.safetensors",
        "weight_v000009.tw.safetensors.tmp",
        "x",
        "weight_v000009",
    ]
    others += ["weight_v0000005.tw.safetensors", "weight_v000001.from_v000002.tw.safetensors"]
    for name in others:
        (tmp_path / name).write_text("x")
    (tmp_path / file_name(8)).mkdir()
    assert tw.load_delta(tmp_path).keys() == first_state().keys()
    tw.prune_deltas(tmp_path, keep=0)
    assert all((tmp_path / name).exists() for name in others)


def test_names_of_tensors_are_no_paths(tmp_path: Path) -> None:
    old: State = {"../../etc/x": np.ones(2000, np.float32), "/abs\\..": np.arange(3)}
    new = {name: x + 1 for name, x in old.items()}
    folder = tmp_path / "deep" / "versions"
    tw.save_delta(old, None, folder)
    tw.save_delta(new, old, folder)
    tw.apply_delta(old, folder)
    assert same(old, new)
    assert [p.name for p in tmp_path.rglob("*") if p.is_dir()] == ["deep", "versions"]


def test_the_files_are_files_of_deltas(tmp_path: Path) -> None:
    from tightwire import convert

    states = make(tmp_path, 2)
    assert convert.verify_file(tmp_path / file_name(2, 1)) == 7
    convert.decompress_file(tmp_path / file_name(2, 1), tmp_path / "back.safetensors")
    # The file has two names of one tensor, and a plain one has two tensors.
    again = {name: x.copy() for name, x in states[1].items()}
    tw.save_delta(again, None, tmp_path / "whole")
    with pytest.raises(ValueError, match="base is not version 0"):
        tw.save_delta(again, tmp_path / "back.safetensors", tmp_path / "whole")
    del states[2]["head"]
    tw.save_delta(states[2], None, tmp_path / "again")
    assert not convert.diff_files(tmp_path / "back.safetensors", tmp_path / "again" / file_name(0))
    path = next(f for f in delta_files.delta_files(tmp_path) if f.version == 2)
    assert path.base_note() == BaseNote(file_name(1, 0), 2)


def test_patches() -> None:
    old = np.arange(100, dtype=np.uint16)
    assert patch_of(old, old.copy()) is None
    new = old.copy()
    new[[3, 99]] = 7
    patch = patch_of(old, new)
    assert patch is not None
    assert patch.places is not None
    assert patch.places.tolist() == [3, 99]
    dense = patch_of(old, old + np.uint16(1))
    assert dense is not None
    assert dense.places is None
    wide = np.zeros(40, "V16")
    other = wide.copy()
    other.view("<u8")[5] = 1
    patch = patch_of(wide, other)
    assert patch is not None
    assert patch.places is not None
    assert patch.places.tolist() == [2]


def test_a_version_without_a_delta_names_no_base(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    states = [{"w": rng.normal(size=N).astype(np.float32)} for _ in range(2)]
    tw.save_delta(states[0], None, tmp_path)
    tw.save_delta(states[1], states[0], tmp_path)
    assert base_note(read_header(tmp_path / file_name(1, 0))) is None
    assert tw.apply_delta(states[0], tmp_path) == 1
    assert states[0]["w"].tobytes() == states[1]["w"].tobytes()
