"""Speed of files beside safetensors, zstd, ZipNN and torch.save: whole commands, loads and saves.

    python benchmarks/bench_files.py --cpu --out benchmarks/results [--cold] [--directory-gib 4]
    python benchmarks/bench_files.py --gpu --out benchmarks/results [--folder /dev/shm]
    python benchmarks/report.py

Tensors are bfloat16, N(0, 0.02). Contestants take turns, once in each round; the first round is
recorded apart. Every run ends with the file synced, or the tensors there and each of their pages
touched, and is checked bit for bit outside the clock. GB/s counts the tensors' bytes. Inputs are in
the page cache, unless `--cold` adds cases where they have been dropped from it. A contestant that
is not installed is named in the record. Both parts may be made on different machines: they have a
file each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from file_timing import (
    COPY,
    IN_MEMORY,
    MIB,
    PAGE,
    SAFETENSORS,
    TIGHTWIRE,
    TO_NUMPY,
    TO_TORCH,
    TORCH,
    ZIPNN,
    ZSTD,
    Case,
    Contestant,
    Missing,
    Timer,
    as_bytes,
    check_arrays,
    check_files,
    file_system,
    fsync,
    machine,
    require,
    shapes,
    small_shapes,
    table,
    versions,
)

import tightwire as tw

SEED = 7
COMMAND = (sys.executable, "-m", "tightwire.cli")
SHARD_NBYTES = 512 * MIB
#: Where there is no `zstd`: op, input and output are its arguments.
ZSTANDARD = """
import sys, zstandard
op, source, target = sys.argv[1:]
compressor = zstandard.ZstdCompressor(level=1, threads=2)
codec = compressor if op == "compress" else zstandard.ZstdDecompressor()
with open(source, "rb") as a, open(target, "wb") as b:
    codec.copy_stream(a, b)
"""

Arrays = dict[str, Any]
Record = Callable[[Case, list[Contestant]], None]


def gaussian(named: Iterable[tuple[str, tuple[int, int]]], seed: int) -> Arrays:
    """Arrays of these names and shapes: bfloat16, N(0, 0.02)."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape, np.float32) * np.float32(0.02)).astype(ml_dtypes.bfloat16)
        for name, shape in named
    }


def nbytes_of(arrays: Mapping[str, Any]) -> int:
    """Bytes of all arrays together."""
    return sum(x.nbytes for x in arrays.values())


# Whole commands


def run(arguments: Sequence[object], refusal: type[Exception] = RuntimeError) -> None:
    """Run a command; `refusal`, with its last line and no folder's name, if it fails."""
    words = [str(a) for a in arguments]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        for path in (a for a in arguments if isinstance(a, Path)):
            last = last.replace(f"{path.parent}{os.sep}", "")
        raise refusal(f"exit {done.returncode}: {last}")


def command(
    name: str,
    arguments: Sequence[object],
    check: Callable[[], None],
    reads: Path,
    writes: Path,
    refusal: type[Exception] = RuntimeError,
) -> Contestant:
    """A command that writes a file or directory, and leaves syncing to us unless it is ours."""

    def call(_: None) -> None:
        run(arguments, refusal)
        if name != TIGHTWIRE:
            fsync(writes)

    return Contestant(name, call, lambda _: check(), reads=reads, writes=writes)


def zstd_commands(source: Path, packed: Path, back: Path) -> tuple[str, list[Any], list[Any]]:
    """Name and command lines of zstd, both ways: the program, else the Python package."""
    if shutil.which("zstd"):
        return (
            ZSTD,
            ["zstd", "-1", "-T2", "-q", source, "-o", packed],
            ["zstd", "-d", "-q", packed, "-o", back],
        )
    python = [sys.executable, "-c", ZSTANDARD]
    name = "zstandard in Python, level 1, 2 threads, fsync"
    return name, [*python, "compress", source, packed], [*python, "decompress", packed, back]


