import os
import subprocess
import sys

import pytest

from planner.execution.launch.rank_log import kept_on_failure, rank_log
from simulator.errors import ExecutionError, InputError

PROGRAM = """
import os, sys
from pathlib import Path
from planner.execution.launch.rank_log import rank_log
print("before")
try:
    with rank_log(Path(sys.argv[1]), 3):
        print("inside")
        os.write(2, b"from a library\\n")
        raise ValueError("of its own")
except ValueError:
    print("after")
"""


def test_all_that_a_rank_writes_goes_to_its_folder(tmp_path):
    variables = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MY_SECRET": "token"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True, env=variables
    )
    assert done.stdout.split() == ["before", "after"]
    said = (tmp_path / "device3" / "train.log").read_text()
    assert said.startswith("inside\nfrom a library\nTraceback")
    assert said.endswith("ValueError: of its own\n")
    told = (tmp_path / "device3" / "env.log").read_text()
    assert "MASTER_ADDR=host\n" in told
    assert "SECRET" not in told


def test_without_a_folder_nothing_is_redirected(capfd):
    with rank_log(None, 0):
        os.write(1, b"here\n")
    assert capfd.readouterr().out == "here\n"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another --log-dir"), rank_log(tmp_path / "file", 0):
        pass
    with pytest.raises(InputError, match="choose another"), kept_on_failure(tmp_path / "file" / "logs"):
        pass


def fail(error, folders):
    with kept_on_failure(None) as folder:
        folders.append(folder)
        if error is not None:
            raise error


@pytest.mark.parametrize(("error", "kept"), [(None, False), (KeyboardInterrupt(), False), (ExecutionError("x"), True)])
def test_logs_nobody_asked_for_are_kept_when_they_are_needed(error, kept):
    folders = []
    if error is None:
        fail(error, folders)
    else:
        with pytest.raises(type(error)):
            fail(error, folders)
    assert folders[0].is_dir() == kept
    if kept:
        folders[0].rmdir()
