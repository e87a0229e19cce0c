"""Directories of models as on Hugging Face: compress, restore, verify, inspect, compare.

`X.safetensors` becomes `X.tw.safetensors`, in sub-folders too. In an index the names of shards are
replaced, and nothing else. A model of one file gets an index, for readers that look for the file
by its name. All other files are copied.
"""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import convert
from .codec import Codec, as_codec
from .contents import Contents, naming, naming_call, read_header
from .convert import Comparison, Difference, Forecast, Progress, TensorReport, no_progress
from .engine import DEFAULT_MAX_NBYTES
from .file_tensors import FileTensors, file_tensors
from .formats.container import VERSION_KEY, directory_of
from .formats.dtypes import DType
from .formats.errors import FormatError
from .inspection import Info, PlainInfo
from .model_index import (
    PLAIN_SUFFIX,
    SUFFIX,
    Index,
    compressed_index,
    compressed_name,
    index_bytes,
    is_index,
    read_index,
    restored_index,
    restored_name,
)
from .shards import STEMS, check_holds, model_shards, tensor_names
from .storage import PathLike, atomic_file, is_temporary, reading, remove_leftovers

#: Files and folders of version control and caches, which are no part of a model.
LEFT_OUT = (".git", ".cache")
#: Folders below a directory, and how deep they may lie; links could make them without end.
MAX_FOLDERS = 10_000
MAX_DEPTH = 100


@dataclass(frozen=True)
class _Tree:
    """Folders and files below a directory, as paths relative to it, in a fixed order."""

    root: Path
    folders: list[Path]
    files: list[Path]

    def shards(self) -> list[Path]:
        """The safetensors files."""
        return [path for path in self.files if path.name.endswith(PLAIN_SUFFIX)]

    def indexes(self) -> list[Index]:
        """The indexes of shards, read and checked."""
        return [read_index(self.root / path) for path in self.files if is_index(path)]


def _tree(root: Path) -> _Tree:
    """Everything in a directory but `LEFT_OUT` and temporary files of tightwire.

    Links are followed. Raises ValueError for a link to a folder above it and for too many folders,
    OSError for a link to nothing and for anything that is not a regular file.
    """
    tree = _Tree(root, [], [])

    def visit(folder: Path, above: tuple[str, ...]) -> None:
        real = os.path.realpath(root / folder)
        if real in above:
            raise ValueError(f"{root / folder}: a link to a folder above it")
        if len(above) > MAX_DEPTH or len(tree.folders) >= MAX_FOLDERS:
            limits = f"{MAX_FOLDERS} folders, {MAX_DEPTH} in one another"
            raise ValueError(f"{root} has too many folders, links to folders included: {limits}")
        tree.folders.append(folder)
        for name in sorted(os.listdir(root / folder)):
            path = folder / name
            if name in LEFT_OUT or is_temporary(name):
                continue
            mode = os.stat(root / path).st_mode
            if stat.S_ISDIR(mode):
                visit(path, (*above, real))
            elif stat.S_ISREG(mode):
                tree.files.append(path)
            else:
                raise OSError(errno.EINVAL, "is not a regular file", str(root / path))

    visit(Path(), ())
    return tree


@dataclass(frozen=True)
class ShardReport:
    """What became of one shard. Sizes in bytes.

    `done_before` says that the target was there, written by an earlier call.
    """

    source: Path
    target: Path
    source_nbytes: int
    target_nbytes: int
    done_before: bool
    tensors: list[TensorReport]


@dataclass(frozen=True)
class DirectoryReport:
    """What became of a directory."""

    source: Path
    target: Path
    shards: list[ShardReport]
    #: Files that are no shards.
    n_other: int


@dataclass(frozen=True)
class _Shard:
    source: Path
    target: Path
    forecast: Forecast


@dataclass(frozen=True)
class _Other:
    """A file that is copied, or whose bytes are known: an index."""

    source: Path
    target: Path
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        return os.stat(self.source).st_size if self.data is None else len(self.data)

    def done(self) -> bool:
        """True if the target is there, byte for byte."""
        if not os.path.isfile(self.target):
            return False
        if self.data is None:
            return filecmp.cmp(self.source, self.target, shallow=False)
        return self.target.read_bytes() == self.data

    def write(self) -> None:
        with _naming(self.source, self.target), open(self.source, "rb") as source:
            status = os.fstat(source.fileno())
            mode = stat.S_IMODE(status.st_mode)
            with atomic_file(self.target, mode, status.st_mtime_ns) as file:
                if self.data is not None:
                    file.write(self.data)
                    return
                shutil.copyfileobj(source, file, 1 << 22)
                after = os.fstat(source.fileno())
                if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
                    raise OSError(errno.EBUSY, "changed while it was read", str(self.source))


