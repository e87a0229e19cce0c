"""Where kernels run, and who watches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kernels import Watched


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """Where kernels run."""
    torch = pytest.importorskip("torch")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    return str(request.param)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched | None:
    """Watch the interpreter; on a GPU guard bytes and compute-sanitizer (sanitize.py) do that."""
    from kernels import watch

    return watch(monkeypatch)
