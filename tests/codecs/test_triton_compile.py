"""Every kernel compiled ahead of time, without a GPU, and what it spills.

The forms are those that the modules launch: for each target a process, in which Triton does not
interpret, calls encode, decode and measure, notes the launches instead of making them, and compiles
a choice of what it noted (`wanted`). The figures are the compilers' own: registers and stack
of a cubin (its spills are all that is on the stack), registers and spills in the metadata of an
hsaco.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
FileLock = pytest.importorskip("filelock").FileLock

import tightwire as tw  # noqa: E402

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
#: Parameters whose kernels differ, beside a codec's own choice.
PARAMS: dict[str, list[dict[str, Any]]] = {
    "taco": [
        {
            "format": "e5m2",
            "transform": "none",
            "scales": "merged",
            "block": 64,
            "checksum": True,
        },
        {"format": "int8", "transform": "hadamard", "block": 512, "rounding": "stochastic"},
        {"block": 32},
    ],
    "sdp4bit": [{"bits": 8, "group": 2048, "rotate": "none", "rounding": "stochastic"}],
    "tahquant": [{"hidden": 512}, {"direction": "backward"}],
    "dynamiq": [
        {
            "scales": "wide",
            "widths": "pow2",
            "super_group": 1024,
            "center": True,
            "rounding": "nearest",
        }
    ],
    "thc": [{"norm": "tensor"}],
    "omnireduce": [{"block": 4096, "values": "float16"}],
}
#: Of codecs with many forms, what those have that are compiled for other targets than sm_90.
MAIN: dict[str, dict[str, Any]] = {
    "taco": {"transform": 0, "random": 0, "log_high": 4, "add": False, "store": True},
    "sdp4bit": {"bits": 4, "random": 0, "add": False, "store": True, "sums": False},
    "tahquant": {"tile": 64, "sums": False, "add": False, "store": True},
    "dynamiq": {"sums": False, "add": False, "store": True},
    "thc": {"sums": True, "add": False, "store": True},
    "omnireduce": {"SUMS": True, "ADD": 0, "STORE": True, "LEVEL": 3},
}
#: What these have for AMD instead: less code. Triton's pass that coalesces accesses takes time by
#: the square of a kernel's length, times its accesses.
SMALL: dict[str, dict[str, Any]] = {
    "huffman": {"dtype": "float8_e4m3fn"},
    "tahquant": {"tile": 32},
    "taco": {"transform": 2, "log_high": 2},
}
#: Codecs, and the selection by magnitude, of which fewer forms are compiled.
FEWER = {"taco", "sdp4bit", "tahquant", "ranks", "lhc", "lhc_peeling", "norms", "thc"}
FEWER |= {"omnireduce", "sparsify", "delta"}
#: Codecs whose kernels take long to compile, for one target of each maker, and the constexprs that
#: take all their values there.
HEAVY: dict[str, tuple[str, ...]] = {
    "dynamiq": ("add", "sums"),
    "dynamiq_widths": ("SUMS", "READ", "MANY"),
    "huffman": (),
    "zipccl_sums": (),
    "zipccl_batch": (),
    "delta_batch": (),
}
#: Forms that are compiled all the same: Triton 3.6 once made wrong sums of them.
ONCE_WRONG: dict[str, dict[str, Any]] = {
    "taco._pack": {"transform": 2, "log_high": 2, "sums": True},
}
#: Forms of bfloat16 that most calls need, beside the others.
USUAL: dict[str, dict[str, Any]] = {
    "zipccl._encode_kernel": {"mode": 0, "window": 0, "sums": True},
}
#: Forms of the widest elements: of the most registers, and the most shared memory declared in PTX.
WIDEST: dict[str, dict[str, Any]] = {
    "huffman._decode_kernel": {"item": 8, "sums": False},
    "huffman._pack_kernel": {"item": 8},
}
#: Bytes of shared memory that a program may have if PTX declares some of it: Triton asks for more
#: for its own alone.
SHARED = 48 << 10


#: The kernels that run a format's functions, and what they add to the names of those.
TILE_KERNELS = {
    "encode_kernel": "",
    "decode_kernel": "",
    "sum_kernel": "_sum",
    "encode_rows_kernel": "_many",
    "decode_rows_kernel": "_many",
    "put_rows_kernel": "_put_many",
    "take_rows_kernel": "_take_many",
    "sum_rows_kernel": "_sum",
    "peer_sum_kernel": "_peer_sum",
}
#: Of `sum_rows_kernel` what makes its forms kernels of their own, as each takes registers.
ROW_SUMS = ("_rows", "_weighted", "_back")
#: What `merged_kernel` adds to the name of the kernel that it runs is `_many`, too.


class Allowed(NamedTuple):
    """What forms with these constexprs may spill: bytes of stack (NVIDIA), scalar registers (AMD).

    AMD's scalar registers spill to lanes of vector registers, not to memory. Vector registers never
    may spill there. Forms that are not listed may spill nothing.
    """

    kernel: str
    constexprs: dict[str, list[Any]]
    stack: int
    scalars: int
    why: str


ALLOWED = (
    Allowed("zipccl._finish_kernel", {}, 512, 44, "a small part of the time; more of it at once"),
    Allowed("zipccl._encode_kernel", {"mode": [1, 2]}, 32, 0, "such tiles are few"),
    Allowed(
        "zipccl._encode_kernel",
        {"mode": [0], "sums": [True]},
        224,
        0,
        "fewer registers, so more tiles in flight: faster than without the spills",
    ),
    Allowed("delta._change_kernel", {}, 16, 32, "places of a tile's parts"),
    Allowed("delta._check_kernel", {}, 16, 0, "a scalar of a chunk"),
    Allowed("delta._measure_kernel", {}, 16, 96, "where a tile and its parts are"),
    Allowed("delta._pack_kernel", {}, 16, 96, "places and ends of a tile's parts"),
    Allowed("delta_batch._measure_rows_kernel", {}, 16, 96, "as of one tensor"),
    Allowed("delta_batch._pack_rows_kernel", {}, 16, 96, "as of one tensor"),
    Allowed("delta_batch._change_rows_kernel", {}, 16, 32, "as of one tensor"),
    Allowed("order._place_kernel", {}, 0, 4, "numbers of a launch, on AMD"),
    Allowed("huffman._decode_kernel", {"item": [8]}, 512, 0, "as the next, of eight planes"),
    Allowed(
        "huffman._decode_kernel",
        {},
        320,
        64,
        "what is needed between planes, not while they are decoded; more tiles in flight",
    ),
    Allowed("huffman._decode_kernel_many", {}, 448, 0, "as of one tensor, and what a call finds"),
    Allowed("huffman._measure_kernel_many", {}, 8, 0, "two words a thread"),
    Allowed("huffman._pack_kernel", {"item": [8]}, 8, 16, "as the next, and a word"),
    Allowed("huffman._pack_kernel", {}, 0, 16, "places and sizes of a tile's blocks"),
    Allowed("lhc._estimate_kernel_many", {}, 8, 0, "two words a thread"),
    Allowed("ranks._select_kernel", {}, 96, 0, "one program of a chunk looks at all tokens"),
    Allowed("ranks._select_kernel_many", {}, 96, 0, "as of one tensor"),
    Allowed("zipccl_batch._finish_rows_kernel", {}, 512, 0, "as of one tensor"),
    Allowed("zipccl_batch._encode_rows_kernel", {}, 288, 96, "as of one tensor"),
    Allowed("zipccl_batch._decode_rows_kernel", {}, 256, 64, "tiles that are partial"),
    Allowed("zipccl_sums._sum_kernel", {}, 640, 184, "chunks that are raw, partial tiles"),
    Allowed("nvfp4._pack_sum", {}, 16, 0, "a few words a thread, of a sum of several buffers"),
    Allowed("nvfp4._pack", {"add": [True]}, 8, 0, "two words a thread"),
    Allowed("tahquant._pack_sum", {}, 8, 0, "two words a thread"),
    Allowed("mx._pack_sum", {}, 8, 0, "two words a thread, of a sum of several buffers"),
    Allowed("raw._pack_sum", {}, 8, 0, "two words a thread, of a sum of several buffers"),
    Allowed(
        "mx._pack_peer_sum",
        {},
        48,
        0,
        "larger tiles, of which fewer are waited for: 0.73 of the time of smaller ones",
    ),
    Allowed(
        "taco._pack_peer_sum",
        {},
        40,
        0,
        "fewer registers, so more tiles in flight: 0.56 of the time without the limit",
    ),
    Allowed("dynamiq_widths._widths_kernel", {}, 8, 0, "a small part of the time"),
    Allowed("dynamiq_widths._widths_kernel_many", {}, 8, 0, "as of one tensor"),
    Allowed("dynamiq._pack_sum", {}, 256, 0, "as the next"),
    Allowed(
        "dynamiq._pack",
        {"add": [True]},
        224,
        0,
        "fewer registers, so more tiles in flight: faster than without the spills",
    ),
)


class Form(NamedTuple):
    """One form in which a kernel is launched; `launch` is what the compiler has to know."""

    kernel: str
    dtype: str
    constexprs: dict[str, Any]
    launch: tuple[Any, dict[str, Any], dict[str, Any], dict[Any, Any], dict[str, Any]]

    def is_usual(self, target: str) -> bool:
        """What a codec's kernels are in most calls, or, for AMD, some smaller form."""
        codec = self.kernel.partition(".")[0]
        main = {"dtype": "bfloat16"} | MAIN.get(codec, {})
        if target.startswith("gfx"):
            main |= SMALL.get(codec, {})
        own = {"dtype": self.dtype} | self.constexprs
        return all(own.get(k, v) == v for k, v in main.items())

    def is_one_of(self, table: dict[str, dict[str, Any]]) -> bool:
        """One of ONCE_WRONG, USUAL or WIDEST."""
        form = table.get(self.kernel)
        return form is not None and all(self.constexprs[k] == v for k, v in form.items())

    def values(self) -> list[tuple[str, Any]]:
        """What the form differs in from others of its kernel."""
        own = {"dtype": self.dtype} | self.constexprs
        heavy = HEAVY.get(self.kernel.partition(".")[0])
        if heavy is not None:
            own = {k: v for k, v in own.items() if k in heavy}
        return [("kernel", self.kernel), *sorted(own.items())]

    def is_main(self) -> bool:
        """Whole tiles without checksums: what most of the time goes to."""
        moves = self.kernel.endswith(("._encode_kernel", "._decode_kernel"))
        return moves and self.constexprs.get("mode") == 0 and not self.constexprs["sums"]


