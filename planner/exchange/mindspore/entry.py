"""A plan for a network under a context, found or read from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.exchange.mindspore.context import AutoParallelContext
from planner.exchange.mindspore.requests import request_of
from planner.networks.given import source_of
from planner.networks.marks import LARGEST_STAGE, Marks, is_module, mark_cuts
from planner.sharding.cuts import OperatorCuts
from simulator.checks import integer, strategy
from simulator.errors import ContextError, InfeasibleError, InputError

if TYPE_CHECKING:
    from planner.execution.run import ExecutionReport
    from planner.graph.operator_graph import OperatorGraph
    from planner.networks.given import Source
    from planner.networks.network import Network
    from planner.planning.planning import SearchResult
    from planner.planning.prediction import Prediction
    from planner.plans.pins import Pins
    from planner.plans.plan import Plan
    from planner.plans.request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and what it is predicted to do.

    ``result`` is what the search found, None where the plan was read; ``written`` the strategy file, if any.
    """

    plan: Plan
    prediction: Prediction
    result: SearchResult | None
    written: Path | None


def plan_under(
    context: AutoParallelContext,
    network: str | Network | Callable[[], object],
    hardware: str,
    *,
    pins: Mapping[str, object] | Pins | None = None,
    **options: Any,
) -> Planned:
    """Plan a network under a context; parameters and errors as `planner.plan`."""
    from planner.planning.planning import capture_for, plan_network
    from planner.plans.file import write_plan

    source_network = network if not callable(network) else source_of(network)
    request = request_of(context, source_network, hardware, pins=pins, **options)
    source, target = (context.counted(f"strategy_ckpt_{use}_file", "") for use in ("load", "save"))
    if target:
        from simulator.whole_file import check_writable

        check_writable(target)
    graph = capture_for(request)
    result = None
    if source:
        found, prediction = read_stored(request, graph, source)
    else:
        result = plan_network(request, graph=graph)
        if not result.candidates:
            raise InfeasibleError(result.infeasible)
        found, prediction = result.candidates[0].plan, result.candidates[0].prediction
    written = None
    if target:
        from planner.planning.documents import prediction_document

        written = write_plan(found, target, prediction_document(prediction))
    return Planned(plan=found, prediction=prediction, result=result, written=written)


def read_stored(request: PlanRequest, graph: OperatorGraph, source: str) -> tuple[Plan, Prediction]:
    """A plan from a strategy file for a request, with what is predicted of it.

    Raises
    ------
    ContextError
        The file is of another network or another number of devices, or the request asks for something else.
    StrategyError
        The file is wrong.
    """
    from planner.cost.software import run_for
    from planner.lowering.checked import checked_graph
    from planner.planning.loading import naming
    from planner.planning.prediction import predict_plan
    from planner.plans.file import read_plan
    from simulator.profiles import load_profile

    found = read_plan(source)
    where = f"strategy_ckpt_load_file={source!r}"
    if found.fingerprint != graph.fingerprint:
        raise ContextError(
            f"{where} is of another network: its fingerprint is {found.fingerprint[:12]}…, that of {request.network} "
            f"is {graph.fingerprint[:12]}…; plan {request.network} again, or give the file of this network"
        )
    if found.devices != request.devices:
        raise ContextError(
            f"{where} is for {found.devices} devices, device_num={request.devices}; set device_num={found.devices}, or "
            f"plan again"
        )
    hardware = run_for(found, load_profile(request.hardware))
    _check_agrees(request, found, where)
    with naming(source):
        checked = checked_graph(found, graph)
        prediction = predict_plan(found, checked, hardware)
    _check_marks(request, found, checked, where)
    return found, prediction


def _check_marks(request: PlanRequest, found: Plan, graph: OperatorGraph, where: str) -> None:
    """Raise ContextError where modules are marked with something else than the plan that was read."""
    from planner.graph.chain import chain
    from planner.networks import load_network
    from planner.networks.marks import Marks
    from planner.planning.placing import PlacedMarks

    own = load_network(request.network, sequence_length=request.sequence_length).marks or Marks()
    marks = request.marks.over(own) if request.marks else own
    if marks:
        PlacedMarks(marks, graph, chain(graph)).check(found, graph, where)


def _check_agrees(request: PlanRequest, found: Plan, where: str) -> None:
    """Raise ContextError where the request asks for something else than the plan that was read."""
    from planner.planning.documents import plan_document
    from simulator.profiles import load_profile

    said = plan_document(found, load_profile(request.hardware))
    said |= {
        "bucket_mb": said["bucket_bytes"] / 2**20,
        "sharding_threshold_kb": said["sharding_threshold_bytes"] / 2**10,
    }
    if not found.shard_size and found.optimizer_sharding != "none":
        said["shard_size"] = said["dp"]
    asked: dict[str, object] = dict(request.pins.named())
    for name in ("global_batch", "precision", "optimizer", "software", "attention", "norms"):
        if getattr(request, name):
            asked[name] = getattr(request, name)
    for name, value in asked.items():
        text = f"{said[name]:g}" if isinstance(said[name], float) else str(said[name]).lower()
        if text != str(value).lower():
            raise ContextError(
                f"{where} has {name}={text}, and {name}={value} is asked for; plan again without the file, or ask for "
                f"what it has"
            )
    for name, value in request.exchange.named().items():
        if name != "layerwise" and getattr(found.exchange, name) != value:
            raise ContextError(
                f"{where} has {name}={getattr(found.exchange, name)!r}, and the context asks for {value!r}; plan again "
                f"without the file, or leave out the key that asks for it"
            )


