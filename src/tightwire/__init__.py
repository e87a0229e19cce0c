"""Compression of model weights, gradients and KV caches: each tensor becomes one buffer.

Names are imported on first use: ``tightwire --version`` needs none of them.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import delta_folders as delta_folders
    from .adapters.collectives import process_group as process_group
    from .adapters.collectives.communicator import Communicator
    from .adapters.collectives.nodes import NodeCommunicator
    from .adapters.errors import CollectiveError
    from .adapters.training import ddp as ddp
    from .adapters.training import fsdp as fsdp
    from .adapters.training import moe as moe
    from .adapters.training import pipeline as pipeline
    from .adapters.training import surviving as surviving
    from .adapters.training import tagc as tagc
    from .adapters.training import tensor_parallel as tensor_parallel
    from .adapters.training.error_feedback import ErrorFeedback
    from .adapters.transports.together import fail_together
    from .adapters.weights import dcp as dcp
    from .adapters.weights.transfer import publish, subscribe
    from .buffer import Buffer
    from .codec import Codec, codec, encode, list_codecs
    from .codecs.common.base import Key, Plan
    from .decoding import decode
    from .delta_apply import apply_delta, load_delta, prepare_delta
    from .delta_directory import fold_deltas, prune_deltas, save_delta
    from .error import error
    from .files import dumps, load_file, loads, save_file
    from .folding import fold
    from .formats.errors import FormatError
    from .formats.header import Header
    from .inspection import Info, inspect, verify
    from .lazy import File
    from .lazy import open_file as open
    from .loading import load_into
    from .many import decode_many, decode_sum
    from .models import load, save
    from .registration import register_codec
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
    "NodeCommunicator",
    "Plan",
    "apply_delta",
    "codec",
    "decode",
    "decode_many",
    "decode_sum",
    "dumps",
    "encode",
    "error",
    "fail_together",
    "fold",
    "fold_deltas",
    "inspect",
    "list_codecs",
    "load",
    "load_delta",
    "load_file",
    "load_into",
    "loads",
    "open",
    "prepare_delta",
    "prune_deltas",
    "publish",
    "read_buffers",
    "register_codec",
    "save",
    "save_delta",
    "save_file",
    "subscribe",
    "verify",
]

#: The module of each public name, and its name there if it is another.
_HOMES = {
    "Buffer": "buffer",
    "Codec": "codec",
    "CollectiveError": "adapters.errors",
    "Communicator": "adapters.collectives.communicator",
    "NodeCommunicator": "adapters.collectives.nodes",
    "ErrorFeedback": "adapters.training.error_feedback",
    "File": "lazy",
    "FormatError": "formats.errors",
    "Header": "formats.header",
    "Info": "inspection",
    "Key": "codecs.common.base",
    "Plan": "codecs.common.base",
    "apply_delta": "delta_apply",
    "codec": "codec",
    "decode": "decoding",
    "decode_many": "many",
    "decode_sum": "many",
    "dumps": "files",
    "encode": "codec",
    "error": "error",
    "fail_together": "adapters.transports.together",
    "fold": "folding",
    "fold_deltas": "delta_directory",
    "inspect": "inspection",
    "list_codecs": "codec",
    "load": "models",
    "load_delta": "delta_apply",
    "load_file": "files",
    "load_into": "loading",
    "loads": "files",
    "open": "lazy:open_file",
    "prepare_delta": "delta_apply",
    "prune_deltas": "delta_directory",
    "publish": "adapters.weights.transfer",
    "read_buffers": "streams",
    "register_codec": "registration",
    "save": "models",
    "save_delta": "delta_directory",
    "save_file": "files",
    "subscribe": "adapters.weights.transfer",
    "verify": "inspection",
}
#: Public modules, and where they are.
_MODULES = {
    "codecs": "codecs",
    "dcp": "adapters.weights.dcp",
    "ddp": "adapters.training.ddp",
    "delta_folders": "delta_folders",
    "fsdp": "adapters.training.fsdp",
    "moe": "adapters.training.moe",
    "pipeline": "adapters.training.pipeline",
    "prepared": "prepared",
    "process_group": "adapters.collectives.process_group",
    "surviving": "adapters.training.surviving",
    "tagc": "adapters.training.tagc",
    "tensor_parallel": "adapters.training.tensor_parallel",
}


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Whoever imports the submodule `codec` still finds the function `codec` here.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        try:
            return importlib.import_module(f".{_MODULES[name]}", __name__)
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
    return sorted({*globals(), *_HOMES, *_MODULES})
