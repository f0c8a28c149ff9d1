"""How good the predictions are meant to be: one figure of one group of rows each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.cost.stacks import family_of
from planner.cost.training_run import LayeredNetwork, OptimizerSharding, TrainingRun
from planner.published.metrics import Accuracy, Metrics

EVERYTHING = "all rows"
ALL_TRANSFORMERS = "all transformers"
TRANSFORMERS = "transformers on A100 and H100, stated in full"
ASCEND = "Ascend"
CONVOLUTIONAL = "vision networks and others"
BY_LAYERS_ALONE = "vision and speech networks without a plan, by their layers"
FSDP = "fully sharded (FSDP, ZeRO-3)"
EXPERTS = "experts"
LOW_PRECISION = "products in 8 and 4 bits"
ADAPTERS = "adapters of frozen networks"
IN_PART = "transformers on A100 and H100, stated in part"
ELSEWHERE = "transformers on other devices"
FUNCTIONAL = "functional tests: tiny networks, deterministic kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The figure `figure` of `Metrics` of a group is to lie between two limits."""

    name: str
    group: str
    figure: str
    low: float | None = None
    high: float | None = None

    def met(self, metrics: Metrics) -> bool | None:
        """Whether the aim is met; None where no row tells."""
        value = getattr(metrics, self.figure)
        if value is None:
            return None
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


TIME_LIMITS = {
    TRANSFORMERS: 0.06, IN_PART: 0.13, FSDP: 0.09, EXPERTS: 0.14, LOW_PRECISION: 0.10, ADAPTERS: 0.15, ASCEND: 0.14,
    CONVOLUTIONAL: 0.10,
}  # fmt: skip
"""Mean absolute errors of step times, by group."""
AIMS = (
    *(
        Aim(name="time, mean absolute error", group=group, figure="time_mean", high=limit)
        for group, limit in TIME_LIMITS.items()
    ),
    Aim(name="time, bias", group=EVERYTHING, figure="time_bias", low=-0.02, high=0.02),
    Aim(name="measured inside the 90 % interval", group=EVERYTHING, figure="inside_interval", low=0.85, high=0.95),
    Aim(name="memory, mean absolute error", group=EVERYTHING, figure="memory_mean", high=0.03),
    Aim(name="out of memory, recall", group=EVERYTHING, figure="oom_recall", low=0.96),
    Aim(name="out of memory, precision", group=EVERYTHING, figure="oom_precision", low=0.91),
    Aim(name="regret of the plan ranked first", group=EVERYTHING, figure="regret", high=0.015),
    Aim(name="rows with a prediction", group=ALL_TRANSFORMERS, figure="coverage", low=0.95),
)


def group_of(run: TrainingRun, *, complete: bool = True) -> str:
    """The group whose aim a run falls under; `complete` says that its source states shape and plan in full."""
    family = family_of(run.hardware.device_name)
    if run.setup.deterministic:
        return FUNCTIONAL
    if family.startswith("ascend"):
        return ASCEND
    if isinstance(run.network, LayeredNetwork):
        return CONVOLUTIONAL
    if run.setup.trained_fraction < 1:
        return ADAPTERS
    if run.network.experts is not None:
        return EXPERTS
    if run.setup.precision in ("fp8", "fp4"):
        return LOW_PRECISION
    if run.setup.optimizer_sharding is OptimizerSharding.ZERO3:
        return FSDP
    if family not in ("ampere", "hopper"):
        return ELSEWHERE
    return TRANSFORMERS if complete else IN_PART


def metrics_of(accuracy: Accuracy, group: str) -> Metrics | None:
    """The figures of a group; None where no row belongs to it."""
    groups: Mapping[str, Metrics] = {
        **accuracy.by_group,
        EVERYTHING: accuracy.overall,
        ALL_TRANSFORMERS: accuracy.transformers,
    }
    return groups.get(group)
