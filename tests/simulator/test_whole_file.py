"""Files are written whole or not at all, whatever is at the path."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.errors import InputError
from simulator.whole_file import check_writable, write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "first")
    path.chmod(0o640)
    assert write_whole(path, b"second") == path
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    write_whole(path, iter(["thi", "rd €"]))
    assert path.read_text() == "third €"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")

    def full() -> Iterator[str]:
        yield "new"
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"cannot write '.*a\.txt': No space left on device; free some space"):
        write_whole(path, full())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_followed(tmp_path: Path) -> None:
    target, link, ahead = tmp_path / "target.txt", tmp_path / "link.txt", tmp_path / "ahead.txt"
    target.write_text("old")
    link.symlink_to(target)
    ahead.symlink_to("later.txt")
    for path in (link, ahead):
        write_whole(path, "new")
        assert path.is_symlink()
        assert path.resolve().read_text() == "new"
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(InputError, match="cannot write"):
        write_whole(circle, "new")
    assert circle.is_symlink()


def test_devices_stay_devices() -> None:
    check_writable("/dev/null")
    write_whole("/dev/null", iter(["gone"]))
    with pytest.raises(InputError, match="cannot write '/dev/full': No space left on device"):
        write_whole("/dev/full", "text")
    for device in ("/dev/null", "/dev/full"):
        assert stat.S_ISCHR(Path(device).stat().st_mode)


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, iter(["through ", "the pipe"]))
    reader.join(timeout=10)
    assert found == ["through the pipe"]


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_standard_output_keeps_what_stands_around_it(kind: str, tmp_path: Path) -> None:
    program = (
        "from simulator.whole_file import check_writable, write_whole\n"
        "print('before'); check_writable('/dev/stdout'); write_whole('/dev/stdout', 'text\\n'); print('after')"
    )
    path = tmp_path / "out.txt"
    with path.open("w") as file:
        output = file if kind == "file" else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", program], stdout=output, text=True, check=True)
    assert (path.read_text() if kind == "file" else done.stdout) == "before\ntext\nafter\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "it is a folder; name a file"),
        ("file/below.txt", "Not a directory"),
        ("new/a.txt", "the folder '.*new' does not exist; create it"),
        ("a\0b", "null"),
        ("/proc/a.txt", "No such file|Permission denied"),
    ],
)
def test_places_that_cannot_be_written_are_found_before(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("here")
    for act in (check_writable, lambda path: write_whole(path, "text")):
        with pytest.raises(InputError, match=f"cannot write '.*': .*{reason}"):
            act(tmp_path / name)
    assert not (tmp_path / "new").exists()


def test_places_that_can_be_written_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_writable("relative.txt")
    assert list(tmp_path.iterdir()) == []
    Path("there.txt").write_text("old")
    check_writable(tmp_path / "there.txt")
    assert Path("there.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "there.txt"]
