"""The screen of `tightwire` alone. It needs no package: it has to be there before click is."""

from __future__ import annotations

from .. import __version__
from .output import say

_SCREEN = f"""\
tightwire {__version__}: lossless compression for model weights, gradients and KV caches

Try these, with a safetensors file of yours for model.safetensors:

  tightwire compress model.safetensors      make model.tw.safetensors, a smaller file
  tightwire inspect model.tw.safetensors    show its tensors and where the bytes go
  tightwire diff model.safetensors model.tw.safetensors    see that no bit differs
  tightwire doctor                          show what works on this machine

In Python:  import tightwire as tw;  buf = tw.encode(x);  y = tw.decode(buf)

Help:  tightwire --help lists the commands; tightwire COMMAND --help explains one, with examples
"""


def welcome() -> None:
    """Print what a newcomer can do."""
    say(*_SCREEN.splitlines())
