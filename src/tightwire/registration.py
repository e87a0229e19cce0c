"""Codecs from outside of the library."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from . import engine, planning
from .codec import _plain_codec
from .codecs.common.base import CodecSpec
from .formats.codec_ids import CODEC_IDS, NAMES_BY_ID

#: Ids that the format leaves to everybody: what they mean is not written anywhere.
_PRIVATE = range(32768, 65535)
#: What a module of each backend defines.
_NEEDED = {
    "ref": ("SPEC", "encode_chunk", "decode_chunk"),
    "cpu": ("encode_chunk", "decode_chunk"),
    "triton": ("encode", "decode"),
}


def register_codec(
    reference: ModuleType, *, cpu: ModuleType | None = None, triton: ModuleType | None = None
) -> None:
    """Make a codec from outside known to this process.

    From then on ``tightwire.codec`` finds it by its name, and ``decode`` its buffers. A codec of
    the same name that was registered before is replaced.

    Args:
        reference: Its module in NumPy, with ``SPEC``, ``encode_chunk`` and ``decode_chunk``.
        cpu: Its compiled form, if it has one.
        triton: Its kernels for GPUs, if it has any.

    Raises:
        TypeError: If a module lacks something, or ``SPEC`` is not a subclass of ``CodecSpec``.
        ValueError: If name or id are taken, or the id is not from 32768 to 65534.
    """
    modules: dict[str, Any] = {"ref": reference, "cpu": cpu, "triton": triton}
    for backend, module in modules.items():
        missing = [name for name in _NEEDED[backend] if not hasattr(module, name)]
        if missing and (module is not None or backend == "ref"):
            label = getattr(module, "__name__", type(module).__name__)
            raise TypeError(f"{label} has no {', '.join(missing)}, which {backend!r} needs")
    spec = reference.SPEC
    if not (isinstance(spec, type) and issubclass(spec, CodecSpec)):
        raise TypeError(f"SPEC is {spec!r}; allowed: a subclass of CodecSpec")
    name, number = spec.name, spec.id
    if number not in _PRIVATE:
        raise ValueError(f"id of {name!r} is {number}; allowed: 32768 to 65534")
    if name in CODEC_IDS and CODEC_IDS[name][0] not in _PRIVATE:
        raise ValueError(f"{name!r} is a codec of the library; allowed: other names")
    if NAMES_BY_ID.get(number, name) != name:
        raise ValueError(f"id {number} is that of {NAMES_BY_ID[number]!r}; allowed: one of its own")
    if name in CODEC_IDS:
        del NAMES_BY_ID[CODEC_IDS[name][0]]
    CODEC_IDS[name] = (number, name)
    NAMES_BY_ID[number] = name
    stem = f"tightwire.codecs.{name}"
    for backend, module in modules.items():
        key = stem if backend == "ref" else f"{stem}_{backend}"
        sys.modules.pop(key, None)
        if module is not None:
            sys.modules[key] = module
    forget()


def forget() -> None:
    """Drop what was found by names and ids of codecs."""
    for found in (
        planning._spec_class,
        planning._backend_module,
        planning.device_module,
        _plain_codec,
        engine._cached_header_and_plan,
        engine._small,
    ):
        found.cache_clear()
