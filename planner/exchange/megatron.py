"""Megatron-LM: arguments of a launch script, pipeline layout and environment variables.

Flags and rules are those of ``megatron/training/arguments.py`` of megatron-core 0.19.2. What a file does not say has
Megatron's defaults. A plan's ZeRO levels 2 and 3 are Megatron-FSDP's ``optim_grads`` and ``optim_grads_params``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written, divides
from planner.exchange.layout import read_layout, write_layout
from planner.exchange.shell import Script, read_script
from planner.exchange.training_config import CHEAP_MODULES, TrainingConfig
from simulator.errors import InputError
from simulator.schedules.generators import interleaved_group

VERSION = "0.19"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
DEVICES = ("NUM_GPUS", "WORLD_SIZE")
_COUNT = re.compile(r"[0-9]{1,12}")
KEYS: Mapping[str, str] = {
    "devices": "WORLD_SIZE",
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "layers": "--pipeline-model-parallel-layout",
    "micro_batch": "--micro-batch-size",
    "global_batch": "--global-batch-size",
    "sequence_length": "--seq-length",
    "sequence_parallel": "--sequence-parallel",
    "tensor_overlap": "--tp-comm-overlap",
    "expert_overlap": "--overlap-moe-expert-parallel-comm",
    "overlap_gradients": "--overlap-grad-reduce",
    "overlap_parameters": "--overlap-param-gather",
    "recompute": "--recompute-granularity",
    "recompute_count": "--recompute-num-layers",
    "recompute_modules": "--recompute-modules",
    "context_algorithm": "--cp-comm-type",
    "optimizer_sharding": "--use-distributed-optimizer",
    "shard_size": "--num-distributed-optimizer-instances",
    "offload_optimizer": "--optimizer-cpu-offload",
    "offload_activations": "--fine-grained-activation-offloading",
    "first_layers": "--decoder-first-pipeline-num-layers",
    "last_layers": "--decoder-last-pipeline-num-layers",
    "mtp_layers": "--mtp-num-layers",
}
NUMBERS = {
    name: KEYS[name]
    for name in (
        "tp",
        "pp",
        "cp",
        "ep",
        "micro_batch",
        "global_batch",
        "sequence_length",
        "first_layers",
        "last_layers",
        "mtp_layers",
    )
}
DISPATCHER, BACKEND = "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"
FLAGS = {
    name: KEYS[name]
    for name in (
        "sequence_parallel",
        "tensor_overlap",
        "expert_overlap",
        "overlap_gradients",
        "overlap_parameters",
        "offload_optimizer",
        "offload_activations",
    )
}
STRATEGIES = {"none": "no_shard", "zero1": "optim", "zero2": "optim_grads", "zero3": "optim_grads_params"}
SIZES: Mapping[str, str] = {
    "--num-layers": "num_hidden_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "intermediate_size",
    "--num-attention-heads": "num_attention_heads",
    "--num-query-groups": "num_key_value_heads",
    "--kv-channels": "head_dim",
    "--vocab-size": "vocab_size",
    "--max-position-embeddings": "max_position_embeddings",
    "--num-experts": "num_local_experts",
    "--moe-router-topk": "num_experts_per_tok",
}
READ = frozenset(
    (
        *NUMBERS.values(),
        *FLAGS.values(),
        *SIZES,
        "--num-virtual-stages-per-pipeline-rank",
        "--recompute-modules",
        "--num-layers-per-virtual-pipeline-stage",
        GROUP,
        "--pipeline-model-parallel-layout",
        "--expert-tensor-parallel-size",
        "--recompute-granularity",
        "--recompute-method",
        "--recompute-num-layers",
        "--recompute-activations",
        "--cp-comm-type",
        "--use-distributed-optimizer",
        "--num-distributed-optimizer-instances",
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy",
        "--bf16",
        "--fp16",
        "--fp8-format",
        "--fp4-format",
        "--ckpt-format",
        "--nproc_per_node",
        "--nproc-per-node",
        "--nnodes",
        "--swiglu",
        "--normalization",
        DISPATCHER,
        BACKEND,
        "--moe-ffn-hidden-size",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--offload-modules",
        "--use-precision-aware-optimizer",
    )
)
RENAMED: Mapping[str, str] = {
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--virtual-pipeline-model-parallel-size": "use --num-virtual-stages-per-pipeline-rank",
    "--batch-size": "use --micro-batch-size",
    "--checkpoint-activations": "use --recompute-granularity",
}
"""Flags that this version refuses."""
OFFLOADED = "attn_norm", "core_attn", "attn_proj", "mlp_norm"
"""Modules whose activations go to the host where those of all layers do."""


def arguments(config: TrainingConfig) -> dict[str, tuple[str, ...]]:
    """Flags of a configuration that Megatron-LM can run, with their values."""
    found: dict[str, tuple[str, ...]] = {}
    for name, flag in NUMBERS.items():
        value = getattr(config, name)
        if value is not None and not (name in ("cp", "ep") and value == 1):
            found[flag] = (str(value),)
    for name, flag in FLAGS.items():
        if getattr(config, name):
            found[flag] = ()
    if config.layers:
        found[KEYS["layers"]] = (write_layout(config.layers, config.mtp_layers or 0),)
    elif (config.vpp or 1) > 1:
        found[KEYS["vpp"]] = (str(config.vpp),)
    if config.schedule == "interleaved_1f1b" and (config.micro_batches or 0) % (config.pp or 1):
        found[GROUP] = (str(interleaved_group(config.pp or 1, config.micro_batches or 1)),)
    if (config.ep or 1) > 1:
        found[KEYS["etp"]] = (str(config.etp or config.tp or 1),)
        found[DISPATCHER] = ("flex",) if config.tokens_once else ("alltoall",)
        if config.tokens_once:
            found[BACKEND] = ("deepep",)
    if (config.cp or 1) > 1:
        found[KEYS["context_algorithm"]] = ("a2a" if config.context_algorithm == "all_to_all" else "p2p",)
    if config.offload_optimizer:
        found["--use-precision-aware-optimizer"] = ()  # whose code updates on the host
    if config.offload_activations:
        found["--offload-modules"] = OFFLOADED
    return {**found, **_sharding(config), **_recompute(config), **_precision(config)}


def _sharding(config: TrainingConfig) -> dict[str, tuple[str, ...]]:
    level, found = config.optimizer_sharding, dict[str, tuple[str, ...]]()
    if level in (None, "none"):
        return found
    if level == "zero1":
        found["--use-distributed-optimizer"] = ()
    else:
        found["--use-megatron-fsdp"] = ()
        found["--data-parallel-sharding-strategy"] = (STRATEGIES[str(level)],)
        found["--ckpt-format"] = ("fsdp_dtensor",)
    if config.shard_size and config.dp:
        found[KEYS["shard_size"]] = (str(config.dp // config.shard_size),)
    return found


def _recompute(config: TrainingConfig) -> dict[str, tuple[str, ...]]:
    if config.recompute == "selective":
        modules = config.recompute_modules or CHEAP_MODULES[:1]
        return {"--recompute-granularity": ("selective",), "--recompute-modules": tuple(modules)}
    if config.recompute != "full":
        return {}
    method, count = ("block", config.recompute_count) if config.recompute_count else ("uniform", 1)
    return {
        "--recompute-granularity": ("full",),
        "--recompute-method": (method,),
        "--recompute-num-layers": (str(count),),
    }


def _precision(config: TrainingConfig) -> dict[str, tuple[str, ...]]:
    kinds: Mapping[str, dict[str, tuple[str, ...]]] = {
        "fp16": {"--fp16": ()},
        "bf16": {"--bf16": ()},
        "fp8": {"--bf16": (), "--fp8-format": ("hybrid",)},
        "fp4": {"--bf16": (), "--fp4-format": ("e2m1",)},
    }
    return kinds.get(config.precision or "", {})


def environment(config: TrainingConfig) -> dict[str, str]:
    """Variables that the job needs.

    One queue keeps sums of tensor and context ranks behind what they wait for. Transformer Engine 2.10 would move
    weights to the host with the activations, and Megatron refuses to start so.
    """
    found = {"NVTE_CPU_OFFLOAD_V1": "1"} if config.offload_activations else {}
    if config.optimizer_sharding in ("zero2", "zero3"):
        return {CONNECTIONS: "8", **found}
    return {CONNECTIONS: "1", **found} if (config.tp or 1) > 1 or (config.cp or 1) > 1 else found


def write(config: TrainingConfig) -> Written:
    """The script: a file to be sourced before ``torchrun … pretrain_gpt.py "${PLAN_ARGS[@]}"``."""
    variables = environment(config)
    title = f"Megatron-LM {VERSION} (megatron-core 0.19.2)"
    return Written(text=script(config, title, arguments(config), variables), environment=variables)


def script(
    config: TrainingConfig,
    title: str,
    options: Mapping[str, tuple[str, ...]],
    variables: Mapping[str, str],
) -> str:
    """The text of a script with arguments and variables; `title` names framework and version."""
    lines = [
        "#!/usr/bin/env bash",
        f"# A plan of Meshwright for {title}. Source it, then start",
        '# torchrun … pretrain_gpt.py "${PLAN_ARGS[@]}" with the arguments of your model and data.',
        f"{DEVICES[0]}={config.devices}",
        *(f"export {name}={value}" for name, value in variables.items()),
        "PLAN_ARGS=(",
        *(f"    {' '.join((flag, *map(_quoted, values)))}" for flag, values in options.items()),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    return f"'{value}'" if set(value) & set("|*() ") else value


def read(text: str, source: str) -> ReadConfig:
    """Read a launch script, or arguments on one line.

    Raises
    ------
    InputError
        A value is no number, or no layout.
    """
    script = read_script(text)
    options = script.options
    found: dict[str, object] = {"recompute_layers": (), "offload_parameters": False}
    found |= {name: _number(options, flag, source) for name, flag in NUMBERS.items()}
    found |= {name: flag in options for name, flag in FLAGS.items()}
    for name in ("tp", "pp", "cp", "ep"):
        found[name] = found[name] or 1
    found["tokens_once"] = found["ep"] != 1 and _value(options, DISPATCHER) == "flex"
    tensor, pipeline = int(str(found["tp"])), int(str(found["pp"]))
    found["etp"] = _number(options, KEYS["etp"], source) or tensor
    if tensor == 1:
        found["sequence_parallel"] = False  # Megatron-LM drops it
    sizes = _sizes(options, source)
    found |= _stages(options, source, pipeline, sizes)
    found["devices"] = _devices(script, source)
    found |= _read_sharding(options, source, found)
    found |= _read_recompute(options, source)
    found["precision"] = _read_precision(options)
    found["context_algorithm"] = _read_context(options, int(str(found["cp"])))
    if found["global_batch"] is None and found["devices"] and found["micro_batch"]:
        found["global_batch"] = int(str(found["micro_batch"])) * max(
            1, int(str(found["devices"])) // (tensor * pipeline * int(str(found["cp"])))
        )
    config = TrainingConfig(**found)  # type: ignore[arg-type]
    return ReadConfig(
        config=config,
        sizes=sizes,
        not_read=tuple(name for name in options if name not in READ and name not in RENAMED),
        violations=(*_broken(script, config, sizes), *broken_group(config, GROUP, _number(options, GROUP, source))),
        notes=_other_group(options, config, source),
    )


def _value(options: Mapping[str, tuple[str, ...]], flag: str) -> str | None:
    return options[flag][0] if options.get(flag) else None


def _number(options: Mapping[str, tuple[str, ...]], flag: str, source: str) -> int | None:
    value = _value(options, flag)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 12 and int(value)):
        raise InputError(
            f"{source}: {flag} {value!r} is no whole number of at least 1; write it as one, or set its variable"
        )
    return int(value)


def _devices(script: Script, source: str) -> int | None:
    """Ranks of the job: a variable of that name, or processes a node times nodes."""
    for name in DEVICES:
        value = script.variables.get(name, "")
        if _COUNT.fullmatch(value) and int(value):
            return int(value)
    each = _value(script.options, "--nproc_per_node") or _value(script.options, "--nproc-per-node") or ""
    nodes = _value(script.options, "--nnodes") or "1"
    return int(each) * int(nodes) if _COUNT.fullmatch(each) and _COUNT.fullmatch(nodes) else None


def _sizes(options: Mapping[str, tuple[str, ...]], source: str) -> dict[str, int | str]:
    """Sizes of the network, by the keys of a Hugging Face configuration."""
    found: dict[str, int | str] = {}
    for flag, key in SIZES.items():
        value = _number(options, flag, source)
        if value is not None:
            found[key] = value
    if "hidden_size" not in found or "num_hidden_layers" not in found:
        return found
    gated = "--swiglu" in options
    found["model_type"] = "mixtral" if "num_local_experts" in found else "llama" if gated else "gpt2"
    found.setdefault("intermediate_size", 4 * int(found["hidden_size"]) * (2 if gated else 3) // 3)
    if "num_local_experts" in found and (width := _number(options, "--moe-ffn-hidden-size", source)):
        found["intermediate_size"] = width
    return found


def _stages(
    options: Mapping[str, tuple[str, ...]], source: str, pipeline: int, sizes: Mapping[str, int | str]
) -> dict[str, object]:
    """Chunks, their layers and the schedule."""
    layout = _value(options, KEYS["layers"])
    layers: tuple[int, ...] = ()
    found: dict[str, object] = {}
    virtual = _number(options, KEYS["vpp"], source) or 1
    per_chunk = _number(options, "--num-layers-per-virtual-pipeline-stage", source)
    if layout is not None:
        layers, extra = read_layout(layout)
        virtual = max(1, len(layers) // pipeline)
        found["mtp_layers"] = extra or _number(options, KEYS["mtp_layers"], source)
    elif per_chunk and sizes.get("num_hidden_layers"):
        virtual = max(1, int(sizes["num_hidden_layers"]) // pipeline // per_chunk)
    schedule = "none" if pipeline == 1 and virtual == 1 else "1f1b" if virtual == 1 else "interleaved_1f1b"
    return {**found, "layers": () if len(set(layers)) <= 1 else layers, "vpp": virtual, "schedule": schedule}


def _read_sharding(
    options: Mapping[str, tuple[str, ...]], source: str, found: Mapping[str, object]
) -> dict[str, object]:
    level = "zero1" if "--use-distributed-optimizer" in options else "none"
    if "--use-megatron-fsdp" in options:
        named = _value(options, "--data-parallel-sharding-strategy") or "optim_grads_params"
        level = next((name for name, word in STRATEGIES.items() if word == named), "")
        if not level:
            known = ", ".join(STRATEGIES.values())
            raise InputError(f"{source}: --data-parallel-sharding-strategy {named!r} is not one of {known}")
    instances = _number(options, KEYS["shard_size"], source) or 1
    devices = found["devices"]
    if level == "none" or instances == 1 or not isinstance(devices, int):
        return {"optimizer_sharding": level, "shard_size": 0}
    inner = int(str(found["tp"])) * int(str(found["pp"])) * int(str(found["cp"]))
    return {"optimizer_sharding": level, "shard_size": max(1, devices // inner // instances)}


def _read_recompute(options: Mapping[str, tuple[str, ...]], source: str) -> dict[str, object]:
    mode = _value(options, "--recompute-granularity") or (
        "selective" if "--recompute-activations" in options else "none"
    )
    if mode not in ("none", "selective", "full"):
        raise InputError(f"{source}: --recompute-granularity {mode!r} is not one of selective, full")
    count = _number(options, KEYS["recompute_count"], source)
    block = _value(options, "--recompute-method") == "block"
    modules = options.get("--recompute-modules", CHEAP_MODULES[:1]) if mode == "selective" else ()
    return {
        "recompute": mode,
        "recompute_modules": tuple(modules),
        "recompute_count": (count or 0) if mode == "full" and block else 0,
    }


def _read_precision(options: Mapping[str, tuple[str, ...]]) -> str:
    for flag, name in (("--fp4-format", "fp4"), ("--fp8-format", "fp8"), ("--bf16", "bf16"), ("--fp16", "fp16")):
        if flag in options:
            return name
    return "fp32"


def _read_context(options: Mapping[str, tuple[str, ...]], context: int) -> str:
    if context == 1:
        return "none"
    return "all_to_all" if _value(options, "--cp-comm-type") == "a2a" else "ring"


def _broken(script: Script, config: TrainingConfig, sizes: Mapping[str, int | str]) -> Iterator[Violation]:
    """Rules that show in the flags alone."""
    options = script.options
    for flag, remedy in RENAMED.items():
        if flag in options:
            yield Violation(
                key=flag, value=" ".join(options[flag]), rule=f"Megatron-LM {VERSION} has no such flag", remedy=remedy
            )
    layout = _value(options, KEYS["layers"])
    if layout is not None and config.layers == () and config.pp:
        pieces = len(read_layout(layout)[0])
        if pieces % config.pp:
            yield Violation(
                key=KEYS["layers"],
                value=layout,
                rule=f"its {pieces} pieces must be a multiple of {config.pp} pipeline ranks",
                remedy="give each its layers",
            )
    if KEYS["layers"] in options and (KEYS["first_layers"] in options or KEYS["last_layers"] in options):
        yield Violation(
            key=KEYS["layers"],
            value=options[KEYS["layers"]][0],
            rule="it stands beside neither --decoder-first- nor --decoder-last-pipeline-num-layers",
            remedy="leave these out",
        )
    granularity, method = config.recompute, _value(options, "--recompute-method")
    if granularity == "selective" and (method or "--recompute-num-layers" in options):
        yield Violation(
            key="--recompute-method",
            value=method or "",
            rule="selective recomputation has no method and no number of layers",
            remedy="leave both out, or use --recompute-granularity full",
        )
    if granularity == "full" and (method is None or "--recompute-num-layers" not in options):
        yield Violation(
            key="--recompute-granularity",
            value="full",
            rule="it needs --recompute-method and --recompute-num-layers",
            remedy="add --recompute-method uniform --recompute-num-layers 1",
        )
    layers = sizes.get("num_hidden_layers")
    uneven = KEYS["layers"] in options or config.first_layers or config.last_layers
    added = sum(f"--account-for-{part}-in-pipeline-split" in options for part in ("embedding", "loss"))
    if layers and not uneven and (int(layers) + added) % ((config.pp or 1) * (config.vpp or 1)):
        yield Violation(
            key="--num-layers",
            value=str(layers),
            rule=f"{config.pp} × {config.vpp} stages must divide it",
            remedy="say with --pipeline-model-parallel-layout which layers each has",
        )
    experts = sizes.get("num_local_experts")
    if layers:
        yield from divides(KEYS["ep"], config.ep or 1, int(experts or 0), "experts of --num-experts")
    given = script.variables.get(CONNECTIONS)
    fully = config.optimizer_sharding in ("zero2", "zero3") or "--use-megatron-fsdp" in options
    if fully and given == "1":
        yield Violation(
            key=CONNECTIONS,
            value="1",
            rule="Megatron-FSDP needs several queues",
            remedy=f"export {CONNECTIONS}=8",
        )
    needed = ((config.tp or 1) > 1 or (config.cp or 1) > 1) and not fully and not config.expert_overlap
    if needed and given != "1" and script.variables:
        yield Violation(
            key=CONNECTIONS,
            value=given or "",
            rule="tensor and context parallelism need one queue (before Blackwell)",
            remedy=f"export {CONNECTIONS}=1",
        )


def broken_group(config: TrainingConfig, key: str, given: int | None) -> Iterator[Violation]:
    """Megatron's rule of interleaved schedules: a group has as many micro-batches as there are ranks, or more."""
    ranks, count = config.pp or 1, config.micro_batches
    if config.schedule != "interleaved_1f1b" or count is None or count < ranks:
        return
    group = given or ranks
    if not ranks <= group <= count or 0 < count % group < ranks:
        yield Violation(
            key=key,
            value=str(group),
            rule=f"groups of the {count} micro-batches, the last one too, have at least {ranks}, one a pipeline rank",
            remedy=f"use {interleaved_group(ranks, count)}",
        )


