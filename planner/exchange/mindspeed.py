"""MindSpeed: arguments of a launch script on Ascend, and the YAML file of MindSpeed-LLM's trainer with FSDP2.

Arguments are Megatron-LM's with those of ``mindspeed/features_manager`` (0.12.1) for attention over context ranks,
DualPipeV, products that send while they compute (MC2), and what goes to the host. Keys of the YAML file are those of
``mindspeed_llm/fsdp2/utils/arguments.py``; devices and batches stand in the launch command and in other sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.exchange import megatron
from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written, devices_of
from planner.exchange.keyed import Document, yaml_file
from planner.exchange.shell import read_script
from planner.exchange.training_config import PLAIN, TrainingConfig

VERSION = "0.12.1"
SCHEDULE, CONTEXT = "--schedules-method", "--context-parallel-algo"
FLAGS: Mapping[str, str] = {
    "tensor_overlap": "--use-ascend-mc2",
    "expert_overlap": "--moe-alltoall-overlap-comm",
    "offload_optimizer": "--swap-optimizer",
    "offload_activations": "--swap-attention",
}
KEYS: Mapping[str, str] = {**megatron.KEYS, **FLAGS, "schedule": SCHEDULE, "context_algorithm": CONTEXT}
ALGORITHMS: Mapping[str, str] = {"ring": "megatron_cp_algo", "all_to_all": "ulysses_cp_algo"}
ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"


def arguments(config: TrainingConfig) -> dict[str, tuple[str, ...]]:
    """Flags of a configuration that MindSpeed can run, with their values."""
    folded = config.schedule == "dualpipe_v"
    theirs: dict[str, Any] = {**dict.fromkeys(FLAGS, False), **({"vpp": 1} if folded else {})}
    found = megatron.arguments(replace(config, **theirs))
    found.pop(megatron.KEYS["context_algorithm"], None)
    found |= {flag: () for name, flag in FLAGS.items() if getattr(config, name)}
    if (config.cp or 1) > 1:
        found[CONTEXT] = (ALGORITHMS[str(config.context_algorithm)],)
    if folded:
        found[SCHEDULE] = ("dualpipev",)
    return found


def write(config: TrainingConfig) -> Written:
    """The script: a file to be sourced before ``torchrun … pretrain_gpt.py "${PLAN_ARGS[@]}"``."""
    variables = {megatron.CONNECTIONS: "1", ALLOCATOR: "expandable_segments:True"}
    title = f"MindSpeed {VERSION} (Megatron-LM on Ascend)"
    return Written(text=megatron.script(config, title, arguments(config), variables), environment=variables)


def read(text: str, source: str) -> ReadConfig:
    """Read a launch script, or arguments on one line."""
    found, options = megatron.read(text, source), read_script(text).options
    said: dict[str, Any] = {name: flag in options for name, flag in FLAGS.items()}
    config = replace(found.config, **said)
    if (config.cp or 1) > 1:
        algorithm = " ".join(options.get(CONTEXT, ()))
        config = replace(config, context_algorithm="all_to_all" if algorithm.startswith("ulysses") else "ring")
    if options.get(SCHEDULE) == ("dualpipev",):
        config = replace(config, schedule="dualpipe_v", vpp=2)
    own = {*FLAGS.values(), CONTEXT, SCHEDULE, "--ulysses-degree-in-cp"}
    return replace(found, config=config, not_read=tuple(name for name in found.not_read if name not in own))


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of MindSpeed across fields: Megatron-LM's, but for what goes to the host, and DualPipeV's."""
    for broken in megatron.rules(replace(config, offload_optimizer=False, expert_overlap=False)):
        names = [name for name in FLAGS if megatron.KEYS[name] == broken.key]
        yield replace(broken, key=FLAGS[names[0]]) if names else broken
    if config.offload_optimizer and config.optimizer_sharding == "none":
        yield Violation(
            FLAGS["offload_optimizer"], "", "it needs --use-distributed-optimizer", "add it, or leave this out"
        )
    if config.schedule != "dualpipe_v":
        return
    chunks, count = 2 * (config.pp or 1), config.micro_batches
    if config.layers or (config.num_layers or chunks) % chunks:
        yield Violation(
            SCHEDULE, "dualpipev", f"the {chunks} chunks have equally many layers", "use another number of stages"
        )
    if count is not None and count < chunks:
        rule, remedy = f"a step has {count} micro-batches, and it needs at least {chunks}", "use a smaller micro-batch"
        yield Violation(SCHEDULE, "dualpipev", rule, remedy)


