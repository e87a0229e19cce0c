"""Compression of model weights, gradients and KV caches: each tensor becomes one buffer.

Names are imported on first use: ``tightwire --version`` needs none of them.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import ddp as ddp
    from .adapters import fsdp as fsdp
    from .adapters import tagc as tagc
    from .adapters import tensor_parallel as tensor_parallel
    from .adapters.calls import CollectiveError
    from .adapters.collectives import Communicator
    from .adapters.error_feedback import ErrorFeedback
    from .buffer import Buffer
    from .codec import Codec, codec, decode, encode, list_codecs
    from .codecs.common.base import Key, Plan
    from .error import error
    from .files import dumps, load_file, loads, save_file
    from .formats.errors import FormatError
    from .formats.header import Header
    from .inspection import Info, inspect, verify
    from .lazy import File
    from .lazy import open_file as open
    from .loading import load_into
    from .models import load, save
    from .streams import read_buffers

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "Codec",
    "CollectiveError",
    "Communicator",
    "ErrorFeedback",
    "File",
    "FormatError",
    "Header",
    "Info",
    "Key",
    "Plan",
    "codec",
    "decode",
    "dumps",
    "encode",
    "error",
    "inspect",
    "list_codecs",
    "load",
    "load_file",
    "load_into",
    "loads",
    "open",
    "read_buffers",
    "save",
    "save_file",
    "verify",
]

#: The module of each public name, and its name there if it is another.
_HOMES = {
    "Buffer": "buffer",
    "Codec": "codec",
    "CollectiveError": "adapters.calls",
    "Communicator": "adapters.collectives",
    "ErrorFeedback": "adapters.error_feedback",
    "File": "lazy",
    "FormatError": "formats.errors",
    "Header": "formats.header",
    "Info": "inspection",
    "Key": "codecs.common.base",
    "Plan": "codecs.common.base",
    "codec": "codec",
    "decode": "codec",
    "dumps": "files",
    "encode": "codec",
    "error": "error",
    "inspect": "inspection",
    "list_codecs": "codec",
    "load": "models",
    "load_file": "files",
    "load_into": "loading",
    "loads": "files",
    "open": "lazy:open_file",
    "read_buffers": "streams",
    "save": "models",
    "save_file": "files",
    "verify": "inspection",
}
#: Public modules of adapters.
_ADAPTERS = ("ddp", "fsdp", "tagc", "tensor_parallel")


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Whoever imports the submodule `codec` still finds the function `codec` here.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        try:
            return importlib.import_module(f".adapters.{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            text = f"tightwire.{name} needs torch: pip install 'tightwire[torch]'"
            raise ModuleNotFoundError(text, name="torch") from None
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, there = _HOMES[name].partition(":")
    found = getattr(importlib.import_module(f".{home}", __name__), there or name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ADAPTERS})
