"""Lossless and lossy compression of tensors: one self-describing buffer each."""

import importlib
from typing import TYPE_CHECKING, Any

from .buffer import Buffer
from .codec import Codec, codec, codecs, decode, encode
from .codecs.base import Key, Plan
from .error import error
from .files import File, dumps, load_file, loads, save_file
from .files import open_file as open
from .formats.errors import FormatError
from .formats.header import Header
from .inspection import Info, inspect, verify

if TYPE_CHECKING:
    from .adapters import ddp as ddp
    from .adapters import fsdp as fsdp
    from .adapters import tagc as tagc
    from .adapters import tensor_parallel as tensor_parallel
    from .adapters.calls import CollectiveError
    from .adapters.collectives import Communicator
    from .adapters.error_feedback import ErrorFeedback
    from .loading import load_into as load_into

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
    "codecs",
    "decode",
    "dumps",
    "encode",
    "error",
    "inspect",
    "load_file",
    "load_into",
    "loads",
    "open",
    "save_file",
    "verify",
]

#: Names that are imported when they are first asked for, and from which module of adapters.
_LAZY = {
    "CollectiveError": "calls",
    "Communicator": "collectives",
    "ErrorFeedback": "error_feedback",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "tagc": "tagc",
    "tensor_parallel": "tensor_parallel",
}


def __getattr__(name: str) -> Any:
    if name == "load_into":
        from .loading import load_into

        return load_into
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".adapters.{_LAZY[name]}", __name__)
    return module if name == _LAZY[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "load_into"})
