"""How many of the networks that libraries train are captured and planned.

    python -m benchmarks.network_coverage [transformers|timm|torchvision] [--sample N [--seed N] | --only NAME,…]
                                          [--seconds S] [--results FILE.jsonl] [--out PAGE.md]

Of transformers every model type that has a class with a loss is tried, with its default widths and the fewest layers
that show each kind; of timm and torchvision the first network of every module. Each is planned for eight H100 in a
process of its own, under a limit of processor time. Printed is one line a network; the page holds the counts and what
failed. `--sample` draws N networks of each library at random, the same ones each time for a seed; `--only` names some.
`--results` appends the lines to a file, and leaves out the networks that it has: a run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from planner.networks.loading import load_network
from planner.plans.request import PlanRequest
from simulator.errors import MeshwrightError
from simulator.whole_file import write_whole

HARDWARE, DEVICES, BATCH = "dgx-h100", 8, 64
LENGTH, LENGTH_WITH_FEATURES, LONGEST = 256, 2048, 8192
"""Tokens of a sample, and where images or sounds take some of them, at first and where these take more."""
_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "depth"),
)
"""Settings of transformers that count layers."""
_SHORT = 2
_LONGEST = 8
"""Layers that are taken at most to show each kind."""
_HALF_TURNED = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [8, 12, 12],
}
_WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "glm4v": {"text_config": {"rope_parameters": _HALF_TURNED}},
    "glm46v": {"text_config": {"rope_parameters": _HALF_TURNED}},
    "blip-2": {"image_token_index": 50265},
    "instructblip": {"image_token_index": 50265},
    "instructblipvideo": {"video_token_index": 50265},
    "aria": {"vision_config": {"image_size": 490, "patch_size": 14}},
}
"""Settings of model types whose defaults fit no network: they are those of published ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a network: ``planned``, ``infeasible``, ``refused``, ``internal error`` or ``limit``.

    ``no default`` is a model type whose own default configuration transformers makes no module of: there is no network.
    """

    network: str
    outcome: str
    reason: str = ""
    processor_s: float = 0.0


def transformers_types() -> list[str]:
    """Model types of which a class has a loss."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from planner.networks.transformers_classes import trainable_class

    found = []
    for kind in sorted(CONFIG_MAPPING_NAMES):
        try:
            trainable_class(kind, AutoConfig.for_model(kind), None)
        except Exception:  # noqa: BLE001 a type without a loss, or one whose default is no whole configuration
            continue
        found.append(kind)
    return found


def timm_names() -> list[str]:
    """The first network of each module of timm."""
    import timm

    listed = (timm.list_models(module=module) for module in timm.list_modules())
    return [names[0] for names in listed if names]


def torchvision_names() -> list[str]:
    """The first network of each module of torchvision."""
    from torchvision import models

    by_module: dict[str, str] = {}
    for name in models.list_models():
        by_module.setdefault(models.get_model_builder(name).__module__, name)
    return list(by_module.values())


LIBRARIES: dict[str, tuple[Callable[[], list[str]], str]] = {
    "transformers": (transformers_types, "hf"),
    "timm": (timm_names, "timm"),
    "torchvision": (torchvision_names, "tv"),
}


def short_config(kind: str) -> Any:
    """The default configuration of a model type with the fewest layers that show each kind of layer.

    It is made from its settings, so that what transformers derives from the depth follows; where it refuses lists
    that it had derived itself, they are left to it, and where it refuses any, the configuration is left as it is.
    """
    from transformers import AutoConfig

    whole = whole_config(kind)
    for with_lists in (False, True):
        settings = _shorter(whole, with_lists)
        _merge(settings, _WHOLE.get(kind, {}))
        with suppress(Exception):  # transformers raises whatever it likes
            return AutoConfig.for_model(kind, **settings)
    return whole


