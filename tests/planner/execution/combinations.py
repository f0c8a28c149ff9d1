"""What the search may choose, every two values of it together: combinations that the planner itself allows.

python -m tests.planner.execution.combinations   writes the table that tests run, its rows first
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import combinations, islice, product, takewhile
from pathlib import Path
from random import Random

from planner.cost.work import OPTIMIZERS
from planner.graph.attention import WRITTEN_OUT
from planner.graph.chain import chain
from planner.graph.norms import FUSED, RMS_NORM
from planner.networks import Network, load_network
from planner.planning.planning import plan_network
from planner.planning.setting import setting_of
from planner.planning.shared_tables import SharedTables
from planner.plans.pins import PIN_NAMES, PIN_VALUES, Pins
from planner.plans.plan import Plan, RecomputeRange
from planner.plans.request import SEARCH_MODES, PlanRequest
from planner.search.configurations.pin_checks import check_pins
from planner.search.configurations.schedule_shapes import ONE_STAGE, PINNED, SEARCHED
from simulator.errors import InfeasibleError, InputError, UnsupportedError
from tests.planner.execution.small import place

Combination = Mapping[str, str]
"""A value of every factor; pins that are left out are empty."""

Part = tuple[tuple[str, str], ...]
"""Values of some factors, in the order of the factors."""

TABLE = Path(__file__).with_name("combinations.csv")
HARDWARE = "dgx-a100"
NETWORKS = ("gpt", "dropping", "llama", "mixtral", "blocks", "wide_and_deep")
TAKEN: Mapping[str, tuple[str, ...]] = {
    "dp": ("1", "2", "4", "8"),
    "tp": ("1", "2", "4"),
    "pp": ("1", "2", "4"),
    "vpp": ("",),
    "cp": ("1", "2", "4"),
    "ep": ("1", "2"),
    "micro_batch": ("1", "2", "4"),
    "micro_batches": ("1", "2", "4", "8"),
    "shard_size": ("", "2"),
    "bucket_mb": ("", "1"),
    "sharding_threshold_kb": ("", "1"),
    "copies": ("1", "2"),
    "order": ("", "dp-tp-pp"),
}
"""Of pins that are no words: values that change what is run. Chunks a rank follow from the schedule."""
SIMULATED: Mapping[str, tuple[str, ...]] = {
    "tensor_overlap": ("true",),
    "expert_overlap": ("true",),
    "expert_messages": ("once_a_node",),
}
"""Pins, and values of theirs, whose plans are simulated only."""
PARTS = "recompute_modules"
"""The pin of parts of layers that selective recomputation computes again, which trains in a test of its own."""
BY_LAYER = ("stage_layers", "recompute_layers")
"""Pins that say layer by layer what the search says too: where stages are cut, and which layers compute again."""
LEAVES_OUT = ("tensor_cut",)
"""Pins that leave strategies out which the search may choose anyway: nothing is run that is not run without them."""
MIXED = "mixed"
"""Units that compute again in one way, in another, and not at all, in turn."""
SMALL_BUCKETS = "2048"
"""Bytes of fused messages with which networks of a few kilobytes have several; the search counts in MiB."""
CANDIDATES = 3
ROOTS, TRIES = 8, 3
OFTEN = (2, 3, 1)
"""How often each number of devices is tried first."""
SEED = 20


def factors() -> dict[str, tuple[str, ...]]:
    """Everything that can be chosen, with the values that are put together: pins, and what stands beside them."""
    found: dict[str, tuple[str, ...]] = {
        "network": NETWORKS,
        "devices": ("2", "4", "8"),
        "global_batch": ("8", "16", "32"),
        "optimizer": tuple(OPTIMIZERS),
        "search_mode": SEARCH_MODES,
        "attention": ("", *WRITTEN_OUT),
        "norms": ("", FUSED),
        "bucket_bytes": ("", SMALL_BUCKETS),
    }
    for name in PIN_NAMES:
        if name in (*LEAVES_OUT, PARTS):
            continue
        values = PIN_VALUES[name]
        if isinstance(values, tuple):
            found[name] = tuple(word for word in values if word not in SIMULATED.get(name, ()))
        elif name in SIMULATED or name in BY_LAYER:
            continue
        elif values is bool:
            found[name] = ("false", "true")
        else:
            found[name] = TAKEN[name]
    found["schedule"] = (ONE_STAGE, *SEARCHED, *PINNED)
    found["recompute"] += (MIXED,)
    for name in ("offload_to", "recompute_messages", "offload_parameters"):
        found[name] = ("", *(value for value in found[name] if value != "false"))  # others follow from what is left out
    found["recompute_messages"] = ("", "false")
    return found


BESIDE = ("network", "devices", "global_batch", "optimizer", "search_mode", "attention", "norms", "bucket_bytes")
"""Factors that are no pins."""


def request(chosen: Combination) -> PlanRequest:
    """Ask for a combination, or for some of its values."""
    pins = {name: value for name, value in chosen.items() if name in PIN_NAMES and value}
    if pins.get("recompute") == MIXED:
        pins = {**pins, "recompute": "none"}
        pins.pop("recompute_messages", None)
    return PlanRequest(
        network=loaded(*_place(chosen)),
        hardware=HARDWARE,
        devices=int(chosen.get("devices", "4")),
        global_batch=int(chosen.get("global_batch", "16")),
        precision="fp32",
        optimizer=chosen.get("optimizer", "sgd"),
        search_mode=chosen.get("search_mode", SEARCH_MODES[0]),
        attention=chosen.get("attention", ""),
        norms=chosen.get("norms", ""),
        pins=Pins.read(pins),
        top=1,
        sensitivity=False,
    )


def _place(chosen: Combination) -> tuple[str, str, str]:
    """The network of a combination, and how its attention and norms run."""
    return chosen.get("network", "gpt"), chosen.get("attention", ""), chosen.get("norms", "")


@cache
def loaded(name: str, attention: str, norms: str) -> Network:
    """One of the small networks."""
    return load_network(place(name), attention=attention, norms=norms)


@cache
def _captured(name: str, attention: str, norms: str) -> SharedTables | InputError:
    try:
        tables = SharedTables(loaded(name, attention, norms).capture())
    except InputError as error:
        return error
    if norms == FUSED and all(node.op != RMS_NORM for node in tables.at("float32").graph.nodes):
        return InputError(f"{name} has no root-mean-square norms to fuse")
    return tables


def shared_tables(chosen: Combination) -> SharedTables:
    """What requests for the network of a combination have in common; InputError where it cannot be captured."""
    found = _captured(*_place(chosen))
    if isinstance(found, InputError):
        raise found
    return found


def obstacle(chosen: Combination) -> str:
    """Why the planner allows no plan with these values, in its own words; empty where it does."""
    return _obstacle(tuple(sorted(chosen.items())))


@lru_cache(maxsize=2**20)
def _obstacle(chosen: Part) -> str:
    try:
        setting = setting_of(request(dict(chosen)), shared_tables(dict(chosen)))
        check_pins(setting.search.extent(setting.pins))
    except (InputError, UnsupportedError) as error:
        return str(error)
    return ""


def plan_of(chosen: Combination) -> Plan:
    """The best plan of a combination."""
    return _planned(tuple(chosen.items()))


@cache
def _planned(values: Part) -> Plan:
    chosen = dict(values)
    tables = shared_tables(chosen)
    result = plan_network(request(chosen), shared=tables)
    if not result.candidates:
        raise InfeasibleError(result.infeasible)
    plan = result.candidates[0].plan
    if chosen["bucket_bytes"]:
        plan = replace(plan, bucket_bytes=int(chosen["bucket_bytes"]))
    if chosen["recompute"] == MIXED:
        names = chain(tables.at("float32").graph).names()
        kept = not chosen["recompute_messages"]
        ways = [(name, ("full", "none", "selective")[i % 3]) for i, name in enumerate(names)]
        ranges = tuple(RecomputeRange(first=n, last=n, mode=m, messages=kept) for n, m in ways if m != "none")
        plan = replace(plan, recompute="full", recompute_ranges=ranges)
    return plan


# Putting together

FREE = ("devices", "global_batch")
"""Factors that only make room for the others: no pairs with them are asked for."""


def _paired() -> dict[str, tuple[str, ...]]:
    return {name: values for name, values in factors().items() if name not in FREE}


def parts() -> set[Part]:
    """Every two values of different factors."""
    every = _paired()
    return {
        ((one, first), (other, second))
        for one, other in combinations(every, 2)
        for first, second in product(every[one], every[other])
    }


def covered(chosen: Combination) -> set[Part]:
    """The pairs that a combination has in it."""
    return set(combinations(((name, chosen[name]) for name in _paired()), 2))


Wanted = Callable[[Combination, str, str], int]
"""How much a value is wanted beside others, given its factor."""


def completed(begun: Combination, wanted: Wanted, random: Random) -> Combination | None:
    """A combination that has these values and that the planner allows, of the most wanted others; None if none is.

    The planner is asked after every value whether any plan is left; where none is left with the values that are put
    together here, another order of choices is tried.
    """
    for root in islice(_roots(begun, wanted, random), ROOTS):
        for _ in range(TRIES):
            found = _filled(root, wanted, random)
            if found is not None:
                return found
    return None


def _roots(begun: Combination, wanted: Wanted, random: Random) -> Iterator[Combination]:
    """What every request needs: a network, devices (more processes take longer), and a batch."""
    every = factors()
    first = random.choices(every["devices"], OFTEN)[0]
    names = ("network", *FREE)
    roots = [{**dict(zip(names, values, strict=True)), **begun} for values in product(*(every[n] for n in names))]
    roots = [dict(root) for root in dict.fromkeys(tuple(root.items()) for root in roots)]
    random.shuffle(roots)
    roots.sort(key=lambda root: (-wanted(begun, "network", root["network"]), root["devices"] != first))
    yield from (root for root in roots if not obstacle(root))


def _filled(begun: Combination, wanted: Wanted, random: Random) -> Combination | None:
    """A value for every other factor, one after the other; None where one has none left."""
    every, chosen = factors(), dict(begun)
    others = [name for name in every if name not in chosen]
    random.shuffle(others)
    for name in others:
        values = random.sample(every[name], len(every[name]))
        values.sort(key=lambda value: -wanted(chosen, name, value))
        value = next((one for one in values if not obstacle({**chosen, name: one})), None)
        if value is None:
            return None
        chosen[name] = value
    return {name: chosen[name] for name in every}


def covering(begun: Sequence[Combination] = ()) -> Iterator[Combination]:
    """Combinations, after these, in which every two values are together that the planner allows together.

    Greedy, as in Cohen et al., *The AETG system* (IEEE Transactions on Software Engineering 23(7), 1997): of some
    candidates that begin with a pair not yet met the one with most such pairs is taken.
    """
    random, left = Random(SEED), parts().difference(*map(covered, begun))
    order = {name: number for number, name in enumerate(factors())}

    def wanted(chosen: Combination, name: str, value: str) -> int:
        pairs = (sorted(((name, value), other), key=lambda one: order[one[0]]) for other in chosen.items())
        return sum(tuple(pair) in left for pair in pairs)

    while left:
        pair = random.choice(sorted(left))
        made = (completed(dict(pair), wanted, random) for _ in range(CANDIDATES))
        found = [one for one in takewhile(lambda one: one is not None, made) if one is not None]
        if found:
            best = max(found, key=lambda one: len(covered(one) & left))
            left -= covered(best)
            yield best
        left.discard(pair)


def drawn(count: int, seed: int) -> Iterator[Combination]:
    """So many combinations at random that the planner allows."""
    random = Random(seed)
    for _ in range(count):
        found = completed({}, lambda *_: 0, random)
        assert found is not None
        yield found


# The table


def read_table() -> list[Combination]:
    """The combinations that tests run."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def still_allowed() -> list[Combination]:
    """What the table has that the planner still allows, with the usual value of what it has learnt since."""
    every = factors()
    rows = [{name: row.get(name, values[0]) for name, values in every.items()} for row in read_table()]
    return [row for row in rows if all(row[name] in every[name] for name in every) and not obstacle(row)]


def write_table(rows: Sequence[Combination]) -> None:
    """Write them, those of few devices first."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(factors()), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (int(row["devices"]), *row.values())))


def shown(chosen: Combination) -> str:
    """A combination in a few words: what is not as usual."""
    usual = {name: values[0] for name, values in factors().items() if name != "network"}
    said = {name: value for name, value in chosen.items() if value != usual.get(name)}
    return " ".join(value if name in BESIDE else f"{name}={value}" for name, value in said.items())


if __name__ == "__main__":
    rows = still_allowed()
    write_table([*rows, *covering(rows)])
