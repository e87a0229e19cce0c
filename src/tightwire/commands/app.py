"""The command line as a whole: which commands there are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import click

from .. import __version__
from .command import epilog
from .failures import EXIT_CODES
from .output import say
from .welcome import welcome

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
    "doctor": "examine",
}

_EXIT_CODES = "\b\nExit codes of every command:\n" + "\n".join(
    f"{code:5}  {text}" for code, text in EXIT_CODES.items()
)
_EXAMPLES = (
    "tightwire compress model.safetensors",
    "tightwire inspect model.tw.safetensors",
    "tightwire decompress model.tw.safetensors -o back.safetensors",
    "tightwire diff model.safetensors back.safetensors",
)


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


@click.group(
    "tightwire",
    cls=_Group,
    commands=_Commands(),
    epilog=f"{epilog(*_EXAMPLES)}\n\n{_EXIT_CODES}",
    invoke_without_command=True,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version.",
)
@click.pass_context
def app(context: click.Context) -> None:
    """Compress model weights without loss: safetensors files, smaller.

    A compressed file is a safetensors file too, and gives its source back byte for byte. Every
    command takes --help, which explains it and has examples.
    """
    if context.invoked_subcommand is None:
        welcome()
