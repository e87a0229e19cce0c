"""Compiled functions kept on disk, also where several processes compile at the same time.

Numba gives the code of each signature a numbered file: it reads the index, takes the next number,
and writes both. Two processes that do so at once, for two signatures, take the same number, and
from then on one signature finds the code of the other. Here one process does it after the other.

Numba also numbers the functions that it compiles, from 1 in each process, and that number is all
that tells functions of one factory apart by their symbols. A process that loads what two others
have compiled would take the first of two equal symbols for both, so here each process counts from
a random number (https://github.com/numba/numba/issues/10486).
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock
from numba import njit
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache, IndexDataCacheFile


def _count_from_anywhere() -> None:
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))


_count_from_anywhere()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_from_anywhere)


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """The index of a function and the files of its signatures, under a lock.

    Each call makes a lock of its own: none may be carried into a forked child.
    """

    def __init__(self, cache_path: str, filename_base: str, source_stamp: Any) -> None:
        super().__init__(cache_path, filename_base, source_stamp)
        self._lock = Path(cache_path, f"{filename_base}.lock")

    def load(self, key: Any) -> Any:
        if not Path(self._cache_path).is_dir():
            return None
        with FileLock(self._lock):
            return super().load(key)

    def save(self, key: Any, data: Any) -> None:
        with FileLock(self._lock):
            super().save(key, data)


class _Cache(FunctionCache):  # type: ignore[misc]
    def __init__(self, function: Any) -> None:
        super().__init__(function)
        locator, base = self._impl.locator, self._impl.filename_base
        files = _Files(self._cache_path, base, locator.get_source_stamp())
        self._cache_file = files  # type: ignore[has-type,unused-ignore]


def cached(**options: Any) -> Callable[[Any], Any]:
    """`numba.njit` with a cache on disk."""

    def decorate(function: Any) -> Any:
        compiled = njit(**options)(function)
        compiled._cache = _Cache(compiled.py_func)
        return compiled

    return decorate
