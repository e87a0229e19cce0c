"""Training over the backend "tightwire" in place of gloo, on two processes and the CPU.

Run it with `torchrun --nproc-per-node 2 examples/process_group.py`. Rank 0 prints the share of the
bytes that travelled. The model is sharded by FSDP2, and knows nothing of it.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tightwire import process_group

# Floats from 64 KiB on. The default is 1 MiB: these layers are small.
process_group.set_policy([process_group.Rule(min_bytes=64 << 10)])
dist.init_process_group("tightwire", timeout=timedelta(minutes=2))
rank, ranks = dist.get_rank(), dist.get_world_size()


def train(backend: str) -> torch.Tensor:
    """The first layer's weights after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)
    ).bfloat16()
    mesh = init_device_mesh("cpu", (ranks,), backend_override={0: backend})
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(1 + rank)
    for _ in range(5):
        x, y = torch.randn(32, 64).bfloat16(), torch.randint(8, (32,))
        torch.nn.functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if backend == "tightwire":
        used = mesh.get_group()
        # A group whose calls are all too small compresses nothing, so look.
        assert 0 < used.wire_bytes < used.raw_bytes
        shares.append(used.wire_bytes / used.raw_bytes)
    return model[0].weight.full_tensor().detach()


shares: list[float] = []
found, expected = train("tightwire"), train("gloo")
# Two terms add up in one way only. Sums of more ranks differ in their last bits.
assert ranks > 2 or torch.equal(found, expected)
if rank == 0:
    print(f"the same weights as over gloo; calls took {shares[0]:.2f} of their bytes")

dist.destroy_process_group()
