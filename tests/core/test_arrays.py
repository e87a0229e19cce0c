"""Arrays of every library and of every awkward kind."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw
from support import make_bits
from tightwire.formats.dtypes import BY_NAME, DType

torch = pytest.importorskip("torch")


def numpy_array(dtype: DType, shape: tuple[int, ...]) -> Any:
    n = int(np.prod(shape))
    return make_bits("normal", dtype, n).view(dtype.numpy).reshape(shape)


def test_numpy(any_dtype: DType) -> None:
    x = numpy_array(any_dtype, (30, 70))
    buf = tw.encode(x)
    y = tw.decode(buf)
    assert type(y) is np.ndarray
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert y.tobytes() == x.tobytes()
    assert tw.decode(buf.array).tobytes() == x.tobytes()


def test_torch(any_dtype: DType) -> None:
    dtype = getattr(torch, any_dtype.name, None)
    if dtype is None:
        pytest.skip(f"torch has no {any_dtype.name}")
    x = numpy_array(any_dtype, (30, 70))
    t = torch.from_numpy(x.view(np.uint8).copy()).view(dtype).reshape(30, 70)
    buf = tw.encode(t)
    y = tw.decode(buf)
    assert isinstance(y, torch.Tensor)
    assert (y.dtype, tuple(y.shape)) == (dtype, (30, 70))
    assert torch.equal(y.view(torch.uint8), t.view(torch.uint8))
    assert bytes(buf) == bytes(tw.encode(x))
    assert isinstance(buf.array, torch.Tensor)
    assert buf.array.dtype == torch.uint8
    assert torch.equal(torch.from_dlpack(buf), buf.array)
    again = tw.decode(buf.packed())
    assert isinstance(again, torch.Tensor)


@pytest.mark.slow
def test_jax(any_dtype: DType) -> None:
    jax = pytest.importorskip("jax")
    x = numpy_array(any_dtype, (30, 70))
    if any_dtype.name in ("int64", "uint64", "float64", "complex128"):
        pytest.skip("JAX has 64-bit types only in its x64 mode")
    a = jax.device_put(x)
    buf = tw.encode(a)
    y = tw.decode(buf)
    assert isinstance(y, jax.Array)
    assert (y.dtype, y.shape) == (a.dtype, a.shape)
    assert np.asarray(y).tobytes() == x.tobytes()
    assert bytes(buf) == bytes(tw.encode(x))
    with pytest.raises(TypeError, match="JAX"):
        tw.decode(buf, out=a)


def test_like_chooses_the_library() -> None:
    x = numpy_array(BY_NAME["bfloat16"], (5000,))
    data = bytes(tw.encode(x))
    assert isinstance(tw.decode(data), np.ndarray)
    for like in ("torch", torch.empty(0)):
        assert isinstance(tw.decode(data, like=like), torch.Tensor)
    with pytest.raises(ValueError, match="allowed"):
        tw.decode(data, like="tensorflow")


@pytest.mark.slow
def test_like_chooses_jax() -> None:
    jax = pytest.importorskip("jax")
    data = bytes(tw.encode(numpy_array(BY_NAME["bfloat16"], (5000,))))
    for like in ("jax", jax.numpy.zeros(1)):
        assert isinstance(tw.decode(data, like=like), jax.Array)


def test_any_dlpack_array() -> None:
    class Exporter:
        def __init__(self, x: Any) -> None:
            self.x = x

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self.x.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return self.x.__dlpack_device__()

    x = np.random.default_rng(0).standard_normal((60, 50)).astype(np.float32)
    assert tw.decode(tw.encode(Exporter(x))).tobytes() == x.tobytes()


def test_non_contiguous_arrays_come_back_in_their_own_order() -> None:
    x = numpy_array(BY_NAME["float32"], (64, 96))
    for view in (x.T, x[::2, ::3], x[::-1], np.asfortranarray(x), np.broadcast_to(x[0], (9, 96))):
        before = view.copy()
        y = tw.decode(tw.encode(view))
        assert np.array_equal(y, before)
        assert np.array_equal(view, before)
    t = torch.from_numpy(x)
    for view in (t.T, t[::2, 1::3], t.expand(3, 64, 96)):
        assert torch.equal(tw.decode(tw.encode(view)), view)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 5), (), (1,), (1, 1, 1)])
def test_small_and_empty_shapes(shape: tuple[int, ...], any_dtype: DType) -> None:
    x = numpy_array(any_dtype, shape)
    for chunks in (1, 2, 3):
        buf = tw.encode(x, chunks=chunks)
        for source in (buf, bytes(buf)):
            y = tw.decode(source)
            assert (y.dtype, y.shape) == (x.dtype, x.shape)
            assert y.tobytes() == x.tobytes()
        tw.verify(bytes(buf))
    t = tw.decode(bytes(tw.encode(x)), like="torch") if hasattr(torch, any_dtype.name) else None
    assert t is None or tuple(t.shape) == shape


def test_numpy_scalars() -> None:
    y = tw.decode(tw.encode(np.float32(1.5)))
    assert y.shape == ()
    assert y == np.float32(1.5)


def test_read_only_input() -> None:
    x = numpy_array(BY_NAME["float16"], (9000,))
    x.flags.writeable = False
    assert tw.decode(tw.encode(x)).tobytes() == x.tobytes()


def test_big_endian_input_keeps_its_values() -> None:
    for kind in (">f4", ">f2", ">i8", ">f8"):
        x = (np.arange(6000) * 0.37).astype(kind)
        y = tw.decode(tw.encode(x))
        assert y.dtype.isnative
        assert np.array_equal(x, y)


def test_torch_tensors_that_require_grad_or_are_lazy_views() -> None:
    p = torch.nn.Parameter(torch.randn(80, 80))
    assert torch.equal(tw.decode(tw.encode(p)), p.detach())
    c = torch.randn(50, 50, dtype=torch.complex64).conj()
    assert torch.equal(tw.decode(tw.encode(c)), c)
    neg = torch.view_as_complex(torch.randn(64, 2)).conj().imag
    assert torch.equal(tw.decode(tw.encode(neg)), neg)


@pytest.mark.parametrize(
    "x",
    [
        [1.0, 2.0],
        1.5,
        "text",
        None,
        np.array(["a"]),
        np.array([object()]),
        np.zeros(3, dtype=[("a", "f4")]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(4, np.longdouble),
        torch.zeros(3, 3).to_sparse(),
        torch.zeros(3, device="meta"),
    ],
)
def test_what_is_no_array_is_refused(x: Any) -> None:
    with pytest.raises(TypeError, match=r"support|array|data"):
        tw.encode(x)


def test_out_of_decode() -> None:
    x = numpy_array(BY_NAME["bfloat16"], (70, 100))
    buf = tw.encode(x)
    out = torch.empty(70, 100, dtype=torch.bfloat16)
    assert tw.decode(buf, out=out) is out
    assert out.view(torch.uint8).numpy().tobytes() == x.tobytes()
    with pytest.raises(ValueError, match="needed"):
        tw.decode(buf, out=np.empty((100, 70), ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="needed"):
        tw.decode(buf, out=np.empty((70, 100), np.float16))
    with pytest.raises(ValueError, match="contiguous"):
        tw.decode(buf, out=np.empty((100, 70), ml_dtypes.bfloat16).T)
    frozen = np.empty((70, 100), ml_dtypes.bfloat16)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        tw.decode(buf, out=frozen)


def test_out_of_encode() -> None:
    x = numpy_array(BY_NAME["bfloat16"], (70, 100))
    codec = tw.codec("zipccl")
    plan = codec.plan(x.shape, x.dtype)
    for room in (np.empty(plan.nbytes + 50, np.uint8), torch.empty(plan.nbytes, dtype=torch.uint8)):
        buf = codec.encode(x, out=room)
        assert tw.decode(buf).tobytes() == x.tobytes()
        assert bytes(np.asarray(room)[: plan.nbytes]) == bytes(buf.array)
    reused = codec.encode(-x, out=buf)
    assert tw.decode(reused).tobytes() == (-x).tobytes()
    with pytest.raises(ValueError, match="needs"):
        codec.encode(x, out=np.empty(100, np.uint8))
    with pytest.raises(ValueError, match="needed"):
        codec.encode(x, out=np.empty(plan.nbytes, np.int8))


def test_a_memoryview_at_any_address_decodes() -> None:
    x = numpy_array(BY_NAME["float32"], (9000,))
    data = bytes(tw.encode(x))
    for shift in range(9):
        moved = memoryview(b"\0" * shift + data)[shift:]
        assert tw.decode(moved).tobytes() == x.tobytes()
    assert tw.decode(bytearray(data)).tobytes() == x.tobytes()
    with pytest.raises(TypeError, match="uint8"):
        tw.decode(np.frombuffer(data, np.int16))


def test_selections() -> None:
    x = torch.from_numpy(numpy_array(BY_NAME["float32"], (100, 300)))
    buf = tw.encode(x, chunks=3)
    part = tw.decode(buf, start=500, stop=29000)
    assert torch.equal(part, x.reshape(-1)[500:29000])
    assert tw.decode(buf, start=29999).shape == (1,)
    assert tw.decode(buf, stop=0).shape == (0,)
    for start, stop in ((-1, 5), (5, 4), (0, 30001)):
        with pytest.raises(ValueError, match="allowed"):
            tw.decode(buf, start=start, stop=stop)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
def test_gpu_arrays_come_back_to_their_device(library: str) -> None:
    x = np.random.default_rng(0).standard_normal((300, 500)).astype(np.float32)
    if library == "torch":
        a = torch.from_numpy(x).cuda()
    elif library == "cupy":
        a = pytest.importorskip("cupy").asarray(x)
    else:
        jax = pytest.importorskip("jax")
        a = jax.device_put(x, jax.devices("gpu")[0])
    buf = tw.encode(a)
    assert bytes(buf) == bytes(tw.encode(x))
    y = tw.decode(buf)
    assert type(y) is type(a)
    if library == "torch":
        assert y.device == a.device
        y = y.cpu().numpy()
    elif library == "jax":
        assert y.devices() == a.devices()
        y = np.asarray(y)
    else:
        y = y.get()
    assert y.tobytes() == x.tobytes()
