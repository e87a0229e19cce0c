"""Train a small GPT and collect realistic bfloat16 weights, gradients and activations.

The model is a pre-norm GPT with an untied word-level embedding, trained in float32 with AdamW
on the sources of Python's standard library.  One further step gives the gradients; rows of the
embedding whose token is absent from that step's batch have exactly zero gradient, as they do in
a step of a large model.

    python benchmarks/gpt_tensors.py --out gpt.safetensors --steps 120
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import sysconfig

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 8192, 384, 6, 4, 128
BATCH, COLLECT_BATCH = 8, 320  # sequences per training step; in the step that is collected
ACTIVATION_ROWS = 16  # sequences of the collected batch whose activations are kept
WARMUP, LEARNING_RATE = 20, 1e-3
HOOKED = {"qkv", "proj", "mlp", "ln1", "ln2", "ln_f"}
UNKNOWN = 0
TOKEN = re.compile(r"[A-Za-z_]\w*|\d|\n *| +|[^\w\s]|\s|\w")


class Block(nn.Module):
    """Pre-norm transformer block of (batch, time, width); `proj` gives the attention's output."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual attention, then residual MLP."""
        split = self.qkv(self.ln1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """A GPT whose embedding and output head are separate matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Next-token cross-entropy of windows of shape (batch, CONTEXT + 1)."""
        x = self.tokens(windows[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), windows[:, 1:].flatten())


def load_tokens() -> torch.Tensor:
    """Token ids of the standard library's sources, tests and installed packages left out."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    words: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if not skipped.intersection(path.relative_to(root).parts):
            words += TOKEN.findall(path.read_text(encoding="utf-8", errors="replace"))
    common = collections.Counter(words).most_common(VOCAB - 1)
    index = {word: i for i, (word, _) in enumerate(common, start=1)}
    return torch.tensor([index.get(word, UNKNOWN) for word in words])


def draw(tokens: torch.Tensor, count: int, rng: torch.Generator) -> torch.Tensor:
    """Draw `count` random windows of CONTEXT + 1 tokens."""
    starts = torch.randint(len(tokens) - CONTEXT, (count, 1), generator=rng)
    return tokens[starts + torch.arange(CONTEXT + 1)]


def train(model: GPT, tokens: torch.Tensor, steps: int, rng: torch.Generator) -> None:
    """Train in place with AdamW after a linear warm-up."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
        optimizer.zero_grad()
        model.loss(draw(tokens, BATCH, rng)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def collect(steps: int = 120, seed: int = 0) -> dict[str, torch.Tensor]:
    """Train for `steps` and return bfloat16 tensors named weight/..., grad/..., activation/..."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT()
    rng = torch.Generator().manual_seed(seed)
    tokens = load_tokens()
    train(model, tokens, steps, rng)

    names = {module: name for name, module in model.named_modules()}
    hooked = [m for m, name in names.items() if name.split(".")[-1] in HOOKED]
    kept: dict[str, torch.Tensor] = {}

    def keep(module: nn.Module, _: object, output: torch.Tensor) -> None:
        output.retain_grad()
        kept[names[module]] = output

    model.zero_grad()
    handles = [module.register_forward_hook(keep) for module in hooked]
    for chunk in draw(tokens, COLLECT_BATCH, rng).split(ACTIVATION_ROWS):
        (model.loss(chunk) * (len(chunk) / COLLECT_BATCH)).backward()
        while handles:  # only the first chunk's activations are kept
            handles.pop().remove()

    found = {}
    for name, x in model.named_parameters():
        found |= {f"weight/{name}": x.detach(), f"grad/{name}": x.grad}
    for name, x in kept.items():
        found |= {f"activation/{name}": x.detach(), f"grad/activation/{name}": x.grad}
    return {name: x.to(torch.bfloat16).contiguous() for name, x in found.items()}


def main() -> None:
    """Collect the tensors and save them as one safetensors file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE.safetensors")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tensors = collect(arguments.steps, arguments.seed)
    save_file(tensors, arguments.out)
    print(f"{len(tensors)} tensors, {sum(x.nbytes for x in tensors.values())} bytes")


if __name__ == "__main__":
    main()
