"""Networks from saved ``torch.export`` programs."""

from __future__ import annotations

import hashlib
import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export.graph_signature import InputKind, OutputKind

from planner.networks.network import Network
from planner.networks.python_factory import described
from simulator.errors import NetworkError

HOW = (
    "export the module together with its loss, as in torch.export.export(module_with_loss, (inputs, labels), "
    'dynamic_shapes=((batch := {0: torch.export.Dim("batch")}), batch)), and save it with torch.export.save'
)

aten = torch.ops.aten


def load_program(file: str, sequence_length: int | None) -> Network:
    """Load the program of `file`, which `planner.networks.trust.check_program` has seen, and describe its network.

    The program takes tensors with the batch as dim 0, which it leaves open, and returns the scalar mean loss; shapes
    come from the example inputs that are saved with it, and training starts from the parameters in it.

    Raises
    ------
    NetworkError
        The file holds no such program.
    """
    spec, path = f"pt2:{file}", Path(file)
    program = _load(spec, path)
    example = _inputs(spec, program)
    _check_batch_is_open(spec, program)
    _check_loss(spec, program)
    module, notes = _module(program)
    network = described(spec, path.stem, module, example, sequence_length, lambda: _module(_load(spec, path))[0])
    with path.open("rb") as opened:
        content = f"pt2 {hashlib.file_digest(opened, 'sha256').hexdigest()}"
    description = f"exported program of {_parameters(module):,} parameters from {file}"
    return replace(network, description=description, notes=notes, content=content)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _load(spec: str, path: Path) -> torch.export.ExportedProgram:
    """Read a program; torch's own account of what is wrong with a file is kept off the terminal."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with unset_fake_temporarily(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except (Exception, SystemExit) as error:
        first = str(error).strip().partition("\n")[0]
        raise NetworkError(
            f"network {spec!r}: {path} cannot be read as a saved program ({type(error).__name__}: {first[:200]}); "
            "write it anew with torch.export.save, by this version of PyTorch"
        ) from error
    finally:
        logging.disable(disabled)


def _inputs(spec: str, program: torch.export.ExportedProgram) -> tuple[Tensor, ...]:
    """Return the example inputs of a program."""
    if program.example_inputs is None:
        raise NetworkError(f"network {spec!r}: the program was saved without its example inputs; {HOW}")
    positional, named = program.example_inputs
    if named or not positional or not all(isinstance(value, Tensor) for value in positional):
        given = [type(value).__name__ for value in positional] + [f"{name}=" for name in named]
        raise NetworkError(
            f"network {spec!r}: the program takes ({', '.join(given)}); it must take tensors by position: {HOW}"
        )
    return tuple(positional)


def _check_batch_is_open(spec: str, program: torch.export.ExportedProgram) -> None:
    """Raise NetworkError unless dim 0 of every input is the same open number."""
    wanted = {item.arg.name for item in program.graph_signature.input_specs if item.kind == InputKind.USER_INPUT}
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted]
    for number, value in enumerate(values):
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise NetworkError(f"network {spec!r}: input {number} has no batch dim; {HOW}")
        if isinstance(value.shape[0], int):
            raise NetworkError(
                f"network {spec!r}: the program is fixed to a batch of {value.shape[0]} (dim 0 of input {number}), and "
                f"plans need other batches; {HOW}"
            )
    found = {str(value.shape[0]) for value in values if isinstance(value, Tensor)}
    if len(found) > 1:
        raise NetworkError(
            f"network {spec!r}: dim 0 of the inputs are different numbers ({', '.join(sorted(found))}); it must be one "
            f"batch size for all: {HOW}"
        )


def _check_loss(spec: str, program: torch.export.ExportedProgram) -> None:
    """Raise NetworkError unless a program returns one scalar alone."""
    wanted = [item.arg.name for item in program.graph_signature.output_specs if item.kind == OutputKind.USER_OUTPUT]
    shapes = [
        tuple(str(dim) if isinstance(dim, int) else "batch" for dim in node.meta["val"].shape)
        for node in program.graph.nodes
        if node.name in wanted and isinstance(node.meta.get("val"), Tensor)
    ]
    if len(wanted) != 1 or shapes != [()]:
        found = " and ".join(f"({', '.join(shape)})" for shape in shapes) or "no tensor"
        raise NetworkError(f"network {spec!r}: the program returns {found}, not one scalar, the mean loss; {HOW}")


def _module(program: torch.export.ExportedProgram) -> tuple[nn.Module, tuple[str, ...]]:
    """Make a module of a program in training mode that keeps no state beside parameters; with notes on that."""
    with unset_fake_temporarily():
        # Guards hold the batch to what was asked for when it was exported.
        module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    _tie(module)
    notes = _without_running_statistics(module)
    # An exported module refuses to change its mode; it has the one that it was exported in.
    module.train = lambda mode=True: module  # type: ignore[method-assign]
    return module, notes


def _tie(module: nn.Module) -> None:
    """Let parameters that share their memory be one again, of which a file keeps the memory only."""
    first: dict[tuple[object, ...], nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        place = (
            parameter.untyped_storage().data_ptr(),
            parameter.storage_offset(),
            parameter.shape,
            parameter.stride(),
        )
        kept = first.setdefault(place, parameter)
        if kept is not parameter:
            owner, _, own = name.rpartition(".")
            module.get_submodule(owner).register_parameter(own, kept)


def _without_running_statistics(module: fx.GraphModule) -> tuple[str, ...]:
    """Let batch norms use the statistics of the batch only, as `planner.graph.tracing` does with modules."""
    found = False
    for node in list(module.graph.nodes):
        if node.target is aten.batch_norm.default and node.args[5]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
            found = True
        elif node.target is aten.add_.Tensor and not node.users and _counts_batches(node.args[0]):
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return ("batch norm keeps no running statistics: training uses those of the batch",) if found else ()


def _counts_batches(tensor: Any) -> bool:
    return (
        isinstance(tensor, fx.Node) and tensor.op == "get_attr" and str(tensor.target).endswith("num_batches_tracked")
    )
