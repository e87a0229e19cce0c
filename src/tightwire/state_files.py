"""Files of the tensors of a state, whole or as what changed since another one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .codec import Codec
from .codecs.common.base import Bits
from .file_tensors import Tensors
from .files import Draft, Plain, bases_of, encode_jobs, stored_plain, write_container
from .formats.container import TIED_KEY, BaseNote, compressed_metadata, tied_text
from .formats.dtypes import DType
from .pipeline import Memory, in_order
from .planning import backend_for_once, make_plan
from .state_tensors import State, bytes_of, memory_key
from .storage import atomic_file, remove_leftovers


def write_state(
    path: Path,
    state: State,
    codec: Codec,
    metadata: Mapping[str, str],
    delta: Codec | None = None,
    old: Tensors | None = None,
    chain: BaseNote | None = None,
    *,
    threads: int = 1,
) -> None:
    """Write the file of a state; it appears atomically. A link in its place is refused.

    With `delta` and `old` tensors that `old` has too are coded against its, where that takes fewer
    bytes, and `chain` is what the file says of its base. `metadata` is stored as it is. Raises
    OSError, TypeError, ValueError, and FormatError if `old` is damaged.
    """
    draft = Draft(metadata=compressed_metadata({}), base=chain)
    draft.metadata.update(metadata)
    known = {} if old is None else {name: old.kind(name) for name in old.names}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name in state.names:
        stored = first.setdefault(memory_key(state, name), name)
        if stored != name:
            tied[name] = stored
            continue
        dtype, shape = state.kind(name)
        if not isinstance(dtype, DType) or stored_plain(dtype, shape):
            label = dtype.safetensors or "" if isinstance(dtype, DType) else dtype
            draft.add(name, Plain(label, shape, partial(bytes_of, state, name)))
            continue
        same = delta is not None and known.get(name) == (dtype, shape)
        same = same and delta is not None and dtype.name in delta.dtypes
        chosen = delta if same and delta is not None else codec
        draft.add(name, make_plan(chosen.spec, dtype, shape, None))
    if tied:
        draft.metadata[TIED_KEY] = tied_text(tied)

    def elements(part: Sequence[str], memory: Memory) -> Iterator[Bits]:
        for name in part:
            yield state.bits(name)

    def needed(name: str) -> int:
        plan = draft.plans[name]
        return plan.nelem * plan.dtype.itemsize * (3 if plan.needs_base else 1)

    backend = backend_for_once(draft.plans.values())
    jobs = encode_jobs(draft.plans, elements, needed, backend, bases_of(draft, old, codec))
    remove_leftovers([path], time.time_ns())
    with atomic_file(path, follow=False) as file, in_order(jobs, threads) as buffers:
        write_container(file, draft, buffers)
