"""`shard`: in how many parts the tensors of an operator are cut."""

from __future__ import annotations

from typing import Any

from planner.networks.marks import mark_cuts
from planner.sharding.cuts import OperatorCuts
from simulator.checks import strategy
from simulator.errors import ContextError


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
    if callable(getattr(module_or_call, "named_modules", None)) and not isinstance(module_or_call, type):
        return mark_cuts(module_or_call, cuts)
    if not callable(module_or_call) or isinstance(module_or_call, type):
        raise ContextError(
            f"shard({module_or_call!r:.60}, …): {type(module_or_call).__name__} is neither a torch.nn.Module nor a "
            "function of tensors; give one of them"
        )
    from planner.networks.sharded_call import ShardedCall

    return mark_cuts(ShardedCall(module_or_call), cuts)
