"""A codec of your own on top of the library's: a transform before, its inverse behind.

Run it with `python examples/your_own_codec.py`. Activations of language models have a few channels
that are much larger than the others. In a 4-bit format such a channel costs its neighbours their
precision, as they share a scale. Dividing every channel by a power of two of its own mends that.

A new wire id is a change in the library itself, not in a program that uses it: CONTRIBUTING.md
says how. What a program can do is what this one does. The two parts travel as ordinary buffers,
one behind the other, with all their checks.
"""

import io
from dataclasses import dataclass

import numpy as np

import tightwire as tw


@dataclass(frozen=True)
class ScaledChannels:
    """Divides channels (the last dimension) by powers of two, then encodes with `inner`."""

    inner: tw.Codec

    def encode(self, x: np.ndarray) -> bytes:
        """The scales and the scaled array, two buffers, as bytes."""
        largest = np.abs(x.reshape(-1, x.shape[-1])).max(axis=0)
        # float32 has no power of two for 0: such a channel keeps its zeros.
        exponents = np.frexp(np.where(largest > 0, largest, 1))[1].astype(np.int16)
        scaled = np.ldexp(x, -exponents)
        return bytes(tw.encode(exponents, "raw")) + bytes(self.inner.encode(scaled))

    def decode(self, data: bytes) -> np.ndarray:
        """The array; FormatError for damaged bytes."""
        buffers = tw.read_buffers(io.BytesIO(data))
        exponents, scaled = (tw.decode(buffer) for buffer in buffers)
        return np.ldexp(scaled, exponents)


rng = np.random.default_rng(0)
x = rng.standard_normal((64, 256)).astype(np.float32)
x[:, ::40] *= 100

plain = tw.codec("mx", element="e2m1")
codec = ScaledChannels(plain)
data = codec.encode(x)

# The error of the ordinary channels is what the large ones spoil.
ordinary = np.arange(256) % 40 != 0
before = tw.error(x[:, ordinary], tw.decode(plain.encode(x))[:, ordinary]).vnmse
after = tw.error(x[:, ordinary], codec.decode(data)[:, ordinary]).vnmse
assert after < before / 4

damaged = bytearray(data)
damaged[len(data) // 2] ^= 1
try:
    reason = str(codec.decode(bytes(damaged)))
except tw.FormatError as error:
    reason = error.reason
assert reason == "checksum_mismatch"

print(f"vNMSE of ordinary channels {before:.3f}, with scales {after:.3f}; {len(data)} bytes")
