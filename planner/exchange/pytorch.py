"""A plan as a Python file that applies it to a module with PyTorch's own parts."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.exchange.exporting import Exported, nearest_plan
from planner.exchange.formats import Written
from planner.exchange.torchtitan import schedule_word
from planner.exchange.training_config import config_of
from planner.graph.chain import chain
from planner.graph.operator_graph import OperatorGraph, Parameter, Role, TensorRef
from planner.graph.unfolding import unfold
from planner.lowering.checked import captured
from planner.lowering.options import recompute_modes
from planner.plans.capability import capabilities
from planner.plans.file import read_plan
from planner.plans.plan import Plan, expanded_rules
from planner.sharding.context import attention_heads
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.rules import Rule
from simulator.errors import InputError
from simulator.program import Kernel, Phase

if TYPE_CHECKING:
    from torch import Tensor, nn

TABLE = "pytorch"
"""Name of the capability table."""
_WRAPPED = {"hf:": "model.", "py:": "module.", "module:": "module."}
"""Sources whose networks hold the user's module under a name of its own, if they have one child alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How a plan cuts modules, by their names in the user's module.

    Attributes
    ----------
    units : modules that are gathered and computed again as one, in model order
    stages : modules with parameters of each chunk
    styles : how each module lies on tensor ranks, as an expression
    splits : the first layer, where residuals lie in parts of the sequence; empty elsewhere
    heads : heads of attention of a tensor rank; 0 where they are whole, or differ
    recompute : mode of each unit that computes again
    """

    units: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]
    styles: Mapping[str, tuple[str, ...]]
    splits: str
    recompute: Mapping[str, str]
    tied: bool
    heads: int


def export_module(plan: Plan, graph: OperatorGraph, *, rounds: bool = False) -> Exported:
    """Write a plan as a Python file for PyTorch.

    Parameters
    ----------
    graph
        The plan's network at any batch, folded or not.
    rounds
        Whether what PyTorch's own parts cannot run becomes the nearest that they can.

    Raises
    ------
    InputError
        They cannot run the plan, and it is not to be rounded; or modules are cut as no module can be.
    """
    plan, cannot_say = nearest_plan(plan, graph, capabilities()[TABLE], rounds=rounds)
    text = "\n".join(_FileWriter(plan, _cut(plan, unfold(graph))).lines()) + "\n"
    return Exported(config=config_of(plan, graph), written=Written(text=text), cannot_say=cannot_say)


def apply(
    module: nn.Module,
    strategy: str | Path | Plan,
    loss: Callable[..., Tensor] | None = None,
    *,
    graph: OperatorGraph | None = None,
) -> Any:
    """Apply a plan to a module, on every rank of a job that torchrun started.

    It runs the file that ``meshwright export --to pytorch`` writes.

    Parameters
    ----------
    module
        The planned network, with the same initial values on every rank.
    strategy
        A strategy file, or the plan.
    loss
        A function of the module and a batch; by default ``module(*batch)`` is the mean loss.
    graph
        The plan's network; captured where it is not given.

    Returns
    -------
    Callable
        Called with this data-parallel rank's samples it runs forward and backward passes of a step and returns their
        mean loss (None on ranks of a pipeline that do not know it). ``parameters()`` are this rank's, for an optimizer.

    Raises
    ------
    InputError
        PyTorch's own parts cannot run the plan.

    Examples
    --------
    >>> import meshwright as mw
    >>> step = mw.apply(module, "strategy.json")  # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(step.parameters())  # doctest: +SKIP
    >>> loss = step(tokens, next_tokens)  # doctest: +SKIP
    """
    plan = strategy if isinstance(strategy, Plan) else read_plan(Path(strategy))
    space: dict[str, Any] = {"__name__": "meshwright_plan"}
    exec(compile(export_module(plan, captured(plan, graph)).written.text, "<plan>", "exec"), space)  # noqa: S102 the text is ours
    return space["apply"](module) if loss is None else space["apply"](module, loss)


def _cut(plan: Plan, graph: OperatorGraph) -> _Cut:
    """Modules of a plan; `graph` is unfolded."""
    strip = next((head for source, head in _WRAPPED.items() if plan.network.startswith(source)), "")
    if not all(parameter.name.startswith(strip) for parameter in graph.parameters):
        strip = ""
    owners = _owners(graph)
    found = chain(graph)
    units = [unit.name for unit in found.units if _is_block(unit.name, owners)]
    inside = {index: unit.name for unit in found.units for index in unit.nodes}
    tied = [p for p in graph.parameters if p.aliases]
    stages = []
    for chunk in plan.chunks:
        names = [unit.name for unit in found.units]
        held = names[names.index(chunk.first) : names.index(chunk.last) + 1]
        stages.append(tuple(part[len(strip) :] for unit in held for part in _parts(unit, units, owners, inside)))
    if stages:
        _check_stages(plan, stages, [unit[len(strip) :] for unit in units], tied)
    styles, splits = _styles(plan, graph, owners, units) if plan.degree("tensor") > 1 else ({}, "")
    heads = {heads for heads, _ in attention_heads(graph)}
    cut = any(style == ("ColwiseParallel()",) for style in styles.values()) and len(heads) == 1
    modes = recompute_modes(plan, [unit.name for unit in found.units]) if plan.recompute_ranges else {}
    return _Cut(
        units=tuple(unit[len(strip) :] for unit in units),
        stages=tuple(stages),
        styles={name[len(strip) :]: style for name, style in styles.items()},
        splits=splits[len(strip) :],
        recompute={unit[len(strip) :]: modes[unit] for unit in units if unit in modes},
        tied=bool(tied),
        heads=heads.pop() // plan.degree("tensor") if cut else 0,
    )


def _owners(graph: OperatorGraph) -> dict[str, list[int]]:
    """Modules with parameters of their own, in order, each with the nodes of those; tied ones by all names."""
    found: dict[str, list[int]] = defaultdict(list)
    for parameter in graph.parameters:
        for name in dict.fromkeys((parameter.name, *parameter.aliases)):
            found[name.rpartition(".")[0]].append(parameter.node)
    return dict(found)


def _is_block(unit: str, owners: Iterable[str]) -> bool:
    """Whether a unit is a module that holds others."""
    return any(owner.startswith(f"{unit}.") for owner in owners)


def _parts(
    unit: str, units: Sequence[str], owners: Mapping[str, Sequence[int]], inside: Mapping[int, str]
) -> list[str]:
    """Modules that hold the parameters of a unit: the unit itself, where it is one."""
    if unit in units:
        return [unit]
    return [owner for owner, nodes in owners.items() if all(inside[node] == unit for node in nodes)]


def _check_stages(plan: Plan, stages: Sequence[Sequence[str]], units: Sequence[str], tied: Sequence[Parameter]) -> None:
    if tied:
        names = dict.fromkeys((tied[0].name, *tied[0].aliases))
        raise InputError(
            f"{' and '.join(names)} are one parameter, which stages of PyTorch's pipelines cannot share; "
            "plan with --pin pp=1"
        )
    if len(stages[0]) > 1 and stages[0][-1] not in units:
        raise InputError(
            f"the first stage ends inside {', '.join(stages[0])}, before a layer: what crosses is no module's result; "
            f"plan with fewer stages, such as --pin pp={max(1, plan.pipeline // 2)}"
        )


COLUMNS, ROWS, LOOKUP, PLAIN = "columns", "rows", "lookup", "plain"


class _Tensors:
    """The tensor-parallel style of each module with parameters, from the plan's rules."""

    def __init__(self, plan: Plan, graph: OperatorGraph, owners: Mapping[str, Sequence[int]]) -> None:
        self.graph, self.owners = graph, owners
        self.axis = [axis.name for axis in plan.mesh.axes].index("tensor")
        self.rules = expanded_rules(plan)
        self.forward: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(graph.nodes):
            if node.phase is Phase.FORWARD and node.role is Role.OPERATOR and node.module in owners:
                self.forward[node.module].append(index)

    def rule(self, index: int) -> Rule:
        """The rule of a node."""
        return self.rules[self.graph.nodes[index].name][self.axis]

    def made(self, ref: TensorRef) -> int:
        """How a tensor lies where it is made."""
        return self.rule(ref.node).outputs[ref.output]

    def wanted(self, reader: int, ref: TensorRef) -> int:
        """How a node wants a tensor that it reads."""
        return self.rule(reader).inputs[self.graph.nodes[reader].tensor_inputs.index(ref)]

    def readers(self, ref: TensorRef) -> list[int]:
        """Forward operators that read a tensor."""
        return [i for i in self.graph.consumers.get(ref, ()) if self.graph.nodes[i].phase is Phase.FORWARD]

    def results(self, index: int) -> Iterator[TensorRef]:
        """Results of a node that forward operators read."""
        found = (TensorRef(index, output) for output in range(len(self.graph.nodes[index].outputs)))
        return (ref for ref in found if self.readers(ref))

    def input(self, module: str) -> TensorRef | None:
        """The tensor that a module reads."""
        for index in self.forward[module]:
            for ref in self.graph.nodes[index].tensor_inputs:
                node = self.graph.nodes[ref.node]
                if node.role in (Role.OPERATOR, Role.INPUT) and node.module != module:
                    return ref
        return None

    def product(self, module: str) -> int | None:
        """The product with a parameter that a module is."""
        return next((i for i in self.forward[module] if self.graph.nodes[i].op in _PRODUCTS), None)

    def kind(self, module: str) -> str:
        """How the parameters of a module are cut.

        Raises
        ------
        InputError
            Those of a product are that is no nn.Linear's: it would keep them as (out, in).
        """
        product = self.product(module)
        if product is None:
            found = (self.graph.nodes[index].kernel is Kernel.EMBEDDING for index in self.forward[module])
            return LOOKUP if any(found) else PLAIN
        made = self.rule(product).outputs[0]
        if made != PARTIAL and made != len(self.graph.nodes[product].outputs[0].shape) - 1:
            return PLAIN
        turned = (self.graph.nodes[i].op for node in self.owners[module] for i in self.readers(TensorRef(node, 0)))
        if "aten.t.default" not in turned:
            raise InputError(f"{module} is no nn.Linear, and no other product is cut over tensor ranks; use --pin tp=1")
        return ROWS if made == PARTIAL else COLUMNS