def whole_config(kind: str) -> Any:
    """The default configuration of a model type."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **_WHOLE.get(kind, {}))


def _shorter(config: Any, with_lists: bool) -> dict[str, Any]:
    """Settings that make a configuration short: depths, lists of that length, and those of its parts."""
    from transformers import PreTrainedConfig

    found: dict[str, Any] = {}
    held = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    for key in _DEPTHS:
        count = held.get(key)
        if not isinstance(count, int) or count <= _SHORT:
            continue
        lists = {name: value for name, value in held.items() if isinstance(value, list) and len(value) == count}
        depth = max(map(_first_with_all, lists.values()), default=_SHORT)
        found[key] = depth = max(min(depth, _LONGEST), _SHORT)
        if with_lists or depth > _SHORT:
            found |= {name: value[:depth] for name, value in lists.items() if name not in ("stage_names",)}
    for name, part in held.items():
        if isinstance(part, PreTrainedConfig):
            shorter = _shorter(part, with_lists)
            counts = [held_in for key, held_in in vars(part).items() if key in shorter and isinstance(held_in, int)]
            settings = part.to_dict().items()
            kept = {key: value for key, value in settings if not isinstance(value, list) or len(value) not in counts}
            found[name] = {**kept, "model_type": part.model_type, **shorter}
    return found


def _first_with_all(kinds: list[Any]) -> int:
    """Length of the shortest beginning of a list that has each of its values; values that all differ are no kinds."""
    distinct = {str(kind) for kind in kinds}
    if len(distinct) == len(kinds):
        return _SHORT
    return max(next(n for n, kind in enumerate(kinds, 1) if str(kind) == value) for value in distinct)


def _merge(settings: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            _merge(settings[key], value)
        else:
            settings[key] = value


def write_short_config(kind: str, folder: str) -> None:
    """Write `short_config` of a model type as a ``config.json``."""
    short_config(kind).save_pretrained(folder)


def refused_by_transformers(kind: str) -> str:
    """Why transformers makes no module that trains of its own default configuration; "" if it does."""
    import torch

    from planner.networks.transformers_classes import said, trainable_class

    config = whole_config(kind)
    try:
        with torch.device("meta"):
            trainable_class(kind, config, None)._from_config(config)
    except Exception as error:  # noqa: BLE001 transformers raises whatever it likes
        return f"transformers makes no module that trains of its own default: {said(error)}"
    return ""


def tried(name: str, source: str, seconds: int) -> Outcome:
    """Capture and plan one network in a child process."""
    network = f"{source}:{name}"
    found = in_child(partial(_outcome, name, source), seconds)
    return Outcome(**found) if found else Outcome(network=network, outcome="limit", reason=f"over {seconds} s")


def in_child(make: Callable[[str], dict[str, Any]], seconds: int) -> dict[str, Any] | None:
    """What `make` returns of a folder of its own, as JSON has it, with the seconds of processor time that it took.

    It runs in a child process; None where that ends before, as it does after so many `seconds` of processor time.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "made.json"
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
                began = time.process_time()
                made = make(folder)
                write_whole(place, json.dumps({**made, "processor_s": round(time.process_time() - began, 1)}))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return dict(json.loads(place.read_text())) if place.is_file() else None


def _outcome(name: str, source: str, folder: str) -> dict[str, Any]:
    os.environ["MESHWRIGHT_CACHE"] = "off"
    outcome, reason = _planned(name, source, folder)
    return asdict(Outcome(network=f"{source}:{name}", outcome=outcome, reason=reason))


def _planned(name: str, source: str, folder: str) -> tuple[str, str]:
    if source != "hf":
        return _attempt(f"{source}:{name}", name, folder)
    found = "refused", ""
    # Where a short network is refused, the whole one is tried: what was left out may have been needed.
    for make, length in ((short_config, LENGTH_WITH_FEATURES), (whole_config, LONGEST)):
        config = make(name)
        config.save_pretrained(folder)
        found = _attempt(f"hf:{folder}", name, folder, length)
        if found[0] != "refused":
            return found
    why = refused_by_transformers(name)
    return ("no default", why) if why else found


