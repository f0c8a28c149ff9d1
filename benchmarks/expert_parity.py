"""Plans that experts ship, pinned, and what the search finds for the same network with the same software.

    python -m benchmarks.expert_parity RECIPES.csv [--every N] [--only NAME,…] [--seconds S]
                                       [--pinned] [--results FILE.jsonl] [--out PAGE.md]

Columns of the file are those of a Megatron-Bridge recipe: `recipe, model, task, gpus, hardware, precision`, degrees,
batches, recomputation, layout and storage; a degree that it leaves out is 1, unless it leaves out all and has those of
another recipe. Each is planned twice, each time in a process of its own under a limit of processor time: with every
choice that it makes pinned, and with none (not with ``--pinned``). Both are timed as Megatron-Bridge runs them and with
what it can run alone. Counted is how many recipes are expressible, fit, and are beaten. ``--every`` takes every Nth
recipe, ``--only`` those whose names contain one of some words. ``--results`` appends a line a recipe to a file and
leaves out those that it has.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.network_coverage import in_child
from planner.exchange.megatron import read_layout
from planner.exchange.pinned import pinned
from planner.exchange.training_config import TrainingConfig
from planner.planning.one_stage import Candidate
from planner.planning.planning import capture_for, plan_network
from planner.planning.shared_tables import SharedTables
from planner.planning.summary import degrees_text
from planner.plans.request import PlanRequest
from planner.published.pinned import ADAPTERS
from simulator.errors import InputError, MeshwrightError
from simulator.whole_file import write_whole

Recipe = Mapping[str, str]
SOFTWARE = "nemo:expandable_segments=true,forced_balance=true"
HARDWARE = {"h100": "dgx-h100", "b200": "dgx-b200", "b300": "dgx-b300", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72",
            "r100": "hgx-rubin"}  # fmt: skip
_LENGTH, _LLAMA_LENGTH, _POSITIONS = 4096, 8192, 131_072
_QWEN3 = {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
_LLAMA3 = {"num_key_value_heads": 8, "vocab_size": 128256}
_SMALL_QWEN3 = ("qwen3_moe", _QWEN3 | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                                       "moe_intermediate_size": 768})  # fmt: skip
_NANO = ("nemotron_h", {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "hidden_size": 2688,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "intermediate_size": 1856, "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712, "vocab_size": 131072,
})  # fmt: skip
NETWORKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama3_8b": ("llama", _LLAMA3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                                      "num_attention_heads": 32}),
    "llama3_70b": ("llama", _LLAMA3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                                       "num_attention_heads": 64}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v4_flash": ("deepseek_v4", {}),
    "glm51": ("glm_moe_dsa", {}),
    "gpt_oss_20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "nemotron_3_nano": _NANO,
    "nemotron_3_5_lightning": _NANO,
    "nemotronh_56b": ("nemotron_h", {
        "hybrid_override_pattern": "M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-", "hidden_size": 8192,
        "intermediate_size": 32768, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "mamba_num_heads": 256, "mamba_head_dim": 64, "ssm_state_size": 256, "n_groups": 8, "vocab_size": 131072,
    }),
    "qwen3_30b_a3b": _SMALL_QWEN3,
    "qwen3_vl_30b_a3b": _SMALL_QWEN3,
    "qwen3_vl_235b_a22b": ("qwen3_moe", _QWEN3 | {"hidden_size": 4096, "num_hidden_layers": 94,
                                                  "num_attention_heads": 64, "moe_intermediate_size": 1536}),
    "qwen3_next_80b_a3b": ("qwen3_next", {}),
    "qwen35_vl_35b_a3b": ("qwen3_5_moe_text", {}),
    "qwen35_vl_122b_a10b": ("qwen3_5_moe_text", {
        "hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 256, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "num_experts": 256,
        "num_experts_per_tok": 8, "linear_num_value_heads": 64, "linear_num_key_heads": 16,
    }),
}  # fmt: skip
"""Model type and settings of the public configurations; of networks with images the language part, which does most."""


def write_network(recipe: Recipe, folder: str) -> None:
    """Write a recipe's network as a ``config.json``, with the file of its adapters where it trains those."""
    from transformers import AutoConfig

    if recipe["model"] not in NETWORKS:
        raise InputError(f"no public configuration of {recipe['model']} is known; add it to NETWORKS")
    kind, settings = NETWORKS[recipe["model"]]
    AutoConfig.for_model(kind, **settings | {"max_position_embeddings": _POSITIONS}).save_pretrained(folder)
    if recipe["task"] in ("peft", "lora"):
        write_whole(Path(folder) / "adapter_config.json", json.dumps(ADAPTERS | {"target_modules": "all-linear"}))


_INHERITED = {
    "qwen3_30b_a3b": {"ep": "16", "etp": "1", "micro_batch": "1", "global_batch": "1024", "dispatcher": "flex"},
}
"""What recipes that name no degree take from another of their network (Megatron-Bridge, ``recipes/qwen/h100``)."""