def commands(record: Record, arrays: Arrays, folder: Path, cold: bool) -> None:
    """Files compressed and back by whole command lines, from start to end."""
    from safetensors.numpy import save_file

    source, packed = folder / "model.safetensors", folder / "model.tw.safetensors"
    zipped, copy, back = (folder / name for name in ("model.zst", "copy", "back.safetensors"))
    zstd, pack, unpack = zstd_commands(source, zipped, back)
    save_file(arrays, source)
    buffers = {name: tw.encode(x) for name, x in arrays.items()}

    def check_zstd() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as other:
            target = Path(other) / "back"
            run([target if a == back else a for a in unpack])
            check_files(target, source)

    def encode(_: None) -> Any:
        return {name: tw.encode(x) for name, x in arrays.items()}

    def check_encoded(encoded: Any) -> None:
        for name, buffer in encoded.items():
            require(bytes(buffer) == bytes(buffers[name]), f"{name}: other bytes")

    def decode(_: None) -> Arrays:
        return {name: tw.decode(buffer) for name, buffer in buffers.items()}

    compressing = [
        command(
            TIGHTWIRE,
            (*COMMAND, "compress", source, "-o", packed),
            lambda: check_arrays(tw.load_file(packed), arrays),
            source,
            packed,
        ),
        command(zstd, pack, check_zstd, source, zipped),
        command(
            COPY,
            ("cp", "--reflink=never", source, copy),
            lambda: check_files(copy, source),
            source,
            copy,
        ),
        Contestant(IN_MEMORY, encode, check_encoded),
    ]
    decompressing = [
        command(
            TIGHTWIRE,
            (*COMMAND, "decompress", packed, "-o", back),
            lambda: check_files(back, source),
            packed,
            back,
        ),
        command(zstd, unpack, lambda: check_files(back, source), zipped, back),
        command(
            COPY,
            ("cp", "--reflink=never", source, copy),
            lambda: check_files(copy, source),
            source,
            copy,
        ),
        Contestant(IN_MEMORY, decode, lambda found: check_arrays(found, arrays)),
    ]
    for is_cold in (False, True) if cold else (False,):
        for name, contestants in (("compress", compressing), ("decompress", decompressing)):
            record(Case(name, nbytes_of(arrays), len(arrays), zstd, is_cold), contestants)


# Within one process


def zipnn_codec() -> Any:
    """ZipNN for bfloat16, with all cores."""
    from zipnn import ZipNN

    return ZipNN(bytearray_dtype="bfloat16", threads=os.cpu_count(), input_format="byte")


def zipnn_save(sources: Mapping[str, bytearray], path: Path) -> None:
    """Tensor by tensor: 8 bytes of size, then the packed bytes. Overwrites the sources."""
    codec = zipnn_codec()
    with open(path, "wb") as file:
        for data in sources.values():
            packed = codec.compress(data)
            file.write(len(packed).to_bytes(8, "little"))
            file.write(packed)


def zipnn_load(path: Path, arrays: Arrays) -> Arrays:
    """What `zipnn_save` wrote; names, dtypes and shapes are those of `arrays`."""
    codec = zipnn_codec()
    found = {}
    with open(path, "rb") as file:
        for name, x in arrays.items():
            data = codec.decompress(file.read(int.from_bytes(file.read(8), "little")))
            found[name] = np.frombuffer(data, x.dtype).reshape(x.shape)
    return found


def as_torch(arrays: Arrays) -> Arrays:
    """The same memory as PyTorch's tensors."""
    import torch

    return {n: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for n, x in arrays.items()}


def touched(found: Arrays) -> Arrays:
    """Arrays or CPU tensors of which every page has been read, as NumPy arrays."""
    viewed = {}
    for name, x in found.items():
        if not isinstance(x, np.ndarray):
            import torch

            x = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        as_bytes(x)[::PAGE].max(initial=0)
        viewed[name] = x
    return viewed


def saves(arrays: Arrays, folder: Path) -> list[Contestant]:
    """Contestants that write `arrays` to a synced file each, named after themselves."""

    def saver(
        name: str, needs: str, save: Callable[[Any, Path], Any], prepare: Callable[[], Any]
    ) -> Contestant:
        path = folder / f"saved {name}"

        def call(given: Any) -> None:
            save(given, path)
            if name != TIGHTWIRE:
                fsync(path)

        def check(_: None) -> None:
            check_arrays(touched(READERS[name](path, arrays)), arrays)

        return Contestant(name, call, check, prepare, writes=path, needs=needs)

    def save_safetensors(given: Any, path: Path) -> None:
        from safetensors.numpy import save_file

        save_file(given, path)

    def save_torch(given: Any, path: Path) -> None:
        import torch

        torch.save(given, path)

    def copies() -> dict[str, bytearray]:
        return {name: bytearray(as_bytes(x)) for name, x in arrays.items()}

    return [
        saver(TIGHTWIRE, "", tw.save_file, lambda: arrays),
        saver(SAFETENSORS, "safetensors.numpy", save_safetensors, lambda: arrays),
        saver(TORCH, "torch", save_torch, lambda: as_torch(arrays)),
        saver(ZIPNN, "zipnn", zipnn_save, copies),
    ]


