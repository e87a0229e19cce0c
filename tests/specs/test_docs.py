"""The code of the pages in docs, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_on_checkpoints_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "checkpoints.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "checkpoints.md", "exec"), names)
    assert names["rows"].shape == (100, 64)
    assert (names["whole"] == names["tensors"]["embed.weight"]).all()
    assert all((names["state"][n] == x).all() for n, x in names["tensors"].items())
    assert all((names["into"][n] == x).all() for n, x in names["tensors"].items())
