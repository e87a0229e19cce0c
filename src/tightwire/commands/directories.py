"""What the commands do with directories of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .. import directories as model_directories
from ..convert import Comparison
from ..directories import DirectoryReport, DirectoryWork, ShardReport
from ..model_index import PLAIN_SUFFIX
from ..shards import tensor_names
from .command import Done, attempts
from .failures import ANY, COMPRESSED, EITHER, Failure, about, misuse
from .output import byte_bar, count_text, print_table, say, size_text

#: Of a file, the name of a tensor or None, and whether to estimate what is not compressed.
InspectOne = Callable[[Path, str | None, bool], Done]


def prepared(
    targets: Mapping[Path, Path], prepare: Callable[[Path, Path], DirectoryWork], needed: str
) -> dict[Path, DirectoryWork]:
    """What is to be done with the sources that are directories; all of it is checked."""
    works = {}
    for source, target in targets.items():
        if source.is_dir():
            with about(None, needed):
                works[source] = prepare(source, target)
    return works


def without(targets: Mapping[Path, Path], works: Mapping[Path, DirectoryWork]) -> dict[Path, Path]:
    """The targets of the sources that are files."""
    return {source: target for source, target in targets.items() if source not in works}


def run(what: str, work: DirectoryWork, needed: str) -> Done:
    """Do what was prepared, with one bar over all files."""
    with about(None, needed), byte_bar(what, lambda: work.nbytes) as advance:
        report = work.run(lambda name, nbytes: advance(nbytes))
    before = sum(shard.source_nbytes for shard in report.shards)
    after = sum(shard.target_nbytes for shard in report.shards)
    document = {
        "target": report.target,
        "source_nbytes": before,
        "target_nbytes": after,
        "other_files": report.n_other,
        "files": [_shard_document(shard) for shard in report.shards],
    }
    return document, lambda: say(_summary(report, before, after))


def _shard_document(shard: ShardReport) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path": shard.source,
        "target": shard.target,
        "source_nbytes": shard.source_nbytes,
        "target_nbytes": shard.target_nbytes,
        "done_before": shard.done_before,
    }
    if shard.tensors:
        document["tensors"] = [asdict(r) | {"ratio": r.ratio} for r in shard.tensors]
    return document


def _summary(report: DirectoryReport, before: int, after: int) -> str:
    done = sum(shard.done_before for shard in report.shards)
    earlier = f" ({done} done before)" if done else ""
    return (
        f"{report.target}: {_files(len(report.shards), 'shard')}{earlier}, "
        f"{_files(report.n_other, 'other file')}, {size_text(before)} -> {size_text(after)}"
    )


def _files(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def verify(source: Path, as_json: bool) -> Done:
    """Check every shard and index, also after one that is bad.

    Raises Failure, with what became of each file in its details.
    """

    def work(path: Path) -> Done:
        with about(None, COMPRESSED):
            n = checks[path]()
        return {"tensors": n}, lambda: None

    total = partial(model_directories.checked_nbytes, source)
    with about(None, COMPRESSED), byte_bar("verify", total) as advance:
        checks = model_directories.checks(source, progress=lambda name, nbytes: advance(nbytes))
        documents, failures = attempts(list(checks), work, as_json)
    if failures:
        message = f"{source}: {len(failures)} of {len(checks)} files are bad"
        reason = failures[0].document["reason"]
        raise Failure(failures[0].code, reason, message, {"files": documents})
    n = sum(d["tensors"] for d in documents if d["path"].suffix == PLAIN_SUFFIX)
    text = f"{source}: ok, {_files(len(checks), 'file')}, {count_text(n)}"
    return {"tensors": n, "files": documents}, lambda: say(text)


def inspect(source: Path, tensor: str | None, inspect_one: InspectOne, estimate: bool) -> Done:
    """A row for each shard and a total, or one tensor in the shards that have it."""
    with about(None, ANY):
        done = {}
        for path in model_directories.safetensors_files(source):
            if tensor is None or tensor in tensor_names(path):
                with about(path, ANY):
                    done[path] = inspect_one(path, tensor, estimate)
        if not done:
            raise misuse(f"{source}: no shard has a tensor {tensor!r}")
    documents = [{"path": path} | document for path, (document, _) in done.items()]

    def show() -> None:
        if tensor is None:
            _show_shards(source, documents)
            return
        for path, (_, show_one) in done.items():
            say(f"{path}:")
            show_one()

    return {"files": documents} | ({} if tensor is not None else _totals(documents)), show


def _totals(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    raw = sum(document["raw_nbytes"] for document in documents)
    packed = sum(document["packed_nbytes"] for document in documents)
    return {"raw_nbytes": raw, "packed_nbytes": packed, "ratio": packed / raw if raw else 1.0}


_COLUMNS: tuple[str, ...] = ("<shard", "tensors", "raw", "packed", "ratio")


def _show_shards(source: Path, documents: Sequence[Mapping[str, Any]]) -> None:
    rows = [_row(str(d["path"].relative_to(source)), len(d["tensors"]), d) for d in documents]
    n = sum(len(d["tensors"]) for d in documents)
    total = _row("total", n, _totals(documents))
    columns = _COLUMNS
    estimates = [d.get("estimate") for d in documents]
    if any(estimates):
        columns = (*_COLUMNS, "estimate")
        for row, found in zip(rows, estimates, strict=True):
            row.append(f"{found['ratio']:.2f}" if found else "")
        total.append("")
    print_table(columns, [*rows, total], last=1)
    n_plain = sum(not d["compressed"] for d in documents)
    if n_plain:
        which = f"{n_plain} of {len(documents)}" if n_plain < len(documents) else "all"
        advice = "" if any(estimates) else "; --estimate says what compressing would save"
        say("", f"not compressed: {which}{advice}")


def _row(name: str, n: int, sizes: Mapping[str, Any]) -> list[str]:
    raw, packed = size_text(sizes["raw_nbytes"]), size_text(sizes["packed_nbytes"])
    return [name, str(n), raw, packed, f"{sizes['ratio']:.4f}"]


def diff(a: Path, b: Path) -> Comparison:
    """Compare two models, of which one at least is a directory."""
    total = partial(model_directories.tensor_nbytes, a)
    with about(None, EITHER), byte_bar("diff", total) as advance:
        return model_directories.compare_directories(a, b, lambda name, nbytes: advance(nbytes))
