"""Predictions of published runs as `plan` makes them: by the closed form that it searches with, and simulated."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from planner.cost.software import as_run
from planner.planning.configured import Configured
from planner.planning.planning import PlanRequest, capture_for
from planner.planning.setting import setting_of
from planner.planning.shared_tables import SharedTables
from planner.plans.exchange import UNASKED
from planner.plans.pins import Pins
from planner.plans.request import checked_pins
from planner.published.pinned import FUSED, NotPinnedError, PinnedRun, pinned_run, require
from planner.published.planned import Workplace, network_key
from planner.published.reading import MeasuredRow
from simulator.hardware import Hardware
from simulator.profiles import load_profile

PROFILES = Path(__file__).parents[1] / "hw_profiles"
LIMIT_S = 60.0
"""Seconds of computation that one prediction may take."""


def measured_run(row: MeasuredRow) -> PinnedRun:
    """The pinned plan of a row whose time was measured; NotPinnedError says why there is none."""
    require(row.run is not None, "misses facts")
    require(row.outcome == "ok" and row.measured_time_s > 0, "did not run, or no time")
    run = row.run
    assert run is not None
    require(not run.setup.deterministic, "a functional test, bound by the host")
    return pinned_run(run)


def as_usual(run: PinnedRun) -> PinnedRun:
    """`run` as a plan that is told no software; NotPinnedError where that is another plan."""
    pins = run.pins.without(["stage_layers"]).said()
    require(not run.adapters, "trains a part only")
    require(not run.approximated, "something stands in for what ran")
    require(run.attention in ("", *FUSED), "attention is not fused")
    require("ep" not in pins and "num_local_experts" not in run.network, "experts")
    require("cp" not in pins and "recompute_layers" not in pins, "context ranks, or recomputes some layers only")
    require(not any(name.startswith("offload") for name in pins), "offload")
    require(run.precision in ("fp32", "fp16", "bf16"), f"precision {run.precision}")
    return replace(
        run,
        pins=Pins.read(pins),
        hints=(),
        software="",
        attention="",
        norms="",
        optimizer=None,
        exchange=UNASKED,
    )


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise NotPinnedError once the process has computed for `seconds`; waiting does not count."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise NotPinnedError(f"takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Predictor:
    """Predicts runs in a temporary folder, whatever memory they take; equal runs and equal networks once."""

    def __init__(self, folder: Path, limit_s: float = LIMIT_S) -> None:
        self.workplace, self.limit_s = Workplace(folder), limit_s
        self.graphs: dict[tuple[str, ...], SharedTables] = {}
        self.known: dict[tuple[PinnedRun, Hardware | None], float] = {}

    def closed_form_s(
        self, run: PinnedRun, changed: Callable[[Hardware], Hardware] = lambda hardware: hardware
    ) -> float:
        """Seconds of a step by the closed form, on the run's hardware or on what `changed` makes of it."""
        request = self.workplace.request(run, limited=False)
        search = self._search(run, request)
        told = {name: search.base[name] for name in ("tensor_overlap", "expert_overlap", "sent_once")}
        told |= {"language": run.sequence_length is not None, "optimizer": request.optimizer or ""}
        hardware = as_run(changed(load_profile(request.hardware)), run.software, run.attention, **told)
        if (run, hardware) not in self.known:
            with limited(self.limit_s):
                found = replace(search, hardware=hardware).explore(checked_pins(request)).found
            require(found, "no plan")
            self.known[run, hardware] = min(placed.objective_s for placed in found)
        return self.known[run, hardware]

    def simulated_s(self, run: PinnedRun) -> float:
        """Seconds of a simulated step of the run's plan, as `plan` reports them."""
        request = self.workplace.request(run, limited=False)
        if (run, None) not in self.known:
            with limited(self.limit_s):
                search = self._search(run, request)
                scored = search.scored(search.explore(checked_pins(request)), 1)
            require(scored, "no plan")
            self.known[run, None] = scored[0].prediction.step_time_s
        return self.known[run, None]

    def _search(self, run: PinnedRun, request: PlanRequest) -> Configured:
        """The search over configurations as `plan` would start it."""
        if network_key(run) not in self.graphs:
            self.graphs[network_key(run)] = SharedTables(capture_for(request))
        return setting_of(request, None, self.graphs[network_key(run)]).search
