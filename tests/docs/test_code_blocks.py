"""Every code block of the README and of docs, run as it stands.

The blocks of a page run in order in one namespace and one folder. The first lines of a block may
say otherwise:

- `# torchrun --nproc-per-node 2 NAME.py` (or `mpiexec`, or `python`): a program, run by itself.
- `# needs a GPU`: runs in the tier `gpu`; elsewhere it is compiled.
- `# needs MPI` (UCX, CuPy, JAX, ...): runs where that library is; elsewhere it is compiled.
- `# NAME.py`: is saved under that name too, so that later blocks can import it.

Of `sh` blocks the lines run that call `tightwire` or `python`; `# exit code 1` behind one says
that this is what it returns. A block of any other language is an error.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import warm
from doc_pages import PAGES, name_of
from tightwire.formats.codec_ids import CODEC_IDS, NAMES_BY_ID

pytest.importorskip("sybil", reason="sybil is not installed: pip install -e '.[docs]'")
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator, pad
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

#: Languages of blocks that nothing runs: output, drawings, fragments of files.
SHOWN = ("text", "json", "toml", "console")
#: Directives that show no code.
DIRECTIVES = ("toctree", "eval-rst", "figure", "image", "note", "tip", "warning", "only", "grid")
#: Commands of `sh` blocks that are not run.
NOT_RUN = ("pip install", "python -m pip install", "git clone", "cd ")
#: The module of what a block needs.
MODULES = {"MPI": "mpi4py", "UCX": "ucxx", "CuPy": "cupy", "JAX": "jax", "NCCL": "cupy"}
MODULES |= {name: name for name in ("zarr", "numcodecs")}

_NEEDS = re.compile(r"# needs (?P<what>.+)")
_LAUNCH = re.compile(r"# (?P<command>(?:torchrun|mpiexec|python) .*?\b(?P<name>\w+\.py)\b.*)")
_SAVED = re.compile(r"# (?P<name>\w+\.py)\n")
#: What needs nothing of torchrun but ranks.
_RANKS = re.compile(r"torchrun --nproc-per-node (?P<ranks>\d+) (?P<name>\w+\.py)")
_EXIT = re.compile(r"#.*\bexit code (\d+)")
_FENCES = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)\n"))
_HIDDEN = DirectiveInHTMLCommentLexer("invisible-code-block", "python")


class Needs:
    """What a block asks for in its first lines."""

    def __init__(self, source: str) -> None:
        self.gpus = 0
        self.module: str | None = None
        self.command: str | None = None
        self.name = ""
        for line in source.splitlines()[:2]:
            if launch := _LAUNCH.fullmatch(line):
                self.command, self.name = launch["command"], launch["name"]
            elif needs := _NEEDS.fullmatch(line):
                count = re.fullmatch(r"(a|\d+) GPUs?", needs["what"])
                if count:
                    self.gpus = 1 if count[1] == "a" else int(count[1])
                elif needs["what"] in MODULES:
                    self.module = MODULES[needs["what"]]
                    self.gpus = int(self.module == "cupy")
                else:
                    known = ", ".join(["a GPU", "N GPUs", *MODULES])
                    raise ValueError(f"unknown need {needs['what']!r}. Known: {known}")
        if self.module in ("mpi4py", "ucxx") and not self.command:
            raise ValueError("the block needs a second line that says how its processes start")

    def missing(self) -> str | None:
        """Why the block cannot run here, or None."""
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        if self.gpus:
            import torch

            if torch.cuda.device_count() < self.gpus:
                return f"needs {self.gpus} GPU(s)"
        return None


class Runner:
    """The parser of a page, and what evaluates its blocks."""

    def __init__(self, gpu: bool = False) -> None:
        self.gpu = gpu
        self.python = PythonEvaluator()

    def __call__(self, document: Document) -> Iterable[Region]:
        """The regions of a page, as Sybil asks for them."""
        for region in (*_FENCES(document), *_HIDDEN(document)):
            region.parsed = region.lexemes["source"]
            region.evaluator = self.evaluate
            yield region

    def evaluate(self, example: Example) -> None:
        """Run a block, or fail if it is of no known kind."""
        language = _language(example.region)
        if language == "python":
            self.evaluate_python(example)
        elif language == "sh":
            if not self.gpu:
                _evaluate_sh(example)
        elif language not in SHOWN and language.strip("{}").split("}")[0] not in DIRECTIVES:
            raise ValueError(
                f"a block in {language!r}. Allowed: python, sh, {', '.join(SHOWN)}, and the "
                f"directives {', '.join(DIRECTIVES)}"
            )

    def evaluate_python(self, example: Example) -> None:
        """Run a block in the namespace of its page, or compile it if it cannot run so."""
        source = pad(example.parsed, example.line + example.parsed.line_offset)
        compile(source, example.path, "exec", dont_inherit=True)
        needs = Needs(example.parsed)
        if needs.command or (needs.gpus and not self.gpu):
            return
        if saved := _SAVED.match(example.parsed):
            Path(saved["name"]).write_text(example.parsed)
        if not needs.missing():
            self.python(example)


def _language(region: Region) -> str:
    # A block hidden in a comment has no language but Python.
    return str(region.lexemes.get("language", "python")).strip()


def _parse(page: Path, gpu: bool = False) -> Document:
    document = Sybil([Runner(gpu)], path=str(page.parent)).parse(page)
    document.namespace["__name__"] = "__main__"
    return document


def _environment(folder: Path) -> dict[str, str]:
    """That of a shell: `tightwire` and `python` are those of this process."""
    commands = folder / ".commands"
    commands.mkdir(exist_ok=True)
    for name, words in {"python": "", "tightwire": "-m tightwire.cli"}.items():
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        command.chmod(0o755)
    path = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }


def _evaluate_sh(example: Example) -> None:
    for line in example.parsed.replace("\\\n", " ").splitlines():
        command = line.strip()
        if not command or command.startswith(("#", *NOT_RUN)):
            continue
        if command.startswith(("torchrun ", "mpiexec ")):
            if not any(
                n.name and n.name in command for n in _programs(Path(example.path)).values()
            ):
                raise ValueError(f"no block of the page is the program of {command!r}")
        elif command.startswith(("tightwire", "python")):
            expected = _EXIT.search(command)
            _run(command, Path.cwd(), int(expected[1]) if expected else 0)
        else:
            raise ValueError(
                f"{command!r}: lines of sh blocks start with tightwire, python, torchrun or "
                f"mpiexec, or with one of {NOT_RUN}, which are not run"
            )


def _run(command: str, folder: Path, expected: int = 0) -> None:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == expected, (
        f"{command!r}: exit code {done.returncode}, not {expected}\n{done.stdout}\n{done.stderr}"
    )


def _programs(page: Path) -> dict[int, Needs]:
    """The programs of a page by their lines."""
    examples = [e for e in _parse(page) if _language(e.region) == "python"]
    needs = {e.line: Needs(e.parsed) for e in examples}
    return {line: n for line, n in needs.items() if n.command}


def _launch(command: str, folder: Path) -> None:
    """Run a program as its first line says; ` & ` stands between commands that run together."""
    command = command.replace("torchrun", "python -m torch.distributed.run --standalone")
    if command.startswith("mpiexec"):
        command = command.replace("mpiexec", "mpiexec --allow-run-as-root --oversubscribe")
    first, *others = command.split(" & ")
    # bash returns the worst of what runs in the background.
    started = "".join(f"({c}) & pids+=($!); " for c in others)
    _run(f"pids=(); {started}{first} && for p in ${{pids[@]}}; do wait $p || exit; done", folder)


PROGRAMS = [
    pytest.param(page, line, needs, id=f"{name_of(page)}-{line}", marks=mark)
    for page in PAGES
    for line, needs in _programs(page).items()
    for mark in [pytest.mark.gpu if needs.gpus else pytest.mark.slow]
]
ON_GPU = [page for page in PAGES if re.search("^# needs .*(GPU|CuPy)", page.read_text(), re.M)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a page, whose modules and codecs nobody else sees."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tables: list[dict[Any, Any]] = [CODEC_IDS, NAMES_BY_ID, sys.modules]
    before = [set(table) for table in tables]
    yield tmp_path
    for table, names in zip(tables, before, strict=True):
        for name in set(table) - names:
            file = getattr(table[name], "__file__", None) or ""
            if table is not sys.modules or file.startswith(str(tmp_path)):
                del table[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.usefixtures("folder")
def test_blocks_run(page: Path) -> None:
    for example in _parse(page):
        example.evaluate()


# Of PyTorch's own compiler.
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("page", ON_GPU, ids=name_of)
@pytest.mark.usefixtures("folder")
def test_blocks_run_on_a_gpu(page: Path) -> None:
    for example in _parse(page, gpu=True):
        example.evaluate()


@pytest.mark.parametrize(("page", "line", "needs"), PROGRAMS)
def test_program_runs(page: Path, line: int, needs: Needs, tmp_path: Path) -> None:
    if missing := needs.missing():
        pytest.skip(missing)
    assert needs.command
    source = next(e.parsed for e in _parse(page) if e.line == line)
    (tmp_path / needs.name).write_text(source)
    if ranks := _RANKS.fullmatch(needs.command):
        env = _environment(tmp_path)
        done = warm.run(tmp_path / needs.name, ranks=int(ranks["ranks"]), env=env, folder=tmp_path)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    else:
        _launch(needs.command, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_first_block_needs_nothing_hidden(page: Path) -> None:
    python = [e for e in _parse(page) if _language(e.region) == "python"]
    assert not python or "language" in python[0].region.lexemes


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_stands_in_fences(page: Path) -> None:
    """An indented block has no language, so nothing could say whether it runs."""
    markdown_it = pytest.importorskip("markdown_it")
    tokens = markdown_it.MarkdownIt().parse(page.read_text())
    indented = [token.map[0] + 1 for token in tokens if token.type == "code_block"]
    assert not indented, f"lines {indented}: use ```sh, ```text or another fence"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        ("```python\nassert 1 == 2\n```", AssertionError, ""),
        ("```python\n# needs a GPU\nx = = 1\n```", SyntaxError, "invalid syntax"),
        ("```python\n# needs a moon\n```", ValueError, "unknown need"),
        ("```python\n# needs MPI\n```", ValueError, "how its processes start"),
        ("```rust\nlet x = 1;\n```", ValueError, "a block in 'rust'"),
        ("```\nx\n```", ValueError, "a block in ''"),
        ("```{code-block} python\nx\n```", ValueError, "code-block"),
        ("```sh\nrm x\n```", ValueError, "start with tightwire"),
        ("```sh\npython -c 'raise SystemExit(3)'\n```", AssertionError, "exit code 3"),
        ("```sh\ntorchrun --nproc-per-node 2 x.py\n```", ValueError, "no block of the page"),
        ("- item\n\n  ```python\n  assert 1 == 2\n  ```", AssertionError, ""),
    ],
)
def test_a_bad_block_fails(block: str, error: type[Exception], message: str, folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(f"# Page\n\n{block}\n")
    with pytest.raises(error, match=message or None):
        for example in _parse(page):
            example.evaluate()
