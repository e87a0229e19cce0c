"""Weights in the real engines: vLLM, SGLang, verl, torchtitan."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tightwire as tw
from tightwire import storage

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.plugins, pytest.mark.filterwarnings("ignore")]


class Model(torch.nn.Sequential):  # type: ignore[misc, name-defined]
    """Loads weights as models of vLLM and SGLang do."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        found = dict(self.named_parameters())
        for name, weight in weights:
            load = getattr(found[name], "weight_loader", lambda p, w: p.data.copy_(w))
            load(found[name], weight)
        return set(found)


def model(seed: int) -> Model:
    torch.manual_seed(seed)
    made = Model(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
    made.bfloat16()
    return made


def train(trained: Any) -> None:
    with torch.no_grad():
        for weight in trained.parameters():
            weight.view(-1)[::100] *= 1.01


def same(a: Any, b: Any) -> bool:
    return all(x.equal(y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def fails(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_vllm_workers_follow_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from tightwire.adapters.weights.plugins.vllm import TrainerInfo

    trained, served = model(0), [model(1), model(2)]
    config = SimpleNamespace(
        parallel_config=None, model_config=SimpleNamespace(dtype=torch.bfloat16, quantization=None)
    )
    workers = []
    for one in served:
        record_metadata_for_reloading(one)
        backend = WeightTransferConfig(backend="tightwire")
        device = torch.device("cpu")
        workers.append(WeightTransferEngineFactory.create_engine(backend, config, device, one))
    asleep: list[Any] = []

    class Client:
        def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
            for worker in workers:
                worker.init_transfer_engine(worker.parse_init_info(info))

        def start_weight_update(self) -> None:
            for worker in workers:
                if worker not in asleep:
                    worker.start_weight_update()

        def update_weights(self, info: dict[str, Any]) -> None:
            for worker in workers:
                if worker not in asleep:
                    worker.receive_weights(worker.parse_update_info(info))

        def finish_weight_update(self, version: str | None = None) -> None:
            for worker in workers:
                if worker not in asleep:
                    worker.finish_weight_update()

    def trainer() -> Any:
        info = TrainerInfo(str(tmp_path / "versions"), rank=0)
        source = ModuleSource(trained)
        return WeightTransferTrainerFactory.trainer_init(info, client=Client(), source=source)

    sender = trainer()
    for _ in range(2):
        train(trained)
        sender.send_weights()
        assert same(trained, served[0])
        assert same(trained, served[1])
    whole, delta = sorted((tmp_path / "versions").glob("*.tw.safetensors"))
    assert delta.stat().st_size < 0.05 * whole.stat().st_size

    # A version that is there, and whose folder could not be synced.
    train(trained)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "sync_folder", fails)
        with pytest.raises(OSError, match="No space"):
            sender.send_weights()
    sender.send_weights()
    assert same(trained, served[0])

    # A worker that slept through an update, and a trainer that was started again.
    asleep.append(workers[1])
    train(trained)
    sender.send_weights()
    assert not same(trained, served[1])
    asleep.clear()
    train(trained)
    trainer().send_weights()
    assert same(trained, served[0])
    assert not {id(p) for p in served[0].parameters()} & {id(p) for p in trained.parameters()}


def test_vllm_loads_compressed_models(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    trained, served = model(0), model(1)
    importlib.import_module("tightwire.adapters.weights.plugins.vllm")
    tw.save(dict(trained.named_parameters()), tmp_path / "model", max_shard_nbytes=200_000)
    assert len(list((tmp_path / "model").glob("*.tw.safetensors"))) > 1
    config = SimpleNamespace(model=str(tmp_path / "model"), revision=None)
    loader = get_model_loader(LoadConfig(load_format="tightwire"))
    loader.download_model(config)
    loader.load_weights(served, config)
    assert same(trained, served)


def test_sglang_loads_packed_weights() -> None:
    pytest.importorskip("sglang")
    from tightwire.adapters.weights.plugins import sglang

    trained, served = model(0), model(1)
    packed = sglang.pack(trained.named_parameters())
    assert all(x.dtype == torch.uint8 for _, x in packed)
    assert sum(x.nbytes for _, x in packed) < 0.75 * sum(x.nbytes for x in trained.parameters())
    # SGLang finds it by its name.
    module, _, name = sglang.LOAD_FORMAT.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is sglang.load
    sglang.load(served, packed)
    assert same(trained, served)
    name, buffer = packed[0]
    buffer[5000] ^= 1
    with pytest.raises(tw.FormatError):
        sglang.load(model(2), packed)
    sglang.load(served, [])
    with pytest.raises(ValueError, match="codec is 'mx'; allowed: lossless"):
        sglang.pack(trained.named_parameters(), "mx")


def test_verl_engines_send_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    pytest.importorskip("ray")
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    import_external_libs("tightwire.adapters.weights.plugins.verl")
    folder = tmp_path / "versions"
    options = {"bucket_size": 1 << 20, "directory": str(folder), "timeout_s": 0.5}
    engines = [CheckpointEngineRegistry.new("tightwire", **options) for _ in range(4)]
    trained = model(0)

    def begin() -> None:
        metadata = [engine.prepare() for engine in engines]
        topologies = type(engines[0]).build_topology(2, 2, metadata)
        for i, engine in enumerate(engines):
            given = topologies[i // 2]
            engine.init_process_group(**{name: values[i % 2] for name, values in given.items()})

    def gathered() -> Iterator[tuple[str, Any]]:
        yield from trained.named_parameters()

    async def received(engine: Any) -> dict[str, Any]:
        return {name: x.clone() async for name, x in engine.receive_weights(global_steps=7)}

    async def step() -> None:
        begin()
        senders = [engine.send_weights(gathered(), global_steps=7) for engine in engines[:2]]
        *found, _, _ = await asyncio.gather(*map(received, engines[2:]), *senders)
        wanted = dict(trained.named_parameters())
        for weights in found:
            assert weights.keys() == wanted.keys()
            assert all(weights[name].equal(x) for name, x in wanted.items())
        for engine in engines:
            engine.finalize()

    for _ in range(3):
        train(trained)
        asyncio.run(step())
    assert len(list(folder.glob("*.tw.safetensors"))) == 3
    begin()
    with pytest.raises(TimeoutError, match="no version 3 after"):
        asyncio.run(received(engines[2]))
    # A version that is there, and whose folder could not be synced.
    train(trained)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "sync_folder", fails)
        with pytest.raises(OSError, match="No space"):
            asyncio.run(engines[0].send_weights(gathered()))
    asyncio.run(step())
    with pytest.raises(ValueError, match="directory is ''"):
        CheckpointEngineRegistry.new("tightwire", bucket_size=1)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitan_saves_and_loads(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("torchtitan")
    import torch.distributed as dist
    from torchtitan.components.checkpointer import CheckpointManager

    from tightwire.adapters.weights.plugins.torchtitan import TightwireCheckpointManager

    class State:
        def __init__(self, x: Any) -> None:
            self.x = x

        def state_dict(self) -> dict[str, Any]:
            return {"x": self.x}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.x = state["x"]

    torch.distributed.checkpoint.stateful.Stateful.register(State)

    def manager(kind: Any, trained: Any, step: int, folder: str, **options: Any) -> Any:
        config = kind.Config(
            enable=True, folder=folder, interval=1, async_mode=mode, keep_latest_k=0, **options
        )
        return config.build(
            dataloader=None,
            model_parts=[trained],
            optimizers=State(torch.full((1000,), float(step))),
            lr_schedulers=State(torch.zeros(3)),
            states={"train_state": State(torch.tensor(step))},
            sd_adapter=None,
            base_folder=str(tmp_path),
        )

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for kind, options in (
            (TightwireCheckpointManager, {"codec": "huffman"}),
            (CheckpointManager, {}),
        ):
            trained, loaded, folder = model(0), model(1), kind.__name__
            writer = manager(kind, trained, 7, folder, **options)
            writer.save(1)
            writer.maybe_wait_for_saving()
            reader = manager(TightwireCheckpointManager, loaded, 0, folder)
            assert reader.load(-1)
            assert same(trained, loaded)
            assert reader.states["train_state"].x == 7
            assert (reader.states["optimizer"].x == 7).all()
            files = list((tmp_path / folder / "step-1").glob("*.tw.safetensors"))
            assert len(files) == (kind is TightwireCheckpointManager)
            writer.close()
            reader.close()
    finally:
        dist.destroy_process_group()
