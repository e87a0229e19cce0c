"""The cache of compiled functions where several processes, or threads, fill it at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from numba.core import caching
from numba.core.dispatcher import Dispatcher

import tightwire as tw
from tightwire.numba_cache import _Cache, _Files
from tightwire.planning import backend_module


def test_two_signatures_at_once_get_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock both take the first number, and one finds the other's code."""
    plain = caching.IndexDataCacheFile._save_index

    def slowly(self: Any, overloads: Any) -> None:
        time.sleep(0.2)
        plain(self, overloads)

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_index", slowly)
    start = threading.Barrier(2)

    def save(key: str) -> None:
        # Each has an object of its own, as each process has.
        files = _Files(str(tmp_path), "function", "stamp")
        start.wait()
        files.save(key, f"code of {key}")

    threads = [threading.Thread(target=save, args=(key,)) for key in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = _Files(str(tmp_path), "function", "stamp")
    assert [files.load(key) for key in ("a", "b")] == ["code of a", "code of b"]
    assert files.load("c") is None
    assert _Files(str(tmp_path / "absent"), "function", "stamp").load("a") is None


@pytest.mark.parametrize("name", sorted(tw.codecs()))
def test_no_function_has_another_cache(name: str) -> None:
    caches = [
        vars(function)["_cache"]
        for function in vars(backend_module(name, "cpu")).values()
        if isinstance(function, Dispatcher)
    ]
    assert not [c for c in caches if isinstance(c, caching.FunctionCache) and type(c) is not _Cache]
    assert any(isinstance(c, _Cache) for c in caches)
