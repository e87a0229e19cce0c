"""Two buffers with bases, one after the other, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import engine
from .arguments import base_of_buffer, source_target, thread_count
from .buffer import Buffer, parsed_source
from .codecs.common.base import Bits, Bytes, Chunk, ChunkResult, Plan
from .codecs.delta import BadTileError, Delta, index_of
from .codecs.delta_fold import fold_chunk
from .engine import Parsed, load_raw
from .formats.errors import FormatError
from .formats.header import RAW
from .planning import backend_module, make_plan


def fold(first: Any, second: Any, *, base: Any = None, threads: int | None = None) -> Buffer:
    """Make one buffer of two that follow each other: what ``second`` makes of ``first``.

    Buffers of the form ``"overwrite"`` fold without the base. Elements that the second sets back
    are then still in the result, and other encoders would write fewer bytes. With ``base`` the
    bytes are those of encoding against it, whatever the form.

    Either may be of codec ``raw``, as ``delta`` encodes tensors of up to 128 bytes. Without a base
    the result is then too.

    Args:
        first: A buffer of codec ``delta`` or ``raw``, as in ``tightwire.decode``.
        second: One that was encoded against the result of the first: with the same parameters,
            dtype, shape and number of chunks.
        base: The base of the first. Needed unless the form is ``"overwrite"``, and where the
            result is so long that it has to be stored raw, or a tile of it plain; not if one of the
            buffers is of ``raw``.
        threads: As in ``encode``.

    Returns:
        The buffer.

    Raises:
        FormatError: If one of them is damaged; with the reason ``"base_mismatch"`` if the second
            was encoded against another tensor than the first makes, or ``base`` is the wrong one.
        TypeError: If an argument has a wrong type.
        ValueError: If the buffers do not go together, or a base is needed.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> versions = [np.arange(1000) for _ in range(3)]
        >>> versions[1][5], versions[2][5:7] = 0, 1
        >>> codec = tw.codec("delta", form="overwrite")
        >>> steps = [codec.encode(versions[i + 1], base=versions[i]) for i in range(2)]
        >>> both = tw.fold(*steps)
        >>> bool((tw.decode(both, base=versions[0]) == versions[2]).all())
        True
    """
    buffers = [parsed_source(src, None) for src in (first, second)]
    plan = buffers[0].plan
    for i, found in enumerate(buffers):
        if found.plan.codec.name not in ("delta", "raw"):
            raise ValueError(f"buffer {i} is of {found.plan.codec.name}; allowed: delta, raw")
    specs = {found.plan.codec for found in buffers if found.plan.needs_base}
    if len(specs) > 1 or _alike(buffers[0]) != _alike(buffers[1]):
        raise ValueError("the buffers differ in form, dtype, shape, chunks or checksums")
    for i, found in enumerate(buffers):
        try:
            engine.check_chunks(found)
        except FormatError as error:
            raise error.of_buffer(i) from None
    whole = [found for found in buffers if not found.plan.needs_base]
    if not whole:
        _check_order(buffers[0], buffers[1])
    n_threads = thread_count(threads)
    spec = next(iter(specs), plan.codec)
    if base is None and whole:
        spec = whole[0].plan.codec
        if not buffers[1].plan.needs_base:
            # The first cannot be decoded, and need not be.
            buffers = buffers[1:]
    plan = make_plan(spec, plan.dtype, plan.shape, plan.chunks, checksum=plan.checksum)
    out = np.empty(plan.nbytes, np.uint8)
    given = None if base is None else base_of_buffer(plan, base)
    if given is not None and buffers[0].plan.needs_base:
        _check_base(buffers[0], given, n_threads)
    if given is not None or whole:
        bits = given
        for found in buffers:
            after = np.empty(plan.nelem, plan.dtype.bits)
            engine.decode_range(found, after, 0, threads=n_threads, base=bits)
            bits = after
        assert bits is not None
        engine.encode_into(plan, bits, out, threads=n_threads, base=given)
    else:
        if not isinstance(spec, Delta) or spec.form != "overwrite":
            form = getattr(spec, "form", "difference")
            raise ValueError(f"buffers of the form {form!r} fold against a base. Needed: base")
        _fold_into(plan, out, buffers, n_threads)
    return Buffer(plan, out, source_target(first))


def _alike(parsed: Parsed) -> tuple[Any, ...]:
    plan = parsed.plan
    return plan.dtype, plan.shape, plan.chunks, plan.checksum


def _check_order(first: Parsed, second: Parsed) -> None:
    """FormatError unless the second was encoded against what the first makes."""
    for i in range(first.plan.chunks):
        if (first.records[i].flags | second.records[i].flags) & RAW:
            continue
        made = index_of(first.chunk(i)).digests[1]
        if made != index_of(second.chunk(i)).digests[0]:
            detail = f"chunk {i} of the second buffer does not follow that of the first"
            raise FormatError("base_mismatch", detail)


def _check_base(first: Parsed, base: Bits, threads: int) -> None:
    """FormatError unless the first was encoded against this base.

    To overwrite, its result will do as well, but a fold starts from the base.
    """
    plan = first.plan
    assert isinstance(plan.codec, Delta)
    module, strict = backend_module(plan.codec.name, None), replace(plan.codec, form="difference")
    for i in range(plan.chunks):
        if first.records[i].flags & RAW:
            continue
        chunk, start = first.chunk(i), i * plan.chunk_nelem
        if not module.base_fits(strict, chunk, base[start : start + chunk.nelem], threads):
            detail = f"chunk {i} of the first buffer was encoded against another base"
            raise FormatError("base_mismatch", detail)


def _fold_into(plan: Plan, out: Bytes, buffers: Sequence[Parsed], threads: int) -> None:
    first, second = buffers
    known: dict[int, Bits] = {}

    def fold_one(i: int, chunk: Chunk) -> ChunkResult:
        known_bits = _raw_elements(first, second, i, threads)
        if known_bits is not None:
            known[i] = known_bits
            # More than the raw bytes: they are stored.
            return ChunkResult(plan.raw_dynamic(i) + 1)
        try:
            folded = fold_chunk(chunk, first.chunk(i), second.chunk(i))
        except BadTileError as problem:
            raise FormatError("bad_payload", f"chunk {i}: {problem}") from None
        if folded.dynamic_nbytes > plan.raw_dynamic(i):
            raise ValueError(f"chunk {i} has to be stored raw. Needed: base")
        return folded

    module = backend_module(plan.codec.name, "ref")
    engine.write_chunks(plan, out, module, range(plan.chunks), fold_one, known.__getitem__)


def _raw_elements(first: Parsed, second: Parsed, i: int, threads: int) -> Bits | None:
    """The elements of a chunk of the result where one of the buffers has a chunk stored raw."""
    raw = [bool(found.records[i].flags & RAW) for found in (first, second)]
    if not any(raw):
        return None
    source = second if raw[1] else first
    chunk = source.chunk(i)
    bits = np.empty(chunk.nelem * chunk.dtype.itemsize, np.uint8)
    load_raw(chunk, bits, 0)
    elements: Bits = bits.view(chunk.dtype.bits)
    if raw[1]:
        return elements
    spec, module = second.plan.codec, backend_module(second.plan.codec.name, None)
    if not module.base_fits(spec, second.chunk(i), elements, threads):
        raise FormatError("base_mismatch", f"chunk {i} of the second buffer does not follow")
    after = np.empty_like(elements)
    decoded = module.decode_chunk(spec, second.chunk(i), after, base=elements, threads=threads)
    engine.raise_problem(i, decoded.problem)
    return after
