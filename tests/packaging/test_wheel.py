"""The wheel and the source distribution: what is in them, and that the wheel works by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
#: What the source distribution is made of; `src` and the folders that packages are mapped to first.
FOLDERS = ("src", "codecs", "formats", "adapters", "specs", "tests", "docs", "examples")
MODULES = {"tightwire": "src/tightwire"} | {
    f"tightwire/{name}": name
    for name in (
        "codecs",
        "codecs/common",
        "formats",
        "adapters",
        "adapters/collectives",
        "adapters/training",
        "adapters/transports",
        "adapters/weights",
        "adapters/weights/plugins",
    )
}
SKIPPED = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.nb[ic]", "*.egg-info", "_build")
ROUND_TRIP = """
import sys
import ml_dtypes, numpy as np
import tightwire as tw

assert sys.prefix in tw.__file__, tw.__file__
x = np.random.default_rng(0).normal(0, 0.02, 20_000).astype(ml_dtypes.bfloat16)
data = bytes(tw.encode(x))
assert len(data) < 0.75 * x.nbytes, len(data)
y = tw.decode(data)
assert y.dtype == x.dtype and y.tobytes() == x.tobytes()
assert tw.error(x, tw.decode(bytes(tw.encode(x, "mx")))).vnmse < 1e-2
tw.save_file({"x": x}, "x.safetensors")
assert tw.load_file("x.safetensors")["x"].tobytes() == x.tobytes()
assert not {"numba", "torch", "click"} & set(sys.modules)
print(tw.__version__)
"""


@dataclass(frozen=True)
class Built:
    """What was built, and the source that it was built from."""

    source: Path
    wheel: Path
    sdist: Path


def run(*command: object, cwd: Path, ok: bool = True) -> str:
    """Standard output of a program that cannot see this checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, "-o", out, ".", cwd=source)


def files_of(folder: Path, pattern: str = "**/*") -> dict[str, bytes]:
    """Files by their path in the folder; links are followed nowhere."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.glob(pattern)
        if p.is_file()
    }


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both from a copy: a build leaves folders behind, and reads those of an older one."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    source.mkdir()
    for path in ROOT.iterdir():
        if path.name in (*FOLDERS, "benchmarks"):
            shutil.copytree(path, source / path.name, symlinks=True, ignore=SKIPPED)
        elif path.suffix in {".toml", ".md", ".in"} or path.name == "LICENSE":
            shutil.copy(path, source)
    build(source, folder / "dist", "--sdist", "--wheel")
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return Built(source, wheel, sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel and its minimal dependencies."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    run(folder / "bin" / "pip", "install", "--quiet", built.wheel, cwd=folder.parent)
    return folder / "bin"


def test_names_and_twine(built: Built) -> None:
    assert built.wheel.name == f"tightwire-{tw.__version__}-py3-none-any.whl"
    assert built.sdist.name == f"tightwire-{tw.__version__}.tar.gz"
    command = (sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.sdist)
    assert run(*command, cwd=built.source).count("PASSED") == 2


def test_wheel_holds_the_packages_and_nothing_else(built: Built) -> None:
    found = members(built.wheel)
    assert {name.partition("/")[0] for name in found} == {
        "tightwire",
        f"tightwire-{tw.__version__}.dist-info",
    }
    expected = {
        f"{package}/{name}": data
        for package, folder in MODULES.items()
        for name, data in files_of(built.source / folder, "*.py").items()
    }
    expected |= {
        f"tightwire/commands/{name}": data
        for name, data in files_of(built.source / "src/tightwire/commands", "*.py").items()
    }
    assert {k: v for k, v in found.items() if k.endswith(".py")} == expected
    assert "tightwire/py.typed" in found
    (metadata,) = [v.decode() for k, v in found.items() if k.endswith("dist-info/METADATA")]
    assert f"\nVersion: {tw.__version__}\n" in metadata
    assert "\nDescription-Content-Type: text/markdown\n" in metadata


def test_wheel_holds_the_vectors(built: Built) -> None:
    found = members(built.wheel)
    prefix = "tightwire/vectors/"
    vectors = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
    source = built.source / "specs" / "vectors"
    expected = files_of(source, "*/*.tw") | files_of(source, "*/*.bin")
    expected |= files_of(source, "*/*.base")
    assert len(expected) > 1000
    assert vectors == expected | files_of(source, "invalid/reasons.json")


def test_sdist_holds_what_people_need_to_work_on_it(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        # Python 3.11.0 to 3.11.3 have no filters.
        options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **options)
    (unpacked,) = tmp_path.iterdir()
    for name in FOLDERS:
        if not (built.source / name).is_dir():
            continue
        missing = files_of(built.source / name).keys() - files_of(unpacked / name).keys()
        assert not missing, name
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml"):
        assert (unpacked / name).read_bytes() == (built.source / name).read_bytes()
    build(unpacked, tmp_path / "again", "--wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert again.name == built.wheel.name
    assert members(again) == members(built.wheel)


def test_wheel_works_by_itself(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "python", "-c", ROUND_TRIP, cwd=tmp_path).strip() == tw.__version__
    # Without the [cli] extra the program says what is missing.
    run(installed / "tightwire", "--help", cwd=tmp_path, ok=False)


def test_command_line_of_the_wheel(built: Built, installed: Path, tmp_path: Path) -> None:
    run(installed / "pip", "install", "--quiet", f"{built.wheel}[cli]", cwd=tmp_path)
    tightwire = installed / "tightwire"
    assert run(tightwire, "--version", cwd=tmp_path) == f"tightwire {tw.__version__}\n"
    # A copy of the buffer is never the tensor: all vectors are found, and none passes.
    command = (tightwire, "conformance", "--decoder", "cp {in} {out} {base}")
    last = run(*command, cwd=tmp_path, ok=False).splitlines()[-1]
    count = len(list((ROOT / "specs" / "vectors").rglob("*.tw")))
    assert last == f"0 of {count} vectors passed"


def test_one_place_for_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(tw.__version__)}\]", changelog, re.MULTILINE)
