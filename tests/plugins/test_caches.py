"""Caches of keys and values in the real engines: LMCache, SGLang, vLLM."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.plugins,
    # Engines warn when they are imported.
    pytest.mark.filterwarnings("ignore"),
]
SHAPE = (2, 30, 64, 192)


def wait(found: Callable[[], Any]) -> Any:
    until = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < until
        time.sleep(0.005)
    return value


def cache(seed: int) -> Any:
    import torch

    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).bfloat16()


class LMCache:
    """The storage path of LMCache: a pool of host memory, our serde, files."""

    def __init__(self, folder: Path, **serde: Any) -> None:
        pytest.importorskip("lmcache")
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
        from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
        from lmcache.v1.distributed.serde import create_serde_processor

        importlib.import_module("tightwire.adapters.weights.plugins.lmcache")
        spec = {"type": "fs", "base_path": str(folder), "serde": {"type": "tightwire", **serde}}
        args = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        (config,) = parse_args_to_l2_adapters_config(args).adapters
        memory = L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")
        self.pool = L1Manager(L1ManagerConfig(memory))
        self.storage = SerdeL2AdapterWrapper(
            create_l2_adapter(config, self.pool.get_l1_memory_desc()),
            create_serde_processor(config.serde_config),
            self.pool,
        )

    def objects(self, n: int, shapes: Any = (SHAPE,), dtypes: Any = None) -> tuple[Any, Any]:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

        layout = MemoryLayoutDesc(list(map(torch.Size, shapes)), dtypes or [torch.bfloat16])
        keys = [ObjectKey(bytes([len(shapes), i]) * 16, "model", 0) for i in range(n)]
        found = self.pool.reserve_write(keys, [False] * n, layout, tag="test")
        return keys, [found[key][1] for key in keys]

    def store(self, keys: Any, objects: Any) -> Any:
        self.storage.submit_store_task(keys, objects)
        (done,) = wait(self.storage.pop_completed_store_tasks).values()
        return done

    def load(self, keys: Any, objects: Any) -> list[int]:
        number = self.storage.submit_load_task(keys, objects)
        found: list[int] = wait(lambda: self.storage.query_load_result(number)).get_indices_list()
        return found

    def close(self) -> None:
        self.storage.close()
        self.pool.close()


def test_lmcache_stores_and_loads_bit_for_bit(tmp_path: Path) -> None:
    engine = LMCache(tmp_path)
    keys, objects = engine.objects(3)
    for i, one in enumerate(objects):
        one.tensor.copy_(cache(i))
    assert engine.store(keys, objects).is_successful()
    files = list(tmp_path.rglob("*.data"))
    assert len(files) == 3
    assert all(file.stat().st_size <= 0.75 * objects[0].get_size() for file in files)
    for one in objects:
        one.tensor.fill_(7)
    assert engine.load(keys, objects) == [0, 1, 2]
    assert all(one.tensor.equal(cache(i)) for i, one in enumerate(objects))
    engine.close()


def test_lmcache_takes_objects_of_several_tensors(tmp_path: Path) -> None:
    import torch

    engine = LMCache(tmp_path, ratio=0.72, max_workers=2)
    shapes, dtypes = [(30, 64, 100), (1000,)], [torch.bfloat16, torch.float32]
    keys, (one,) = engine.objects(1, shapes, dtypes)
    memory = np.frombuffer(one.byte_array, np.uint8)
    split = 2 * 30 * 64 * 100
    memory[:split] = cache(0).view(torch.uint8).numpy().reshape(-1)[:split]
    # What does not shrink takes what it needs.
    memory[split:] = np.random.default_rng(0).integers(0, 256, 4000, np.uint8)
    kept = memory.copy()
    assert engine.store(keys, [one]).is_successful()
    memory[:] = 0xEE
    assert engine.load(keys, [one]) == [0]
    assert np.array_equal(memory, kept)
    engine.close()


def test_lmcache_takes_what_is_damaged_or_does_not_fit_as_missing(tmp_path: Path) -> None:
    engine = LMCache(tmp_path)
    keys, (one,) = engine.objects(1)
    noise = np.random.default_rng(0).integers(0, 256, one.get_size(), np.uint8)
    np.frombuffer(one.byte_array, np.uint8)[:] = noise
    assert not engine.store(keys, [one]).is_successful()
    assert not list(tmp_path.rglob("*.data"))
    one.tensor.copy_(cache(0))
    assert engine.store(keys, [one]).is_successful()
    (file,) = tmp_path.rglob("*.data")
    data = bytearray(file.read_bytes())
    data[100_000] ^= 1
    file.write_bytes(data)
    assert engine.load(keys, [one]) == []
    engine.close()


def test_lmcache_refuses_a_configuration_that_makes_no_sense(tmp_path: Path) -> None:
    pytest.importorskip("lmcache")
    from tightwire.adapters.weights.plugins.lmcache import create

    with pytest.raises(ValueError, match="unknown keys"):
        create({"level": 3})
    with pytest.raises(ValueError, match="codec is 'mx'"):
        create({"codec": "mx"})


def sglang_storage(folder: Path, **extra: Any) -> Any:
    pytest.importorskip("sglang")
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = HiCacheStorageConfig(
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
        **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="maker/model",
        extra_config={
            "backend_name": "tightwire",
            "class_name": "Storage",
            "module_path": "tightwire.adapters.weights.plugins.sglang",
            "file_storage_path": str(folder),
            **extra,
        },
    )
    return StorageBackendFactory.create_backend("dynamic", config, None)


@pytest.mark.parametrize("extra", [{}, {"codec": "huffman", "enable_metadata_cache": True}])
def test_sglang_stores_and_loads_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, extra: dict[str, Any]
) -> None:
    import torch

    storage = sglang_storage(tmp_path, **extra)
    pages = [cache(i) for i in range(3)]
    keys = [f"page{i}" for i in range(3)]
    assert storage.batch_set(keys, pages)
    assert storage.set("page0", pages[0])
    assert all(f.stat().st_size < 0.72 * pages[0].nbytes for f in tmp_path.glob("*.bin"))
    targets = [torch.full_like(page, 7) for page in [*pages, pages[0]]]
    found = storage.batch_get([*keys, "none"], targets)
    assert found[3] is None
    assert not [r for r in caplog.records if r.name.endswith("plugins.sglang")]
    assert all(
        x is target and x.equal(page)
        for x, target, page in zip(found[:3], targets[:3], pages, strict=True)
    )
    (file,) = tmp_path.glob("page1*")
    data = bytearray(file.read_bytes())
    data[70_000] ^= 1
    file.write_bytes(data)
    assert storage.get("page1", targets[1]) is None
    assert [r for r in caplog.records if r.name.endswith("plugins.sglang")]
    assert not storage.exists("page1")
    assert storage.set("page1", pages[1])
    assert storage.get("page1", targets[1]).equal(pages[1])


def test_sglang_counts_compressed_bytes_and_evicts(tmp_path: Path) -> None:
    pages = [cache(i) for i in range(4)]
    # Of SGLang's cap nine tenths are used: three pages compressed, or two plain ones.
    storage = sglang_storage(tmp_path, max_size=str(int(2.5 * pages[0].nbytes)))
    for i, page in enumerate(pages):
        assert storage.set(f"page{i}", page)
    assert sum(storage.exists(f"page{i}") for i in range(4)) == 3
    assert not storage.exists("page0")


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_vllm_tier_stores_and_loads_blocks(tmp_path: Path, dtype: str | None) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    config = {
        "type": "TightwireTier",
        "module_path": "tightwire.adapters.weights.plugins.vllm_tier",
    }
    parallel = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    spec = SimpleNamespace(
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
        config=SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["0"])],
            parallel=SimpleNamespace(rank=0, is_parallelism_agnostic=True, **parallel),
            model=SimpleNamespace(name="maker/model", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
            canonical_layout=False,
            replicated_layout=False,
        ),
    )
    import torch

    memory = torch.randn(8, 40_000).bfloat16().view(torch.uint8).numpy()
    kept = memory.copy()
    tier = SecondaryTierFactory.get_tier_class(config)(
        spec,
        memoryview(memory),
        "TightwireTier",
        root_dir=str(tmp_path),
        dtype=dtype,
        n_read_threads=2,
        n_write_threads=2,
    )
    request = ReqContext(req_id="1")
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(3)]

    def run(number: int, ids: list[int], is_promotion: bool) -> Any:
        job = TransferJob(number, keys, np.array(ids), is_promotion, request)
        (tier.submit_load if is_promotion else tier.submit_store)(job)
        tier.drain_jobs()
        (found,) = tier.get_finished_jobs()
        return found

    assert run(1, [0, 3, 5], False).success
    files = [f for f in tmp_path.rglob("*") if f.is_file() and f.suffix != ".json"]
    assert len(files) == 3
    if dtype is None:
        assert all(f.stat().st_size < 0.72 * kept[0].nbytes for f in files)
    memory[:] = 0xEE
    assert run(2, [1, 2, 7], True).success
    for target, source in ((1, 0), (2, 3), (7, 5)):
        assert np.array_equal(memory[target], kept[source])
    assert (memory[[0, 3, 4, 5, 6]] == 0xEE).all()

    bad = Path(tier.file_mapper.get_file_name(keys[1]))
    data = bytearray(bad.read_bytes())
    data[9_000] ^= 1
    bad.write_bytes(data)
    found = run(3, [1, 2, 7], True)
    assert not found.success
    assert tuple(found.successful_keys) == (keys[0],)
    assert not bad.exists()

    def look(key: Any) -> Any:
        tier.on_schedule_end(None)
        result = tier.lookup(key, request)
        return None if result == LookupResult.RETRY else result

    assert wait(lambda: look(keys[2])) == LookupResult.HIT
    assert wait(lambda: look(keys[1])) == LookupResult.MISS
    tier.shutdown()
