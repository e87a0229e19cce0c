"""What a group has measured, kept in a file for the next program on the same machines."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

from ...storage import atomic_file
from ..transports.base import Transport
from . import running, tensors
from .agreement import gather_plain, gather_texts
from .calls import Call

#: Version of the file.
_FORMAT = 1
#: Seconds that a rank waits for another process that writes the file.
_PATIENCE = 10.0
#: Settings that say which connections there are, by their beginnings; and those that do not.
_SETTINGS, _OTHER_SETTINGS = ("NCCL_", "CUDA_VISIBLE_DEVICES"), "NCCL_DEBUG"


class KeptMeasurements:
    """Measurements of a group, which are read once, when it is made, by all ranks together.

    All ranks know the same ones, whatever is in their files: those of collectives are in rank 0's,
    those of messages in the sender's. They are for the same machines in the same order of ranks,
    devices, versions and settings of NCCL; for others nothing is known.

    A file that does not exist is made. One that is damaged, or of another version, counts as empty,
    with a RuntimeWarning, and is replaced. If a measurement cannot be written, a RuntimeWarning
    says so, and this program goes on.

    Args:
        path: This rank's file; ranks of one host may share it, and so may programs.
        transport: The group.
        about: What measurements depend on besides, the same on all ranks.
        name: How errors call the group.

    Raises:
        CollectiveError: On all ranks, if the file of one cannot be read, or its folder is missing.
    """

    def __init__(
        self, path: str | os.PathLike[str], transport: Transport, about: str, name: str = ""
    ) -> None:
        self._path, self._rank = Path(path), transport.rank
        problem, found = "", {}
        try:
            found = self._read()
        except (OSError, ImportError) as error:
            problem = f"measurements is {str(path)!r}, {type(error).__name__}: {error}"
        call = Call(self._rank, "measurements", 0, "", name)
        with running.noted(call), call.stage("agree"):

            def gathered(value: Any) -> list[Any]:
                texts = gather_texts(lambda mine: gather_plain(transport, mine), json.dumps(value))
                return [json.loads(text) for text in texts]

            ranks = gathered([_machine(transport), problem])
            problems = [f"rank {r}: {why}" for r, (_, why) in enumerate(ranks) if why]
            if problems:
                raise call.failure("agree", "; ".join(problems))
            self._group = json.dumps([about, [machine for machine, _ in ranks]])
            #: By rank, what it knows: of collectives, or of messages that it sends.
            own = found.get(self._group, {}).get(str(self._rank), {})
            self._known: list[dict[str, Any]] = gathered(own)

    def get(self, key: str, owner: int = 0) -> Any:
        """What has been measured.

        Args:
            key: Says what.
            owner: The rank whose file has it.

        Returns:
            What was given to ``put``, or None.
        """
        return self._known[owner].get(key)

    def put(self, key: str, found: Any, owner: int = 0) -> None:
        """Keep what has been measured; for all ranks that will ask for it.

        Args:
            key: Says what.
            found: Numbers, in lists and dicts.
            owner: The rank that writes it to its file.
        """
        self._known[owner][key] = found
        if owner != self._rank:
            return
        try:
            with _lock(self._path):
                # Other programs write to it, too.
                whole = self._read()
                whole.setdefault(self._group, {}).setdefault(str(owner), {})[key] = found
                with atomic_file(self._path) as file:
                    file.write(_packed(whole))
        except OSError as error:
            warnings.warn(
                f"a measurement is not kept in {str(self._path)!r} ({type(error).__name__}: "
                f"{error}); the next program measures anew",
                RuntimeWarning,
                stacklevel=2,
            )

    def look_again(self) -> None:
        """Forget what is known, so that it is measured and written again; on all ranks."""
        for known in self._known:
            known.clear()

    def _read(self) -> dict[str, Any]:
        """What is in the file, by group and rank."""
        # A missing package is to be an error of the start.
        _lock(self._path)
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise
            return {}
        try:
            head, _, body = data.partition(b"\n")
            if head != _head(body):
                raise ValueError(f"no measurements of version {_FORMAT}, or a wrong checksum")
            found: dict[str, Any] = json.loads(body)
        except ValueError as error:
            warnings.warn(
                f"{str(self._path)!r} is damaged or no file of measurements ({error}); it is "
                "measured anew, and replaced",
                RuntimeWarning,
                stacklevel=3,
            )
            return {}
        return found


def check_measurements(path: Any, name: str, value: Any) -> None:
    """Raise TypeError if a file is not a path, ValueError if nothing is measured.

    Args:
        path: The file, or None.
        name: The argument that says whether anything is measured.
        value: Its value.
    """
    if path is None:
        return
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"measurements is {path!r}; allowed: the path of a file, or None")
    if value != "auto":
        raise ValueError(f"measurements is given, {name} {value!r}; allowed with it: 'auto'")


def _lock(path: Path) -> Any:
    """A lock among the processes that write to a file."""
    from filelock import FileLock

    return FileLock(path.with_name(f"{path.name}.lock"), timeout=_PATIENCE)


def _packed(found: dict[str, Any]) -> bytes:
    body = json.dumps(found, indent=1).encode()
    return _head(body) + b"\n" + body


def _head(body: bytes) -> bytes:
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    return f"tightwire measurements {_FORMAT} {digest}".encode()


def _machine(transport: Transport) -> dict[str, Any]:
    """What a rank runs on, as far as it says how fast calls are."""
    x = transport.empty(1)
    names = sorted(name for name in os.environ if name.startswith(_SETTINGS))
    found: dict[str, Any] = {
        "host": platform.node(),
        "cores": os.cpu_count(),
        "transport": type(transport).__name__,
        "tightwire": sys.modules["tightwire"].__version__,
        "settings": {n: os.environ[n] for n in names if not n.startswith(_OTHER_SETTINGS)},
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    if tensors.is_cuda(x):
        found["gpu"] = torch.cuda.get_device_name(x.device), x.device.index
        found["nccl"] = torch.cuda.nccl.version()
    return found
