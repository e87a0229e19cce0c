"""Turn gpu.json and gpu_h100.json, which bench_gpu.py writes, into pages; report.py calls it.

Nothing here needs a GPU. What stands on the page from the heading BOUNDS on is written by hand, and
kept when the page is made anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

#: Names of records and pages: the most cases on an H200, and the last state on an H100.
STEMS = ("gpu", "gpu_h100")
#: Heading of the part of a page that is written by hand.
BOUNDS = "## What bounds each kernel"
DATA = {
    "gaussian": "N(0, 0.02)",
    "weights": "real weights",
    "random": "random bits (stored raw)",
    "equal": "all equal",
    "nan": "all NaN",
    "half_escaped": "half of the elements escaped",
    "missed": "explicit window that holds no element (stored raw)",
    "rows": "rows of 1536, in turns 1 and 2^-10 times N(0, 0.02)",
    "half_zeros": "N(0, 0.02), half of it zeros",
}
USUAL = ("gaussian", "weights")


class Goal(NamedTuple):
    """A figure that was asked for: `value` shall be `bound` ("least" or "most") `asked`."""

    name: str
    value: float
    bound: str
    asked: float

    @property
    def met(self) -> bool:
        """NaN, what was not measured, meets nothing."""
        return self.value >= self.asked if self.bound == "least" else self.value <= self.asked

    @property
    def shown(self) -> str:
        """The value in as many digits as it deserves."""
        return f"{self.value:.4g}" if abs(self.value) >= 1 else f"{self.value:.3f}"


def timings(recorded: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Every timing, with the fields of its case, whose fields are as wanted: a value or a set."""
    found = []
    for case in recorded["cases"]:
        shared = {k: v for k, v in case.items() if k != "timings"}
        for t in case["timings"]:
            row = shared | t
            if all(row[k] in (v if isinstance(v, set) else {v}) for k, v in wanted.items()):
                found.append(row)
    return found


def goals(recorded: dict[str, Any]) -> list[Goal]:
    """The figures asked for; the worst of the cases where several count, NaN where none does."""
    large, others = {256, 1024}, {"float16", "float32"}

    def worst(field: str, pick: Callable[[Iterable[float]], float], **wanted: Any) -> float:
        wanted = {"how": "cold", "checksum": False, "data": "gaussian"} | wanted
        rows = timings(recorded, **wanted)
        return pick([r["us"]["median"] if field == "us" else r[field] for r in rows] or [math.nan])

    goals = []
    for op, asked in (("encode", 0.70), ("decode", 0.80), ("decode_add", 0.70)):
        value = worst("of_copy", min, op=op, mib=large, dtype="bfloat16")
        goals.append(Goal(f"{op}, bfloat16, 256 MiB and more, of copy", value, "least", asked))
    for op in ("encode", "decode"):
        value = worst("of_copy", min, op=op, mib=large, dtype=others)
        name = f"{op}, float16 and float32, 256 MiB and more, of copy"
        goals.append(Goal(name, value, "least", 0.65))
    for op, asked in (("encode", 15.0), ("decode", 12.0)):
        for how in ("hot", "replay", "cold"):
            value = worst("us", max, op=op, mib=2, dtype="bfloat16", how=how)
            goals.append(Goal(f"{op}, bfloat16, 2 MiB, {how}, us", value, "most", asked))
    for op in ("encode", "decode"):
        value = worst("GB/s", min, op=op, mib=16, dtype="bfloat16")
        goals.append(Goal(f"{op}, bfloat16, 16 MiB, GB/s", value, "least", 700.0))
    costs = {op: checksum_costs(recorded, op, large) for op in ("encode", "decode")}
    for op, found in costs.items():
        value = max(found.values(), default=math.nan)
        goals.append(
            Goal(f"{op}, bfloat16, 256 MiB and more, cost of checksums", value, "most", 0.1)
        )
    for op in ("encode", "decode"):
        usual = worst("us", max, op=op, mib=256, dtype="bfloat16")
        hard = set(DATA).difference(USUAL)
        slow = worst("us", max, op=op, mib=256, dtype="bfloat16", data=hard)
        goals.append(Goal(f"{op}, worst data, of the usual speed", usual / slow, "least", 0.25))
    shares = [c["scratch_share"] for c in recorded["cases"] if "scratch_share" in c]
    goals.append(Goal("scratch over input", max(shares, default=math.nan), "most", 1 / 32))
    us = recorded.get("host", {}).get("us", {})
    given = us.get("encode, out and scratch given", {}).get("median", math.nan)
    return [*goals, Goal("host time of an eager encode, us", given, "most", 60.0)]


