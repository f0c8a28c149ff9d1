"""Makes plans, reads them from files, and simulates, runs, exports and compares them."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict

from planner.cost.software import run_for
from planner.lowering.checked import captured
from planner.planning import summary
from planner.planning.comparing import STEP, Compared, why_not
from planner.planning.documents import prediction_document
from planner.planning.loading import SimulatedStep, simulated_step
from planner.planning.mixed_cluster import plan_on_cluster
from planner.planning.one_stage import Candidate
from planner.planning.planning import capture_for, with_usual_software
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from planner.plans.request import PlanRequest
from simulator.errors import InfeasibleError, InputError
from simulator.hardware import Hardware
from simulator.profiles import load_profile

if TYPE_CHECKING:
    from typing import Unpack

    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from planner.exchange.exporting import Exported
    from planner.execution.run import ExecutionReport
    from planner.graph.operator_graph import OperatorGraph
    from planner.networks.network import Network
    from planner.planning.planning import SearchResult
    from planner.planning.prediction import Prediction
    from planner.plans.hints import Hint
    from reports.timeline import Picture

    NetworkLike = str | nn.Module | PretrainedConfig | Callable[[], object] | Network
    PinValue = str | int | bool | Sequence[int] | Sequence[str]

HardwareLike = str | PathLike[str] | Hardware


class PinOptions(TypedDict, total=False):
    """Choices that can be fixed, by the names of ``--pin``; the others are searched.

    Examples
    --------
    >>> import meshwright as mw
    >>> pins: mw.PinOptions = {"tp": 2}
    >>> mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512, top=1, **pins).best.tp
    2
    """

    dp: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    micro_batch: int
    micro_batches: int
    shard_size: int
    recompute_layers: int
    recompute: str
    recompute_modules: Sequence[str]
    optimizer_sharding: str
    schedule: str
    context_algorithm: str
    expert_messages: str
    expert_cut: str
    tensor_cut: str
    offload_to: str
    sequence_parallel: bool
    tensor_overlap: bool
    expert_overlap: bool
    recompute_messages: bool
    offload_optimizer: bool
    offload_parameters: bool
    offload_activations: bool
    host_embeddings: bool
    bucket_mb: int
    sharding_threshold_kb: int
    copies: int
    order: Sequence[str]
    stage_layers: Sequence[int]


def profile_of(hardware: HardwareLike) -> str:
    """Return the name or path of a profile.

    Raises
    ------
    InputError
        A `Hardware` is given whose numbers no shipped profile has.
    """
    if not isinstance(hardware, Hardware):
        return str(hardware)
    if load_profile(hardware.name).hash != hardware.hash:
        raise InputError(
            f"hardware {hardware.name!r} is not the shipped profile of that name; give the path of its file instead"
        )
    return hardware.name


class Actions:
    """The methods of a plan. A `PlanResult` applies them to its best plan."""

    @property
    def _chosen(self) -> TrainingPlan:
        raise NotImplementedError

    def simulate(self, hardware: HardwareLike | None = None, *, software: str | None = None) -> SimulatedStep:
        """Simulate one training step.

        Parameters
        ----------
        hardware
            Another cluster than the plan's.
        software
            Other software than the plan's; see ``meshwright software``.

        Returns
        -------
        SimulatedStep
            Its ``prediction``, and the timeline.

        Examples
        --------
        >>> import meshwright as mw
        >>> best = mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512).best
        >>> best.simulate("dgx-h100").prediction.step_time_s < best.prediction.step_time_s
        True
        """
        plan = (
            self._chosen.plan
            if software is None
            else replace(self._chosen.plan, software="" if software == "usual" else software)
        )
        profile = (
            load_profile(profile_of(hardware)) if hardware is not None else load_profile(self._chosen.plan.hardware)
        )
        return simulated_step(plan, run_for(plan, profile), graph=self._chosen.graph, source=self._chosen.source)

    def timeline(self) -> Picture:
        """Draw the simulated step: what runs when, and memory; a notebook shows it, ``.save(path)`` writes SVG or PNG.

        Examples
        --------
        >>> import meshwright as mw
        >>> mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512).timeline().lanes[0]
        'rank 0'
        """
        from reports.timeline import drawn_step

        return drawn_step(self.simulate())

    def execute(
        self,
        *,
        processes: int | None = None,
        steps: int = 10,
        data: str | None = None,
        verify: bool = False,
        precision: str | None = None,
        seed: int | None = None,
        learning_rate: float | None = None,
        device: str | None = None,
        save: str | PathLike[str] | None = None,
        save_every: int | None = None,
        resume: str | PathLike[str] | None = None,
        force: bool = False,
        measure: bool = False,
        monitor: Callable[[int, float], None] | None = None,
    ) -> ExecutionReport:
        """Train as the plan says, on local processes or in the job that started this process.

        Parameters
        ----------
        processes
            Local processes; the plan's devices by default.
        steps
            Training steps, counted from the beginning of training.
        data
            A data set; by default one that fits the network.
        verify
            Whether to train again in one process and compare losses.
        precision, seed, learning_rate, device
            In place of the plan's and the defaults.
        save, save_every, resume
            Folders of checkpoints, and how often to write them.
        force
            Whether to start where the prediction says that memory does not suffice.
        measure
            Whether to clock every instruction.
        monitor
            Called with the number of each step and its loss.

        Returns
        -------
        ExecutionReport
            Losses, step times (seconds) and memory (bytes), measured beside predicted.

        Raises
        ------
        ExecutionError
            A rank failed, or losses differ from those of one process.

        Examples
        --------
        >>> import meshwright as mw
        >>> result = mw.plan("zoo:mlp", hardware="cpu-2", devices=2)  # doctest: +SKIP
        >>> result.execute(steps=5, verify=True).verified  # doctest: +SKIP
        True
        """
        from pathlib import Path

        from planner.execution.options import ExecuteOptions
        from planner.execution.run import execute_plan

        options = ExecuteOptions(
            strategy=self._chosen.source or self._chosen.network, processes=processes, steps=steps, data=data,
            verify=verify,
            precision=precision, seed=seed, learning_rate=learning_rate, device=device,
            save=None if save is None else Path(save), save_every=save_every,
            resume=None if resume is None else Path(resume), force=force, measure=measure,
        )  # fmt: skip
        return execute_plan(self._chosen.plan, options, monitor=monitor)

    def export(self, format: str, path: str | PathLike[str] | None = None, *, round: bool = False) -> Exported:  # noqa: A002
        """Write the plan for the framework that trains with it.

        Parameters
        ----------
        format
            A name of ``export --to``: ``megatron``, ``bridge``, ``torchtitan``, ``deepspeed``, ``pytorch`` and others.
        path
            The file to write; without it nothing is written, and ``.written.text`` holds the text.
        round
            Whether what the framework cannot run becomes the nearest that it can.

        Returns
        -------
        Exported
            The text, the environment variables that the job needs, and what was rounded.

        Raises
        ------
        InputError
            The format is not known, or the framework cannot run the plan and it is not to be rounded.

        Examples
        --------
        >>> import meshwright as mw
        >>> result = mw.plan("zoo:gpt2", hardware="dgx-a100", devices=8, global_batch=64, tp=2, top=1)
        >>> "--tensor-model-parallel-size 2" in result.export("megatron", round=True).written.text
        True
        """
        from planner.exchange.exporting import export_plan
        from planner.exchange.pytorch import TABLE, export_module
        from planner.exchange.registry import FORMATS
        from planner.plans.request import one_of
        from simulator.whole_file import write_whole

        plan, graph = self._chosen.plan, captured(self._chosen.plan, self._chosen.graph)
        if one_of(format, (*FORMATS, TABLE), "format") == TABLE:
            exported = export_module(plan, graph, rounds=round)
        else:
            exported = export_plan(plan, graph, FORMATS[format], rounds=round)
        if path is not None:
            write_whole(str(path), exported.written.text)
        return exported

    def save(self, path: str | PathLike[str] = "strategy.json") -> str:
        """Write the strategy file, which every command reads; returns its name.

        Examples
        --------
        >>> import meshwright as mw, os, tempfile
        >>> result = mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mw.load(result.save(os.path.join(folder, "mlp.json"))).best.devices
        8
        """
        from planner.plans.file import write_plan

        return str(write_plan(self._chosen.plan, str(path), prediction_document(self._chosen.prediction)))


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Actions):
    """One plan of a network on a cluster, and what can be done with it.

    Attributes
    ----------
    plan : the choices, as the strategy file holds them
    hardware : the cluster, as the plan's software runs on it
    reason : why it is not the best plan; empty for the best

    Examples
    --------
    >>> import meshwright as mw
    >>> best = mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512).best
    >>> best.devices, best.pp
    (8, 2)
    """

    plan: Plan
    hardware: Hardware
    reason: str = ""
    predicted: Prediction | None = field(default=None, repr=False)
    source: str = ""
    graph: OperatorGraph | None = field(default=None, repr=False)

    @property
    def network(self) -> str:
        """Specification of the network."""
        return self.plan.network

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.plan.devices

    @property
    def dp(self) -> int:
        """Data-parallel ranks, those of the expert axis among them."""
        return self.plan.degree("data") * self.plan.degree("expert")

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.plan.degree("tensor")

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.plan.pipeline

    @property
    def vpp(self) -> int:
        """Chunks of each pipeline stage."""
        return self.plan.virtual

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        return self.plan.degree("context")

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""
        return self.plan.degree("expert")

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch on one data-parallel rank."""
        return self.plan.micro_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on one data-parallel rank."""
        return self.plan.micro_batches

    @property
    def recompute(self) -> str:
        """``none``, ``selective`` or ``full`` where all layers do so, else ``mixed``."""
        return self.plan.recomputation

    @property
    def optimizer_sharding(self) -> str:
        """``none``, ``zero1``, ``zero2`` or ``zero3``."""
        return self.plan.optimizer_sharding

    @property
    def schedule(self) -> str:
        """Pipeline schedule; ``none`` with one stage."""
        return self.plan.schedule

    @cached_property
    def prediction(self) -> Prediction:
        """Predicted step time (seconds), throughput, MFU (0 to 1) and peak memory (bytes)."""
        return self.simulate().prediction if self.predicted is None else self.predicted

    @property
    def _chosen(self) -> TrainingPlan:
        return self

    def __repr__(self) -> str:
        return f"{summary.heading(self.plan, self.hardware)}\n{summary.plain_text_table(*self._table())}"

    def _repr_html_(self) -> str:
        return html_table(summary.heading(self.plan, self.hardware), *self._table())

    def _table(self) -> tuple[tuple[summary.Column, ...], list[tuple[str, ...]]]:
        return summary.columns(self.prediction), [summary.cells(self.plan, self.prediction)]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The best plan with other choices beside the chosen plan.

    ``instead`` is None where no plan fits with these choices; ``reason`` then says why. ``compared`` lists the
    differences by part of the step, kind of task and kind of memory.

    Examples
    --------
    >>> import meshwright as mw
    >>> found = mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512, top=1).explain(dp=2)
    >>> found.instead.dp, found.instead.prediction.step_time_s >= found.chosen.prediction.step_time_s
    (2, True)
    """

    chosen: TrainingPlan
    instead: TrainingPlan | None
    compared: Compared = field(repr=False)

    @property
    def reason(self) -> str:
        """Why nothing fits where ``instead`` is None."""
        return self.compared.infeasible

    @property
    def seconds(self) -> Mapping[str, float]:
        """By part of the step, seconds of the other plan less those of the chosen one, without small differences."""
        return {one.what: one.seconds for one in self.compared.differences if one.where == STEP}

    @property
    def memory_bytes(self) -> int:
        """Peak memory of the other plan less that of the chosen one."""
        if self.instead is None:
            return 0
        return self.instead.prediction.peak_memory_bytes - self.chosen.prediction.peak_memory_bytes

    def __repr__(self) -> str:
        from simulator.quantities import bytes_text, seconds_text

        if self.instead is None:
            return f"no plan fits: {self.reason}"
        before, after = self.chosen.prediction.step_time_s, self.instead.prediction.step_time_s
        listed = ", ".join(
            f"{name} {'+' if value > 0 else '−'}{seconds_text(abs(value))}"
            for name, value in sorted(self.seconds.items(), key=lambda item: -abs(item[1]))
        )
        sign = "+" if self.memory_bytes > 0 else "−"
        return (
            f"{summary.degrees_text(self.instead.plan)}: {seconds_text(after)} a step instead of "
            f"{seconds_text(before)} ({listed or 'no part differs by 0.1 %'}), memory {sign}"
            f"{bytes_text(abs(self.memory_bytes))}"
        )


