"""Files to a GPU and back. Without one the interpreter runs the kernels, on host memory."""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tightwire import files, gpu_files, pinned  # noqa: E402
from tightwire.contents import Contents, read_header  # noqa: E402
from tightwire.formats.container import compressed_metadata  # noqa: E402
from tightwire.storage import reading  # noqa: E402

pytestmark = pytest.mark.fast_cases(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    """Where kernels run."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and slots so small that little data goes through many of them."""
    monkeypatch.setattr(gpu_files, "WINDOW_NBYTES", 20_000)
    monkeypatch.setattr(pinned, "SLOT_NBYTES", 4096)
    monkeypatch.setattr(
        pinned, "_pools", {False: pinned.Pool(False, 3), True: pinned.Pool(True, 3)}
    )


def model() -> dict[str, Any]:
    """A tensor of every kind that is decoded in another way."""
    torch.manual_seed(0)
    bits = torch.randint(-(1 << 15), 1 << 15, (9001,), dtype=torch.int16)
    return {
        "bfloat16": torch.randn(3, 4096).bfloat16(),
        "float32": torch.randn(5000) * 0.02,
        "float16": torch.randn(4097).half(),
        "float8_e4m3fn": torch.randn(6000).to(torch.float8_e4m3fn),
        "float64": torch.randn(300).double(),
        "stored raw": bits.view(torch.bfloat16),
        "int64": torch.arange(3000),
        "int8": torch.randint(-128, 127, (5001,), dtype=torch.int8),
        "bool": torch.rand(777) > 0.5,
        "complex64": torch.randn(10, dtype=torch.complex64),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "bfloat16 too": torch.randn(3, 4096).bfloat16(),
    }


def bits(x: Any) -> Any:
    return x.detach().cpu().reshape(-1).view(torch.uint8)


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(
        found[name].dtype == x.dtype
        and found[name].shape == x.shape
        and torch.equal(bits(found[name]), bits(x))
        for name, x in expected.items()
    )


@pytest.fixture(autouse=True)
def slots_come_back() -> Iterator[None]:
    """Whatever happened, no slot is kept and no thread is left."""
    yield
    for slots in pinned._pools.values():
        assert len(slots._free) == slots._made
    assert not [t for t in threading.enumerate() if t.name.startswith("tightwire-")]


def load(path: Path, device: Any) -> dict[str, Any]:
    with reading(path) as reader:
        (found,) = gpu_files.load([Contents(reader)], device, 1 << 40)
    return found


def save(tensors: Any, path: Path) -> None:
    """As `save_file` of tensors of a GPU."""
    codec = tw.codec("zipccl")
    draft, found = files.drafted(tensors, codec)
    with open(path, "wb") as file:
        gpu_files.write_container(file, draft, {n: found[n] for n in draft.plans}, codec)


@pytest.mark.usefixtures("small")
def test_all_kinds_of_tensors(device: Any, tmp_path: Path) -> None:
    tensors = model()
    tw.save_file(tensors, tmp_path / "x")
    found = load(tmp_path / "x", device)
    assert set(found) == set(tensors)
    assert same(found, tensors)
    assert all(x.device == device for x in found.values())


def test_one_window(device: Any, tmp_path: Path) -> None:
    tensors = model()
    tw.save_file(tensors, tmp_path / "x")
    assert same(load(tmp_path / "x", device), tensors)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("params", [{"window": "sigma"}, {"window": 119}])
def test_windows_per_tensor(params: dict[str, Any], device: Any, tmp_path: Path) -> None:
    tensors = {k: v for k, v in model().items() if k.startswith(("bfloat16", "stored"))}
    tw.save_file(tensors, tmp_path / "x", tw.codec("zipccl", **params))
    assert same(load(tmp_path / "x", device), tensors)


@pytest.mark.usefixtures("small")
def test_many_chunks(device: Any, tmp_path: Path) -> None:
    x = torch.randn(40_000).bfloat16()
    odd = torch.randn(9_999).bfloat16()
    buffers = {"a": tw.encode(x, chunks=3), "b": tw.encode(odd, chunks=4)}
    parsed = {name: buffer.parsed() for name, buffer in buffers.items()}
    plans = {name: p.plan for name, p in parsed.items()}
    draft = files.Draft(list(plans), plans, metadata=compressed_metadata({}))
    with open(tmp_path / "x", "wb") as file:
        encoded = [files.Encoded([p.packed_nbytes], p.pack()) for p in parsed.values()]
        files.write_container(file, draft, encoded)
    assert same(load(tmp_path / "x", device), {"a": x, "b": odd})


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_damage_has_the_reason_that_the_host_gives(device: Any, tmp_path: Path) -> None:
    tensors = {k: v for k, v in model().items() if k in ("float16", "stored raw", "int8")}
    path = tmp_path / "x"
    tw.save_file(tensors, path)
    data = path.read_bytes()
    at = read_header(path).data_at
    rng = np.random.default_rng(0)
    for place in [at + 9, at + 40, at + 130, *rng.integers(at, len(data), 12).tolist()]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(tw.FormatError) as host:
            tw.load_file(path)
        with pytest.raises(tw.FormatError) as found:
            load(path, device)
        assert found.value.reason == host.value.reason, place
        assert str(path) in str(found.value)


@pytest.mark.usefixtures("small")
def test_a_file_that_becomes_shorter(device: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    tw.save_file(model(), path)
    with reading(path) as reader:
        found = Contents(reader)
        os.truncate(path, path.stat().st_size - 30_000)
        with pytest.raises(tw.FormatError, match=r"became shorter") as error:
            gpu_files.load([found], device, 1 << 40)
    assert error.value.reason == "truncated"


@pytest.mark.usefixtures("small")
def test_transfers_at_the_same_time_share_slots(device: Any, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 150_000, np.uint8).tobytes()
    path = tmp_path / "x"
    path.write_bytes(data)
    ranges = list(itertools.pairwise(range(0, 150_001, 25_000)))
    outcomes: list[bytes] = []

    def task() -> None:
        with (
            reading(path) as reader,
            pinned.Transfer([[pinned.Range(reader, *r)] for r in ranges], device) as t,
        ):
            outcomes.append(b"".join(staging.cpu().numpy().tobytes() for staging in t))

    threads = [threading.Thread(target=task) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [data] * 4


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 100_001])
@pytest.mark.usefixtures("small")
def test_bytes_there_and_back(nbytes: int, device: Any, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    path = tmp_path / "x"
    with open(path, "wb+") as file:
        with pinned.Writer(file.fileno(), device) as writer:
            halves = torch.from_numpy(data).to(device).tensor_split(2)
            writer.write(halves[0], 5)
            writer.write(halves[1], 5 + halves[0].numel())
        assert path.read_bytes()[5:] == data.tobytes()
        cuts = [5 + nbytes * i // 7 for i in range(8)]
        ranges = list(itertools.pairwise(cuts))
        with (
            reading(path) as reader,
            pinned.Transfer([[pinned.Range(reader, *r)] for r in ranges], device) as transfer,
        ):
            found = [staging.cpu().numpy().copy() for staging in transfer]
    assert np.concatenate(found).tobytes() == data.tobytes()


@pytest.mark.usefixtures("small")
def test_saved_bytes_are_those_of_the_host(device: Any, tmp_path: Path) -> None:
    tensors = model()
    tw.save_file(tensors, tmp_path / "host")
    expected = (tmp_path / "host").read_bytes()
    save({name: x.to(device) for name, x in tensors.items()}, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == expected


@pytest.mark.gpu
@pytest.mark.usefixtures("small")
def test_save_and_load_of_a_gpu(tmp_path: Path) -> None:
    """The public calls: the bytes of the host, back in memory of the GPU."""
    tensors = model()
    tw.save_file(tensors, tmp_path / "host", metadata={"a": "b"})
    on_gpu = {name: x.cuda() for name, x in tensors.items()}
    tw.save_file(on_gpu, tmp_path / "gpu", metadata={"a": "b"})
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "host").read_bytes()
    loaded = tw.load_file(tmp_path / "gpu", like=on_gpu["bool"])
    assert same(loaded, tensors)
    assert all(x.is_cuda for x in loaded.values())


@pytest.mark.usefixtures("small")
def test_a_full_disk(device: Any, tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    x = torch.randn(9000).to(device)
    with (
        open("/dev/full", "wb") as file,
        pytest.raises(OSError, match="No space"),
        pinned.Writer(file.fileno(), device) as writer,
    ):
        gpu_files.save(writer, {"x": x}, tw.codec("zipccl"), 0)


@pytest.mark.usefixtures("small")
def test_files_in_one_pipeline(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows go from one file to the next, and errors name the right file."""
    tensors = model()
    names = [list(tensors)[i::3] for i in range(3)]
    paths = [tmp_path / f"{i}" for i in range(3)]
    for path, part in zip(paths, names, strict=True):
        tw.save_file({name: tensors[name] for name in part}, path)
    transfers = []

    class Counted(pinned.Transfer):
        def __init__(self, windows: Any, device: Any) -> None:
            transfers.append(windows)
            super().__init__(windows, device)

    monkeypatch.setattr(gpu_files, "Transfer", Counted)
    with ExitStack() as stack:
        sources = [Contents(stack.enter_context(reading(path))) for path in paths]
        found = gpu_files.load(sources, device, 1 << 40)
    assert [set(part) for part in found] == [set(part) for part in names]
    assert all(same(part, {k: tensors[k] for k in part}) for part in found)
    (windows,) = transfers
    assert any(len({r.reader.name for r in ranges}) > 1 for ranges in windows)
    assert len(windows) > 3
    data = bytearray(paths[1].read_bytes())
    with tw.open(paths[1]) as file:
        buffer = file.buffer("float32").tobytes()
    data[data.index(buffer) + 200] ^= 1
    paths[1].write_bytes(data)
    with ExitStack() as stack, pytest.raises(tw.FormatError, match=f"{paths[1]}: tensor 'float32'"):
        sources = [Contents(stack.enter_context(reading(path))) for path in paths]
        gpu_files.load(sources, device, 1 << 40)


@pytest.mark.parametrize("names", [[], ["empty", "scalar"], ["empty"], ["int64"]])
def test_files_with_few_tensors(names: list[str], device: Any, tmp_path: Path) -> None:
    tensors = {name: model()[name] for name in names}
    tw.save_file(tensors, tmp_path / "x")
    with reading(tmp_path / "x") as reader:
        contents = Contents(reader)
        first, second = gpu_files.load([contents, contents], device, 1 << 40)
    assert list(first) == list(second) == names
    assert same(first, tensors)
    assert same(second, tensors)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("whole", [False, True])
def test_readers_of_all_kinds(whole: bool, device: Any, tmp_path: Path) -> None:
    """Bytes and file objects come through the same pipeline as paths."""
    tensors = model()
    tw.save_file(tensors, tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    source = data if whole else io.BytesIO(data)
    with reading(source) as reader:
        (found,) = gpu_files.load([Contents(reader)], device, 1 << 40)
    assert same(found, tensors)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("call", ["empty", "empty_like"])
def test_a_gpu_without_enough_memory(
    call: str, device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what there was no memory for, and holds none of what was made before."""
    path = tmp_path / "x"
    tensors = {str(i): torch.randn(3000).bfloat16() for i in range(9)}
    tw.save_file(tensors | {"wide": torch.randn(4000)}, path)
    usual, last = getattr(torch, call), [0]
    made: list[weakref.ref[Any]] = []
    for allowed in range(6):

        def allocate(*args: Any, **options: Any) -> Any:
            if options.get("pin_memory") is not None:
                return usual(*args, **options)
            if last[0] == allowed:  # noqa: B023
                raise torch.OutOfMemoryError("CUDA out of memory.")
            last[0] += 1
            x = usual(*args, **options)
            made.append(weakref.ref(x.untyped_storage()))
            return x

        last[0] = 0
        monkeypatch.setattr(torch, call, allocate)
        try:
            load(path, device)
        except torch.OutOfMemoryError as error:
            assert re.search(f"{path}: (tensor '(\\d|wide)'|no memory on {device})", str(error))
            assert not [x for x in made if (memory := x()) is not None and memory.nbytes()]
        else:
            assert call == "empty"
            assert allowed == 5
        monkeypatch.setattr(torch, call, usual)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_save_and_load_in_inference_mode(device: Any, tmp_path: Path) -> None:
    tensors = model()
    with torch.inference_mode():
        save({name: x.to(device) for name, x in tensors.items()}, tmp_path / "x")
        found = load(tmp_path / "x", device)
    assert same(found, tensors)


def test_no_memory_for_plain_tensors(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    tw.save_file({"a": torch.randn(3000), "b": torch.randn(5), "c": torch.randn(11)}, path)
    made: list[weakref.ref[Any]] = []
    usual = torch.Tensor.to

    def move(x: Any, *args: Any, **options: Any) -> Any:
        if x.numel() == 11:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        found = usual(x.clone(), *args, **options)
        made.append(weakref.ref(found.untyped_storage()))
        return found

    monkeypatch.setattr(torch.Tensor, "to", move)
    with pytest.raises(torch.OutOfMemoryError, match=f"{path}: tensor 'c'"):
        load(path, device)
    assert made
    assert not [x for x in made if x() is not None]
    monkeypatch.setattr(torch.Tensor, "to", usual)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(tw.FormatError, match=f"^checksum_mismatch: {path}: tensor 'c': plain"):
        load(path, device)


def cut_short(function: Any, place: int) -> Any:
    """`os.preadv` and others that take at most 1000 bytes of what they are given."""

    def limited(*args: Any) -> Any:
        changed = list(args)
        what = args[place]
        if isinstance(what, list):
            changed[place] = [what[0][:1000]]
        else:
            changed[place] = min(what, 1000) if isinstance(what, int) else what[:1000]
        return function(*changed)

    return limited


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_short_reads_and_writes(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = model()
    tw.save_file(tensors, tmp_path / "host")
    monkeypatch.setattr(gpu_files, "HEAD_NBYTES", 4096)
    for name in ("pread", "preadv", "pwrite"):
        monkeypatch.setattr(os, name, cut_short(getattr(os, name), 1))
    save({name: x.to(device) for name, x in tensors.items()}, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "host").read_bytes()
    assert same(load(tmp_path / "x", device), tensors)


def failing(function: Any, allowed: int) -> Any:
    calls = itertools.count()

    def limited(*args: Any) -> Any:
        if next(calls) >= allowed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*args)

    return limited


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("allowed", [3, 6, 12])
def test_failing_reads(
    allowed: int, device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that fails once for a head is done again; others are reported with the path."""
    path = tmp_path / "x"
    tw.save_file(model(), path)
    monkeypatch.setattr(os, "pread", failing(os.pread, 2))
    assert same(load(path, device), model())
    monkeypatch.setattr(os, "preadv", failing(os.preadv, allowed))
    with pytest.raises(OSError, match="Input/output error") as error:
        load(path, device)
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(path))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("allowed", [0, 5])
def test_failing_writes(
    allowed: int, device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, allowed))
    monkeypatch.setattr(files, "_on_one_gpu", lambda tensors: True)
    with pytest.raises(OSError, match="Input/output error") as error:
        tw.save_file({name: x.to(device) for name, x in model().items()}, tmp_path / "x")
    assert error.value.filename == str(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "pwrite", lambda *args: 0)
    with pytest.raises(OSError, match="wrote no bytes"):
        save({name: x.to(device) for name, x in model().items()}, tmp_path / "x")


@pytest.mark.usefixtures("small")
def test_a_file_that_changes_while_it_is_read(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads were read before: what payloads say is checked against them."""
    path = tmp_path / "x"
    tw.save_file({"a": torch.randn(9000).bfloat16(), "b": torch.randn(9000)}, path)
    with tw.open(path) as file:
        target = file.buffer("b").tobytes()
    place = path.read_bytes().index(target) + 5000
    usual = gpu_files.read_heads

    def then_changed(*args: Any) -> Any:
        heads = usual(*args)
        status = path.stat()
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(bytes(600))
        # The time of the change would tell.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        late.open.set()
        return heads

    monkeypatch.setattr(gpu_files, "read_heads", then_changed)
    late = Late(device.type == "cuda", 3)
    monkeypatch.setattr(pinned, "_pools", {device.type == "cuda": late})
    with pytest.raises(tw.FormatError, match=f"{path}: tensor 'b'") as error:
        load(path, device)
    assert error.value.reason in ("checksum_mismatch", "bad_payload")


class Late(pinned.Pool):
    """Slots that nobody gets before `open` is set."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open = threading.Event()

    def take(self) -> Any:
        self.open.wait()
        return super().take()


def nested() -> dict[str, Any]:
    shared = torch.randn(5000).bfloat16()
    return {
        "model": {"embed": shared, "head": shared, "norm": torch.randn(7), "step": torch.tensor(3)},
        "optimizer": [{"lr": 0.1, "exp_avg": torch.randn(9000)}, ("adam", None)],
        "tiny": torch.arange(5, dtype=torch.uint8),
    }


def moved(tree: Any, device: Any) -> Any:
    known: dict[int, Any] = {}

    def move(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: move(x) for key, x in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(map(move, node))
        return known.setdefault(id(node), node.to(device)) if torch.is_tensor(node) else node

    return move(tree)


@pytest.mark.usefixtures("small")
def test_nested_and_tied_states_have_the_bytes_of_the_host(device: Any, tmp_path: Path) -> None:
    tree = nested()
    tw.save_file(tree, tmp_path / "host")
    save(moved(tree, device), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "host").read_bytes()
    with reading(tmp_path / "x") as reader:
        contents = Contents(reader)
        (tensors,) = gpu_files.load([contents], device, 1 << 40)
        tensors |= {alias: tensors[name] for alias, name in contents.tied.items()}
        found = contents.shaped(tensors)
    assert found["model"]["embed"] is found["model"]["head"]
    assert same(found["model"], tree["model"])
    assert same(found["optimizer"][0], {"exp_avg": tree["optimizer"][0]["exp_avg"]})
    assert found["optimizer"][1] == ("adam", None)


def test_windows_cover_all_buffers(small: None) -> None:
    sizes = [100, 19_000, 2_000, 50_000, 0, 1, 20_000, 20_000]
    windows = list(gpu_files._windows(np.array(sizes)))
    assert [i for w in windows for i in range(*w)] == list(range(len(sizes)))
    assert windows == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7), (7, 8)]
    assert list(gpu_files._windows(np.array([], np.int64))) == []
