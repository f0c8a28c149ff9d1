"""Which coefficients a run takes."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from planner.cost.software_file import STACK_COEFFICIENTS, SoftwareCoefficients
from planner.cost.stacks import family_of
from planner.cost.training_run import TrainingRun
from planner.published.estimate.coefficients import DEVICE_COEFFICIENTS, NEUTRAL, combine, gather, stack_key
from planner.published.estimate.step import Coefficients
from simulator.profile_file import TrainingPart
from simulator.profiles import profile_names
from tests.planner.published.estimate.transformers import profile, run


def test_factors_multiply_and_the_rest_is_the_stacks() -> None:
    found = combine(
        [{"matmul": 2.0, "launch": 3.0, "jitter": 0.1, "attention": 1.5}, {}],
        [{"matmul": 1.5, "launch_s": 1e-5, "tensor_exposed": 0.2}, {"experts": 4.0}],
        [1.2, 1.0],
    )
    expected = {
        "matmul": (3.0, 1.0), "launch_s": (3e-5, NEUTRAL.launch_s), "jitter": (0.1, 0.0), "attention": (1.8, 1.0),
        "tensor_exposed": (0.2, NEUTRAL.tensor_exposed), "experts": (1.0, 4.0), "outside": (1.0, 1.0),
    }  # fmt: skip
    for name, values in expected.items():
        assert getattr(found, name) == pytest.approx(np.array(values)), name


def test_every_coefficient_belongs_to_a_device_or_a_stack() -> None:
    names = {field.name for field in fields(Coefficients)}
    assert (set(DEVICE_COEFFICIENTS) - {"launch"}) | set(STACK_COEFFICIENTS) == names
    assert {name for name in TrainingPart.model_fields if not name.startswith("planned_")} == set(DEVICE_COEFFICIENTS)


def test_the_profile_speaks_for_the_device_unless_the_fit_does() -> None:
    hardware = replace(profile("dgx-a100"), training={"memory": 1.5})
    runs = [TrainingRun(network=r.network, setup=r.setup, hardware=hardware) for r in (run(), run(attention="vendor"))]
    software = SoftwareCoefficients(stacks={"megatron": {"memory": 2.0}}, attention={"vendor": 1.5})
    found = gather(software, runs)
    assert found.memory == pytest.approx(np.array([3.0, 3.0]))
    assert found.attention == pytest.approx(np.array([1.0, 1.5]))
    judged = gather(replace(software, devices={"ampere": {"memory": 4.0}}), runs)
    assert judged.memory == pytest.approx(np.array([8.0, 8.0]))


def test_deterministic_kernels_have_a_stack_of_their_own() -> None:
    assert [stack_key(run(deterministic=flag)) for flag in (False, True)] == [
        "megatron", "megatron_deterministic",
    ]  # fmt: skip


def test_every_shipped_device_has_a_family() -> None:
    families = {name: family_of(profile(name).device_name) for name in profile_names()}
    assert "other" not in families.values(), families
    assert (families["dgx-a100"], families["dgx-b200"], families["dgx1-v100"]) == ("ampere", "blackwell", "volta")
    assert families["ascend910-atlas800"] == "ascend910"
    assert families["ascend910b-atlas800t-a2"] == families["cloudmatrix384"] == "ascend910b"