def load_safetensors(path: Path, arrays: Arrays) -> Arrays:
    from safetensors.numpy import load_file

    return load_file(path)


def load_safetensors_torch(path: Path, arrays: Arrays) -> Arrays:
    from safetensors.torch import load_file

    return load_file(path)


def load_torch(path: Path, arrays: Arrays) -> Arrays:
    import torch

    return torch.load(path, mmap=False, weights_only=True)


#: Readers of what the contestant of that name saved.
READERS: dict[str, Callable[[Path, Arrays], Arrays]] = {
    TIGHTWIRE: lambda path, arrays: tw.load_file(path),
    SAFETENSORS: load_safetensors,
    TORCH: load_torch,
    ZIPNN: zipnn_load,
}


def loads(arrays: Arrays, folder: Path) -> list[Contestant]:
    """Contestants that read what those of `saves` wrote, until each page has been read."""

    def loader(
        name: str, needs: str, saved: str, load: Callable[[Path, Arrays], Arrays]
    ) -> Contestant:
        path = folder / f"saved {saved}"
        return Contestant(
            name,
            lambda _: touched(load(path, arrays)),
            lambda found: check_arrays(found, arrays),
            reads=path,
            needs=needs,
        )

    return [
        loader(TO_NUMPY, "", TIGHTWIRE, READERS[TIGHTWIRE]),
        loader(TO_TORCH, "torch", TIGHTWIRE, lambda path, _: tw.load_file(path, like="torch")),
        loader(SAFETENSORS, "safetensors.numpy", SAFETENSORS, load_safetensors),
        loader("safetensors.torch", "safetensors.torch", SAFETENSORS, load_safetensors_torch),
        loader("torch.load, mmap off", "torch", TORCH, load_torch),
        loader(ZIPNN, "zipnn", ZIPNN, zipnn_load),
    ]


def in_process(record: Record, arrays: Arrays, folder: Path, what: str, cold: bool) -> None:
    """Saves, then loads of what was saved."""
    nbytes, count = nbytes_of(arrays), len(arrays)
    record(Case(f"save{what}", nbytes, count, SAFETENSORS), saves(arrays, folder))
    for is_cold in (False, True) if cold else (False,):
        case = Case(f"load{what}", nbytes, count, SAFETENSORS, is_cold)
        record(case, loads(arrays, folder))


# Directories


