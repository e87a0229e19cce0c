"""The command line as a whole: which commands there are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import click

from .. import __version__
from .command import EPILOG
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
        return getattr(module, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        say(f"tightwire {__version__}")
        ctx.exit()


@click.group("tightwire", cls=_Group, commands=_Commands(), epilog=EPILOG, no_args_is_help=True)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version.",
)
def app() -> None:
    """Compressed tensors: lossless safetensors files, smaller."""
