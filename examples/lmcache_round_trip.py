"""Store blocks of keys and values by LMCache, compressed without loss, and load them again.

Run it with `python examples/lmcache_round_trip.py`; it needs LMCache. The keys and values are those
of randomly initialised layers.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import create_serde_processor

import tightwire.adapters.weights.plugins.lmcache  # noqa: F401  (registers the serde)

# What a server of LMCache is given as --l2-adapter.
folder = tempfile.mkdtemp()
option = json.dumps({"type": "fs", "base_path": folder, "serde": {"type": "tightwire"}})

# What the server makes of it.
(config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[option])).adapters
memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
pool = L1Manager(L1ManagerConfig(memory))
storage = SerdeL2AdapterWrapper(
    create_l2_adapter(config, pool.get_l1_memory_desc()),
    create_serde_processor(config.serde_config),
    pool,
)

# Keys and values of 4 layers, for two blocks of 256 tokens.
torch.manual_seed(0)
layers = [torch.nn.Linear(512, 2 * 512) for _ in range(4)]
tokens = torch.nn.functional.layer_norm(torch.randn(512, 512), (512,))
with torch.no_grad():
    cache = torch.stack([layer(tokens) for layer in layers]).bfloat16()
blocks = cache.view(4, 2, 256, 2, 512).permute(1, 3, 0, 2, 4)

layout = MemoryLayoutDesc([blocks[0].shape], [torch.bfloat16])
keys = [ObjectKey(bytes([i]) * 32, "a-model", 0) for i in range(2)]
reserved = pool.reserve_write(keys, [False, False], layout, tag="example")
objects = [reserved[key][1] for key in keys]
for obj, block in zip(objects, blocks, strict=True):
    obj.tensor.copy_(block)

storage.submit_store_task(keys, objects)
while not (stored := storage.pop_completed_store_tasks()):
    time.sleep(0.01)
assert all(result.is_successful() for result in stored.values())

for obj in objects:
    obj.tensor.zero_()
task = storage.submit_load_task(keys, objects)
while (loaded := storage.query_load_result(task)) is None:
    time.sleep(0.01)
assert loaded.get_indices_list() == [0, 1]
assert all(obj.tensor.equal(block) for obj, block in zip(objects, blocks, strict=True))

on_disk = sum(file.stat().st_size for file in Path(folder).rglob("*.data"))
plain = sum(obj.get_size() for obj in objects)
storage.close()
pool.close()
print(f"LMCache stored {on_disk / plain:.2f} of the bytes, and loaded them bit for bit")
