"""Encode and decode one array of each library: NumPy, PyTorch, JAX, ml_dtypes, CuPy.

Run it with `python examples/encode_decode.py`. Libraries that are not installed are left out.
"""

import numpy as np

import tightwire as tw

values = np.random.default_rng(0).normal(0, 0.02, (64, 256)).astype(np.float32)
arrays = {"numpy": values}

try:
    import ml_dtypes

    arrays["ml_dtypes"] = values.astype(ml_dtypes.bfloat16)
except ImportError:
    pass

try:
    import torch

    arrays["torch"] = torch.from_numpy(values).bfloat16()
except ImportError:
    pass

try:
    import jax.numpy as jnp

    arrays["jax"] = jnp.asarray(values, jnp.bfloat16)
except ImportError:
    pass

try:
    import cupy

    if cupy.cuda.is_available():
        arrays["cupy"] = cupy.asarray(values)
except ImportError:
    pass

for library, x in arrays.items():
    buffer = tw.encode(x)
    y = tw.decode(buffer)
    assert type(y) is type(x), "the result is of the same library"
    assert y.dtype == x.dtype
    # Bit for bit: compare the bytes that an uncompressed buffer holds.
    assert bytes(tw.encode(y, "raw")) == bytes(tw.encode(x, "raw"))
    # Bytes from a file or a socket become NumPy, or what `like` names.
    assert tw.decode(bytes(buffer)).shape == (64, 256)

    name = f"{library}, {y.dtype}"
    print(f"{name:28} {buffer.nbytes:6} bytes, {buffer.nbytes / y.nbytes:.2f} of the size")
