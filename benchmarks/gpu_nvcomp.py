"""nvCOMP on the tensors of bench_gpu.py, which calls this."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from bench_gpu import Case, as_words, make, measure, poison, require, told

NVCOMP = {
    "ANS <f2, 64 KiB chunks": {"algorithm": "ANS", "data_type": "<f2"},
    "ANS <f2, 256 KiB chunks, sampled histogram": {
        "algorithm": "ANS",
        "data_type": "<f2",
        "uncomp_chunk_size": 1 << 18,
        "histogram_reduction_log2": 3,
    },
    "Bitcomp <f2": {"algorithm": "Bitcomp", "data_type": "<f2"},
}


def side_by_side() -> dict[str, Any]:
    """Ratios and speeds of nvCOMP on N(0, 0.02) in bfloat16; failures are recorded as text."""
    try:
        from nvidia import nvcomp
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}"[:400]}
    rows = []
    for mib in (64, 256):
        case = Case("bfloat16", "gaussian", mib)
        x = make(case, case.sets)
        for name, options in NVCOMP.items():
            for form in ("configured", "plain"):
                row: dict[str, Any] = {"name": name, "mib": mib, "form": form}
                try:
                    torch.cuda.synchronize()
                    with torch.cuda.stream(torch.cuda.Stream()):
                        row |= one_way(nvcomp, options, form, x)
                except Exception as error:
                    row["error"] = told(error)
                rows.append(row)
        del x
    return {"version": nvcomp.__version__, "rows": rows}


def one_way(nvcomp: Any, options: dict[str, Any], form: str, x: torch.Tensor) -> dict[str, Any]:
    """Check and time one way of calling nvCOMP on the current stream.

    "configured" reuses configurations and compressed arrays and decodes into memory given, which
    nvCOMP's page recommends; "plain" is encode(array) and decode(array).
    """
    stream = torch.cuda.current_stream().cuda_stream
    codec = nvcomp.Codec(cuda_stream=stream, **options)
    # NumPy's type strings have no bfloat16: the same bits go in as float16.
    rows = [row.view(torch.float16) for row in x]
    sources = [nvcomp.as_array(row, cuda_stream=stream) for row in rows]
    y = torch.empty_like(x)
    outs = [row.view(torch.float16) for row in y]
    raw = x[0].nbytes
    every = range(len(x))
    packed: list[Any] = [codec.encode(source) for source in sources]
    torch.cuda.synchronize()
    decoded: list[Any] = [None] * len(x)
    if form == "configured":
        packing = codec.compression_config(raw)
        unpacking = codec.decompression_config(packing)

        def encode(i: int) -> None:
            packed[i] = codec.encode(sources[i], out=packed[i], compression_config=packing)

        def decode(i: int) -> None:
            codec.decode(packed[i], data_type="<f2", out=outs[i], decompression_config=unpacking)
    else:

        def encode(i: int) -> None:
            packed[i] = codec.encode(sources[i])

        def decode(i: int) -> None:
            decoded[i] = codec.decode(packed[i], data_type="<f2")

    def check() -> None:
        poison(y)
        for i in every:
            encode(i)
            decode(i)
        torch.cuda.synchronize()
        if form != "configured":
            for i in every:
                outs[i].copy_(torch.as_tensor(decoded[i], device="cuda").reshape(-1))
        require(torch.equal(as_words(x), as_words(y)), "the tensor does not come back")

    check()
    sizes = [array.buffer_size for array in packed]
    us = {}
    for op, call in (("encode", encode), ("decode", decode)):
        us[op] = measure(lambda call=call: [call(i) for i in every], len(x))
    check()
    return {
        "ratio": statistics.fmean(sizes) / raw,
        "raw_nbytes": raw,
        "encode_us": us["encode"],
        "decode_us": us["decode"],
        "encode_GB/s": raw / us["encode"]["median"] / 1e3,
        "decode_GB/s": raw / us["decode"]["median"] / 1e3,
    }
