"""Work on the tensors of a file by several threads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw
from tightwire import convert, pipeline
from tightwire.pipeline import Job, Memory, grouped, in_order, read_ranges
from tightwire.storage import PathReader, open_reader

THREADS = (1, 2, 5)


def no_threads_left() -> bool:
    return not any(t.name.startswith("tightwire-file") for t in threading.enumerate())


def squares(count: int, work: Callable[[int], object]) -> list[Job[int]]:
    def job(i: int) -> Job[int]:
        def run(memory: Memory, threads: int) -> int:
            work(i)
            return i * i

        return Job(1000, run)

    return [job(i) for i in range(count)]


@pytest.mark.parametrize("threads", THREADS)
def test_results_come_in_the_order_of_the_jobs(threads: int) -> None:
    jobs = squares(40, lambda i: time.sleep(0.002 if i % 3 == 0 else 0))
    with in_order(jobs, threads) as results:
        assert list(results) == [i * i for i in range(40)]
    assert no_threads_left()


def test_jobs_run_side_by_side() -> None:
    both = threading.Barrier(2)
    with in_order(squares(2, lambda i: both.wait(30)), 2) as results:
        assert list(results) == [0, 1]


@pytest.mark.parametrize("threads", THREADS)
def test_the_first_error_in_the_order_of_the_jobs_is_raised(threads: int) -> None:
    def work(i: int) -> None:
        if i == 3:
            time.sleep(0.02)
        if i >= 3:
            raise ValueError(f"job {i}")

    with (
        pytest.raises(ValueError, match="job 3"),
        in_order(squares(9, work), threads) as results,
    ):
        list(results)
    assert no_threads_left()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_no_job_runs_when_the_caller_stops_early(error: type[BaseException]) -> None:
    begun: list[int] = []

    def work(i: int) -> None:
        begun.append(i)
        time.sleep(0.005)

    with pytest.raises(error), in_order(squares(1000, work), 2) as results:
        next(results)
        raise error
    assert no_threads_left()
    assert len(begun) < 20


@pytest.mark.parametrize("threads", THREADS)
def test_memory_of_jobs_under_way_stays_under_the_budget(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "BUDGET_NBYTES", 20 << 20)
    lock = threading.Lock()
    used = peak = 0
    blocks: set[int] = set()

    def job(nbytes: int) -> Job[int]:
        def run(memory: Memory, threads: int) -> int:
            nonlocal used, peak
            with lock:
                used += nbytes
                peak = max(peak, used)
            data = memory.take(nbytes)
            blocks.add(data.ctypes.data >> 12)
            return nbytes

        return Job(nbytes, run)

    sizes = [6 << 20] * 30
    with in_order([job(size) for size in sizes], threads) as results:
        for nbytes in results:
            with lock:
                used -= nbytes
    assert peak <= 20 << 20
    assert len(blocks) <= 3


def test_a_job_gets_all_threads_where_memory_lets_few_jobs_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "BUDGET_NBYTES", 1 << 20)
    shares = [
        Job(nbytes, lambda memory, threads: threads) for nbytes in (0, 1000, 3 << 18, 9 << 20)
    ]
    with in_order(shares, 4) as results:
        assert list(results) == [1, 1, 3, 4]
    with in_order(shares[:1], 4) as results:
        assert list(results) == [4]


def test_memory_has_the_address_of_the_file_position_in_its_page() -> None:
    def run(memory: Memory, threads: int) -> list[int]:
        return [
            memory.take(n, at).ctypes.data % 4096 for n, at in ((5, 0), (1 << 22, 4711), (1, 9))
        ]

    with in_order([Job(0, run)], 1) as results:
        assert list(results) == [[0, 4711 % 4096, 9]]


def test_consecutive_tensors_share_a_job_up_to_a_size() -> None:
    sizes = [1 << 20] * 5 + [9 << 20, 0, 4 << 20]
    assert [len(g) for g in grouped(sizes, lambda n: n)] == [4, 1, 1, 2]
    assert list(grouped([], int)) == []


def test_ranges_that_follow_one_another_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.arange(1000, dtype=np.uint16).view(np.uint8)
    path = tmp_path / "x"
    path.write_bytes(data.tobytes())
    starts: list[int] = []
    real = PathReader.read_into

    def read_into(self: PathReader, start: int, out: Any) -> None:
        starts.append(start)
        real(self, start, out)

    monkeypatch.setattr(PathReader, "read_into", read_into)
    ranges = [(3, 10), (10, 10), (10, 700), (800, 900)]

    def run(memory: Memory, threads: int) -> list[bytes]:
        return [part.tobytes() for part in read_ranges(reader, ranges, memory)]

    for source in (path, data):
        reader = open_reader(source)
        with in_order([Job(0, run)], 1) as results:
            assert next(results) == [data[a:b].tobytes() for a, b in ranges]
        reader.close()
    assert starts == [3, 800]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    """Tensors of many sizes and types: shared jobs, jobs of one, plain ones among them."""
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {"empty": np.empty((0, 3), np.float32)}
    for i in range(60):
        n = int(rng.integers(0, 30_000))
        dtype = (ml_dtypes.bfloat16, np.float32, np.float16, np.int8)[i % 4]
        found[f"t{i}"] = (rng.standard_normal(n) * 9).astype(dtype)
        found[f"bias{i}"] = np.full(int(rng.integers(0, 30)), i, np.int32)
    for i in range(2):
        found[f"large{i}"] = (rng.standard_normal(3_000_000) * 0.02).astype(ml_dtypes.bfloat16)
    return found


def plain_file(path: Path, tensors: dict[str, Any], shift: int) -> None:
    """A safetensors file whose data begins `shift` bytes off a multiple of 8."""
    names = {"bfloat16": "BF16", "float32": "F32", "float16": "F16", "int8": "I8", "int32": "I32"}
    fields, at = {}, 0
    for name, x in tensors.items():
        offsets = [at, at + x.nbytes]
        fields[name] = {"dtype": names[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
        at += x.nbytes
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8 + shift)
    data = b"".join(x.tobytes() for x in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 3])
def test_files_are_the_same_whatever_the_threads(
    tensors: dict[str, Any], shift: int, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    plain_file(source, tensors, shift)
    compressed, saved = set(), set()
    for threads in THREADS:
        path = tmp_path / f"{threads}.tw"
        reports = convert.compress_file(source, path, threads=threads)
        assert [r.name for r in reports] == list(tensors)
        compressed.add(path.read_bytes())
        convert.decompress_file(path, tmp_path / "back", threads=threads)
        assert (tmp_path / "back").read_bytes() == source.read_bytes()
        assert convert.verify_file(path) == len(tensors)
        tw.save_file(tensors, path, threads=threads)
        saved.add(path.read_bytes())
        loaded = tw.load_file(path, threads=threads)
        assert list(loaded) == list(tensors)
        for name, x in tensors.items():
            assert loaded[name].dtype == x.dtype
            assert loaded[name].shape == x.shape
            assert loaded[name].tobytes() == x.tobytes()
    assert len(compressed) == len(saved) == 1
    assert no_threads_left()


@pytest.mark.slow
@pytest.mark.parametrize("threads", THREADS)
def test_the_first_damaged_tensor_of_a_file_is_named(
    tensors: dict[str, Any], threads: int, tmp_path: Path
) -> None:
    path, back = tmp_path / "x.tw", tmp_path / "back"
    large = {name: x for name, x in tensors.items() if x.size > 10_000}
    tw.save_file(large, path)
    names = list(large)
    data = bytearray(path.read_bytes())
    with tw.open(path) as file:
        for name in names[5::7]:
            at = data.index(file.buffer(name).tobytes())
            data[at + 9000] ^= 1
    path.write_bytes(data)
    message = f"tensor '{names[5]}'"
    with pytest.raises(tw.FormatError, match=message):
        tw.load_file(path, threads=threads)
    with pytest.raises(tw.FormatError, match=message):
        tw.loads(bytes(data), threads=threads)
    with pytest.raises(tw.FormatError, match=message):
        convert.verify_file(path)
    with pytest.raises(tw.FormatError, match=message):
        convert.decompress_file(path, back, threads=threads)
    assert [p.name for p in tmp_path.iterdir()] == ["x.tw"]
    assert no_threads_left()


def test_results_share_no_memory_with_jobs(tensors: dict[str, Any]) -> None:
    data = tw.dumps(tensors)
    first = tw.loads(data)
    again = tw.loads(data)
    for x in again.values():
        x.reshape(-1).view(np.uint8)[:] = 0
    for name, x in tensors.items():
        assert first[name].tobytes() == x.tobytes()
        assert first[name].flags.writeable
