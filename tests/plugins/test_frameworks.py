"""Training by DeepSpeed, Megatron Core and TorchTitan over the process group, beside gloo.

The program that two ranks run is this file, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

pytestmark = [pytest.mark.plugins, pytest.mark.filterwarnings("ignore")]

STEPS, WIDTH = 4, 256


def blocks() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(3)]
    )


def batches(*shape: int) -> Iterator[Any]:
    """Other elements on each rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        yield torch.randn(*shape, WIDTH, generator=generator)


def deepspeed_steps(backend: str, stage: str) -> list[float]:
    """ZeRO of a stage. The backend is an argument."""
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend)
    model = blocks()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": int(stage)},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    losses = []
    for x in batches(8):
        loss = (engine(x.bfloat16()).float() - x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def megatron_steps(backend: str, parallel: str) -> list[float]:
    """Tensor and data parallel layers. The program chooses the backend itself."""
    dist.init_process_group(backend)
    # Megatron Core asks for the GPU that a process has; here it has the CPU.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    ways = int(parallel)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ways)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=ways,
        sequence_parallel=ways > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    common: dict[str, Any] = {
        "config": config,
        "init_method": lambda weight: torch.nn.init.normal_(weight, std=0.02),
        "bias": False,
    }

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, **common)
            self.down = RowParallelLinear(
                4 * WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=False, **common
            )

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.nn.functional.gelu(self.up(x)[0]))[0]

    torch.manual_seed(0)
    settings = DistributedDataParallelConfig(check_for_nan_in_grad=False)
    layer = DistributedDataParallel(config, settings, Layer().bfloat16())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for x in batches(32, 4):
        layer.zero_grad_buffer()
        loss = (layer(x.bfloat16()).float() - x / 2).square().mean()
        loss.backward()
        layer.finish_grad_sync()
        for weight in layer.parameters():
            weight.grad = weight.main_grad.to(weight.dtype)
        optimizer.step()
        losses.append(loss.item())
    return losses


def torchtitan_steps(backend: str, _: str) -> list[float]:
    """FSDP2 on a mesh of TorchTitan's, which takes the backend that PyTorch has for a device."""
    dist.Backend.default_device_backend_map["cpu"] = backend
    # The backend of meshes of one rank.
    import torch.testing._internal.distributed.fake_pg
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.distributed import parallel_dims, utils

    utils.device_type = parallel_dims.device_type = "cpu"
    utils.init_distributed(
        SimpleNamespace(
            mode="default",
            trace_buf_size=0,
            save_traces_folder="traces",
            save_traces_file_prefix="rank",
            init_timeout_seconds=60,
            train_timeout_seconds=60,
        )
    )
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, world_size=2
    )
    dims.build_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = blocks()
    for block in [*model, model]:
        fully_shard(block, mesh=dims.get_mesh("dp_shard"), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x in batches(8):
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        norm = utils.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), float(norm)]
    return losses


TASKS: dict[str, Callable[[str, str], list[float]]] = {
    "deepspeed": deepspeed_steps,
    "megatron.core": megatron_steps,
    "torchtitan": torchtitan_steps,
}


def steps(folder: Path, *words: str) -> dict[str, Any]:
    """What rank 0 of two tells of steps of a framework over a backend."""
    out = folder / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__, str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    ("package", "how", "expected"),
    [
        ("deepspeed", "1", {"all_reduce", "all_gather"}),
        ("deepspeed", "2", {"all_reduce", "all_gather"}),
        ("deepspeed", "3", {"all_gather", "reduce_scatter"}),
        ("megatron.core", "1", {"all_reduce"}),
        ("megatron.core", "2", {"all_gather", "reduce_scatter"}),
        ("torchtitan", "", {"all_gather", "reduce_scatter"}),
    ],
)
def test_losses_are_those_over_gloo(
    package: str, how: str, expected: set[str], tmp_path: Path
) -> None:
    pytest.importorskip(package)
    native = steps(tmp_path, package, how, "gloo")
    ours = steps(tmp_path, package, how, "tightwire")
    assert native["losses"] == ours["losses"]
    assert len(set(ours["losses"])) == len(ours["losses"]) >= STEPS
    assert set(ours["calls"]) == expected
    assert ours["wire"] < 0.85 * ours["raw"]
    assert not native["calls"]


@contextmanager
def written(out: str) -> Iterator[dict[str, Any]]:
    """A dict that rank 0 writes to a file, with what groups have compressed."""
    found: dict[str, Any] = {"calls": [], "raw": 0, "wire": 0}
    yield found
    for group in list(dist.distributed_c10d._world.pg_map):
        if hasattr(group, "trace"):
            found["calls"] += [record.collective for record in group.trace()]
            found["raw"] += group.raw_bytes
            found["wire"] += group.wire_bytes
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    out, package, how, backend = sys.argv[1:]
    if backend == "tightwire":
        from tightwire import process_group

        process_group.set_policy([process_group.Rule(min_bytes=4096)])
    with written(out) as found:
        found["losses"] = TASKS[package](backend, how)
