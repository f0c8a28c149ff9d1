"""The strategy file: a plan as readable JSON, validated when it comes back.

A rule is one line for each mesh axis, outermost first: ``"S(0), R -> S(0)"``, or ``"S(0)"`` for what
reads no tensor. A rule splits the operator's work if it reads tensors and any of them, or an output,
is sharded; the exceptions say ``; whole work`` or ``; split work``, and ``; reduces N`` gives the
elements all-reduced inside the operator.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.graph.operator_graph import OperatorGraph
from planner.networks.marks import Swap
from planner.plans import mindspore
from planner.plans.exchange import Exchange
from planner.plans.plan import (
    Certificate,
    Chunk,
    LayerRules,
    NodeRules,
    OffloadRange,
    Plan,
    RecomputeRange,
    Status,
    to_digits,
)
from planner.plans.schema import (
    FORMAT,
    VERSION,
    ExchangeModel,
    PlacementsModel,
    StrategyModel,
    check_consistent,
    data_sharding,
    validate,
)
from planner.sharding.placement import Mesh, MeshAxis, parse_placement, placement_name
from planner.sharding.rules import InnerMessage, Rule
from simulator.errors import InputError, StrategyError
from simulator.hardware import is_profile_path
from simulator.input_file import FileKind
from simulator.profiles import split_cluster_file
from simulator.program import Collective
from simulator.whole_file import write_whole

STRATEGY = FileKind(
    name="strategy file", remedy="write one with `meshwright plan`", max_bytes=64 << 20, error=StrategyError
)


_OTHERWISE = {"network", "hardware", "mesh", "pipeline", "recompute", "exchange", "certificate", "layers"}
_SAME = {one.name for one in fields(Plan)} & StrategyModel.model_fields.keys() - _OTHERWISE
"""Choices that a file has under the name and with the value that a plan has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFile:
    """What a strategy file holds: the plan and, where it was written, the prediction made for it."""

    plan: Plan
    prediction: Mapping[str, object] | None


def write_plan(plan: Plan, path: str | Path, prediction: Mapping[str, object] | None = None) -> Path:
    """Write a strategy file, whole or not at all.

    Parameters
    ----------
    plan
        The plan; its rules are written in the order they have there (that of the graph), and the
        relative path of a profile as it is seen from the strategy file's folder.
    path
        Where to write.
    prediction
        The prediction made for the plan, as the ``prediction`` object of ``plan --json``.

    Returns
    -------
    Path
        The file written.
    """
    return write_whole(path, plan_to_text(_stored(plan, path), prediction))


def export_mindspore(
    plan: Plan, graph: OperatorGraph, path: str | Path, prediction: Mapping[str, object] | None = None
) -> Path:
    """Write a plan of `graph` as MindSpore's strategy file, from which it can be read again (`mindspore`).

    Raises
    ------
    StrategyError
        The name does not end in ``.json``.
    """
    strategy = json.loads(plan_to_text(_stored(plan, path), prediction))
    return mindspore.export_plan(plan, graph, path, strategy)


def _stored(plan: Plan, path: str | Path) -> Plan:
    return replace(plan, hardware=_beside(plan.hardware, Path(path)))


def _beside(profile: str, strategy: Path) -> str:
    """Write a relative path of a profile as it is seen from the strategy file's folder."""
    if strategy.exists() and not strategy.is_file():  # a pipe is in no folder
        return _moved(profile, lambda path: str(Path(path).resolve()))
    return _moved(profile, lambda path: Path(os.path.relpath(path, strategy.parent)).as_posix())


def _from_here(profile: str, strategy: Path) -> str:
    """Undo `_beside`."""
    return _moved(profile, lambda path: Path(os.path.normpath(strategy.parent / path)).as_posix())


def _moved(profile: str, move: Callable[[str], str]) -> str:
    """`profile` with its relative paths moved: its own, or those of ``PROFILE@FILE``."""
    chip, file = split_cluster_file(profile)
    if file:
        found = move(file) if _is_relative(file, always=True) else file
        return f"{_moved(chip, move)}@{found}" if chip else found
    if not _is_relative(profile):
        return profile
    found = move(profile)
    return found if is_profile_path(found) else f"./{found}"


def _is_relative(path: str, always: bool = False) -> bool:
    """Whether `path` is a relative path; what is no path is none, unless it is `always` one."""
    return (always or is_profile_path(path)) and not path.startswith("~") and not Path(path).is_absolute()


def read_plan(path: str | Path) -> Plan:
    """Read and validate a strategy file.

    Raises
    ------
    StrategyError
        The file is missing, broken, of another version, or its parts contradict each other; the
        message names the file and the field.
    """
    return read_strategy(path).plan


