"""A tensor-parallel MLP whose activations travel in 8 bits, on two processes and the CPU.

Run it with `torchrun --nproc-per-node 2 examples/tensor_parallel.py`. Rank 0 prints the share of
the bytes that travelled, and how far the output is from that of the whole layers.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

import tightwire as tw

dist.init_process_group("gloo", timeout=timedelta(minutes=2))

# All ranks make the same layers, and each keeps its share of them.
torch.manual_seed(0)
first, last = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)
whole = torch.nn.Sequential(first, torch.nn.GELU(), last)

# The codec of activations, that of their gradients, and the dtype that both travel in.
parallel = tw.tensor_parallel.connect("taco", "taco", wire="bfloat16")
model = torch.nn.Sequential(
    tw.tensor_parallel.ColumnParallelLinear(first, parallel),
    torch.nn.GELU(),
    tw.tensor_parallel.RowParallelLinear(last, parallel),
)

x = torch.randn(64, 256, requires_grad=True)
y = model(x)
y.square().mean().backward()

error = tw.error(whole(x).detach(), y.detach())
assert error.cosine > 0.999
assert x.grad is not None
assert 0 < parallel.wire_bytes < parallel.raw_bytes
if dist.get_rank() == 0:
    share = parallel.wire_bytes / parallel.raw_bytes
    print(f"activations took {share:.2f} of their bfloat16 bytes; vNMSE {error.vnmse:.1e}")

parallel.close()
dist.destroy_process_group()
