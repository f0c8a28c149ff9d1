"""What a network is before it is captured: its inputs, its defaults and how to make its module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from planner.graph import cache
from planner.graph.attention import WRITTEN_OUT, with_attention
from planner.graph.chain import with_cut_runs
from planner.graph.fusion import with_fusion
from planner.graph.norms import FUSED, with_norms
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import with_stored_weights
from planner.graph.serialization import fingerprint
from planner.networks.child import in_child
from planner.networks.inputs import InputSpec
from simulator.errors import NetworkError

if TYPE_CHECKING:
    from torch import nn

    from planner.networks.decoder.graph import Decoder
    from planner.networks.marks import Marks
    from planner.networks.shortening import Shortened
    from planner.networks.zoo.captured import Captured

Family = Literal["image", "language", "features"]
CAPTURED_BLOCKS = 2
"""Blocks that stand for all where all are alike."""
FOREIGN = ("py:", "pt2:")
"""Sources whose networks are code that is not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts that a configuration of transformers states, known before its module is made.

    ``dropout`` are the keys of chances that training leaves out; ``sequence_length`` is None where no tokens are read.
    ``config`` has every key of a causal language model's configuration; it is empty for other networks.
    """

    class_name: str
    family: Family
    inputs: tuple[InputSpec, ...]
    sequence_length: int | None
    dropout: tuple[str, ...]
    experts: bool
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network that can be captured and built.

    ``make`` takes a number of blocks (``None`` for all) and returns a module in training mode whose
    ``forward(*inputs)`` is the scalar mean loss. ``depth`` is the number of equal blocks, if ``make`` can
    leave some out; of ``captured_blocks`` the last two then stand for all but those before them.
    ``content`` identifies what the graph depends on; empty: never cached. ``decoder`` is
    set for known families: their graph is written from it, without torch, equal to the capture's. ``config`` is the
    configuration of transformers of a causal language model, complete, or empty. ``marks`` are
    those that the network's own code has on its modules, ``layerwise`` the parameters it marks as each rank's own.
    ``attention``, ``norms`` and ``fusion`` are how these run, of the kinds of `planner.graph.attention`,
    `planner.graph.norms` and `planner.graph.fusion`.
    """

    name: str
    spec: str
    family: Family
    description: str
    default_global_batch: int
    default_optimizer: str
    sequence_length: int | None
    inputs: tuple[InputSpec, ...]
    make: Callable[[int | None], nn.Module]
    depth: int | None = None
    captured_blocks: int = CAPTURED_BLOCKS
    content: str = ""
    notes: tuple[str, ...] = ()
    decoder: Decoder | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    marks: Marks | None = None
    layerwise: tuple[str, ...] = ()
    attention: str = ""
    norms: str = ""
    fusion: str = ""
    stored: str = ""

    def capture(self) -> OperatorGraph:
        """Return the operator graph at batch 1, from the cache where it can."""
        return capture(self)

    def build(self, seed: int, depth: int | None = None) -> nn.Module:
        """Make the module with real parameters drawn from `seed`, of `depth` blocks if given."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(depth).train()


def capture(network: Network) -> OperatorGraph:
    """Capture one training step of a network at batch 1, repeated blocks folded.

    Where the network can be made with fewer blocks, two are captured and stand for all (`Network`). The graph is
    read from and written to the disk cache, which needs no torch; that of a known decoder is written
    anew, which takes no longer.
    """
    key = "" if network.decoder else _cache_key(network)
    graph = cache.load(key) if key else None
    if graph is None:
        graph = _capture(network)
        if key:
            cache.store(key, graph)
    if network.stored:
        graph = with_stored_weights(graph, network.stored)
        graph = replace(graph, fingerprint=fingerprint(graph))
    return graph


def _cache_key(network: Network) -> str:
    if not network.content:
        return ""
    content = f"{network.content}\n{network.sequence_length}\n{network.depth}\n{network.notes}\n{cache.toolchain()}"
    content += f"\n{network.attention}" if network.attention in WRITTEN_OUT else ""
    content += "\nfused norms" if network.norms == FUSED else ""
    content += f"\nfused and joined by a {network.fusion}" if network.fusion else ""
    return hashlib.sha256(content.encode()).hexdigest()


def _capture(network: Network) -> OperatorGraph:
    from planner.graph.folding import fold, repeat

    if network.decoder is None and network.depth is None:
        graph = _shortened(network) or fold(_as_asked(network, _unfolded(network, None)))
    elif network.depth is not None and network.depth > network.captured_blocks:
        graph = repeat(_as_asked(network, _few_blocks(network)), network.depth)
    else:
        graph = fold(_as_asked(network, _unfolded(network, None)))
    graph = with_cut_runs(graph)
    return replace(graph, fingerprint=fingerprint(graph))


def _few_blocks(network: Network) -> OperatorGraph:
    found = _kept(network) or capture_short(network)
    assert found is not None
    return found[0]


def _kept(network: Network) -> Captured | None:
    """The graph of a built-in network that was captured before."""
    if network.decoder is not None or network.spec != f"zoo:{network.name}":
        return None
    from planner.networks.zoo.captured import kept

    return kept(network.name, kept_as(network))


def kept_as(network: Network) -> str:
    """Digest of everything but code that the captured graph of a built-in network depends on."""
    text = repr((network.content, network.inputs, network.captured_blocks, network.notes))
    return hashlib.sha256(text.encode()).hexdigest()


def _as_asked(network: Network, graph: OperatorGraph) -> OperatorGraph:
    # GPT-2 has one projection of queries, keys and values, written apart here for its heads to be cut.
    joined = bool(network.fusion) and _joins_projections(network)
    return with_fusion(
        with_norms(with_attention(graph, network.attention), network.norms), network.fusion, joined=joined
    )


def _joins_projections(network: Network) -> bool:
    if network.decoder is None:
        return False
    from planner.networks.decoder.gpt import HuggingFaceGPT2

    return isinstance(network.decoder, HuggingFaceGPT2)


def _shortened(network: Network) -> OperatorGraph | None:
    """The folded graph of a network captured with few of its equal blocks; None where that is not the whole one's."""
    from planner.networks.shortening import lengthened

    found = _kept(network) or capture_short(network)
    return None if found is None else lengthened(_as_asked(network, found[0]), found[1])


