"""Every public name is documented, in the field's words."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tightwire
from docs.forbidden_words import forbidden_words
from tightwire.formats.codec_ids import CODEC_IDS

ROOT = Path(tightwire.__file__).parent
#: Public modules and their public names; None: all names without an underscore.
MODULES: dict[str, tuple[str, ...] | None] = {
    "adapters.collectives.auto_scale": None,
    "adapters.collectives.calls": ("TraceRecord",),
    "adapters.errors": None,
    "adapters.collectives.cost": None,
    "adapters.training.ddp": None,
    "adapters.collectives.all_to_all_v": ("Received", "DynamicAllToAll", "FixedRateAllToAll"),
    "adapters.training.fsdp": None,
    "adapters.training.layers": None,
    "adapters.training.moe": None,
    "adapters.transports.threads": None,
    "adapters.transports.mpi": None,
    "adapters.transports.nccl": None,
    "adapters.training.sharded": None,
    "adapters.training.pipeline": None,
    "adapters.collectives.running": (
        "RunningCall",
        "running_calls",
        "dump_calls",
        "dump_on_signal",
    ),
    "adapters.collectives.policy": ("Policy", "Rule"),
    "adapters.collectives.process_group": ("TightwireGroup", "create", "policy", "set_policy"),
    "adapters.collectives.simulate": None,
    "adapters.training.sketches": ("Tagc", "Report", "State"),
    "adapters.training.tagc": None,
    "adapters.training.tensor_parallel": None,
    "adapters.transports.torch_dist": None,
    "adapters.transports.base": ("Transport",),
    "adapters.transports.ucx": None,
    "adapters.weights.dcp": None,
    "adapters.weights.hugging_face": None,
    "adapters.weights.transfer": ("Publisher", "Subscriber"),
    "codecs.common.base": (
        "CodecSpec",
        "Layout",
        "ScaleBytes",
        "Chunk",
        "ChunkResult",
        "ChunkDecoded",
    ),
    "codecs.common.params": ("choice", "fraction", "integer"),
    "codecs.common.sections": ("Array",),
    "delta_apply": ("Update",),
    "delta_folders": ("save", "apply", "decompressor"),
    "error": None,
    "prepared": (
        "Terms",
        "prepare_encode",
        "prepare_encode_many",
        "prepare_decode",
        "prepare_decode_many",
        "prepare_decode_sum",
        "prepare_encode_sum",
    ),
    "formats.header": ("Header", "Peek", "Section"),
    "homomorphic": None,
    "loading": ("IncompatibleKeys",),
    "lazy": ("LazyTensor",),
    "local_top": None,
    "sparsify": ("sparsify",),
    "torch_ops": None,
}
#: What raises nothing of its own: public names, or methods of that name in any class.
RAISES_NOTHING = {
    "adapters.collectives.auto_scale:Scaling.travelling",
    "adapters.collectives.auto_scale:Scaling.count",
    "adapters.collectives.auto_scale:Scaling.load_state_dict",
    "adapters.collectives.auto_scale:Scaling.widen",
    "adapters.collectives.communicator:Communicator.refusal",
    "adapters.collectives.cost:Line.seconds",
    "adapters.collectives.cost:Line.times",
    "adapters.collectives.cost:Link.exchange",
    "adapters.collectives.cost:Link.seconds",
    "adapters.collectives.cost:Link.times",
    "adapters.collectives.cost:Model.compressed",
    "adapters.collectives.cost:Node.share",
    "adapters.collectives.cost:Node.within",
    "adapters.collectives.cost:Ratios.ratio",
    "adapters.collectives.cost:Ratios.update",
    "adapters.collectives.cost:duration",
    "adapters.collectives.cost:expected_ratio",
    "adapters.errors:described",
    "adapters.training.error_feedback:ErrorFeedback.add",
    "adapters.training.error_feedback:ErrorFeedback.keep",
    "adapters.training.fsdp:DifferenceGather.named",
    "adapters.training.fsdp:Hooks.remove",
    "adapters.training.fsdp:ReduceScatter.mean_over",
    "adapters.weights.hugging_face:TightwireQuantizer.is_serializable",
    "adapters.transports.nccl:Nccl.unique_id",
    "adapters.transports.torch_dist:TorchDist.cut",
    "adapters.transports.torch_dist:TorchDist.tellings",
    "adapters.collectives.nodes:NodeCommunicator.refusal",
    "adapters.collectives.policy:Policy.all_to_alls",
    "adapters.collectives.policy:Policy.number",
    "adapters.collectives.policy:Rule.applies",
    "adapters.collectives.process_group:TightwireGroup.get_group_store",
    "adapters.collectives.process_group:TightwireGroup.shutdown",
    "adapters.collectives.running:dump_calls",
    "adapters.collectives.running:running_calls",
    "adapters.collectives.simulate:error_butterfly",
    "adapters.collectives.simulate:error_ring",
    "adapters.collectives.simulate:error_two_shot",
    "adapters.collectives.simulate:rounding_error",
    "adapters.training.pipeline:Message",
    "adapters.training.pipeline:Messages.encode",
    "adapters.training.pipeline:Messages.memory_for",
    "adapters.training.sketches:State",
    "adapters.training.sketches:State.note",
    "adapters.training.sketches:State.warn",
    "adapters.training.sketches:Tagc.codec",
    "adapters.training.sketches:Tagc.obstacle",
    "adapters.training.sketches:Tagc.pays",
    "adapters.training.sketches:Tagc.share_zeroed",
    "adapters.training.sketches:Tagc.unfit",
    "adapters.training.tagc:ReduceScatter.mean",
    "adapters.training.tagc:ReduceScatter.unit",
    "adapters.training.tagc:Hooks.remove",
    "homomorphic:Sketched.report_to",
    "homomorphic:diagnosis_of",
    "abort",
    "allocate",
    "as_dict",
    "buffer:Buffer.zero_slack",
    "close",
    "codec:list_codecs",
    "delta_apply:Update.drop",
    "codecs.common.base:CodecSpec.bind",
    "codecs.common.base:CodecSpec.fuses",
    "codecs.common.base:CodecSpec.layout",
    "codecs.common.base:CodecSpec.max_chunk_nelem",
    "codecs.common.base:CodecSpec.measure",
    "codecs.common.base:CodecSpec.pack_params",
    "codecs.common.base:CodecSpec.remark",
    "codecs.common.base:CodecSpec.gaps",
    "codecs.common.base:CodecSpec.scratch_nbytes",
    "codecs.common.base:CodecSpec.static_arrays",
    "codecs.common.base:CodecSpec.static_used",
    "codecs.common.base:CodecSpec.tail",
    "codecs.common.base:Plan.chunk",
    "codecs.common.base:Plan.chunk_range",
    "codecs.common.base:Plan.fuses",
    "codecs.common.base:Plan.identity_term",
    "codecs.common.base:Plan.raw_dynamic",
    "codecs.common.base:Plan.static_range",
    "codecs.common.params:choice",
    "codecs.common.params:fraction",
    "codecs.common.params:integer",
    "delta_apply:Update",
    "empty",
    "formats.errors:FormatError.of_buffer",
    "formats.header:Header.pack",
    "homomorphic:Sketched.counts",
    "homomorphic:Sketched.diagnosis",
    "inspection:Info.chunk_parts",
    "inspection:Info.parts",
    "reset",
    "state_dict",
    "trace",
}
FOLDERS = (
    "",
    "adapters",
    "adapters/collectives",
    "adapters/training",
    "adapters/transports",
    "adapters/weights",
    "codecs",
    "codecs/common",
    "commands",
    "formats",
)
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).glob("*.py"))
#: Kernels, whose docstrings have the words of processors: a lane of a vector is one.
KERNELS = ("_cpu", "_triton")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note):$", re.M)
_ENTRY = re.compile(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?:", re.M)
_SINGLE_BACKTICK = re.compile(r"(?<![`:])`[^`]")

Definition = ast.ClassDef | ast.FunctionDef


class Name(NamedTuple):
    """A public class, function or method: where it is, its source, and what is written of it."""

    at: str
    node: Definition
    doc: str
    parameters: tuple[str, ...]

    def sections(self) -> dict[str, str]:
        """The text of each section; of methods that override others, of all of them."""
        _, *parts = _SECTION.split(self.doc)
        found: dict[str, str] = {}
        for title, text in zip(parts[::2], parts[1::2], strict=True):
            found[title] = found.get(title, "") + text
        return found

    def is_property(self) -> bool:
        return any("property" in ast.unparse(d) for d in self.node.decorator_list)


@functools.cache
def source(file: Path) -> str:
    return file.read_text()


@functools.cache
def definitions(file: Path) -> dict[str, Definition]:
    body = ast.parse(source(file)).body
    return {n.name: n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}


HOMES = [file for file in FILES if not file.stem.endswith(KERNELS)]


def bases(file: Path, node: ast.ClassDef) -> Iterator[tuple[Path, ast.ClassDef]]:
    """A class and what it inherits from in this package, in the order of lookup."""
    yield file, node
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        for home in (file, *HOMES):
            # Most files need not be parsed.
            found = definitions(home).get(name) if f"class {name}" in source(home) else None
            if isinstance(found, ast.ClassDef):
                yield from bases(home, found)
                break


def doc_of(node: Definition) -> str:
    return ast.get_docstring(node) or ""


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def fields(node: ast.ClassDef) -> tuple[str, ...]:
    """The fields of a dataclass or NamedTuple, which its constructor takes."""
    made = [*node.decorator_list, *node.bases]
    if not any(ast.unparse(m).startswith(("dataclass", "NamedTuple")) for m in made):
        return ()
    return tuple(
        n.target.id
        for n in node.body
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and not n.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(n.annotation)
    )


def parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    a = node.args
    more = [x for x in (a.vararg, a.kwarg) if x is not None]
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, *more)]
    return tuple(n for n in names if n not in ("self", "cls") and not n.startswith("_"))


def of_class(file: Path, node: ast.ClassDef, at: str) -> Iterator[Name]:
    """A class with its public methods and properties, those of private bases among them."""
    family = list(bases(file, node))
    makers = [methods(c)["__init__"] for _, c in family if "__init__" in methods(c)]
    taken = parameters(makers[0]) if makers else fields(node)
    texts = [doc_of(c) for _, c in family] + [doc_of(m) for m in makers]
    # A class without a docstring has none, whatever it inherits.
    yield Name(at, node, "\n\n".join(texts) if doc_of(node) else "", taken)
    every = {name: m for _, c in reversed(family) for name, m in methods(c).items()}
    for name, method in every.items():
        if name.startswith("_"):
            continue
        text = "\n\n".join(doc_of(methods(c)[name]) for _, c in family if name in methods(c))
        yield Name(f"{at}.{name}", method, text if doc_of(method) else "", parameters(method))


def named(module: str, name: str) -> Iterator[Name]:
    file = ROOT / f"{module.replace('.', '/')}.py"
    node = definitions(file)[name]
    at = f"{module}:{name}"
    if isinstance(node, ast.ClassDef):
        yield from of_class(file, node, at)
    else:
        yield Name(at, node, doc_of(node), parameters(node))


def surface() -> Iterator[Name]:
    for name, home in tightwire._HOMES.items():
        module, _, there = home.partition(":")
        yield from named(module, there or name)
    for module, names in MODULES.items():
        file = ROOT / f"{module.replace('.', '/')}.py"
        for name in names or [n for n in definitions(file) if not n.startswith("_")]:
            yield from named(module, name)


SURFACE = {name.at: name for name in surface()}
CODECS = {
    codec: next(
        node
        for node in definitions(ROOT / "codecs" / f"{stem}.py").values()
        if isinstance(node, ast.ClassDef) and "CodecSpec" in map(ast.unparse, node.bases)
    )
    for codec, (_, stem) in CODEC_IDS.items()
}


@pytest.mark.parametrize("at", SURFACE)
def test_a_public_name_has_a_docstring_that_says_all(at: str) -> None:
    name = SURFACE[at]
    assert name.doc, "has no docstring"
    assert not _SINGLE_BACKTICK.search(name.doc), "single backticks; code has double ones in reST"
    sections = name.sections()
    for line in (sections.get(title, "").strip().split("\n")[0] for title in ("Returns", "Yields")):
        assert ":" not in re.sub("``[^`]+``", "", line), "Sphinx takes what precedes ':' for a type"
    described = _ENTRY.findall(sections.get("Args", "") + sections.get("Attributes", ""))
    assert not set(name.parameters) - set(described), "parameters without a description"
    constructed = isinstance(name.node, ast.ClassDef) and name.parameters == fields(name.node)
    if name.is_property() or constructed or RAISES_NOTHING & {at, at.rpartition(".")[2]}:
        return
    assert "Raises" in sections, "says not what it raises"


def test_the_list_of_what_raises_nothing_is_of_public_names() -> None:
    whole = {at for at in RAISES_NOTHING if ":" in at}
    assert whole <= set(SURFACE)
    assert not {at for at in whole if "Raises" in SURFACE[at].sections()}, "says what it raises"
    assert RAISES_NOTHING - whole <= {at.rpartition(".")[2] for at in SURFACE}


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_says_its_parameters_and_its_source(codec: str) -> None:
    node = CODECS[codec]
    name = Name(codec, node, doc_of(node), fields(node))
    described = _ENTRY.findall(name.sections().get("Args", ""))
    assert not set(name.parameters) - set(described)
    assert not _SINGLE_BACKTICK.search(name.doc)
    assert "Size:" in name.doc, "says not how many bytes an element takes"
    assert "Source:" in name.doc, "names no paper"


def prose_of(doc: str) -> str:
    """A docstring without doctests, indented code and names of parameters."""
    lines = [line for line in doc.splitlines() if not line.lstrip().startswith((">>>", "..."))]
    text = re.sub(r"::\n(?:\n| +.*\n?)+", ":\n", "\n".join(lines))
    return _ENTRY.sub("", text)


def raised(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and texts of what `raise` statements say; what is filled in stands as code."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        filled = [f for f in ast.walk(node.exc) if isinstance(f, ast.JoinedStr)]
        inside = {id(part) for f in filled for part in f.values}
        for f in filled:
            parts = (v.value if isinstance(v, ast.Constant) else "`x`" for v in f.values)
            yield node.lineno, "".join(map(str, parts))
        for part in ast.walk(node.exc):
            if isinstance(part, ast.Constant) and id(part) not in inside:
                yield node.lineno, part.value if isinstance(part.value, str) else ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_and_messages_have_the_words_of_the_field(file: Path) -> None:
    tree = ast.parse(file.read_text())
    texts = list(raised(tree))
    if not file.stem.endswith(KERNELS):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        texts += [
            (getattr(node, "lineno", 1), prose_of(doc_of(node)))  # type: ignore[arg-type]
            for node in nodes
        ]
    found = [f"line {line}: {what}" for line, text in texts for what in forbidden_words(text)]
    assert not found, "\n".join(found)


def test_forbidden_words_are_told_from_ordinary_ones() -> None:
    assert forbidden_words("`x` is no array, in the room for what came: two shots of a cell")
    ordinary = "two-shot, in turn, turn it off; there is no `room`. It is no longer used."
    assert not forbidden_words(ordinary)


def modules_with_examples() -> list[str]:
    files = [file for file in FILES if ">>>" in file.read_text()]
    return [".".join(("tightwire", *f.relative_to(ROOT).with_suffix("").parts)) for f in files]


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(str(error))
    results = doctest.testmod(imported, optionflags=doctest.ELLIPSIS)
    assert results.attempted
    assert not results.failed
