"""From a measurement row to degrees of parallelism and batches; what is missing is derived or named."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from planner.cost.memory.parameters import V_SHAPED, even_chunks, schedule_name
from planner.cost.stacks import Stack
from planner.cost.training_run import LayeredNetwork, OptimizerSharding, TrainingSetup, TransformerShape
from planner.networks.adapters import ALL_LINEAR
from planner.published import reading_setup as words
from planner.published.layered.prediction import typical_batch
from planner.published.measurement_file import FileRow
from planner.published.reading_memory import memory_settings, whole_on_one_device
from planner.published.reading_network import MissingFactError
from planner.published.reading_setup import Network
from planner.published.source_rules import CHOSEN_TO_FIT, stated, suite_batch
from simulator.checks import near_divisors
from simulator.hardware import Hardware

_DATA_PARALLEL = r"fsdp|ddp|horovod|data.?parallel|torchtune|torch dataparallel|deepspeed(?!.*megatron)|mindspore"
_MANY_SAMPLES = 2048
_LAZY_KERNELS = 2022 + 4 / 12
"""CUDA 11.7, which loads kernels when they are first launched, is of May 2022."""
_GRAPH_ENGINE = 2023 + 9 / 12
"""MindSpore 2.2 of October 2023 hands graphs to CANN's engine by default, releases before it when told to."""
_UNEVEN_ENDS = 2
_ROUNDING = 0.02
"""Batches that do not divide are taken as the next whole number of micro-batches up to this relative change."""


def read_setup(row: FileRow, network: Network, hardware: Hardware, notes: list[str]) -> TrainingSetup:
    """How a row trained; `notes` gets what was assumed, MissingFactError says what is missing."""
    kind = "fp32" if stated(row, "single_precision", network=network.name) else words.precision(row, notes)
    used = words.stack(row, notes)
    shard = words.sharding(row, used, notes)
    mesh = read_mesh(row, network, shard, notes)
    if stated(row, "misread_batch"):
        raise MissingFactError("batch of mixed precision not stated: 32 are the bits of FP32")
    chosen = suite_batch(row, hardware.device_memory_bytes)
    usual = chosen or (typical_batch(network, hardware, kind) if isinstance(network, LayeredNetwork) else None)
    micro_batch, micro_batches = read_batches(row, mesh, notes, usual)
    if chosen and any(note.startswith("batch not stated") for note in notes):
        notes.append(CHOSEN_TO_FIT)
    vpp, stages = read_stages(row, network, mesh.pp, micro_batches, notes)
    kept, kept_layers = words.recompute(row, network, mesh.pp, notes)
    ep, expert_tp = _expert_degrees(row, network, mesh, notes)
    overlap_gradients, overlap_parameters, overlap_tensor = words.overlaps(row, used, shard, mesh.tp)
    flags, schedule = words.all_words(row), words.schedule(row, vpp)
    return replace(
        mesh, vpp=vpp, ep=ep, expert_tp=expert_tp,
        micro_batch=micro_batch, micro_batches=micro_batches, schedule=schedule,
        recompute=kept, optimizer_sharding=shard,
        recompute_layers=kept_layers * (1 if used is Stack.MINDSPEED and not words.legacy_model(row) else vpp),
        shard_group=words.shard_group(row, mesh.dp, mesh.cp),
        sequence_parallel=words.sequence_parallel(row, used, mesh.tp, notes),
        precision=kind, optimizer=words.optimizer(row, network),
        attention=words.attention(row, used, [] if isinstance(network, LayeredNetwork) else notes),
        stack=used, overlap_gradients=overlap_gradients, overlap_parameters=overlap_parameters,
        overlap_tensor=overlap_tensor, gradient_bytes=words.gradient_bytes(row, used, kind),
        offload_optimizer=whole_on_one_device(row)
        or bool(re.search(r"opt offl=y|cpu.?offload(?!=false)|optimizer.?offload(?!=false)", flags)),
        offload_parameters=bool(re.search(r"par(?:am(?:eter)?s?)? ?-?offl(?:oad)?=y", flags)),
        trained_fraction=words.trained_fraction(row, notes), adapted=stated(row, "adapted", ALL_LINEAR),
        layers_per_stage=() if schedule_name(schedule) in V_SHAPED else stages,
        local_share=stated(row, "local_share", 0.0),
        deterministic=words.functional_test(row),
        legacy_model=words.legacy_model(row), single_gate=used is Stack.MINDSPEED and words.leaves_gate_single(row),
        scattered_gradients=not words.is_scaling(row), sent_gradient_bytes=4 * words.is_scaling(row),
        tokens_sent_once=words.sends_tokens_once(row),
        overlap_experts=bool(re.search(r"1f1b overlap|a2a_ovlp|overlap[-_]moe[-_]expert", flags)),
        eager_kernels=0 < stated(row, "release", words.release(row)) < _LAZY_KERNELS, **memory_settings(row, network),
        fused_norm=words.fused_norm(row), single_norms=used is Stack.MINDSPEED and words.leaves_norms_single(row),
        plain_graph=stated(row, "plain_graph", False), early_loss=stated(row, "early_loss", False),
        untuned_convolutions=stated(row, "untuned_convolutions", False),
        graph_engine=not 0 < words.release(row) < _GRAPH_ENGINE,
    )  # fmt: skip