def read_strategy(path: str | Path) -> StrategyFile:
    """Read and validate a strategy file, with the prediction it carries."""
    source = str(path)
    text = STRATEGY.text(path)
    found = plan_from_text(text, source)
    return replace(found, plan=replace(found.plan, hardware=_from_here(found.plan.hardware, Path(path))))


def plan_to_text(plan: Plan, prediction: Mapping[str, object] | None = None) -> str:
    """Render a plan as the text of a strategy file, with a newline at the end."""
    own: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "network": {"spec": plan.network, "fingerprint": plan.fingerprint, "sequence_length": plan.sequence_length},
        "hardware": {"profile": plan.hardware, "hash": plan.hardware_hash},
        "mesh": [
            {"axis": axis.name, "size": axis.size}
            | ({} if plan.mesh.strides is None else {"stride": plan.mesh.strides[i]})
            for i, axis in enumerate(plan.mesh.axes)
        ],
        "pipeline": {"ranks": plan.pipeline, "stride": plan.pipeline_stride, "virtual": plan.virtual},
        "batch": {"global": plan.global_batch, "micro": plan.micro_batch, "micro_batches": plan.micro_batches},
        "data_sharding": data_sharding(plan.mesh),
        "stages": _stages(plan),
        "recompute": {"mode": plan.recompute, "ranges": _recomputed(plan)},
        "offload_activations": _offloaded(plan),
        "fusion": {"bucket_bytes": plan.bucket_bytes},
        "exchange": _exchange(plan),
        "certificate": asdict(plan.certificate) | {"status": plan.certificate.status.value},
        "prediction": None if prediction is None else dict(prediction),
        "placements": _placements(plan.rules),
        "layers": [
            {"prefix": run.prefix, "first": run.first, "last": run.last, "placements": _placements(run.rules)}
            for run in plan.layers
        ],
    }
    document = {
        name: value
        for name, field in StrategyModel.model_fields.items()
        for value in [getattr(plan, name) if name in _SAME else own[name]]
        if field.is_required() or (value and value != field.default)
    }
    return _render(document) + "\n"


def plan_from_text(text: str, source: str = "strategy") -> StrategyFile:
    """Read the text of a strategy file, or of MindSpore's with a plan in it; `source` names it in errors."""
    document = STRATEGY.json(text, source)
    if mindspore.is_mindspore(document):
        document = mindspore.embedded_strategy(document, source)
    model = validate(document, source)
    strides = tuple(axis.stride for axis in model.mesh if axis.stride is not None)
    mesh = Mesh(tuple(MeshAxis(axis.axis, axis.size) for axis in model.mesh), strides or None)
    check_consistent(model, mesh, source)
    plan = Plan(
        network=model.network.spec,
        fingerprint=model.network.fingerprint,
        sequence_length=model.network.sequence_length,
        hardware=model.hardware.profile,
        hardware_hash=model.hardware.hash,
        global_batch=model.batch.global_,
        micro_batch=model.batch.micro,
        micro_batches=model.batch.micro_batches,
        mesh=mesh,
        rules=_rules(model.placements, len(mesh.axes), f"{source}: placements"),
        layers=_layers(model, len(mesh.axes), source),
        bucket_bytes=model.fusion.bucket_bytes,
        certificate=Certificate(**model.certificate.model_dump() | {"status": Status(model.certificate.status)}),
        recompute=model.recompute.mode,
        pipeline=model.pipeline.ranks,
        pipeline_stride=model.pipeline.stride,
        virtual=model.pipeline.virtual,
        chunks=tuple(Chunk(rank=s.rank, first=s.first, last=s.last) for s in model.stages if s.first and s.last),
        recompute_ranges=tuple(
            RecomputeRange(first=part.first, last=part.last, mode=part.mode, messages=part.messages)
            for part in model.recompute.ranges
        ),
        offload_ranges=tuple(
            OffloadRange(
                first=part.first, last=part.last, swap=Swap(prefetch=part.prefetch, operators=tuple(part.operators))
            )
            for part in model.offload_activations
        ),
        exchange=_exchange_of(model.exchange),
        **{name: getattr(model, name) for name in _SAME},
    )
    return StrategyFile(plan=plan, prediction=model.prediction.model_dump() if model.prediction else None)


def _offloaded(plan: Plan) -> list[dict[str, object]]:
    return [
        {"first": part.first, "last": part.last}
        | ({"prefetch": part.swap.prefetch} if part.swap.prefetch else {})
        | ({"operators": [*part.swap.operators]} if part.swap.operators else {})
        for part in plan.offload_ranges
    ]


