"""The number of micro-batches can be pinned, in every search mode, and contradictions are said."""

from __future__ import annotations

import pytest

from planner.planning.planning import PlanRequest, plan_network
from planner.plans.pins import Pins
from planner.plans.request import SEARCH_MODES
from simulator.errors import InputError


def request(pins: dict[str, str], **fields: object) -> PlanRequest:
    fields = {"network": "zoo:mlp", "devices": 4, "global_batch": 64, **fields}
    return PlanRequest(hardware="dgx-a100", pins=Pins.read(pins), top=1, sensitivity=False, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", SEARCH_MODES)
@pytest.mark.parametrize("count", [1, 4])
def test_every_search_keeps_the_number(mode: str, count: int) -> None:
    plan = (
        plan_network(request({"dp": "2", "tp": "2", "micro_batches": str(count)}, search_mode=mode)).candidates[0].plan
    )
    assert plan.micro_batches == count
    assert plan.micro_batch * count * 2 == 64


def test_pipelines_keep_the_number() -> None:
    plan = plan_network(request({"pp": "2", "micro_batches": "8"})).candidates[0].plan
    assert (plan.pipeline, plan.micro_batches) == (2, 8)


def test_data_parallel_mode_keeps_the_number() -> None:
    plan = plan_network(request({"micro_batches": "2"}, parallel_mode="data_parallel")).candidates[0].plan
    assert (plan.micro_batches, plan.micro_batch) == (2, 8)


@pytest.mark.parametrize("mode", ["auto_parallel", "data_parallel"])
@pytest.mark.parametrize(
    ("pins", "texts"),
    [
        ({"micro_batches": "3"}, ("batch 64", "micro_batches=3", "--global-batch")),
        ({"dp": "4", "micro_batch": "4", "micro_batches": "8"}, ("micro_batch=4", "micro_batches=8")),
        ({"dp": "4", "micro_batch": "4", "micro_batches": "2"}, ("micro_batch=4", "micro_batches=2")),
    ],
)
def test_what_does_not_divide_is_refused(mode: str, pins: dict[str, str], texts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as error:
        plan_network(request(pins, parallel_mode=mode))
    assert all(text in str(error.value) for text in texts), str(error.value)