_PRODUCTS = ("aten.mm.default", "aten.addmm.default")


def _styles(
    plan: Plan, graph: OperatorGraph, owners: Mapping[str, Sequence[int]], units: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], str]:
    """Styles of each module with parameters, and the layer in front of which the sequence is split."""
    tensors = _Tensors(plan, graph, owners)
    layers = tuple(f"{unit}." for unit in units)
    kinds = {name: tensors.kind(name) for name in owners if tensors.forward[name]}
    tied = {name.rpartition(".")[0] for p in graph.parameters if p.aliases for name in (p.name, *p.aliases)}
    inner = [name for name in kinds if name.startswith(layers)]
    cut = _between(tensors, kinds, [name for name in inner if kinds[name] in (COLUMNS, ROWS)])
    styles: dict[str, tuple[str, ...]] = {}
    for name, kind in kinds.items():
        read = tensors.input(name)
        residual = read is not None and graph.nodes[read.node].module.startswith(tuple(units))
        sequence = plan.sequence_parallel and (residual or name in inner)
        if name in cut.plain:
            styles[name] = (f"SequenceParallel(sequence_dim={cut.plain[name]}, use_local_output=True)",)
        elif kind == COLUMNS and name in inner:
            styles[name] = ("ColwiseParallel()",)
        elif kind == COLUMNS:
            given = "input_layouts=Shard(1), " if sequence else ""
            styles[name] = (f"ColwiseParallel({given}output_layouts=Replicate())",)
        elif kind == ROWS:
            layouts = [] if read is not None and read.node in cut.nodes else ["input_layouts=Replicate()"]
            if name in cut.starts:
                layouts.append("output_layouts=Shard(-1)")
            elif sequence and name in inner:
                layouts.append("output_layouts=Shard(1)")
            styles[name] = (f"RowwiseParallel({', '.join(layouts)})",)
        elif kind == LOOKUP:
            styles[name] = (_table_style(tensors, name, tied=name in tied),)
        else:
            styles[name] = _plain_style(tensors, name, sequence=sequence)
    return styles, units[0] if plan.sequence_parallel and units else ""


