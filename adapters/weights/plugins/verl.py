r"""A checkpoint engine of verl: weights go to the rollout as versions of a delta directory.

In verl's configuration, with a directory that trainer and rollout both see::

    actor_rollout_ref.rollout.checkpoint_engine.backend=tightwire
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=\
        tightwire.adapters.weights.plugins.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.tightwire.directory=/shared/run

The interface is that of verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ....delta_apply import apply_delta, load_delta
from ....delta_directory import save_delta
from ....delta_files import delta_files

_PAUSE_S = 0.05


@CheckpointEngineRegistry.register("tightwire")
class DeltaEngine(CheckpointEngine):  # type: ignore[misc]
    """Sends what changed: rank 0 of the trainer writes a version, workers come to it.

    Args:
        bucket_size: As verl passes it; not used.
        is_master: As verl passes it; not used.
        directory: The delta directory.
        codec: Of tensors that are stored whole.
        timeout_s: Seconds that workers wait for a version.

    Raises:
        ValueError: If no directory is given.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        directory: str = "",
        codec: str = "zipccl",
        timeout_s: float = 1800.0,
    ) -> None:
        if not directory:
            raise ValueError("directory is ''; needed: engine_kwargs.tightwire.directory")
        self._directory, self._codec, self._timeout_s = Path(directory), codec, timeout_s
        self._rank, self._version = -1, -1
        self._weights: dict[str, torch.Tensor] = {}

    def prepare(self) -> dict[str, Any]:
        """Tell which version is the next one; verl calls it before each update.

        Returns:
            Its number, which ``build_topology`` gives to all workers.
        """
        return {"version": max(self._versions(), default=-1) + 1}

    def _versions(self) -> list[int]:
        files = delta_files(self._directory) if self._directory.is_dir() else []
        return [file.version for file in files]

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What ``init_process_group`` of each worker is called with; verl calls it.

        Args:
            actor_wg_world_size: Ranks of the trainer.
            rollout_world_size: Ranks of the rollout.
            metadata: What ``prepare`` returned on each.

        Returns:
            Arguments for the trainer's ranks, and for those of the rollout.
        """
        first = actor_wg_world_size
        ranks = [range(first), range(first, first + rollout_world_size)]
        version = metadata[0]["version"]
        trainer, rollout = ({"rank": [*r], "version": [version] * len(r)} for r in ranks)
        return trainer, rollout

    def init_process_group(self, rank: int, version: int) -> None:
        """Take what ``build_topology`` gave; verl calls it.

        Args:
            rank: The worker's, those of the trainer first.
            version: The version that is sent next.
        """
        self._rank, self._version = rank, version

    def finalize(self) -> None:
        """Nothing is held for one update alone; verl calls it."""

    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
    ) -> None:
        """Write the weights as a version; verl calls it on every rank of the trainer.

        Args:
            weights: Names and tensors, which all ranks gather.
            global_steps: Not used: versions are counted by the directory.

        Raises:
            OSError: If the version cannot be written.
        """
        new = {name: x.detach().to("cpu", copy=True) for name, x in weights if self._rank == 0}
        if self._rank:
            return
        base: Any = self._weights or (self._directory if self._versions() else None)
        # After an error the directory tells which version is the newest.
        self._weights = {}
        await asyncio.to_thread(
            save_delta, new, base, self._directory, version=self._version, codec=self._codec
        )
        self._weights = new

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Come to the version that is sent; verl calls it on every rank of the rollout.

        Args:
            global_steps: Not used.

        Yields:
            Names and tensors in host memory, all of them.

        Raises:
            FormatError: If a file is damaged.
            OSError: If a file cannot be read.
            TimeoutError: If the version does not come in time.
        """
        until = time.monotonic() + self._timeout_s
        while self._version not in self._versions():
            if time.monotonic() > until:
                what = f"{self._directory}: no version {self._version}"
                raise TimeoutError(f"{what} after {self._timeout_s} s; see the trainer's errors")
            await asyncio.sleep(_PAUSE_S)
        await asyncio.to_thread(self._come)
        for name, weight in self._weights.items():
            yield name, weight

    def _come(self) -> None:
        if self._weights:
            apply_delta(self._weights, self._directory, version=self._version, whole=True)
        else:
            self._weights = load_delta(self._directory, version=self._version, like="torch")
