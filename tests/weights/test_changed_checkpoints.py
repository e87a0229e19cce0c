"""Rows of checkpoints that are damaged, replaced, or cut short while a rank loads them."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from tightwire.contents import Contents

torch = pytest.importorskip("torch")
if not pytest.importorskip("torch.distributed").is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # noqa: E402
from torch.distributed.checkpoint.planner import LoadPlan  # noqa: E402

SHAPE, HALF = (3000, 64), 1500
READERS = {"dcp": tw.dcp.Reader, "model": tw.dcp.HuggingFaceReader}
WRITTEN = r"Tensors of this rank may have been written\. Needed: a copy"


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        yield


class SecondHalf(DefaultLoadPlanner):  # type: ignore[misc]
    """Asks for the second half of the rows, as one of two ranks; acts when all files are open."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._act: Callable[[], object] | None = act

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        parts = {"storage_offsets": torch.Size((HALF, 0)), "lengths": torch.Size((HALF, 64))}
        return replace(plan, items=[replace(item, **parts) for item in plan.items])

    def resolve_tensor(self, read_item: Any) -> Any:
        if self._act is not None:
            self._act()
            self._act = None
        return self.lookup_tensor(read_item.dest_index)[HALF:]


def state(value: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(SHAPE, generator=generator) + value for name in "abc"}


def save(kind: str, path: Path, value: float) -> None:
    if kind == "model":
        tw.save(state(value), path, overwrite=True)
    else:
        dcp.save(state(value), storage_writer=tw.dcp.Writer(path), no_dist=True)


def load(kind: str, path: Path, act: Callable[[], object], **options: Any) -> dict[str, Any]:
    found = {name: torch.zeros(SHAPE) for name in "abc"}
    reader = READERS[kind](path, **options)
    dcp.load(found, storage_reader=reader, planner=SecondHalf(act), no_dist=True)
    return found


@pytest.mark.parametrize("kind", READERS)
def test_damage_is_an_error_where_rows_are_loaded(tmp_path: Path, kind: str) -> None:
    """Wherever it is in the tensor. With verify=False it may pass."""
    save(kind, tmp_path / "x", 0)
    [path] = (tmp_path / "x").glob("*.safetensors")
    data = path.read_bytes()
    passed = 0
    for share in (0.4, 0.5, 0.6):
        broken = bytearray(data)
        broken[int(len(data) * share)] ^= 1
        path.write_bytes(broken)
        with pytest.raises(CheckpointException, match=rf"{path.name}: tensor 'b'.*{WRITTEN}"):
            load(kind, tmp_path / "x", lambda: None)
        with contextlib.suppress(CheckpointException):
            load(kind, tmp_path / "x", lambda: None, verify=False)
            passed += 1
    assert passed


class Halves(SecondHalf):
    """Asks for both halves of the rows, one after the other."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        zeros = torch.Size((0, 0))
        pairs = ((replace(i, storage_offsets=zeros, dest_offsets=zeros), i) for i in plan.items)
        return replace(plan, items=[item for pair in pairs for item in pair])

    def resolve_tensor(self, read_item: Any) -> Any:
        at = read_item.storage_offsets[0]
        return self.lookup_tensor(read_item.dest_index)[at : at + HALF]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("verify", [False, True])
def test_a_tensor_is_read_once_for_all_its_parts(
    tmp_path: Path, kind: str, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(kind, tmp_path / "x", 0)
    names, read = [], Contents.buffer

    def counting(self: Contents, name: str) -> Any:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(Contents, "buffer", counting)
    found = {name: torch.zeros(SHAPE) for name in "abc"}
    reader = READERS[kind](tmp_path / "x", verify=verify)
    dcp.load(found, storage_reader=reader, planner=Halves(), no_dist=True)
    assert all(torch.equal(found[n], x) for n, x in state(0).items())
    assert names == ["a", "b", "c"]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("verify", [False, True])
def test_a_checkpoint_that_is_replaced_is_read_as_it_was(
    tmp_path: Path, kind: str, verify: bool
) -> None:
    save(kind, tmp_path / "x", 0)

    def act() -> None:
        shutil.rmtree(tmp_path / "x")
        save(kind, tmp_path / "x", 100)

    found = load(kind, tmp_path / "x", act, verify=verify)
    assert all(torch.equal(found[n][HALF:], x[HALF:]) for n, x in state(0).items())


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_is_cut_is_an_error(tmp_path: Path, kind: str, verify: bool) -> None:
    save(kind, tmp_path / "x", 0)
    [path] = (tmp_path / "x").glob("*.safetensors")
    with pytest.raises(CheckpointException, match=rf"{path.name} became shorter.*{WRITTEN}"):
        load(kind, tmp_path / "x", lambda: os.truncate(path, 4096), verify=verify)


@pytest.mark.parametrize("kind", READERS)
def test_errors_of_the_system_say_what_was_written(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path / "x", 0)
    [path] = (tmp_path / "x").glob("*.safetensors")
    with pytest.raises(CheckpointException, match=rf"changed while.*{WRITTEN}.*{path.name}") as e:
        load(kind, tmp_path / "x", lambda: os.utime(path, (1, 1)))
    [(error, _)] = e.value.failures.values()
    assert WRITTEN[:20] in str(pickle.loads(pickle.dumps(error)))
    path.unlink()
    if kind == "dcp":
        with pytest.raises(CheckpointException, match=rf"This rank has written.*{path.name}"):
            load(kind, tmp_path / "x", lambda: None)


@pytest.mark.parametrize("size", [None, 0, 100])
def test_own_files_are_open_before_a_tensor_is_written(tmp_path: Path, size: int | None) -> None:
    """Files of DCP's own writer, one of them gone or cut short; also one that goes later."""
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)
    dcp.save(state(0), storage_writer=writer, no_dist=True)
    paths = sorted(tmp_path.glob("*.distcp"))
    assert len(paths) == 3
    data = paths[-1].read_bytes()
    found = {name: torch.zeros(SHAPE) for name in "abc"}
    for part in (None, SecondHalf()):
        if size is None:
            paths[-1].unlink()
        else:
            paths[-1].write_bytes(data[:size])
        with pytest.raises(CheckpointException, match="This rank has written nothing"):
            dcp.load(found, storage_reader=tw.dcp.Reader(tmp_path), planner=part, no_dist=True)
        assert not any(x.any() for x in found.values())
        paths[-1].write_bytes(data)
    found = load("dcp", tmp_path, lambda: shutil.rmtree(tmp_path))
    assert all(torch.equal(found[n][HALF:], x[HALF:]) for n, x in state(0).items())


def test_a_save_may_fail_when_the_new_checkpoint_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says so, and that ``except Exception`` does not catch the error."""
    save("dcp", tmp_path, 0)

    unlink = Path.unlink

    def fails(self: Path, missing_ok: bool = False) -> None:
        if self.suffix == ".safetensors":
            raise OSError(28, "No space left on device", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(CheckpointException, match="No space left") as caught:
        save("dcp", tmp_path, 100)
    monkeypatch.undo()
    assert not isinstance(caught.value, Exception)
    found = {name: torch.zeros(SHAPE) for name in "abc"}
    dcp.load(found, storage_reader=tw.dcp.Reader(tmp_path), no_dist=True)
    assert all(torch.equal(found[n], x) for n, x in state(100).items())
