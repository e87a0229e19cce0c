"""What a group has measured, kept in a file for the next program on the same machines."""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import Any

from ..transports.base import Transport
from . import running, tensors
from .agreement import gather_plain, gather_texts
from .calls import Call
from .measurements_file import measurements_file

#: Settings that say which connections there are, by their beginnings; and those that do not.
_SETTINGS = ("NCCL_", "GLOO_", "UCX_", "CUDA_VISIBLE_DEVICES")
_OTHER_SETTINGS = "NCCL_DEBUG"


class KeptMeasurements:
    """Measurements of a group, which are read once, when it is made, by all ranks together.

    All ranks know the same ones, whatever is in their files: those of collectives are in rank 0's,
    those of messages in the sender's. They are for the same machines in the same order of ranks,
    devices, versions and settings of networks; for others nothing is known.

    A file that does not exist is made. One that is damaged, or of another version, counts as empty,
    with a RuntimeWarning, and is replaced. A thread writes measurements, soon after they are made:
    no call waits for it. If it cannot, a RuntimeWarning says so, and this program goes on.

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
        self._rank = transport.rank
        problem, machine, found = "", {}, {}
        try:
            machine = _machine(transport)
            self._file = measurements_file(path)
            found = self._file.read()
        # Whatever it is, also a warning that is to be an error: the others wait for this rank.
        except Exception as error:
            problem = f"measurements is {str(path)!r}, {type(error).__name__}: {error}"
        call = Call(self._rank, "measurements", 0, "", name)
        with running.noted(call), call.stage("agree"):

            def gathered(value: Any) -> list[Any]:
                texts = gather_texts(lambda mine: gather_plain(transport, mine), json.dumps(value))
                return [json.loads(text) for text in texts]

            ranks = gathered([machine, problem])
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
        if owner == self._rank:
            self._file.add(self._group, owner, key, found)

    def finish(self) -> None:
        """Wait a moment until this rank's file has all that was kept."""
        self._file.finish()

    def look_again(self) -> None:
        """Forget what is known, so that it is measured and written again; on all ranks."""
        for known in self._known:
            known.clear()


def check_measurements(path: Any, name: str, value: Any) -> None:
    """Raise TypeError if a file is not a path, ValueError if nothing is measured.

    Whether there can be such a file is told to all ranks later, by ``KeptMeasurements``.

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


def _machine(transport: Transport) -> dict[str, Any]:
    """What a rank runs on, as far as it says how fast calls are."""
    x = transport.empty(1)
    names = sorted(name for name in os.environ if name.startswith(_SETTINGS))
    found: dict[str, Any] = {
        "host": platform.node(),
        "cores": os.cpu_count(),
        "transport": type(transport).__name__,
        "backend": getattr(transport, "backend", ""),
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
