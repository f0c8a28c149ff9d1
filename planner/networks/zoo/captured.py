"""Captured graphs of built-in networks, shipped in ``captured/``, so that even the first plan of one needs no torch.

Decoders are written from their sizes (`planner.networks.decoder`) and have no file. A test captures the others and
compares; after a change of the capture, ``python -m planner.networks.zoo`` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path

from planner.graph.operator_graph import OperatorGraph
from planner.graph.serialization import graph_from_json
from planner.networks.shortening import Shortened

Captured = tuple[OperatorGraph, dict[str, Shortened]]
"""A graph without some of the equal blocks, and how many of each list were left out."""
FOLDER = Path(__file__).with_name("captured")


def kept(name: str, digest: str) -> Captured | None:
    """Read the graph kept of a built-in network; None where the one kept is of other inputs or sizes."""
    file = FOLDER / f"{name}.json"
    if not file.is_file():
        return None
    held = json.loads(file.read_bytes())
    if held["captured"] != digest:
        return None
    lists = {path: Shortened(tuple(one["kept"]), tuple(one["kinds"])) for path, one in held["lists"].items()}
    return graph_from_json(held["graph"]), lists
