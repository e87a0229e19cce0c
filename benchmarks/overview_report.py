"""The table and the picture of README.md, from the recorded results.

`python benchmarks/report.py` writes results/overview.svg and results/overview.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = ("| | size | encode, save | decode, load |", "|---|---|---|---|")
_COLORS = {"tightwire": "#0b7a75"}
_OTHER = "#9aa5b1"


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def _case(record: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """The contestants of a warm case of bench_files.py, by name."""
    for case in record["cases"]:
        if case["name"] == name and not case["cold"]:
            return {row["name"]: {**row, "nbytes": case["nbytes"]} for row in case["rows"]}
    raise KeyError(name)


def _codec_rows(folder: Path) -> list[tuple[str, str, float, float, float]]:
    """(place, name, ratio, encode GB/s, decode GB/s) of codecs whose data stay in memory."""
    cpu = {b["name"]: b["extra_info"] for b in _read(folder, "cpu.json")["benchmarks"]}
    gpu = _read(folder, "gpu.json")
    ours = cpu["test_encode[1-bfloat16]"]
    zipnn = cpu["test_zipnn_compress"]
    decoded = (cpu["test_decode[1-bfloat16]"]["GB/s"], cpu["test_zipnn_decompress"]["GB/s"])
    rows = [
        ("cpu", "tightwire", ours["ratio"], ours["GB/s"], decoded[0]),
        ("cpu", "ZipNN", zipnn["ratio"], zipnn["GB/s"], decoded[1]),
    ]
    case = next(
        c
        for c in gpu["cases"]
        if (c["dtype"], c["data"], c["mib"]) == ("bfloat16", "gaussian", 256)
    )
    speed = {
        t["op"]: t["GB/s"] for t in case["timings"] if t["how"] == "cold" and not t["checksum"]
    }
    rows.append(("gpu", "tightwire", case["ratio"], speed["encode"], speed["decode"]))
    # Each configuration of nvCOMP was called in two ways: the faster one counts.
    ans = [r for r in gpu["nvcomp"]["rows"] if r["name"].startswith("ANS") and r["mib"] == 256]
    smallest = min(r["ratio"] for r in ans)
    encode, decode = (
        max(r[f"{op}_GB/s"] for r in ans if r["ratio"] == smallest) for op in ("encode", "decode")
    )
    rows.append(("gpu", "nvCOMP ANS", smallest, encode, decode))
    rows += [
        (p["place"], p["name"] + "¹", p["ratio"], p["encode_GB/s"], p["decode_GB/s"])
        for p in _read(folder, "peers.json")
    ]
    return rows


def _lossy_rows(folder: Path) -> list[str]:
    """Lines of eight-bit floats on the GPU: codec `mx` and torchao's cast to the same codes."""
    lossy = _read(folder, "gpu.json")["lossy"]
    case = next(c for c in lossy["cases"] if c["name"] == "mx e4m3" and c["mib"] == 256)
    speed = {t["op"]: t["GB/s"] for t in case["timings"]}
    cast = next(t for t in lossy["torchao"]["rows"] if t["mib"] == 256)
    ours = f"{speed['encode']:,.0f} GB/s | {speed['decode']:,.0f} GB/s"
    return [
        f"| tightwire `mx`, lossy | 52 % | {ours} |",
        f"| torchao MXFP8, the same codes | 52 % | {cast['GB/s']:,.0f} GB/s | |",
    ]


def _seconds_rows(record: Mapping[str, Any], cases: Sequence[str], names: Mapping[str, str]) -> Any:
    save, load = (_case(record, case) for case in cases)
    for shown, name in names.items():
        back = load[name if name in load else shown]
        size = save[name]["file_nbytes"] / save[name]["nbytes"]
        yield shown, size, save[name]["best_s"], back["best_s"]


