"""Arrays in zarr and numcodecs."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw

pytestmark = [pytest.mark.plugins, pytest.mark.filterwarnings("ignore")]
SHAPE = (300, 70, 5)
DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.int32, np.bool_]
BIG_ENDIAN = [">f2", ">f4", ">f8", ">i2", ">i8", ">u4", ">c8", ">c16"]


def array(dtype: Any) -> Any:
    return np.random.default_rng(0).normal(0, 1, SHAPE).astype(dtype)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zarr_stores_and_reads(dtype: Any, sharded: bool) -> None:
    zarr = pytest.importorskip("zarr")
    from tightwire.adapters.weights.plugins.zarr import TightwireCodec

    x, store = array(dtype), zarr.storage.MemoryStore()
    zarr.create_array(
        store,
        data=x,
        chunks=(100, 70, 3),
        shards=(300, 70, 6) if sharded else None,
        serializer=TightwireCodec(codec="huffman"),
        compressors=(),
    )
    found = zarr.open_array(store, mode="r")
    assert found.dtype == x.dtype
    assert '"codec": "huffman"' in str(found.metadata.to_dict()["codecs"]).replace("'", '"')
    assert found[:].tobytes() == x.tobytes()
    for selection in (
        np.s_[5:17],
        np.s_[5],
        np.s_[-1:, 3:9],
        np.s_[::7, 3:9, 1],
        np.s_[150:290, ::2, 1:4],
        np.s_[0:0],
    ):
        assert found[selection].tobytes() == x[selection].tobytes(), selection
    assert found.oindex[[3, 7, 299]].tobytes() == x[[3, 7, 299]].tobytes()
    assert found.vindex[[3, 7], [1, 2], [0, 4]].tobytes() == x[[3, 7], [1, 2], [0, 4]].tobytes()


def test_zarr_has_bfloat16() -> None:
    zarr = pytest.importorskip("zarr")
    importlib.import_module("tightwire.adapters.weights.plugins.zarr")

    store = zarr.storage.MemoryStore()
    made = zarr.create_array(
        store, shape=(10,), chunks=(5,), dtype=ml_dtypes.bfloat16, fill_value=1.5
    )
    made[2:4] = np.array([np.nan, -3], ml_dtypes.bfloat16)
    found = zarr.open_array(store)
    assert found.metadata.to_dict()["data_type"] == "bfloat16"
    assert found.dtype == ml_dtypes.bfloat16
    assert found[0] == 1.5
    assert found[3] == -3
    assert np.isnan(found[2])


def test_zarr_stores_an_array_without_dimensions() -> None:
    zarr = pytest.importorskip("zarr")
    from tightwire.adapters.weights.plugins.zarr import TightwireCodec

    store = zarr.storage.MemoryStore()
    made = zarr.create_array(
        store, data=np.array(4.5, "f4"), serializer=TightwireCodec(), compressors=()
    )
    assert made[()] == 4.5
    assert made[...] == 4.5
    made[()] = -2
    assert zarr.open_array(store)[()] == -2


@pytest.mark.parametrize("selection", [np.s_[:], np.s_[2:4], np.s_[3], np.s_[::2]])
@pytest.mark.parametrize(
    ("other", "message"),
    [(np.ones((100, 10), "f4"), "of shape"), (np.ones((10, 100), "i4"), "of int32")],
)
def test_zarr_refuses_another_chunk(other: Any, message: str, selection: Any) -> None:
    zarr = pytest.importorskip("zarr")
    from tightwire.adapters.weights.plugins.zarr import TightwireCodec

    def stored(x: Any) -> tuple[dict[str, Any], Any]:
        store: dict[str, Any] = {}
        memory = zarr.storage.MemoryStore(store)
        options = {"serializer": TightwireCodec(), "compressors": (), "fill_value": -1}
        return store, zarr.create_array(memory, data=x, chunks=x.shape, **options)

    store, found = stored(np.zeros((10, 100), "f4"))
    store["c/0/0"] = stored(other)[0]["c/0/0"]
    with pytest.raises(tw.FormatError, match=message):
        found[selection]


def test_zarr_raises_for_damage_and_for_lossy_codecs() -> None:
    zarr = pytest.importorskip("zarr")
    from tightwire.adapters.weights.plugins.zarr import TightwireCodec

    store: dict[str, Any] = {}
    found = zarr.create_array(
        zarr.storage.MemoryStore(store),
        data=array(np.float32),
        chunks=SHAPE,
        serializer=TightwireCodec(),
        compressors=(),
    )
    (name,) = (name for name in store if name.startswith("c/"))
    data = bytearray(store[name].to_bytes())
    data[5000] ^= 1
    store[name] = type(store[name]).from_bytes(bytes(data))
    with pytest.raises(tw.FormatError):
        found[:]
    with pytest.raises(ValueError, match="codec is 'mx'"):
        TightwireCodec(codec="mx")
    with pytest.raises(TypeError, match="is not supported"):
        zarr.create_array(
            zarr.storage.MemoryStore(), shape=(3,), dtype="U3", serializer=TightwireCodec()
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_numcodecs_encodes_and_decodes(dtype: Any) -> None:
    numcodecs = pytest.importorskip("numcodecs")
    importlib.import_module("tightwire.adapters.weights.plugins.numcodecs")

    codec = numcodecs.get_codec({"id": "tightwire"})
    assert numcodecs.get_codec(codec.get_config()) == codec
    x = array(dtype)
    data = codec.encode(x)
    assert data == bytes(tw.codec("zipccl").encode(x.ravel()))
    assert codec.decode(data).dtype == x.dtype
    assert codec.decode(data).tobytes() == x.tobytes()
    out = np.zeros_like(x)
    assert codec.decode(data, out=out) is out
    assert out.tobytes() == x.tobytes()
    with pytest.raises(ValueError, match="out has"):
        codec.decode(data, out=np.zeros(x.nbytes + 8, np.uint8))


@pytest.mark.parametrize("dtype", BIG_ENDIAN)
def test_numcodecs_returns_bytes_in_the_other_byte_order_as_they_lie(dtype: str) -> None:
    numcodecs = pytest.importorskip("numcodecs")
    importlib.import_module("tightwire.adapters.weights.plugins.numcodecs")

    codec = numcodecs.get_codec({"id": "tightwire"})
    x = np.arange(5000).reshape(50, 100).astype(dtype)
    for y in (x, np.asfortranarray(x)):
        data = codec.encode(y)
        assert codec.decode(data).tobytes() == y.tobytes(order="A")
        out = np.zeros_like(y)
        assert codec.decode(data, out=out) is out
        assert np.array_equal(out, x)
    with pytest.raises(TypeError, match="is not supported"):
        codec.encode(np.array(["a"], ">U1"))


@pytest.mark.parametrize("dtype", BIG_ENDIAN)
def test_zarr_v2_reads_the_other_byte_order(dtype: str) -> None:
    zarr = pytest.importorskip("zarr")
    from tightwire.adapters.weights.plugins.numcodecs import Tightwire

    x, store = np.arange(5000).astype(dtype), zarr.storage.MemoryStore()
    options = {"zarr_format": 2, "compressors": Tightwire(), "filters": None}
    zarr.create_array(store, data=x, chunks=(1000,), **options)
    found = zarr.open_array(store)
    assert found.dtype == x.dtype
    assert np.array_equal(found[:], x)


def test_numcodecs_takes_words_for_bfloat16() -> None:
    numcodecs = pytest.importorskip("numcodecs")
    importlib.import_module("tightwire.adapters.weights.plugins.numcodecs")

    codec = numcodecs.get_codec({"id": "tightwire", "dtype": "bfloat16", "codec": "huffman"})
    words = array(ml_dtypes.bfloat16).view(np.uint16)
    data = codec.encode(words)
    assert len(data) < 0.69 * words.nbytes
    assert np.array_equal(codec.decode(data).view(np.uint16), words.ravel())
    with pytest.raises(ValueError, match="codec is 'mx'"):
        numcodecs.get_codec({"id": "tightwire", "codec": "mx"})


def test_zarr_v2_stores_by_numcodecs() -> None:
    zarr = pytest.importorskip("zarr")
    from tightwire.adapters.weights.plugins.numcodecs import Tightwire

    x, store = array(np.float32), zarr.storage.MemoryStore()
    zarr.create_array(store, data=x, zarr_format=2, compressors=Tightwire(), chunks=(100, 70, 3))
    assert np.array_equal(zarr.open_array(store)[:], x)
