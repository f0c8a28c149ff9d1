import math

import pytest

from planner.execution.verification import TOLERANCES, relative_difference, tolerances, verified
from simulator.errors import ExecutionError


def test_equal_losses_pass():
    assert verified([2.0, 1.0], [2.0, 1.0 + 1e-12], "fp64") == [1e-10, 1e-10]


def test_the_first_differing_step_is_named():
    with pytest.raises(ExecutionError, match=r"step 1: loss 1.1 .*1.0.*1.00e-01.*fp32 allows 1e-04.*fp64") as raised:
        verified([2.0, 1.1, 9.0], [2.0, 1.0, 1.0], "fp32")
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_no_number_never_passes(loss):
    assert relative_difference(loss, 1.0) == math.inf
    assert relative_difference(loss, loss) == math.inf


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_training_that_diverges_says_so(loss):
    with pytest.raises(ExecutionError, match=rf"^training diverged at step 1: loss {loss}; lower --learning-rate$"):
        verified([1.0, loss, 1.0], [1.0, loss, 1.0], "fp32")
    with pytest.raises(ExecutionError, match="one process diverged at step 0"):
        verified([1.0], [loss], "fp64")


def test_every_precision_that_runs_has_a_tolerance():
    from planner.execution.job import PRECISIONS

    assert TOLERANCES.keys() == PRECISIONS.keys()


def test_a_sensitive_network_may_differ_by_a_multiple_of_what_rounding_does_to_it():
    losses, reference = [1.0, 1.002], [1.0, 1.001]
    calm, sensitive = [1.0, 1.001 + 1e-9], [1.0, 1.0]
    for others in ([], [calm]):
        with pytest.raises(ExecutionError, match="step 1"):
            verified(losses, reference, "fp32", others)
    assert verified(losses, reference, "fp32", [calm, sensitive]) == pytest.approx([1e-4, 1e-2], rel=1e-2)
    with pytest.raises(ExecutionError, match="step 0"):
        verified([1.1, 1.0], reference, "fp32", [calm, sensitive])


def test_one_process_trains_again_only_while_that_is_needed():
    def others():
        yield [1.0, 1.0]
        pytest.fail("rounding explains the difference already")

    assert verified([1.0, 1.001], [1.0, 1.001], "fp32", others()) == [TOLERANCES["fp32"]] * 2
    assert verified([1.0, 1.002], [1.0, 1.001], "fp32", others())[1] > 1e-3


def test_tolerances_never_shrink():
    assert tolerances("fp32", [1.0, 1.1, 1.0], [[1.0, 1.0, 1.0]]) == pytest.approx([1e-4, 1.0, 1.0])


def test_fp64_of_a_chaotic_network_may_drift_but_never_far():
    reference, nudged = [1.0, 1.0, 1.0], [1.0, 1.0 + 1e-11, 1.0 + 1e-5]
    assert tolerances("fp64", reference, [nudged]) == pytest.approx([1e-10, 1e-9, 1e-6])
    with pytest.raises(ExecutionError, match="step 2"):
        verified([1.0, 1.0, 1.0 + 2e-6], reference, "fp64", [nudged])