@dataclass(frozen=True, kw_only=True)
class PlanResult(Actions):
    """Plans of a network on a cluster, best first.

    Attributes
    ----------
    plans : the plans, by predicted step time
    status : ``optimal``, ``bounded`` (see ``gap``) or ``heuristic``
    notes : what the reader should know, most important first

    Examples
    --------
    >>> import meshwright as mw
    >>> result = mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512)
    >>> result.best is result.plans[0], len(result.alternatives) == len(result.plans) - 1
    (True, True)
    """

    plans: tuple[TrainingPlan, ...]
    status: str
    notes: tuple[str, ...] = ()
    request: PlanRequest | None = field(default=None, repr=False)
    found: SearchResult | None = field(default=None, repr=False)

    @property
    def best(self) -> TrainingPlan:
        """The fastest plan."""
        return self.plans[0]

    @property
    def alternatives(self) -> tuple[TrainingPlan, ...]:
        """The plans behind the best, each with its ``reason``."""
        return self.plans[1:]

    @property
    def prediction(self) -> Prediction:
        """The prediction for the best plan."""
        return self.best.prediction

    @property
    def gap(self) -> float:
        """How far the best plan can be from the optimum of what was searched, as a fraction of its step time."""
        return self.best.plan.certificate.gap

    @property
    def _chosen(self) -> TrainingPlan:
        return self.best

    def explain(self, **pins: Unpack[PinOptions]) -> Explanation:
        """Plan again with other choices, and compare.

        Parameters
        ----------
        **pins
            The choices that are asked about.

        Examples
        --------
        >>> import meshwright as mw
        >>> result = mw.plan("zoo:gpt2", hardware="dgx-a100", devices=8, global_batch=64, top=1)
        >>> why_not = result.explain(tp=8)
        >>> why_not.instead.tp, sum(why_not.seconds.values()) > 0
        (8, True)
        """
        found = why_not(self.best.plan, Pins.read(pins), request=self.request, graph=self.best.graph, changes=False)
        instead = None if found.instead is None else _training_plan(found.instead, self.best.graph)
        return Explanation(chosen=self.best, instead=instead, compared=found)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``meshwright plan --json``, without a strategy file.

        Examples
        --------
        >>> import meshwright as mw
        >>> document = mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512, top=1).to_dict()
        >>> document["status"], document["plan"]["devices"]
        ('optimal', 8)
        """
        from planner.planning.documents import result_document

        if self.found is None or self.request is None:
            raise InputError("a plan that was read from a file has no document of a search; plan it again")
        return result_document(self.found, self.best.hardware, self.request.search_mode, None)

    def __repr__(self) -> str:
        best = self.best
        head = (("", True), *summary.columns(best.prediction))
        lines = [summary.heading(best.plan, best.hardware), "", summary.plain_text_table(head, self._rows()), ""]
        return "\n".join([*lines, summary.certainty(best.plan, best.prediction)])

    def _repr_html_(self) -> str:
        best = self.best
        head = (("", True), *summary.columns(best.prediction))
        said = html.escape(summary.certainty(best.plan, best.prediction))
        return f"{html_table(summary.heading(best.plan, best.hardware), head, self._rows())}<p>{said}</p>"

    def _rows(self) -> list[tuple[str, ...]]:
        return [(str(rank), *summary.cells(one.plan, one.prediction)) for rank, one in enumerate(self.plans, 1)]


def html_table(caption: str, head: Iterable[summary.Column], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for a notebook; it scrolls where it is wider than the page."""
    head = tuple(head)
    sides = ["right" if number else "left" for _, number in head]

    def line(kind: str, texts: Iterable[str]) -> str:
        cells = "".join(
            f'<{kind} style="text-align:{side};padding:2px 10px">{html.escape(text).replace(chr(10), "<br>")}</{kind}>'
            for text, side in zip(texts, sides, strict=True)
        )
        return f"<tr>{cells}</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<div style="overflow-x:auto"><table><caption style="text-align:left">{html.escape(caption)}</caption>'
        f"<thead>{line('th', (name for name, _ in head))}</thead><tbody>{body}</tbody></table></div>"
    )


