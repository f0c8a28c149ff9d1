import math

import pytest

from planner.execution.verification import TOLERANCES, compare_losses, relative_difference, tolerances
from simulator.errors import ExecutionError


def test_equal_losses_pass():
    assert compare_losses([2.0, 1.0], [2.0, 1.0 + 1e-12], "fp64") == pytest.approx(1e-12, rel=1e-3)


def test_the_first_differing_step_is_named():
    with pytest.raises(ExecutionError, match=r"step 1: loss 1.1 .*1.0.*1.00e-01.*fp32 allows 1e-04.*fp64") as raised:
        compare_losses([2.0, 1.1, 9.0], [2.0, 1.0, 1.0], "fp32")
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_no_number_never_passes(loss):
    assert relative_difference(loss, 1.0) == math.inf
    assert relative_difference(loss, loss) == math.inf


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_training_that_diverges_says_so(loss):
    with pytest.raises(ExecutionError, match=rf"^training diverged at step 1: loss {loss}; lower --learning-rate$"):
        compare_losses([1.0, loss, 1.0], [1.0, loss, 1.0], "fp32")
    with pytest.raises(ExecutionError, match="one process diverged at step 0"):
        compare_losses([1.0], [loss], "fp64")


def test_every_precision_that_runs_has_a_tolerance():
    from planner.execution.job import PRECISIONS

    assert TOLERANCES.keys() == PRECISIONS.keys()


def test_a_sensitive_network_may_differ_by_a_multiple_of_its_own_rounding():
    losses, reference, exact = [1.0, 1.002], [1.0, 1.001], [1.0, 1.0]
    with pytest.raises(ExecutionError, match="step 1"):
        compare_losses(losses, reference, "fp32")
    assert compare_losses(losses, reference, "fp32", exact) == pytest.approx(1e-3, rel=1e-2)
    with pytest.raises(ExecutionError, match="step 0"):
        compare_losses([1.1, 1.0], reference, "fp32", exact)


def test_tolerances_never_shrink():
    assert tolerances("fp32", [1.0, 1.1, 1.0], [1.0, 1.0, 1.0]) == pytest.approx([1e-4, 1.0, 1.0])


def test_fp64_of_a_chaotic_network_may_drift_but_never_far():
    reference, nudged = [1.0, 1.0, 1.0], [1.0, 1.0 + 1e-11, 1.0 + 1e-5]
    assert tolerances("fp64", reference, nudged) == pytest.approx([1e-10, 1e-9, 1e-6])
    with pytest.raises(ExecutionError, match="step 2"):
        compare_losses([1.0, 1.0, 1.0 + 2e-6], reference, "fp64", nudged)
