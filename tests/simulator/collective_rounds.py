"""Messages of each collective algorithm, round by round, and their time as flows that share links.

Formulas of `simulator.collectives` are held against them. A *block* holds the members of a group inside one unit (a
node), a group is a list of blocks of equal size. Algorithms that cut the message into a pipeline take the number of
`pieces`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from simulator.engine import SAME_LEVEL, FloatArray, IntArray, max_min_rates
from simulator.errors import ProfileError
from simulator.topology.graph import Topology
from simulator.topology.sharing import Block, Message, Round, pairwise_all_to_all, ring_gather, rings_of

Rounds = Iterable[Sequence[Message]]


def blocks_of(group: Sequence[int], unit: int) -> list[list[int]]:
    """Members of `group` by the unit of `unit` devices that they lie in."""
    return [list(block) for _, block in itertools.groupby(sorted(group), key=lambda device: device // unit)]


def ring_all_reduce(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Reduce-scatter, then all-gather."""
    return 2 * ring_gather(blocks, payload)


def ring_broadcast(blocks: Sequence[Block], payload: float, pieces: int = 1) -> list[Round]:
    """A pipeline of `pieces` along every ring from the first block."""
    rings = rings_of(blocks)
    chains = [{b: a for a, b in itertools.pairwise(ring)} for ring in rings]
    return _down(chains, payload / len(rings), pieces)


def tree_all_reduce(blocks: Sequence[Block], payload: float, pieces: int = 1) -> list[Round]:
    """Up and down two complementary binary trees over the blocks, a chain inside each, as NCCL builds them.

    ``c`` such pairs of trees enter the blocks at different members.
    """
    trees = _double_trees(blocks)
    depth = max(_depths(tree)[1] for tree in trees)
    size = payload / len(trees) / pieces
    rounds: list[Round] = [[] for _ in range(2 * depth + pieces - 1)]
    for tree in trees:
        depths, _ = _depths(tree)
        for child, parent in tree.items():
            for piece in range(pieces):
                rounds[depth - depths[child] + piece].append(Message(child, parent, size))
                rounds[depth + depths[child] - 1 + piece].append(Message(parent, child, size))
    return rounds


def tree_broadcast(blocks: Sequence[Block], payload: float, pieces: int = 1) -> list[Round]:
    """Down the two trees of `tree_all_reduce`."""
    trees = _double_trees(blocks)
    return _down(trees, payload / len(trees), pieces)


