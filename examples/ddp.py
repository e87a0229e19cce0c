"""DistributedDataParallel with compressed gradients, on two processes and the CPU.

Run it with `torchrun --nproc-per-node 2 examples/ddp.py`. Rank 0 prints the loss and the share of
the bytes that travelled. With NCCL and a model on a GPU the calls are the same.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tightwire as tw

dist.init_process_group("gloo", timeout=timedelta(minutes=2))
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)
).bfloat16()
model = DistributedDataParallel(model)
# Lossless for what travels. Lossy: codec="mx", or codec="dynamiq", topology="ring".
hook = tw.ddp.register(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

torch.manual_seed(1)
inputs, labels = torch.randn(64, 64).bfloat16(), torch.randint(8, (64,))
losses = []
for _ in range(10):
    outputs = model(inputs[rank::ranks]).float()  # each rank has its share of the batch
    loss = torch.nn.functional.cross_entropy(outputs, labels[rank::ranks])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

assert losses[-1] < losses[0]
# A hook that is never called raises nothing, so look whether bytes went through it.
assert 0 < hook.wire_bytes < hook.raw_bytes
if rank == 0:
    share = hook.wire_bytes / hook.raw_bytes
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; gradients took {share:.2f} of their bytes")

hook.close()
dist.destroy_process_group()
