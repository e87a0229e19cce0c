"""Codec delta on steps of Adam, and its speed on one thread of the CPU.

    python benchmarks/study_delta.py --out benchmarks/results/delta.json

A small transformer is trained on Python sources, with float32 masters. Then, from that state, a few
steps are made at each of several rates, and the masters before and after one more are rounded to
each dtype: base and tensor. float8 is scaled by the largest magnitude before. Changes that are no
steps stand beside them: products by 2, and signs. Every tensor is decoded and compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import tightwire as tw
from tightwire.bench_others import others
from tightwire.formats.dtypes import BY_NAME

Array = npt.NDArray[Any]

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 256, 4, 3, 64, 12
RATES = (1e-6, 3e-6, 1e-5)
DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
SHARES = (0.01, 0.1, 0.5)
#: The forms of the codec, the default first.
FORMS = ("adaptive", "difference", "overwrite")
SPEED_NELEM, REPEAT = 1 << 23, 15


class Block(torch.nn.Module):
    """A layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, context, width) in and out."""
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    """A transformer that predicts bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = torch.nn.Embedding(256, WIDTH)
        self.places = torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = torch.nn.Linear(WIDTH, 256)
        for p in self.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, 0, 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte, shape (batch, context, 256)."""
        places = self.places(torch.arange(x.shape[1]))
        return self.head(self.blocks(self.bytes(x) + places))


def steps_of_adam(n_steps: int) -> dict[float, tuple[Array, Array]]:
    """The masters of all matrices before and after a step at each rate."""
    torch.manual_seed(0)
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:120])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step() -> None:
        starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,))
        rows = torch.stack([data[i : i + CONTEXT + 1] for i in starts.tolist()])
        scores = model(rows[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def masters() -> Array:
        matrices = [p.detach().flatten() for p in model.parameters() if p.dim() == 2]
        return torch.cat(matrices).numpy().copy()

    for _ in range(n_steps):
        step()
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    found = {}
    for rate in RATES:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(3):
            step()
        before = masters()
        step()
        found[rate] = before, masters()
    return found


def kept(path: Path | None, n_steps: int) -> dict[float, tuple[Array, Array]]:
    """`steps_of_adam`, from a file if it is there, which is written if it is not."""
    if path is None or not path.exists():
        found = steps_of_adam(n_steps)
        if path is not None:
            both = {f"{r:g}": masters for r, masters in found.items()}
            named = {f"{r}_old": m[0] for r, m in both.items()}
            np.savez(path, **named, **{f"{r}_new": m[1] for r, m in both.items()})
        return found
    with np.load(path) as arrays:
        return {r: (arrays[f"{r:g}_old"], arrays[f"{r:g}_new"]) for r in RATES}


def rounded(masters: tuple[Array, Array], dtype: str) -> tuple[Array, Array]:
    """Masters before and after, in a dtype; scaled by the largest before for float8."""
    kind = BY_NAME[dtype]
    scale = np.float32(1)
    if kind.itemsize == 1:
        largest = 448 if dtype == "float8_e4m3fn" else 57344
        scale = np.float32(largest / np.abs(masters[0]).max())
    before, after = ((x * scale).astype(kind.numpy) for x in masters)
    return before, after


def synthetic(share: float, n: int = 1 << 20) -> tuple[Array, Array]:
    """N(0, 0.02) in bfloat16, and a step after which this share of the elements differs."""
    kind = BY_NAME["bfloat16"]
    rng = np.random.default_rng(0)
    w = rng.normal(0, 0.02, n).astype(np.float32)
    direction = np.clip(rng.normal(0, 0.5, n), -3, 3).astype(np.float32)
    base = w.astype(kind.numpy)
    low, high = 1e-7, 1e-2
    for _ in range(16):
        rate = (low * high) ** 0.5
        x = (w - np.float32(rate) * direction).astype(kind.numpy)
        low, high = (rate, high) if np.mean(differs(base, x)) < share else (low, rate)
    return base, x


def otherwise(n: int = 1 << 20) -> dict[str, tuple[Array, Array]]:
    """Changes of N(0, 0.02) that are no steps, by name, in bfloat16 and float32."""
    rng = np.random.default_rng(0)
    w = rng.normal(0, 0.02, n).astype(np.float32)
    draws = rng.random(n)
    found = {}
    for dtype in ("bfloat16", "float32"):
        base = w.astype(BY_NAME[dtype].numpy)
        found[f"{dtype}, product by 2"] = base, base * base.dtype.type(2)
        for share in (0.04, 0.5):
            signs = np.where(draws < share, -1, 1).astype(base.dtype)
            found[f"{dtype}, {share:.0%} of the signs"] = base, base * signs
    return found


def differs(base: Array, x: Array) -> npt.NDArray[np.bool]:
    """Which elements differ in a bit."""
    kind = BY_NAME[base.dtype.name].bits
    found: npt.NDArray[np.bool] = base.view(kind) != x.view(kind)
    return found


def conditional_bits(base: Array, x: Array) -> float:
    """Bits by the order-0 entropy of change and no change, given the exponent of the base."""
    kind = BY_NAME[base.dtype.name]
    old, new = (a.view(kind.bits).astype(np.int64) for a in (base, x))
    exponents = old >> kind.mantissa & (1 << kind.exponent) - 1
    total = 0.0
    for e in np.unique(exponents):
        here = exponents == e
        counts = np.unique((new - old)[here], return_counts=True)[1]
        total -= float((counts * np.log2(counts / counts.sum())).sum())
    return total


def compared(base: Array, x: Array) -> dict[str, Any]:
    """What a tensor takes against its base, beside the entropy and other codecs."""
    changed = int(np.count_nonzero(differs(base, x)))
    row: dict[str, Any] = {"elements": x.size, "changed": changed / x.size}
    entropy = conditional_bits(base, x)
    row["entropy_bits"] = entropy / changed
    for form in FORMS:
        buf = tw.codec("delta", form=form).encode(x, base=base)
        assert tw.decode(buf, base=base).tobytes() == x.tobytes()
        bits = 8 * buf.nbytes
        row[form] = {
            "ratio": buf.nbytes / x.nbytes,
            "bits": bits / changed,
            # None: the exponent of the base tells what has changed.
            "over_entropy": bits / entropy if entropy else None,
        }
    kind = BY_NAME[x.dtype.name]
    xor = base.view(kind.bits) ^ x.view(kind.bits)
    row["huffman_of_xor"] = tw.encode(xor, "huffman").nbytes / x.nbytes
    data = xor.view(np.uint8)
    for other in others(1):
        row[f"{other.name} of XOR"] = len(other.compress(data, x.dtype.name)) / x.nbytes
    return row


def best(call: Callable[[], object], nbytes: int) -> float:
    """GB/s of the fastest of some calls."""
    call()
    seconds = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return nbytes / 1e9 / min(seconds)


def speeds(base: Array, x: Array) -> dict[str, float]:
    """GB/s of tensor bytes of whole calls on one thread, with checksums and digests."""
    buf = tw.encode(x, "delta", base=base, threads=1)
    packed, out = buf.packed(), np.empty_like(x)
    live = base.copy()
    again = tw.codec("delta", form="overwrite").encode(x, base=base, threads=1).packed()
    found = {
        "copy": best(lambda: np.copyto(out, x), x.nbytes),
        "encode": best(lambda: tw.encode(x, "delta", base=base, out=buf, threads=1), x.nbytes),
        "decode": best(lambda: tw.decode(packed, base=base, out=out, threads=1), x.nbytes),
        "in place, overwrite": best(
            lambda: tw.decode(again, base=live, out=live, threads=1), x.nbytes
        ),
    }
    assert out.tobytes() == x.tobytes()
    assert live.tobytes() == x.tobytes()

    def apply() -> float:
        live[:] = base
        start = time.perf_counter()
        tw.decode(packed, base=live, out=live, threads=1)
        return time.perf_counter() - start

    found["in place"] = x.nbytes / 1e9 / min(apply() for _ in range(REPEAT))
    assert live.tobytes() == x.tobytes()
    return found


def main() -> None:
    """Measure all, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=86, help="steps before those that count")
    parser.add_argument("--masters", type=Path, help="file that keeps the masters, npz")
    options = parser.parse_args()
    torch.set_num_threads(2)
    adam = {}
    for rate, masters in kept(options.masters, options.steps).items():
        for dtype in DTYPES:
            base, x = rounded(masters, dtype)
            if differs(base, x).any():
                adam[f"{dtype}, {rate:g}"] = compared(base, x)
                print(dtype, rate, adam[f"{dtype}, {rate:g}"], flush=True)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "steps": options.steps,
        "adam": adam,
        "synthetic": {f"{share:.0%}": compared(*synthetic(share)) for share in SHARES},
        "otherwise": {name: compared(*tensors) for name, tensors in otherwise().items()},
        "speed": {f"{share:.0%}": speeds(*synthetic(share, SPEED_NELEM)) for share in SHARES}
        | {name: speeds(*tensors) for name, tensors in otherwise(SPEED_NELEM).items()},
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
