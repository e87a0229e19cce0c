"""Callers in other floating-point modes: the same bytes, the same elements, their mode kept."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import float_modes
import tightwire as tw
from float_modes import MODES, mode
from support import ALONE, examples
from tightwire import homomorphic
from tightwire.codecs.common import threads as threads_module
from tightwire.codecs.common.float_mode import default_floats
from tightwire.formats.dtypes import BY_NAME
from tightwire.planning import HOST_BACKENDS
from tightwire.sparsify import sparsify

pytestmark = pytest.mark.skipif(not float_modes.SUPPORTED, reason="modes are not known here")

KEY = tw.Key(3, 1, 0, 2)
#: Whatever takes another way: parameters by codec.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "zipccl": ({"window": "sigma"},),
    "mx": ({"element": "e3m2"}, {"element": "int8"}),
    "sdp4bit": ({"bits": 8, "group": 32}, {"rotate": "none"}),
    "taco": ({"transform": "none", "scales": "merged", "format": "int8"},),
    "tahquant": ({"hidden": 1000}, {"hidden": 144, "direction": "backward"}),
    "thc": ({"norm": "tensor"},),
    "lhc": ({"ratio": 4.1, "sketch": "float16"},),
}
CODECS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in ALONE]
CODECS += [(name, params) for name, found in VARIANTS.items() for params in found]


def tensors(codec: tw.Codec) -> list[Any]:
    """Of each dtype of 16 and 32 bits: values about the least normal one, and of all sizes."""
    rng = np.random.default_rng(0)
    found = []
    for name in {"float16", "bfloat16", "float32"} & set(codec.dtypes):
        dtype = BY_NAME[name]
        least = 2.0 ** (2 - (1 << dtype.exponent - 1))
        small = rng.standard_normal((2, 1000)) * least * 2.0 ** rng.integers(-2, 3, (2, 1))
        wide = rng.standard_normal((2, 1000)) * 2.0 ** rng.integers(-12, 2, (2, 1000))
        for values in (small, wide):
            if codec.homomorphic:
                values[:, 200:] = 0
            found.append(values.astype(dtype.numpy))
    return sorted(found, key=lambda x: x.dtype.name)


def check(function: Callable[..., Any], *values: Any, **options: Any) -> Any:
    """What `function` gives in the default mode, after it gave the same in all others."""
    wanted = function(*values, **options)
    for name in MODES:
        with mode(name):
            found = function(*values, **options)
        assert found == wanted, name
    return wanted


def encoded(codec: tw.Codec, x: Any, **options: Any) -> bytes:
    return bytes(codec.encode(x, key=KEY, **options))


def decoded(data: bytes, **options: Any) -> bytes:
    found: bytes = tw.decode(data, **options).tobytes()
    return found


def summed(codec: tw.Codec, data: bytes, x: Any, backend: str) -> bytes:
    return bytes(codec.decode_add_encode(data, x, key=KEY, backend=backend))


def added(codec: tw.Codec, data: bytes, x: Any) -> bytes:
    found: bytes = codec.decode_add(data, x.copy()).tobytes()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.parametrize(("name", "params"), CODECS)
def test_no_mode_of_the_caller_changes_bytes_or_elements(
    name: str, params: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads_module, "MIN_SPAN_NBYTES", 1 << 10)
    codec = tw.codec(name, **params)
    for x in tensors(codec):
        stats = codec.measure(x)
        for threads in (1, 2) if backend == "cpu" else (1,):
            how: dict[str, Any] = {"threads": threads, "backend": backend}
            data = check(encoded, codec, x, **how)
            assert check(encoded, codec, x, stats=stats, **how) == data
            whole = check(decoded, data, **how)
            part = check(decoded, data, start=500, stop=1921, **how)
            assert part == whole[500 * x.itemsize : 1921 * x.itemsize]
        check(summed, codec, data, x, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "params"), CODECS)
def test_nor_what_is_measured_and_added(name: str, params: dict[str, Any]) -> None:
    codec = tw.codec(name, **params)
    for x in tensors(codec):
        if codec.measure(x) is not None:
            check(lambda x: codec.measure(x).tobytes(), x)
        buffer = codec.encode(x, key=KEY)
        data = bytes(buffer)
        for dtype in {x.dtype, np.dtype(np.float32)}:
            check(added, codec, data, x.astype(dtype))
        if codec.homomorphic:
            check(lambda b: bytes(homomorphic.add(b, b)), buffer)
        check(lambda x, y: repr(tw.error(x, y)), x, tw.decode(data))


@pytest.mark.slow
@examples(25)
@given(
    hnp.arrays(
        np.float32,
        st.integers(1, 700),
        elements=st.floats(width=32, allow_subnormal=True),
        fill=st.just(np.float32(1e-40)),
    ),
    st.sampled_from(CODECS),
    st.sampled_from(HOST_BACKENDS),
)
def test_of_any_elements(x: Any, codec: tuple[str, dict[str, Any]], backend: str) -> None:
    chosen = tw.codec(codec[0], **codec[1])

    def both() -> tuple[bytes, bytes] | str:
        try:
            data = bytes(chosen.encode(x, key=KEY, backend=backend))
        except ValueError as error:
            return str(error)
        return data, tw.decode(data, backend=backend).tobytes()

    check(both)


@pytest.mark.slow
def test_parameters_and_plans_are_those_of_the_default_mode() -> None:
    ratios = [k / 1000 for k in range(1001, 9000, 7)]

    def plans() -> list[bytes]:
        codecs = [tw.codec("lhc", ratio=ratio) for ratio in ratios]
        codecs += [tw.codec("dynamiq", bits=bits / 16) for bits in range(48, 128)]
        return [bytes(codec.plan((4096,), "float32").header_bytes) for codec in codecs]

    assert len(set(check(plans))) > len(ratios)


def test_a_share_that_is_zeroed_is_exact() -> None:
    x = np.arange(1, 1001, dtype=np.float32)

    shares = [k / 100 for k in range(1, 100)]

    def nonzero() -> list[int]:
        return [int(np.count_nonzero(sparsify(x, share)[0])) for share in shares]

    assert check(nonzero) == [1000 - 10 * k for k in range(1, 100)]


def test_the_mode_is_put_back_after_an_error() -> None:
    data = bytearray(bytes(tw.encode(np.ones(100, np.float32))))
    data[-1] ^= 1
    for name in MODES:
        with mode(name):
            with pytest.raises(tw.FormatError):
                tw.decode(data)
            with pytest.raises(ValueError, match="allowed"):
                tw.codec("lhc", ratio=0.5)


def test_nested_in_several_threads() -> None:
    """Each thread has its mode; one that ends, or fails, leaves the others alone."""
    start = threading.Barrier(len(MODES))
    failures: list[BaseException] = []

    @default_floats()
    def deep(left: int) -> int:
        if left:
            return deep(left - 1) + float_modes.control()
        raise KeyError

    def work(name: str) -> None:
        try:
            with mode(name):
                start.wait()
                for _ in range(200):
                    with pytest.raises(KeyError), default_floats():
                        assert float_modes.control() == 0
                        assert set(np.geterr().values()) == {"ignore"}
                        deep(3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in MODES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_flags_that_were_raised_within_warn_of_nothing() -> None:
    x = np.array([1e-45, 1e38, np.inf, np.nan] * 100, np.float32)
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        for name in ALONE:
            codec = tw.codec(name)
            data = bytes(codec.encode(x[:1], key=KEY))
            tw.decode(data)
            assert (np.ones(3) + np.ones(3)).sum() == 6.0


#: The pool's threads, and PyTorch's, are made by a thread that flushes.
POOL = """
import threading
import numpy as np
import torch
import tightwire as tw
from tightwire.codecs.common import threads

