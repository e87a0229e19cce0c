"""torchtitan's checkpointer with compressed checkpoints.

In the configuration of a trainer, in place of ``CheckpointManager.Config``::

    from tightwire.adapters.weights.plugins.torchtitan import TightwireCheckpointManager

    checkpoint=TightwireCheckpointManager.Config(interval=500)

Checkpoints that torchtitan wrote are read, too. The interface is that of torchtitan 0.3.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import MODEL, CheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools.utils import GarbageCollection

import tightwire as tw


class TightwireCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """Saves checkpoints by ``tightwire.dcp.Writer`` and loads them by its ``Reader``."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's configuration of checkpoints, and the codec.

        Attributes:
            codec: A lossless codec.
        """

        codec: str = "zipccl"

    def __init__(self, config: Config, **parts: Any) -> None:
        self._codec = config.codec
        super().__init__(config, **parts)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a state; torchtitan calls it.

        Args:
            state_dict: The state.
            checkpoint_id: The directory.
            async_mode: As in torchtitan.
            enable_garbage_collection: As in torchtitan.
            to_hf: Whether to write a plain model with Hugging Face's names, as torchtitan does.

        Returns:
            As in torchtitan.

        Raises:
            ValueError: If the codec is lossy.
        """
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        writer = tw.dcp.Writer(checkpoint_id, self._codec)
        saved: Any = None
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
        elif async_mode == AsyncMode.ASYNC:
            saved = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            saved = dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a state; torchtitan calls it.

        Args:
            state_dict: The state, which is filled.
            checkpoint_id: The directory.
            from_hf: Whether it is a plain model with Hugging Face's names.
            from_quantized: As in torchtitan.

        Raises:
            FormatError: If a file is damaged.
            OSError: If a file cannot be read.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=tw.dcp.Reader(checkpoint_id))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
