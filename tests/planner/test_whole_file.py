"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.whole_file import check_writable, write_whole
from simulator.errors import InputError


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "first")
    assert write_whole(path, b"second") == path
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    write_whole("/dev/null", "gone")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("name", ["folder", "file/below.txt", "file/deep/below.txt"])
def test_places_that_cannot_be_written_are_found_before(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("here")
    with pytest.raises(InputError, match="cannot write"):
        check_writable(tmp_path / name)


def test_places_that_can_be_written_are_left_alone(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "deep" / "a.txt")
    check_writable("relative.txt")
    assert list(tmp_path.iterdir()) == []
