"""Captures the built-in networks whose graphs are kept, and writes them anew: ``python -m planner.networks.zoo``."""

from __future__ import annotations

import json
from dataclasses import asdict

from planner.graph.serialization import graph_to_json
from planner.networks.loading import list_networks, load_network
from planner.networks.network import capture_short, kept_as
from planner.networks.zoo.captured import FOLDER
from simulator.whole_file import write_whole


def main() -> None:
    """Write a file for every built-in network that is captured."""
    for network in (load_network(one.spec) for one in list_networks()):
        if network.decoder is not None:
            continue
        found = capture_short(network)
        assert found is not None  # no built-in network counts its own blocks
        lists = {path: asdict(one) for path, one in found[1].items()}
        held = {"captured": kept_as(network), "lists": lists, "graph": graph_to_json(found[0])}
        write_whole(FOLDER / f"{network.name}.json", json.dumps(held, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