def read_mesh(row: FileRow, network: Network, shard: OptimizerSharding, notes: list[str]) -> TrainingSetup:
    """Degrees that multiply to the device count."""
    if row.says(r"auto[-_ ]?sharding", "framework"):
        raise MissingFactError("the plan is not stated: the compiler chose it")
    devices = _devices(row, notes)
    stated = {name: row.whole(name) for name in ("tp", "pp", "cp", "dp")}
    stated.update({k: v for k, v in _written_layout(row).items() if stated.get(k) is None})
    dp = stated["dp"]
    if stated["tp"] is None and stated["pp"] is None and stated["cp"] in (None, 1):
        tp, pp = _unstated_layout(row, network, shard, devices, dp, notes)
        cp = 1
    else:
        cp = stated["cp"] or 1
        tp, pp = _completed(devices, stated, cp, shard, notes)
    if devices % (inner := tp * pp * cp):
        near = near_divisors(inner, devices)
        raise MissingFactError(
            f"tp {tp} x pp {pp} x cp {cp} = {inner} does not divide the {devices} devices: {near} do"
        )
    found = devices // (tp * pp * cp)
    if dp is not None and dp != found:
        notes.append(f"dp {dp} as printed does not fit {devices} devices: {found}")
    return TrainingSetup(devices=devices, dp=found, tp=tp, pp=pp, cp=cp)


def _devices(row: FileRow, notes: list[str]) -> int:
    devices = row.whole("n_accels")
    if devices:
        return devices
    nodes = re.search(r"(?<![a-z0-9])(\d+)N(\d+)G", row.text("model"))
    if nodes:
        return int(nodes[1]) * int(nodes[2])
    degrees = {name: row.whole(name) or 1 for name in ("tp", "pp", "cp", "dp", "ep", "etp")}
    devices = math.prod(degrees[name] for name in ("tp", "pp", "cp", "dp"))
    if row.whole("dp"):
        notes.append(f"device count not stated: {devices}, the product of the degrees")
        return devices
    per_node, origin = row.whole("accels_per_node"), f"{row.text('source')} {row.text('framework')}".lower()
    if per_node and re.search(r"functional test|\bci\b", origin) and "release test" not in row.text("notes").lower():
        # Tests run on eight devices, but for those that are named after their one node.
        least = per_node if "1node" in row.text("model") else max(per_node, 8)
        needed = math.lcm(devices, degrees["pp"] * degrees["ep"] * degrees["etp"], least)
        notes.append(f"device count not stated: {needed}, the fewest whole nodes of {per_node} that the degrees fill")
        return needed
    raise MissingFactError("n_accels not stated")


def _written_layout(row: FileRow) -> dict[str, int]:
    """Degrees written together, such as ``TP2PP1DP4``."""
    found = re.search(r"parallel:\s*((?:[TPDCE]P\d+)+)", row.text("other_flags"), re.IGNORECASE)
    return {k.lower(): int(v) for k, v in re.findall(r"([A-Z]P)(\d+)", found[1].upper())} if found else {}


def _completed(
    devices: int, stated: dict[str, int | None], cp: int, shard: OptimizerSharding, notes: list[str]
) -> tuple[int, int]:
    # Where all is sharded, the data degree that is printed may leave the sharding ranks out.
    dp = None if shard is OptimizerSharding.ZERO3 else stated["dp"]
    tp, pp = stated["tp"], stated["pp"]
    missing = [name for name, value in (("tp", tp), ("pp", pp)) if value is None]
    rest = devices // ((tp or 1) * (pp or 1) * cp * (dp or 1)) if dp else 1
    exact = devices == (tp or 1) * (pp or 1) * cp * (dp or 1) * rest
    if missing:
        value = rest if len(missing) == 1 and exact else 1
        notes.append(f"{' and '.join(missing)} not stated: {value}")
        tp = tp if tp is not None else value
        pp = pp if pp is not None else value
    return tp or 1, pp or 1