MINDSPEED = replace(
    megatron.MEGATRON,
    name="mindspeed",
    version=VERSION,
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: (
        megatron.MEGATRON.recognises(name, text)
        and ("mindspeed" in text.lower() or CONTEXT in text or "--use-ascend" in text)
    ),
    rules=rules,
)

# The YAML file of the trainer with FSDP2

FSDP2_VERSION = "c77308a1 (2026-08)"
FSDP2_KEYS: Mapping[str, str] = {
    "devices": "NPUs",
    "tp": "parallel.tp_size",
    "cp": "parallel.cp_size",
    "ep": "parallel.ep_size",
    "context_algorithm": "parallel.cp_type",
    "optimizer_sharding": "parallel.reshard_after_forward",
    "shard_size": "parallel.fsdp_size",
    "recompute": "parallel.recompute",
    "precision": "parallel.param_dtype",
}
DTYPES: Mapping[str, str] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
CONTEXTS: Mapping[str, str] = {"ring": "ring", "ulysses": "all_to_all", "kvallgather": "ring"}


def write_fsdp2(config: TrainingConfig) -> Written:
    """The section ``parallel``."""
    ranks, tensor, expert = config.dp or 1, config.tp or 1, config.ep or 1
    found: dict[str, Any] = {"tp_size": tensor, "fsdp_size": config.shard, "cp_size": config.cp or 1, "ep_size": expert}
    if expert > 1:
        found["ep_fsdp_size"] = max(1, ranks // expert)
    if (config.cp or 1) > 1:
        found["cp_type"] = "ulysses" if config.context_algorithm == "all_to_all" else "ring"
    found |= {
        "recompute": config.recompute == "full",
        "reshard_after_forward": config.optimizer_sharding == "zero3",
        "param_dtype": config.precision,
    }
    head = f"A plan of Meshwright for MindSpeed-LLM {FSDP2_VERSION} with FSDP2 on {config.devices} NPUs"
    return yaml_file(head, {f"parallel.{key}": value for key, value in found.items()})


def read_fsdp2(text: str, source: str) -> ReadConfig:
    """Read the YAML file."""
    raw = Document.yaml(text, source, "MindSpeed-LLM")
    tensor, context, expert, shard = (
        raw.number(f"parallel.{key}") for key in ("tp_size", "cp_size", "ep_size", "fsdp_size")
    )
    devices = devices_of(text, "NPUs")
    ranks = devices // (tensor * context) if devices else shard
    algorithm = raw.word(FSDP2_KEYS["context_algorithm"], CONTEXTS, "ulysses")
    gathers = raw.flag(FSDP2_KEYS["optimizer_sharding"], True)
    config = replace(
        PLAIN,
        devices=devices,
        tp=tensor,
        cp=context,
        ep=expert,
        etp=1 if expert > 1 else tensor,
        precision=raw.word(FSDP2_KEYS["precision"], DTYPES, "bf16"),
        optimizer_sharding="none" if shard == 1 else "zero3" if gathers else "zero2",
        shard_size=shard if 1 < shard < ranks else 0,
        sequence_parallel=False,
        context_algorithm=algorithm if context > 1 else "none",
        recompute="full" if raw.flag("parallel.recompute") else "none",
    )
    raw.get("parallel.ep_fsdp_size")
    return ReadConfig(config=config, not_read=raw.unread())


def rules_fsdp2(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of the trainer with FSDP2 across fields."""
    ranks, expert = config.dp, config.ep or 1
    if expert > 1 and ranks and ((config.tp or 1) > 1 or ranks % expert):
        rule = f"ep_size × ep_fsdp_size are the {ranks} data-parallel ranks, without tensor ranks"
        yield Violation(FSDP2_KEYS["ep"], str(expert), rule, "use a divisor of them, and tp_size 1")


MINDSPEED_FSDP2 = ExchangeFormat(
    name="mindspeed-fsdp2",
    version=FSDP2_VERSION,
    suffix=".yaml",
    also_silent=frozenset({"recompute_modules"}),
    keys=FSDP2_KEYS,
    write=write_fsdp2,
    read=read_fsdp2,
    recognises=lambda name, text: "fsdp_size:" in text and "parallel:" in text,
    rules=rules_fsdp2,
    timed_as="mindspeed",
)
