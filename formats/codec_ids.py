"""Codec names, wire ids and the module stem that implements each. An id never changes meaning."""

from __future__ import annotations

#: name -> (wire id, module stem in codecs/). Adding a codec adds a line here.
CODEC_IDS = {
    "raw": (1, "raw"),
    "zipccl": (2, "zipccl"),
    "mx": (3, "mx"),
    "nvfp4": (4, "nvfp4"),
    "taco": (5, "taco"),
    "sdp4bit": (6, "sdp4bit"),
    "tahquant": (7, "tahquant"),
    "dynamiq": (8, "dynamiq"),
    "thc": (9, "thc"),
    "omnireduce": (10, "omnireduce"),
    "lhc": (11, "lhc"),
    "huffman": (12, "huffman"),
    "delta": (13, "delta"),
}
NAMES_BY_ID = {codec_id: name for name, (codec_id, _) in CODEC_IDS.items()}