def halving_doubling_scatter(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Reduce-scatter by recursive halving: round ``j`` exchanges ``S / 2^(j+1)`` with the member ``2^j`` away."""
    group = [device for block in blocks for device in block]
    if len(group) & (len(group) - 1):
        raise ProfileError(
            f"recursive halving needs a power of two of members, got {len(group)}; use another algorithm"
        )
    rounds = []
    for step in range(len(group).bit_length() - 1):
        size = payload / 2 ** (step + 1)
        rounds.append([Message(device, group[place ^ 1 << step], size) for place, device in enumerate(group)])
    return rounds


def halving_doubling_gather(blocks: Sequence[Block], payload: float) -> list[Round]:
    """All-gather by recursive doubling: the same rounds backwards."""
    return halving_doubling_scatter(blocks, payload)[::-1]


def halving_doubling_all_reduce(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Recursive halving, then doubling."""
    return halving_doubling_scatter(blocks, payload) + halving_doubling_gather(blocks, payload)


def hierarchical_scatter(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Reduce-scatter: a ring in every block, then rings of the members of the same place, each on its part."""
    inside = [_merge(*(ring_gather([block], payload) for block in blocks))]
    part = payload / len(blocks[0])
    across = [_merge(*(ring_gather([[device] for device in line], part) for line in _lines(blocks)))]
    return [step for rounds in inside + across for step in rounds]


def hierarchical_gather(blocks: Sequence[Block], payload: float) -> list[Round]:
    """All-gather: across the blocks, then inside them."""
    return hierarchical_scatter(blocks, payload)[::-1]


def hierarchical_all_reduce(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Inside, across, across, inside."""
    return hierarchical_scatter(blocks, payload) + hierarchical_gather(blocks, payload)


def mesh_scatter(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Reduce-scatter: every member sends its part to every other of its block at once, then halving across blocks."""
    inside = [message for block in blocks for message in pairwise_all_to_all([block], payload)[0]]
    return [inside, *_across(blocks, payload)]


def ring_halving_scatter(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Reduce-scatter: a ring in every block, then halving across blocks."""
    return [*_merge(*(ring_gather([block], payload) for block in blocks)), *_across(blocks, payload)]


def ring_halving_gather(blocks: Sequence[Block], payload: float) -> list[Round]:
    """All-gather: the rounds of `ring_halving_scatter` backwards."""
    return ring_halving_scatter(blocks, payload)[::-1]


def mesh_gather(blocks: Sequence[Block], payload: float) -> list[Round]:
    """All-gather: the rounds of `mesh_scatter` backwards."""
    return mesh_scatter(blocks, payload)[::-1]


def mesh_all_reduce(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Scatter, then gather."""
    return mesh_scatter(blocks, payload) + mesh_gather(blocks, payload)


def switch_all_reduce(group: Sequence[int], payload: float, switch: str) -> list[Round]:
    """The switch adds: it reads every slice from every member and returns each sum to its owner, which spreads it.

    Reads and spreading are one pipeline, so they load the links together.
    """
    size = payload * (1 + 1 / len(group))
    return [[message for device in group for message in (Message(device, switch, size), Message(switch, device, size))]]


def hierarchical_all_to_all(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Inside the blocks to the member of the destination's place, then across the blocks along each place."""
    inside = [message for block in blocks for message in pairwise_all_to_all([block], payload)[0]]
    across = [message for line in _lines(blocks) for message in pairwise_all_to_all([line], payload)[0]]
    return [inside, across]


def _across(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Halving along each place of the blocks, on the part that its member holds; a ring where it cannot halve."""
    step = ring_gather if len(blocks) & (len(blocks) - 1) else halving_doubling_scatter
    part = payload / len(blocks[0])
    return _merge(*(step([[device] for device in line], part) for line in _lines(blocks)))


def _lines(blocks: Sequence[Block]) -> list[tuple[int, ...]]:
    """Members of the same place in their blocks."""
    return list(zip(*blocks, strict=True))


def _merge(*patterns: list[Round]) -> list[Round]:
    """Patterns of as many rounds each, side by side."""
    return [[message for part in step for message in part] for step in zip(*patterns, strict=True)]


def _double_trees(blocks: Sequence[Block]) -> list[dict[int, int]]:
    """Parents of every device but the root, for two trees (or one chain) a member of a block.

    Over the blocks the first tree has the odd ones at its leaves; the second is the first mirrored, or shifted by one
    where their number is odd, so that no block is an inner vertex of both (Sanders, Speck and Traeff, 2009, section 3).
    """
    count = len(blocks)
    over = {child: _tree_parent(child, count) for child in range(1, count)}
    mirrored = {count - 1 - child: count - 1 - parent for child, parent in over.items()}
    shifted = {(child + 1) % count: (parent + 1) % count for child, parent in over.items()}
    kinds = (over, shifted if count % 2 else mirrored) if count > 1 else (over,)
    trees = []
    for start in range(len(blocks[0])):
        turned = [[*block[start:], *block[:start]] for block in blocks]
        chain = {b: a for block in turned for a, b in itertools.pairwise(block)}
        heads = [{turned[child][0]: turned[parent][0] for child, parent in tree.items()} for tree in kinds]
        trees += [chain | head for head in heads]
    return trees


def _tree_parent(vertex: int, count: int) -> int:
    """Parent in the binary tree of ``0 … count - 1`` in order, whose leaves are the odd numbers and whose root is 0."""
    bit = vertex & -vertex
    parent = (vertex ^ bit) | (bit << 1)
    return parent if parent < count else vertex ^ bit


def _depths(parents: Mapping[int, int]) -> tuple[dict[int, int], int]:
    depths: dict[int, int] = {}
    for vertex in parents:
        steps, walk = 0, vertex
        while walk in parents:
            walk, steps = parents[walk], steps + 1
        depths[vertex] = steps
    return depths, max(depths.values())


def _down(trees: Sequence[Mapping[int, int]], payload: float, pieces: int) -> list[Round]:
    """Every tree carries `payload` from its root, `pieces` after each other."""
    deepest = max(_depths(tree)[1] for tree in trees)
    rounds: list[Round] = [[] for _ in range(deepest + pieces - 1)]
    for tree in trees:
        depths, _ = _depths(tree)
        for child, parent in tree.items():
            for piece in range(pieces):
                rounds[depths[child] - 1 + piece].append(Message(parent, child, payload / pieces))
    return rounds


def simulate_rounds(topology: Topology, rounds: Rounds) -> float:
    """Seconds of rounds of messages: one round starts when all messages of the round before have arrived.

    A message takes the latency of its route, then its bytes flow at the max-min fair rate.
    """
    known: dict[tuple[Message, ...], float] = {}  # a pipeline repeats the same round
    seconds = 0.0
    for messages in map(tuple, rounds):
        if messages not in known:
            known[messages] = round_seconds(topology, messages)
        seconds += known[messages]
    return seconds


def round_seconds(topology: Topology, messages: Sequence[Message]) -> float:
    """Seconds until the last of `messages`, all sent at once, has arrived."""
    moving = [message for message in messages if message.source != message.destination]
    if not moving:
        return 0.0
    routes = [topology.route(message.source, message.destination) for message in moving]
    crossed = [topology.links_of(route) for route in routes]
    offsets = np.array([0, *itertools.accumulate(map(len, crossed))], dtype=np.int64)
    links = np.array([link for route in crossed for link in route], dtype=np.int64)
    latencies = np.array([topology.latency_of(route) for route in routes])
    left = np.array([message.size_bytes for message in moving], dtype=np.float64)
    return _drain(left, latencies, offsets, links, np.asarray(topology.capacities))


def _drain(left: FloatArray, starts: FloatArray, offsets: IntArray, links: IntArray, capacities: FloatArray) -> float:
    """Seconds until all flows have ended that start at `starts` (F,) with `left` (F,) bytes each."""
    end = float(starts[left == 0].max(initial=0.0))
    flow_of_use = np.repeat(np.arange(len(left)), np.diff(offsets))
    clock = 0.0
    left = left.copy()
    while (left > 0).any():
        flowing = (left > 0) & (starts <= clock)
        waiting = (left > 0) & ~flowing
        next_start = float(starts[waiting].min(initial=np.inf))
        if not flowing.any():
            clock = next_start
            continue
        chosen = np.flatnonzero(flowing)
        uses = flowing[flow_of_use]
        counts = np.diff(offsets)[chosen]
        rates = max_min_rates(
            np.full(len(chosen), np.inf),
            np.concatenate(([0], np.cumsum(counts))),
            links[uses],
            np.ones(int(uses.sum())),
            capacities,
        )
        if not rates.all():
            raise ProfileError("a message crosses a link of no capacity and never arrives; give every link a bandwidth")
        ends = clock + left[chosen] / rates
        until = min(float(ends.min()), next_start)
        done = ends <= until * SAME_LEVEL
        left[chosen] = np.where(done, 0.0, left[chosen] - rates * (until - clock))
        clock = until
    return max(end, clock)
