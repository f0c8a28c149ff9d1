"""`Pipeline`: a network that runs in micro-batches, with the pipeline stage of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planner.networks.given import source_of
from planner.networks.marks import LARGEST_STAGE, Marks
from simulator.checks import integer
from simulator.errors import ContextError

if TYPE_CHECKING:
    from planner.networks.given import Source


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
