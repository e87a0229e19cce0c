"""What writes versions of weights and checkpoints: what is there before, and what must be after."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import tightwire as tw

folders = tw.delta_folders
State = dict[str, Any]
DELTAS = ("save", "publish", "fold", "prune")
WORKS = (*DELTAS, "folders", "checkpoint", "checkpoint again")


def state(version: int) -> State:
    """The tensors of a version."""
    rng = np.random.default_rng(0)
    found = {f"w{i}": rng.normal(0, 0.02, (200, 100)).astype(np.float32) for i in range(2)}
    for step in range(version):
        found["w0"].reshape(-1)[step::50] *= 1.001
    return found | {"steps": np.full(1, version)}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def tensors_of(arrays: State) -> dict[str, Any]:
    """Tensors of PyTorch."""
    return {name: torch.from_numpy(x) for name, x in arrays.items()}


def save_checkpoint(folder: Path, version: int, name: str, base: str | None) -> None:
    """Save a version for torch.distributed.checkpoint."""
    against = None if base is None else folder / base
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = tw.dcp.Writer(folder / name, base=against, threads=1)
        dcp.save(tensors_of(state(version)), storage_writer=writer, no_dist=True)


def load_checkpoint(path: Path, into: dict[str, Any] | None = None) -> State:
    """Load a checkpoint."""
    tensors = tensors_of(state(9)) if into is None else into
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=tw.dcp.Reader(path), no_dist=True)
    return {name: x.numpy() for name, x in tensors.items()}


def prepare(work: str, folder: Path) -> None:
    """What is there before."""
    folder.mkdir()
    if work == "folders":
        folders.save(state(1), state(0), folder, version=1, compression="tightwire", threads=1)
    elif work in DELTAS:
        tw.save_delta(state(0), None, folder, threads=1)
        tw.save_delta(state(1), state(0), folder, threads=1)
        tw.save_delta(state(2), state(1), folder, threads=1)
        if work == "prune":
            tw.fold_deltas(folder, 0, 2, threads=1)
            tw.save_delta(state(2), None, folder, threads=1)
            tw.save_delta(state(3), state(2), folder, threads=1)
    else:
        save_checkpoint(folder, 0, "base", None)
        if work == "checkpoint again":
            save_checkpoint(folder, 1, "later", "base")


def perform(work: str, folder: Path) -> None:
    """What is killed."""
    if work == "save":
        tw.save_delta(state(3), folder, folder, chain_limit=2, threads=1)
    elif work == "publish":
        tw.publish(state(3), folder, threads=1).send()
    elif work == "fold":
        tw.fold_deltas(folder, 0, 2, threads=1)
    elif work == "prune":
        tw.prune_deltas(folder, keep=1)
    elif work == "folders":
        folders.save(state(2), state(1), folder, version=2, compression="tightwire", threads=1)
    else:
        save_checkpoint(folder, 2, "later", "base")


def found(work: str, folder: Path) -> int | None:
    """The newest version there, all that is there being whole. None: no version."""
    if work == "folders":
        tensors = state(0)
        version = folders.apply(tensors, folder, since=0)
        assert same(tensors, state(version))
        return version
    if work in DELTAS:
        return found_deltas(work, folder)
    assert same(load_checkpoint(folder / "base"), state(0))
    if not (folder / "later" / ".metadata").exists():
        return None
    tensors = load_checkpoint(folder / "later")
    version = int(tensors["steps"][0])
    assert same(tensors, state(version))
    return version


def found_deltas(work: str, folder: Path) -> int:
    worker = state(2)
    newest = tw.apply_delta(worker, folder)
    # A publisher that starts anew sends a version of its own, of the same tensors.
    assert same(worker, state(min(newest, 3)))
    for version in range(newest + 1):
        try:
            assert same(tw.load_delta(folder, version=version), state(min(version, 3)))
        except ValueError as error:
            # Only what is being removed may be gone.
            assert work == "prune", (version, error)
            assert version < 2, error
    return newest


def goal(work: str) -> int:
    """The version that a work makes the newest."""
    return {"fold": 2, "folders": 2, "checkpoint": 2, "checkpoint again": 2}.get(work, 3)


def earlier(work: str) -> int | None:
    """The newest version before it."""
    return {"folders": 1, "prune": 3, "checkpoint": None, "checkpoint again": 1}.get(work, 2)
