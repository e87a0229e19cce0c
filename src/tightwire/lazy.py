"""Compressed files that are open: tensors are decoded when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from . import arrays
from .arguments import thread_count
from .codecs.common.base import Bytes
from .contents import Contents, naming
from .decoding import decode
from .engine import DEFAULT_MAX_NBYTES, Head, Parsed
from .formats.container import (
    Entry,
    users_metadata,
)
from .formats.dtypes import BY_SAFETENSORS
from .formats.errors import integer
from .inspection import PLAIN
from .storage import (
    MappedReader,
    is_path,
    open_reader,
    refuse_directory,
)
from .units import size_text

#: Iteration over the rows of a tensor decodes so many bytes at a time.
_BLOCK_NBYTES = 1 << 22


class LazyTensor:
    """A tensor of an open file, decoded when it is indexed or loaded.

    ``f["a"][10:20]`` decodes these rows of the first dimension and no others; any other index
    decodes the whole tensor. Chunks that are needed in part are checked in part (specs/buffer.md,
    "Partial decoding"), without their checksum unless the file was opened with ``verify=True``.
    Header, records and chunks that are needed whole are always checked.

    ``np.asarray(f["a"])`` and ``torch.as_tensor(f["a"])`` decode the whole tensor. NumPy has no
    DLPack for bfloat16 and fp8: open the file with ``like="torch"`` to pass these to
    ``torch.as_tensor``.

    Rows of a file that is neither local nor in memory need all packed bytes of the tensor: they are
    read once and kept as long as this object.

    Args:
        name: Its name in the file.
        file: The open file.
        head: The parsed header of its buffer, or None for a tensor that is stored plain.

    Raises:
        FormatError: When rows or the whole are decoded, if the tensor is damaged.
        ValueError: After the file was closed.
    """

    __slots__ = ("_file", "_head", "_parsed", "name")

    def __init__(self, name: str, file: File, head: Head | None) -> None:
        self.name = name
        self._file = file
        self._head = head
        self._parsed: Parsed | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded tensor."""
        return self._entry.shape if self._head is None else self._head.plan.shape

    @property
    def dtype(self) -> str:
        """Name of the element type; safetensors' name for elements of less than a byte."""
        if self._head is not None:
            return self._head.plan.dtype.name
        name = self._entry.dtype
        return BY_SAFETENSORS[name].name if name in BY_SAFETENSORS else name

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded tensor."""
        return self._file.contents.tensor_nbytes(self.name, self._head)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self._entry.nbytes

    @property
    def codec(self) -> str:
        """Name of the codec; ``"plain"`` for a tensor that is stored uncompressed."""
        return PLAIN if self._head is None else self._head.plan.codec.name

    @property
    def file(self) -> File:
        """The open file that it belongs to."""
        return self._file

    @property
    def stored_name(self) -> str:
        """The name under which the file stores it: the same for all names of tied tensors."""
        return self._entry.name

    @property
    def _entry(self) -> Entry:
        return self._file.contents.entry(self.name)

    def load(self, like: Any = None, threads: int | None = None) -> Any:
        """Decode the whole tensor, checked.

        Args:
            like: An array or a library's name, which says where the result goes. None: as the file
                was opened.
            threads: Most threads; None: every processor.

        Returns:
            The array.

        Raises:
            FormatError: If the tensor is damaged.
            OSError: If the file cannot be read.
            ValueError: If the file is closed.
        """
        chosen = self._file.like if like is None else like
        return self._file.contents.tensor(self.name, self._head, chosen, thread_count(threads))

    def numpy(self) -> npt.NDArray[Any]:
        """Decode the whole tensor, checked, as a NumPy array.

        Raises:
            FormatError: If the tensor is damaged.
            OSError: If the file cannot be read.
            ValueError: If the file is closed.
        """
        array: npt.NDArray[Any] = self.load("numpy")
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """The whole tensor as a NumPy array: a copy, so that `copy` False raises ValueError."""
        if copy is False:
            raise ValueError("a LazyTensor is decoded into a copy. Allowed: copy=None or True")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __jax_array__(self) -> Any:
        return self.load("jax")

    def __dlpack__(self, **kwargs: Any) -> Any:
        try:
            return self.load().__dlpack__(**kwargs)
        except BufferError as error:
            raise BufferError(f"{self!r}: {error} Open the file with like='torch'") from None

    def __dlpack_device__(self) -> tuple[int, int]:
        if arrays.target_of(self._file.like).device is None:
            return arrays.DLPACK_CPU, 0
        # No rows are on the same device as all of them.
        some = self[:0] if self.shape else self.load()
        kind, index = some.__dlpack_device__()
        return kind, index

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d tensor has no len()")
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError("a LazyTensor is neither true nor false. Allowed: 'is not None', load()")

    def __iter__(self) -> Iterator[Any]:
        """The rows, decoded some MiB at a time."""
        n_rows = len(self)
        if self._head is None:
            return iter(self.load())
        step = max(1, _BLOCK_NBYTES * n_rows // max(self.nbytes, 1))
        return (row for at in range(0, n_rows, step) for row in self[at : at + step])

    def __getitem__(self, index: Any) -> Any:
        rest = index if isinstance(index, tuple) else (index,)
        if self._head is None or not self.shape or not rest:
            return self.load()[index]
        first = rest[0]
        if first is Ellipsis or first is None:
            return self.load()[index]
        n_rows = self.shape[0]
        if isinstance(first, slice):
            rows = range(n_rows)[first]
            lo, last = sorted((rows[0], rows[-1])) if rows else (0, -1)
            hi = last + 1
            inner: Any = slice(None, None, rows.step)
        elif isinstance(first, (int, np.integer)) and not isinstance(first, bool):
            if not -n_rows <= first < n_rows:
                raise IndexError(f"row {first} of {n_rows} in {self.name!r}")
            lo = range(n_rows)[int(first)]
            hi, inner = lo + 1, 0
        else:
            return self.load()[index]
        return self._rows(self._head, lo, hi)[(inner, *rest[1:])]

    def _rows(self, head: Head, lo: int, hi: int) -> Any:
        row = math.prod(self.shape[1:])
        file = self._file
        file.check_open()
        if self._parsed is None:
            self._parsed = file.contents.parsed(self.name, head)
        with naming(f"tensor {self.name!r}"):
            flat = decode(
                self._parsed,
                like=file.like,
                start=lo * row,
                stop=hi * row,
                verify=file.verifies or None,
            )
        return flat.reshape((hi - lo, *self.shape[1:]))

    def __reduce__(self) -> Any:
        raise TypeError("a LazyTensor belongs to an open file: pickle what its load() gives")

    def __repr__(self) -> str:
        sizes = f"{size_text(self.nbytes)} in {size_text(self.packed_nbytes)}"
        what = f"{self.dtype}{list(self.shape)}, {self.codec}"
        return f"<tightwire.LazyTensor {self.name!r}: {what}, {sizes}>"


class File(Mapping[str, LazyTensor]):
    """An open compressed safetensors file: a mapping from names to ``LazyTensor``.

    ``tightwire.open`` makes it. A context manager. Opening checks the header of the container,
    ``f[name]`` header and records of that tensor, and decoding what ``LazyTensor`` says;
    ``verify()`` checks everything. Names stay known after ``close``, while tensors raise
    ValueError.

    Local files are mapped into memory. If another process truncates the file while it is open,
    reading ends this process (SIGBUS); replacing the file, as ``save_file`` does, is safe. Of URLs
    and file objects ranges are read, one per tensor.

    Args:
        path: As in ``load_file``.
        like: As in ``tightwire.open``.
        max_nbytes: As in ``tightwire.open``.
        verify: As in ``tightwire.open``.

    Raises:
        FormatError: If the bytes are not a compressed safetensors file.
        OSError: If the file cannot be read.
    """

    def __init__(
        self,
        path: Any,
        *,
        like: Any = "numpy",
        max_nbytes: int = DEFAULT_MAX_NBYTES,
        verify: bool = False,
    ) -> None:
        self.like = like
        self.max_nbytes = integer("max_nbytes", max_nbytes, least=0)
        #: True if rows are taken from chunks that were checked whole.
        self.verifies = bool(verify)
        refuse_directory(path)
        reader = MappedReader(path) if is_path(path) else open_reader(path)
        self.name = reader.name
        try:
            #: The container's header, and what readers of tensors work on.
            self.contents = Contents(reader)
        except BaseException:
            reader.close()
            raise
        self._names = dict.fromkeys(self.contents.names())
        self._closed = False

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the file, without the entries of tightwire itself."""
        return users_metadata(self.contents.directory.metadata)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    #: Two files are equal if they are one object.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> LazyTensor:
        contents = self._holding(name)
        head = contents.head(name, self.max_nbytes)
        return LazyTensor(name, self, head)

    def buffer(self, name: str) -> Bytes:
        """The packed buffer of one tensor, or the bytes of one that is stored plain.

        Args:
            name: A name of the file.

        Returns:
            uint8, shape ``(n,)``; a view where the file is mapped or in memory.

        Raises:
            KeyError: If there is no such name.
            ValueError: If the file is closed.
            OSError: If the file cannot be read.
        """
        return self._holding(name).buffer(name)

    def _holding(self, name: str) -> Contents:
        """The contents, if they hold a tensor of that name; else KeyError."""
        if name not in self:
            raise KeyError(f"{name!r} is not in {self.name}")
        self.check_open()
        return self.contents

    def check_open(self) -> None:
        """Raise an error if the file is closed.

        Raises:
            ValueError: If it is.
        """
        if self._closed:
            raise ValueError(f"{self.name} is closed")

    def verify(self) -> None:
        """Check every byte of every tensor, as loading them would.

        Raises:
            FormatError: At the first thing that is wrong.
            OSError: If the file cannot be read.
            ValueError: If the file is closed.
        """
        from .convert import verify_contents

        self.check_open()
        verify_contents(self.contents, self.max_nbytes)

    def close(self) -> None:
        """Close the file. Arrays and buffers that were returned stay valid."""
        self.contents.reader.close()
        self._closed = True

    def __enter__(self) -> File:
        self.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an open File cannot be pickled: open it again where it is needed")

    def __repr__(self) -> str:
        n = len(self)
        what = "closed" if self._closed else f"{n} tensor{'' if n == 1 else 's'}"
        if not self._closed:
            source = self.contents.source
            raw = "" if source is None else f"{size_text(source.data_nbytes)} in "
            what += f", {raw}{size_text(self.contents.reader.nbytes)}"
        return f"<tightwire.File {self.name!r}: {what}>"


def open_file(
    path: Any,
    *,
    like: Any = "numpy",
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    verify: bool = False,
) -> File:
    """Open a compressed safetensors file lazily.

    Its public name is ``tightwire.open``.

    Args:
        path: As in ``load_file``: a path, a URL for fsspec, a binary file object, or bytes.
        like: An array or a library's name, which says where decoded tensors go.
        max_nbytes: Most bytes that one tensor may have. The default is 64 GiB.
        verify: Whether every chunk that a row is read from is checked whole, checksum included.
            Such chunks are then decoded whole.

    Returns:
        The open file.

    Raises:
        FormatError: If the bytes are not a compressed safetensors file.
        OSError: If the file cannot be read, or is a directory.
        TypeError: If an argument has a wrong type.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> tw.save_file({"a": np.eye(4, dtype=np.float32)}, "eye.tw.safetensors")
        >>> with tw.open("eye.tw.safetensors") as f:
        ...     f["a"].shape, f["a"][1:2]
        ((4, 4), array([[0., 1., 0., 0.]], dtype=float32))
    """
    return File(path, like=like, max_nbytes=max_nbytes, verify=verify)
