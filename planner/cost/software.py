"""The software that a plan will run on: what its stack makes of a device's kernels and launches.

Profiles state what devices and the usual software make of planned steps together (``training.planned_*``). Where a
request names the software, what its stack makes of kernels is told apart from what the device does, as in predictions
of published runs: their factors are the device's own times the stack's, the time of a launch is the stack's on this
device, and messages are launched as `simulator.launches` has it. Coefficients are those of
``hw_profiles/software/training.yaml``, fitted by ``meshwright calibrate --from-measurements``: properties of software,
never of a network.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import ValidationError

from planner.cost.memory_traits import traits_of
from planner.cost.software_file import (
    MemoryHabits,
    Software,
    SoftwareFile,
    shipped_software,
    shipped_stacks,
    software_in_use,
)
from planner.cost.stacks import USUAL_STACKS, Stack, factors_of, family_of, stack_key
from planner.graph.attention import FUSED, WRITTEN_OUT, check_attention
from planner.graph.norms import FUSED as FUSED_NORMS
from planner.graph.norms import check_norms
from planner.networks.zoo.configs import CAPACITY
from planner.plans.capability import NAME_ENDS
from planner.plans.exchange import Exchange
from simulator.corrections import EXPERT_EXPOSED, EXPERT_LOAD, EXPERT_WORK, SENT_ONCE, SHARDED, TENSOR_EXPOSED
from simulator.errors import InputError
from simulator.hardware import Hardware, Uncertainty
from simulator.kernels import COPIES, SINGLE_COPIES
from simulator.launches import (
    DISPATCH,
    DISPATCH_S,
    GRAPHED,
    LAUNCH,
    MESSAGE_LAUNCHES,
    MICRO_BATCH,
    POOLED,
    SAMPLE,
    SEND_STALL,
    STEP,
)
from simulator.profile_file import validation_problems
from simulator.profiles import load_profile
from simulator.program import Kernel

if TYPE_CHECKING:
    from planner.plans.plan import Plan
    from simulator.mixed_cluster import MixedCluster


USUAL = "usual"
"""The name that stands for no stack in particular: the median of the usual ones."""
NetworkFamily = Literal["image", "language", "features"]

SUMS = "planned_accumulation"
"""Key of a profile's training: factor on the time of sums of gradients over micro-batches."""
_FUSED_OPTIMIZERS = ("sgd", "momentum")
"""Optimizers that MindSpore has a kernel for (``ApplyMomentum``); others are operators, as its coefficient has them."""
_FIXED = {STEP: "step_overhead_s", MICRO_BATCH: "micro_batch_overhead_s"}

SETTINGS = (
    "overlaps", "gradient_dtype", "whole_sums", "single_gathers", "deterministic", "fused_sums", "fusion",
    "samples", "sample_area",
    *MemoryHabits.model_fields,
)  # fmt: skip
"""Settings that may follow the name of software."""


def usual_software(hardware: Hardware, family: NetworkFamily, *, sharded: bool = False) -> str:
    """The software that networks of a family are usually trained with on a device; empty where no file says.

    With ``sharded`` data-parallel ranks share all states, and nothing else is parallel. A profile that was calibrated
    on a machine is of this project's own executor, whose operators run one by one.
    """
    usual = shipped_stacks().usual.get(family_of(hardware.device_name))
    if usual is None or hardware.uncertainty.label == "calibrated":
        return ""
    return usual.other if family != "language" else usual.sharded if sharded else usual.language


