"""The warning that tells users when kernels are being compiled, which takes seconds."""

from __future__ import annotations

import logging

from ...formats.codec_ids import CODEC_IDS

_STEMS = {stem for _, stem in CODEC_IDS.values()}
_announced: set[str] = set()


def announce(module: str, where: str) -> None:
    """Log that kernels of `module`, as "tightwire.codecs.mx_cpu", are being compiled.

    The record is of level INFO, of the logger "tightwire": one for each codec and backend in each
    process. Of kernels that codecs share there is one where nothing else has been said. `where`
    says where compiled kernels are kept.
    """
    name = module.rpartition(".")[2]
    stem, _, backend = name.rpartition("_")
    if name in _announced or (_announced and stem not in _STEMS):
        return
    _announced.add(name)
    logging.getLogger("tightwire").info(
        "compiling the kernels of %s (backend %s), at the first call for a dtype; they are kept in "
        "%s for later processes",
        stem if stem in _STEMS else "several codecs",
        backend,
        where,
    )
