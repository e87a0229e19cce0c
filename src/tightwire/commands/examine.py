"""doctor: what works on this machine."""

from __future__ import annotations

import textwrap

import click

from .command import command, json_option
from .failures import DIFFERENT
from .output import print_json, say, step_bar, width

_MARKS = {"ok": "ok", "missing": "-", "failed": "FAILED"}


@command("tightwire doctor", "tightwire doctor --json")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=120,
    help="Seconds that one check may take.",
)
@json_option
def doctor(timeout: float, as_json: bool) -> int:
    """Show what works on this machine, and why the rest does not.

    Backends, array libraries and transports are tried: each encodes and decodes a small tensor, or
    sends a message to itself, in a process of its own. The first run may compile kernels for some
    seconds. tightwire works here if the installed backends of the host do, and if all backends
    give the same bytes.
    """
    from .. import doctor as checks

    with step_bar(checks.N_PROBES) as progress:
        report = checks.examine(timeout, progress)
    if as_json:
        print_json(report.as_dict())
    else:
        say(f"tightwire {report.tightwire}, Python {report.python}, {report.platform}")
        names = max(len(check.name) for check in report.checks)
        group = ""
        for check in report.checks:
            if check.group != group:
                group = check.group
                say("", group)
            start = f"  {_MARKS[check.status]:6}  {check.name:{names}}  "
            _say_folded(start, check.detail, check.fix)
        broken = "tightwire does not work here: a backend that it needs has failed"
        say("", "tightwire works here" if report.ok else broken)
    return 0 if report.ok else DIFFERENT


def _say_folded(start: str, detail: str, fix: str) -> None:
    """Print `detail` behind `start`, further lines of it below each other.

    A command in `fix` stays on one line, which can be copied.
    """
    columns = max(width() - len(start), 30)
    lines = [detail]
    if len(detail) > columns:
        lines = textwrap.wrap(detail, columns, break_long_words=False, break_on_hyphens=False)
    if fix and len(lines[-1]) + len(fix) + 2 <= columns:
        lines[-1] += f"; {fix}"
    elif fix:
        lines.append(fix)
    say(start + lines[0], *(" " * len(start) + line for line in lines[1:]))
