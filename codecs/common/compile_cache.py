"""Compiled functions kept on disk, also where several processes compile at the same time.

Numba gives the code of each signature a numbered file: it reads the index, takes the next number,
and writes both. Two processes that do so at once, for two signatures, take the same number, and
from then on one signature finds the code of the other. Here one process does it after the other.

Numba also numbers the functions that it compiles, from 1 in each process, and that number is all
that tells functions of one factory apart by their symbols. A process that loads what two others
have compiled would take the first of two equal symbols for both, so here each process counts from
a random number (https://github.com/numba/numba/issues/10486).

Code of other files becomes a part of a kernel. Whatever is kept is used only while no file that
kernels are made of has changed.

A folder that cannot be written to, a full disk and damaged files stop nobody: functions are then
compiled in memory, and a warning says so.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import pickle
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from numba import config, njit
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.dispatcher import Dispatcher
from numba.core.runtime import rtsys
from numba.core.typed_passes import NopythonRewrites
from numba.core.untyped_passes import InlineClosureLikes

from .compiling import announce

_DIGEST_NBYTES = 32
#: The folders of the files that kernels are made of.
_SOURCES = tuple(
    str(Path(__file__).parents[2] / folder) for folder in ("codecs", "codecs/common", "formats")
)
_first_warning = threading.Lock()
_this_thread = threading.local()
_taken = itertools.count(1)
_taken_last = 0


class NotCompiledError(Exception):
    """A kernel is neither in memory nor in the cache, and `only_compiled` forbids to compile it."""


@contextmanager
def only_compiled() -> Iterator[None]:
    """Within, in this thread: kernels are loaded, not compiled; where one is missing, an error."""
    _this_thread.may_compile = False
    try:
        yield
    finally:
        _this_thread.may_compile = True


def kernels_taken() -> int:
    """A number that changes whenever this process has compiled or loaded a kernel."""
    return _taken_last


def _warn(error: Exception, folder: str | Path) -> None:
    """Warn, once in each process, that the cache in `folder` is of no use."""
    if _first_warning.acquire(blocking=False):
        warnings.warn(
            f"the cache of compiled functions in {folder} cannot be used "
            f"({type(error).__name__}: {error}); functions are compiled in memory, which takes "
            "seconds in each process. The environment variable NUMBA_CACHE_DIR names another "
            "folder",
            RuntimeWarning,
            stacklevel=2,
        )


def _count_from_anywhere() -> None:
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))


_count_from_anywhere()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_from_anywhere)


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """The index of a function and the files of its signatures, under a lock.

    Each call makes a lock of its own: none may be carried into a forked child. A file of code
    starts with a digest of the rest: damaged code is not run.
    """

    def __init__(self, cache_path: str, filename_base: str, source_stamp: Any) -> None:
        # Files of Numba's own have no digest, and other names.
        super().__init__(cache_path, f"{filename_base}-digest", source_stamp)
        self._lock = Path(cache_path, f"{filename_base}.lock")

    def load(self, key: Any) -> Any:
        if not Path(self._cache_path).is_dir():
            return None
        with FileLock(self._lock):
            return super().load(key)

    def save(self, key: Any, data: Any) -> None:
        with FileLock(self._lock):
            super().save(key, data)

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except OSError:
            raise
        # Damaged bytes make `pickle` raise anything. What is saved next replaces them.
        except Exception as error:
            _warn(error, self._cache_path)
            return {}

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        digest, code = data[:_DIGEST_NBYTES], data[_DIGEST_NBYTES:]
        if hashlib.sha256(code).digest() != digest:
            raise ValueError(f"{name} is damaged")
        return pickle.loads(code)

    def _save_data(self, name: str, data: Any) -> None:
        code = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(hashlib.sha256(code).digest() + code)


def _fingerprint(function: Any) -> str:
    """Digest of the code of a function and of what its factory gave it, other functions included.

    Numba pickles functions that others are made with, each time to other bytes.
    """
    code, cells = function.__code__, function.__closure__ or ()
    digest = hashlib.sha256(code.co_code)
    for cell in cells:
        value = cell.cell_contents
        if isinstance(value, Dispatcher):
            digest.update(_fingerprint(value.py_func).encode())
        else:
            digest.update(pickle.dumps(value))
    return digest.hexdigest()


@cache
def _sources_digest(folders: tuple[str, ...]) -> bytes:
    """Digest of the names and the text of the files that kernels are made of.

    A program without source files has no folders; Numba then looks at the program itself.
    """
    digest = hashlib.sha256()
    for folder in filter(os.path.isdir, folders):
        for name in sorted(os.listdir(folder)):
            if name.endswith(".py") and not name.endswith("_triton.py"):
                # `pathlib` and a buffer would take longer than the rest.
                with open(f"{folder}/{name}", "rb", buffering=0) as file:
                    text = file.read()
                digest.update(f"{name} {len(text)} ".encode() + text)
    return digest.digest()


class _Cache(FunctionCache):  # type: ignore[misc]
    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), _fingerprint(self._py_func)

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        locator, base = self._impl.locator, self._impl.filename_base
        # The function may be of none of our files.
        stamp = locator.get_source_stamp(), _sources_digest(_SOURCES)
        files = _Files(self._cache_path, base, stamp)
        self._cache_file = files  # type: ignore[has-type,unused-ignore]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function of a signature, None if it has to be compiled."""
        found = None
        try:
            # Numba's own method first loads all that the compiler needs, most of a second. Compiled
            # code needs the run-time library; the compiler loads the rest when it has work to do.
            rtsys.initialize(target_context)
            with self._guard_against_spurious_io_errors():
                found = self._load_overload(sig, target_context)
        except Exception as error:
            _warn(error, self._cache_path)
        global _taken_last
        if found is None:
            if not getattr(_this_thread, "may_compile", True):
                raise NotCompiledError(self._name)
            announce(self._py_func.__module__, self._cache_path)
        _taken_last = next(_taken)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what has been compiled, where that can be done."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warn(error, self._cache_path)