assert torch.set_flush_denormal(True)
# All threads of the pool are made here, and have the mode of this one.
n = max(threads.cpu_count(), 2)
together = threading.Barrier(n + 1)
jobs = [threads._executor().submit(together.wait) for _ in range(n)]
together.wait()
assert threads._executor().submit(lambda: (torch.tensor(1e-40) * 1).item()).result() == 0
x = np.random.default_rng(0).standard_normal((1024, 1024)) * 2.0**-16
x = x.astype(np.float16)
for name in ("tahquant", "taco"):
    codec = tw.codec(name)
    found = [bytes(codec.encode(x, threads=n)) for n in (2, 1)]
    decoded = [tw.decode(found[0], threads=n).tobytes() for n in (2, 1)]
    torch.set_flush_denormal(False)
    # Without the pool.
    wanted = bytes(codec.encode(x, threads=1))
    assert found == [wanted] * 2, name
    assert decoded == [tw.decode(wanted, threads=1).tobytes()] * 2, name
    torch.set_flush_denormal(True)
assert torch.tensor(1e-40) * 1 == 0
"""


@pytest.mark.slow
def test_a_pool_that_was_made_in_another_mode() -> None:
    pytest.importorskip("torch")
    run = subprocess.run([sys.executable, "-c", POOL], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