def checksum_costs(recorded: dict[str, Any], op: str, mibs: set[int]) -> dict[int, float]:
    """Share of its time that checksums add to `op`, for each size: bfloat16, N(0, 0.02)."""
    wanted = {"op": op, "how": "cold", "dtype": "bfloat16", "data": "gaussian", "mib": mibs}
    us: dict[bool, dict[int, float]] = {False: {}, True: {}}
    for t in timings(recorded, **wanted):
        us[t["checksum"]][t["mib"]] = t["us"]["median"]
    return {mib: us[True][mib] / plain - 1 for mib, plain in us[False].items() if mib in us[True]}


def page_lines(recorded: dict[str, Any], stem: str) -> list[str]:
    """The page of a record without the part that is written by hand."""
    machine, found = recorded["machine"], recorded["versions"]
    named = ("python", "torch", "cuda", "triton", "tightwire")
    versions = ", ".join(f"{k} {found[k]}" for k in named if found[k])
    copy = recorded["copy_GB/s"]
    largest = copy["by_mib"][str(copy["largest_mib"])]
    return [
        "# Recorded results on the GPU",
        "",
        f"Made by `benchmarks/report.py` from {stem}.json, which `benchmarks/bench_gpu.py` writes; "
        "the last section is by hand.",
        "",
        f"{machine['gpu']} ({machine['sms']} multiprocessors), driver {machine['driver']}, "
        f"{versions}; {recorded['date']}. Median of graph replays into memory given beforehand, "
        "results checked before and after. GB/s of tensor bytes. Fractions are in bytes moved, of "
        "the copy of the same tensors and, in brackets, of the copy of "
        f"{copy['largest_mib']} MiB, {largest:.0f} GB/s read and written. Sizes in MiB; checksum "
        "off; no tensor is in the cache when its turn comes.",
        "",
        f"![fraction of the copy rate against size]({stem}.png)",
        "",
        "## Figures asked for",
        "",
        "| | measured | asked | |",
        "|---|---|---|---|",
        *(
            f"| {g.name} | {g.shown} | at {g.bound} {g.asked:.4g} | {'' if g.met else 'not met'} |"
            for g in goals(recorded)
            if not math.isnan(g.value)
        ),
        *speed_lines(recorded),
        *adversarial_lines(recorded),
        *small_lines(recorded),
        *overhead_lines(recorded),
        *nvcomp_lines(recorded),
        *lossy_lines(recorded),
        *failure_lines(recorded),
    ]


