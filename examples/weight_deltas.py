"""A trainer publishes its weights step by step; a worker in another process follows.

Run it with `python examples/weight_deltas.py`. It prints what the last version takes beside the
whole model.
"""

import multiprocessing
import tempfile
from pathlib import Path

import torch

import tightwire as tw

STEPS = 5


def make() -> torch.nn.Module:
    """The model as both sides have it at first."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))


def follow(folder: str, published: multiprocessing.Queue, found: multiprocessing.Queue) -> None:
    """The worker: it brings its own copy up to each version that is published."""
    model = make().bfloat16()
    while published.get() is not None:
        # All checks come first; the model only has to pause for the write.
        update = tw.prepare_delta(model, folder)
        update.write()
    found.put((update.version, sum(float(x.double().sum()) for x in model.state_dict().values())))


def train(folder: str, published: multiprocessing.Queue) -> float:
    """The trainer: float32 masters, and bfloat16 weights that it publishes."""
    masters = make()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-5)
    old = {name: x.bfloat16() for name, x in masters.state_dict().items()}
    tw.save_delta(old, None, folder)
    for _ in range(STEPS):
        optimizer.zero_grad()
        masters(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        new = {name: x.bfloat16() for name, x in masters.state_dict().items()}
        published.put(tw.save_delta(new, old, folder))
        old = new
    published.put(None)
    return sum(float(x.double().sum()) for x in old.values())


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    published, found = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        worker = context.Process(target=follow, args=(folder, published, found))
        worker.start()
        expected = train(folder, published)
        assert found.get(timeout=120) == (STEPS, expected)
        worker.join()
        whole = (Path(folder) / "weight_v000000.tw.safetensors").stat().st_size
        last = (Path(folder) / "weight_v000005.from_v000004.tw.safetensors").stat().st_size
    print(f"version {STEPS} takes {last} bytes, the first one {whole}")
