"""tightwire: any array becomes one self-describing compressed buffer, and comes back."""

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
    from .adapters.calls import CollectiveError
    from .adapters.collectives import Communicator

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "Codec",
    "CollectiveError",
    "Communicator",
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
    "loads",
    "open",
    "save_file",
    "verify",
]


def __getattr__(name: str) -> Any:
    """What belongs to the collectives is imported when it is first asked for."""
    if name in ("CollectiveError", "Communicator"):
        from .adapters import calls, collectives

        return getattr(calls if name == "CollectiveError" else collectives, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
