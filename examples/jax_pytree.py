"""Save a JAX pytree to a file, and load it as JAX arrays.

Run it with `python examples/jax_pytree.py`. It prints the size of the file beside that of the
arrays.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import tightwire as tw


def layer(key: jax.Array) -> dict[str, jax.Array]:
    """Parameters of one layer."""
    weight = 0.02 * jax.random.normal(key, (256, 256), jnp.bfloat16)
    return {"weight": weight, "bias": jnp.zeros(256, jnp.bfloat16)}


keys = jax.random.split(jax.random.key(0), 2)
state = {"layers": [layer(key) for key in keys], "step": 3, "name": "demo"}

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "state.tw.safetensors"
    # Dicts, lists, tuples, text and numbers come back as they were saved.
    tw.save_file(state, path)
    loaded = tw.load_file(path, like="jax")
    size = path.stat().st_size

assert jax.tree.structure(loaded) == jax.tree.structure(state)
assert loaded["step"] == 3
for x, y in zip(jax.tree.leaves(state["layers"]), jax.tree.leaves(loaded["layers"]), strict=True):
    assert isinstance(y, jax.Array)
    assert y.dtype == x.dtype
    assert jnp.array_equal(x, y)
nbytes = sum(x.nbytes for x in jax.tree.leaves(state["layers"]))
print(f"{size} bytes in the file for {nbytes} bytes of arrays")