@contextmanager
def _naming(source: Path, target: Path) -> Iterator[None]:
    """Errors of the system name the target, not a temporary file, unless it is the source."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename == str(source):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(target)) from error


#: From source, target and progress to what became of the tensors.
_Convert = Callable[[Path, Path, Progress], list[TensorReport]]


@dataclass(frozen=True)
class DirectoryWork:
    """What is to be done with a directory: everything is checked, nothing is written."""

    source: Path
    target: Path
    folders: list[Path]
    shards: list[_Shard]
    others: list[_Other]
    convert: _Convert

    @property
    def files(self) -> list[tuple[Path, Path]]:
        """Source and target of every file."""
        shards = [(shard.source, shard.target) for shard in self.shards]
        return shards + [(other.source, other.target) for other in self.others]

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that progress will be told of."""
        return sum(s.forecast.nbytes for s in self.shards if not s.forecast.done)

    def run(self, progress: Progress = no_progress) -> DirectoryReport:
        """Do it. Each file appears atomically, indexes after all that they name.

        What is done already is left alone, so a run that was killed can be repeated.
        """
        started = time.time_ns()
        for folder in self.folders:
            # What is made from a folder is no more open than it.
            mode = stat.S_IMODE(os.stat(self.source / folder).st_mode) | stat.S_IRWXU
            (self.target / folder).mkdir(mode, exist_ok=True)
        remove_leftovers((target for _, target in self.files), started)
        if any(os.path.lexists(s.target) for s in self.shards if not s.forecast.done):
            # Without an index, shards are not taken for a model while they are replaced one by one.
            for other in self.others:
                if other.data is not None:
                    other.target.unlink(missing_ok=True)
        for other in self.others:
            if other.data is None and not other.done():
                other.write()
        shards = [self._shard(shard, progress) for shard in self.shards]
        for other in self.others:
            if other.data is not None and not other.done():
                other.write()
        return DirectoryReport(self.source, self.target, shards, len(self.others))

    def _shard(self, shard: _Shard, progress: Progress) -> ShardReport:
        source, target = shard.source, shard.target
        reports: list[TensorReport] = []
        if not shard.forecast.done:
            with _about(source), _naming(source, target):
                reports = self.convert(source, target, progress)
        sizes = os.stat(source).st_size, os.stat(target).st_size
        return ShardReport(source, target, *sizes, shard.forecast.done, reports)


def prepare_compress(
    source: PathLike,
    target: PathLike,
    codec: str | Codec = "zipccl",
    *,
    cast: DType | None = None,
    threads: int | None = None,
    force: bool = False,
) -> DirectoryWork:
    """Check all that `compress_directory` needs; raises what it raises before it writes."""
    chosen = as_codec(codec)
    if not chosen.lossless:
        raise ValueError(f"{chosen.name} is lossy, and decompress promises the files that were")

    def forecast(source: Path, target: Path) -> Forecast:
        return convert.forecast_compress(source, target, chosen, cast=cast)

    def run(source: Path, target: Path, progress: Progress) -> list[TensorReport]:
        return convert.compress_file(
            source, target, chosen, cast=cast, threads=threads, progress=progress
        )

    tree = _tree(_directory(source))
    root = Path(target)
    shards = [_shard(tree, path, root, compressed_name, forecast) for path in tree.shards()]
    if not shards:
        raise FileNotFoundError(errno.ENOENT, "holds no *.safetensors", str(source))
    indexes = {index.path: index for index in tree.indexes()}
    sources = {shard.source for shard in shards}
    for index in indexes.values():
        for path in index.shards:
            if path not in sources:
                raise ValueError(f"{index.path} names {path}, which is left out")
    others = _others(tree, root, {p: compressed_index(index) for p, index in indexes.items()})
    for shard in shards:
        path = shard.source.with_name(f"{shard.source.name}.index.json")
        if shard.source.name.removesuffix(PLAIN_SUFFIX) in STEMS and path not in indexes:
            names = dict.fromkeys(shard.forecast.names, shard.target.name)
            data = index_bytes(names, shard.forecast.raw_nbytes, own=True)
            others.append(_Other(shard.source, shard.target.with_name(path.name), data))
    return _checked(DirectoryWork(tree.root, root, tree.folders, shards, others, run), force)


