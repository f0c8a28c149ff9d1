"""Joining a job that another launcher started."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from planner.plans.file import write_plan
from tests.planner.execution.test_execute import make_plan

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def strategy(tmp_path_factory):
    path = tmp_path_factory.mktemp("joining") / "strategy.json"
    write_plan(make_plan("zoo:mlp", 2, batch=16, dp=2), path)
    return path


def command(strategy, *, steps="3"):
    return [
        "-m",
        "planner.cli",
        "execute",
        str(strategy),
        "--steps",
        steps,
        "--verify",
        "--precision",
        "fp64",
        "--json",
    ]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def check(outputs):
    texts = [text for text in outputs if text.strip()]
    assert len(texts) == 1, "rank 0 alone prints"
    report = json.loads(texts[0])
    assert report["processes"] == 2
    assert report["verified"]
    return report


def test_torchrun(strategy):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *command(strategy)], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert check([done.stdout])["launcher"] == "torchrun"


@pytest.mark.parametrize("launcher", ["Slurm", "msrun"])
def test_variables(strategy, launcher):
    port = str(free_port())
    workers = []
    for rank in range(2):
        variables = {
            "Slurm": {
                "SLURM_PROCID": str(rank),
                "SLURM_STEP_ID": "0",
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": str(rank),
                "SLURM_JOB_NODELIST": "localhost",
                "MASTER_PORT": port,
            },
            "msrun": {
                "MS_WORKER_NUM": "2",
                "MS_SCHED_HOST": "localhost",
                "MS_SCHED_PORT": port,
                "MS_ROLE": "MS_WORKER",
                "RANK_ID": str(rank),
                "RANK_SIZE": "2",
            },
        }[launcher]
        workers.append(
            subprocess.Popen(
                [sys.executable, *command(strategy)],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )
    with ThreadPoolExecutor(len(workers)) as readers:  # one that waits with a full pipe would hold up the other
        ended = list(readers.map(lambda worker: worker.communicate(timeout=120), workers))
    assert [worker.returncode for worker in workers] == [0, 0], ended
    assert check([out for out, _ in ended])["launcher"] == launcher


def test_a_scheduler_process_of_msrun_has_nothing_to_do(strategy):
    variables = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "localhost", "MS_SCHED_PORT": "1", "MS_ROLE": "MS_SCHED"}
    done = subprocess.run(
        [sys.executable, *command(strategy)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
