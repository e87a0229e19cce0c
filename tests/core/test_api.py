"""Plans, buffers, inspection, the companions of encode and decode, threads, imports."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw
from support import make_bits
from tightwire.codecs.common import threads
from tightwire.formats.dtypes import BY_NAME, DTYPES


def weights(n: int = 50000) -> Any:
    return make_bits("normal", BY_NAME["bfloat16"], n).view(ml_dtypes.bfloat16)


def test_a_plan_knows_every_size_before_the_data() -> None:
    codec = tw.codec("zipccl")
    for shape in ((0,), (5,), (4096,), (3, 7000), (2, 3, 5000)):
        for chunks in (1, 4):
            plan = codec.plan(shape, "bfloat16", chunks=chunks)
            buf = codec.encode(weights(int(np.prod(shape))).reshape(shape), chunks=chunks)
            assert buf.plan == plan
            assert buf.array.size == plan.nbytes
            assert plan.static_offset % 128 == plan.static_stride % 128 == 0
            assert plan.dynamic_stride % 128 == plan.nbytes % 128 == 0
            assert bytes(buf)[: plan.header.nbytes][32:] == bytes(plan.header_bytes)[32:]
            assert buf.nbytes == len(bytes(buf)) <= plan.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", np.float32, np.dtype("f2"), ml_dtypes.bfloat16])
def test_plans_take_any_spelling_of_a_dtype(dtype: Any) -> None:
    assert tw.codec("zipccl").plan((9999,), dtype).nelem == 9999


def test_plans_take_torch_dtypes() -> None:
    torch = pytest.importorskip("torch")
    assert tw.codec("zipccl").plan((9999,), torch.bfloat16).dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"chunks": 0}, ValueError),
        ({"chunks": 65537}, ValueError),
        ({"chunks": 2.0}, TypeError),
        ({"chunks": "2"}, TypeError),
        ({"dynamic_capacity": 1024.0}, TypeError),
        ({"shape": (-1, 5)}, ValueError),
        ({"shape": (2.7,)}, TypeError),
        ({"dtype": None}, TypeError),
        ({"dynamic_capacity": -1}, ValueError),
        ({"dtype": "float128"}, TypeError),
        ({"shape": (1,) * 33}, ValueError),
        ({"shape": (1 << 31, 1 << 31, 8)}, ValueError),
        ({"shape": (1 << 33,)}, ValueError),
    ],
)
def test_bad_plans_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    arguments = {"shape": (5000,), "dtype": "bfloat16"} | options
    with pytest.raises(error, match=r"allowed|supported|needs|more than"):
        tw.codec("zipccl").plan(arguments.pop("shape"), arguments.pop("dtype"), **arguments)


def test_a_tensor_beyond_one_chunk_gets_more_chunks() -> None:
    plan = tw.codec("zipccl").plan((1 << 33,), "bfloat16", chunks=None)
    assert plan.chunks == 3
    assert plan.chunk_range(2)[1] == 1 << 33


def test_buffer_views() -> None:
    x = weights(30000)
    buf = tw.encode(x, chunks=3)
    packed = bytes(buf)
    at = buf.plan.dynamic_offset
    for i in range(3):
        start = buf.plan.static_offset + i * buf.plan.static_stride
        assert packed[start : start + buf.plan.static_stride] == bytes(buf.static(i))
        assert packed[at : at + int(buf.sizes[i])] == bytes(buf.dynamic(i))
        at += -(-int(buf.sizes[i]) // 128) * 128
        assert np.shares_memory(buf.static(i), buf.array)
    assert at == len(packed) == buf.nbytes == len(buf)
    assert bytes(buf.packed()) == packed
    assert np.from_dlpack(buf).tobytes() == buf.array.tobytes()
    assert "zipccl bfloat16[30000]" in repr(buf)
    with pytest.raises(IndexError, match="allowed"):
        buf.static(3)


def test_inspect() -> None:
    x = weights(30000)
    info = tw.inspect(bytes(tw.encode(x, chunks=2)))
    assert (info.header.codec, info.header.dtype.name, info.header.shape) == (
        "zipccl",
        "bfloat16",
        (30000,),
    )
    assert info.raw_nbytes == x.nbytes
    assert info.nbytes == info.packed_nbytes
    assert 0.6 < info.ratio < 0.75
    assert [s["name"] for s in info.as_dict()["sections"]] == ["tiles", "index", "escapes"]


def test_checksums_can_be_left_out() -> None:
    x = weights()
    data = bytearray(bytes(tw.encode(x, checksum=False)))
    assert not tw.inspect(data).header.required & 1
    assert tw.decode(data).tobytes() == x.tobytes()


def test_a_limit_on_the_tensors_size() -> None:
    data = bytes(tw.encode(weights()))
    with pytest.raises(tw.FormatError, match="limit_exceeded"):
        tw.decode(data, max_nbytes=99999)
    assert tw.decode(data, max_nbytes=100000).size == 50000


@pytest.mark.parametrize("acc_dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_decode_add(acc_dtype: Any) -> None:
    x = weights(9000).reshape(90, 100)
    codec = tw.codec("zipccl")
    acc = np.linspace(-1, 1, 9000).reshape(90, 100).astype(acc_dtype)
    expected = acc + x.astype(acc_dtype)
    assert codec.decode_add(codec.encode(x), acc) is acc
    assert acc.tobytes() == expected.tobytes()
    with pytest.raises(ValueError, match="shape"):
        codec.decode_add(codec.encode(x), acc.T.copy())


def test_decode_add_encode() -> None:
    x, y = weights(9000), weights(9000)[::-1].copy()
    codec = tw.codec("zipccl")
    total = codec.decode_add_encode(codec.encode(x), y)
    expected = (x.astype(np.float32) + y.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert tw.decode(total).tobytes() == expected.tobytes()


def test_codecs_are_values() -> None:
    a, b = tw.codec("zipccl", window="sigma"), tw.codec("zipccl", window="sigma")
    assert a == b
    assert hash(a) == hash(b)
    assert a != tw.codec("zipccl")
    assert pickle.loads(pickle.dumps(a)) == a
    plan = a.plan((5000,), "bfloat16")
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert a.lossless
    assert not a.homomorphic
    assert a.reduce_op is None
    with pytest.raises(ValueError, match="Allowed: raw, zipccl"):
        tw.codec("gzip")
    with pytest.raises(TypeError, match="codec"):
        tw.encode(weights(), 7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="allowed"):
        tw.encode(weights(), backend="cuda")
    with pytest.raises(ValueError, match="allowed"):
        tw.encode(weights(), threads=0)


def test_types_that_a_codec_does_not_code_go_through_raw() -> None:
    for dtype in DTYPES:
        buf = tw.encode(np.zeros(5000, dtype.numpy))
        assert buf.header.codec == ("zipccl" if dtype.is_float else "raw")


def test_threads_may_encode_and_decode_at_once() -> None:
    tensors = [weights(1 << 20) * np.float32(i) for i in range(6)]
    expected = [bytes(tw.encode(x, threads=1)) for x in tensors]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            assert list(pool.map(lambda x: bytes(tw.encode(x)), tensors)) == expected
            back = list(pool.map(tw.decode, expected))
            assert all(y.tobytes() == x.tobytes() for x, y in zip(tensors, back, strict=True))


FORK = """
import os
import numpy as np, tightwire as tw
x = np.random.default_rng(0).standard_normal(3 << 20).astype(np.float32)
data = bytes(tw.encode(x, threads=4))
child = os.fork()
if child == 0:
    os._exit(0 if tw.decode(data, threads=4).tobytes() == x.tobytes() else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
def test_a_forked_child_has_threads_of_its_own() -> None:
    command = [sys.executable, "-c", FORK]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.strip() == "0"


LIGHT = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
import numpy
alone = time.perf_counter() - start
import tightwire
tightwire.encode, tightwire.save_file, tightwire.inspect
seconds = time.perf_counter() - start
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(alone, seconds, *sorted(new - set(sys.stdlib_module_names)))
"""


def _fresh_import(bytecode: Path) -> tuple[float, float, list[str]]:
    """Seconds of importing NumPy, and then tightwire too; the packages that came with them.

    The second run has compiled modules, as every run of a user has, in ``bytecode``.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", LIGHT]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    alone, seconds, *modules = run.stdout.split()
    return float(alone), float(seconds), modules


def test_import_needs_numpy_alone(tmp_path: Path) -> None:
    assert _fresh_import(tmp_path)[2] == ["numpy", "tightwire"]


def test_lazy_names_are_found() -> None:
    code = "import tightwire as tw; print(*dir(tw))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed = run.stdout.split()
    assert set(tw.__all__) <= set(listed)
    modules = ("ddp", "fsdp", "moe", "tagc", "tensor_parallel")
    for name in (*modules, "CollectiveError", "Communicator", "ErrorFeedback"):
        assert name in listed
        found = getattr(tw, name)
        assert found.__name__ == (
            f"tightwire.adapters.training.{name}" if name in modules else name
        )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tw.nothing


@pytest.mark.slow
def test_import_takes_under_150_ms_numpy_included(tmp_path: Path) -> None:
    found = [_fresh_import(tmp_path) for _ in range(12)]
    # A machine may be so busy that NumPy alone takes as long: then we may add as much again.
    assert min(total for _, total, _ in found) < max(0.15, 2 * min(alone for alone, _, _ in found))


def test_a_task_that_fails_waits_for_the_others() -> None:
    finished: list[int] = []

    def task(i: int) -> None:
        if i != 1:
            time.sleep(0.05)
            finished.append(i)
        else:
            raise ValueError("task 1")

    with pytest.raises(ValueError, match="task 1"):
        threads.run(task, [(i,) for i in range(4)])
    assert sorted(finished) == [0, 2, 3]
    with pytest.raises(ValueError, match="task 1"):
        threads.run(task, [(1,), (2,)])
    assert sorted(finished) == [0, 2, 2, 3]


NO_NUMBA = """
import sys
sys.modules["numba"] = None
import numpy as np, tightwire as tw
x = np.random.default_rng(0).standard_normal(20000).astype(np.float32)
buf = tw.encode(x)
assert tw.decode(bytes(buf)).tobytes() == x.tobytes()
tw.verify(buf)
try:
    tw.encode(x, backend="cpu")
except ValueError as error:
    print("numba" in str(error) and "pip install" in str(error))
"""


def test_without_numba_the_library_works() -> None:
    run = subprocess.run(
        [sys.executable, "-c", NO_NUMBA], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "True"
