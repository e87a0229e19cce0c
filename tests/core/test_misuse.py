"""Calls that would lose data without a word: each is refused, and says what is allowed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw
from support import ALONE, make_bits
from tightwire.formats.dtypes import BY_NAME

torch = pytest.importorskip("torch")

from tightwire.adapters.training.hooks import check_options  # noqa: E402


def weights(n: int = 9000) -> Any:
    return make_bits("normal", BY_NAME["bfloat16"], n).view(ml_dtypes.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("x", [np.array([1 / 3]), np.array([2**40 + 1]), np.array([1 + 2j])])
def test_jax_does_not_narrow(x: Any) -> None:
    pytest.importorskip("jax")
    with pytest.raises(TypeError, match="jax_enable_x64"):
        tw.decode(tw.encode(x), like="jax")


def test_out_must_be_memory_that_the_caller_sees() -> None:
    c = torch.zeros(4, dtype=torch.complex64)
    for out in (c.conj(), torch.view_as_complex(torch.zeros(4, 2)).conj().imag):
        source = tw.encode(torch.ones(4, dtype=out.dtype))
        with pytest.raises(ValueError, match="lazy view"):
            tw.decode(source, out=out)
    with pytest.raises(ValueError, match="scalar"):
        tw.decode(tw.encode(np.float32(3)), out=np.float32(0))
    with pytest.raises(ValueError, match="scalar"):
        tw.codec("raw").decode_add(tw.encode(np.float32(3)), np.float32(1))


def test_overlapping_memory_is_refused() -> None:
    codec = tw.codec("zipccl")
    x = weights()
    plan = codec.plan(x.shape, x.dtype)
    room = np.zeros(plan.nbytes + x.nbytes, np.uint8)
    inside = room[plan.nbytes - 500 :][: x.nbytes].view(x.dtype)
    inside[:] = x
    with pytest.raises(ValueError, match="overlaps"):
        codec.encode(inside, out=room)
    assert inside.tobytes() == x.tobytes()
    buf = codec.encode(x, out=room[: plan.nbytes])
    with pytest.raises(ValueError, match="overlaps"):
        tw.decode(buf, out=room[500:][: x.nbytes].view(x.dtype))
    assert tw.decode(buf).tobytes() == x.tobytes()


def test_stats_that_overlap_out_are_refused() -> None:
    """Encoding zeroes or writes the buffer before it has read all of them."""
    codec = tw.codec("lhc")
    x = np.zeros(20000, np.float32)
    x[::99] = 1
    room = np.zeros(codec.plan(x.shape, x.dtype).nbytes, np.uint8)
    for at in (0, 5000, room.size - 2500):
        stats = room[at : at + 2500]
        stats[:] = codec.measure(x)
        before = room.tobytes()
        with pytest.raises(ValueError, match="out overlaps stats"):
            codec.encode(x, stats=stats, out=room)
        assert room.tobytes() == before


@pytest.mark.parametrize(
    ("name", "params", "error", "allowed"),
    [
        (["mx"], {}, TypeError, "a name, one of raw"),
        (["mx"], {"element": "e4m3"}, TypeError, "a name, one of raw"),
        ("mx", {"element": ["e4m3"]}, TypeError, "str, one of 'e4m3'"),
        ("mx", {"scale_rule": np.array(["floor"])}, TypeError, "str, one of 'floor'"),
        ("mx", {"element": "E4M3"}, ValueError, "str, one of 'e4m3'"),
        ("mx", {"foo": 1}, TypeError, "element, scale_rule"),
        ("raw", {"foo": 1}, TypeError, "no parameters"),
        ("taco", {"block": np.int64(256)}, TypeError, "int, one of 32"),
        ("taco", {"block": True}, TypeError, "int, one of 32"),
        ("taco", {"block": 100}, ValueError, "int, one of 32"),
        ("sdp4bit", {"group": 128.0}, TypeError, "int, one of 32"),
        ("sdp4bit", {"rotate": None}, TypeError, "str, one of"),
        ("tahquant", {"hidden": np.int32(64)}, TypeError, "int, 0 to"),
        ("tahquant", {"direction": 1}, TypeError, "str, one of 'forward'"),
        ("dynamiq", {"center": 1}, TypeError, "bool, one of True, False"),
        ("thc", {"bits": "8"}, TypeError, "int, one of"),
        ("omnireduce", {"values": []}, TypeError, "str, one of 'float16'"),
        ("lhc", {"mapping": {}}, TypeError, "str, one of"),
    ],
)
def test_parameters_that_are_none(
    name: Any, params: dict[str, Any], error: type[Exception], allowed: str
) -> None:
    with pytest.raises(error, match=f"(?i)allowed: .*{allowed}"):
        tw.codec(name, **params)


BAD_KEYS: tuple[tuple[Any, type[Exception]], ...] = (
    ((1, 2), TypeError),
    (5, TypeError),
    ("junk", TypeError),
    (tw.Key(True, False), TypeError),
    (tw.Key(1, np.True_), TypeError),
    (tw.Key(1, 2, np.array([3])), TypeError),  # type: ignore[arg-type]
    (tw.Key(1, 2, 3, 2.0), TypeError),  # type: ignore[arg-type]
    (tw.Key(np.array([1, 2])), TypeError),
    (tw.Key(1 << 64), ValueError),
    (tw.Key(1, 2, 3, 0), ValueError),
)


@pytest.mark.parametrize("name", ["mx", "taco", "thc", "dynamiq", "raw"])
@pytest.mark.parametrize("n", [3, 4096])
def test_keys_that_are_none(name: str, n: int) -> None:
    """Also where the codec draws nothing, or the tensor is stored raw."""
    codec = tw.codec(name, rounding="stochastic") if name == "taco" else tw.codec(name)
    x = torch.linspace(-1, 1, n)
    buf = codec.encode(x, key=tw.Key(1))
    for key, error in BAD_KEYS:
        for backend in (None, "ref", "triton"):
            with pytest.raises(error, match="allowed"):
                codec.encode(x, key=key, backend=backend)
            with pytest.raises(error, match="allowed"):
                codec.decode_add_encode(buf, x, key=key, backend=backend)


@pytest.mark.parametrize("name", ["sdp4bit", "taco", "thc", "dynamiq"])
def test_a_missing_key_is_noticed_whatever_the_size(name: str) -> None:
    rounding = {} if name in ("thc", "dynamiq") else {"rounding": "stochastic"}
    codec = tw.codec(name, **rounding)
    for n in (0, 3, 4096):
        with pytest.raises(ValueError, match="needs key"):
            codec.encode(np.ones(n, np.float32))
    assert codec.encode(np.arange(3)).header.codec == "raw"


def codec_of_rows(name: str) -> tw.Codec:
    return tw.codec(name, hidden=64) if name == "tahquant" else tw.codec(name)


@pytest.mark.parametrize("name", ALONE)
def test_sums_do_not_overwrite_what_they_read(name: str) -> None:
    codec, key = codec_of_rows(name), tw.Key(1)
    x = np.linspace(-1, 1, 4096, dtype=np.float32)
    buf = codec.encode(x, key=key)
    assert buf.header.codec == name
    size = buf.plan.nbytes
    room = np.zeros(size + x.nbytes, np.uint8)
    inside = room[size - 128 :][: x.nbytes]
    for library in ("numpy", "torch"):
        room[:size] = np.asarray(buf.array)
        before = room.tobytes()
        whole: Any = room if library == "numpy" else torch.from_numpy(room)
        acc: Any = inside.view(np.float32)
        acc = acc if library == "numpy" else torch.from_numpy(acc)
        for source in (whole[:size], tw.Buffer.wrap(buf.plan, whole[:size])):
            with pytest.raises(ValueError, match="acc overlaps the buffer"):
                codec.decode_add(source, acc)
        assert room.tobytes() == before
        terms = np.zeros(size + x.nbytes, np.uint8)
        terms[: x.nbytes] = x.view(np.uint8)
        y: Any = terms[: x.nbytes].view(np.float32)
        out: Any = terms
        if library == "torch":
            y, out = torch.from_numpy(y), torch.from_numpy(out)
        for backend in (None, "ref"):
            with pytest.raises(ValueError, match="out overlaps the array that is added"):
                codec.decode_add_encode(buf, y, out=out, key=key, backend=backend)
        assert terms[: x.nbytes].tobytes() == x.tobytes()


def test_triton_sums_in_steps_do_not_overwrite_what_they_read() -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    codec = tw.codec("zipccl")
    y = torch.linspace(-1, 1, 5000)
    buf = codec.encode(y)
    with pytest.raises(ValueError, match="out overlaps the array that is added"):
        codec.decode_add_encode(buf, y, out=y.view(torch.uint8), backend="triton")
    assert torch.equal(y, torch.linspace(-1, 1, 5000))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mx", "nvfp4", "taco", "zipccl", "raw"])
def test_sums_of_specials_raise_no_warnings(name: str, backend: str) -> None:
    """And nothing else, whatever the caller has NumPy do about them."""
    codec = tw.codec(name)
    for dtype in ("float16", "float32"):
        x = make_bits("special", BY_NAME[dtype], 3000).view(dtype)
        x[:200] = np.finfo(dtype).max
        x[200:400] = np.finfo(dtype).smallest_subnormal
        expected = bytes(codec.encode(x, backend=backend))
        for mode in ("warn", "raise"):
            with np.errstate(all=mode):
                buf = codec.encode(x, backend=backend)
                assert bytes(buf) == expected
                tw.decode(buf, backend=backend)
                for acc in (x.copy(), np.full(3000, 60000, np.float16), x.astype(np.float32)):
                    codec.decode_add(buf, acc)
                codec.decode_add_encode(buf, x, backend=backend)
                tw.verify(buf)


def test_masked_arrays_would_lose_their_mask() -> None:
    masked = np.ma.masked_array(np.ones(5), np.arange(5) % 4 == 0)
    with pytest.raises(TypeError, match="filled"):
        tw.encode(masked)
    with pytest.raises(TypeError, match="filled"):
        tw.decode(tw.encode(np.ones(5)), out=masked)


def test_arrays_elsewhere_than_in_host_memory() -> None:
    class OnDevice:
        def __dlpack__(self, **kwargs: Any) -> Any:
            raise AssertionError("must not be asked")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(TypeError, match="DLPack device 2"):
        tw.encode(OnDevice())


@pytest.mark.parametrize("stats", [[251], [-3], [120.7], [117, 118], 5, []])
def test_stats_are_checked(stats: Any) -> None:
    x = weights().astype(np.float32)
    with pytest.raises(ValueError, match="stats"):
        tw.encode(x, tw.codec("zipccl", window="sigma"), stats=np.array(stats))


def test_stats_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="takes no stats"):
        tw.encode(weights(), stats=np.array([117]))
    with pytest.raises(ValueError, match="takes no stats"):
        tw.encode(weights(), "raw", stats=np.array([117]))
    with pytest.raises(ValueError, match="window is 116"):
        tw.encode(weights(), tw.codec("zipccl", window=116), stats=np.array([117]))


def test_sums_are_of_floats() -> None:
    codec = tw.codec("zipccl")
    whole = np.array([2**40 + 1])
    with pytest.raises(TypeError, match="float dtypes"):
        codec.decode_add_encode(tw.encode(whole), whole)
    with pytest.raises(TypeError, match="float dtypes"):
        codec.decode_add(tw.encode(np.ones(3)), np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="float dtypes"):
        codec.decode_add(tw.encode(np.ones(3, np.int64)), np.zeros(3))
    with pytest.raises(ValueError, match="the buffer"):
        codec.decode_add_encode(tw.encode(np.ones(3)), np.ones(3, np.float32))
    with pytest.raises(ValueError, match="the buffer"):
        codec.decode_add_encode(tw.encode(np.ones(3, np.int32)), np.ones(3, np.float32))
    two = codec.decode_add_encode(tw.encode(weights()), weights(), chunks=2, backend="ref")
    assert tw.inspect(two).header.chunks == 2


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 1.5},
        {"threads": "2"},
        {"start": 1.5},
        {"max_nbytes": 1.5},
        {"stop": "9"},
    ],
)
def test_numbers_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="allowed: an integer"):
        tw.decode(bytes(tw.encode(weights())), **options)


def test_a_bad_call_does_not_poison_later_ones() -> None:
    codec = tw.codec("zipccl")
    bad: Any
    for bad in (2.0, "2", [2]):
        with pytest.raises(TypeError, match="allowed"):
            codec.plan((12345,), "float32", chunks=bad)
    x = np.zeros(12345, np.float32)
    assert codec.encode(x, chunks=2).plan == codec.plan((12345,), "float32", chunks=2)


def test_like_is_looked_at_before_the_work() -> None:
    data = bytearray(bytes(tw.encode(weights())))
    data[0] = 0
    with pytest.raises(ValueError, match="allowed"):
        tw.decode(data, like="bogus")


def test_other_bytes_like_objects() -> None:
    import array
    import mmap

    data = bytes(tw.encode(weights()))
    mapped = mmap.mmap(-1, len(data))
    mapped.write(data)
    for source in (array.array("B", data), mapped):
        assert tw.decode(source).tobytes() == weights().tobytes()


def test_partial_decoding_still_checks_whole_chunks() -> None:
    x = weights(12000)
    data = bytearray(bytes(tw.encode(x, chunks=3)))
    plan = tw.codec("zipccl").plan(x.shape, x.dtype, chunks=3)
    data[plan.static_offset + plan.static_stride + 100] ^= 4
    assert tw.decode(data, start=0, stop=4000).tobytes() == x[:4000].tobytes()
    for start, stop in ((4000, 8000), (100, 11000), (0, 12000)):
        with pytest.raises(tw.FormatError, match="checksum_mismatch"):
            tw.decode(data, start=start, stop=stop)
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        tw.decode(data, start=4001, stop=4002, verify=True)


def test_an_overflowed_buffer_says_what_would_be_enough() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 16, 40960, dtype=np.uint16).view(ml_dtypes.bfloat16)
    codec = tw.codec("zipccl")
    over = codec.encode(x, dynamic_capacity=2000)
    assert over.overflowed
    enough = int(over.sizes[0])
    again = codec.encode(x, dynamic_capacity=enough)
    assert not again.overflowed
    assert tw.decode(again).tobytes() == x.tobytes()
    assert codec.encode(x, dynamic_capacity=enough - 128).overflowed
    assert over.nbytes <= over.plan.nbytes


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(4)


def freed() -> Any:
    x = torch.zeros(4)
    x.untyped_storage().resize_(0)
    return x


def seen_by(transform: Any, x: Any) -> list[Any]:
    """The messages of the errors that encoding and decoding raise within a transformed function."""
    found: list[Any] = []

    def function(x: Any) -> Any:
        data = bytes(tw.encode(np.zeros(4, np.float32), "raw"))
        calls: list[Any] = [
            lambda: tw.encode(x),
            lambda: tw.decode(x),
            lambda: tw.decode(data, like=x),
        ]
        if isinstance(x, torch.Tensor):
            calls.append(lambda: tw.decode(data, out=x))
        for call in calls:
            with pytest.raises(TypeError, match="Allowed: ") as caught:
                call()
            found.append(str(caught.value))
        return None if transform is None else x.sum()

    (function if transform is None else transform(function))(x)
    return found


@pytest.mark.parametrize("make", [fake, freed, lambda: torch._efficientzerotensor(4)])
def test_tensors_without_memory(make: Any) -> None:
    x = make()
    found = seen_by(None, x)
    assert all("has no memory of its own" in message for message in found)


@pytest.mark.parametrize("name", ["vmap", "grad", "functionalize"])
def test_transforms_of_torch(name: str) -> None:
    found = seen_by(getattr(torch.func, name), torch.zeros(3, 4))
    assert all("outside of FakeTensorMode and torch.func transforms" in text for text in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jit", "vmap", "grad"])
def test_tracers_of_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros((3, 4) if name == "vmap" else 4)
    found = seen_by(getattr(jax, name), x)
    assert all("outside of jax.jit, jax.vmap and jax.grad" in text for text in found)


@pytest.mark.slow
def test_random_keys_of_jax() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"key<fry> .* Allowed: .*jax\.random\.key_data"):
        tw.encode(jax.random.key(0))
    data = jax.random.key_data(jax.random.key(0))
    assert (tw.decode(tw.encode(data)) == data).all()


@pytest.mark.parametrize("shape", [3, "33", None, {3}])
def test_a_shape_is_a_tuple(shape: Any) -> None:
    with pytest.raises(TypeError, match=r"shape is .*; allowed: a tuple of integers"):
        tw.codec("raw").plan(shape, "float32")
    assert tw.codec("raw").plan([3], "float32").shape == (3,)
    assert tw.codec("raw").plan(torch.Size([3]), "float32").shape == (3,)


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        ("fp64", "float64"),
        ("e4m3", "float8_e4m3fn"),
        ("e5m2", "float8_e5m2"),
    ],
)
def test_short_names_of_dtypes(short: str, name: str) -> None:
    from tightwire.adapters.transports.threads import connect

    plan = tw.codec("raw").plan((3,), short)
    assert plan.dtype.name == name
    for other in (name, plan.dtype.numpy, getattr(torch, name)):
        assert tw.codec("raw").plan((3,), other) == plan
    comm = tw.Communicator(connect(1)[0])
    x = np.ones(3)
    assert comm.all_reduce(x, wire=short).tolist() == [1.0] * 3
    assert comm.all_reduce(x, wire=getattr(torch, name)).tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [None, "bf17", "q8", 3, object(), np.dtype("M8[D]")])
def test_dtypes_that_there_are_not(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"dtype .*(supported|allowed): .*"):
        tw.codec("raw").plan((3,), dtype)


@pytest.mark.parametrize("transport", ["gloo", None, object()])
def test_a_communicator_needs_a_transport(transport: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected a transport, got .* Allowed: .*TorchDist"):
        tw.Communicator(transport)


def test_a_process_group_is_not_a_transport() -> None:
    import torch.distributed as dist

    group = dist.ProcessGroup(0, 1)
    with pytest.raises(TypeError, match=r"got ProcessGroup\. .*TorchDist\(group\)"):
        tw.Communicator(group)


def test_messages_name_what_was_given() -> None:
    buf = tw.encode(np.ones(3))
    yes: Any = "yes"
    for call, message in (
        (lambda: tw.encode([1, 2]), r"Expected an array, got list\. Allowed: arrays of NumPy"),
        (lambda: tw.dumps({"a": object()}), r"tensors\['a'\]: object cannot be stored"),
        (lambda: tw.dumps([object()]), r"tensors\['0'\]: object cannot be stored"),
        (lambda: tw.encode([1, 2]), r"np\.asarray, for one of arrays tightwire\.dumps"),
        (lambda: tw.encode({"a": 1}), r"For a dict of arrays there is tightwire\.dumps"),
        (lambda: tw.encode(3), r"np\.asarray makes an array of a number"),
        (lambda: tw.decode(None), "Expected bytes, a Buffer or a uint8 array, got NoneType"),
        (
            lambda: tw.decode("abc"),
            r"Expected bytes, a Buffer or a uint8 array, got str\. Files are read by tightwire\.o",
        ),
        (lambda: tw.decode(bytes(buf), verify=yes), "verify is 'yes'; allowed: True, False"),
        (lambda: tw.decode(bytes(buf), scratch=3), "scratch is 3; allowed: a uint8 array"),
        (lambda: tw.encode(np.ones(3), scratch=3), "scratch is 3; allowed: a uint8 array"),
        (lambda: tw.dumps({"a": {1, 2}}), r"tensors\['a'\]: set cannot be stored\. Allowed: arr"),
        (
            lambda: tw.dumps({"a": [1j]}),
            r"tensors\['a\.0'\]: complex cannot .* lists, tuples, text",
        ),
        (lambda: tw.loads(None), "Expected the bytes of a message: Expected bytes or a uint8 arr"),
        (lambda: tw.codec("zipccl", x=1), r"Unknown parameter 'x' of zipccl\. Allowed: window"),
        (lambda: tw.codec("raw", a=1, b=2), r"parameters 'a', 'b' of raw\. Allowed: no parameters"),
        (lambda: tw.decode(np.ones(3)), "Expected bytes, a Buffer or a uint8 array, got float64"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


@pytest.mark.parametrize("library", ["torch", "jax", "cupy"])
def test_a_library_that_is_not_installed(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buf = bytes(tw.encode(np.ones(3)))
    monkeypatch.setitem(sys.modules, library, None)
    needed = rf"like='{library}' needs {library}: pip install 'tightwire\[{library}\]'"
    with pytest.raises(ModuleNotFoundError, match=needed) as raised:
        tw.decode(buf, like=library)
    assert raised.value.name == library


def test_a_message_is_not_a_buffer_and_a_buffer_not_a_message() -> None:
    message = tw.dumps({"w": weights()})
    for read in (tw.decode, tw.inspect, tw.verify):
        with pytest.raises(tw.FormatError, match="This looks like a file or a message") as error:
            read(message)
        assert error.value.reason == "bad_magic"
    with pytest.raises(tw.FormatError) as other:
        tw.decode(b"PK\3\4" + message)
    assert "loads" not in other.value.detail
    for load in (tw.loads, tw.load_file):
        with pytest.raises(tw.FormatError, match="this is one buffer") as error:
            load(bytes(tw.encode(weights())))
        assert error.value.reason == "bad_container"


def test_unknown_options_are_named() -> None:
    connect = pytest.importorskip("tightwire.adapters.transports.threads").connect
    unknown: dict[str, Any] = {"lossy": True}
    linear = torch.nn.Linear(2, 2)
    calls: list[Callable[[], Any]] = [
        lambda: tw.Communicator(connect(1)[0], **unknown),
        lambda: tw.fsdp.compress(linear, **unknown),
        lambda: tw.tagc.compress(linear, **unknown),
        lambda: check_options(tw.ddp.register, unknown),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"options are \['lossy'\]; allowed: .*'codec'"):
            call()


@pytest.mark.parametrize("codec", ["lhc", "omnireduce"])
def test_codecs_for_sparse_gradients_are_refused(codec: str) -> None:
    linear = torch.nn.Linear(2, 2)
    calls: list[Callable[[], Any]] = [
        lambda: tw.fsdp.compress(linear, gradients=codec),
        lambda: tw.fsdp.compress(linear, codec=codec),
        lambda: tw.tagc.compress(linear, codec=codec),
        lambda: check_options(tw.ddp.register, {"codec": codec}),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"codec is '{codec}'; it .* Allowed: .*'mx'"):
            call()


def test_modules_that_need_torch_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, package: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("importlib.import_module", missing)
    for name in ("ddp", "fsdp", "moe", "tagc", "tensor_parallel"):
        with pytest.raises(ModuleNotFoundError, match=rf"{name} needs .*tightwire\[torch\]"):
            # As at the first use; a module that is loaded is an attribute.
            tw.__getattr__(name)
