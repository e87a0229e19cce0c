"""Short reads and writes, and files that are cut short or gone, of versions and checkpoints."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw

pytest.importorskip("torch")
if not pytest.importorskip("torch.distributed").is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from torch.distributed.checkpoint.api import CheckpointException

from versions import (
    earlier,
    found,
    goal,
    load_checkpoint,
    perform,
    prepare,
    same,
    save_checkpoint,
    state,
    tensors_of,
)

folders = tw.delta_folders
WRITERS = ("save", "fold", "folders", "checkpoint")


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder. Those of a checkpoint have names that are drawn."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


@pytest.mark.parametrize("work", WRITERS)
@pytest.mark.parametrize("nbytes", [1000, 13])
def test_short_writes(
    work: str, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system takes few bytes at a time."""
    counted = [0]

    class Short(io.FileIO):
        def write(self, data: Any, /) -> int:
            counted[0] += 1
            return super().write(memoryview(data).cast("B")[:nbytes])

    fdopen = os.fdopen

    def opened(descriptor: int, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode != "wb":
            return fdopen(descriptor, mode, *args, **options)
        return io.BufferedWriter(Short(descriptor, mode))

    for part in ("whole", "short"):
        prepare(work, tmp_path / part)
    perform(work, tmp_path / "whole")
    monkeypatch.setattr(os, "fdopen", opened)
    perform(work, tmp_path / "short")
    monkeypatch.undo()
    assert counted[0] > 2
    assert found(work, tmp_path / "short") == goal(work)
    if work != "checkpoint":
        assert contents(tmp_path / "short") == contents(tmp_path / "whole")


@pytest.mark.parametrize("work", ["save", "folders", "checkpoint again"])
@pytest.mark.parametrize("nbytes", [1000, 13])
def test_short_reads(
    work: str, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives few bytes at a time, to those who load and to those who write a delta."""
    folder, read, counted = tmp_path / "x", os.preadv, [0]
    prepare(work, folder)

    def short(descriptor: int, views: Any, offset: int) -> int:
        counted[0] += 1
        return read(descriptor, [views[0][:nbytes]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert found(work, folder) == earlier(work)
    perform(work, folder)
    assert found(work, folder) == goal(work)
    assert counted[0] > 10


def cuts(path: Path) -> list[int | None]:
    """Sizes to cut a file to; None: it is gone."""
    size = path.stat().st_size
    return [None, 0, 7, 100, size // 2, size - 1]


def broken(path: Path, size: int | None, act: Callable[[], None]) -> None:
    """Do something while a file is cut short or gone."""
    data = path.read_bytes()
    if size is None:
        path.unlink()
    else:
        path.write_bytes(data[:size])
    try:
        act()
    finally:
        path.write_bytes(data)


def failure(call: Callable[[], object]) -> str:
    """What an error of a checkpoint says."""
    with pytest.raises(CheckpointException) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", ["base", "later"])
def test_cut_checkpoints(tmp_path: Path, name: str) -> None:
    """An error that names the file and says what helps, before a tensor is written."""
    folder = tmp_path / "x"
    prepare("checkpoint again", folder)
    [tensors] = (folder / name).glob("*.safetensors")

    def load() -> None:
        into = tensors_of(state(5))
        text = failure(lambda: load_checkpoint(folder / "later", into))
        assert str(folder / name) in text
        advice = (
            "Needed: a copy of the checkpoint, or another one",
            "Needed: base",
            "the save did not end, or it is another directory",
            f"No such file or directory. This rank has written nothing: '{tensors}'",
        )
        assert any(words in text for words in advice)
        assert path.name in text or "no such checkpoint" in text
        assert same({n: x.numpy() for n, x in into.items()}, state(5))

    for path in (folder / name / ".metadata", tensors):
        for size in cuts(path):
            broken(path, size, load)
    assert found("checkpoint again", folder) == 1


def test_a_cut_file_is_found_before_others_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged one is not: some tensors have new values then, and the error says so."""
    # A file for each tensor, as ranks make them.
    module = importlib.import_module("tightwire.adapters.weights.dcp")
    group: Callable[..., Any] = module._by_device

    def one_each(*args: Any) -> list[Any]:
        return [[pair] for of_device in group(*args) for pair in of_device]

    monkeypatch.setattr(module, "_by_device", one_each)
    save_checkpoint(tmp_path, 0, "x", None)
    [path] = [p for p in (tmp_path / "x").glob("*.safetensors") if b'"w1"' in p.read_bytes()]
    into = tensors_of(state(5))

    def unchanged() -> None:
        text = failure(lambda: load_checkpoint(tmp_path / "x", into))
        assert path.name in text
        assert "This rank has written nothing. Needed: a copy" in text or "No such file" in text
        assert same({n: x.numpy() for n, x in into.items()}, state(5))

    for size in cuts(path):
        broken(path, size, unchanged)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    text = failure(lambda: load_checkpoint(tmp_path / "x", into))
    assert path.name in text
    assert "Tensors of this rank may have been written. Needed: a copy" in text
    assert into["w0"].numpy().tobytes() == state(0)["w0"].tobytes()


def test_a_cut_base_stops_the_save(tmp_path: Path) -> None:
    """Nothing is changed, and without the base the save succeeds."""
    folder = tmp_path / "x"
    prepare("checkpoint again", folder)
    [path] = (folder / "base").glob("*.safetensors")
    before = contents(folder / "later")

    def save() -> None:
        text = failure(lambda: perform("checkpoint again", folder))
        assert str(path) in text
        assert "Needed: another base, or base=None" in text or "No such file" in text
        assert contents(folder / "later") == before

    for size in cuts(path):
        broken(path, size, save)
    assert found("checkpoint again", folder) == 1
    save_checkpoint(folder, 2, "later", None)
    assert same(load_checkpoint(folder / "later"), state(2))


def test_cut_versions(tmp_path: Path) -> None:
    """Neither tensors nor the directory change, and a version stored whole helps."""
    folder = tmp_path / "x"
    prepare("save", folder)
    path = folder / "weight_v000002.from_v000001.tw.safetensors"

    def apply() -> None:
        before = contents(folder)
        tensors = state(0)
        for call in (
            lambda: tw.apply_delta(tensors, folder),
            lambda: tw.save_delta(state(3), state(2), folder),
            lambda: tw.fold_deltas(folder, 0, 2),
        ):
            with pytest.raises(tw.FormatError) as caught:
                call()
            assert str(path) in caught.value.detail
            assert "Needed: a copy of the file, or a version stored whole" in caught.value.detail
        assert same(tensors, state(0))
        assert contents(folder) == before
        assert tw.save_delta(state(3), None, folder) == 3
        assert same(tw.load_delta(folder), state(3))
        (folder / "weight_v000003.tw.safetensors").unlink()

    for size in cuts(path)[1:]:
        broken(path, size, apply)
    assert found("save", folder) == 2


def test_cut_folders(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    prepare("folders", folder)
    root = folder / "weight_v000001"

    def apply() -> None:
        tensors = state(0)
        with pytest.raises((ValueError, OSError)) as caught:
            folders.apply(tensors, folder, since=0)
        assert str(root) in str(caught.value)
        assert path.name in str(caught.value)
        if isinstance(caught.value, tw.FormatError):
            assert "Needed: a copy of the version's folder" in str(caught.value)
        assert same(tensors, state(0))

    for path in sorted(root.iterdir()):
        for size in cuts(path):
            broken(path, size, apply)
    assert found("folders", folder) == 1