def config_of(recipe: Recipe) -> TrainingConfig:
    """What a recipe says of its plan."""
    if not any(recipe[degree] for degree in ("tp", "pp", "cp", "ep")):
        recipe = dict(recipe) | _INHERITED.get(recipe["model"], {})

    def whole(name: str, default: int | None = 1) -> int | None:
        return int(recipe[name]) if recipe[name] else default

    def flag(name: str) -> bool:
        return recipe[name] == "True"

    pipeline, virtual, context = whole("pp"), whole("vpp"), whole("cp")
    layers: tuple[int, ...] = ()
    if recipe["layout"]:
        layers, _ = read_layout(recipe["layout"].replace(",", ""))
        virtual = len(layers) // (pipeline or 1)
    mode = recipe["recompute_granularity"] or "none"
    return TrainingConfig(
        devices=whole("gpus"), tp=whole("tp"), pp=pipeline, vpp=virtual, cp=context, ep=whole("ep"),
        etp=whole("etp", whole("tp")), layers=layers, first_layers=whole("first_stage_layers", None),
        last_layers=whole("last_stage_layers", None), mtp_layers=whole("mtp_layers", None),
        schedule="none" if pipeline == 1 else "1f1b" if virtual == 1 else "interleaved_1f1b",
        context_algorithm="none" if context == 1 else None,
        micro_batch=whole("micro_batch"), global_batch=whole("global_batch", None),
        sequence_length=whole("seq_len", _LLAMA_LENGTH if recipe["model"].startswith("llama3") else _LENGTH),
        precision={"f": "fp8", "n": "fp4"}.get(recipe["precision"][0], "bf16"),
        optimizer_sharding="zero3" if flag("megatron_fsdp") else "zero1", shard_size=0,
        sequence_parallel=flag("sp"), recompute=mode,
        recompute_modules=tuple(recipe["recompute_modules"].split()) if mode == "selective" else None,
        recompute_count=whole("recompute_num_layers", 0) if recipe["recompute_method"] == "block" else 0,
        offload_activations=flag("activation_offload") or flag("cpu_offload"),
        tokens_once=recipe["dispatcher"] == "flex", overlap_gradients=True, overlap_parameters=True,
    )  # fmt: skip


def _planned(recipe: Recipe, free: bool, folder: str) -> dict[str, Any]:
    """What is predicted of a recipe with its choices pinned, or of a free search."""
    said: dict[str, Any] = {"recipe": recipe["recipe"], "outcome": "planned"}
    try:
        write_network(recipe, folder)
        config = config_of(recipe)
        if recipe["hardware"] not in HARDWARE:
            raise InputError(f"no profile of {recipe['hardware']} is known; add one to hw_profiles/")
        base = PlanRequest(
            network=f"hf:{folder}", hardware=HARDWARE[recipe["hardware"]], devices=config.devices or 1,
            global_batch=config.global_batch, sequence_length=config.sequence_length, precision=config.precision,
            top=1, sensitivity=False, software=SOFTWARE,
        )  # fmt: skip
        shared = SharedTables(capture_for(base))
        if free:
            ours = plan_network(base, shared=shared)
            return _of("our", ours.candidates) or {"why": f"Free: {ours.infeasible}"}
        asked = pinned(config, base, shared.graph)
        said |= {"pins": asked.request.pins.named(), "notes": list(asked.notes)}
        theirs = plan_network(asked.request, shared=shared)
        said |= {"fits": bool(theirs.candidates), "why": theirs.infeasible, **_of("their", theirs.candidates)}
    except MeshwrightError as error:
        said |= {"outcome": "refused", "why": str(error).replace(Path(folder).name, recipe["model"])}
    except Exception as error:  # noqa: BLE001 this is what is counted
        said |= {"outcome": "internal error", "why": f"{type(error).__name__}: {error}"}
    return said


def _both(recipe: Recipe, seconds: int, *, pinned_alone: bool) -> dict[str, Any]:
    """Both predictions of a recipe, as far as the processor time goes."""
    one = in_child(partial(_planned, recipe, False), seconds)
    one = one or {"recipe": recipe["recipe"], "outcome": "limit", "why": f"over {seconds} s"}
    if one["outcome"] == "planned" and not pinned_alone:
        ours = in_child(partial(_planned, recipe, True), seconds) or {"why": f"Free: over {seconds} s"}
        one |= {"our_processor_s" if name == "processor_s" else name: value for name, value in ours.items()}
    return one


def _of(whose: str, candidates: Sequence[Candidate]) -> dict[str, Any]:
    if not candidates:
        return {}
    plan, prediction = candidates[0].plan, candidates[0].prediction
    found = {
        "step_s": prediction.step_time_s,
        "peak_gib": prediction.peak_memory_bytes / 2**30,
        "gap": plan.certificate.gap,
        "plan": degrees_text(plan),
        "breakdown": {name: float(value) for name, value in prediction.breakdown.items()},
    }
    return {f"{whose}_{key}": value for key, value in found.items()}


