r"""Compressed weight updates and key/value caches in SGLang.

    python -m sglang.launch_server --model-path MODEL \
        --custom-weight-loader tightwire.adapters.weights.plugins.sglang.load

Then ``update_weights_from_tensor(pack(tensors), load_format=LOAD_FORMAT)`` sends compressed
tensors. The cache, as ``--hicache-storage-backend dynamic`` with the extra configuration::

    {"backend_name": "tightwire", "class_name": "Storage", "file_storage_path": "/cache",
     "module_path": "tightwire.adapters.weights.plugins.sglang"}

The interfaces are those of SGLang 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from ....codec import Codec, as_lossless
from ....formats.errors import FormatError
from ....many import decode_many
from .blocks import Blocks

logger = logging.getLogger(__name__)

#: What ``load_format=`` and ``--custom-weight-loader`` name.
LOAD_FORMAT = "tightwire.adapters.weights.plugins.sglang.load"


def pack(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    codec: str | Codec = "zipccl",
) -> list[tuple[str, torch.Tensor]]:
    """Encode tensors for ``update_weights_from_tensor``.

    Args:
        tensors: The weights by name.
        codec: A lossless codec that needs no base, or its name.

    Returns:
        The same names, each with a uint8 tensor of one buffer, on the device of the weight.

    Raises:
        TypeError: If buffers do not have a dtype.
        ValueError: If the codec is lossy or needs a base.
    """
    coder = as_lossless(codec)
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return [(name, coder.encode(x.detach()).packed()) for name, x in pairs]


def load(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Decode weights and load them into a model; SGLang calls it in every worker.

    Args:
        model: The model.
        named_tensors: What ``pack`` made.

    Raises:
        FormatError: If a buffer is damaged. The model is unchanged.
    """
    pairs = list(named_tensors)
    weights = decode_many([buffer for _, buffer in pairs])
    model.load_weights(zip([name for name, _ in pairs], weights, strict=True))


class Storage(HiCacheFile):  # type: ignore[misc]
    """SGLang's storage of cache pages in files, which are compressed without loss.

    Files have other names than those of SGLang's own storage.

    Args:
        storage_config: As ``HiCacheFile`` gets it. In ``extra_config``, ``"codec"`` names a
            lossless codec.
        options: As SGLang passes them; not used.

    Raises:
        TypeError: If ``codec`` is not a name.
        ValueError: If there is no such codec, or it is lossy.
    """

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._blocks = Blocks(extra.get("codec", "zipccl"))
        name = f"{storage_config.model_name or ''}-tightwire"
        super().__init__(replace(storage_config, model_name=name))

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store a page; SGLang calls it.

        Args:
            key: Its name.
            value: A tensor in host memory.
            target_location: Not used.
            target_sizes: Not used.

        Returns:
            Whether it is stored.
        """
        if not self.exists(key):
            page = value.contiguous()
            plan = self._blocks.plan((page.numel(),), page.dtype)
            out = np.empty(plan.nbytes, np.uint8)
            nbytes = self._blocks.encode(plan, _bytes_of(page), out)
            value = torch.from_numpy(out[:nbytes])
        stored: bool = super().set(key, value)
        return stored

    def get(
        self, key: str, target_location: torch.Tensor, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Fetch a page; SGLang calls it.

        Args:
            key: Its name.
            target_location: A contiguous tensor in host memory, which is filled.
            target_sizes: Not used.

        Returns:
            ``target_location``, or None if there is no such page, or it is damaged, which removes
            it.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If ``target_location`` is not contiguous.
        """
        if not target_location.is_contiguous():
            raise ValueError("target_location is not contiguous")
        name = self._get_suffixed_key(key)
        path = Path(self.file_path) / f"{name}.bin"
        plan = self._blocks.plan((target_location.numel(),), target_location.dtype)
        try:
            self._blocks.decode(plan, path.read_bytes(), _bytes_of(target_location))
        except (FileNotFoundError, FormatError) as error:
            if isinstance(error, FormatError):
                logger.warning("page %s: %s", key, error)
                path.unlink(missing_ok=True)
            if self.metadata_cache is not None:
                self.metadata_cache.remove(name)
            return None
        self._evictor.touch(name, str(path))
        if self.metadata_cache is not None:
            self.metadata_cache.add(name)
        return target_location


def _bytes_of(x: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor of the host."""
    found: npt.NDArray[np.uint8] = x.reshape(-1).view(torch.uint8).numpy()
    return found
