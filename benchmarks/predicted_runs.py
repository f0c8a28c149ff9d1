"""Predictions of published runs as `plan` makes them: by the closed form that it searches with, and simulated."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import FrameType

import yaml

from benchmarks.published_runs import NotCoveredError, Run, require
from planner.cost.software import as_run
from planner.planning.configured import Configured
from planner.planning.planning import PlanRequest, capture_for
from planner.planning.setting import setting_of
from planner.planning.shared_tables import NetworkTables, SharedTables
from planner.plans.request import read_pins
from planner.search.stages.unit_pins import UnitPins
from planner.search.units.labels import RECOMPUTE
from simulator.hardware import Hardware, load_profile

PROFILES = Path(__file__).parents[1] / "hw_profiles"
LIMIT_S = 60.0
"""Seconds of computation that one prediction may take."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise NotCoveredError once the process has computed for `seconds`; waiting does not count."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise NotCoveredError(f"takes longer than {seconds:g} s")

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
        self.folder, self.limit_s = folder, limit_s
        self.graphs: dict[tuple[str, int | None, str, str], SharedTables] = {}
        self.known: dict[tuple[Run, Hardware | None], float] = {}

    def closed_form_s(self, run: Run, changed: Callable[[Hardware], Hardware] = lambda hardware: hardware) -> float:
        """Seconds of a step by the closed form, on the run's hardware or on what `changed` makes of it."""
        request = self._request(run)
        search = self._search(run, request)
        told = {name: search.base[name] for name in ("tensor_overlap", "expert_overlap", "sent_once")}
        hardware = as_run(changed(load_profile(request.hardware)), run.software, run.attention, **told)
        if (run, hardware) not in self.known:
            with limited(self.limit_s):
                found = replace(search, hardware=hardware).explore(read_pins(request)).found
            require(found, "no plan")
            self.known[run, hardware] = min(placed.objective_s for placed in found)
        return self.known[run, hardware]

    def simulated_s(self, run: Run) -> float:
        """Seconds of a simulated step of the run's plan, as `plan` reports them."""
        request = self._request(run)
        if (run, None) not in self.known:
            with limited(self.limit_s):
                search = self._search(run, request)
                scored = search.scored(search.explore(read_pins(request)), 1)
            require(scored, "no plan")
            self.known[run, None] = scored[0].prediction.step_time_s
        return self.known[run, None]

    def _search(self, run: Run, request: PlanRequest) -> Configured:
        """The search over configurations as `plan` would start it, its stages cut as the run's."""
        setting = setting_of(request, None, self._shared(request))
        return replace(setting.search, unit_pins=_of_layers(run, setting.tables, setting.search.unit_pins))

    def _request(self, run: Run) -> PlanRequest:
        return PlanRequest(
            network=self._spec(run.network, run.adapters), hardware=self._profile(run.hardware), devices=run.devices,
            global_batch=run.global_batch, sequence_length=run.sequence_length, precision=run.precision,
            pins=dict(run.pins), hints=run.hints, top=1, software=run.software, attention=run.attention,
            norms=run.norms, exchange=run.exchange,
        )  # fmt: skip

    def _shared(self, request: PlanRequest) -> SharedTables:
        key = (request.network, request.sequence_length, request.attention, request.norms)
        if key not in self.graphs:
            self.graphs[key] = SharedTables(capture_for(request))
        return self.graphs[key]

    def _spec(self, network: str, adapters: str) -> str:
        if not network.startswith("{"):
            return network
        path = self.folder / str(abs(hash((network, adapters))))
        path.mkdir(exist_ok=True)
        for name, content in (("config.json", network), ("adapter_config.json", adapters)):
            if content:
                (path / name).write_text(content, encoding="utf-8")
        return f"hf:{path}"

    def _profile(self, name: str) -> str:
        path = self.folder / f"{name}.yaml"
        if not path.exists():
            content = yaml.safe_load((PROFILES / path.name).read_text(encoding="utf-8"))
            content["device"]["memory_bytes"]["value"] = 10**14
            path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return str(path)


def _of_layers(run: Run, tables: NetworkTables, pinned: UnitPins) -> UnitPins:
    """`pinned` with the run's stages, and the layers that it computes again.

    Stages begin behind so many layers, the last of which ends the network's longest row of units. The first layer may
    be unlike the others, and a unit apart. Each chunk of a stage computes again as many of its layers, the first ones
    (``recompute-num-layers`` of Megatron-LM's method ``block``).
    """
    if not run.layers:
        return pinned
    counts = [unit.count for unit in tables.decisions.chain.units]
    front = sum(counts[: counts.index(max(counts)) + 1]) - sum(run.layers)
    virtual = int(dict(run.pins).get("vpp", 1))
    ends = [front + end for end in accumulate(run.layers)]
    modes = [0] * sum(counts) if run.again else []
    for begin, end in zip([front, *ends], ends, strict=False):
        again = min(run.again // virtual, end - begin)
        modes[begin : begin + again] = [RECOMPUTE.index("full")] * again
    cuts = tuple(range(end, end + 1) for end in ends[:-1])
    return replace(pinned, cuts=cuts, virtual=virtual, modes=tuple(modes))
