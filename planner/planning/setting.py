"""What a request for plans comes to: the network with its marks, the pins read, and what the searches start from."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

from planner.cost.software import as_run, exchange_of, fusion_of, norms_of
from planner.cost.work import Optimizer, optimizer, state_bytes, trained_dtype
from planner.graph.chain import Chain
from planner.graph.experts import experts_of, experts_per_token
from planner.graph.layer_parts import MODULES, in_parts
from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph
from planner.lowering.checked import precision_dtype
from planner.networks import Network, load_network
from planner.networks.marks import Swap, layerwise_names
from planner.planning.configured import Configured
from planner.planning.hosted import check_host_speed, check_host_tables
from planner.planning.placing import SEMI_AUTOMATIC, PlacedMarks, marked, semi_automatic, with_groups
from planner.planning.prediction import check_products
from planner.planning.refining import largest_threshold
from planner.planning.shared_tables import NetworkTables, SharedTables
from planner.plans.exchange import Exchange, check_data
from planner.plans.pins import Pins
from planner.plans.plan import MOST_MICRO_BATCHES
from planner.plans.request import PRECISIONS, PlanRequest, checked_pins
from planner.search.candidates import Space
from planner.search.configurations.buckets import MIB, USUAL
from planner.search.patience import Patience
from planner.search.problem.hints import told_apart
from planner.search.stages.unit_pins import FREE, UnitPins, of_layers
from planner.search.units.hinted import StageHints
from simulator.errors import InputError, NetworkError
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from simulator.timing import in_caches

KIB = 1024
MOST_SAMPLES = 2**24
"""Of a step, for each device."""


@dataclass(frozen=True, kw_only=True)
class SearchSetting:
    """What is searched: operators on meshes (``space``), configurations (``search``), under ``request`` and ``pins``.

    ``tables`` are those of the network, whose runs are written out where hints tell layers apart; ``started``,
    ``captured`` and ``ruled`` moments of the performance counter.
    """

    request: PlanRequest
    pins: Pins
    dtype: str
    tables: NetworkTables
    search: Configured
    started: float
    captured: float
    ruled: float

    @cached_property
    def space(self) -> Space:
        """Operators one by one on meshes of data × tensor parallelism; made where they are searched."""
        even, choices = self.tables.aligned
        return Space(
            graph=even,
            decisions=choices,
            hardware=self.search.hardware,
            devices=self.request.devices,
            global_batch=self.search.global_batch,
            optimizer=self.search.optimizer,
            pins=self.pins,
            bucket_bytes=self.search.bucket_bytes,
            search_mode=self.request.search_mode,
            hints=self.request.hints,
            rest_by_data=self.request.parallel_mode == SEMI_AUTOMATIC,
        )


def setting_of(
    request: PlanRequest, shared: SharedTables | None = None, patience: Patience | None = None
) -> SearchSetting:
    """Read and check a request; `shared` is its network, and what earlier requests made of it.

    `patience` begins behind the capture.
    """
    request = replace(
        request,
        exchange=exchange_of(request.software, request.exchange),
        norms=norms_of(request.software, request.norms),
    )
    pins = checked_pins(request)
    profile = load_profile(request.hardware)
    profile.check_devices(request.devices)
    network = load_network(
        request.network, sequence_length=request.sequence_length, attention=request.attention, norms=request.norms,
        fusion=fusion_of(request.software),
    )  # fmt: skip
    precision = request.precision or {v: k for k, v in PRECISIONS.items()}[profile.default_precision]
    dtype = precision_dtype(precision)
    check_products(profile, dtype)
    update = optimizer(request.optimizer or network.default_optimizer)
    batch = network.default_global_batch if request.global_batch is None else request.global_batch
    if batch < 1:
        raise InputError(f"global batch {batch} is not positive; use --global-batch with a whole number of samples")
    _check_size(batch, request.devices, pins)
    bucket = USUAL if pins.bucket_mb is None else pins.bucket_mb * MIB
    started = time.perf_counter()
    shared = (shared or SharedTables(network.capture)).selective(pins.recompute_modules or ())
    graph = shared.graph
    captured = time.perf_counter()
    if patience is not None:
        patience.wait()
    tables = shared.at(dtype)
    graph = tables.graph
    if not any(parameter.gradient for parameter in graph.parameters):
        raise NetworkError(
            f"network {request.network!r} has {len(graph.parameters)} parameters, and none of them has a gradient: "
            "there is nothing to train; give it parameters that require one and that the loss depends on"
        )
    pins, placed = marked(request, network, graph, tables.decisions.chain, pins)
    if placed is not None:
        request = replace(request, hints=(*request.hints, *placed.hints()))
        request = with_groups(request, placed)
    searched = shared.apart(dtype, told_apart(graph, request.hints))
    pins = semi_automatic(request, pins)
    travel = _travelling(pins, graph)
    least_bytes = least_held_bytes(graph, update, request.devices)

    def run(*, expert_overlap: bool) -> Hardware:
        found = as_run(
            profile, request.software, request.attention, language=network.sequence_length is not None,
            optimizer=update.name, expert_imbalance=request.expert_imbalance, expert_overlap=expert_overlap, **travel,
        )  # fmt: skip
        return in_caches(found.with_headroom(request.memory_headroom), least_bytes, request.devices)

    hardware = run(expert_overlap=False)
    check_host_tables(pins, graph, hardware)
    base = _base_plan(request, network, graph, profile, precision, update.name, batch, bucket)
    base |= {"host_embeddings": bool(pins.host_embeddings), "copies": pins.copies or 1}
    _check_parts(graph)
    base |= {"recompute_modules": graph.selective}
    base |= {**travel, "expert_imbalance": request.expert_imbalance}
    base |= {"offload_to": pins.offload_to or "host", "offload_parameters": bool(pins.offload_parameters)}
    ruled = time.perf_counter()
    search = Configured(
        graph=graph,
        hardware=hardware,
        shares_sequence=pins.sequence_parallel is not False,
        overlapped=run(expert_overlap=True) if experts_of(graph) else None,
        devices=request.devices,
        global_batch=batch,
        optimizer=update,
        dtype=trained_dtype(graph),
        bucket_bytes=bucket,
        sequence=network.sequence_length or 0,
        base=base,
        shared=searched,
        threshold_bytes=threshold_bytes(graph, pins),
        unit_pins=_unit_pins(placed, pins, tables.decisions.chain, hardware),
        hints=StageHints(hints=request.hints, rest_by_data=request.parallel_mode == SEMI_AUTOMATIC),
    )
    return SearchSetting(
        request=request,
        pins=pins,
        dtype=dtype,
        tables=searched,
        search=search,
        started=started,
        captured=captured,
        ruled=ruled,
    )


class Travel(TypedDict):
    """How messages travel, by the names that a plan and `as_run` have for it."""

    tensor_overlap: bool
    sent_once: int


def _check_size(batch: int, devices: int, pins: Pins) -> None:
    """Refuse a step of more samples or micro-batches than can be planned."""
    most = devices * MOST_SAMPLES
    if batch > most:
        raise InputError(
            f"global batch {batch} is more than {MOST_SAMPLES} samples a device; use --global-batch {most} or less, or "
            "more devices"
        )
    fewest = pins.micro_batches or -(-batch // (devices * pins.micro_batch if pins.micro_batch else batch))
    if fewest > MOST_MICRO_BATCHES:
        name = "micro_batches" if pins.micro_batches else "micro_batch"
        raise InputError(
            f"pin {name}={getattr(pins, name)} makes {fewest} micro-batches or more of global batch {batch}, and at "
            f"most {MOST_MICRO_BATCHES} are planned; pin larger micro-batches, or use a smaller --global-batch"
        )


def _check_parts(graph: OperatorGraph) -> None:
    """InputError where a part of layers that is to compute again is in none of them."""
    if missing := [name for name in graph.selective if not in_parts(graph, [name])]:
        has = [name for name in MODULES if in_parts(graph, [name])]
        raise InputError(
            f"pin recompute_modules={'-'.join(graph.selective)}: no layer of the network has {missing[0]}; choose from "
            f"{', '.join(has) or 'nothing: leave the pin out'}"
        )


def _travelling(pins: Pins, graph: OperatorGraph) -> Travel:
    """How messages travel where pins say so, or where the named software can and nothing speaks against it.

    To send a token once to each node takes no bytes more than once for each expert.

    Raises
    ------
    InputError
        Tokens are to travel once to each node, and the network does not say how many experts they go to.
    """
    usual = pins.expert_messages is None and pins.runs is not None and "tokens_once" in pins.runs.overlaps
    chosen = experts_per_token(graph) if usual or pins.expert_messages == "once_a_node" else 0
    if pins.expert_messages == "once_a_node" and not chosen and experts_of(graph):
        raise InputError(
            "pin expert_messages=once_a_node: no operator of the network (topk over its experts) says how many experts "
            "a token goes to; use expert_messages=tokens"
        )
    return Travel(tensor_overlap=bool(pins.tensor_overlap), sent_once=chosen)


def _unit_pins(placed: PlacedMarks | None, pins: Pins, units: Chain, hardware: Hardware) -> UnitPins:
    """What marks and pins fix of single units."""
    found = placed.unit_pins() if placed else FREE
    if pins.stage_layers is not None or pins.recompute_layers is not None:
        if found:
            raise InputError(
                "pins stage_layers and recompute_layers and marks of single modules both say where stages begin or "
                "what computes again; leave one of them out"
            )
        found = of_layers(units.names(), pins.stage_layers, pins.recompute_layers or 0, pins.vpp or 1)
    if pins.recompute_messages is not None:
        found = replace(found, keeps=(not pins.recompute_messages,) * len(units.names()))
    if pins.offload_activations is not None:
        if any(found.swaps):
            raise InputError(
                f"pin offload_activations={str(pins.offload_activations).lower()} and offload() of single modules both "
                "say what waits on the host; leave one of them out"
            )
        found = replace(found, swaps=_all_layers(units) if pins.offload_activations else ())
    if any(found.swaps):
        check_host_speed(hardware, "offload_activations")
    return found


def least_held_bytes(graph: OperatorGraph, update: Optimizer, devices: int) -> float:
    """An even share of parameters and optimizer states: a plan holds more, and finds less in the caches."""
    held = 0
    for parameter in graph.parameters:
        spec = graph.nodes[parameter.node].outputs[0]
        each = DTYPE_BYTES[spec.dtype] + state_bytes(update, spec.dtype)
        held += graph.multiplicity[parameter.node] * spec.elements * each
    return held / devices


def _all_layers(units: Chain) -> tuple[Swap | None, ...]:
    """All that layers keep, of layers in rows of equal ones if there are any, else of all units but the last."""
    rows = [unit.run is not None for unit in units.units for _ in range(unit.count)]
    away = rows if any(rows) else [True] * (len(rows) - 1) + [False]
    return tuple(Swap() if one else None for one in away)


def threshold_bytes(graph: OperatorGraph, pins: Pins) -> int:
    """The pinned size under which parameters stay whole.

    Raises
    ------
    InputError
        Most of the network would stay whole.
    """
    if not pins.sharding_threshold_kb:
        return 0
    wanted = pins.sharding_threshold_kb * KIB
    largest = largest_threshold(graph, pins.tp or 1)
    if wanted > largest:
        raise InputError(
            f"pin sharding_threshold_kb={pins.sharding_threshold_kb}: more than half of the network lies in smaller "
            f"parameters and nothing much would be sharded; use --pin sharding_threshold_kb={largest // KIB} or less, "
            "or --pin optimizer_sharding=none"
        )
    return wanted


def _base_plan(
    request: PlanRequest,
    network: Network,
    graph: OperatorGraph,
    hardware: Hardware,
    precision: str,
    update: str,
    batch: int,
    bucket_bytes: int,
) -> dict[str, object]:
    return {
        "network": network.spec,
        "fingerprint": graph.fingerprint,
        "sequence_length": network.sequence_length,
        "hardware": request.hardware,
        "hardware_hash": hardware.hash,
        "precision": precision,
        "optimizer": update,
        "global_batch": batch,
        "bucket_bytes": bucket_bytes,
        "parallel_mode": request.parallel_mode,
        "search_mode": request.search_mode,
        "software": request.software,
        "attention": request.attention,
        "norms": request.norms,
        "exchange": _exchange(request, network, graph, batch),
    }


def _exchange(request: PlanRequest, network: Network, graph: OperatorGraph, batch: int) -> Exchange:
    """How tensors travel, with the parameters of which every rank has its own named one by one."""
    check_data(request.exchange.data, {spec.name: spec.shape for spec in network.inputs}, batch)
    if request.parallel_mode != "hybrid_parallel":
        return request.exchange
    return replace(
        request.exchange, layerwise=layerwise_names(graph, (*request.exchange.layerwise, *network.layerwise))
    )
