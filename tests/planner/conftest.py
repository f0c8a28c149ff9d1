"""What tests of the planner share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture(autouse=True, scope="session")
def networks_are_traced_once() -> Iterator[None]:
    """Keep traces of built-in networks: attention, norms and fusion are written into the same trace."""
    traces: dict[tuple[str, ...], object] = {}

    def once(trace: Callable[..., object]) -> Callable[..., object]:
        def kept(network: networks.Network, *blocks: int | None) -> object:
            key = networks._cache_key(replace(network, attention="", norms="", fusion=""))
            if not key or network.decoder is not None or not network.spec.startswith(("zoo:", "test:")):
                return trace(network, *blocks)
            place = (trace.__name__, key, *map(str, blocks))
            if place not in traces:
                traces[place] = trace(network, *blocks)
            return traces[place]

        return kept

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_captured_short", "_unfolded"):
            patch.setattr(networks, name, once(getattr(networks, name)))
        yield