def _recomputed(plan: Plan) -> list[dict[str, object]]:
    return [
        {"first": part.first, "last": part.last, "mode": part.mode} | ({} if part.messages else {"messages": False})
        for part in plan.recompute_ranges
    ]


def _stages(plan: Plan) -> list[dict[str, object]]:
    if not plan.chunks:
        return [{"stage": 0, "rank": 0, "devices": plan.mesh.size, "layers": "all"}]
    return [
        {"stage": i, "rank": chunk.rank, "devices": plan.mesh.size, "first": chunk.first, "last": chunk.last}
        for i, chunk in enumerate(plan.chunks)
    ]


def _exchange(plan: Plan) -> dict[str, object]:
    """What a context says, where it says something."""
    said = {name: _listed(value) for name, value in plan.exchange.named().items()}
    return said | ({"fusion_groups": dict(plan.exchange.fusion_groups)} if plan.exchange.fusion_groups else {})


def _exchange_of(model: ExchangeModel) -> Exchange:
    given: dict[str, Any] = {name: _frozen(value) for name, value in model.model_dump().items()}
    return Exchange(**given)


def _listed(value: object) -> object:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _placements(rules: Mapping[str, NodeRules]) -> dict[str, dict[str, list[str]]]:
    """Group nodes by whether they read tensors; parameters, inputs and constants do not."""
    stored: dict[str, list[str]] = {}
    operators: dict[str, list[str]] = {}
    for name, per_axis in rules.items():
        is_stored = bool(per_axis) and not any(rule.inputs for rule in per_axis)
        (stored if is_stored else operators)[name] = [rule_to_text(rule) for rule in per_axis]
    return {"parameters_and_inputs": stored, "operators": operators}


def _layers(model: StrategyModel, axes: int, source: str) -> tuple[LayerRules, ...]:
    return tuple(
        LayerRules(
            prefix=run.prefix,
            first=run.first,
            last=run.last,
            rules=_rules(run.placements, axes, f"{source}: layers.{index}.placements"),
        )
        for index, run in enumerate(model.layers)
    )


def _rules(texts: PlacementsModel, axes: int, where: str) -> dict[str, NodeRules]:
    found: dict[str, NodeRules] = {}
    for name, per_axis in (*texts.parameters_and_inputs.items(), *texts.operators.items()):
        if name in found:
            raise StrategyError(f"{where}: {name!r} stands in both groups; keep one")
        if len(per_axis) != axes:
            raise StrategyError(
                f"{where}: {name!r} has {len(per_axis)} rules, but the mesh has {axes} axes; give one for each"
            )
        try:
            found[name] = tuple(rule_from_text(text) for text in per_axis)
        except InputError as error:
            raise StrategyError(f"{where}: {name!r}: {error}") from error
        if len({(len(rule.inputs), len(rule.outputs)) for rule in found[name]}) > 1:
            raise StrategyError(f"{where}: the rules of {name!r} differ in their number of tensors; they must agree")
    return found


def _render(value: object, indent: str = "") -> str:
    """Render JSON with one object key a line and lists of plain values on one line, so that diffs read well.

    Numbers have the digits of `planner.plans.plan.DIGITS`.
    """
    inner = indent + "  "
    if isinstance(value, dict) and value:
        body = ",\n".join(f"{inner}{json.dumps(key)}: {_render(item, inner)}" for key, item in value.items())
        return f"{{\n{body}\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        body = ",\n".join(inner + _render(item, inner) for item in value)
        return f"[\n{body}\n{indent}]"
    return json.dumps(_rounded(value), ensure_ascii=False, allow_nan=False)


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return to_digits(value) if isinstance(value, float) else value


def alternative_file(strategy: str | Path, number: int) -> Path:
    """Where the plan of a rank stands; 1 is the strategy file itself.

    >>> alternative_file("plans/gpt.json", 3).as_posix()
    'plans/gpt.3.json'
    """
    path = Path(strategy)
    return path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def write_alternatives(strategy: str | Path, plans: Sequence[tuple[Plan, Mapping[str, object]]]) -> tuple[Path, ...]:
    """Write the plans behind the best one, each with its prediction, in the order of their ranks from 2.

    Nothing is written beside a pipe or a device.
    """
    if Path(strategy).exists() and not Path(strategy).is_file():
        return ()
    return tuple(
        write_plan(plan, alternative_file(strategy, number), prediction)
        for number, (plan, prediction) in enumerate(plans, 2)
    )


