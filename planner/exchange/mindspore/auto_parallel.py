"""`planner.plan`, and `AutoParallel`: a network with how it is to be parallel, said by methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.exchange.mindspore.context import AutoParallelContext, current_context
from planner.exchange.mindspore.entry import Pipeline, Planned, plan_under
from planner.exchange.mindspore.requests import check_agree
from planner.networks.given import source_of
from planner.networks.marks import Marks
from planner.plans.pins import Pins
from simulator.checks import boolean, choice, integer
from simulator.errors import ContextError, UnsupportedError

if TYPE_CHECKING:
    from planner.networks.given import Source
    from planner.networks.network import Network

MODES: Mapping[str, tuple[str, str | None]] = {
    "semi_auto": ("semi_auto_parallel", None),
    "sharding_propagation": ("auto_parallel", "sharding_propagation"),
    "recursive_programming": ("auto_parallel", "recursive_programming"),
    "dynamic_programming": ("auto_parallel", "dynamic_programming"),
}
"""Parallel mode and search mode of each mode of `AutoParallel`."""
_OWN = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zero_bubble_v", "zbv", "dualpipe_v")
SCHEDULERS: Mapping[str, str] = dict(zip(_OWN, _OWN, strict=True)) | {"zero_bubble_v": "zbv"}
"""Schedulers by the names that they have in MindSpore or here, and the schedule of the plan."""
OTHER_SCHEDULERS = ("seqpipe", "seqvpp", "seqsmartvpp")
LEVELS = ("level1", "level2", "level3")


def _key(name: str) -> Any:
    """A property that is a key of the context."""
    return property(lambda self: self.context.get(name), lambda self, value: self.context.set(**{name: value}))


class AutoParallel:
    """How a network is to be parallel.

    Parameters
    ----------
    network
        A specification (``zoo:NAME``, ``hf:PATH``, ``py:MODULE:FACTORY``), the factory itself, or a `Pipeline` of
        one; or a module, with ``inputs`` and perhaps ``loss``, which can be planned but is not found by other
        processes that would execute the plan.
    parallel_mode
        ``semi_auto``, ``sharding_propagation``, ``recursive_programming`` or ``dynamic_programming``.
    device_num
        Devices; those of the current context where it is not given.
    inputs, loss
        Of a module: example inputs with the batch as dim 0, the last of which the loss compares the output with.

    Raises
    ------
    ContextError
        A value is wrong; every method raises it as well.

    Examples
    --------
    >>> parallel = AutoParallel("zoo:mlp", parallel_mode="recursive_programming", device_num=8)
    >>> parallel.hsdp()
    >>> parallel.pipeline(stages=2, scheduler="1f1b")
    >>> parallel.context.get("pipeline_stages"), parallel.pins().schedule
    (2, '1f1b')
    """

    def __init__(
        self,
        network: Any,
        parallel_mode: str = "semi_auto",
        *,
        device_num: int | None = None,
        inputs: Any = None,
        loss: Any = None,
    ) -> None:
        mode, search = MODES[choice(*MODES)("parallel_mode", parallel_mode)]
        self.pipelined = network if isinstance(network, Pipeline) else None
        if self.pipelined is not None and inputs is None:
            self.source: Source = self.pipelined.source
        else:
            self.source = source_of(network, inputs, loss)
        devices = current_context().get("device_num") if device_num is None else device_num
        self.context = AutoParallelContext(parallel_mode=mode, device_num=devices)
        if search is not None:
            self.context.set(search_mode=search)
        self._scheduler: str | None = None
        self._files: dict[str, str] = {}

    # Data and gradients

    dataset_strategy = _key("dataset_strategy")
    """How the batch is cut: ``data_parallel``, ``full_batch``, or one tuple of parts for each input."""
    full_batch = _key("full_batch")
    """Whether every rank loads the whole batch."""
    gradients_mean = _key("gradients_mean")
    """Whether summed gradients are divided by the number of ranks."""

    def enable_gradients_mean(self) -> None:
        """Divide summed gradients by the number of ranks."""
        self.gradients_mean = True

    def enable_fp32_communication(self) -> None:
        """Let gradients travel in fp32 whatever they are computed in."""
        self.context.set(gradient_fp32_sync=True)

    def disable_gradient_fp32_sync(self) -> None:
        """Let gradients travel in what they are computed in."""
        self.context.set(gradient_fp32_sync=False)

    def disable_loss_repeated_mean(self) -> None:
        """Do not divide by the ranks that compute the same loss."""
        self.context.set(loss_repeated_mean=False)

    def comm_fusion(self, config: Mapping[str, Any]) -> None:
        """Size of fused messages, as the key ``comm_fusion`` of the context has it."""
        self.context.set(comm_fusion=config)

    # Optimizer and pipeline

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> None:
        """Shard optimizer states over data-parallel ranks.

        Parameters
        ----------
        shard_size
            Ranks that share one copy; -1 for all.
        threshold
            Parameters of fewer KB stay whole.
        optimizer_level
            ``level1`` shards optimizer states, ``level2`` gradients as well, ``level3`` parameters too.
        """
        config: dict[str, Any] = {
            "parallel_optimizer_threshold": integer(0)("threshold", threshold),
            "optimizer_level": choice(*LEVELS)("optimizer_level", optimizer_level),
        }
        if isinstance(shard_size, bool) or shard_size != -1:
            config["optimizer_weight_shard_size"] = integer(2)("shard_size", shard_size)
        self.context.set(enable_parallel_optimizer=True, parallel_optimizer_config=config)

    def pipeline(
        self, stages: int = 1, output_broadcast: bool = False, interleave: bool = False, scheduler: str = "1f1b"
    ) -> None:
        """Run the network in pipeline stages.

        Parameters
        ----------
        stages
            Pipeline stages; they divide the devices.
        output_broadcast
            Not supported: the loss is on every rank, outputs are on the last stage.
        interleave
            Several pieces of the network on each stage, with ``1f1b``.
        scheduler
            One of `SCHEDULERS`.

        Raises
        ------
        UnsupportedError
            A scheduler of MindSpore that cuts sequences, or ``output_broadcast``.
        """
        if scheduler in OTHER_SCHEDULERS:
            raise UnsupportedError(
                f"scheduler={scheduler!r} is not supported: micro-batches are not cut along the sequence; use one of "
                f"{', '.join(SCHEDULERS)}"
            )
        name = SCHEDULERS[choice(*SCHEDULERS)("scheduler", scheduler)]
        if boolean("output_broadcast", output_broadcast):
            raise UnsupportedError(
                "output_broadcast=True is not supported: outputs stay on the last stage; leave it out"
            )
        if boolean("interleave", interleave):
            if name not in ("1f1b", "interleaved_1f1b"):
                raise ContextError(
                    f"interleave=True with scheduler={scheduler!r}: chunks are interleaved in 1f1b; use scheduler="
                    "'interleaved_1f1b', or interleave=False"
                )
            name = "interleaved_1f1b"
        self.context.set(pipeline_stages=stages)
        if self.pipelined is not None and self.pipelined.micro_size < stages:
            raise ContextError(
                f"pipeline(stages={stages}) of Pipeline(micro_size={self.pipelined.micro_size}): every stage needs a "
                f"micro-batch; use micro_size={stages} or more"
            )
        self._scheduler = name if stages > 1 else None

    def get_pipeline_stages(self) -> int:
        """Pipeline stages."""
        return int(self.context.get("pipeline_stages"))

    # Files

    def save_param_strategy_file(self, file_path: str) -> None:
        """Write how operators and parameters are cut, with the whole plan, as MindSpore's JSON file."""
        self._file("save_param", file_path)

    def load_param_strategy_file(self, file_path: str) -> None:
        """Take the plan of a file that `save_param_strategy_file` wrote, or of a strategy file; nothing is searched."""
        self._file("load_param", file_path)

    def save_operator_strategy_file(self, file_path: str) -> None:
        """Write how every operator is cut, as MindSpore's JSON file."""
        self._file("save_operator", file_path)

    def load_operator_strategy_file(self, file_path: str) -> None:
        """Keep the strategies that a JSON file holds of operators; what it does not name is planned around them."""
        self._file("load_operator", file_path)

    def _file(self, use: str, path: Any) -> None:
        key = f"{use}_strategy_file"
        if not isinstance(path, str | Path) or not str(path):
            raise ContextError(f"{key}({path!r}): the path of a JSON file is needed, for example '/data/strategy.json'")
        if use != "load_param" and not str(path).endswith(".json"):
            raise ContextError(f"{key}({str(path)!r}): strategies are written as JSON; use a name that ends in .json")
        self._files[use] = str(path)
        loads = [name for name in ("load_param", "load_operator") if name in self._files]
        if len(loads) > 1:
            del self._files[use]
            raise ContextError(
                f"{key}({str(path)!r}): a plan is read from one file, or planned around the operators of another; "
                f"load one of them"
            )

    # Planning

    def marks(self) -> Marks:
        """Marks that are given beside those of the network's own code."""
        return Marks() if self.pipelined is None else self.pipelined.marks()

    def pins(self) -> Pins:
        """Pins that no key of the context stands for."""
        micro_batches = None if self.pipelined is None else self.pipelined.micro_size
        return Pins(schedule=self._scheduler, micro_batches=micro_batches)

    def plan(self, hardware: str, *, pins: Mapping[str, object] | None = None, **options: Any) -> Planned:
        """Plan the network on a cluster; parameters and errors as `planner.plan`."""
        from planner.plans.hints import load_hints

        context = self.context.copy()
        if "load_param" in self._files:
            context.set(strategy_ckpt_load_file=self._files["load_param"])
        if "load_operator" in self._files:
            options["hints"] = (*options.get("hints", ()), *load_hints(self._files["load_operator"]))
        own, given = self.pins(), Pins.read(pins or {})
        check_agree(given, own, "of AutoParallel; leave it out")
        found = plan_under(context, self.source, hardware, pins=given.over(own), marks=self.marks(), **options)
        for use in ("save_param", "save_operator"):
            if use in self._files:
                save_strategies(found, self.source, self._files[use], whole=use == "save_param")
        return found