def compress_directory(
    source: PathLike,
    target: PathLike,
    codec: str | Codec = "zipccl",
    *,
    cast: DType | None = None,
    threads: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> DirectoryReport:
    """Compress all safetensors files of a directory and copy all other files.

    Everything is checked before anything is written. `target` may be there: files that this call
    would write are left alone, so a call that was killed can be repeated. `force` replaces other
    files that tightwire compressed; nothing uncompressed is ever overwritten. `cast` is that of
    `compress_file`. Folders and files in `LEFT_OUT` are not copied; links are followed.

    Raises FormatError for a shard or an index that is not valid, also for a shard that is
    compressed already, FileExistsError for files in the way, ValueError for directories in one
    another, and OSError.
    """
    return prepare_compress(source, target, codec, cast=cast, threads=threads, force=force).run(
        progress
    )


def prepare_decompress(
    source: PathLike,
    target: PathLike,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
    force: bool = False,
) -> DirectoryWork:
    """Check all that `decompress_directory` needs; raises what it raises before it writes."""
    forecast = partial(convert.forecast_decompress, max_nbytes=max_nbytes)

    def run(source: Path, target: Path, progress: Progress) -> list[TensorReport]:
        convert.decompress_file(
            source, target, max_nbytes=max_nbytes, threads=threads, progress=progress
        )
        return []

    tree = _tree(_directory(source))
    root = Path(target)
    compressed = _compressed_shards(tree)
    shards = [_shard(tree, path, root, restored_name, forecast) for path in compressed]
    indexes = {index.path: index for index in tree.indexes()}
    texts = {path: restored_index(index) for path, index in indexes.items() if not index.own}
    own = {path for path, index in indexes.items() if index.own}
    kept = [path for path in tree.files if tree.root / path not in own and path not in compressed]
    others = _others(_Tree(tree.root, tree.folders, kept), root, texts, plain=True)
    return _checked(DirectoryWork(tree.root, root, tree.folders, shards, others, run), force)


def decompress_directory(
    source: PathLike,
    target: PathLike,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> DirectoryReport:
    """Restore the directory that `source` was made from, every file byte for byte.

    Checks, `target` and `force` are as in `compress_directory`. Raises FormatError, FileExistsError
    and other OSErrors, and ValueError for directories in one another.
    """
    return prepare_decompress(
        source, target, max_nbytes=max_nbytes, threads=threads, force=force
    ).run(progress)


def _directory(path: PathLike) -> Path:
    """`path`, which has to be a directory."""
    if not os.path.isdir(path):
        code = errno.ENOTDIR if os.path.exists(path) else errno.ENOENT
        raise OSError(code, os.strerror(code), os.fspath(path))
    return Path(path)


def _shard(
    tree: _Tree,
    path: Path,
    target: Path,
    name: Callable[[str], str],
    forecast: Callable[[Path, Path], Forecast],
) -> _Shard:
    source, result = tree.root / path, (target / path).with_name(name(path.name))
    with _about(source):
        return _Shard(source, result, forecast(source, result))


@contextmanager
def _about(source: Path) -> Iterator[None]:
    """Say in errors other than those of the system which file they are about."""
    with naming_call(str(source)), naming(str(source)):
        yield


def _others(
    tree: _Tree, target: Path, texts: Mapping[Path, bytes], plain: bool = False
) -> list[_Other]:
    """The files that are copied or, if they are in `texts`, written; with `plain`, shards too."""
    shards = [] if plain else tree.shards()
    files = [path for path in tree.files if path not in set(shards)]
    return [_Other(tree.root / p, target / p, texts.get(tree.root / p)) for p in files]


def _compressed_shards(tree: _Tree) -> list[Path]:
    """The compressed safetensors files of a directory.

    Raises FileNotFoundError if there are none, FormatError for a file that is not compressed
    though its name says so.
    """
    found = []
    for path in tree.shards():
        with naming(str(tree.root / path)):
            compressed = VERSION_KEY in read_header(tree.root / path).metadata
        if compressed:
            found.append(path)
        elif path.name.endswith(SUFFIX):
            raise FormatError("bad_container", f"{tree.root / path} is not compressed")
    if not found:
        raise FileNotFoundError(errno.ENOENT, "holds no compressed safetensors", str(tree.root))
    return found


def _checked(work: DirectoryWork, force: bool) -> DirectoryWork:
    """`work`, if nothing is known to be in its way."""
    source, target = os.path.realpath(work.source), os.path.realpath(work.target)
    if os.path.commonpath([source, target]) in (source, target):
        raise ValueError(f"{work.source} and {work.target} are the same, or one lies in the other")
    if not work.target.absolute().parent.is_dir():
        missing = str(work.target.absolute().parent)
        raise FileNotFoundError(errno.ENOENT, "no such folder; create it first", missing)
    folders = {work.target / folder for folder in work.folders}
    for folder in folders:
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is there and not a folder", str(folder))
    taken: dict[str, Path] = {}
    for path, result in work.files:
        other = taken.setdefault(os.path.realpath(result), path)
        if other is not path or result in folders:
            raise ValueError(f"{result}: {other} and another would both be written there")
    inodes = {_inode(path) for path, _ in work.files}
    for shard in work.shards:
        if not shard.forecast.done:
            _check_target(shard.target, inodes, force)
    for file in work.others:
        with open(file.source, "rb"):  # Raises now rather than half-way if it cannot be read.
            pass
        if force and file.data is not None and _is_own_index(file.target):
            continue
        if os.path.lexists(file.target) and not file.done():
            text = "exists and differs from what would be written there; remove it yourself"
            raise FileExistsError(errno.EEXIST, text, str(file.target))
    _check_space(work)
    return work


def _is_own_index(path: Path) -> bool:
    """True for an index that tightwire made itself, for a model that had none."""
    try:
        return path.is_file() and read_index(path).own
    except (FormatError, FileNotFoundError):
        return False


def _inode(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _check_target(target: Path, sources: set[tuple[int, int]], force: bool) -> None:
    """Raise FileExistsError for a shard's target that must not be replaced."""
    if not os.path.lexists(target):
        return
    problem = convert.obstacle(target)
    if target.exists() and _inode(target) in sources:
        problem = "is an input itself"
    if problem is None and not force:
        problem = "exists, made from another file or with other options; force replaces it"
    if problem is not None:
        raise FileExistsError(errno.EEXIST, problem, str(target))


def _check_space(work: DirectoryWork) -> None:
    """Raise OSError if the disk is surely too small."""
    needed = sum(s.forecast.least_nbytes for s in work.shards if not s.forecast.done)
    needed += sum(other.nbytes for other in work.others if not other.done())
    folder = work.target if work.target.is_dir() else work.target.absolute().parent
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        text = f"needs {needed} bytes at least, the disk has {free}"
        raise OSError(errno.ENOSPC, text, str(work.target))


def checks(
    source: PathLike, *, max_nbytes: int = DEFAULT_MAX_NBYTES, progress: Progress = no_progress
) -> Mapping[Path, Callable[[], int]]:
    """For every compressed shard and index of a directory the call that checks it.

    Each returns how many tensors there are, and raises FormatError, naming the file, or OSError.
    """
    tree = _tree(_directory(source))

    def verify(path: Path) -> int:
        with naming(str(path)):
            return convert.verify_file(path, max_nbytes=max_nbytes, progress=progress)

    shards = _shards_to_check(tree)
    indexes = [tree.root / path for path in tree.files if is_index(path)]
    return {path: partial(verify, path) for path in shards} | {
        path: partial(_check_index, path) for path in indexes
    }


def _shards_to_check(tree: _Tree) -> list[Path]:
    """The compressed shards, and those that should be or whose header cannot be read.

    Raises FileNotFoundError if there are none.
    """
    found = []
    for path in (tree.root / path for path in tree.shards()):
        try:
            compressed = VERSION_KEY in read_header(path).metadata
        except (FormatError, OSError):
            compressed = True
        if compressed or path.name.endswith(SUFFIX):
            found.append(path)
    if not found:
        raise FileNotFoundError(errno.ENOENT, "holds no compressed safetensors", str(tree.root))
    return found


def checked_nbytes(source: PathLike) -> int:
    """Bytes of the tensors that `checks` decodes; files that cannot be read count nothing."""
    total = 0
    for path in _shards_to_check(_tree(_directory(source))):
        with suppress(FormatError, OSError):
            total += _tensor_nbytes(path)
    return total


def _check_index(path: Path) -> int:
    index = read_index(path)
    check_holds(index, {shard: tensor_names(shard) for shard in index.shards})
    return len(index.weight_map)


def tensor_nbytes(path: PathLike) -> int:
    """Bytes of all tensors of a model's files, compressed or not, from their headers.

    `path` is a directory, or one file. Raises FormatError or OSError.
    """
    return sum(_tensor_nbytes(shard) for _, shard in _prefixed(Path(path)))


def _tensor_nbytes(shard: Path) -> int:
    with naming(str(shard)), reading(shard) as reader:
        directory = directory_of(reader.read, reader.nbytes)
        if VERSION_KEY not in directory.metadata:
            return directory.data_nbytes
        contents = Contents(reader)
        heads = contents.heads(1 << 63)
        return sum(contents.tensor_nbytes(name, head) for name, head in heads.items())


def verify_directory(
    source: PathLike, *, max_nbytes: int = DEFAULT_MAX_NBYTES, progress: Progress = no_progress
) -> dict[Path, int]:
    """Check every tensor of a compressed directory, and its indexes: how many there are, by file.

    Raises FormatError, naming the file, or OSError.
    """
    found = checks(source, max_nbytes=max_nbytes, progress=progress)
    return {path: check() for path, check in found.items()}


def safetensors_files(source: PathLike) -> list[Path]:
    """All safetensors files of a directory; FileNotFoundError if there are none."""
    tree = _tree(_directory(source))
    shards = [tree.root / path for path in tree.shards()]
    if not shards:
        raise FileNotFoundError(errno.ENOENT, "holds no *.safetensors", str(source))
    return shards


def inspect_directory(
    source: PathLike, name: str | None = None
) -> dict[Path, tuple[Contents, dict[str, Info | PlainInfo]]]:
    """What `inspect_file` gives for every compressed shard, or for those that hold one tensor.

    Raises FormatError, OSError, ValueError for a tensor that no shard has.
    """
    tree = _tree(_directory(source))
    found = {}
    for path in (tree.root / path for path in _compressed_shards(tree)):
        if name is None or name in tensor_names(path):
            with naming(str(path)):
                found[path] = convert.inspect_file(path, name)
    if not found:
        raise ValueError(f"no shard of {tree.root} has a tensor {name!r}")
    return found


def diff_directories(
    a: PathLike,
    b: PathLike,
    progress: Progress = no_progress,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
) -> list[Difference]:
    """As `compare_directories`, the differences alone."""
    return compare_directories(a, b, progress, max_nbytes=max_nbytes).differences


def compare_directories(
    a: PathLike,
    b: PathLike,
    progress: Progress = no_progress,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
) -> Comparison:
    """How the tensors of two models differ bit by bit.

    Each is a directory or a safetensors file, compressed or not. Tensors are compared by name,
    however they are spread over shards; those in a sub-folder have its path before their name, and
    those in a file outside its folder's model (see `model_shards`) that file's.
    """
    with ExitStack() as files:
        left = _ModelTensors(a, files, max_nbytes)
        right = _ModelTensors(b, files, max_nbytes)
        return convert.compared(left, right, progress)


class _ModelTensors:
    """The tensors of a directory or a file, to be compared (`convert.Tensors`)."""

    def __init__(self, path: PathLike, files: ExitStack, max_nbytes: int) -> None:
        self.label = os.fspath(path)
        #: Of each name the file, and the name there.
        self._homes: dict[str, tuple[FileTensors, str]] = {}
        for prefix, shard in _prefixed(Path(path)):
            tensors = files.enter_context(file_tensors(shard, max_nbytes))
            for name in tensors.names:
                other, _ = self._homes.setdefault(prefix + name, (tensors, name))
                if other is not tensors:
                    raise ValueError(f"{name!r} is in {other.label} and in {tensors.label}")

    @property
    def names(self) -> list[str]:
        return list(self._homes)

    def kind(self, name: str) -> tuple[DType | str, tuple[int, ...]]:
        tensors, inner = self._homes[name]
        return tensors.kind(inner)

    def bits(self, name: str, threads: int | None = None) -> Any:
        tensors, inner = self._homes[name]
        return tensors.bits(inner, threads)


def _prefixed(path: Path) -> Iterator[tuple[str, Path]]:
    """Every shard of a directory, or a file itself, and what stands before its tensors' names."""
    if not path.is_dir():
        yield "", path
        return
    tree = _tree(path)
    shards = tree.shards()
    if not shards:
        raise FileNotFoundError(errno.ENOENT, "holds no *.safetensors", str(path))
    for folder in tree.folders:
        inside = [path / shard for shard in shards if shard.parent == folder]
        model = model_shards(path / folder) if inside else []
        prefix = "" if folder == Path() else f"{folder.as_posix()}/"
        for shard in dict.fromkeys([*model, *inside]):
            stem = "" if shard in model else f"{restored_name(shard.name)}:"
            yield prefix + stem, shard