def _training_plan(candidate: Candidate, graph: OperatorGraph | None) -> TrainingPlan:
    plan = candidate.plan
    return TrainingPlan(
        plan=plan,
        hardware=load_profile(plan.hardware),
        reason=candidate.reason,
        predicted=candidate.prediction,
        graph=graph,
    )


def plan(
    network: NetworkLike,
    hardware: HardwareLike,
    devices: int,
    *,
    inputs: Tensor | Sequence[Tensor] | None = None,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    search_mode: str = "dynamic_programming",
    parallel_mode: str = "auto_parallel",
    software: str | None = None,
    attention: str | None = None,
    norms: str | None = None,
    expert_imbalance: float = 1.0,
    memory_headroom: float = 0.0,
    hints: Sequence[Hint] = (),
    top: int = 5,
    pins: Mapping[str, PinValue] | None = None,
    **pinned: Unpack[PinOptions],
) -> PlanResult:
    """Find the fastest plan for a network on a cluster.

    Parameters
    ----------
    network
        A specification such as ``"zoo:gpt2"`` or ``"hf:config.json"``, a configuration or model of transformers, a
        function that returns (module, inputs) or (module, inputs, loss), or a module with ``inputs``.
    hardware
        Name or path of a profile, or a `Hardware`.
    devices
        Number of devices.
    inputs, loss
        Of a module: example inputs with the batch as dim 0, and a loss that compares the output with the last of them;
        without a loss the module itself returns the mean loss.
    global_batch, seq_len
        Samples of a step, and tokens of a sample; the network's own by default.
    precision, optimizer
        ``fp64 fp32 fp16 bf16 fp8 fp4``; ``adamw adam momentum sgd lamb``.
    search_mode, parallel_mode
        As on the command line.
    software, attention, norms
        What it will run on; what is usual by default.
    expert_imbalance
        Tokens of the busiest rank of experts over an even share, at least 1.
    memory_headroom
        Part of a device's usable memory that a plan leaves free, from 0 to 1.
    hints
        Placements of single operators.
    top
        Number of plans to keep.
    pins, **pinned
        Choices to fix, such as ``tp=8``; what is not fixed is searched.

    Returns
    -------
    PlanResult
        The plans, best first.

    Raises
    ------
    InputError
        An argument is wrong; the message says which, and what to do.
    InfeasibleError
        No plan fits in memory.

    Examples
    --------
    >>> import meshwright as mw
    >>> result = mw.plan("zoo:gpt2", hardware="dgx-a100", devices=8, global_batch=64, tp=2)
    >>> result.best.tp, result.best.dp
    (2, 4)
    """
    from planner.networks.given import source_of

    asked = with_usual_software(
        PlanRequest(
            network=source_of(network, inputs, loss),
            hardware=profile_of(hardware),
            devices=devices,
            global_batch=global_batch,
            sequence_length=seq_len,
            precision=precision,
            optimizer=optimizer,
            search_mode=search_mode,
            parallel_mode=parallel_mode,
            pins=Pins.read({**(pins or {}), **pinned}),
            hints=tuple(hints),
            top=top,
            software=software or "",
            attention=attention or "",
            norms=norms or "",
            expert_imbalance=expert_imbalance,
            memory_headroom=memory_headroom,
        )
    )
    graph = capture_for(asked)
    found, answered = plan_on_cluster(asked, graph=graph)
    if answered is not asked:
        asked, graph = answered, capture_for(answered)
    if not found.candidates:
        raise InfeasibleError(found.infeasible)
    return PlanResult(
        plans=tuple(_training_plan(one, graph) for one in found.candidates),
        status=str(found.status),
        notes=found.messages,
        request=asked,
        found=found,
    )


def load(path: str | PathLike[str]) -> PlanResult:
    """Read a strategy file, with the plans behind it where ``--top`` wrote them.

    Raises
    ------
    InputError
        The file is missing, broken or of another version.

    Examples
    --------
    >>> import meshwright as mw, os, tempfile
    >>> result = mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = mw.load(result.save(os.path.join(folder, "mlp.json")))
    >>> again.best.dp == result.best.dp
    True
    """
    from pathlib import Path

    from planner.plans.file import alternative_file, read_plan

    files = [Path(path)]
    while (following := alternative_file(files[0], len(files) + 1)).is_file():
        files.append(following)
    plans = [(str(file), read_plan(file)) for file in files]
    return PlanResult(
        plans=tuple(
            TrainingPlan(plan=one, hardware=load_profile(one.hardware), source=source) for source, one in plans
        ),
        status=str(plans[0][1].certificate.status),
    )
