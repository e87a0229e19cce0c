"""Save and load an FSDP2 model and its optimizer, compressed, by torch.distributed.checkpoint.

Run it with `torchrun --nproc-per-node 2 examples/sharded_checkpoint.py`. Rank 0 prints the share of
the state's bytes that are on disk.
"""

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import tightwire as tw

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 512)).square().mean().backward()
optimizer.step()

weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments}
saved = copy.deepcopy(weights)

# All ranks write to one directory.
folders = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folders)
path = Path(str(folders[0])) / "step_1"

dcp.save(state, storage_writer=tw.dcp.Writer(path))
for weight in weights.values():
    weight.to_local().zero_()
dcp.load(state, storage_reader=tw.dcp.Reader(path))

for name, weight in weights.items():
    assert torch.equal(weight.to_local(), saved[name].to_local())
if rank == 0:
    tensors = [*weights.values(), *(x for of in moments["state"].values() for x in of.values())]
    nbytes = sum(x.nbytes for x in tensors)
    on_disk = sum(file.stat().st_size for file in path.glob("*.tw.safetensors"))
    print(f"the checkpoint has {on_disk / nbytes:.2f} of the state's bytes")
dist.destroy_process_group()