def _unstated_layout(
    row: FileRow, network: Network, shard: OptimizerSharding, devices: int, dp: int | None, notes: list[str]
) -> tuple[int, int]:
    """Tensor and pipeline degrees of a row that states none."""
    product = row.says(r"model_parallel_size\(tp\*pp\)=(\d+)", "other_flags")
    parts = int(product[1]) if product else devices // dp if dp and devices % dp == 0 else 0
    framework = f"{row.text('framework')} {row.text('zero_fsdp')} {row.text('notes')}".lower()
    alone = devices == 1 or isinstance(network, LayeredNetwork) or not network.causal
    if parts == 1 or (
        not parts and (alone or shard is OptimizerSharding.ZERO3 or re.search(_DATA_PARALLEL, framework))
    ):
        if devices > 1 and not parts:
            notes.append("layout not stated: data parallel")
        return 1, 1
    if not parts:
        raise MissingFactError("tp, pp and cp not stated")
    tp = math.gcd(parts, row.whole("accels_per_node") or 8)
    notes.append(f"tp and pp not stated, only their product {parts}: tp {tp}")
    return tp, parts // tp


def read_batches(row: FileRow, mesh: TrainingSetup, notes: list[str], usual: int | None = None) -> tuple[int, int]:
    """Samples of a micro-batch and micro-batches of a step on each replica; `usual` is a micro-batch not stated."""
    micro, batch, accumulated = _stated_micro(row, mesh), row.whole("global_batch"), row.whole("grad_accum")
    if usual and micro is None and batch is None:
        notes.append(f"batch not stated: {usual} samples a device")
        return usual, 1
    flags = row.text("other_flags").lower()
    stated = re.search(r"gbs=(\d+)", flags)
    if batch is None and stated:
        batch = int(stated[1])
    if batch is None:
        gathered = re.search(r"gas=(\d+)", flags)
        micro = micro or _benchmark_batch(row, notes)
        if accumulated is None and gathered:
            accumulated = int(gathered[1])
        if accumulated is None:
            if mesh.pp > 1:
                raise MissingFactError("global_batch and gradient accumulation not stated")
            notes.append("gradient accumulation not stated: none")
            accumulated = 1
        return micro, accumulated
    if batch < mesh.dp:
        raise MissingFactError(f"global_batch {batch} is smaller than the {mesh.dp} replicas")
    if micro is None:
        micro = _derived_micro(row, mesh, batch, accumulated, notes)
    replica = batch / mesh.dp
    if micro > replica:
        notes.append(f"micro-batch {micro} is more than the {replica:g} samples of a replica: {int(replica)}")
        micro = int(replica)
    steps = max(1, round(replica / micro))
    if abs(steps * micro * mesh.dp / batch - 1) > _ROUNDING:
        if batch % mesh.dp:
            raise MissingFactError(f"global_batch {batch} does not divide among {mesh.dp} replicas")
        micro = math.gcd(micro, batch // mesh.dp)
        steps = batch // mesh.dp // micro
        notes.append(f"micro-batch does not divide the batch: {micro}")
    return micro, steps


def _stated_micro(row: FileRow, mesh: TrainingSetup) -> int | None:
    micro = row.whole("micro_batch")
    if micro:
        return micro
    local = row.says(r"(?:local_batch|lbs|\bbs)=(\d+)", "other_flags")
    if local and mesh.pp == 1:
        return int(local[1])
    per_device = row.whole("per_accel_batch")
    if not per_device:
        return None
    accumulated = row.whole("grad_accum") or 1
    if per_device >= _MANY_SAMPLES and accumulated > 1 and per_device % accumulated == 0 and row.whole("seq_len"):
        per_device //= accumulated  # the batch of a device and step, not of a pass
    return per_device * mesh.tp if mesh.pp == 1 else None


def _benchmark_batch(row: FileRow, notes: list[str]) -> int:
    """Samples of a device where an NVIDIA example is run without saying how many; its rate depends little on it."""
    if not row.says(r"deeplearningexamples", "source", "framework"):
        raise MissingFactError("global_batch not stated")
    samples = 32 if "bert" in row.text("model").lower() else 64
    notes.append(f"batch not stated: {samples} samples a device")
    return samples


def _derived_micro(row: FileRow, mesh: TrainingSetup, batch: int, accumulated: int | None, notes: list[str]) -> int:
    replica = batch // mesh.dp
    if accumulated and replica % accumulated == 0:
        return replica // accumulated
    micro = replica if mesh.pp == 1 and mesh.tp == 1 and re.search(_DATA_PARALLEL, words.all_words(row)) else 1
    notes.append(f"micro-batch not stated: {micro}")
    return max(1, micro)


def read_stages(
    row: FileRow, network: Network, pp: int, micro_batches: int, notes: list[str]
) -> tuple[int, tuple[int, ...]]:
    """Virtual stages of a device, and the layers of each stage where they are not the same everywhere."""
    if isinstance(network, LayeredNetwork):
        return 1, ()
    layers = network.layers
    listed = _listed_stages(row, layers, pp)
    if pp == 1:
        return 1, ()
    vpp = row.whole("vpp") or _usual_virtual_stages(row, layers, pp, micro_batches, notes)
    if pp > layers:
        raise MissingFactError(f"pp {pp} is more than the {layers} layers")
    if pp * vpp > layers + 2:
        notes.append(f"vpp {vpp} is more than the {layers} layers allow: {layers // pp}")
        vpp = layers // pp
    if listed and vpp == 1:
        return vpp, listed
    if vpp == 1 and words.is_scaling(row):
        return vpp, _by_items(layers, pp)
    if vpp == 1 and "uneven_pipeline" in row.text("model"):
        # Megatron-LM's test of that name has two layers on the first and the last stage.
        inner = layers - 2 * _UNEVEN_ENDS
        return vpp, (_UNEVEN_ENDS, *even_chunks(inner, pp - 2), _UNEVEN_ENDS) if pp > 2 else ()
    if layers % (pp * vpp) == 0:
        return vpp, ()
    return vpp, _uneven(layers, pp * vpp)


def _listed_stages(row: FileRow, layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage where the notes list them; embedding and output layer may count as a layer each."""
    listed = re.search(r"layers per stage:\s*(\d+(?:/\d+)*)", row.text("notes"))
    if listed is None:
        return ()
    stages = [int(part) for part in listed[1].split("/")]
    if sum(stages) == layers + 2:
        stages[0] -= 1
        stages[-1] -= 1
    if sum(stages) != layers:
        raise MissingFactError(
            f"layers per stage {listed[1]} do not add up to the {layers} layers: which network ran is not known"
        )
    return tuple(stages) if len(stages) == pp and min(stages) >= 0 else ()


def _usual_virtual_stages(row: FileRow, layers: int, pp: int, micro_batches: int, notes: list[str]) -> int:
    """NVIDIA's recipes interleave wherever layers and micro-batches divide, two layers or one at a time."""
    each = layers // pp
    if not words.is_recipe(row) or layers % pp or micro_batches % pp or each < 2:
        return 1
    vpp = each // 2 if each % 2 == 0 else each
    notes.append(f"vpp not stated: {vpp}, as the recipes interleave")
    return vpp


def _uneven(layers: int, stages: int) -> tuple[int, ...]:
    """Layers as evenly as they go; the ends, which also hold embedding and output layer, get fewer.

    >>> _uneven(126, 16), _uneven(10, 4)
    ((7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7), (2, 3, 3, 2))
    """
    least, more = divmod(layers, stages)
    middle = stages // 2
    order = sorted(range(stages), key=lambda stage: (abs(stage - middle + 0.5), stage))
    rich = set(order[:more])
    return tuple(least + (stage in rich) for stage in range(stages))


def _by_items(layers: int, stages: int) -> tuple[int, ...]:
    """Layers where embedding, last norm and head count as items like them; the first stages get what is left over.

    Aleph Alpha's Scaling, ``pipeline_partitioning.py``: ``pipe_partition_uniform``, its default.

    >>> _by_items(40, 4), _by_items(60, 2)
    ((10, 11, 11, 8), (31, 29))
    """
    items = [(layers + 3) // stages + (index < (layers + 3) % stages) for index in range(stages)]
    items[0] -= 1
    items[-1] -= 2
    return tuple(items) if min(items) >= 0 else ()


def _expert_degrees(row: FileRow, network: Network, mesh: TrainingSetup, notes: list[str]) -> tuple[int, int]:
    if not isinstance(network, TransformerShape) or network.experts is None:
        return 1, 1
    ranks = mesh.devices // mesh.pp
    ep = row.whole("ep") or 1
    if ranks % ep or network.experts.count % ep:
        raise MissingFactError(f"ep {ep} does not divide {network.experts.count} experts on {ranks} devices of a stage")
    expert_tp = row.whole("etp")
    if expert_tp is None:
        used = words.stack(row, [])
        megatron = used in (Stack.MEGATRON, Stack.TRANSFORMER_ENGINE, Stack.MINDSPEED)
        apart = network.experts.count > 32 or "bridge" in row.text("framework").lower()
        expert_tp = 1 if apart or not megatron else mesh.tp
    if ranks % (ep * expert_tp):
        expert_tp = 1
    if mesh.tp > 1:
        notes.append(f"each expert is cut over {expert_tp}")
    return ep, expert_tp
