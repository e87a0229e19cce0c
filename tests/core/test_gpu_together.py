"""Several buffers with few waits, on a GPU or without one under the Triton interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tightwire as tw  # noqa: E402
from tightwire import gpu_memory, gpu_together  # noqa: E402
from tightwire.codecs import delta, delta_digest_triton  # noqa: E402
from tightwire.codecs.common.launch_triton import Variant  # noqa: E402
from tightwire.gpu_together import Coded, Together  # noqa: E402

#: Codec, dtype and elements. The host encodes float64.
KINDS = (
    ("zipccl", "bfloat16", 9001),
    ("delta", "float32", 5000),
    ("delta", "bfloat16", 4999),
    ("raw", "uint8", 77),
    ("zipccl", "float64", 300),
    ("zipccl", "float16", 0),
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """Where kernels run."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    return str(request.param)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host has waited for: copies of bytes and of verdicts."""
    found: list[str] = []
    for module, name in ((gpu_together, "_download"), (gpu_memory, "_download")):
        download = getattr(module, name)

        def counted(data: Any, download: Any = download) -> Any:
            found.append("bytes")
            return download(data)

        monkeypatch.setattr(module, name, counted)
    settle = gpu_memory._settle

    def settled(status: Any) -> None:
        found.append("verdict")
        settle(status)

    monkeypatch.setattr(gpu_memory, "_settle", settled)
    monkeypatch.setattr("tightwire.gpu._settle", settled)
    return found


class Case:
    """A tensor, its base, and its buffer."""

    def __init__(self, number: int, place: str, kind: tuple[str, str, int]) -> None:
        name, dtype, nelem = kind
        rng = np.random.default_rng(number)
        x = torch.from_numpy(rng.normal(0, 20, nelem)).to(getattr(torch, dtype))
        self.x, self.base = x.to(place), None
        if name == "delta":
            self.base = self.x.clone()
            self.x[:: 50 + number] += 1
        codec = tw.codec(name)
        required = None if dtype == "float64" else "triton"
        given = {} if self.base is None else {"base": self.base}
        self.buffer = codec.encode(self.x, backend=required, **given)

    def coded(self, data: Any) -> Coded:
        """As bytes at `data`, to be decoded to memory of other values."""
        return Coded(data, self.base, torch.full_like(self.x, 3))


def cases(place: str) -> list[Case]:
    return [Case(number, place, kind) for number, kind in enumerate(KINDS)]