def _other_group(options: Mapping[str, tuple[str, ...]], config: TrainingConfig, source: str) -> tuple[str, ...]:
    given, count = _number(options, GROUP, source), config.micro_batches
    if given is None or count is None or config.schedule != "interleaved_1f1b":
        return ()
    usual = interleaved_group(config.pp or 1, count)
    return () if given == usual else (f"{GROUP} {given} is timed as {usual}",)


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of Megatron-LM across fields."""
    pipeline, virtual = config.pp or 1, config.vpp or 1
    if (config.cp or 1) > 1 and config.sequence_length and config.sequence_length % (2 * (config.cp or 1)):
        yield Violation(
            key=KEYS["cp"],
            value=str(config.cp),
            rule=f"2 × it must divide the {config.sequence_length} tokens of a sample",
            remedy="use a smaller one, or another --seq-length",
        )
    if config.overlap_parameters and (config.optimizer_sharding == "none" or config.overlap_gradients is False):
        yield Violation(
            key=KEYS["overlap_parameters"],
            value="",
            remedy="add both, or leave it out",
            rule="it needs --overlap-grad-reduce and --use-distributed-optimizer",
        )
    if config.offload_optimizer and config.optimizer_sharding == "none":
        yield Violation(
            key=KEYS["offload_optimizer"],
            value="",
            rule="it needs --use-precision-aware-optimizer, and that --use-distributed-optimizer",
            remedy="add both, or leave it out",
        )
    if config.tensor_overlap and not config.sequence_parallel:
        yield Violation(
            key=KEYS["tensor_overlap"],
            value="",
            rule="it needs --sequence-parallel",
            remedy="add it, or leave this out",
        )
    if config.expert_overlap:
        why = ""
        if (config.ep or 1) == 1:
            why = "it needs --expert-model-parallel-size above 1"
        elif pipeline > 1 and virtual == 1:
            why = "with a pipeline it needs several chunks a rank"
        elif config.recompute == "full":
            why = "it does not go with full recomputation"
        elif config.precision not in (None, "bf16", "fp16", "fp8", "fp4"):
            why = "it needs --bf16 or --fp16"
        if why:
            yield Violation(key=KEYS["expert_overlap"], value="", rule=why, remedy="leave it out")
    if config.shard_size and config.dp and config.dp % config.shard_size:
        yield from divides(KEYS["shard_size"], config.dp // config.shard_size, config.dp, "data-parallel ranks")


def recognises(name: str, text: str) -> bool:
    """Whether a file holds arguments of Megatron-LM."""
    return "--tensor-model-parallel-size" in text or "--pipeline-model-parallel-size" in text


MEGATRON = ExchangeFormat(
    name="megatron",
    version=VERSION,
    suffix=".sh",
    keys=KEYS,
    write=write,
    read=read,
    recognises=recognises,
    rules=rules,
)