def _table_style(tensors: _Tensors, name: str, *, tied: bool) -> str:
    """A table of embeddings, whose results are whole; one that is tied to a product has its rows cut, as that has."""
    cut = 0 if tied else tensors.made(TensorRef(tensors.owners[name][0], 0))
    if cut < 0 or (not tied and tensors.rule(tensors.forward[name][-1]).outputs[0] == REPLICATE):
        return "Whole()"
    return f"{'ColwiseParallel' if cut else 'RowwiseParallel'}(input_layouts=Replicate(), output_layouts=Replicate())"


def _plain_style(tensors: _Tensors, name: str, *, sequence: bool) -> tuple[str, ...]:
    """A module whose parameters are whole, on the whole of its input or, with ``sequence``, on a part of it."""
    out, read = TensorRef(tensors.forward[name][-1], 0), tensors.input(name)
    readers = tensors.readers(out)
    products = bool(readers) and all(tensors.product(tensors.graph.nodes[i].module) is not None for i in readers)
    parts = sequence and {tensors.wanted(reader, out) for reader in readers} == {1}
    first = next((i for i in tensors.forward[name] if read in tensors.graph.nodes[i].tensor_inputs), None)
    if not sequence or read is None or first is None or tensors.wanted(first, read) != 1:
        whole = f"Whole(use_local_output={not products})"
        split = "PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))"
        return (whole, split) if parts else (whole,)
    if parts:
        return ("SequenceParallel(use_local_output=True)",)
    layouts = "output_layouts=Shard(1), desired_output_layouts=Replicate()"
    return "SequenceParallel()", f"PrepareModuleOutput({layouts}, use_local_output={not products})"


