"""Save a PyTorch model, load it in place, and read a few rows of one weight.

Run it with `python examples/model_checkpoint.py`. It prints the size of the file beside that of the
parameters.
"""

import tempfile
from pathlib import Path

import torch

import tightwire as tw


def make(seed: int) -> torch.nn.Module:
    """A small model."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 64)).bfloat16()


model, other = make(0), make(1)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.tw.safetensors"
    tw.save_file(model.state_dict(), path)
    size = path.stat().st_size

    # In place: each parameter stays where it is, on its device.
    tw.load_into(other, path)

    # Rows alone: nothing but these is decoded.
    with tw.open(path, like="torch") as file:
        rows = file["0.weight"][100:110]

for name, x in model.state_dict().items():
    assert torch.equal(x, other.state_dict()[name])
assert torch.equal(rows, model[0].weight[100:110])
nbytes = sum(x.nbytes for x in model.state_dict().values())
print(f"{size} bytes in the file for {nbytes} bytes of parameters")
