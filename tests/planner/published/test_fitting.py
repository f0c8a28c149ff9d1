"""The fit of whole steps finds the coefficients that made the times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.software_file import STACK_COEFFICIENTS, shipped_software
from planner.published.fitting import IMAGE_STACK_PRIORS, STACK_PRIORS, WORK, responses
from simulator.profiles import load_profile
from tests.planner.cost.transformers import GPT, run
from tests.planner.published.made_steps import TRUE, made_rows, made_runs, step_fit, true_theta

RUNS = made_runs()
TIMES = np.array([row.measured_time_s for row in made_rows()])


def test_every_coefficient_has_a_prior() -> None:
    assert (*STACK_PRIORS, *IMAGE_STACK_PRIORS) == STACK_COEFFICIENTS


def test_the_times_are_found_and_with_them_what_made_them() -> None:
    fit = step_fit(RUNS, TIMES)
    found = fit.fit()
    before = np.abs(np.log(fit.predicted_s(fit.centres) / TIMES))
    assert np.abs(found.residuals).mean() < 0.03 < 0.1 < before.mean()
    # Priors hold back what few rows say: a row that owes nearly all its time to that stays behind.
    assert np.sort(np.abs(found.residuals))[-3] < 0.06
    theta, true = found.theta, true_theta(fit)
    for owner, name in (("eager", "memory"), ("megatron", "step_overhead_s")):
        place = fit.names.index((owner, name))
        assert abs(theta[place] - true[place]) < 0.75 * abs(fit.centres[place] - true[place]), (owner, name)
    # Factors that only show together are found together.
    ampere, eager, megatron = (
        found.software.devices["ampere"],
        found.software.stacks["eager"],
        found.software.stacks["megatron"],
    )
    assert ampere["matmul"] * megatron["matmul"] == pytest.approx(TRUE["ampere"]["matmul"], rel=0.05)
    memory, true_memory = ampere["memory"] * eager["memory"], TRUE["ampere"]["memory"] * TRUE["eager"]["memory"]
    assert memory == pytest.approx(true_memory, rel=0.15)


def test_what_no_row_speaks_for_stays_where_it_was_expected() -> None:
    fit = step_fit(RUNS, TIMES)
    found = fit.fit()
    for owner, name in (("ampere", "low_precision"), ("megatron", "shard_apart"), ("eager", "context_exposed")):
        place = fit.names.index((owner, name))
        assert found.theta[place] == pytest.approx(fit.centres[place], abs=2e-3)


def test_stacks_that_launch_operators_of_pytorch_are_expected_to_launch_alike() -> None:
    def expected(stack: str) -> float:
        fit = step_fit([(run(GPT, stack=stack), "one")])
        return float(fit.centres[fit.names.index((stack, "launch_s"))])

    assert expected("transformer_engine") == expected("megatron") == expected("eager")
    assert expected("compiled") < expected("eager") < expected("deepspeed")


def test_mindspore_is_expected_to_update_weights_one_operator_after_the_other() -> None:
    fit = step_fit([(run(GPT, stack=stack), "one") for stack in ("mindspore", "eager")])

    def expected(stack: str) -> float:
        return float(np.exp(fit.centres[fit.names.index((stack, "optimizer"))]))

    moved_by_operators, moved_by_one_kernel = 156, 28  # bytes of a weight, its gradient and two moments in float32
    assert expected("mindspore") / expected("eager") > 0.8 * moved_by_operators / moved_by_one_kernel


def test_derivatives_are_those_of_one_coefficient_at_a_time() -> None:
    fit = step_fit(RUNS, TIMES)
    theta = true_theta(fit)
    slopes = fit.derivatives(theta)
    for place in range(len(theta)):
        moved = np.zeros_like(theta)
        moved[place] = 1e-5
        change = np.log(fit.predicted_s(theta + moved) / fit.predicted_s(theta - moved)) / 2e-5
        assert slopes[:, place] == pytest.approx(change, abs=1e-3), fit.names[place]


def test_a_row_beside_all_others_moves_little() -> None:
    wrong = TIMES.copy()
    wrong[7] *= 30
    found = step_fit(RUNS, wrong).fit()
    others = np.delete(np.abs(found.residuals), 7)
    assert np.median(others) < 0.03
    assert found.residuals[7] < -3


def test_rows_that_are_left_out_do_not_count() -> None:
    fit = step_fit(RUNS, TIMES)
    used = fit.sources != "one"
    wrong = step_fit(RUNS, np.where(used, TIMES, 100 * TIMES))
    assert fit.fit(rows=used).theta == pytest.approx(wrong.fit(rows=used).theta)


def test_a_source_counts_with_the_root_of_its_rows() -> None:
    # The same rows ten times over, twice as slow, do not outvote another source tenfold.
    once = [pair for pair in RUNS if pair[1] == "one"]
    many = [(each, "five") for each, _ in once * 10]
    times = np.concatenate([TIMES[: len(once)], np.tile(TIMES[: len(once)] * 1.2, 10)])
    found = step_fit([*once, *many], times).fit()
    share = -np.median(found.residuals[len(once) :]) / np.log(1.2)
    assert 0.02 < share < 0.5


def test_a_plan_grows_by_each_kind_of_work_and_by_nothing_that_it_lacks() -> None:
    """Responses come from plans: what one device alone does is no message, and bfloat16 has no narrow products."""
    shape = replace(GPT, layers=2, hidden=256, heads=4, key_value_heads=4, head_size=64, feed_forward=1024)
    alone = replace(run(shape, stack="transformer_engine", micro_batch=2), hardware=load_profile("dgx-a100"))
    eight = replace(run(shape, dp=8, stack="transformer_engine", micro_batch=2), hardware=load_profile("dgx-a100"))
    found = responses([alone, eight], shipped_software())
    by_name = dict(zip([work.name for work in WORK], found.response_s.T, strict=True))
    for name in ("matmul", "memory", "launch", "optimizer", "step"):
        assert (by_name[name] > 0).all(), name
    assert by_name["low_precision"].tolist() == [0, 0]
    assert by_name["pipeline_exposed"].tolist() == [0, 0]
    assert by_name["inside"][0] == 0 < by_name["inside"][1]
    # What every kind of work takes adds up to the step, but for what runs beside something else.
    assert (found.response_s.sum(axis=1) < 1.2 * found.time_s).all()
    own = shipped_software().coefficients.stacks["transformer_engine"]["step_overhead_s"]
    assert by_name["step"] == pytest.approx(own, rel=1e-6)
