import pytest

from planner.execution.launch.membership import Membership, find_membership, first_host, is_scheduler
from simulator.errors import InputError

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "20042",
    "SLURM_JOB_NODELIST": "node[07-10]",
}
MSRUN = {
    "MS_WORKER_NUM": "8",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "MS_ROLE": "MS_WORKER",
    "RANK_ID": "5",
    "DEVICE_ID": "5",
}


def test_a_process_started_alone_belongs_to_no_job():
    assert find_membership({"PATH": "/bin"}) is None


def test_torchrun():
    found = find_membership(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29400"}
    )
    assert found == Membership(launcher="torchrun", rank=3, world_size=4, local_rank=1, address="a", port=29400)


def test_slurm_step():
    found = find_membership(SLURM)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.address) == (3, 8, 1, "node07")
    assert 1024 < found.port < 65536


@pytest.mark.parametrize(
    ("seen", "number"),
    [({"CUDA_VISIBLE_DEVICES": "3"}, 0), ({"ASCEND_RT_VISIBLE_DEVICES": "3"}, 0), ({"CUDA_VISIBLE_DEVICES": "2,3"}, 1)],
)
def test_a_device_that_slurm_binds_to_a_task_is_the_only_one_it_sees(seen, number):
    assert find_membership({**SLURM, **seen}).local_rank == number


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, 2),
        (SLURM, 1),
        ({**MSRUN, "MS_LOCAL_WORKER_NUM": "8"}, 8),
    ],
)
def test_ranks_on_one_machine(environment, size):
    assert find_membership(environment).local_size == size


def test_slurm_allocation_without_a_step_is_no_job():
    assert find_membership({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}) is None


def test_msrun():
    found = find_membership(MSRUN)
    assert found == Membership(launcher="msrun", rank=5, world_size=8, local_rank=5, address="10.0.0.1", port=8118)
    assert not is_scheduler(MSRUN)
    assert is_scheduler({**MSRUN, "MS_ROLE": "MS_SCHED"})


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({"RANK": "x", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "RANK is 'x'"),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "rank 4 of 4"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": ""}, "torchrun name no host of rank 0"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "port 99999"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "LOCAL_RANK": "-1"}, "local rank -1"),
        ({name: value for name, value in MSRUN.items() if name != "RANK_ID"}, "RANK_ID is not set"),
    ],
)
def test_wrong_variables_are_named(environment, part):
    with pytest.raises(InputError, match=part):
        find_membership(environment)


def test_first_host_of_a_plain_list():
    assert first_host("n1,n2") == "n1"
