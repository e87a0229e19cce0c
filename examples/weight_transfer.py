"""A trainer sends its weights to two workers after every step: what has changed, over gloo.

Run it with `torchrun --nproc-per-node 3 examples/weight_transfer.py`. The last worker prints which
version it has, the share of the weights' bytes that came for it, and how long it paused.
"""

import time

import torch
import torch.distributed as dist

import tightwire as tw
from tightwire.adapters.transports.torch_dist import TorchDist

STEPS = 4

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)).bfloat16()

# For the weights alone: other calls have connections of their own.
transport = TorchDist.new_group()

if rank == 0:
    publisher = tw.publish(model, transport)
    for _ in range(STEPS):
        with torch.no_grad():
            for x in model.parameters():
                # So small a step changes few elements of bfloat16.
                x += 1e-6 * torch.randn(x.shape).bfloat16()
        publisher.send()
else:
    subscriber = tw.subscribe(model, transport)
    for _ in range(STEPS):
        update = subscriber.receive()  # the worker may use its weights meanwhile
        start = time.perf_counter()
        update.write()
        pause = time.perf_counter() - start
    if rank == dist.get_world_size() - 1:
        share = update.nbytes / sum(x.nbytes for x in model.parameters())
        print(f"version {update.version}: {share:.3f} of the bytes, {1e3 * pause:.1f} ms of pause")

# All have the same weights now.
for x in model.parameters():
    wanted = x.detach().clone()
    dist.broadcast(wanted, 0)
    assert torch.equal(x, wanted)
dist.destroy_process_group()
