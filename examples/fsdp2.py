"""FSDP2 (`fully_shard`) with compressed parameters and gradients, on two processes and the CPU.

Run it with `torchrun --nproc-per-node 2 examples/fsdp2.py`. Rank 0 prints the share of the bytes
that travelled in all-gathers and in reduce-scatters.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tightwire as tw

dist.init_process_group("gloo", timeout=timedelta(minutes=2))
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
mesh = init_device_mesh("cpu", (ranks,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh, mp_policy=policy)

# Parameters arrive bit for bit; gradients too, unless gradients="mx" (say) is given.
hooks = tw.fsdp.compress(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

torch.manual_seed(1)
inputs, labels = torch.randn(64, 64), torch.randint(8, (64,))
losses = []
for _ in range(10):
    outputs = model(inputs[rank::ranks]).float()
    loss = torch.nn.functional.cross_entropy(outputs, labels[rank::ranks])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

assert losses[-1] < losses[0]
shares = [hook.wire_bytes / hook.raw_bytes for hook in hooks]
assert all(0 < share < 1 for share in shares)
if rank == 0:
    gathered, scattered = shares
    print(f"parameters took {gathered:.2f} of their bytes, gradients {scattered:.2f}")

hooks.close()
dist.destroy_process_group()
