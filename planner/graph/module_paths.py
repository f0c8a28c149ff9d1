"""Which module each traced call belongs to, and readable names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import fx

_BLOCK = re.compile(r"^(?P<prefix>.*?)\.(?P<index>\d+)(?=\.|$)")
_REPEATED_CALL = re.compile(r"@\d+")
_ACCUMULATION = "Gradient addition node"


def is_backward(node: fx.Node) -> bool:
    """Whether a traced node belongs to the backward pass."""
    return str(node.meta.get("partitioner_tag", "")) == "is_backward"


def is_gradient_sum(node: fx.Node) -> bool:
    """Whether a traced node adds what several uses of one tensor send back."""
    return is_backward(node) and _ACCUMULATION in (node.meta.get("stack_trace") or "")


def block_of(path: str) -> str:
    """Path up to the outermost index, or "" if it has none.

    >>> block_of("layers.3.conv.0")
    'layers.3'
    """
    match = _BLOCK.match(path)
    return match[0] if match else ""


def module_paths(
    calls: Sequence[fx.Node], forward_of: Mapping[fx.Node, fx.Node], producers: Mapping[fx.Node, Sequence[fx.Node]]
) -> dict[fx.Node, str]:
    """Find the module path of every call.

    Torch knows it for most. A gradient sum goes to the block that completes it, a backward call to its
    forward call's module, and any other (made where torch keeps no record) to the only block that reads it.
    """
    paths: dict[fx.Node, str] = {}
    unknown: list[fx.Node] = []
    for node in calls:
        recorded = _recorded(node)
        if is_gradient_sum(node):
            paths[node] = _sum_path([paths.get(p, "") for p in producers[node]])
        elif recorded is not None:
            paths[node] = recorded
        elif node in forward_of:
            paths[node] = paths.get(forward_of[node], "")
        else:
            paths[node] = ""
            unknown.append(node)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in calls:
        for producer in producers[node]:
            readers.setdefault(producer, []).append(node)
    for node in reversed(unknown):
        paths[node] = _reader_path([paths[reader] for reader in readers.get(node, [])])
    return paths


def _recorded(node: fx.Node) -> str | None:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path = str(list(stack.values())[-1][0])
    return _REPEATED_CALL.sub("", path)


def _sum_path(paths: Sequence[str]) -> str:
    common, block = _common(paths), block_of(paths[-1])
    return common if not block or (common + ".").startswith(block + ".") else block


def _reader_path(paths: Sequence[str]) -> str:
    blocks = {block_of(path) for path in paths}
    return _common(paths) if len(blocks) == 1 and "" not in blocks else ""


def _common(paths: Sequence[str]) -> str:
    parts = [path.split(".") for path in paths]
    common: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common)


def unique_name(name: str, taken: dict[str, int]) -> str:
    """Return `name`, with ``.1``, ``.2``, … from its second use on, and remember it.

    >>> taken = {}
    >>> [unique_name("norm/add", taken) for _ in range(3)]
    ['norm/add', 'norm/add.1', 'norm/add.2']
    """
    count = taken.get(name, 0)
    taken[name] = count + 1
    return f"{name}.{count}" if count else name