def covering(forms: list[Form]) -> list[Form]:
    """Few of `forms` in which constexprs and dtypes take, kernel by kernel, all their values."""
    kernels: dict[str, list[Form]] = {}
    for form in forms:
        kernels.setdefault(form.kernel, []).append(form)
    chosen = []
    for group in kernels.values():
        met = [set(form.values()) for form in group]
        left = set().union(*met)
        while left:
            best = max(range(len(group)), key=lambda i: len(met[i] & left))
            chosen.append(group[best])
            left -= met[best]
    return chosen


def is_wanted(kernel: str, target: str) -> bool:
    """Whether a kernel is compiled for a target at all.

    Every kernel is for sm_90. Of FEWER and HEAVY, AMD's compiler gets the functions of formats in
    the kernels of one buffer; the kernels of many and of sums it gets with the functions of others.
    Other targets get neither FEWER and HEAVY nor the kernels of many. But for huffman's, they all
    get the kernels that merged calls launch.
    """
    codec, _, name = kernel.partition(".")
    few = codec in FEWER or codec in HEAVY
    if name.endswith("_kernel_many") and codec != "huffman":
        return True
    if target.startswith("gfx"):
        return not (few and name.endswith(("_many", "_sum")))
    return target == "sm_90" or not (few or name.endswith("_many"))


