"""Whether this process was started as one rank of a larger job, and by whom."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from simulator.errors import InputError

DEFAULT_PORT = 29500
FIRST_SLURM_PORT = 15000
SLURM_PORTS = 20000
LAST_PORT = 2**16 - 1
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Devices that a process may see, by number, with commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One rank's place in a job: its number, how many there are and where rank 0 listens.

    ``local_rank`` is the number of its device among those that it sees; ``local_size`` ranks are on its machine, as far
    as its launcher says.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    local_size: int = 1


def find_membership(environment: Mapping[str, str]) -> Membership | None:
    """Read the variables of torchrun, Slurm or msrun; None when there are none.

    Parameters
    ----------
    environment : mapping of str to str
        Normally `os.environ`.

    Examples
    --------
    >>> find_membership({}) is None
    True
    >>> found = find_membership({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"})
    >>> (found.launcher, found.rank, found.world_size, found.port)
    ('torchrun', 1, 2, 29400)
    """
    if "MS_WORKER_NUM" in environment and "MS_SCHED_HOST" in environment:
        return _checked(_from_msrun(environment))
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return _checked(_from_torchrun(environment))
    if "SLURM_PROCID" in environment and ("SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment):
        return _checked(_from_slurm(environment))
    return None


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Whether msrun started this process as its scheduler, which has nothing to do here: rank 0 listens itself."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def _from_torchrun(environment: Mapping[str, str]) -> Membership:
    rank = _number(environment, "RANK")
    return Membership(
        launcher="torchrun",
        rank=rank,
        world_size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", rank),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT", DEFAULT_PORT),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", 1),
    )


def _from_slurm(environment: Mapping[str, str]) -> Membership:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    job = _number(environment, "SLURM_JOB_ID", 0)
    return Membership(
        launcher="Slurm",
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, size_name),
        local_rank=0 if _has_own_device(environment) else _number(environment, "SLURM_LOCALID", 0),
        address=environment.get("MASTER_ADDR") or first_host(nodes),
        port=_number(environment, "MASTER_PORT", FIRST_SLURM_PORT + job % SLURM_PORTS),
        local_size=_first_count(environment.get("SLURM_STEP_TASKS_PER_NODE", "1")),
    )


def _from_msrun(environment: Mapping[str, str]) -> Membership:
    world_size = _number(environment, "MS_WORKER_NUM")
    rank = _number(environment, "RANK_ID")
    return Membership(
        launcher="msrun",
        rank=rank,
        world_size=_number(environment, "RANK_SIZE", world_size),
        local_rank=_number(environment, "DEVICE_ID", rank),
        address=environment["MS_SCHED_HOST"],
        port=_number(environment, "MS_SCHED_PORT", DEFAULT_PORT),
        local_size=_number(environment, "MS_LOCAL_WORKER_NUM", 1),
    )


def first_host(node_list: str) -> str:
    """Name the first host of a Slurm node list.

    >>> [first_host(text) for text in ("alpha,beta", "node[007-012,20]-a,other", "solo")]
    ['alpha', 'node007-a', 'solo']
    """
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,]*))?", node_list)
    return "" if match is None else "".join(part or "" for part in match.groups())


def _has_own_device(environment: Mapping[str, str]) -> bool:
    """Whether Slurm has bound the task to one device, which then is its number 0 (``--gpus-per-task 1``)."""
    seen = [environment.get(name, "").strip() for name in VISIBLE]
    return any(devices and "," not in devices for devices in seen)


def _first_count(tasks: str) -> int:
    """Tasks of the first host in Slurm's notation, such as ``4(x2),1``."""
    match = re.match(r"\d+", tasks)
    return int(match[0]) if match else 1


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise InputError(
                f"the variable {name} is not set, but the others of its launcher are; set it for each rank"
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise InputError(f"the variable {name} is {text!r}, which is not an integer; correct or unset it") from None


def _checked(found: Membership) -> Membership:
    if not 0 <= found.rank < found.world_size:
        raise InputError(
            f"rank {found.rank} of {found.world_size} ranks in the variables of {found.launcher} is not possible; "
            "ranks count from 0 to one less than their number"
        )
    if found.local_rank < 0:
        raise InputError(
            f"local rank {found.local_rank} in the variables of {found.launcher} is not possible; ranks count from 0"
        )
    if not found.address.strip():
        raise InputError(f"the variables of {found.launcher} name no host of rank 0; set MASTER_ADDR or MS_SCHED_HOST")
    if not 1 <= found.port <= LAST_PORT:
        raise InputError(
            f"port {found.port} in the variables of {found.launcher} is not possible; give one from 1 to {LAST_PORT}"
        )
    return found