_FASTER = 0.9
"""Free plans below this part of a recipe's time say by what they are faster."""
_SAME = 1.001
"""Plans within this part of each other are as fast."""


def page(found: Sequence[Mapping[str, Any]], command: str, asked: int) -> str:
    """The page of the counts, of every recipe, and of what is refused; `asked` is how many recipes it was to be."""
    expressed = [one for one in found if one["outcome"] == "planned"]
    fit = [one for one in expressed if one["fits"]]
    both = [one for one in fit if "our_step_s" in one]
    won = [one for one in both if one["our_step_s"] <= _SAME * one["their_step_s"]]
    lines = [
        "# Plans of experts", "",
        f"Recipes of Megatron-Bridge, each with every choice that it makes pinned, and searched freely for the same "
        f"software: `{command}`. Of {asked} recipes {len(found)} were pinned, and {len(both)} were also searched.", "",
        "| what | recipes | of |", "|---|---|---|",
        f"| expressible | {len(expressed)} | {len(found)} |", f"| predicted to fit | {len(fit)} | {len(expressed)} |",
        f"| the free plan is as fast or faster | {len(won)} | {len(both)} |", "",
        "## Every recipe", "",
        "Seconds of a simulated step, GiB of peak memory. What a recipe fixes only nearly stands behind it.", "",
        "| recipe | pinned | GiB | free | GiB | free ÷ pinned | gap | free plan | nearly |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for one in fit:
        numbers, plan = f"{one['their_step_s']:.3f} | {one['their_peak_gib']:.0f}", ""
        if one in both:
            times, plan = one["our_step_s"] / one["their_step_s"], one["our_plan"]
            numbers += f" | {one['our_step_s']:.3f} | {one['our_peak_gib']:.0f} | {times:.2f} | {one['our_gap']:.1%}"
        else:
            numbers += " | | | |"
        lines.append(f"| {one['recipe']} | {numbers} | {plan} | {_cell('; '.join(one['notes']))} |")
    lines += ["", "## Free plans over 10 % faster: where the time goes", "", "| recipe | pinned plan | seconds saved |"]
    lines.append("|---|---|---|")
    for one in both:
        if one["our_step_s"] <= _FASTER * one["their_step_s"]:
            lines.append(f"| {one['recipe']} | {one['their_plan']} | {_saved(one)} |")
    lines += ["", "## Not planned, or not predicted to fit", "", "| recipe | outcome | why |", "|---|---|---|"]
    for one in found:
        if one not in fit:
            outcome = "does not fit" if one in expressed and one not in fit else one["outcome"]
            lines.append(f"| {one['recipe']} | {outcome} | {_cell(one['why'])} |")
    return "\n".join(lines) + "\n"


def _saved(one: Mapping[str, Any]) -> str:
    theirs, ours = one["their_breakdown"], one["our_breakdown"]
    saved = {name: theirs[name] - ours.get(name, 0.0) for name in theirs if name.endswith("_s")}
    ranked = sorted(saved.items(), key=lambda item: -abs(item[1]))
    return ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {value:.3f}" for name, value in ranked[:3] if value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def _named(recipe: Recipe, only: str) -> bool:
    return any(word in recipe["recipe"] for word in only.split(","))


def main() -> None:
    """Plan the recipes and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take every Nth recipe")
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--seconds", type=int, default=300, help="processor time of one search")
    parser.add_argument("--pinned", action="store_true", help="search nothing freely")
    parser.add_argument("--results", type=Path, help="JSON lines that are read and appended to")
    parser.add_argument("--known", action="store_true", help="plan nothing more: the page of the results as they are")
    parser.add_argument("--out", default="", help="the page to write")
    given = parser.parse_args()
    with given.recipes.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if _named(row, given.only)]
    known: dict[str, dict[str, Any]] = {}
    if given.results and given.results.is_file():
        known = {one["recipe"]: one for one in map(json.loads, given.results.read_text().splitlines())}
    found = []
    for row in rows[:: given.every]:
        one = known.get(row["recipe"])
        if one is None and given.known:
            continue
        if one is None:
            one = _both(row, given.seconds, pinned_alone=given.pinned)
            print(json.dumps(one), flush=True)
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(one) + "\n")
        found.append(one)
    if given.out:
        taken = f" --every {given.every}" if given.every > 1 else ""
        taken += f" --only {given.only}" if given.only else ""
        taken += " --pinned" if given.pinned else ""
        command = f"python -m benchmarks.expert_parity RECIPES.csv{taken}"
        write_whole(Path(given.out), page(found, command, len(rows[:: given.every])))


if __name__ == "__main__":
    main()
