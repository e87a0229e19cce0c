"""Gradients of large layers summed by index and sketch (TAGC), with FSDP2 on the CPU.

Run it with `torchrun --nproc-per-node 2 examples/tagc.py`. Rank 0 prints the loss, the share of the
bytes that travelled, and how many elements went. Most elements wait for later steps: a
residual on each rank keeps them.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tightwire as tw

dist.init_process_group("gloo", timeout=timedelta(minutes=2))
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 999), torch.nn.ReLU(), torch.nn.Linear(999, 8))
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
hooks = tw.tagc.compress(model, tw.tagc.Tagc(ratio=10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(1)
inputs, labels = torch.randn(64, 256), torch.randint(8, (64,))
losses = []
for _ in range(20):
    loss = torch.nn.functional.cross_entropy(model(inputs[rank::ranks]), labels[rank::ranks])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

sums = hooks.reduce_scatter
assert losses[-1] < losses[0]
assert 0 < sums.wire_bytes < 0.5 * sums.raw_bytes
# The residuals of a rank belong in its checkpoint.
assert hooks.state.residuals.state_dict()
if rank == 0:
    share = sums.wire_bytes / sums.raw_bytes
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; gradients took {share:.2f} of their bytes")
    report = hooks.state.reports[-1]
    print(f"{report.name}: this rank sent {report.kept} of {report.nelem} elements last")

hooks.close()
dist.destroy_process_group()
