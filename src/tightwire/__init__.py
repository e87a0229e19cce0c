"""tightwire: any array becomes one self-describing compressed buffer, and comes back."""

from .buffer import Buffer
from .codec import Codec, codec, codecs, decode, encode
from .codecs.base import Key, Plan
from .files import File, load_file, save_file
from .files import open_file as open
from .formats.errors import FormatError
from .formats.header import Header
from .inspection import Info, inspect, verify

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "Codec",
    "File",
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
    "load_file",
    "open",
    "save_file",
    "verify",
]