def capture_short(network: Network) -> Captured | None:
    """Capture few of the equal blocks, and say how many of each list; None where the network's code counts them."""
    if network.depth is not None:
        return _unfolded(network, network.captured_blocks), {}
    work = partial(_captured_short, network)
    return in_child(network.spec, work) if network.spec.startswith(FOREIGN) else work()


def _captured_short(network: Network) -> Captured | None:
    from planner.graph.capture import capture_module
    from planner.networks.shortening import shorten

    lists: dict[str, Shortened] = {}

    def make() -> nn.Module:
        module = network.make(None).train()
        lists.update(shorten(module))
        return module

    try:
        graph = capture_module(make, network.inputs, name=network.name, notes=network.notes, twice=_unknown(network))
    except NetworkError:
        if lists:
            return None
        raise
    return graph, lists


def _unfolded(network: Network, blocks: int | None) -> OperatorGraph:
    if network.decoder is not None:
        from planner.networks.decoder.graph import decoder_graph

        blocks = blocks or network.depth
        assert blocks is not None
        return decoder_graph(network.decoder, blocks, network.inputs, name=network.name, notes=network.notes)
    from planner.graph.capture import capture_module

    work = partial(
        capture_module,
        lambda: network.make(blocks).train(),
        network.inputs,
        name=network.name,
        notes=network.notes,
        twice=_unknown(network),
    )
    return in_child(network.spec, work) if network.spec.startswith(FOREIGN) else work()


def _unknown(network: Network) -> bool:
    """Whether nobody has tried the network's code at other batch sizes."""
    return not network.content or network.spec.startswith(FOREIGN)
