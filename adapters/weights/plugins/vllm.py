"""Compressed models, weight updates and key/value caches in vLLM.

A plug-in of vLLM loads this where tightwire is installed (entry point ``vllm.general_plugins``);
elsewhere import it before the engine starts::

    vllm serve MODEL --load-format tightwire                         # a compressed model
    vllm serve MODEL --weight-transfer-config '{"backend": "tightwire"}'
    {"type": "TightwireTier", "module_path": "tightwire.adapters.weights.plugins.vllm_tier",
     "root_dir": "/cache"}                                           # a secondary tier of the cache

The interfaces are those of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ....delta_apply import apply_delta, load_delta
from ....delta_directory import save_delta
from ....delta_files import delta_files
from ....lazy import File
from ....shards import model_shards

NAME = "tightwire"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a worker of vLLM is told once.

    Attributes:
        directory: The delta directory, as the worker sees it.
    """

    directory: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What a worker of vLLM is told of an update.

    Attributes:
        version: The version to come to.
    """

    version: int


@dataclass
class TrainerInfo(TrainerInitInfo):  # type: ignore[misc]
    """What a trainer gives ``WeightTransferTrainerFactory.trainer_init``.

    Attributes:
        directory: The delta directory that the trainer writes.
        worker_directory: The same directory as workers see it. None: as the trainer does.
        codec: Of tensors that are stored whole.
    """

    backend: ClassVar[str] = NAME

    directory: str
    worker_directory: str | None = None
    codec: str = "zipccl"


class Trainer(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Writes each version of the weights as a delta, and has the workers of vLLM come to it."""

    init_info_cls = TrainerInfo

    def __init__(self, info: TrainerInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender, rank=info.rank)
        self._info = info
        self._sent: dict[str, torch.Tensor] | None = None

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> Trainer:
        """Make the trainer's side and tell the workers where the directory is; vLLM calls it.

        Args:
            init_info: As ``WeightTransferTrainerFactory.trainer_init`` gets it.
            client: How the workers are reached.
            source: The weights, full tensors of them.

        Returns:
            The trainer's side.

        Raises:
            ValueError: If there is no source.
        """
        if source is None:
            raise ValueError("source is None; needed: a WeightSource with iter_full")
        made = cls(init_info, client=client, source=source)
        if made.is_sender:
            worker_directory = init_info.worker_directory or init_info.directory
            client.init_weight_transfer_engine({"directory": worker_directory})
        return made

    def send_weights(self) -> None:
        """Write the weights as a new version, and wait until the workers have it.

        Every rank of a trainer calls it; rank 0 writes.

        Raises:
            OSError: If the version cannot be written.
        """
        # Each rank has its part in gathering them.
        tensors = {name: _on_host(x) for name, x in self.source.iter_full() if self.is_sender}
        if not self.is_sender:
            return
        info = self._info
        # After an error the directory tells which version is the newest.
        base: Any
        base, self._sent = self._sent, None
        if base is None and Path(info.directory).is_dir() and delta_files(info.directory):
            base = info.directory
        version = save_delta(tensors, base, info.directory, codec=info.codec)
        self._sent = tensors
        self.client.start_weight_update()
        self.client.update_weights({"version": version})
        self.client.finish_weight_update()


class Worker(WeightTransferEngine):  # type: ignore[misc]
    """Brings a model of vLLM to versions of a delta directory.

    It keeps the weights as the checkpoint has them in host memory, where deltas are applied and
    checked. The model is left alone until all of that is done.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Take the directory; vLLM calls it.

        Args:
            init_info: Where it is.
        """
        self._directory = init_info.directory
        self._weights: dict[str, torch.Tensor] = {}

    def start_weight_update(self) -> None:
        """Prepare the model for weights in the checkpoint's format; vLLM calls it."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Come to a version and load it into the model; vLLM calls it.

        Args:
            update_info: Which version.

        Raises:
            FormatError: If a file is damaged. The model is unchanged.
            OSError: If a file cannot be read. The model is unchanged.
            ValueError: If there is no such version. The model is unchanged.
        """
        version = update_info.version
        if self._weights:
            # Weights that no delta leads on from are replaced by a version that is stored whole.
            apply_delta(self._weights, self._directory, version=version, whole=True)
        else:
            self._weights = load_delta(self._directory, version=version, like="torch")
        self.model.load_weights(
            (name, weight.to(self.device)) for name, weight in self._weights.items()
        )

    def finish_weight_update(self) -> None:
        """Put the weights in the form that the model computes with; vLLM calls it."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Forget the weights; vLLM calls it."""
        self._weights = {}


def _on_host(x: torch.Tensor) -> torch.Tensor:
    # A copy: the trainer goes on with its own.
    return x.detach().to("cpu", copy=True)


@register_model_loader(NAME)
class Loader(BaseModelLoader):  # type: ignore[misc]
    """Loads models that ``tightwire.save`` or ``tightwire compress`` wrote, shard by shard."""

    def download_model(self, model_config: Any) -> None:
        """Have the files of the model here; vLLM calls it.

        Args:
            model_config: Names the model, a directory or a repository on Hugging Face's hub.

        Raises:
            OSError: If they cannot be fetched.
        """
        self._folder(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the weights into a model; vLLM calls it.

        Args:
            model: The model.
            model_config: Names it.

        Raises:
            FormatError: If a file is damaged or not compressed. The model is undefined then.
            OSError: If a file cannot be read.
        """
        model.load_weights(self._weights(self._folder(model_config)))

    def _folder(self, model_config: Any) -> Path:
        folder = Path(model_config.model)
        if folder.is_dir():
            return folder
        from huggingface_hub import snapshot_download

        kept = self.load_config.download_dir
        return Path(
            snapshot_download(model_config.model, revision=model_config.revision, cache_dir=kept)
        )

    def _weights(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in model_shards(folder):
            with File(shard, like="torch") as file:
                for name, weight in file.items():
                    yield name, weight.load()


def register() -> None:
    """Make vLLM know the transfer of weights; the loader is registered by the import."""
    for factory, side in (
        (WeightTransferEngineFactory, Worker),
        (WeightTransferTrainerFactory, Trainer),
    ):
        if NAME not in factory._registry:
            factory.register_engine(NAME, side)


register()