def alternative_files(strategy: str | Path, top: int) -> tuple[Path, ...]:
    """The files of the best `top` plans.

    Raises
    ------
    InputError
        There are fewer.
    """
    found = tuple(alternative_file(strategy, number) for number in range(1, top + 1))
    missing = next((number for number, path in enumerate(found, 1) if number > 1 and not path.is_file()), None)
    if missing is not None:
        raise InputError(
            f"{str(found[missing - 1])!r}, the plan of rank {missing}, does not exist: {missing - 1} of {top} plans "
            f"are there; write them with `meshwright plan … --top {top} --out {found[0]}`, or take --top {missing - 1}"
        )
    return found


_ARROW = " -> "
_NOTHING = "()"
_RULE = re.compile(
    r"(?:([^;>]+) -> )?([^;>]+?)(; (?:split|whole) work)?(?:; reduces ([1-9][0-9]{0,15}))?((?:; [a-z_]+ of [^;]+)*)"
)
_MESSAGE = re.compile(
    r"([a-z_]+) of (?:tensors ([0-9]{1,3}(?:\+[0-9]{1,3})*))?(?: and )?(?:([1-9][0-9]{0,15}) numbers)?"
    r"(?: / ([1-9][0-9]{0,8}))?( in turns)?( beside)?( uncut)?"
)


def rule_to_text(rule: Rule) -> str:
    """Write a rule as one line.

    >>> rule_to_text(Rule((0, -1), (0,), splits_work=True))
    'S(0), R -> S(0)'
    >>> rule_to_text(Rule((0, -1), (0, -1), splits_work=True, reduced_elements=128))
    'S(0), R -> S(0), R; reduces 128'
    """
    text = _side(rule.inputs) + _ARROW + _side(rule.outputs) if rule.inputs else _side(rule.outputs)
    if rule.splits_work != _splits_by_default(rule.inputs, rule.outputs):
        text += "; split work" if rule.splits_work else "; whole work"
    if rule.reduced_elements:
        text += f"; reduces {rule.reduced_elements}"
    return text + "".join(f"; {message_to_text(message)}" for message in rule.messages)


def message_to_text(message: InnerMessage) -> str:
    """Write a collective inside an operator.

    >>> message_to_text(InnerMessage(Collective.SEND, tensors=(1, 2), circulating=True, overlapped=True))
    'send of tensors 1+2 in turns beside'
    """
    parts = [f"tensors {'+'.join(map(str, message.tensors))}"] if message.tensors else []
    parts += [f"{message.elements} numbers"] if message.elements else []
    text = f"{message.collective.value} of {' and '.join(parts)}"
    text += f" / {message.divisor}" if message.divisor != 1 else ""
    return text + " in turns" * message.circulating + " beside" * message.overlapped + " uncut" * message.uncut


def _message_from_text(text: str) -> InnerMessage:
    match = _MESSAGE.fullmatch(text)
    names = {collective.value: collective for collective in Collective}
    if (
        match is None
        or match[1] not in names
        or not (match[2] or match[3])
        or (" and " in text) != bool(match[2] and match[3])
    ):
        raise InputError(f"message {text!r} does not read like 'send of tensors 1+2 in turns beside'; correct it")
    return InnerMessage(
        names[match[1]],
        elements=int(match[3] or 0),
        tensors=tuple(map(int, match[2].split("+"))) if match[2] else (),
        divisor=int(match[4] or 1),
        circulating=match[5] is not None,
        overlapped=match[6] is not None,
        uncut=match[7] is not None,
    )


@lru_cache(maxsize=65536)
def rule_from_text(text: str) -> Rule:
    """Read what `rule_to_text` wrote.

    >>> rule_from_text("S(0), R -> S(0); reduces 128")
    Rule(inputs=(0, -1), outputs=(0,), splits_work=True, reduced_elements=128)
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise InputError(f"rule {text!r} does not read like 'S(0), R -> S(0)'; correct it")
    inputs, outputs = _placements_of(match[1] or _NOTHING), _placements_of(match[2])
    default = _splits_by_default(inputs, outputs)
    messages = tuple(_message_from_text(part) for part in match[5].split("; ")[1:])
    splits = default if match[3] is None else match[3] == "; split work"
    return Rule(inputs, outputs, splits_work=splits, reduced_elements=int(match[4] or 0), messages=messages)


def _side(placements: Iterable[int]) -> str:
    return ", ".join(placement_name(p) for p in placements) or _NOTHING


def _placements_of(side: str) -> tuple[int, ...]:
    return () if side == _NOTHING else tuple(parse_placement(item) for item in side.split(", "))


def _splits_by_default(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> bool:
    return bool(inputs) and any(p >= 0 for p in (*inputs, *outputs))