@dataclass(slots=True)
class _BetweenProducts:
    """The modules between products that shard their results and those that sum them.

    Attributes
    ----------
    plain : modules with whole parameters, with the dim of their input that is cut
    nodes : operators
    starts : products that it begins with
    """

    plain: dict[str, int] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    starts: set[str] = field(default_factory=set)


def _between(tensors: _Tensors, kinds: Mapping[str, str], names: Iterable[str]) -> _BetweenProducts:
    """Follow what is cut along heads or width inside layers.

    Raises
    ------
    InputError
        What a product makes is gathered or cut otherwise before another one takes it, outside any module.
    """
    found = _BetweenProducts()
    for name in names:
        ref = TensorRef(tensors.forward[name][-1], 0)
        last = len(tensors.graph.spec(ref).shape) - 1
        if kinds[name] == ROWS and any(tensors.wanted(reader, ref) != last for reader in tensors.readers(ref)):
            continue
        try:
            plain, nodes = _followed(tensors, kinds, ref)
        except InputError:
            if kinds[name] == ROWS:  # its sum is a residual, which elsewhere is whole
                continue
            raise
        found.plain |= plain
        found.nodes |= nodes
        found.starts.add(name)
    return found


def _followed(tensors: _Tensors, kinds: Mapping[str, str], start: TensorRef) -> tuple[dict[str, int], set[int]]:
    """Modules and operators that read a cut tensor, and what they make of it, up to products that sum it up."""
    plain: dict[str, int] = {}
    seen = {start.node}
    refs = [start]
    while refs:
        ref = refs.pop()
        for reader in tensors.readers(ref):
            module, wanted = tensors.graph.nodes[reader].module, tensors.wanted(reader, ref)
            if kinds.get(module) == ROWS:
                continue
            if wanted < 0 or (ref != start and wanted != tensors.made(ref)) or kinds.get(module, PLAIN) != PLAIN:
                raise InputError(
                    f"{tensors.graph.nodes[reader].name} reads a tensor that is cut over tensor ranks otherwise than "
                    "it is made, outside any module; plan with --pin tp=1"
                )
            if module in kinds:
                plain.setdefault(module, wanted)
            if reader not in seen:
                seen.add(reader)
                refs += tensors.results(reader)
    return plain, seen


