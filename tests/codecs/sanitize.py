"""Decodes damaged buffers on a GPU, for a tool to watch every access of the kernels.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/codecs/sanitize.py [COUNT]

Each of COUNT (400) small buffers has wrong bytes in its header, records, tiles, index or escapes;
some have their checksums made right again, some have none, and all are decoded with and without
verification, in part, and added, or written over their bases. Only a tensor or FormatError may come
of it. With
PYTORCH_NO_CUDA_MEMORY_CACHING=1, which this script sets, torch's allocations are as long as its
tensors, so that memcheck sees a read or write of one byte too far. Run it once without the tool
first: kernels are then compiled and cached.

tests/codecs/test_triton_vectors.py runs the same cases without the tool.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: Codec, parameters of encode and data. Sizes are small, and dtypes few: each costs compilations.
SAMPLES: dict[str, dict[str, Any]] = {
    "tail": {"dtype": "bfloat16", "n": 1300},
    "whole_and_tail": {"dtype": "bfloat16", "n": 4096 + 700, "pattern": "scales"},
    "unsummed": {"dtype": "float32", "n": 1500, "checksum": False},
    "two_slots": {"dtype": "bfloat16", "n": 2601, "chunks": 2, "dynamic_capacity": 512},
    "raw_chunk": {"dtype": "bfloat16", "n": 1900, "pattern": "random"},
    "unsummed_fp8": {"dtype": "float8_e4m3fn", "n": 4500, "checksum": False},
    "one_window": {"dtype": "bfloat16", "n": 4096, "window": "histogram", "pattern": "scales"},
    "taco": {"codec": "taco", "dtype": "bfloat16", "n": 4096 + 700, "chunks": 2},
    "taco_unsummed": {"codec": "taco", "dtype": "float32", "n": 4500, "checksum": False},
    "sdp4bit": {"codec": "sdp4bit", "dtype": "bfloat16", "n": 4096 + 701, "chunks": 2},
    "tahquant": {"codec": "tahquant", "dtype": "bfloat16", "n": 2700, "chunks": 2},
    "raw": {"codec": "raw", "dtype": "int16", "n": 1000, "chunks": 3},
    "huffman": {"codec": "huffman", "dtype": "bfloat16", "n": 1500, "chunks": 2},
    "huffman_unsummed": {"codec": "huffman", "dtype": "bfloat16", "n": 700, "checksum": False},
    "delta": {"codec": "delta", "form": "difference", "dtype": "bfloat16", "n": 1300, "chunks": 2},
    "delta_unsummed": {
        "codec": "delta",
        "form": "difference",
        "dtype": "bfloat16",
        "n": 900,
        "checksum": False,
    },
    "planes": {"codec": "delta", "dtype": "bfloat16", "n": 1300, "chunks": 2},
    "planes_unsummed": {"codec": "delta", "dtype": "float32", "n": 900, "checksum": False},
    "overwrite": {"codec": "delta", "form": "overwrite", "dtype": "bfloat16", "n": 900},
}
#: Bytes of the index of a chunk of one tile.
INDEX = {"huffman": 5, "delta": 20}
SECTIONS = ("header", "record", "padding", "tiles", "offsets", "windows", "dynamic")


class Case(NamedTuple):
    """A damaged buffer of `plan`, with dynamic parts in slots; `repaired` if checksums fit.

    `base` has the elements that a tensor was coded against, None if there are none.
    """

    name: str
    plan: Any
    data: Bytes
    repaired: bool
    base: Any


def sample(
    dtype: str,
    n: int,
    codec: str = "zipccl",
    pattern: str = "normal",
    window: str = "tile",
    form: str = "adaptive",
    **options: Any,
) -> tuple[Any, Bytes, Any]:
    """Plan and bytes of a good buffer, and its base."""
    import tightwire as tw
    from support import make_bits
    from tightwire.formats.dtypes import BY_NAME

    own: dict[str, dict[str, Any]] = {
        "zipccl": {"window": window},
        "tahquant": {"hidden": 256},
        "delta": {"form": form},
    }
    coder = tw.codec(codec, **own.get(codec, {}))
    kind = BY_NAME[dtype]
    x = make_bits(pattern, kind, n).view(kind.numpy)
    base = None
    if coder.needs_base:
        base = x.copy()
        # One by one, some of them by more units than are coded in the usual way.
        base.view(kind.bits)[::9] ^= kind.bits.type(1)
        base.view(kind.bits)[5::70] ^= kind.bits.type(1 << kind.mantissa - 1)
    plan = coder.plan(
        x.shape, dtype, **{"chunks": 1, "dynamic_capacity": None, "checksum": True} | options
    )
    room = np.zeros(plan.nbytes, np.uint8)
    tw.encode(x, coder, base=base, out=room, **options)
    return plan, room, base


def spans(plan: Any, data: Bytes, chunk: int, section: str) -> tuple[int, int]:
    """Where a section of a chunk lies in a buffer; the length is 0 if there is none.

    Of lossy codecs "tiles" are the codes and "windows" what is behind them; of huffman and delta
    "tiles" is the index and "windows" its padding.
    """
    from tightwire.codecs.zipccl import TILE

    record = plan.header.nbytes + 32 * chunk
    static = plan.static_range(chunk)
    index = static.stop
    tiles = 0
    if plan.codec.name != "raw":
        index = static.start + INDEX.get(plan.codec.name, plan.layout.sections[0].nbytes)
    if plan.codec.name == "zipccl":
        lo, hi = plan.chunk_range(chunk)
        tiles = -(-(hi - lo) // TILE)
    slot = plan.dynamic_offset + chunk * plan.dynamic_stride
    used = int(data[record + 8 : record + 16].view("<u8")[0])
    return {
        "header": (0, plan.header.nbytes),
        "record": (record, record + 32),
        "padding": (plan.header.nbytes + 32 * plan.chunks, plan.static_offset),
        "tiles": (static.start, index),
        "offsets": (index, index + 4 * tiles),
        "windows": (index + 4 * tiles, static.stop),
        "dynamic": (slot, slot + min(used, plan.dynamic_stride)),
    }[section]


def damage(rng: np.random.Generator, data: Bytes, lo: int, hi: int) -> None:
    """Change bytes from `lo` to `hi`."""
    kind = rng.integers(0, 5)
    at = int(rng.integers(lo, hi))
    if kind == 0:
        data[at] ^= 1 << rng.integers(0, 8)
    elif kind == 1:
        part = data[at : min(hi, at + 16)]
        part[:] = rng.integers(0, 256, part.size)
    elif kind == 2:
        data[lo:hi] = rng.choice([0, 255])
    else:
        size = 4 if kind == 3 else 8
        at = lo + (at - lo) // size * size
        old = int.from_bytes(data[at : at + size].tobytes(), "little")
        top = 1 << 8 * size
        values = [1, 2, top // 2 - 1, top // 2, top - 1, top - 128, old + 1, old - 1, old + 128]
        new = values[rng.integers(0, len(values))] % top
        part = data[at : min(hi, at + size)]
        part[:] = np.frombuffer(new.to_bytes(size, "little"), np.uint8)[: part.size]


def repair(plan: Any, data: Bytes) -> None:
    """Make the checksums of chunks right whose dynamic part fits its slot."""
    from tightwire.formats import checksum

    for i in range(plan.chunks):
        at = plan.header.nbytes + 32 * i
        used, info = (int(data[at + k : at + k + 8].view("<u8")[0]) for k in (8, 24))
        flags, ordinal = (int(data[at + k : at + k + 4].view("<u4")[0]) for k in (16, 20))
        if used > plan.dynamic_stride:
            continue
        static = data[plan.static_range(i)]
        slot = plan.dynamic_offset + i * plan.dynamic_stride
        total = checksum.words_sum(static)
        total += checksum.words_sum(data[slot : slot + used], static.size // 4)
        total += plan.identity_term(i) + checksum.record_term(used, flags, ordinal, info)
        data[at : at + 8].view("<u8")[0] = total & checksum.MASK64


def cases(count: int) -> Iterator[Case]:
    """Every sample with every section damaged, with and without repair, `count` in all."""
    made = {name: sample(**about) for name, about in SAMPLES.items()}
    kinds = [
        (name, section, repaired)
        for repaired in (True, False)
        for section in SECTIONS
        for name in SAMPLES
    ]
    k = given = 0
    while given < count:
        name, section, repaired = kinds[k % len(kinds)]
        rng = np.random.default_rng(k)
        k += 1
        plan, good, base = made[name]
        lo, hi = spans(plan, good, int(rng.integers(0, plan.chunks)), section)
        if lo == hi or (repaired and (section == "header" or not plan.checksum)):
            continue
        data = good.copy()
        damage(rng, data, lo, hi)
        if repaired:
            repair(plan, data)
        if (data != good).any():
            given += 1
            yield Case(f"{k - 1}: {name}, {section}", plan, data, repaired, base)


def decodes(case: Case, array: Any) -> Iterator[Any]:
    """What becomes of a case whose bytes lie in `array`: tensors, or reasons of refusal.

    One after the other: decoded with verification, without, in part, and added, or written over the
    base, which is left alone if that is refused.
    """
    import torch

    import tightwire as tw
    from tightwire import gpu

    plan = case.plan
    buf = gpu.wrap(plan, array)
    dtype = getattr(torch, plan.dtype.name)
    base = None
    if case.base is not None:
        base = torch.from_numpy(case.base.view(np.uint8)).to(array.device).view(dtype)

    def outcome(options: dict[str, Any]) -> Any:
        try:
            if "acc" in options:
                y = tw.codec("zipccl").decode_add(buf, options["acc"])
            else:
                y = tw.decode(buf, backend="triton", **{"base": base} | options)
            buf.check()
        except tw.FormatError as error:
            return error.reason
        return y

    yield outcome({"verify": True})
    yield outcome({"verify": False})
    yield outcome({"verify": False, "start": plan.nelem // 3, "stop": plan.nelem - 5})
    if base is not None:
        live = base.clone()
        found = outcome({"base": live, "out": live})
        alike = torch.equal(live.view(torch.uint8), base.view(torch.uint8))
        assert alike or not isinstance(found, str), case.name
        yield found
    elif plan.dtype.name == "bfloat16":
        acc = torch.zeros(plan.shape, dtype=torch.float32, device=array.device)
        yield outcome({"acc": acc})


def main(count: int) -> None:
    """Run `count` cases on the GPU and say what came of them."""
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import torch

    found: dict[str, int] = {}
    for case in cases(count):
        array = torch.from_numpy(case.data).cuda()
        for result in decodes(case, array):
            name = result if isinstance(result, str) else "decoded"
            found[name] = found.get(name, 0) + 1
    torch.cuda.synchronize()
    print(*(f"{name}: {number}" for name, number in sorted(found.items())), sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