def make_directory(path: Path, nbytes: int) -> tuple[int, int]:
    """Shards of a model with index and configuration, as on Hugging Face: tensor bytes, tensors."""
    from safetensors.numpy import save_file

    path.mkdir()
    shards = max(2, math.ceil(nbytes / SHARD_NBYTES))
    where: dict[str, str] = {}
    total = 0
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        arrays = gaussian(shapes(nbytes // shards, layers=2), SEED + number)
        arrays = {f"shard.{number}.{name}": x for name, x in arrays.items()}
        save_file(arrays, path / file, {"format": "pt"})
        where |= dict.fromkeys(arrays, file)
        total += nbytes_of(arrays)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (path / "config.json").write_text('{\n  "model_type": "llama"\n}\n')
    return total, len(where)


def directories(record: Record, nbytes: int, folder: Path) -> None:
    """A directory compressed and back, beside `cp` of all its files."""
    from safetensors.numpy import load_file

    source, packed, copy, back = (folder / name for name in ("model", "packed", "copied", "back"))
    total, count = make_directory(source, nbytes)

    def check_packed() -> None:
        for shard in source.glob("*.safetensors"):
            found = tw.load_file(packed / f"{shard.stem}.tw.safetensors")
            check_arrays(found, load_file(shard))

    def check_same(found: Path) -> None:
        check_files(found, source)

    copying = command(
        COPY, ("cp", "-r", "--reflink=never", source, copy), lambda: check_same(copy), source, copy
    )
    there = (*COMMAND, "compress", source, "-o", packed)
    here = (*COMMAND, "decompress", packed, "-o", back)
    case = Case("compress, directory", total, count, COPY)
    ours = command(TIGHTWIRE, there, check_packed, source, packed, Missing)
    record(case, [ours, copying])
    case = Case("decompress, directory", total, count, COPY)
    ours = command(TIGHTWIRE, here, lambda: check_same(back), packed, back, Missing)
    record(case, [ours, copying])


def run_cpu(record: Record, folder: Path, options: argparse.Namespace) -> None:
    """All cases of the CPU, in a folder of their own."""
    nbytes, count = (2_000_000, 20) if options.quick else (int(options.mb * 1e6), 2000)
    directory = 4_000_000 if options.quick else int(options.directory_gib * 2**30)
    arrays = gaussian(shapes(nbytes), SEED)
    for name in ("commands", "tensors", "small", "directory"):
        (folder / name).mkdir()
    commands(record, arrays, folder / "commands", options.cold)
    in_process(record, arrays, folder / "tensors", "", options.cold)
    small = gaussian(small_shapes(count), SEED)
    in_process(record, small, folder / "small", ", small tensors", False)
    shutil.rmtree(folder / "commands")
    shutil.rmtree(folder / "tensors")
    if directory:
        directories(record, directory, folder / "directory")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    part = parser.add_mutually_exclusive_group(required=True)
    part.add_argument("--cpu", action="store_true", help="commands, loads and saves of the host")
    part.add_argument("--gpu", action="store_true", help="loads to a GPU and saves from it")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the record")
    parser.add_argument("--folder", type=Path, help="of the files; a new folder is made there")
    parser.add_argument("--rounds", type=int, default=6, help="the first is recorded apart")
    parser.add_argument("--directory-gib", type=float, default=4.0, help="of --cpu; 0 leaves it")
    parser.add_argument("--cold", action="store_true", help="of --cpu: cold page cache as well")
    parser.add_argument("--mb", type=float, help="of large tensors: 500, of --gpu 4295 (4 GiB)")
    parser.add_argument("--device", default="cuda", help="of --gpu; cpu tries it without a GPU")
    parser.add_argument("--seconds", type=float, default=170.0, help="of --gpu: then 2 rounds each")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    options = parser.parse_args()
    options.mb = options.mb or (4295 if options.gpu else 500)
    return options


def main() -> None:
    """Measure one part, write it down after each case."""
    options = parse()
    begin = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    usual = Path("/dev/shm") if options.gpu else Path.cwd()
    top = options.folder or usual
    file = options.out / ("files_gpu.json" if options.gpu else "files_cpu.json")
    if options.quick:
        options.rounds = min(options.rounds, 2)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {"tightwire": tw.__version__} | versions(),
        "settings": {
            "file_system": file_system(top),
            "rounds": options.rounds,
            "quick": options.quick,
            "zstd": zstd_version(),
        },
        "cases": [],
    }

    def write() -> None:
        result["seconds"] = round(time.monotonic() - begin, 1)
        file.write_text(json.dumps(result, indent=1) + "\n")

    sync: Callable[[], Any] = lambda: None  # noqa: E731
    if options.gpu:
        import files_gpu

        result["machine"] |= files_gpu.machine(options.device)
        sync = files_gpu.syncing(options.device)
    timer = Timer(options.rounds, begin + options.seconds if options.gpu else math.inf, sync)

    def record(case: Case, contestants: list[Contestant]) -> None:
        measured = timer.contest(case, contestants)
        result["cases"].append(measured)
        print("\n".join(table(measured)), flush=True)
        write()

    with tempfile.TemporaryDirectory(dir=top) as folder:
        if options.gpu:
            result["first_loads"] = files_gpu.run(record, Path(folder), options)
            print(json.dumps(result["first_loads"], indent=1))
        else:
            run_cpu(record, Path(folder), options)
    write()
    print(f"{result['seconds']:.0f} s in all; wrote {file}")
    wrong = [row for case in result["cases"] for row in case["rows"] if "error" in row]
    wrong += [row for row in result.get("first_loads", []) if "error" in row]
    sys.exit(bool(wrong))


def zstd_version() -> str | None:
    """What the program says of itself, None if there is none."""
    if not shutil.which("zstd"):
        return None
    done = subprocess.run(["zstd", "--version"], check=True, capture_output=True, text=True)
    words = [w.strip(",") for w in done.stdout.split() if w.startswith("v")]
    return words[0] if words else None


if __name__ == "__main__":
    main()
