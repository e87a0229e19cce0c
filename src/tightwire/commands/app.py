"""The command line as a whole: which commands there are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from .command import EPILOG, PLAIN_TEXT
from .output import say

#: The module of each command.
_MODULES = {
    "compress": "compression",
    "decompress": "compression",
    "verify": "reading",
    "inspect": "reading",
    "diff": "reading",
    "bench": "measure",
    "advise": "advise",
    "conformance": "measure",
    "demo": "measure",
}


class _Commands(Mapping[str, Any]):
    """The commands by name; a module is imported when one of its commands is asked for."""

    def __getitem__(self, name: str) -> Any:
        module = importlib.import_module(f"{__package__}.{_MODULES[name]}")
        return typer.main.get_command(getattr(module, name))

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class _Group(TyperGroup):
    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = _Commands()  # type: ignore[assignment]


app = typer.Typer(
    cls=_Group,
    name="tightwire",
    help="Compressed tensors: lossless safetensors files, smaller.",
    epilog=EPILOG,
    add_completion=False,
    no_args_is_help=True,
    **PLAIN_TEXT,
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"tightwire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass
