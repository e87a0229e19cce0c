"""The studies of training: their settings, and what they are made of."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warm import NO_NAMES

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("numba")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

# Importing the studies takes seconds.
pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tagc", {}),
        ("ddp", {}),
        ("tagc_long", {"steps": 400, "curve": 128}),
        ("ddp_long", {"steps": 240, "curve": 64}),
        ("three_dimensions", None),
    ],
)
def test_settings_are_those_of_the_records(load: Any, name: str, options: Any) -> None:
    study = load("study_tagc")
    plan = load("study_3d").PLAN if options is None else study.Plan()._replace(**options)
    recorded = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    assert study.setting(plan) == recorded["setting"]


def test_stages_are_the_model(load: Any) -> None:
    study, accuracy = load("study_3d"), load("study_accuracy")
    torch.manual_seed(0)
    gpt = accuracy.GPT()
    first, last = (study.Stage(gpt, is_first) for is_first in (True, False))
    windows = torch.randint(accuracy.VOCAB, (3, accuracy.CONTEXT + 1))
    found = study.loss_of(last(first(windows[:, :-1])), windows[:, 1:])
    assert torch.equal(found, gpt.loss(windows))
    counts = [sum(p.numel() for p in m.parameters()) for m in (gpt, first, last)]
    assert counts[0] == counts[1] + counts[2]


def test_sums_in_bfloat16(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load("study_ddp")
    monkeypatch.setattr(study.dist, "all_reduce", lambda x: x.mul_(study.RANKS))
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    state, found = study.Rounded(), x.clone()
    state.average(found)
    assert torch.equal(found, (x / study.RANKS).bfloat16().mul(study.RANKS).float())
    assert not torch.equal(found, x)
    assert state.wire_bytes * 2 == state.raw_bytes == study.sent(x)


@pytest.mark.long
def test_three_dimensions(tmp_path: Path) -> None:
    out = tmp_path / "three.json"
    words = [str(BENCHMARKS / "study_3d.py"), "--steps", "4", "--every", "2", "--seed", "0"]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])
    subprocess.run(
        [sys.executable, *words, "--out", str(out)],
        env=os.environ | NO_NAMES | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        check=True,
        timeout=900,
    )
    plain, two, three = json.loads(out.read_text())["runs"]
    for run in (plain, two, three):
        steps, losses = zip(*run["curve"], strict=True)
        assert steps == (0, 2, 4)
        assert losses[-1] < losses[0] - 0.3
        assert run["loss"] == pytest.approx(plain["loss"], rel=0.02)
        assert [raw for raw, _ in run["sent"].values()] == [r for r, _ in plain["sent"].values()]
    shares = [{k: wire / raw for k, (raw, wire) in r["sent"].items()} for r in (plain, two, three)]
    assert all(share == pytest.approx(1, rel=0.02) for share in shares[0].values())
    assert shares[1]["tensor"] == pytest.approx(1, rel=0.02)
    assert shares[2]["tensor"] < 0.6
    assert max(shares[n][k] for n in (1, 2) for k in ("pipeline", "data")) < 0.25