def _attempt(spec: str, name: str, folder: str, length: int = LENGTH_WITH_FEATURES) -> tuple[str, str]:
    from planner.planning.planning import plan_network

    try:
        network = load_network(spec)
        alone = all("token" in one.kind for one in network.inputs)
        most = network.sequence_length
        tokens = most and (min(most, LENGTH) if alone else length if most >= LENGTH_WITH_FEATURES else most)
        request = PlanRequest(
            network=spec, hardware=HARDWARE, devices=DEVICES, global_batch=BATCH, top=1,
            sequence_length=tokens,
        )  # fmt: skip
        result = plan_network(request)
        first = next((m for m in result.messages if "no sharding rule" in m), "")
        return ("planned", first) if result.candidates else ("infeasible", result.infeasible)
    except MeshwrightError as error:
        return "refused", str(error).replace(folder, name).replace(Path(folder).name, name)
    except Exception as error:  # noqa: BLE001 this is what is counted
        return "internal error", f"{type(error).__name__}: {error}"


def page(outcomes: Sequence[Outcome], tried_of: str) -> str:
    """The page of the counts and of what failed, by library."""
    lines = ["# Networks that are planned", "", tried_of, ""]
    lines += [
        "| library | tried | no default | planned | refused | internal errors | over the limit |",
        "|---|---|---|---|---|---|---|",
    ]
    by_source = {
        source: [o for o in outcomes if o.network.startswith(f"{source}:")] for _, source in LIBRARIES.values()
    }
    for library, (_, source) in LIBRARIES.items():
        counts = Counter(o.outcome for o in by_source[source])
        total = len(by_source[source])
        if total:
            planned, none = counts["planned"] + counts["infeasible"], counts["no default"]
            failed = f"{counts['refused']} | {counts['internal error']} | {counts['limit']}"
            share = planned / max(total - none, 1)
            cells = f"{none} | {planned} ({share:.0%}) | {failed}"
            lines.append(f"| {library} | {total} | {cells} |")
    lines += ["", "## What failed", "", "| network | outcome | reason |", "|---|---|---|"]
    failed = (o for o in outcomes if o.outcome not in ("planned", "infeasible"))
    lines += (f"| {o.network} | {o.outcome} | {_cell(o.reason)} |" for o in failed)
    lines += ["", "## Planned with an operator that has no rule", "", "| network | operator |", "|---|---|"]
    lines += (f"| {o.network} | {_cell(o.reason)} |" for o in outcomes if o.outcome == "planned" and o.reason)
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def drawn(library: str, sample: int | None, seed: int = 0) -> list[str]:
    """Names of a library's networks, or of some of them, drawn the same way each time for a seed."""
    names = LIBRARIES[library][0]()
    return names if sample is None or sample >= len(names) else sorted(random.Random(seed).sample(names, sample))


def _known(results: Path | None) -> dict[str, Outcome]:
    if results is None or not results.is_file():
        return {}
    found = (Outcome(**json.loads(line)) for line in results.read_text().splitlines())
    return {outcome.network: outcome for outcome in found}


def outcomes_of(names: Mapping[str, Sequence[str]], seconds: int, results: Path | None = None) -> Iterator[Outcome]:
    """Try networks by library, one after the other, but for those that are in the results."""
    known = _known(results)
    for library in names:
        source = LIBRARIES[library][1]
        for name in names[library]:
            outcome = known.get(f"{source}:{name}")
            if outcome is None:
                outcome = tried(name, source, seconds)
                print(json.dumps(asdict(outcome)), flush=True)
                if results is not None:
                    with results.open("a") as file:
                        file.write(json.dumps(asdict(outcome)) + "\n")
            yield outcome


def main() -> None:
    """Try networks and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", help=", ".join(LIBRARIES))
    parser.add_argument("--sample", type=int, help="networks of each library")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--seconds", type=int, default=120, help="processor time of one network")
    parser.add_argument("--results", type=Path, help="JSON lines that are read and appended to")
    parser.add_argument("--out", default="", help="the page to write")
    given = parser.parse_args()
    libraries = given.libraries or list(LIBRARIES)
    only = given.only.split(",") if given.only else None
    names = {library: only or drawn(library, given.sample, given.seed) for library in libraries}
    outcomes = list(outcomes_of(names, given.seconds, given.results))
    if given.out:
        which = (
            "Those of a list" if only else f"{given.sample} of each library, drawn at random" if given.sample else "All"
        )
        write_whole(Path(given.out), page(outcomes, f"{which}, by `python -m benchmarks.network_coverage`."))
    sys.exit(any(outcome.outcome == "internal error" for outcome in outcomes))


if __name__ == "__main__":
    main()