class Pipeline:
    """A network in micro-batches.

    Parameters
    ----------
    network
        As `planner.AutoParallel` takes it.
    micro_size
        Micro-batches of a step.
    stage_config
        Pipeline stage of modules by name, from 0 on. What lies between the last module of one stage and the first of
        the next is cut where it costs least; stages may be uneven. Names are those of `named_modules`; the network
        inside a cell with its loss may be called ``_backbone`` as well.
    inputs, loss
        As `planner.AutoParallel` takes them.

    Raises
    ------
    ContextError
        A number is wrong, or a name is no text.

    Examples
    --------
    >>> Pipeline("zoo:mlp", 4, stage_config={"layers.0": 0, "layers.1": 1}).marks().stages
    {'layers.0': 0, 'layers.1': 1}
    """

    def __init__(
        self,
        network: Any,
        micro_size: int,
        stage_config: Mapping[str, int] | None = None,
        *,
        inputs: Any = None,
        loss: Any = None,
    ) -> None:
        self.source: Source = source_of(network, inputs, loss)
        self.micro_size: int = integer(1)("micro_size", micro_size)
        self.stage_config = _checked(stage_config)

    def marks(self) -> Marks:
        """The stages as marks."""
        return Marks(stages=self.stage_config)


def _checked(given: Any) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not given:
        raise ContextError(
            f"stage_config={given!r}: it must map names of modules to stages, for example {{'layer1': 0, 'layer2': 1}}"
        )
    for name in given:
        if not isinstance(name, str) or not name:
            raise ContextError(f"stage_config has {name!r} for the name of a module; write it as text")
    return {name: integer(0, LARGEST_STAGE)(f"stage_config[{name!r}]", stage) for name, stage in given.items()}


def execute(
    plan: Planned | str | Path, *, monitor: Callable[[int, float], None] | None = None, **options: Any
) -> ExecutionReport:
    """Train a network as a plan says, on local processes or in the job that started this process.

    Parameters
    ----------
    plan
        What `planner.plan` found, or a strategy file.
    monitor
        Told the number of each step, from 0, and its loss while training goes on
        (`planner.execution.launch.progress.loss_monitor` writes lines).
    options
        As `planner.execution.options.ExecuteOptions` has them: ``steps``, ``verify``, ``precision``, ``data``, ….

    Raises
    ------
    InputError
        There is no such option, or an option, the plan or the data do not fit.
    ExecutionError
        A rank failed, or with ``verify`` the losses differ from those of one process.
    """
    from dataclasses import fields

    from planner.execution.options import ExecuteOptions
    from planner.execution.run import execute_plan
    from planner.plans.file import read_plan

    known = [one.name for one in fields(ExecuteOptions) if one.name != "strategy"]
    for name in options:
        if name not in known:
            raise InputError(f"execute has no option {name!r}; it has {', '.join(known)}")
    found = plan.plan if isinstance(plan, Planned) else read_plan(plan)
    source = plan.plan.network if isinstance(plan, Planned) else plan
    return execute_plan(found, ExecuteOptions(strategy=source, **options), monitor=monitor)


def shard(
    module_or_call: Any,
    in_strategy: tuple[tuple[int, ...], ...],
    out_strategy: tuple[tuple[int, ...], ...] | None = None,
) -> Any:
    """Say how the operator of a module, or of a call, is sharded.

    Parameters
    ----------
    module_or_call
        A module with one operator of weight, such as `torch.nn.Linear`, or one operator at all, such as
        `torch.nn.ReLU`; or a function of tensors, such as `torch.matmul`.
    in_strategy
        One tuple a tensor, in how many parts each of its dims is cut: what the module is called with, then its
        parameters as they are stored (the weight of a Linear is (out, in)); biases may be left out. Devices beyond the
        product of a tuple repeat the work.
    out_strategy
        The same of what comes out, where that is not clear.

    Returns
    -------
    The module; or for a function a module that calls it, which has to be an attribute of the network.

    Raises
    ------
    ContextError
        A strategy is not written so. Shapes and devices are checked when the network is planned.

    Examples
    --------
    >>> from torch import nn
    >>> layer = shard(nn.Linear(16, 32), in_strategy=((2, 1), (4, 1)))
    >>> type(layer).__name__
    'Linear'
    """
    cuts = OperatorCuts(
        inputs=strategy("in_strategy", in_strategy),
        outputs=() if out_strategy is None else strategy("out_strategy", out_strategy),
    )
    if is_module(module_or_call):
        return mark_cuts(module_or_call, cuts)
    if not callable(module_or_call) or isinstance(module_or_call, type):
        raise ContextError(
            f"shard({module_or_call!r:.60}, …): {type(module_or_call).__name__} is neither a torch.nn.Module nor a "
            "function of tensors; give one of them"
        )
    from planner.networks.sharded_call import ShardedCall

    return mark_cuts(ShardedCall(module_or_call), cuts)