class _FileWriter:
    """Writes the file."""

    def __init__(self, plan: Plan, cut: _Cut) -> None:
        self.plan, self.cut = plan, cut
        self.tensor, self.pipeline = plan.degree("tensor"), plan.pipeline
        data = plan.degree("data")
        self.shards = (plan.shard_size or data) if plan.optimizer_sharding != "none" else 1
        self.replicas = data // self.shards
        # A stage holds the module under a name of its own, and only some of its layers.
        self.key = '"module." + name' if self.pipeline > 1 else "name"

    def lines(self) -> Iterator[str]:
        """Lines of the file."""
        whole = any("Whole(" in style for styles in self.cut.styles.values() for style in styles)
        first = ["", _sources()["Whole"], "", ""] if whole else []
        body = [*first, *self.constants(), *self.parts(), *self.cutting(), "", "", *self.applying()]
        yield from self.head()
        yield ""
        yield from _imports({*re.findall(r"\w+", "\n".join(body))})
        yield ""
        yield from body

    def head(self) -> Iterator[str]:
        """The description of the file."""
        plan = self.plan
        degrees = f"{self.replicas * self.shards} data × {self.tensor} tensor × {self.pipeline} pipeline ranks"
        yield f'"""{plan.network} on {plan.devices} devices: {degrees}.'
        yield ""
        yield "A plan of Meshwright for PyTorch 2.9 or later. On every rank that torchrun starts:"
        yield ""
        yield "    step = apply(module)  # module(*batch) is the mean loss; else apply(module, loss)"
        yield f"    optimizer = torch.optim.{_OPTIMIZERS[plan.optimizer]}(step.parameters(), lr=…)"
        yield "    for batch in data:  # the samples of this data-parallel rank"
        yield "        loss = step(*batch)"
        yield "        optimizer.step()"
        yield "        optimizer.zero_grad()"
        yield '"""'

    def constants(self) -> Iterator[str]:
        """The constants of the file: module names for each choice of the plan."""
        plan, cut = self.plan, self.cut
        yield f"MICRO_BATCH = {plan.micro_batch}  # samples; of {plan.micro_batch * plan.micro_batches} a step and rank"
        if cut.units:
            yield from _assigned("UNITS", cut.units)
        for mode in self.modes:
            yield from _assigned(mode.upper(), [unit for unit, its in cut.recompute.items() if its == mode])
        if cut.stages:
            yield "STAGES = ["
            for names in cut.stages:
                lines = [line.removeprefix(" = ") for line in _assigned("", names)]
                yield from (f"    {line}" for line in lines[:-1])
                yield f"    {lines[-1]},"
            yield "]"
        if cut.styles:
            yield "STYLES = {  # of modules on tensor ranks; * stands for a number"
            for name, styles in _patterns(cut.styles).items():
                if len(styles) == 1:
                    yield f'    "{name}": [{styles[0]}],'
                    continue
                yield f'    "{name}": ['
                yield from (f"        {style}," for style in styles)
                yield "    ],"
            yield "}"

    @property
    def modes(self) -> list[str]:
        """Modes of recomputation."""
        return sorted({*self.cut.recompute.values()})

    def parts(self) -> Iterator[str]:
        """The definitions that the plan needs."""
        wanted = {"Before", "Behind", "Stage", "Pipeline"} if self.pipeline > 1 else {"Accumulation"}
        wanted |= {"Heads", "with_heads"} if self.cut.heads else set()
        wanted |= {"split_sequence"} if self.cut.splits else set()
        wanted |= {"tied_parameters", "tie"} if self.cut.tied and self.tensor > 1 else set()
        for name, text in _sources().items():
            if name in wanted:
                yield from (["", "", text] if text.startswith(("class", "def")) else [text])
        yield ""
        yield ""

    def cutting(self) -> Iterator[str]:
        """The function that cuts a module."""
        yield "def cut(module: nn.Module, mesh: DeviceMesh) -> Any:"
        yield '    """Cut a module, or what a stage holds of it: tensor ranks, recomputation, data-parallel ranks."""'
        yield "    parts = dict(module.named_modules())"
        if self.cut.styles:
            yield from self._tensor_lines()
        for mode in self.modes:
            yield f"    for name in {self.held(mode.upper())}:"
            yield f"        parts[{self.key}] = checkpoint_wrapper(parts[{self.key}])"
            yield f"        module.set_submodule({self.key}, parts[{self.key}])"
        axes = '"dp_replicate", "dp_shard"' if self.replicas > 1 else '"dp_shard"'
        yield "    options: Any = {"
        yield f'        "mesh": mesh[{axes}],'
        yield f'        "reshard_after_forward": {self.plan.optimizer_sharding == "zero3"},'
        if self.plan.precision == "bf16":
            yield '        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),'
        yield "    }"
        if self.cut.units:
            yield f"    for name in {self.held('UNITS')}:"
            yield f"        fully_shard(parts[{self.key}], **options)"
        yield "    return fully_shard(module, **options)"

    def held(self, names: str) -> str:
        """Names of a list, of the modules that a stage holds."""
        if self.pipeline == 1:
            return names
        return f'[name for name in {names} if next(parts["module." + name].parameters(), None) is not None]'

    def _tensor_lines(self) -> Iterator[str]:
        if self.cut.tied:
            yield "    tied = tied_parameters(module)"
        name = 'name.removeprefix("module.")' if self.pipeline > 1 else "name"
        yield "    for name, part in parts.items():"
        if self.pipeline > 1:
            yield "        if isinstance(part, (Before, Behind)):"
            yield "            continue"
        yield rf'        for style in STYLES.get(re.sub(r"\.\d+(?=\.|$)", ".*", {name}), []):'
        yield '            parallelize_module(part, mesh["tp"], style)'
        if self.cut.splits:
            yield f'    name = "{self.cut.splits}"'
            if self.pipeline > 1:
                yield f"    if not isinstance(parts[{self.key}], Before):"
            indent = "        " if self.pipeline > 1 else "    "
            yield f'{indent}split_sequence(parts[{self.key}], mesh["tp"])'
        if self.cut.tied:
            yield "    tie(module, tied)"

    def applying(self) -> Iterator[str]:
        """The function that a user calls."""
        plan = self.plan
        made = "Pipeline" if self.pipeline > 1 else "Accumulation"
        yield "def apply("
        yield "    module: nn.Module, loss: Callable[..., Tensor] = lambda module, *batch: module(*batch)"
        yield f") -> {made}:"
        yield '    """Cut a module over the ranks; `loss` is a function of the module and a batch."""'
        yield '    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")'
        yield '    if device.type != "cpu":'
        yield '        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))'
        yield f"    sizes = ({self.pipeline}, {self.replicas}, {self.shards}, {self.tensor})"
        yield '    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))'
        if self.cut.heads:
            yield f"    loss = with_heads(loss, {self.cut.heads})"
        if self.pipeline == 1:
            level = plan.optimizer_sharding
            flags = f"reduce_each={level in ('zero2', 'zero3')}, reshard={level == 'zero3'}"
            yield f"    return Accumulation(cut(module, mesh), loss, MICRO_BATCH, {flags})"
            return
        count = plan.pipeline * plan.virtual
        yield '    rank = mesh["pp"].get_local_rank()'
        if plan.schedule in ("zbv", "dualpipe_v"):
            yield f"    held = (rank, {count - 1} - rank)  # down the ranks and back up"
        else:
            yield f"    held = range(rank, {count}, {plan.pipeline})"
        parts = self.tensor if self.cut.splits else 1
        yield f"    parts = [cut(Stage(module, STAGES, index, loss, parts={parts}), mesh) for index in held]"
        yield '    group = mesh["pp"].get_group()'
        yield "    stages = ["
        yield f"        PipelineStage(part, index, {count}, device, group=group)"
        yield "        for part, index in zip(parts, held, strict=True)"
        yield "    ]"
        yield f'    return Pipeline(parts, stages, "{schedule_word(plan.schedule, plan.micro_batches)}", MICRO_BATCH)'


