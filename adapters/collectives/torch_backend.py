"""Makes PyTorch know the backend ``"tightwire"`` of ``torch.distributed``.

``import torch`` calls ``autoload`` where the package is installed: it is an entry point of
``torch.backends``. The backend itself is imported when a group is made.
"""

from __future__ import annotations

import os
from typing import Any

#: Of the backend.
NAME = "tightwire"
#: The environment variable that holds a policy.
VARIABLE = "TIGHTWIRE_POLICY"


def autoload() -> None:
    """Register the backend if the environment variable ``TIGHTWIRE_POLICY`` is set.

    Programs that are told a backend's name then need no import.
    """
    import torch.distributed as dist

    if os.environ.get(VARIABLE) and dist.is_available():
        register()


def register() -> None:
    """Register the backend, if it is not yet.

    Raises:
        RuntimeError: If PyTorch was built without ``torch.distributed``.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("PyTorch was built without torch.distributed")
    if NAME not in dist.Backend.backend_list:
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)


def _create(given: Any, options: Any) -> Any:
    from .process_group import create

    return create(given, options)
