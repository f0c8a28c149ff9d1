"""What tests of the planner share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from planner.networks import network as networks

SMALL = Path(__file__).parent / "execution" / "small.py"


@pytest.fixture(autouse=True, scope="session")
def small_networks_are_captured_once() -> Iterator[None]:
    """Keep graphs of the suite's own networks on disk: unlike a user's their code is known to be that of one file."""
    cache_key = networks._cache_key
    code = SMALL.read_text(encoding="utf-8")

    def key(network: networks.Network) -> str:
        own = network.spec.startswith("py:tests.planner.execution.small:")
        return cache_key(replace(network, content=f"{network.spec}\n{code}") if own else network)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networks, "_cache_key", key)
        yield
