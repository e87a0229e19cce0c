"""A layer of four experts on two processes: tokens travel losslessly, gradients in 8 bits.

Run it with `torchrun --nproc-per-node 2 examples/moe.py`. Rank 0 prints the share of the bytes that
travelled, and how far the output is from that of all experts in one process.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

import tightwire as tw

dist.init_process_group("gloo", timeout=timedelta(minutes=2))

# All ranks make the same experts, and each keeps its share of them.
torch.manual_seed(0)
router = torch.nn.Linear(256, 4, bias=False)
experts = [
    torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    for _ in range(4)
]
parallel = tw.moe.connect(4, "zipccl", "mx")
layer = tw.moe.MixtureOfExperts([experts[i] for i in parallel.local_experts], parallel, top_k=2)

# Every rank has tokens of its own.
torch.manual_seed(1 + dist.get_rank())
x = torch.randn(1000, 256, requires_grad=True)
y = layer(x, router(x))
y.square().mean().backward()

with torch.no_grad():
    routing = tw.moe.route(router(x), top_k=2)
    results = torch.stack([expert(x) for expert in experts], 1)
    chosen = results.gather(1, routing.experts[..., None].expand(-1, -1, 256))
    whole = (chosen * routing.weights[..., None]).sum(1)
error = tw.error(whole, y.detach())
assert error.vnmse < 1e-9
assert x.grad is not None
assert 0 < parallel.wire_bytes < parallel.raw_bytes
if dist.get_rank() == 0:
    share = parallel.wire_bytes / parallel.raw_bytes
    print(f"tokens and gradients took {share:.2f} of their bytes; vNMSE {error.vnmse:.1e}")

parallel.close()
dist.destroy_process_group()
