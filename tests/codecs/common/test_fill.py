"""Results that are overwritten if something was wrong."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tightwire.codecs.common.fill_triton import _BLOCK, _PROGRAMS, fill_if  # noqa: E402

DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("value", [math.nan, -0.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nelem", [0, 1, _BLOCK - 1, 3 * _BLOCK + 5])
def test_only_where_a_word_says_so(place: str, nelem: int, dtype: str, value: float) -> None:
    kind = getattr(torch, dtype)
    for wrong in (None, 1, 3, 5, 2):
        words = torch.zeros(6, dtype=torch.int64, device=place)
        if wrong is not None:
            words[wrong] = 1 << 40
        # Words 1, 3 and 5 count.
        around = torch.full((nelem + 32,), 3, dtype=kind, device=place)
        out = around[16 : 16 + nelem]
        fill_if(words[1:], 2, out, value)
        wanted = torch.full_like(around, 3)
        if wrong is not None and wrong % 2:
            wanted[16 : 16 + nelem] = value
        assert torch.equal(around.view(torch.uint8), wanted.view(torch.uint8)), wrong


@pytest.mark.gpu
def test_more_blocks_than_programs() -> None:
    out = torch.ones(_BLOCK * _PROGRAMS * 2 + 7, dtype=torch.bfloat16, device="cuda")
    fill_if(torch.ones(1, dtype=torch.int64, device="cuda"), 1, out, math.nan)
    assert bool(out.isnan().all())
