"""Codecs whose modules are not all there."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import tightwire as tw
from tightwire.codecs import mx
from tightwire.formats import codec_ids


def test_a_codec_without_a_compiled_form_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("tightwire.codecs.plainmx")
    vars(module).update({k: v for k, v in vars(mx).items() if not k.startswith("__")})
    module.SPEC = type("PlainMx", (mx.Mx,), {"name": "plainmx", "id": 40_000})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(codec_ids.CODEC_IDS, "plainmx", (40_000, "plainmx"))
    monkeypatch.setitem(codec_ids.NAMES_BY_ID, 40_000, "plainmx")
    x = np.ones(1000, np.float32)
    assert np.array_equal(tw.decode(tw.encode(x, "plainmx")), x)
    with pytest.raises(ValueError, match=r"no compiled form.*codecs.plainmx_cpu") as error:
        tw.encode(x, "plainmx", backend="cpu")
    assert "pip install" not in str(error.value)