@lru_cache(maxsize=512)
def software_named(text: str) -> Software:
    """The software of a name, with the settings behind it: ``megatron_core:deterministic=true,overlaps=false``.

    Settings are the fields of `Software` that are no text and those of its `MemoryHabits`.

    Raises
    ------
    InputError
        Software or setting is not known, or its value is of the wrong kind.

    Examples
    --------
    >>> software_named("megatron_core").overlaps, software_named("megatron_core:overlaps=false").overlaps
    (True, False)
    """
    name, _, stated = text.partition(NAME_ENDS)
    kinds = shipped_stacks().software
    if name not in kinds:
        raise InputError(f"software {name!r} is not one of {', '.join(kinds)}{_nearest(name, kinds)}")
    known = kinds[name]
    own, memory = known.model_dump(), known.memory.model_dump()
    for setting in filter(None, stated.split(",")):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or key not in SETTINGS:
            raise InputError(
                f"software {text!r}: {setting!r} is no setting; write NAME=VALUE, where NAME is one of "
                f"{', '.join(SETTINGS)}{_nearest(key, SETTINGS)}"
            )
        (memory if key in memory else own)[key] = _value(value)
    try:
        return Software.model_validate(own | {"memory": memory})
    except ValidationError as error:
        raise InputError(f"software {text!r}: {validation_problems(error)}; correct the setting") from None


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def with_settings(name: str, wanted: Mapping[str, object]) -> str:
    """Return the name followed by the wanted settings that differ from the software's own."""
    known = software_named(name)
    has = known.model_dump() | known.memory.model_dump()
    differs = sorted(key for key, value in wanted.items() if has[key] != value)
    stated = ",".join(f"{key}={_text(wanted[key])}" for key in differs)
    return f"{name}{NAME_ENDS}{stated}" if stated else name


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def uncertainty_of(hardware: Hardware, software: str, *, language: bool, experts: bool = False) -> Uncertainty:
    """Return how far predicted steps may be off: for the named software on such devices, else for the profile.

    The interval comes from published runs of the software on that family of devices. Most of those runs trained dense
    networks, so a network with ``experts`` takes the wider interval of software and profile. So does a profile whose
    device nobody measured; it stays ``extrapolated``.
    """
    own = hardware.uncertainty
    if not check_software(software):
        return own
    known = software_named(software)
    name = f"{known.stack}{'_deterministic' * known.deterministic}"
    kind, family = "transformer" if language else "layered", family_of(hardware.device_name)
    interval, label = software_in_use().interval(kind, family, name)
    low, high = max(0.0, 1 - interval.low), max(0.0, interval.high - 1)
    if own.label == "extrapolated":
        return replace(own, low=max(low, own.low), high=max(high, own.high))
    if experts:
        low, high, label = max(low, own.low), max(high, own.high), own.label
    source = f"how far {interval.rows} published runs of such software and devices were off"
    return replace(own, low=low, high=high, label=label, source=source)


def check_software(name: str) -> str:
    """The name, if it is one that a plan can be told; InputError with those that are, and the nearest, if not."""
    if name:
        software_named(name)
    return name


def as_run(
    hardware: Hardware,
    software: str,
    attention: str,
    *,
    language: bool = True,
    optimizer: str = "",
    tensor_overlap: bool = False,
    expert_overlap: bool = False,
    sent_once: int = 0,
    expert_imbalance: float = 1.0,
) -> Hardware:
    """A cluster as the named software, with a kind of attention, runs on it; as it is where neither is named.

    With ``tensor_overlap`` gathers and scatters of tensor ranks travel beside products, with ``expert_overlap`` tokens
    on their way to experts beside another micro-batch. Where a token goes to ``sent_once`` experts, it travels once to
    each node that has some of them; 0 where it travels once for each expert. With ``expert_imbalance`` the busiest rank
    of experts gets so many times an even share of the tokens: messages that have places for more have to have more.
    Without ``language``, where the network has no sequence, kernels bound by memory are those of images. ``optimizer``
    is the plan's.
    """
    found = as_run_by(hardware, software)
    told: dict[str, float] = {}
    if software and not language:
        told["planned_memory"] = found.training["planned_image"]
    if software and software_named(software).stack is Stack.MINDSPORE and optimizer in _FUSED_OPTIMIZERS:
        told["planned_optimizer"] = 1.0
    if software and not check_attention(attention):
        attention = software_named(software).attention.get(family_of(hardware.device_name), "")
    if check_attention(attention) in FUSED:
        found = replace(found, attention=attention, hash=f"{found.hash} {attention}")
    if software and attention not in WRITTEN_OUT:
        told["planned_attention"] = attention_factor(found)
    if tensor_overlap:
        told[TENSOR_EXPOSED] = _exposed(software, "tensor_exposed")
    if expert_overlap:
        told[EXPERT_EXPOSED] = _exposed(software, "context_exposed")
    if sent_once:
        told[SENT_ONCE] = float(sent_once)
    if expert_imbalance > 1.0:
        told[EXPERT_WORK] = expert_imbalance
    if expert_imbalance > CAPACITY:
        told[EXPERT_LOAD] = expert_imbalance / CAPACITY
    if told:
        named = "".join(f" {name}={value:g}" for name, value in told.items())
        found = replace(found, training={**found.training, **told}, hash=f"{found.hash}{named}")
    return found


def _exposed(software: str, coefficient: str) -> float:
    """What messages beside kernels leave to wait for with the named software, else with the usual one.

    Those of experts leave what those of context ranks do, as in predictions of published runs.
    """
    stacks = software_in_use().coefficients.stacks
    named = [str(software_named(software).stack)] if software else USUAL_STACKS
    return float(np.median([stacks[name][coefficient] for name in named]))


def run_for(plan: Plan, hardware: Hardware) -> Hardware:
    """A cluster as it runs a plan: with its software, its attention, and how its messages travel."""
    return as_run(
        hardware, plan.software, plan.attention,
        language=plan.sequence_length is not None, optimizer=plan.optimizer,
        tensor_overlap=plan.tensor_overlap, expert_overlap=plan.expert_overlap, sent_once=plan.sent_once,
        expert_imbalance=plan.expert_imbalance,
    )  # fmt: skip


def cluster_as_run(cluster: MixedCluster, plan: Plan) -> MixedCluster:
    """A cluster of several device types, each of which runs as the plan has it."""
    return replace(cluster, nodes=tuple(run_for(plan, hardware) for hardware in cluster.nodes))


