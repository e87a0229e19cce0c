"""tightwire: any array becomes one self-describing compressed buffer, and comes back."""

from .buffer import Buffer
from .codec import Codec, codec, codecs, decode, encode
from .codecs.base import Key, Plan
from .formats.errors import FormatError
from .formats.header import Header
from .inspection import Info, inspect, verify

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "Codec",
    "FormatError",
    "Header",
    "Info",
    "Key",
    "Plan",
    "codec",
    "codecs",
    "decode",
    "encode",
    "inspect",
    "verify",
]
