"""Every public name is on a page of the API reference."""

from __future__ import annotations

import re

import pytest

import tightwire
from doc_pages import DOCS
from tightwire.formats.codec_ids import CODEC_IDS

PAGES = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
DOCUMENTED = set(re.findall(r"^ *\.\. auto\w+:: (\S+)", PAGES, re.M))


@pytest.mark.parametrize("name", tightwire.__all__)
def test_public_name_has_an_entry(name: str) -> None:
    assert f"tightwire.{name}" in DOCUMENTED


@pytest.mark.parametrize("name", CODEC_IDS)
def test_codec_has_an_entry(name: str) -> None:
    assert any(entry.startswith(f"tightwire.codecs.{name}.") for entry in DOCUMENTED)


@pytest.mark.parametrize(
    "module",
    [
        *(f"training.{name}" for name in ("ddp", "fsdp", "moe", "tagc", "tensor_parallel")),
        "training.sharded",
        "weights.hugging_face",
    ],
)
def test_module_of_adapters_has_an_entry(module: str) -> None:
    assert f"tightwire.adapters.{module}" in DOCUMENTED
