"""`meshwright plan`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import RequestOptions, check_out, how_many, natural, option, takes
from planner.cli.terminal import Terminal

if TYPE_CHECKING:
    from planner.cli.config import GivenOptions, PlanSettings
    from planner.planning.planning import PlanRequest, SearchResult
    from planner.search.patience import Patience

WAITING = "interrupted before there was a plan: going on to the first one (again: end with nothing)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments(RequestOptions):
    """Arguments and options, None where not given."""

    network: Annotated[
        str | None,
        typer.Argument(help="zoo:NAME, hf:PATH, timm:NAME, tv:NAME, py:module:factory or pt2:FILE.", metavar="NETWORK"),
    ] = None
    hardware: Annotated[str | None, option("--hw", "A profile's name or the path of one.", "PROFILE")] = None
    devices: Annotated[int | None, option("--devices", "Number of devices.", "N", natural)] = None
    config: Annotated[
        Path | None, option("--config", "Take these options from a file; the command line wins.", "FILE.yaml")
    ] = None
    hints: Annotated[
        Path | None, option("--hints", "Placements of operators by pattern; see docs/search.md.", "FILE.yaml")
    ] = None
    top: Annotated[
        int | None, option("--top", "How many plans to show [5]; given, all are written.", "N", how_many)
    ] = None
    out: Annotated[Path | None, option("--out", "The strategy file to write [strategy.json].", "FILE")] = None
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also where the time goes, why others lost, and what was proved.")
    ] = False

    def settings(self) -> PlanSettings:
        """What was given of the options that may also stand in a file."""
        from planner.cli.config import PlanSettings

        return PlanSettings(
            **self.asked(),
            hw=self.hardware,
            devices=self.devices,
            hints=None if self.hints is None else str(self.hints),
            top=self.top,
            out=None if self.out is None else str(self.out),
        )


@takes(PlanArguments)
def plan(given: PlanArguments, terminal: Terminal) -> None:
    """Find the fastest plan for a network on a cluster.

    The best plan is written to a strategy file.

    \b
    Example: GPT-2 on one DGX with eight A100
      meshwright plan zoo:gpt2 --hw dgx-a100 --devices 8
    With a fixed tensor-parallel size, as JSON
      meshwright plan zoo:gpt2 --hw dgx-a100 --devices 8 --pin tp=2 --json
    With options from a file (keys are the names of the options)
      meshwright plan --config gpt2.yaml
    For the software that it will run on, whose attention is not fused
      meshwright plan zoo:gpt2 --hw dgx-a100 --devices 8 --software megatron_deepspeed --attention fused_softmax
    With degrees from a file in MindFormers' style (parallel, parallel_config, …)
      meshwright plan zoo:gpt2 --hw ascend910b-atlas800t-a2 --devices 8 --config parallel.yaml

    The table shows each plan, its step time with a 90 % interval, speed and memory; --verbose shows the rest.
    With --quiet only the name of the strategy file is printed; --debug says where the time went. Exit code 3: no plan
    fits. Ctrl-C ends the search: the best plan so far, or else the first that is found, is written with its gap (exit
    code 0).
    """
    from planner.cli.config import GivenOptions, with_config

    settings, config = given.settings(), given.config
    found = GivenOptions(settings=settings) if config is None else with_config(settings, config)
    for note in found.notes:
        terminal.note(note)
    _run(terminal, found, config, given)


def _run(terminal: Terminal, found: GivenOptions, config: Path | None, given: PlanArguments) -> None:
    from planner.planning.planning import software_note, with_usual_software
    from planner.search.patience import Patience
    from simulator.quantities import seconds_text

    settings = found.settings
    asked = _request(settings, found)
    path = settings.out or "strategy.json"
    check_out("--out", path, (settings.hardware, settings.hints, config, found.stored or None))
    request = with_usual_software(asked)
    with terminal.working(f"planning {request.network} for {request.devices} devices"):
        patience = Patience(say=lambda: terminal.note(WAITING))
        with patience.listening():
            result, request = (_stored(request, found.stored), request) if found.stored else _planned(request, patience)
    if not asked.software:
        result = replace(result, messages=(*result.messages, software_note(request.software)))
    if terminal.debug and result.timings:
        terminal.note("; ".join(f"{phase} {seconds_text(seconds)}" for phase, seconds in result.timings.items()))
    _finish(terminal, request, result, path, several=settings.top is not None, given=given, asked=asked.devices)


def _planned(request: PlanRequest, patience: Patience) -> tuple[SearchResult, PlanRequest]:
    """Plans that are searched for on all cores that this process may use, and the request that they answer."""
    from planner.planning.mixed_cluster import plan_on_cluster
    from simulator.calibration.process import available_cores

    return plan_on_cluster(request, patience=patience, cores=available_cores())


def _stored(request: PlanRequest, source: str) -> SearchResult:
    """The plan of a strategy file, as the one candidate of a search."""
    from planner.exchange.mindspore.entry import read_stored
    from planner.planning.one_stage import Candidate
    from planner.planning.planning import SearchResult, capture_for

    started = time.perf_counter()
    graph = capture_for(request)
    captured = time.perf_counter()
    plan, prediction = read_stored(request, graph, source)
    return SearchResult(
        status=plan.certificate.status,
        candidates=(Candidate(plan=plan, prediction=prediction, reason=""),),
        elapsed_s=time.perf_counter() - captured,
        capture_s=captured - started,
        messages=(f"the plan is that of {source}, as strategy_ckpt_load_file asks; nothing was searched",),
    )


def _request(settings: PlanSettings, found: GivenOptions) -> PlanRequest:
    from planner.cli.config import require
    from planner.planning.planning import PlanRequest
    from planner.plans.hints import load_hints

    require(settings.network, "NETWORK", "zoo:gpt2")
    require(settings.hardware, "--hw", "--hw dgx-a100")
    require(settings.devices, "--devices", "--devices 8")
    said = {name: value for name, value in settings if value is not None and name not in ("hints", "out")}
    hints = () if settings.hints is None else load_hints(settings.hints)
    return PlanRequest(**said, hints=hints, marks=found.marks, exchange=found.exchange)


def _finish(
    terminal: Terminal,
    request: PlanRequest,
    result: SearchResult,
    path: str,
    *,
    several: bool,
    given: PlanArguments,
    asked: int,
) -> None:
    """Write the best plan, and with `several` those behind it, and show them."""
    from planner.planning.documents import prediction_document, result_document
    from planner.plans.file import write_alternatives, write_plan
    from simulator.errors import InfeasibleError
    from simulator.profiles import load_profile

    hardware = load_profile(request.hardware)
    feasible = bool(result.candidates)
    if feasible:
        best = result.candidates[0]
        write_plan(best.plan, path, prediction_document(best.prediction))
        if several:
            others = result.candidates[1:]
            write_alternatives(path, [(one.plan, prediction_document(one.prediction)) for one in others])
    for message in result.messages if terminal.json else ():
        terminal.note(message)
    if terminal.json:
        terminal.document(result_document(result, hardware, request.search_mode, path if feasible else None))
    elif feasible and terminal.quiet:
        terminal.line(path)
    elif feasible:
        from planner.cli.plan_tables import plan_report

        terminal.show(*plan_report(result, hardware, path, left_out=asked - request.devices, verbose=given.verbose))
    if not feasible:
        raise InfeasibleError(result.infeasible)
