"""The coverage-guided fuzz target for FUZZ_SECONDS (300), from the vectors of the format."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import needs

VECTORS = Path(__file__).resolve().parents[2] / "specs" / "vectors"
TARGET = Path(__file__).with_name("fuzz_decode.py")


@pytest.mark.long
@needs("atheris")
def test_fuzz_decode(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for kind in ("*.tw", "*.safetensors"):
        for path in VECTORS.rglob(kind):
            if path.stat().st_size <= 8192:
                shutil.copy(path, corpus / f"{path.parent.name}-{path.name}")
    seconds = int(os.environ.get("FUZZ_SECONDS", "300"))
    words = [f"-max_total_time={seconds}", "-max_len=8192", f"-artifact_prefix={tmp_path}/"]
    run = subprocess.run(
        [sys.executable, TARGET, corpus, *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}\nin {tmp_path}"
    done = re.search(r"Done (\d+) runs", run.stderr)
    assert done is not None
    # More than the corpus itself: mutations were run. The first minutes may go to Numba.
    assert int(done[1]) > len(list(corpus.iterdir()))