def split(packed: gpu_together.Packed) -> list[Any]:
    pieces, at = [], 0
    for size in packed.sizes:
        pieces.append(packed.data[at : at + size])
        at += -(-size // 128) * 128
    assert at == packed.data.shape[0]
    return pieces


def bits(x: Any) -> Any:
    x = x.detach().cpu().contiguous().reshape(-1)
    return (
        (x if x.dtype == torch.uint8 else x.view(torch.uint8)).numpy().tobytes()
        if x.numel()
        else b""
    )


def test_packed_bytes_are_those_of_each_buffer(place: str) -> None:
    some = cases(place)
    plain = torch.arange(200, dtype=torch.uint8, device=place)
    items: list[Any] = [*(case.buffer for case in some), plain]
    found = [piece.cpu().numpy().tobytes() for piece in split(gpu_together.pack_together(items))]
    assert found == [*(bytes(case.buffer) for case in some), bytes(range(200))]
    assert gpu_together.pack_together([plain]).data.cpu().numpy().tobytes() == bytes(
        range(200)
    ) + bytes(56)
    buffers = [case.buffer for case in some]
    records = gpu_together.records_of(buffers)
    sizes = [gpu_together.packed_nbytes(*pair) for pair in zip(buffers, records, strict=True)]
    assert sizes == [buffer.nbytes for buffer in buffers]
    known = {1: records[1], 3: records[3]}
    again = split(gpu_together.pack_together(items, known))
    assert [piece.cpu().numpy().tobytes() for piece in again] == found


@pytest.mark.slow
def test_tensors_come_back(place: str) -> None:
    some = cases(place)
    packed = gpu_together.pack_together([case.buffer for case in some])
    coded = [case.coded(piece) for case, piece in zip(some, split(packed), strict=True)]
    Together(coded).write()
    assert [bits(c.out) for c in coded] == [bits(case.x) for case in some]
    # In place, over the base.
    based = [
        (case, piece)
        for case, piece in zip(some, split(packed), strict=True)
        if case.base is not None
    ]
    over = [Coded(piece, case.base, case.base) for case, piece in based]
    Together(over).write()
    assert [bits(c.out) for c in over] == [bits(case.x) for case, _ in based]


@pytest.mark.slow
def test_waits_do_not_grow_with_the_number(place: str, waits: list[str]) -> None:
    counts = []
    for repeats in (1, 4):
        some = [Case(i, place, KINDS[i % 3]) for i in range(3 * repeats)]
        waits.clear()
        packed = gpu_together.pack_together([case.buffer for case in some])
        coded = [case.coded(piece) for case, piece in zip(some, split(packed), strict=True)]
        Together(coded).write()
        assert [bits(c.out) for c in coded] == [bits(case.x) for case in some]
        counts.append(list(waits))
    assert counts[0] == counts[1] == ["bytes", "bytes"]


@pytest.mark.parametrize(
    ("at", "number", "reason"),
    [(0, 2, "bad_magic"), (-1, 1, "checksum_mismatch"), (200, 0, None), (-130, 3, None)],
)
def test_a_damaged_buffer_is_named(place: str, at: int, number: int, reason: str | None) -> None:
    some = cases(place)
    pieces = [
        piece.clone() for piece in split(gpu_together.pack_together([c.buffer for c in some]))
    ]
    pieces[number][at] ^= 0x55
    with pytest.raises(tw.FormatError) as alone:
        tw.decode(pieces[number], base=some[number].base, verify=True, backend="triton")
    coded = [case.coded(piece) for case, piece in zip(some, pieces, strict=True)]
    with pytest.raises(tw.FormatError) as found:
        Together(coded).write()
    assert found.value.number == number
    assert (found.value.reason, found.value.detail) == (alone.value.reason, alone.value.detail)
    assert reason in (None, found.value.reason)


def test_another_base_is_named(place: str) -> None:
    some = [Case(i, place, KINDS[1]) for i in range(3)]
    pieces = split(gpu_together.pack_together([case.buffer for case in some]))
    coded = [case.coded(piece) for case, piece in zip(some, pieces, strict=True)]
    coded[1] = coded[1]._replace(base=some[2].base)
    with pytest.raises(tw.FormatError) as found:
        Together(coded).write()
    assert (found.value.reason, found.value.number) == ("base_mismatch", 1)


def test_a_larger_tensor_than_is_allowed(place: str) -> None:
    some = cases(place)[:2]
    pieces = split(gpu_together.pack_together([case.buffer for case in some]))
    coded = [case.coded(piece) for case, piece in zip(some, pieces, strict=True)]
    with pytest.raises(tw.FormatError) as found:
        Together(coded, max_nbytes=19_000).write()
    assert (found.value.reason, found.value.number) == ("limit_exceeded", 1)


@pytest.mark.parametrize("span", [None, 512])
def test_digests(place: str, span: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any dtype and size, also where memory starts anywhere or has gaps."""
    if span is not None:
        monkeypatch.setattr(delta_digest_triton, "SPAN", span)
    rng = np.random.default_rng(0)
    hosts = [rng.integers(0, 256, n, dtype=np.uint8) for n in (0, 1, 3, 4, 1021, 9000, 70_003)]
    xs = [torch.from_numpy(host).to(place) for host in hosts]
    xs += [xs[-1][1:], xs[-1][:70_000].view(100, 700).T, xs[-2].view(torch.float64)]
    xs += [xs[6][1:] > 99, xs[5].view(torch.bfloat16)[3]]
    expected = [delta.digest_of(np.frombuffer(bits(x), np.uint8)) for x in xs]
    assert gpu_together.digests(xs) == expected
    # Two have the same bytes.
    assert len(set(expected)) == len(xs) - 1
    assert gpu_together.digests([]) == []


def test_a_digest_takes_one_wait(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    launch = Variant.launch

    def counted(self: Any, programs: int, *args: Any, **options: Any) -> None:
        launches.append(programs)
        launch(self, programs, *args, **options)

    monkeypatch.setattr(Variant, "launch", counted)
    xs = [torch.full((n,), 7.0, device=place) for n in (1, 100_000, 5)]
    gpu_together.digests(xs)
    assert launches == [4]