def plan(
    network: str | Network | AutoParallel | Callable[[], object],
    hardware: str,
    context: AutoParallelContext | None = None,
    *,
    pins: Mapping[str, object] | None = None,
    **options: Any,
) -> Planned:
    """Find the fastest plan for a network on a cluster under a context.

    With ``strategy_ckpt_load_file`` the plan is read from there, with ``strategy_ckpt_save_file`` written to there.

    Parameters
    ----------
    network
        ``zoo:NAME``, ``hf:PATH`` or ``py:MODULE:FACTORY``, or the factory itself; or an `AutoParallel`, which brings
        its own context.
    hardware
        A profile's name or path.
    context
        The current one where it is not given.
    pins, **options
        As `planner.exchange.mindspore.requests.request_of` takes them.

    Raises
    ------
    ContextError
        Keys contradict each other, the pins or the file.
    InfeasibleError
        No plan fits.
    """
    if not isinstance(network, AutoParallel):
        return plan_under(current_context() if context is None else context, network, hardware, pins=pins, **options)
    if context is not None:
        raise ContextError("AutoParallel has a context of its own; set keys by its methods and leave context out")
    return network.plan(hardware, pins=pins, **options)


def save_strategies(found: Planned, source: Source, path: str, *, whole: bool) -> Path:
    """Write the strategies of a plan as MindSpore's JSON file; ``whole`` lets the plan be read from it again."""
    import json

    from planner.networks import load_network
    from planner.planning.documents import prediction_document
    from planner.plans.file import export_mindspore
    from planner.plans.mindspore import strategy_items
    from simulator.whole_file import write_whole

    plan = found.plan
    network = load_network(source, sequence_length=plan.sequence_length, attention=plan.attention, norms=plan.norms)
    graph = network.capture()
    if whole:
        return export_mindspore(plan, graph, path, prediction_document(found.prediction))
    items = {name: item for name, item in strategy_items(plan, graph).items() if name != "parallel_layout_item"}
    return write_whole(path, json.dumps(items, indent=1) + "\n")
