"""The parts of a communicator: what they are made of, and what they may know."""

from __future__ import annotations

import ast
import gc
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire.adapters.collectives import tensors
from tightwire.adapters.collectives.auto_scale import AutoScale, Scaling
from tightwire.adapters.collectives.session import TOPOLOGIES, Options
from tightwire.adapters.collectives.steps import Steps
from tightwire.adapters.transports.threads import connect
from tightwire.formats.codec_ids import CODEC_IDS
from tightwire.formats.dtypes import BY_NAME

FOLDER = Path(tw.__file__).parent / "adapters" / "collectives"
FILES = sorted(FOLDER.glob("*.py"))
#: What tells codecs apart by their purpose: models of recorded times, and what is drawn of them.
ABOUT_CODECS = {"advice.py", "cost.py", "simulate.py"}


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_parts_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 800
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert sum(isinstance(child, ast.FunctionDef) for child in node.body) <= 35


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_generic_code_imports_no_codec(path: Path) -> None:
    if path.name in ABOUT_CODECS:
        return
    stems = {f"codecs.{name}" for name in CODEC_IDS}
    for name in imported(ast.parse(path.read_text())):
        assert not any(f"{name}.".startswith(f"{stem}.") for stem in stems), name


def test_the_options_are_the_arguments() -> None:
    arguments = list(inspect.signature(tw.Communicator).parameters.values())[2:]
    found = {argument.name: argument.default for argument in arguments}
    assert found == {field.name: field.default for field in fields(Options)}


def test_a_communicator_inherits_nothing_and_is_in_no_cycle() -> None:
    assert tw.Communicator.__bases__ == (object,)
    comm = tw.Communicator(connect(1)[0], "dynamiq", algorithm="auto")
    assert set(comm._sums.names()) == set(TOPOLOGIES)
    x = np.ones(4096, np.float32)
    comm.all_gather(x)
    comm.all_reduce(x, topology="ring")
    gone = [weakref.ref(part) for part in (comm, comm.session, comm.session.memory)]
    gc.disable()
    try:
        del comm
        assert [part() for part in gone] == [None] * 3
    finally:
        gc.enable()


def test_which_codecs_sum_in_the_network() -> None:
    found = {name for name in tw.list_codecs() if tw.codec(name).spec.sums_in_network}
    assert found == {"thc", "omnireduce"}


def test_scale_bytes_say_what_blocks_hold() -> None:
    for name in tw.list_codecs():
        assert tw.codec(name).spec.scale_bytes is None
    scales = tw.codec("mx", element="e4m3", scale_rule="agreed").spec.scale_bytes
    assert scales is not None
    assert (scales.block, scales.largest, scales.special) == (32, 254, 247)
    assert scales.bounds[127] == 448
    assert np.isfinite(scales.bounds[:247]).all()
    assert np.isnan(scales.bounds[247:]).all()
    with pytest.raises(ValueError, match="allowed: codecs with scale_bytes"):
        Scaling(AutoScale(), tw.codec("mx").spec, 2)


def test_a_gpu_works_in_the_sessions_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With functions of a GPU that note what they are given, and do what the host does."""
    pytest.importorskip("torch")
    gpu = pytest.importorskip("tightwire.gpu", exc_type=ImportError)
    codec, noted = tw.codec("mx"), []

    def encode_into(plan: Any, x: Any, data: Any, work: Any, key: Any, stats: Any) -> bool:
        noted.append(("encode", work.shape[0]))
        codec.encode(x.numpy(), out=data.numpy(), stats=stats, key=key)
        return True

    def sum_into(buffer: Any, x: Any, data: Any, work: Any, key: Any, stats: Any) -> bool:
        noted.append(("sum", work.shape[0]))
        codec.decode_add_encode(buffer, x.numpy(), out=data.numpy(), stats=stats, key=key)
        return True

    def decode_into(
        buffer: Any, out: Any, work: Any, start: int, stop: int, *, add: bool = False
    ) -> bool:
        noted.append((f"decode {start} {stop} {add}", work.shape[0]))
        values = tw.decode(buffer, start=start, stop=stop)
        out[...] = values + out if add else values
        return True

    for function in (encode_into, sum_into, decode_into):
        monkeypatch.setattr(gpu, function.__name__, function)
    monkeypatch.setattr(gpu, "adds_into", lambda plan, total: True)
    steps = Steps(tw.Communicator(connect(1)[0], codec).session)
    monkeypatch.setattr(tensors, "is_cuda", lambda _: True)
    import torch

    x = torch.ones(1024)
    plan = steps.memory.plan(BY_NAME["float32"], 1024)
    data, summed = (torch.zeros(plan.nbytes, dtype=torch.uint8) for _ in range(2))
    key, work = tw.Key(0), plan.scratch_nbytes
    steps.coding.encode_into(x, plan, data, key)
    buffer = tw.Buffer.wrap(plan, data)
    steps.coding.sum_into(buffer, x, summed, key)
    total = torch.full((1024,), 3.0)
    steps.coding.add_into(buffer, total)
    assert total.eq(4).all()
    steps.coding.add_chunks(buffer, total)
    assert total.eq(5).all()
    steps.coding.decode_into(tw.Buffer.wrap(plan, summed), total)
    assert total.eq(2).all()
    whole = [f"decode 0 1024 {add}" for add in (True, True, False)]
    assert noted == [(name, work) for name in ("encode", "sum", *whole)]
