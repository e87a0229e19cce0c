"""Links in delta directories, which no write goes through."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tightwire as tw
from tightwire import delta_folders
from tightwire.delta_files import file_name
from tightwire.storage import atomic_file

OLD = {"w": np.arange(3000, dtype=np.float32)}
NEW = {"w": OLD["w"] + 1}


@pytest.mark.parametrize("name", [file_name(7, 0), file_name(7), ".tightwire.lock"])
def test_a_link_is_refused(tmp_path: Path, name: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "versions"
    outside.mkdir()
    tw.save_delta(OLD, None, folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside / "file")
    base = None if name == file_name(7) else OLD
    with pytest.raises(FileExistsError, match="is a link, and not written through"):
        tw.save_delta(NEW, base, folder, version=7)
    assert not list(outside.iterdir())
    (folder / name).unlink()
    # The directory itself may be a link.
    (tmp_path / "link").symlink_to(folder)
    assert tw.save_delta(NEW, base, tmp_path / "link", version=7) == 7
    assert np.array_equal(tw.load_delta(folder)["w"], NEW["w"])


def test_a_link_that_appears_during_a_write_is_replaced(tmp_path: Path) -> None:
    target, outside = tmp_path / "file", tmp_path / "outside"
    with atomic_file(target, follow=False) as file:
        file.write(b"new")
        target.symlink_to(outside)
    assert not outside.exists()
    assert target.read_bytes() == b"new"
    assert not target.is_symlink()


def test_links_among_folders(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "versions"
    outside.mkdir()
    folder.mkdir()
    (folder / "weight_v000001").symlink_to(outside / "folder")
    with pytest.raises(FileExistsError, match="written once"):
        delta_folders.save(NEW, OLD, folder, version=1, compression="tightwire")
    (outside / "file").touch()
    left = folder / f".weight_v000001.{'0' * 16}.tmp"
    left.symlink_to(outside)
    delta_folders.save(NEW, OLD, folder, version=2, base_version=0, compression="tightwire")
    assert left.is_symlink()
    assert [path.name for path in outside.iterdir()] == ["file"]
