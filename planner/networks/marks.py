"""Marks on the modules of a network: what is to be done with a part of it, without a change to what the part does.

A mark is an attribute of a module that torch does not know: parameters, buffers, the state dictionary and the forward
pass stay as they are, and a copy of the module keeps it. `marks_of` gathers the marks of a network by module path;
`planner.planning.placing` finds the units, parameters and operators of the operator graph that they are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from planner.sharding.cuts import OperatorCuts
from simulator.checks import boolean, integer
from simulator.errors import ContextError

if TYPE_CHECKING:
    from torch import nn

    from planner.graph.operator_graph import OperatorGraph


ATTRIBUTE = "_meshwright_marks"
LARGEST_GROUP = 2**16
LARGEST_STAGE = 4095

Marked = TypeVar("Marked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Activations of a unit that are on the host from the forward to the backward pass.

    Attributes
    ----------
    prefetch : so many operators before the one that reads it a tensor is called back, at the beginning of the unit's
        backward pass at the earliest; 0: with the backward pass of the unit behind
    operators : what is offloaded of the unit: results of these, by the rest of their name behind the unit's; empty: all
    """

    prefetch: int = 0
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMarks:
    """What one module, or one parameter (``fusion`` alone), is marked with; None says nothing."""

    stage: int | None = None
    recompute: bool | None = None
    messages: bool | None = None
    offload: Swap | None = None
    fusion: int | None = None
    cuts: OperatorCuts | None = None


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The marks of a network by module path ("" is the whole network), those of an inner module over its outer ones'.

    Attributes
    ----------
    stages : pipeline stage of modules; with several chunks a stage the number of their chunk, in model order
    virtual : chunks of a stage
    recompute : whether modules compute again in the backward pass, ``"selective"`` for what is cheap in them
    messages : whether messages of modules that compute again are sent again; they are where nothing is said
    offload : modules whose results wait for the backward pass on the host
    fusion : group of modules, and of parameters by their own names, whose gradients travel in one message; 0 alone
    cuts : in how many parts the tensors of an operator are cut
    modules : all module paths, where they are known
    """

    stages: Mapping[str, int] = field(default_factory=dict)
    recompute: Mapping[str, bool | str] = field(default_factory=dict)
    messages: Mapping[str, bool] = field(default_factory=dict)
    offload: Mapping[str, Swap] = field(default_factory=dict)
    fusion: Mapping[str, int] = field(default_factory=dict)
    cuts: Mapping[str, OperatorCuts] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    virtual: int = 1

    def __bool__(self) -> bool:
        return bool(self.stages or self.recompute or self.offload or self.fusion or self.cuts)

    def over(self, other: Marks) -> Marks:
        """These marks, and those of `other` where these say nothing."""
        names = ("stages", "recompute", "messages", "offload", "fusion", "cuts")
        found: dict[str, Any] = {name: {**getattr(other, name), **getattr(self, name)} for name in names}
        virtual = self.virtual if self.stages else other.virtual
        return Marks(**found, modules=self.modules or other.modules, virtual=virtual)


def set_pipeline_stage(module: Marked, stage: int) -> Marked:
    """Mark a module as part of a pipeline stage, counted from 0; returns the module.

    Raises
    ------
    ContextError
        `module` is no module, or `stage` no whole number from 0 to 4095.
    """
    return _mark(module, "set_pipeline_stage", stage=integer(0, LARGEST_STAGE)("pipeline_stage", stage))


def recompute(module: Marked, mode: bool = True, mp_comm_recompute: bool = True) -> Marked:
    """Mark a module to keep nothing from the forward to the backward pass but its input; returns the module.

    ``mode=False`` takes a part of a marked module out again. With ``mp_comm_recompute=False`` the messages of its
    operators are not sent again: what they have brought is kept.
    """
    mode, again = boolean("recompute mode", mode), boolean("mp_comm_recompute", mp_comm_recompute)
    return _mark(module, "recompute", recompute=mode, messages=again if mode else None)


def offload(module: Marked, backward_prefetch: str | int = "Auto") -> Marked:
    """Mark a module so that what its operators keep for the backward pass waits in the memory of the host.

    ``backward_prefetch`` is how many operators before its use a tensor is called back, at the beginning of the unit's
    backward pass at the earliest; ``"Auto"``: while the unit behind goes backward. Returns the module.
    """
    return _mark(module, "offload", offload=Swap(prefetch=prefetched("backward_prefetch", backward_prefetch)))


def prefetched(key: str, value: Any) -> int:
    """A prefetch as `Swap` has it; ContextError where it is none."""
    return 0 if value == "Auto" else int(integer(1)(key, value))


def set_comm_fusion(module_or_parameter: Marked, fusion_type: int) -> Marked:
    """Let the gradients of all parameters of a module, or of one parameter, travel in one message with their group.

    Parameters with the same number are a group; with 0 each travels alone. Where a network has such groups, gradients
    that are in none travel in messages of the usual size. Returns the module or parameter.
    """
    number = integer(0, LARGEST_GROUP)("comm_fusion", fusion_type)
    return _mark(module_or_parameter, "set_comm_fusion", parameters=True, fusion=number)


def mark_cuts(module: Marked, cuts: OperatorCuts) -> Marked:
    """Mark a module with the cuts of its operator (`planner.exchange.mindspore.entry`)."""
    return _mark(module, "shard", cuts=cuts)


def _mark(module: Marked, function: str, *, parameters: bool = False, **values: Any) -> Marked:
    a_parameter = hasattr(module, "requires_grad") and hasattr(module, "is_leaf") and not isinstance(module, type)
    if not is_module(module) and not (parameters and a_parameter):
        wanted = "a torch.nn.Module or Parameter" if parameters else "a torch.nn.Module"
        raise ContextError(
            f"{function}({module!r:.60}, …): {type(module).__name__} is not {wanted}; mark a module of the network"
        )
    module.__dict__[ATTRIBUTE] = replace(_own(module), **values)
    return module


def is_module(value: Any) -> bool:
    """Whether a value is a module, as torch need not be imported to know."""
    return callable(getattr(value, "named_modules", None)) and not isinstance(value, type)


def _own(module: Any) -> ModuleMarks:
    found = getattr(module, "__dict__", {}).get(ATTRIBUTE)
    return found if isinstance(found, ModuleMarks) else ModuleMarks()


def marks_of(network: Any) -> Marks:
    """Gather the marks of a module and all its parts.

    A parameter may also carry its group in an attribute of its own, ``parameter.comm_fusion = 2``.
    """
    found: dict[str, Any] = {"stages": {}, "recompute": {}, "messages": {}, "offload": {}, "fusion": {}, "cuts": {}}
    names = {"stage": "stages"}
    modules = []
    for path, module in network.named_modules(remove_duplicate=False):
        modules.append(path)
        marks = _own(module)
        for one in fields(marks):
            value = getattr(marks, one.name)
            if value is not None:
                found[names.get(one.name, one.name)][path] = value
    for name, parameter in network.named_parameters():
        own = _own(parameter).fusion
        given = getattr(parameter, "comm_fusion", None) if own is None else own
        if given is not None:
            found["fusion"][name] = integer(0, LARGEST_GROUP)(f"comm_fusion of parameter {name!r}", given)
    return Marks(**found, modules=tuple(modules))


LAYERWISE = "layerwise_parallel"


def marked_layerwise(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module whose ``layerwise_parallel`` is True."""
    found = []
    for name, parameter in module.named_parameters():
        said = getattr(parameter, LAYERWISE, False)
        if not isinstance(said, bool):
            raise ContextError(f"{name}.{LAYERWISE}={said!r}: it must be True or False")
        if said:
            found.append(name)
    return tuple(found)


def layerwise_names(graph: OperatorGraph, patterns: Iterable[str]) -> tuple[str, ...]:
    """Names of the parameters of a network that patterns (``"head.*"``) name, in its order.

    Raises
    ------
    ContextError
        A pattern names no parameter.
    """
    from planner.graph.folding import unfold

    whole = unfold(graph)
    nodes = {parameter.name: whole.nodes[parameter.node].name for parameter in whole.parameters}
    wanted: set[str] = set()
    for pattern in patterns:
        matching = [name for name in nodes if fnmatchcase(name, pattern)]
        if not matching:
            raise ContextError(
                f"layerwise_parallel: {pattern!r} names no parameter of {graph.network}; its parameters are "
                f"{', '.join(list(nodes)[:8])}{', …' if len(nodes) > 8 else ''}"
            )
        wanted.update(matching)
    return tuple(node for name, node in nodes.items() if name in wanted)
