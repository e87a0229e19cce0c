"""Which module may import which: formats <- codecs <- core <- adapters, and programs on top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tightwire.formats.codec_ids import CODEC_IDS

ROOT = Path(__file__).resolve().parents[2]
#: Folders by the package that each one becomes.
PACKAGES = {
    "tightwire.formats": ROOT / "formats",
    "tightwire.codecs": ROOT / "codecs",
    "tightwire.codecs.common": ROOT / "codecs" / "common",
    "tightwire.adapters": ROOT / "adapters",
    **{
        f"tightwire.adapters.{folder.name}": folder
        for folder in sorted((ROOT / "adapters").iterdir())
        if folder.is_dir() and folder.name != "__pycache__"
    },
    "tightwire.commands": ROOT / "src" / "tightwire" / "commands",
    "tightwire": ROOT / "src" / "tightwire",
}
MODULES = {
    package if path.stem == "__init__" else f"{package}.{path.stem}": path
    for package, folder in PACKAGES.items()
    for path in sorted(folder.glob("*.py"))
}
STEMS = {stem for _, stem in CODEC_IDS.values()}
PROGRAMS = {f"tightwire.{name}" for name in ("__main__", "bench", "cli", "demo", "doctor")}
_LIBRARY = ("formats", "common", "codecs", "core")
#: Layers that a layer may import, itself included. A stem of codecs is a layer of its own.
BELOW = {
    "formats": {"formats"},
    "common": {"formats", "common"},
    "core": {"formats", "common", "codecs", "core"},
    "adapters": {*_LIBRARY, "adapters"},
    "transports": {*_LIBRARY, "adapters", "transports"},
    "collectives": {*_LIBRARY, "adapters", "transports", "collectives"},
    "training": {*_LIBRARY, "adapters", "transports", "collectives", "weights", "training"},
    "weights": {*_LIBRARY, "adapters", "transports", "collectives", "weights"},
}


def layer_of(module: str) -> str:
    """The layer of a module; of a codec's modules its stem."""
    package, _, name = module.rpartition(".")
    if package == "tightwire.codecs":
        return max((s for s in STEMS if f"{name}_".startswith(f"{s}_")), key=len)
    if module == "tightwire":
        return "facade"
    if module in PROGRAMS or "tightwire.commands" in (package, module):
        return "programs"
    return "core" if package == "tightwire" else package.rpartition(".")[2]


def allowed(layer: str, other: str) -> bool:
    """Whether modules of `layer` may import modules of `other`."""
    if layer in ("facade", "programs"):
        return True
    if layer in STEMS:
        return other in ("formats", "common", layer)
    return ("codecs" if other in STEMS else other) in BELOW[layer]


def imported(module: str, source: str) -> Iterator[str]:
    """Modules of tightwire that `module` imports, within functions and for type checkers too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module if module in PACKAGES else module.rpartition(".")[0]
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            home = ".".join([*(parts if node.level else []), *filter(None, [node.module])])
            inner = [f"{home}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else home for name in inner]
        else:
            continue
        yield from (name for name in names if name in MODULES)


def forbidden(module: str, source: str) -> list[str]:
    """What `module` imports and may not."""
    layer = layer_of(module)
    return sorted({m for m in imported(module, source) if not allowed(layer, layer_of(m))})


def test_every_stem_has_its_modules() -> None:
    assert {layer_of(m) for m in MODULES} >= {*STEMS, *BELOW, "programs", "facade"}
    assert all(f"tightwire.codecs.{stem}" in MODULES for stem in STEMS)


def test_imports_run_one_way() -> None:
    found = {module: forbidden(module, path.read_text()) for module, path in MODULES.items()}
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


@pytest.mark.fast_cases(11)
@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("tightwire.formats.header", "from ..codecs.common import base", "codecs.common.base"),
        ("tightwire.codecs.mx", "from ..buffer import Buffer", "buffer"),
        ("tightwire.codecs.thc_triton", "from .sdp4bit import FLOOR", "codecs.sdp4bit"),
        ("tightwire.codecs.common.norms", "from ..thc import BLOCK", "codecs.thc"),
        ("tightwire.codecs.common.norms", "from .. import thc", "codecs.thc"),
        (
            "tightwire.files",
            "def f():\n    from .adapters.collectives import cost",
            "adapters.collectives.cost",
        ),
        ("tightwire.files", "import tightwire.bench", "bench"),
        (
            "tightwire.adapters.collectives.cost",
            "from ...commands.output import say",
            "commands.output",
        ),
        ("tightwire.codecs.zipccl_batch_triton", "from .zipccl_triton import f", None),
        ("tightwire.cli", "from .adapters import cost", None),
        (
            "tightwire.adapters.collectives.cost",
            "from ..training import fsdp",
            "adapters.training.fsdp",
        ),
    ],
)
def test_imports_that_run_the_other_way(module: str, line: str, wrong: str | None) -> None:
    assert forbidden(module, line) == ([] if wrong is None else [f"tightwire.{wrong}"])


def test_kernels_have_few_parameters() -> None:
    numbers = {}
    for module, path in MODULES.items():
        if module.endswith("_triton"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.decorator_list:
                    numbers[f"{module}.{node.name}"] = len(node.args.args)
    assert len(numbers) > 300
    assert {name: n for name, n in numbers.items() if n > 24} == {}
