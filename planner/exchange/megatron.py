"""Megatron-LM: arguments of a launch script, pipeline layout and environment variables.

Flags and rules are those of ``megatron/training/arguments.py`` of megatron-core 0.19.2. What a file does not say has
Megatron's defaults. A plan's ZeRO levels 2 and 3 are Megatron-FSDP's ``optim_grads`` and ``optim_grads_params``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written, divides
from planner.exchange.shell import Script, read_script
from planner.exchange.training_config import CHEAP_MODULES, TrainingConfig, uneven
from simulator.errors import InputError
from simulator.schedules.generators import interleaved_group

Options: TypeAlias = Mapping[str, tuple[str, ...]]
VERSION = "0.19"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
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
NUMBERS = (
    *("tp", "pp", "cp", "ep", "micro_batch", "global_batch", "sequence_length"),
    *("first_layers", "last_layers", "mtp_layers"),
)
FLAGS = (
    *("sequence_parallel", "tensor_overlap", "expert_overlap", "overlap_gradients", "overlap_parameters"),
    *("offload_optimizer", "offload_activations"),
)
NAMES: Mapping[str, str] = {
    **KEYS,
    "chunk_layers": "--num-layers-per-virtual-pipeline-stage",
    "group": "--microbatch-group-size-per-virtual-pipeline-stage",
    "dispatcher": "--moe-token-dispatcher-type",
    "backend": "--moe-flex-dispatcher-backend",
    "method": "--recompute-method",
    "fully": "--use-megatron-fsdp",
    "strategy": "--data-parallel-sharding-strategy",
    "checkpoints": "--ckpt-format",
    "precise": "--use-precision-aware-optimizer",
    "modules_on_host": "--offload-modules",
}
"""Names of fields, and of what else is said with them."""
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
        *(*NAMES.values(), *SIZES, "--recompute-activations", "--swiglu", "--normalization", "--moe-ffn-hidden-size"),
        *("--bf16", "--fp16", "--fp8-format", "--fp4-format", "--nproc_per_node", "--nproc-per-node", "--nnodes"),
        *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
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
    for name in NUMBERS:
        value = getattr(config, name)
        if value is not None and not (name in ("cp", "ep") and value == 1):
            found[KEYS[name]] = (str(value),)
    found |= {KEYS[name]: () for name in FLAGS if getattr(config, name)}
    if config.layers:
        found[KEYS["layers"]] = (write_layout(config.layers, config.mtp_layers or 0),)
    elif (config.vpp or 1) > 1:
        found[KEYS["vpp"]] = (str(config.vpp),)
    kinds: Mapping[str, dict[str, tuple[str, ...]]] = {
        "fp16": {"--fp16": ()},
        "bf16": {"--bf16": ()},
        "fp8": {"--bf16": (), "--fp8-format": ("hybrid",)},
        "fp4": {"--bf16": (), "--fp4-format": ("e2m1",)},
    }
    return {**found, **written_fields(config, NAMES), **kinds.get(config.precision or "", {})}


def written_fields(config: TrainingConfig, names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Write the options that Megatron-LM and Megatron-Bridge share, under their `names` in one of them.

    A flag has no value.
    """
    found: dict[str, tuple[str, ...]] = {}
    if config.schedule == "interleaved_1f1b" and (config.micro_batches or 0) % (config.pp or 1):
        found["group"] = (str(interleaved_group(config.pp or 1, config.micro_batches or 1)),)
    if (config.ep or 1) > 1:
        found["etp"] = (str(config.etp or config.tp or 1),)
        found["dispatcher"] = ("flex",) if config.tokens_once else ("alltoall",)
        if config.tokens_once:
            found["backend"] = ("deepep",)
    if (config.cp or 1) > 1:
        found["context_algorithm"] = ("a2a" if config.context_algorithm == "all_to_all" else "p2p",)
    if config.offload_optimizer:
        found["precise"] = ()  # whose code updates on the host
    if config.offload_activations:
        found["modules_on_host"] = OFFLOADED
    if config.optimizer_sharding == "zero1":
        found["optimizer_sharding"] = ()
    elif config.sharded:
        strategy = STRATEGIES[str(config.optimizer_sharding)]
        found |= {"fully": (), "strategy": (strategy,), "checkpoints": ("fsdp_dtensor",)}
    if config.sharded and config.shard_size and config.dp:
        found["shard_size"] = (str(config.dp // config.shard_size),)
    if config.recompute == "selective":
        modules = tuple(config.recompute_modules or CHEAP_MODULES[:1])
        found |= {"recompute": ("selective",), "recompute_modules": modules}
    elif config.recompute == "full":
        method, count = ("block", config.recompute_count) if config.recompute_count else ("uniform", 1)
        found |= {"recompute": ("full",), "method": (method,), "recompute_count": (str(count),)}
    return {names[name]: value for name, value in found.items()}


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


def script(config: TrainingConfig, title: str, options: Options, variables: Mapping[str, str]) -> str:
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


@dataclass(frozen=True, kw_only=True)
class Said:
    """The options of a file. `names` gives the option of each field; a flag that is set has no value."""

    values: Options
    names: Mapping[str, str]
    source: str
    equals: str = " "
    remedy: str = "write it as one, or set its variable"
    unset: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether a field is said."""
        return self.names[name] in self.values

    def text(self, name: str) -> str | None:
        """The value of a field, or of a flag by the flag itself."""
        values = self.values.get(self.names.get(name, name))
        return values[0] if values else None

    def number(self, name: str) -> int | None:
        """The same where it is a whole number; InputError where it is something else."""
        value = self.text(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) <= 12 and int(value)):
            key = self.names.get(name, name)
            rule = "is no whole number of at least 1"
            raise InputError(f"{self.source}: {key}{self.equals}{value!r} {rule}; {self.remedy}")
        return int(value)


def read(text: str, source: str) -> ReadConfig:
    """Read a launch script, or arguments on one line."""
    script = read_script(text)
    said = Said(values=script.options, names=NAMES, source=source)
    sizes, devices = _sizes(said), _devices(script)
    found = read_fields(said, devices, sizes, usual=dict.fromkeys(("tp", "pp", "cp", "ep"), 1))
    found |= {name: said.has(name) for name in FLAGS}
    if found["tp"] == 1:
        found["sequence_parallel"] = False  # Megatron-LM drops it
    kinds = {"--fp4-format": "fp4", "--fp8-format": "fp8", "--bf16": "bf16", "--fp16": "fp16"}
    found["precision"] = next((name for flag, name in kinds.items() if flag in said.values), "fp32")
    if found["global_batch"] is None and devices and found["micro_batch"]:
        found["global_batch"] = found["micro_batch"] * max(1, devices // (found["tp"] * found["pp"] * found["cp"]))
    config = TrainingConfig(**found, offload_parameters=False)
    notes: tuple[str, ...] = ()
    given, count = said.number("group"), config.micro_batches
    if given and count and config.schedule == "interleaved_1f1b":
        usual = interleaved_group(config.pp or 1, count)
        notes = () if given == usual else (f"{NAMES['group']} {given} is timed as {usual}",)
    return ReadConfig(
        config=config,
        sizes=sizes,
        not_read=tuple(name for name in said.values if name not in READ and name not in RENAMED),
        violations=(*_broken(script, said, config, sizes), *broken_group(config, said)),
        notes=notes,
    )


def read_fields(
    said: Said, devices: int | None, sizes: Mapping[str, int | str], *, usual: Mapping[str, int]
) -> dict[str, Any]:
    """Read the options that Megatron-LM and Megatron-Bridge share; `usual` has degrees that a file may leave out."""
    found: dict[str, Any] = {name: said.number(name) or usual.get(name) for name in NUMBERS}
    tensor, pipeline, context = (found[name] or 1 for name in ("tp", "pp", "cp"))
    virtual, layers = said.number("vpp") or 1, tuple[int, ...]()
    layout, per_chunk, number = said.text("layers"), said.number("chunk_layers"), sizes.get("num_hidden_layers")
    if layout is not None:
        layers, extra = read_layout(layout)
        virtual = max(1, len(layers) // pipeline)
        found["mtp_layers"] = extra or found["mtp_layers"]
    elif per_chunk and number:
        virtual = max(1, int(number) // pipeline // per_chunk)
    level = "zero1" if said.has("optimizer_sharding") else "none"
    if said.has("fully"):
        named = said.text("strategy") or "optim_grads_params"
        if named not in STRATEGIES.values():
            key, known = said.names["strategy"], ", ".join(STRATEGIES.values())
            raise InputError(f"{said.source}: {key}{said.equals}{named!r} is not one of {known}")
        level = next(name for name, word in STRATEGIES.items() if word == named)
    algorithm = "all_to_all" if said.text("context_algorithm") == "a2a" else "ring"
    instances, ranks = said.number("shard_size") or 1, (devices or 0) // (tensor * pipeline * context)
    mode = said.text("recompute") or ("selective" if "--recompute-activations" in said.values else "none")
    if mode not in ("none", "selective", "full"):
        key, known = said.names["recompute"], ", ".join(("selective", "full", *said.unset))
        raise InputError(f"{said.source}: {key}{said.equals}{mode!r} is not one of {known}")
    modules = said.values.get(said.names["recompute_modules"], CHEAP_MODULES[:1])
    count, counted = said.number("recompute_count"), mode == "full" and said.text("method") == "block"
    return found | {
        "devices": devices,
        "etp": said.number("etp") or (tensor if usual else None),
        "vpp": virtual,
        "layers": uneven(layers),
        "schedule": "none" if pipeline == virtual == 1 else "1f1b" if virtual == 1 else "interleaved_1f1b",
        "optimizer_sharding": level,
        "shard_size": max(1, ranks // instances) if level != "none" and instances > 1 and devices else 0,
        "recompute": mode,
        "recompute_modules": modules if mode == "selective" else (),
        "recompute_layers": (),
        "recompute_count": (count or 0) if counted else 0,
        "context_algorithm": "none" if found["cp"] == 1 else algorithm,
        "tokens_once": found["ep"] != 1 and said.text("dispatcher") == "flex",
    }


def _devices(script: Script) -> int | None:
    """Ranks of the job: a variable of that name, or processes a node times nodes."""
    for name in DEVICES:
        value = script.variables.get(name, "")
        if _COUNT.fullmatch(value) and int(value):
            return int(value)
    given = [script.options.get(flag) for flag in ("--nproc_per_node", "--nproc-per-node", "--nnodes")]
    each, nodes = " ".join((given[0] or given[1] or ())[:1]), " ".join((given[2] or ("1",))[:1])
    return int(each) * int(nodes) if _COUNT.fullmatch(each) and _COUNT.fullmatch(nodes) else None


def _sizes(said: Said) -> dict[str, int | str]:
    """Sizes of the network, by the keys of a Hugging Face configuration."""
    numbers = {key: said.number(flag) for flag, key in SIZES.items()}
    found: dict[str, int | str] = {key: value for key, value in numbers.items() if value is not None}
    if "hidden_size" not in found or "num_hidden_layers" not in found:
        return found
    gated = "--swiglu" in said.values
    found["model_type"] = "mixtral" if "num_local_experts" in found else "llama" if gated else "gpt2"
    found.setdefault("intermediate_size", 4 * int(found["hidden_size"]) * (2 if gated else 3) // 3)
    if "num_local_experts" in found and (width := said.number("--moe-ffn-hidden-size")):
        found["intermediate_size"] = width
    return found


def _broken(script: Script, said: Said, config: TrainingConfig, sizes: Mapping[str, int | str]) -> Iterator[Violation]:
    """Rules that show in the flags alone."""
    options = said.values
    for flag, remedy in RENAMED.items():
        if flag in options:
            yield Violation(flag, " ".join(options[flag]), f"Megatron-LM {VERSION} has no such flag", remedy)
    layout = said.text("layers")
    if layout is not None and config.layers == () and config.pp:
        pieces = len(read_layout(layout)[0])
        if pieces % config.pp:
            rule = f"its {pieces} pieces must be a multiple of {config.pp} pipeline ranks"
            yield Violation(KEYS["layers"], layout, rule, "give each its layers")
    if KEYS["layers"] in options and (KEYS["first_layers"] in options or KEYS["last_layers"] in options):
        rule = "it stands beside neither --decoder-first- nor --decoder-last-pipeline-num-layers"
        yield Violation(KEYS["layers"], options[KEYS["layers"]][0], rule, "leave these out")
    granularity, method = config.recompute, said.text("method")
    if granularity == "selective" and (method or "--recompute-num-layers" in options):
        rule = "selective recomputation has no method and no number of layers"
        yield Violation("--recompute-method", method or "", rule, "leave both out, or use --recompute-granularity full")
    if granularity == "full" and (method is None or "--recompute-num-layers" not in options):
        yield Violation(
            "--recompute-granularity",
            "full",
            "it needs --recompute-method and --recompute-num-layers",
            "add --recompute-method uniform --recompute-num-layers 1",
        )
    layers = sizes.get("num_hidden_layers")
    uneven = KEYS["layers"] in options or config.first_layers or config.last_layers
    added = sum(f"--account-for-{part}-in-pipeline-split" in options for part in ("embedding", "loss"))
    if layers and not uneven and (int(layers) + added) % ((config.pp or 1) * (config.vpp or 1)):
        remedy = "say with --pipeline-model-parallel-layout which layers each has"
        yield Violation("--num-layers", str(layers), f"{config.pp} × {config.vpp} stages must divide it", remedy)
    experts = sizes.get("num_local_experts")
    if layers:
        yield from divides(KEYS["ep"], config.ep or 1, int(experts or 0), "experts of --num-experts")
    given = script.variables.get(CONNECTIONS)
    fully = config.optimizer_sharding in ("zero2", "zero3") or "--use-megatron-fsdp" in options
    if fully and given == "1":
        yield Violation(CONNECTIONS, "1", "Megatron-FSDP needs several queues", f"export {CONNECTIONS}=8")
    needed = ((config.tp or 1) > 1 or (config.cp or 1) > 1) and not fully and not config.expert_overlap
    if needed and given != "1" and script.variables:
        rule, remedy = "tensor and context parallelism need one queue (before Blackwell)", f"export {CONNECTIONS}=1"
        yield Violation(CONNECTIONS, given or "", rule, remedy)


def broken_group(config: TrainingConfig, said: Said) -> Iterator[Violation]:
    """Megatron's rule of interleaved schedules: a group has as many micro-batches as there are ranks, or more."""
    ranks, count = config.pp or 1, config.micro_batches
    if config.schedule != "interleaved_1f1b" or count is None or count < ranks:
        return
    group = said.number("group") or ranks
    if not ranks <= group <= count or 0 < count % group < ranks:
        rule = f"groups of the {count} micro-batches, the last one too, have at least {ranks}, one a pipeline rank"
        yield Violation(said.names["group"], str(group), rule, f"use {interleaved_group(ranks, count)}")


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of Megatron-LM across fields."""
    pipeline, virtual = config.pp or 1, config.vpp or 1
    if (config.cp or 1) > 1 and config.sequence_length and config.sequence_length % (2 * (config.cp or 1)):
        rule = f"2 × it must divide the {config.sequence_length} tokens of a sample"
        yield Violation(KEYS["cp"], str(config.cp), rule, "use a smaller one, or another --seq-length")
    if config.overlap_parameters and (config.optimizer_sharding == "none" or config.overlap_gradients is False):
        rule, remedy = "it needs --overlap-grad-reduce and --use-distributed-optimizer", "add both, or leave it out"
        yield Violation(KEYS["overlap_parameters"], "", rule, remedy)
    if config.offload_optimizer and config.optimizer_sharding == "none":
        rule = "it needs --use-precision-aware-optimizer, and that --use-distributed-optimizer"
        yield Violation(KEYS["offload_optimizer"], "", rule, "add both, or leave it out")
    if config.tensor_overlap and not config.sequence_parallel:
        yield Violation(KEYS["tensor_overlap"], "", "it needs --sequence-parallel", "add it, or leave this out")
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
            yield Violation(KEYS["expert_overlap"], "", why, "leave it out")
    if config.shard_size and config.dp and config.dp % config.shard_size:
        yield from divides(KEYS["shard_size"], config.dp // config.shard_size, config.dp, "data-parallel ranks")


MEGATRON = ExchangeFormat(
    name="megatron",
    version=VERSION,
    suffix=".sh",
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: KEYS["tp"] in text or KEYS["pp"] in text,
    rules=rules,
)


MOST_LETTERS = 100_000
_GROUP = re.compile(r"\(([^()]*)\)\*0*([0-9]{1,9})")
_LETTER = re.compile(r"(.)\*0*([0-9]{1,9})")


def read_layout(text: str) -> tuple[tuple[int, ...], int]:
    """Layers of each piece, and layers that predict further tokens.

    Raises
    ------
    InputError
        The text is no layout.

    >>> read_layout("Et*2|(tt|)*2t,mL")
    ((2, 2, 2, 1), 1)
    """
    expanded = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _LETTER):
        size = sum(len(found[1]) * int(found[2]) for found in pattern.finditer(expanded))
        if size > MOST_LETTERS:
            raise InputError(f"pipeline layout {text!r:.60}: it has more than {MOST_LETTERS} letters; correct it")
        expanded = pattern.sub(lambda found: found[1] * int(found[2]), expanded)
    if not re.fullmatch(r"[EtmL|]+", expanded):
        raise InputError(f"pipeline layout {text!r:.60}: it holds more than E, t, m, L, | and repetitions; correct it")
    units = expanded.replace("|", "")
    if not re.fullmatch(r"Et*m*L", units):
        raise InputError(
            f"pipeline layout {text!r:.60}: units must be one E, then layers t, then m, then one L; correct it"
        )
    return tuple(piece.count("t") for piece in expanded.split("|")), units.count("m")


def write_layout(layers: Sequence[int], mtp_layers: int = 0) -> str:
    """The layout of pieces with so many layers.

    >>> write_layout((3, 2, 2, 2, 1), 1)
    'Et*3|(tt|)*3tmL'
    """
    last = len(layers) - 1
    pieces = [
        ("E" if place == 0 else "") + _repeated("t", count) + ("m" * mtp_layers + "L" if place == last else "|")
        for place, count in enumerate(layers)
    ]
    groups = [(piece, len(list(same))) for piece, same in groupby(pieces)]
    return "".join(piece * size if size == 1 else f"({piece})*{size}" for piece, size in groups)


def _repeated(letter: str, count: int) -> str:
    return letter * count if count < 3 else f"{letter}*{count}"