def machine_of(plan: Plan, *, software: bool = True) -> Hardware:
    """The cluster that a plan was made for as it runs there; without ``software`` as the usual one runs the plan.

    Raises
    ------
    ProfileError
        The plan's profile is missing or wrong.
    """
    return run_for(plan if software else replace(plan, software=""), load_profile(plan.hardware))


def exchange_of(software: str, exchange: Exchange) -> Exchange:
    """How tensors travel where the software is named: what is not asked for is as it has it."""
    if not check_software(software):
        return exchange
    known = software_named(software)
    return replace(
        exchange,
        gradient_dtype=exchange.gradient_dtype or known.gradient_dtype,
        whole_sums=exchange.whole_sums or known.whole_sums,
    )


def attention_factor(hardware: Hardware) -> float:
    """Factor on the kernel of attention that a device is told to use: the device's times the kernel's own."""
    own = software_in_use().coefficients.attention.get(hardware.attention, 1.0)
    return hardware.training.get("attention", 1.0) * own


def fusion_of(software: str) -> str:
    """How the named software fuses operators, a kind of `planner.graph.fusion`; empty where it does not."""
    return software_named(software).fusion if check_software(software) else ""


def norms_of(software: str, norms: str) -> str:
    """How root-mean-square norms run where the software is named: what is not asked for is as it has them."""
    if check_norms(norms) or not check_software(software):
        return norms
    return FUSED_NORMS if traits_of(software_named(software).stack).fused_rms_norm else ""


def _copies(hardware: Hardware) -> Iterator[tuple[str, str]]:
    """Yield the kinds of copies around convolutions: float32 is copied where tensor units multiply it, in TF32."""
    yield COPIES, "copies"
    if hardware.peak("float32", Kernel.CONVOLUTION) >= hardware.peak("float16", Kernel.CONVOLUTION) / 2:
        yield SINGLE_COPIES, "single_copies"


def as_run_by(hardware: Hardware, software: str) -> Hardware:
    """A cluster as the named software runs on it; as it is where none is named.

    Ascend devices get whole graphs of MindSpore to run, and launch their kernels themselves.

    Raises
    ------
    InputError
        The software is not known.
    """
    return _as_run_by(hardware, software, software_in_use()) if check_software(software) else hardware


@lru_cache(maxsize=64)
def _as_run_by(hardware: Hardware, software: str, file: SoftwareFile) -> Hardware:
    known, coefficients = software_named(software), file.coefficients
    stack, family = known.stack, family_of(hardware.device_name)
    on_ascend = family.startswith("ascend")
    own = coefficients.stacks.get(stack_key(stack, deterministic=known.deterministic, family=family), {})
    training = {**hardware.training, **coefficients.devices.get(family, {})}
    for name, factor in factors_of(own).items():
        training[f"planned_{name}"] = training.get(name, 1.0) * factor
    for name in ("inside", "outside"):
        training[f"planned_{name}"] = training.get(name, 1.0)
    if "launch_s" in own and not (on_ascend and stack in (Stack.MINDSPORE, Stack.MINDSPORE_TOOLKIT)):
        training[LAUNCH] = own["launch_s"] * training.get("launch", 1.0)
        training[MESSAGE_LAUNCHES] = 1.0
        training[DISPATCH] = DISPATCH_S * training.get("launch", 1.0)
        if known.memory.captured_graphs or known.memory.captured_step:
            training[LAUNCH] /= GRAPHED
        if known.memory.captured_step:
            training[DISPATCH] = 0.0
    training |= {key: own[name] for key, name in _FIXED.items() if name in own}
    if known.fused_sums:
        training[SUMS] = 0.0
    if "pipeline_exposed" in own:
        training[SEND_STALL] = own["pipeline_exposed"]
    if known.single_gathers and "shard_apart" in own:
        training[SHARDED] = own["shard_apart"]
    if not on_ascend:
        # The factor on convolutions is not one on the copies around them.
        training |= {key: own.get(name, 0.0) / training["planned_convolution"] for key, name in _copies(hardware)}
    on_images = file.layered.stacks.get(stack_key(stack, deterministic=False, family=family), {})
    if known.samples:
        training[SAMPLE] = known.sample_area * on_images.get(f"host_{known.samples}_s", 0.0)
        training[POOLED] = on_images.get("pooled", 0.0)
    grouped = hardware.grouped_convolution_efficiency
    if grouped is not None:
        grouped *= on_images.get("grouped", 1.0)
    overlaps = hardware.overlaps_communication and known.overlaps
    named = f"{hardware.hash} {software}"
    if file is not shipped_software():
        named = f"{named} {sorted(training.items())} {grouped}"
    return replace(
        hardware, training=training, overlaps_communication=overlaps, grouped_convolution_efficiency=grouped, hash=named
    )