def table(folder: Path) -> list[str]:
    """Lines of README's table, Markdown; `folder` holds the records."""
    titles = {
        "cpu": "**bfloat16 in memory, one core of an EPYC; tightwire with checksums**",
        "gpu": "**bfloat16 in the memory of an H200; tightwire without checksums**",
    }
    lines = list(HEAD)
    rows = _codec_rows(folder)
    for place, title in titles.items():
        lines.append(f"| {title} | | | |")
        for there, name, ratio, encode, decode in rows:
            if there == place:
                digits = 1 if place == "cpu" else 0
                shown = (f"{speed:,.{digits}f} GB/s" for speed in (encode, decode))
                lines.append(f"| {name} | {_share(ratio)} | {' | '.join(shown)} |")
    lines += _lossy_rows(folder)
    cpu, gpu = _read(folder, "files_cpu.json"), _read(folder, "files_gpu.json")
    whole = (
        (
            "**a file of 0.5 GB, command from start to end, two cores**",
            cpu,
            ("compress", "decompress"),
            {"tightwire": "tightwire", "zstd -1 -T2": "zstd -1 -T2, fsync"},
        ),
        (
            "**the same tensors, `save_file` and `load_file`, two cores**",
            cpu,
            ("save", "load"),
            {"tightwire, like=numpy": "tightwire", "safetensors": "safetensors", "ZipNN": "ZipNN"},
        ),
        (
            "**4.3 GB of tensors of an H200, memory file system**",
            gpu,
            ("save from the GPU", "load to the GPU"),
            {"tightwire": "tightwire", "safetensors": "safetensors"},
        ),
    )
    for title, record, cases, names in whole:
        lines.append(f"| {title} | | | |")
        for shown, size, save, load in _seconds_rows(record, cases, names):
            name = shown.partition(",")[0]
            lines.append(f"| {name} | {_share(size)} | {save:.2f} s | {load:.2f} s |")
    return lines


def _share(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def plot(folder: Path, path: Path) -> None:
    """Draw bytes on disk, and seconds of whole programs, as bars; shorter is better."""
    import matplotlib
    from matplotlib.figure import Figure

    cpu, gpu = _read(folder, "files_cpu.json"), _read(folder, "files_gpu.json")
    saved, commands = _case(cpu, "save"), _case(cpu, "compress")
    loaded = _case(gpu, "load to the GPU")
    on_cpu, back = _case(cpu, "save"), _case(cpu, "load")
    panels = {
        "MB on disk: 0.5 GB of bfloat16": {
            "tightwire": saved["tightwire"]["file_nbytes"] / 1e6,
            "ZipNN": saved["ZipNN"]["file_nbytes"] / 1e6,
            "zstd -1": commands["zstd -1 -T2, fsync"]["file_nbytes"] / 1e6,
            "safetensors": saved["safetensors"]["file_nbytes"] / 1e6,
        },
        "seconds: save + load, 2 cores": {
            "tightwire": on_cpu["tightwire"]["best_s"] + back["tightwire, like=numpy"]["best_s"],
            "safetensors": on_cpu["safetensors"]["best_s"] + back["safetensors"]["best_s"],
            "torch": on_cpu["torch.save"]["best_s"] + back["torch.load, mmap off"]["best_s"],
            "ZipNN": on_cpu["ZipNN"]["best_s"] + back["ZipNN"]["best_s"],
        },
        "seconds: 4.3 GB to an H200": {
            name: loaded[name]["best_s"] for name in ("tightwire", "safetensors", "torch.load")
        },
    }
    with matplotlib.rc_context({"svg.hashsalt": "tightwire", "font.size": 11}):
        figure = Figure(figsize=(10, 2.6), layout="constrained")
        for axes, (title, bars) in zip(figure.subplots(1, 3), panels.items(), strict=True):
            names, values = list(bars)[::-1], list(bars.values())[::-1]
            drawn = axes.barh(names, values, color=[_COLORS.get(name, _OTHER) for name in names])
            axes.bar_label(drawn, [f"{v:.0f}" if v > 10 else f"{v:.2f}" for v in values], padding=3)
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlim(0, max(values) * 1.18)
            axes.xaxis.set_visible(False)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def write(folder: Path) -> None:
    """Write overview.svg and overview.md into `folder`, beside the records they are made from."""
    plot(folder, folder / "overview.svg")
    peers = _read(folder, "peers.json")
    lines = [
        "# At a glance",
        "",
        "Made by `benchmarks/report.py` from the records. "
        "Speeds are GB/s of tensor bytes; seconds are those of the fastest run.",
        "",
        "![bytes and seconds](overview.svg)",
        "",
        *table(folder),
        "",
        "¹ Measured in another run on a machine of the same kind:",
        "",
        *(f"- {p['name']}: {p['data']}; {p['machine']}, {p['date']}." for p in peers),
    ]
    (folder / "overview.md").write_text("\n".join(lines) + "\n")