def wanted(forms: list[Form], target: str) -> list[Form]:
    """For sm_90 every kernel with any value that one of its constexprs takes (of HEAVY, of those
    that are listed), of bfloat16 or, what takes the time in zipccl, of all dtypes; for other
    targets, of FEWER, and of formats in the kernels of many and of sums, every kernel once.
    """
    usual = [form for form in forms if form.is_usual(target)]
    once = list({form.kernel: form for form in reversed(usual)}.values())
    if target != "sm_90":
        return [form for form in once if is_wanted(form.kernel, target)]
    used = [
        form
        for form in forms
        if form.kernel.partition(".")[0] not in FEWER
        and not form.kernel.endswith(("_many", "_sum"))
    ]
    chosen = covering([form for form in used if form.dtype == "bfloat16"])
    chosen += [form for form in once if form not in used]
    more = [form for form in forms if form.is_one_of(ONCE_WRONG)]
    more += [form for form in forms if form.dtype == "bfloat16" and form.is_one_of(USUAL)]
    more += [form for form in forms if form.is_one_of(WIDEST)]
    chosen += [form for form in more if form not in chosen]
    main = [form for form in forms if form.kernel.startswith("zipccl.") and form.is_main()]
    return chosen + [form for form in main if form not in chosen]


def flat(constexprs: dict[str, Any]) -> dict[str, Any]:
    """Constexprs, and what dataclasses among them hold, without functions."""
    found: dict[str, Any] = {}
    for name, value in constexprs.items():
        if dataclasses.is_dataclass(value):
            prefix = "source_" if name == "G" else ""
            found |= {prefix + f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        elif isinstance(value, (bool, int, float, str)):
            found[name] = value
    return found


def notes() -> tuple[list[str], list[str], list[Form]]:
    """All kernels, numbers that they are specialised on, and the forms in which they start."""
    import torch
    from triton.runtime.jit import JITFunction, mangle_type

    from tightwire import sparsify_triton
    from tightwire.adapters.collectives import resident_copy_triton
    from tightwire.codecs import (
        delta_batch_triton,
        delta_digest_triton,
        dynamiq_widths_triton,
        lhc_peeling_triton,
        tahquant_ranks_triton,
        zipccl_batch_triton,
        zipccl_sums_triton,
        zipccl_windows_triton,
    )
    from tightwire.codecs.common import (
        dynamic_triton,
        fill_triton,
        frame_triton,
        layout_triton,
        norms_triton,
        order_triton,
        rows_triton,
        weighted_triton,
    )
    from tightwire.codecs.common.merged_triton import merged_kernel
    from tightwire.formats.dtypes import BY_NAME
    from tightwire.planning import device_module

    others = {"frame": frame_triton, "norms": norms_triton, "dynamic": dynamic_triton}
    others |= {"ranks": tahquant_ranks_triton, "sparsify": sparsify_triton}
    others |= {"lhc_peeling": lhc_peeling_triton, "dynamiq_widths": dynamiq_widths_triton}
    others |= {"zipccl_windows": zipccl_windows_triton, "delta_digest": delta_digest_triton}
    others |= {"zipccl_batch": zipccl_batch_triton, "zipccl_sums": zipccl_sums_triton}
    others["delta_batch"], others["fill"] = delta_batch_triton, fill_triton
    others["weighted"], others["order"] = weighted_triton, order_triton
    others["resident_copy"], others["layout"] = resident_copy_triton, layout_triton
    modules = others | {name: device_module(name) for name in tw.list_codecs()}
    kernels = {
        id(value): f"{stem}.{name}"
        for stem, module in modules.items()
        if isinstance(module, types.ModuleType)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    specialised: set[str] = set()
    formats: set[str] = set()
    forms: dict[str, Form] = {}
    dtype = ""

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = dict(zip([p.name for p in self.params], args, strict=False))
        values |= {p.name: options.pop(p.name) for p in self.params if p.name in options}
        if self is merged_kernel:
            kernel = f"{kernels[id(values['BODY'])]}_many"
            formats.add(kernel)
        elif "READER" in values:
            reader: Any = values["READER"]
            stem = reader.__module__.rpartition(".")[2].removesuffix("_triton")
            kernel = f"{stem}.{reader.__name__}_sum"
            formats.add(kernel)
        elif "UNPACK" in values:
            # The driver's kernels are those of the format whose function they run.
            own: Any = values.get("PACK", values["UNPACK"])
            kernel = f"{own.__module__.rpartition('.')[2].removesuffix('_triton')}.{own.__name__}"
            if "MODE" in values:
                kernel += ROW_SUMS[values["MODE"]]
            kernel += TILE_KERNELS[self.fn.__name__]
            formats.add(kernel)
        else:
            kernel = kernels[id(self)]
        signature: dict[str, Any] = {}
        aligned: dict[Any, Any] = {}
        for i, p in enumerate(self.params):
            value = values.get(p.name)
            if p.is_constexpr:
                signature[p.name] = "constexpr"
            elif value is None:
                # `member` of a kernel that is launched for one call.
                signature[p.name] = "constexpr"
            elif hasattr(value, "data_ptr"):
                signature[p.name] = mangle_type(value)
                if value.data_ptr() % 16 == 0:
                    aligned[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[p.name] = p.annotation_type
                if not p.do_not_specialize:
                    specialised.add(f"{kernel}: {p.name}")
        constexprs = {n: values.get(n) for n, kind in signature.items() if kind == "constexpr"}
        key = repr((kernel, signature, constexprs, aligned, options))
        launch = (self, signature, constexprs, aligned, options)
        own = constexprs
        if self is merged_kernel:
            own = of_body(values)
        forms.setdefault(key, Form(kernel, dtype, flat(own), launch))

    def taken(name: str, module: Any, dtype: Any) -> bool:
        supports = getattr(module, "supports", None)
        return bool(supports(dtype) if supports else dtype.name in tw.codec(name).spec.dtypes)

    JITFunction.run = note
    for dtype in ("bfloat16", "float32", "float16", "float8_e4m3fn", "float8_e5m2"):
        for name in tw.list_codecs():
            module = device_module(name)
            if isinstance(module, types.ModuleType) and taken(name, module, BY_NAME[dtype]):
                launches(name, dtype, dtype == "bfloat16")
    dtype = "float64"
    launches("huffman", dtype, False)
    dtype = "bfloat16"
    selections(sparsify_triton)
    table = torch.zeros(16, dtype=torch.int64)
    frame_triton._WRITE.launch(1, (table,), 0, *range(16))  # what graphs write tables by
    fill_triton.fill_if(table, 1, torch.zeros(16, dtype=torch.bfloat16), 0.0)
    rows, weights = torch.zeros(4, 32).bfloat16(), torch.zeros(2, 2).bfloat16()
    weighted_triton.weighted_sum(rows, weights, table[:4])
    weighted_triton.weighted_sum(rows, None, table[:4], 2)
    weighted_triton.weighted_sum_back(rows[:2], rows, weights, table[:4])
    for experts in (8, order_triton.MOST_EXPERTS):
        order_triton.ordered(table[:4].view(2, 2), weights, experts)
    memory = rows_triton.Memory(table, table, 128, 0, 0, 0)
    told = order_triton.Told(table, table, table, table, 128, torch.bfloat16)
    order_triton.tell(table[:4].view(2, 2), weights.float(), 8, told)
    layout_triton.fetch_dots(table[:4], memory, 2, torch.float32)
    for experts in (8, order_triton.MOST_EXPERTS):
        sizes = layout_triton.Sizes(1, experts, 4, 2, 8, 0, 0, torch.bfloat16)
        layout_triton.find(table[:4].view(2, 2), memory, sizes, table)
    data = torch.zeros(2, resident_copy_triton.LEAST_NBYTES, dtype=torch.uint8)
    resident_copy_triton.resident_copy(data[0], data[1])
    return sorted({*kernels.values(), *formats}), sorted(specialised), list(forms.values())


def selections(kernels: Any) -> None:
    """Select of rows that are sampled and of rows that are not."""
    import torch

    from tightwire.formats.dtypes import BY_NAME

    x, cell = torch.zeros(2, kernels.SAMPLED), BY_NAME["bfloat16"]
    kernels.cut(x, 100, BY_NAME["float32"], cell=cell, rest=x, what=kernels.ROUNDING)
    kernels.cut(x.bfloat16(), 100, cell, rest=x, what=kernels.OTHERS)


def launches(name: str, dtype: str, everything: bool) -> None:
    """Make the calls whose launches are noted; not `everything` makes those of whole tiles only."""
    import torch

    from tightwire.codecs.common import frame_triton
    from tightwire.planning import device_module

    kernels: Any = device_module(name)
    kind = getattr(torch, dtype)
    n = 2 * (4096 + (512 if everything else 0))
    status, starts = (torch.zeros(k, dtype=torch.int64) for k in (1, 2))
    stats = torch.zeros(1, dtype=torch.int64)
    x, wide = torch.zeros(n, dtype=kind), torch.zeros(n, dtype=torch.float32)
    apart = torch.zeros(n + 1, dtype=kind)[1:]

    room = torch.zeros(1 << 20, dtype=torch.uint8)

    def planned(shape: tuple[int, ...] = (n,), checksum: bool = True, **params: Any) -> Any:
        plan = tw.codec(name, **params).plan(shape, dtype, chunks=2, checksum=checksum)
        return plan, torch.zeros(plan.nbytes, dtype=torch.uint8)

    if name == "lhc":
        peeling: Any = importlib.import_module("tightwire.codecs.lhc_peeling_triton")
        peeling.SMALL_BLOCKS = 0  # also the kernels of large chunks
    plan, src = planned()
    if name == "lhc":
        kernels.peeling(plan, room)
    plain, plain_src = planned(checksum=False)
    if name == "delta":
        deltas(kernels, x, everything)
        return
    drawn = tw.Key(1, world=2) if name in ("dynamiq", "thc") else None
    kernels.encode(plain, x, plain_src, room, key=drawn)
    kernels.encode(plan, x, src, room, key=drawn)
    kernels.decode(plain, plain_src, x, room, status)
    kernels.decode(plan, src, x, room, status)
    if not everything:
        return
    frame_triton.frame_of(plan).check_header(src, status)
    if hasattr(kernels, "sum") and name != "zipccl":
        sums = torch.zeros((2, 2), dtype=torch.int64)
        places = frame_triton.places_of([src, src], sums, sums[0])
        kernels.sum(plan, places, x)
        kernels.sum(plain, frame_triton.places_of([plain_src], sums[:1], sums[0, :1]), x)
        kernels.sum(plan, places, wide, x=x, factor=0.5)
        if hasattr(kernels, "encode_sum"):
            kernels.driver_of(plan).sum(plan, places, room, x=x, key=drawn, encoded=True)
    if hasattr(kernels, "encode_many"):
        for other, data in ((plan, src), (plain, plain_src)):
            many = None
            if hasattr(kernels, "measure_many"):
                many = kernels.measure_many(other.codec, plan.dtype, [x])
            kernels.encode_many([other], [x], [data], many, drawn)
            kernels.decode_many([other], [data], [x], [status], [True])
    if name in ("raw", "mx", "nvfp4", "taco"):
        rows_of_experts(kernels, name, x)
    if name in ("raw", "mx", "taco"):
        peer_sums_triton: Any = importlib.import_module("tightwire.codecs.common.peer_sums_triton")
        for other in (plan, plain):
            peers = peer_sums_triton.PeerSum(kernels.driver_of(other), other, x.device, 2, 0)
            peers.begin([room, room], starts[:1], 1.0)
            peers.sum(x, x, torch.zeros(3, dtype=torch.int64))
    kernels.encode(plain, apart, plain_src, room, key=drawn)
    long_header = planned((2, 2, 2, 2, 1, n // 16))[0]
    kernels.encode(long_header, x, room, room, key=drawn)
    kernels.decode(long_header, room, x, room, status)
    if name == "mx":
        for element in ("e5m2", "e3m2", "e2m1", "int8"):
            other, other_src = planned(checksum=False, element=element)
            kernels.encode(other, x, other_src, room)
            kernels.decode_add_encode(other, other, other_src, x, room, room, status)
            kernels.decode(other, other_src, x, room, status)
        other, other_src = planned(scale_rule="agreed")
        kernels.encode(other, x, other_src, room, kernels.measure(other.codec, plan.dtype, x))
        kernels.decode_add_encode(other, other, other_src, x, room, room, status)
    if name == "zipccl":
        from tightwire.codecs import zipccl_batch_triton as batch

        sums = torch.zeros((2, 2), dtype=torch.int64)
        places = frame_triton.places_of([src, src], sums, sums[0])
        kernels.sum(plan, places, x)
        kernels.sum(plan, places, wide, x=x, factor=0.5, starts=sums)
        batch.encode_many([plan, plan], [x, apart], [src, src])
        batch.decode_many([plan], [src], [x], [status], [True])
        kernels.encode(planned(window=5)[0], x, room, room)
        kernels.encode(planned(window="sigma", checksum=False)[0], x, room, room, stats)
        for window in ("sigma", "histogram"):
            kernels.measure(tw.codec(name, window=window).spec, plan.dtype, x)
    if name == "sdp4bit":
        inside, inside_src = planned(checksum=False, bits=8, rotate="encode")
        between, between_src = planned(checksum=False, rotate="decode")
        kernels.decode_add_encode(between, inside, inside_src, x, between_src, room, status)
    for params in PARAMS.get(name, ()):
        given: dict[str, Any] = {"checksum": False, **params}
        other = planned(**given)[0]
        random = "rounding" in params or name == "thc"
        keys = (tw.Key(1), tw.Key(1, stats)) if random else (None,)
        for key in keys:
            kernels.encode(other, x, room, room, key=key)
        kernels.decode(other, room, x, room, status)
        if hasattr(kernels, "encode_many"):
            kernels.encode_many([other], [x], [room], None, keys[0])
            kernels.decode_many([other], [room], [x], [status], [True])
    if hasattr(kernels, "decode_add_encode"):
        kernels.decode_add_encode(plain, plain, plain_src, x, plain_src, room, status, key=drawn)
        kernels.decode_add_encode(plan, plan, src, wide, src, room, status, key=drawn)
    kernels.decode(plain, plain_src, apart, room, status)
    kernels.decode(plan, src, x, room, status, dynamic_starts=starts)
    kernels.decode(plan, src, None, room, status, store=False)
    kernels.decode(plan, src, wide, room, status, add=True)
    kernels.decode(plain, plain_src, x, room, status, add=True)


def rows_of_experts(kernels: Any, name: str, x: Any) -> None:
    """Code rows of 4096 elements, whole tiles, in memory of ranks."""
    import torch

    from tightwire.codecs.common import rows_triton

    plan = tw.codec(name).plan((4096,), str(x.dtype)[6:], checksum=False)
    measuring = getattr(kernels, "measuring_of", lambda plan: None)(plan)
    rows = rows_triton.Rows(plan, kernels.driver_of(plan), measuring, x.device)
    words, x = torch.zeros(16, dtype=torch.int64), x[:8192].view(2, 4096)
    memory = rows_triton.Memory(words, words, 128, 0, 0, 0)
    weights = torch.zeros(2, 2)
    rows.put(x, memory, words.int())
    rows.take(x, words, memory, words, True)
    rows.sum(x, words[:4], memory, words)
    rows.sum(x, words[:4], memory, words, weights=weights)
    rows.sum(x, words[:2], memory, words, weights=weights.to(x.dtype)[0], y=x)


def deltas(kernels: Any, x: Any, everything: bool) -> None:
    """Encode and decode against a base."""
    import torch

    importlib.import_module("tightwire.codecs.delta_digest_triton").digests_of([x])
    status, starts = (torch.zeros(k, dtype=torch.int64) for k in (1, 2))
    for form in ("adaptive", "difference", "overwrite") if everything else ("adaptive",):
        plan = tw.codec("delta", form=form).plan((x.numel(),), str(x.dtype)[6:], chunks=2)
        src, room = (torch.zeros(n, dtype=torch.uint8) for n in (plan.nbytes, plan.scratch_nbytes))
        kernels.encode(plan, x, src, room, base=x.clone())
        kernels.decode(plan, src, x.clone(), room, status, base=x)
        if everything:
            kernels.decode(plan, src, x, room, status, base=x, in_place=True, check=False)
            kernels.decode(plan, src, x, room, status, base=x, in_place=True, dynamic_starts=starts)
    if everything:
        batch: Any = importlib.import_module("tightwire.codecs.delta_batch_triton")
        plan = tw.codec("delta").plan((x.numel(),), str(x.dtype)[6:], chunks=2)
        src = torch.zeros(plan.nbytes, dtype=torch.uint8)
        batch.Rows([plan], [src], [x], [x]).encode()
        packed = np.full(2, plan.dynamic_offset), np.zeros(2, np.int64)
        words = np.array([status.data_ptr()])
        for goal in ("out", "check", "base"):
            batch.Rows([plan], [src], [x], [x], words, packed=packed).decode(goal)


def build(form: Form, target: str) -> dict[str, Any]:
    """Compile a form; gives its figures, and how much it spills to memory and scalar registers."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = target.startswith("gfx")
    chip = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target[3:]), 32)
    kernel, signature, constexprs, aligned, options = form.launch
    constexprs, options = dict(constexprs), dict(options)
    if "VALUES" in constexprs:
        values = fit(of_body(constexprs), target).values()
        constexprs["VALUES"] = tuple(map(tl.constexpr, values))
    constexprs = fit(constexprs, target)
    if amd:
        options.pop("maxnreg", None)
    numbers = {p.name: (i,) for i, p in enumerate(kernel.params)}
    source = ASTSource(
        kernel,
        signature,
        constexprs={numbers[name]: value for name, value in constexprs.items()},
        attrs=aligned,
    )
    compiled = triton.compile(source, target=chip, options=options)
    binary = compiled.asm["hsaco" if amd else "cubin"]
    if amd:
        found = dict(re.findall(r"\.(\w+): +(\d+)\n", compiled.asm["amdgcn"]))
        registers, scalars = int(found["vgpr_count"]), int(found["sgpr_spill_count"])
        stack = 4 * int(found["vgpr_spill_count"]) + int(found["private_segment_fixed_size"])
    else:
        found = resources(binary)
        registers, stack, scalars = int(found["REG"]), int(found["STACK"]), 0
        stack += int(found["LOCAL"])
    ptx = compiled.asm.get("ptx", "")
    # What is written as PTX means what it says.
    generated = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL)
    declared = sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", ptx)))
    fused = re.search(r"fma\.rn\S*\.f32|div\.(approx|full)|sqrt\.approx", generated)
    # But for approximations: no byte depends on their last bits.
    flushed = re.search(r"^(?!.*\.approx).*\.ftz\b", ptx, re.MULTILINE)
    return {
        "fused": bool(fused),
        "flushed": bool(flushed),
        "gaps": gaps(compiled.asm["ttgir"]),
        "shared": declared and declared + compiled.metadata.shared,
        "elf": binary[:4] == b"\x7fELF" and len(binary) > 1000,
        "registers": registers,
        "stack": stack,
        "scalars": scalars,
    }


def of_body(constexprs: dict[str, Any]) -> dict[str, Any]:
    """The constexprs of the kernel that a merged one runs."""
    names = [p.name for p in constexprs["BODY"].params if p.is_constexpr]
    return {n: v.value for n, v in zip(names, constexprs["VALUES"], strict=True)}


def fit(constexprs: dict[str, Any], target: str) -> dict[str, Any]:
    """Constexprs with what depends on the target."""
    converts, ptx = target in ("sm_90", "sm_100"), target.startswith("sm_")
    found = {k: {"PTX": ptx, "CVT": converts}.get(k, v) for k, v in constexprs.items()}
    for name in {"L", "S"} & found.keys():
        chosen = {"ptx": ptx, "cvt": converts}
        known = {field.name for field in dataclasses.fields(found[name])}
        chosen = {key: value for key, value in chosen.items() if key in known}
        found[name] = dataclasses.replace(found[name], **chosen)
    return found


def gaps(ttgir: str) -> list[str]:
    """Reductions whose values lie in lanes, or warps, that differ in bits which are no one run.

    Triton 3.6 exchanges values between lanes by runs of bits, whatever the layout says, and takes
    wrong ones where lanes that differ in the bits in between hold the same values or other ones.
    """
    named = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    found = []
    for axis, layout in re.findall(
        r'"tt\.reduce"\([^\n]*axis = (\d+)(?:(?!"tt\.reduce")[\s\S])*?'
        r"^ *\}\) : \(tensor<[^#\n]*, (#[^\n]*?)>(?:,[^\n]*)?\) -> ",
        ttgir,
        re.MULTILINE,
    ):
        sliced = []
        while m := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", layout):
            sliced.append(int(m[1]))
            layout = m[2]
        layout = named.get(layout, layout)
        for kind in ("lane", "warp"):
            # Blocked layouts have none.
            for bases in re.findall(rf"#ttg\.linear<.*\b{kind} = (\[[^a-z]*\])", layout):
                rows = json.loads(bases)
                for dim in reversed(sliced):
                    rows = [row[:dim] + row[dim + 1 :] for row in rows]
                used = [i for i, row in enumerate(rows) if row[int(axis)]]
                if used and used != list(range(used[0], used[-1] + 1)):
                    found.append(f"axis {axis} of {layout}")
    return found


def resources(cubin: bytes) -> dict[str, str]:
    """Registers and bytes of stack, from the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", run.stdout))


class Row(NamedTuple):
    """What the compilers said of one form for one target."""

    form: Form
    target: str
    registers: int
    stack: int
    scalars: int
    elf: bool
    fused: bool
    flushed: bool
    gaps: list[str]
    #: Bytes of shared memory of a form for which PTX declares some; else 0.
    shared: int

    def __str__(self) -> str:
        short = {k: v for k, v in self.form.constexprs.items() if k in SHOWN}
        chosen = " ".join(f"{k}={v:d}" for k, v in short.items())
        figures = f"{self.registers:4} registers {self.stack:4} B of stack {self.scalars:4} scalars"
        return f"{self.target:7} {figures}  {self.form.kernel} {self.form.dtype} {chosen}"

    def allowed(self) -> Allowed | None:
        """The first of ALLOWED that is about the form."""
        c = self.form.constexprs
        for allowed in ALLOWED:
            if allowed.kernel == self.form.kernel and all(
                c[name] in values for name, values in allowed.constexprs.items()
            ):
                return allowed
        return None

    def limits(self) -> tuple[int, int]:
        """Most stack and scalars."""
        allowed = self.allowed()
        return (allowed.stack, allowed.scalars) if allowed else (0, 0)


SHOWN = (
    "MODE",
    "mode",
    "window",
    "STATS",
    "SUMS",
    "PACKED",
    "STORE",
    "ADD",
    "UNIT",
    "SIGMA",
    "sums",
    "store",
    "add",
)


class Report(NamedTuple):
    """All kernels, numbers that they are specialised on, and what was compiled for one target."""

    target: str
    kernels: list[str]
    specialised: list[str]
    rows: list[Row]

    def table(self) -> str:
        return "\n".join(map(str, self.rows))


def work(target: str, path: str) -> None:
    """A process that compiles for one target: what there is, and what the compiler said of it."""
    kernels, specialised, forms = notes()
    rows = [
        ((form.kernel, form.dtype, form.constexprs), build(form, target))
        for form in wanted(forms, target)
    ]
    Path(path).write_text(json.dumps([kernels, specialised, rows]))


@pytest.fixture(scope="module", params=TARGETS)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Everything compiled for one target, with an empty cache, once for all of xdist."""
    target, folder = request.param, tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / f"{target}.json"
    with FileLock(folder / f"{target}.lock"):
        if not path.exists():
            cache = str(tmp_path_factory.mktemp(target))
            run = subprocess.run(
                [sys.executable, __file__, target, path],
                env=os.environ | {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"},
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    kernels, specialised, found = json.loads(path.read_text())
    nothing: Any = (None, {}, {}, {}, {})
    rows = [Row(Form(k, t, c, nothing), target, **figures) for (k, t, c), figures in found]
    return Report(target, kernels, specialised, rows)


@pytest.mark.slow
def test_every_kernel_is_compiled(report: Report) -> None:
    wanted_kernels = {k for k in report.kernels if is_wanted(k, report.target)}
    assert {row.form.kernel for row in report.rows} == wanted_kernels
    assert len(report.kernels) >= 11
    assert all(row.elf for row in report.rows), report.table()


@pytest.mark.slow
@pytest.mark.parametrize("report", ["sm_90"], indirect=True)
def test_main_forms_of_every_dtype_are_compiled(report: Report) -> None:
    main = {(row.form.kernel, row.form.dtype) for row in report.rows if row.form.is_main()}
    for kernel in ("zipccl._encode_kernel", "zipccl._decode_kernel"):
        assert len({dtype for k, dtype in main if k == kernel}) == 5


@pytest.mark.slow
def test_nothing_spills_that_may_not(report: Report) -> None:
    """To see the table of a green run: pytest -s."""
    print(report.table())
    wrong = [
        f"{row}: at most {row.limits()}"
        for row in report.rows
        if row.stack > row.limits()[0] or row.scalars > row.limits()[1]
    ]
    assert not wrong, "\n".join(["", *wrong, "of all:", report.table()])


@pytest.mark.slow
def test_programs_have_no_more_shared_memory_than_they_start_with(report: Report) -> None:
    assert any(row.shared for row in report.rows) or report.target != "sm_90"
    assert not [f"{row}: {row.shared}" for row in report.rows if row.shared > SHARED]


@pytest.mark.slow
@pytest.mark.parametrize("report", ["sm_90"], indirect=True)
def test_what_may_spill_is_compiled(report: Report) -> None:
    """Every kernel is compiled for this target, so an entry that is about none is out of date."""
    used = [row.allowed() for row in report.rows]
    assert not [allowed for allowed in ALLOWED if allowed not in used]


ROUNDED = (*tw.list_codecs(), "dynamiq_widths", "lhc_peeling", "norms")


@pytest.mark.slow
@pytest.mark.parametrize("report", [t for t in TARGETS if t.startswith("sm_")], indirect=True)
@pytest.mark.parametrize("codec", ROUNDED)
def test_every_operation_is_rounded_once(report: Report, codec: str) -> None:
    rows = [row for row in report.rows if row.form.kernel.startswith(f"{codec}.")]
    assert rows or report.target != "sm_90"
    assert not [str(row) for row in rows if row.fused]


@pytest.mark.slow
def test_no_subnormal_number_is_taken_for_zero(report: Report) -> None:
    assert report.rows
    assert not [str(row) for row in report.rows if row.flushed]


@pytest.mark.slow
def test_no_reduction_is_over_lanes_with_gaps(report: Report) -> None:
    """Layouts in which Triton 3.6 reduces wrongly; later versions choose the same ones."""
    assert any(row.form.is_one_of(ONCE_WRONG) for row in report.rows) or report.target != "sm_90"
    assert not [f"{row}: {row.gaps}" for row in report.rows if row.gaps]


def test_gaps() -> None:
    ttgir = """
#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [4, 8], order = [1, 0]}>
#linear = #ttg.linear<{register = [[1]], lane = [[8], [0], [0], [16]], warp = [[64]], block = []}>
#linear1 = #ttg.linear<{lane = [[0, 8], [1, 0], [0, 0], [0, 16]], warp = [], block = []}>
  %a = "tt.reduce"(%b) <{axis = 0 : i32}> ({
  ^bb0(%c: i64, %d: i64):
    tt.reduce.return %e : i64 loc(#loc1)
  }) : (tensor<1024xi64, LAYOUT>) -> i64 loc(#loc2)
"""
    assert gaps(ttgir.replace("LAYOUT", "#blocked")) == []
    assert len(gaps(ttgir.replace("LAYOUT", "#linear"))) == 1
    assert len(gaps(ttgir.replace("LAYOUT", "#linear").replace("[0], [0]", "[0], [32]"))) == 1
    assert gaps(ttgir.replace("LAYOUT", "#linear").replace("[0], [0]", "[2], [32]")) == []
    of_slice = ttgir.replace("LAYOUT", "#ttg.slice<{dim = 0, parent = #linear1}>")
    assert len(gaps(of_slice)) == 1
    assert gaps(of_slice.replace("dim = 0", "dim = 1")) == []


@pytest.mark.slow
def test_no_kernel_is_compiled_anew_for_a_number(report: Report) -> None:
    """Else every size of a tensor would wait for the compiler."""
    assert report.specialised == []


if __name__ == "__main__":
    work(*sys.argv[1:])
