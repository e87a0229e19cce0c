"""fold where buffers are of codec raw, as codec delta encodes small tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tightwire as tw


@pytest.mark.parametrize("form", ["adaptive", "difference", "overwrite"])
@pytest.mark.parametrize("n", [1, 16, 100])
def test_fold_of_what_is_stored_raw(form: str, n: int) -> None:
    codec = tw.codec("delta", form=form)
    base, second, third = (np.arange(n) for _ in range(3))
    second[-1], third[0] = -1, -2
    steps = [codec.encode(second, base=base), codec.encode(third, base=second)]
    expected = codec.encode(third, base=base)
    assert bytes(tw.fold(*steps, base=base)) == bytes(expected)
    if n <= 16:
        assert expected.header.codec == "raw"
        assert bytes(tw.fold(*steps)) == bytes(steps[1])
    # One of them alone.
    raw = tw.encode(second, "raw"), tw.encode(third, "raw")
    for pair in ((raw[0], steps[1]), (steps[0], raw[1]), raw):
        assert bytes(tw.fold(*pair)) == bytes(raw[1])
    for pair in ((raw[0], steps[1]), (steps[0], raw[1])):
        assert bytes(tw.fold(*pair, base=base)) == bytes(expected)


def test_fold_with_raw_refuses_what_does_not_go_together() -> None:
    x = np.arange(1000)
    y = x.copy()
    y[5] = 0
    step = tw.encode(y, "delta", base=x)
    with pytest.raises(tw.FormatError, match="base_mismatch"):
        tw.fold(tw.encode(y, "raw"), step)
    with pytest.raises(ValueError, match="differ"):
        tw.fold(tw.encode(x[1:], "raw"), step)
    with pytest.raises(ValueError, match="buffer 0 is of huffman; allowed: delta, raw"):
        tw.fold(tw.encode(x, "huffman"), step)


def test_fold_where_a_tile_would_be_longer_than_plain() -> None:
    """Elements that neither step changes are known to the base alone."""
    base = np.zeros(70_000, np.uint8)
    chosen = np.arange(32_768) % 180 != 170
    second = base.copy()
    second[:16_000][chosen[:16_000]] = 1
    third = second.copy()
    third[16_000:32_768][chosen[16_000:]] = 2
    codec = tw.codec("delta", form="overwrite")
    steps = [codec.encode(second, base=base), codec.encode(third, base=second)]
    with pytest.raises(ValueError, match=r"a tile has to be stored plain. Needed: base"):
        tw.fold(*steps)
    both = tw.fold(*steps, base=base)
    assert bytes(both) == bytes(codec.encode(third, base=base))
    assert tw.decode(both, base=base).tobytes() == third.tobytes()


@pytest.mark.parametrize("form", ["adaptive", "difference", "overwrite"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_fold_against_what_the_first_makes_is_refused(form: str, chunks: int) -> None:
    """To overwrite, a receiver may have the result, but a fold starts from the base."""
    versions = [np.arange(70_000) for _ in range(3)]
    versions[1][5], versions[2][5:7], versions[2][69_000] = 0, 1, 2
    codec = tw.codec("delta", form=form)
    steps = [codec.encode(x, base=base, chunks=chunks) for base, x in itertools.pairwise(versions)]
    for base in versions[1:]:
        with pytest.raises(tw.FormatError, match="base_mismatch"):
            tw.fold(*steps, base=base)
    both = tw.fold(*steps, base=versions[0])
    assert bytes(both) == bytes(codec.encode(versions[2], base=versions[0], chunks=chunks))