class _PartCode(JITCodeLibrary):  # type: ignore[misc]
    """Code of a function that only compiled functions call: it is not translated by itself.

    Numba optimises and translates every function on its own, and once more with each caller. Here
    the code is optimised with the kernel that it becomes a part of, once.
    """

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Nothing: machine code has environments, and this becomes none."""


class _ApartCode(_PartCode):
    """Code that stays a function of its own."""

    attributes: tuple[str, ...] = ("noinline",)

    def finalize(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration:
                for attribute in self.attributes:
                    function.add_function_attribute(attribute)
        super().finalize()


class _RareCode(_ApartCode):
    """Code that runs seldom: small rather than fast."""

    attributes = ("noinline", "optsize", "minsize")


#: What kernels have no use for: expressions of arrays, closures in functions.
_NOT_NEEDED = (NopythonRewrites, InlineClosureLikes)


class _KernelCompiler(CompilerBase):  # type: ignore[misc]
    """Numba's compiler without `_NOT_NEEDED`, and without collections of garbage, 15 % of a run."""

    def define_pipelines(self) -> Any:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [p for p in passes.passes if p[0] not in _NOT_NEEDED]
        passes.finalize()
        return [passes]

    def compile_extra(self, function: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(function)
        finally:
            if collects:
                gc.enable()


class _PartCompiler(_KernelCompiler):
    code = _PartCode

    def define_pipelines(self) -> Any:
        state = self.state
        state.library = self.code(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()


class _ApartCompiler(_PartCompiler):
    code = _ApartCode


class _RareCompiler(_PartCompiler):
    code = _RareCode


def part(rare: bool = False, apart: bool = False, **options: Any) -> Callable[[Any], Any]:
    """`numba.njit` for functions that kernels call, and nobody else: a third of the time.

    They allocate nothing, so nothing counts references. Those that are `rare` are made small
    instead of fast, which takes less time. Those that are `apart` stay functions of their own, and
    are translated once, not once for each call.
    """
    decorate: Callable[[Any], Any] = njit(
        pipeline_class=_RareCompiler if rare else _ApartCompiler if apart else _PartCompiler,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        _nrt=False,
        **options,
    )
    return decorate


def cached(**options: Any) -> Callable[[Any], Any]:
    """`numba.njit` with a cache on disk, or without one where there is no place for it.

    As a `part`, the function allocates nothing: see `arrays_cpu.with_scratch`.
    """
    compiler = njit(pipeline_class=_KernelCompiler, no_cfunc_wrapper=True, _nrt=False, **options)

    def decorate(function: Any) -> Any:
        compiled = compiler(function)
        try:
            compiled._cache = _Cache(compiled.py_func)
        except (OSError, RuntimeError) as error:
            # No folder can be written to.
            own = Path(function.__code__.co_filename).parent / "__pycache__"
            _warn(error, config.CACHE_DIR or own)
        return compiled

    return decorate