def speed_lines(recorded: dict[str, Any]) -> list[str]:
    """Gaussian data and real weights at every size."""
    lines = ["", "## Speed", ""]
    weights = recorded["weights"] or {}
    if "source" in weights:
        lines += [
            f"Real weights: {weights['source']}, {weights['nelem'] / 1e6:.1f} M elements, one "
            "tensor behind the other and again from the first.",
            "",
        ]
    lines += [
        "| | MiB | ratio | encode GB/s | of copy | decode GB/s | of copy | decode_add to float32, "
        "of copy | to its own type | scratch |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    shown = [c for c in recorded["cases"] if c["timings"] and c["data"] in USUAL]
    for case in sorted(shown, key=lambda c: (c["data"], c["dtype"], c["mib"])):
        ops = ("encode", "decode", "decode_add", "decode_add_same")
        encode, decode, add, same = (cold(case, op) for op in ops)
        narrow = case["data"] == "gaussian" and case["dtype"].startswith("float8")
        lines.append(
            f"| {case['dtype']}, {'N(0, 16)' if narrow else DATA[case['data']]} | {case['mib']} | "
            f"{case['ratio']:.4f} | {encode['GB/s']:.0f} | {fraction(encode)} | "
            f"{decode['GB/s']:.0f} | {fraction(decode)} | {fraction(add)} | {fraction(same)} | "
            f"{inverse(case['scratch_share'])} |"
        )
    return lines


def adversarial_lines(recorded: dict[str, Any]) -> list[str]:
    """The worst data beside the usual."""
    usual = timings(recorded, data="gaussian", dtype="bfloat16", mib=256, how="cold")
    normal = {t["op"]: t["us"]["median"] for t in usual if not t["checksum"]}
    lines = [
        "",
        "## Adversarial data, bfloat16, 256 MiB",
        "",
        "| | ratio | encode GB/s | of the usual | decode GB/s | of the usual |",
        "|---|---|---|---|---|---|",
    ]
    for case in recorded["cases"]:
        if case["timings"] and case["data"] not in USUAL:
            cells = []
            for op in ("encode", "decode"):
                t = cold(case, op)
                share = normal.get(op, math.nan) / t["us"]["median"]
                cells.append(f"{t['GB/s']:.0f} | {share:.2f}")
            lines.append(f"| {DATA[case['data']]} | {case['ratio']:.4f} | {' | '.join(cells)} |")
    return lines


def small_lines(recorded: dict[str, Any]) -> list[str]:
    """Latencies of single calls."""
    lines = [
        "",
        "## Small tensors, us",
        "",
        "Median (p10 to p90). hot: one tensor again and again within a graph; replay: a graph of "
        "one call, alone.",
        "",
        "| | MiB | cold | hot | replay |",
        "|---|---|---|---|---|",
    ]
    small = timings(recorded, data="gaussian", how="hot", checksum=False)
    for t in sorted(small, key=lambda t: (t["mib"], t["dtype"])):
        same = {k: t[k] for k in ("dtype", "data", "mib", "op", "checksum")}
        by_how = {x["how"]: x["us"] for x in timings(recorded, **same)}
        cells = [spread(by_how[how]) for how in ("cold", "hot", "replay")]
        lines.append(f"| {t['op']}, {t['dtype']} | {t['mib']} | {' | '.join(cells)} |")
    return lines


def overhead_lines(recorded: dict[str, Any]) -> list[str]:
    """What checksums and Python cost."""
    mibs = {case["mib"] for case in recorded["cases"]}
    shown = []
    for op in ("encode", "decode"):
        costs = sorted(checksum_costs(recorded, op, mibs).items())
        shown.append(f"{op} " + ", ".join(f"{cost:+.1%} at {mib} MiB" for mib, cost in costs))
    lines = ["", "## Checksums and host time", ""]
    lines.append(f"Time that checksums add, bfloat16, N(0, 0.02): {'; '.join(shown)}.")
    host = recorded.get("host", {})
    if "us" in host:
        calls = ", ".join(f"{name}: {spread(us)}" for name, us in host["us"].items())
        lines += ["", f"Host time of eager calls on {host['nbytes'] >> 10} KiB, us: {calls}."]
    return lines


def cold(case: dict[str, Any], op: str) -> Any:
    """The timing that counts of one operation, None if there is none."""
    for t in case["timings"]:
        if (t["op"], t["how"], t["checksum"]) == (op, "cold", False):
            return t
    return None


def fraction(t: dict[str, Any] | None) -> str:
    """`0.81 (0.80)`: of its own copy, and of the largest."""
    return f"{t['of_copy']:.2f} ({t['of_largest']:.2f})" if t else ""


def inverse(share: float) -> str:
    """A share of the input as `1/64`."""
    return f"1/{1 / share:.0f}" if share else "0"


def spread(us: dict[str, float]) -> str:
    """Median and spread of microseconds."""
    return f"{us['median']:.1f} ({us['p10']:.1f} to {us['p90']:.1f})"


def nvcomp_lines(recorded: dict[str, Any]) -> list[str]:
    """Each of its codecs in its faster way of being called, and tightwire on the same data."""
    nvcomp = recorded.get("nvcomp", {})
    lines = ["", "## nvCOMP on the same machine, bfloat16, N(0, 0.02)", ""]
    if "rows" not in nvcomp:
        return [*lines, f"Not measured: {nvcomp.get('missing', 'left out')}."]
    lines += [
        f"nvCOMP {nvcomp['version']} by its Python interface, the faster of two ways of calling it "
        "(configurations and memory given, or not); round trips checked.",
        "",
        "| | MiB | ratio | encode GB/s | decode GB/s |",
        "|---|---|---|---|---|",
    ]
    failures = []
    names = dict.fromkeys((row["name"], row["mib"]) for row in nvcomp["rows"])
    for name, mib in names:
        rows = [r for r in nvcomp["rows"] if (r["name"], r["mib"]) == (name, mib)]
        fine = [r for r in rows if "error" not in r]
        if fine:
            encode, decode = (max(r[f"{op}_GB/s"] for r in fine) for op in ("encode", "decode"))
            ratio = f"{fine[0]['ratio']:.4f}"
            lines.append(f"| {name} | {mib} | {ratio} | {encode:.0f} | {decode:.0f} |")
        failures += [
            f"- {name}, {mib} MiB, {r['form']}: {r['error']}" for r in rows if r not in fine
        ]
    for case in sorted(recorded["cases"], key=lambda c: c["mib"]):
        here = (case["dtype"], case["data"]) == ("bfloat16", "gaussian")
        if here and case["timings"] and case["mib"] in {mib for _, mib in names}:
            encode, decode = (cold(case, op)["GB/s"] for op in ("encode", "decode"))
            ratio = f"{case['ratio']:.4f}"
            lines.append(
                f"| tightwire {case.get('name', 'zipccl')} | {case['mib']} | {ratio} | "
                f"{encode:.0f} | {decode:.0f} |"
            )
    return lines + (["", "What failed:", "", *failures] if failures else [])


#: Least fractions of the copy rate that were asked for: encode, decode, decode_add_encode.
LOSSY_ASKED = {
    "mx": (0.75, 0.80, 0.65),
    "nvfp4": (0.75, 0.80, 0.65),
    "taco": (0.70, 0.75, 0.65),
    "dynamiq": (0.60, 0.60, 0.55),
    "lhc": (0.50, 0.0, 0.0),
}
NOTHING_ASKED = 0.0, 0.0, 0.0


def lossy_lines(recorded: dict[str, Any]) -> list[str]:
    """The lossy codecs, with what is under the figures asked for marked."""
    lossy = recorded.get("lossy")
    if not lossy:
        return []
    lines = [
        "",
        "## Lossy codecs, N(0, 0.02)",
        "",
        f"{lossy['machine']['gpu']}, driver {lossy['machine']['driver']}, torch "
        f"{lossy['versions']['torch']}, Triton {lossy['versions']['triton']}; {lossy['date']}. "
        "Replays of graphs into memory given beforehand, no tensor in the cache; GB/s of tensor "
        "bytes, and in brackets the fraction of the copy rate of the same tensors in bytes moved. "
        "decode_add is into float32. Bytes compared with those of the CPU before and after. "
        "Without stats, nvfp4 reads everything twice, as dynamiq does to encode, which counts as "
        "moved. Asked: "
        + "; ".join(
            ", ".join(
                f"{op} {least:.2f}"
                for op, least in zip(
                    (f"{name} encode", "decode", "decode_add_encode"), asked, strict=True
                )
                if least
            )
            for name, asked in LOSSY_ASKED.items()
        )
        + ". An asterisk: less than that.",
        "",
        "| | MiB | ratio | encode | decode | decode_add | decode_add_encode | copy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors, shares = [], []
    for case in lossy["cases"]:
        name = f"{case['name']}, {case['dtype']}"
        if case.get("date", lossy["date"]) != lossy["date"]:
            name += f" ({case['date']})"
        errors += [f"- {name}, {case['mib']} MiB: {error}" for error in case["errors"]]
        if case["timings"]:
            codec = case["name"].replace(",", " ").split()[0]
            asked = LOSSY_ASKED.get(codec, NOTHING_ASKED)
            wanted = {"encode": asked[0], "decode": asked[1], "decode_add_encode": asked[2]}
            cells = [
                lossy_cell(case, op, wanted.get(op, 0.0))
                for op in ("encode", "decode", "decode_add", "decode_add_encode")
            ]
            copied = [t["moved_GB/s"] for t in case["timings"] if t["op"] == "copy"]
            cells.append(f"{copied[0]:.0f}" if copied else "")
            lines.append(f"| {name} | {case['mib']} | {case['ratio']:.4f} | {' | '.join(cells)} |")
        times = {t["op"]: t["us"]["median"] for t in case["timings"]}
        if case.get("rounds"):
            gib = times["decode"] * 1024 / case["mib"] / 1e3
            shares.append(
                f"- {name}, {case['mib']} MiB: peeled in {case['rounds']} rounds, "
                f"{case['estimated']} values estimated, decode {gib:.2f} ms per GiB"
            )
        if {"measure", "encode"} <= times.keys():
            share = times["measure"] / times["encode"]
            shares.append(f"- {name}, {case['mib']} MiB: statistics are {share:.0%} of encode")
    lines += ["", *shares] if shares else []
    torchao = lossy["torchao"]
    lines += ["", f"torchao: {torchao['missing']}"] if "missing" in torchao else [""]
    for row in torchao.get("rows", []):
        shown = row.get("error")
        if not shown:
            equal = "the same codes" if row["same_codes"] else "other codes"
            shown = f"{row['GB/s']:.0f} GB/s, {row['moved_GB/s']:.0f} moved, {equal}"
        lines.append(f"- {row['name']}, {row['mib']} MiB: {shown}")
    if lossy["left_out"]:
        lines += ["", f"Left out for want of time: {'; '.join(lossy['left_out'])}."]
    return lines + (["", "What failed:", "", *errors] if errors else [])


def lossy_cell(case: dict[str, Any], op: str, asked: float) -> str:
    """`1234 (.81)`, or nothing where it was not measured."""
    for t in case["timings"]:
        if t["op"] == op:
            share = t["of_copy"] if t["of_copy"] is not None else math.nan
            return f"{t['GB/s']:.0f} ({share:.2f}{'' if share >= asked else ' *'})"
    return ""


def failure_lines(recorded: dict[str, Any]) -> list[str]:
    """Cases that were not timed since a check failed."""
    failed = [c for c in recorded["cases"] if "error" in c]
    lines = [f"- {c['dtype']}, {c['data']}, {c['mib']} MiB: {c['error']}" for c in failed]
    return ["", "## Not timed, since a check failed", "", *lines] if lines else []


def write_pages(folder: Path) -> list[str]:
    """Write a page for each record in `folder`, keeping what was written by hand; their names."""
    pages = [folder / f"{stem}.md" for stem in STEMS if (folder / f"{stem}.json").exists()]
    for page in pages:
        old = page.read_text() if page.exists() else ""
        by_hand = old[old.index(BOUNDS) :] if BOUNDS in old else f"{BOUNDS}\n\n(to be written)\n"
        lines = page_lines(json.loads(page.with_suffix(".json").read_text()), page.stem)
        page.write_text("\n".join(lines) + f"\n\n{by_hand}")
    return [page.name for page in pages]
