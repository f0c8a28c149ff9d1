"""How many of the networks that libraries train are captured and planned.

    python -m benchmarks.network_coverage [transformers|timm|torchvision] [--sample N] [--seconds S] [--out PAGE.md]

Of transformers every model type that has a class with a loss is tried, with its default widths and two layers of each
kind; of timm and torchvision the first network of every module. Each is planned for eight H100 in a process of its
own, under a limit of processor time. Printed is one line a network; the page holds the counts and what failed. With
`--sample` every so-manieth network is tried, so that N remain, the same ones each time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.networks.loading import load_network
from planner.plans.request import PlanRequest
from simulator.errors import MeshwrightError
from simulator.whole_file import write_whole

HARDWARE, DEVICES, BATCH = "dgx-h100", 8, 64
LENGTH = 256
_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "depth"),
)
"""Settings of transformers that count layers."""
_SHORT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a network: ``planned``, ``infeasible``, ``refused``, ``internal error`` or ``limit``."""

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


def write_short_config(kind: str, folder: str) -> None:
    """Write the default configuration of a model type with two layers of each kind."""
    from transformers import AutoConfig, PreTrainedConfig

    def shorten(config: Any) -> None:
        for key in _DEPTHS:
            count = vars(config).get(key)
            if isinstance(count, int) and count > _SHORT:
                for name, value in list(vars(config).items()):
                    if isinstance(value, list) and len(value) == count:
                        setattr(config, name, value[:_SHORT])
                setattr(config, key, _SHORT)
        for part in vars(config).values():
            if isinstance(part, PreTrainedConfig):
                shorten(part)

    config = AutoConfig.for_model(kind)
    shorten(config)
    config.save_pretrained(folder)


def tried(name: str, source: str, seconds: int) -> Outcome:
    """Capture and plan one network in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "outcome.json"
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
                _write(place, name, source, folder)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        if not place.is_file():
            return Outcome(network=f"{source}:{name}", outcome="limit", reason=f"over {seconds} s", processor_s=seconds)
        return Outcome(**json.loads(place.read_text()))


def _write(place: Path, name: str, source: str, folder: str) -> None:
    os.environ["MESHWRIGHT_CACHE"] = "off"
    began = time.process_time()
    outcome, reason = _planned(name, source, folder)
    found = Outcome(
        network=f"{source}:{name}", outcome=outcome, reason=reason, processor_s=round(time.process_time() - began, 1)
    )
    write_whole(place, json.dumps(asdict(found)))


def _planned(name: str, source: str, folder: str) -> tuple[str, str]:
    from planner.planning.planning import plan_network

    try:
        if source == "hf":
            write_short_config(name, folder)
        spec = f"hf:{folder}" if source == "hf" else f"{source}:{name}"
        tokens = load_network(spec).sequence_length
        request = PlanRequest(
            network=spec, hardware=HARDWARE, devices=DEVICES, global_batch=BATCH, top=1,
            sequence_length=min(tokens, LENGTH) if tokens else None,
        )  # fmt: skip
        result = plan_network(request)
        first = next((m for m in result.messages if "no sharding rule" in m), "")
        return ("planned", first) if result.candidates else ("infeasible", result.infeasible)
    except MeshwrightError as error:
        return "refused", str(error).replace(folder, name)
    except Exception as error:  # noqa: BLE001 this is what is counted
        return "internal error", f"{type(error).__name__}: {error}"


def page(outcomes: Sequence[Outcome], tried_of: str) -> str:
    """The page of the counts and of what failed, by library."""
    lines = ["# Networks that are planned", "", tried_of, ""]
    lines += ["| library | tried | planned | refused | internal errors | over the limit |", "|---|---|---|---|---|---|"]
    by_source = {
        source: [o for o in outcomes if o.network.startswith(f"{source}:")] for _, source in LIBRARIES.values()
    }
    for library, (_, source) in LIBRARIES.items():
        counts = Counter(o.outcome for o in by_source[source])
        total = len(by_source[source])
        if total:
            planned = counts["planned"] + counts["infeasible"]
            failed = f"{counts['refused']} | {counts['internal error']} | {counts['limit']}"
            cells = f"{planned} ({planned / total:.0%}) | {failed}"
            lines.append(f"| {library} | {total} | {cells} |")
    lines += ["", "## What failed", "", "| network | outcome | reason |", "|---|---|---|"]
    failed = (o for o in outcomes if o.outcome not in ("planned", "infeasible"))
    lines += (f"| {o.network} | {o.outcome} | {_cell(o.reason)} |" for o in failed)
    lines += ["", "## Planned with an operator that has no rule", "", "| network | operator |", "|---|---|"]
    lines += (f"| {o.network} | {_cell(o.reason)} |" for o in outcomes if o.outcome == "planned" and o.reason)
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def outcomes_of(libraries: Sequence[str], sample: int | None, seconds: int) -> Iterator[Outcome]:
    """Try the networks of some libraries one after the other."""
    for library in libraries:
        names, source = LIBRARIES[library]
        found = names()
        step = max(len(found) // sample, 1) if sample else 1
        for name in found[::step][: sample or len(found)]:
            yield tried(name, source, seconds)


def main() -> None:
    """Try networks and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", help=", ".join(LIBRARIES))
    parser.add_argument("--sample", type=int, help="networks of each library")
    parser.add_argument("--seconds", type=int, default=120, help="processor time of one network")
    parser.add_argument("--out", default="", help="the page to write")
    given = parser.parse_args()
    outcomes = []
    for outcome in outcomes_of(given.libraries or list(LIBRARIES), given.sample, given.seconds):
        print(json.dumps(asdict(outcome)), flush=True)
        outcomes.append(outcome)
    if given.out:
        which = f"{given.sample} of each library, evenly over their lists" if given.sample else "All"
        write_whole(Path(given.out), page(outcomes, f"{which}, by `python -m benchmarks.network_coverage`."))
    sys.exit(any(outcome.outcome == "internal error" for outcome in outcomes))


if __name__ == "__main__":
    main()
