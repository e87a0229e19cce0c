"""Compress a model of transformers, and load it by from_pretrained.

Run it with `python examples/transformers_model.py`. It needs `pip install "tightwire[cpu,cli,hf]"`,
and prints how much of the model's size is left.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tightwire.adapters.weights.hugging_face import TightwireConfig

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1000,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
model = LlamaForCausalLM(config).bfloat16()

with tempfile.TemporaryDirectory() as folder:
    plain = Path(folder) / "tiny-llama"
    model.save_pretrained(plain)
    # As on the command line: tightwire compress tiny-llama
    command = [sys.executable, "-m", "tightwire", "compress", str(plain)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    compressed = plain.with_name("tiny-llama.tw")

    loaded = AutoModelForCausalLM.from_pretrained(
        compressed, quantization_config=TightwireConfig(), dtype=torch.bfloat16
    )
    sizes = [
        sum(file.stat().st_size for file in path.glob("*.safetensors"))
        for path in (plain, compressed)
    ]

pairs = zip(model.parameters(), loaded.parameters(), strict=True)
assert all(torch.equal(a, b) for a, b in pairs)
print(f"the model takes {sizes[1] / sizes[0]:.2f} of its size, and has the same weights")
