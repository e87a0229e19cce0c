"""A secondary tier of vLLM's key/value cache: compressed blocks in files.

In the configuration of offloading, as one of the ``secondary_tiers``::

    {"type": "TightwireTier", "module_path": "tightwire.adapters.weights.plugins.vllm_tier",
     "root_dir": "/cache"}

The interface is that of vLLM 0.33.0.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from ....arrays import as_dtype
from ....formats.errors import FormatError
from .blocks import Blocks


class TightwireTier(FileSystemTierManager):  # type: ignore[misc]
    """vLLM's tier of files, whose files are compressed without loss.

    Args:
        offloading_spec: As ``FileSystemTierManager`` gets it.
        primary_kv_view: As there: blocks of the cache in host memory.
        tier_type: As there.
        root_dir: Where the files go, in a folder ``tightwire``.
        codec: A lossless codec.
        dtype: Of the cache; None: the model's. vLLM gives bytes: if they are other elements, they
            are stored right, but take more.
        options: What else ``FileSystemTierManager`` takes.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there is no such codec or dtype, the codec is lossy, or a block is not a
            whole number of elements.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        codec: str = "zipccl",
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        self._blocks = Blocks(codec)
        dtype = dtype or str(offloading_spec.config.model.dtype).removeprefix("torch.")
        nbytes, size = primary_kv_view.strides[0], as_dtype(dtype).itemsize  # type: ignore[index]
        if nbytes % size:
            raise ValueError(f"dtype is {dtype!r}, of {size} bytes; a block has {nbytes}")
        self._plan = self._blocks.plan((nbytes // size,), dtype)
        # Files of vLLM's own tier have the same names.
        root_dir = os.path.join(root_dir, "tightwire")
        super().__init__(offloading_spec, primary_kv_view, tier_type, root_dir, **options)

    def submit_store(self, job_metadata: Any) -> None:
        """Have blocks encoded and written; vLLM calls it.

        Args:
            job_metadata: Which blocks, and where they are.
        """
        keys = list(job_metadata.keys)
        if self.events is not None:
            self._store_job_keys[job_metadata.job_id] = keys
        self._job_block_counts[job_metadata.job_id] = len(keys)
        task = functools.partial(self._store, *self._places(job_metadata))
        self._pool.enqueue_store(job_metadata.job_id, 1, [task])

    def submit_load(self, job_metadata: Any) -> None:
        """Have blocks read and decoded; vLLM calls it.

        Args:
            job_metadata: Which blocks, and where they go.
        """
        job_id = job_metadata.job_id
        self._load_job_keys[job_id] = list(job_metadata.keys)
        self._job_block_counts[job_id] = len(job_metadata.keys)
        load: Callable[[], None] = functools.partial(
            self._load, job_id, *self._places(job_metadata)
        )
        self._pool.enqueue_load(job_id, 1, [load])

    def _places(self, job: Any) -> tuple[list[Path], list[memoryview]]:
        """Files and memory of a job's blocks."""
        view, size = self._primary_kv_view.cast("B"), self._block_size
        paths = [Path(self.file_mapper.get_file_name(key)) for key in job.keys]
        starts = [int(number) * size for number in job.chunk_ids]
        if any(not 0 <= start <= len(view) - size for start in starts):
            raise ValueError(f"blocks at {starts} in {len(view)} bytes")
        return paths, [view[start : start + size] for start in starts]

    def _store(self, paths: list[Path], blocks: list[memoryview]) -> None:
        memory = np.empty(self._plan.nbytes, np.uint8)
        for path, block in zip(paths, blocks, strict=True):
            if path.exists():
                continue
            nbytes = self._blocks.encode(self._plan, block, memory)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
            try:
                temporary.write_bytes(memory[:nbytes].data)
                temporary.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise

    def _load(self, job_id: Any, paths: list[Path], blocks: list[memoryview]) -> None:
        for number, (path, block) in enumerate(zip(paths, blocks, strict=True)):
            try:
                self._blocks.decode(self._plan, path.read_bytes(), block)
            except FormatError:
                # As vLLM does with what is no use: the block is then computed anew.
                path.unlink(missing_ok=True)
                self._load_progress[job_id] = number
                raise
            except OSError:
                self._load_progress[job_id] = number
                raise