def _assigned(name: str, names: Sequence[str]) -> Iterator[str]:
    """A list of modules, neighbouring layers as a range.

    >>> list(_assigned("UNITS", ["a", "b.0", "b.1", "b.2", "b.3"]))
    ['UNITS = ["a", *(f"b.{n}" for n in range(0, 4))]']
    """
    runs: list[tuple[str, int, int]] = []
    for one in names:
        head, _, number = one.rpartition(".")
        if number.isdigit() and runs and runs[-1][0] == head and runs[-1][2] == int(number):
            runs[-1] = head, runs[-1][1], int(number) + 1
        else:
            runs.append((head, int(number), int(number) + 1) if number.isdigit() else (one, 0, 0))
    parts: list[str] = []
    for head, first, end in runs:
        ranged = f'*(f"{head}.{{n}}" for n in range({first}, {end}))'
        parts += [ranged] if end - first > 2 else [f'"{head}.{n}"' for n in range(first, end)] or [f'"{head}"']
    line = f"{name} = [{', '.join(parts)}]"
    if len(line) <= 110:
        yield line
        return
    yield f"{name} = ["
    yield from (f"    {part}," for part in parts)
    yield "]"


_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "momentum": "SGD", "sgd": "SGD", "lamb": "AdamW"}
_FROM = {
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.fsdp": ("FSDPModule", "MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.pipelining": ("PipelineStage",),
    "torch.distributed.pipelining.schedules": ("PipelineScheduleSingle", "get_schedule_class"),
    "torch.distributed.tensor": ("DTensor", "Replicate", "Shard", "distribute_module"),
    "torch.distributed.tensor.parallel": (
        "ColwiseParallel", "ParallelStyle", "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel",
        "parallelize_module",
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ("checkpoint_wrapper",),
    "torch.overrides": ("TorchFunctionMode",),
    "collections.abc": ("Callable", "Iterable", "Mapping", "Sequence"),
    "typing": ("Any",),
    "torch": ("Tensor", "nn"),
}  # fmt: skip


def _imports(names: set[str]) -> Iterator[str]:
    """Lines that import what a file uses."""
    yield from (f"import {name}" for name in ("copy", "os", "re") if name in names)
    used = {source: [name for name in sorted(given) if name in names] for source, given in sorted(_FROM.items())}
    for ours in (False, True):
        yield from (["", "import torch"] if ours else [])
        yield from (["import torch.nn.functional as F"] if ours and "F" in names else [])
        for source, given in used.items():
            if given and source.startswith("torch") is ours:
                line = f"from {source} import {', '.join(given)}"
                yield (
                    line
                    if len(line) <= 110
                    else "\n    ".join([f"from {source} import (", *(f"{n}," for n in given)]) + "\n)"
                )


def _sources() -> dict[str, str]:
    """Text of each definition of `planner.exchange.pytorch_parts`."""
    text = (resources.files("planner.exchange") / "pytorch_parts.py").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = ast.get_source_segment(text, node) or ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.get_source_segment(text, node) or ""
    return {name: re.sub(r"  # (type|noqa):? ?[^\n]*", "", source) for name, source in found.items()}


def _patterns(styles: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Styles by names whose numbers are ``*``.

    Raises
    ------
    InputError
        Layers are cut in different ways.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, style in styles.items():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if found.setdefault(pattern, style) != style:
            raise InputError(f"layers cut {pattern} in different ways over tensor ranks; plan with --pin tp=1")
    return found
