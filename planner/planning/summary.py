"""Plans at a glance: the cells of the first table that a reader sees, as text.

The command line, the Python interface and its HTML show the same cells.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from simulator.quantities import bytes_text, interval_text, percent_text, rate_text, seconds_text

if TYPE_CHECKING:
    from planner.planning.prediction import Prediction
    from planner.plans.plan import Plan
    from simulator.hardware import Hardware

Column = tuple[str, bool]
"""The heading of a column, and whether its cells are numbers."""
_COLUMNS, _LEAST = 80, 14
"""Characters of a line, and of the narrowest text in a table."""


def degrees_text(plan: Plan) -> str:
    """Return the choices of a plan by the names of their pins; those that change nothing are left out."""
    degrees = {
        "dp": plan.degree("data") * plan.degree("expert"), "tp": plan.degree("tensor"), "pp": plan.pipeline,
        "vpp": plan.virtual, "cp": plan.degree("context"), "ep": plan.expert_ranks,
    }  # fmt: skip
    said = [f"{name}={size}" for name, size in degrees.items() if size > 1 or name == "dp"]
    said += [f"micro_batch={plan.micro_batch}"]
    messages = {"once_a_node": plan.sent_once, "expert_overlap": plan.expert_overlap}
    words = [
        plan.schedule,
        plan.optimizer_sharding,
        recompute_text(plan),
        *(name for name, on in messages.items() if on),
    ]
    return " ".join([*said, *(word for word in words if word != "none")])


def recompute_text(plan: Plan) -> str:
    """Return how a plan recomputes: one mode, or how many of its layers have which."""
    if plan.recomputation != "mixed":
        if plan.recompute == "selective" and plan.recompute_modules:
            return f"recompute_modules={'-'.join(plan.recompute_modules)}"
        return "none" if plan.recompute == "none" else f"recompute={plan.recompute}"
    modes = plan.layer_modes()
    counts = [
        f"{mode} in {modes.count(mode)} of {len(modes)} layers" for mode in ("full", "selective") if mode in modes
    ]
    return f"recompute {', '.join(counts)}" if counts else f"recompute={plan.recompute} beside the layers"


def throughput(prediction: Prediction) -> tuple[float, str]:
    """Return the tokens a second of a network that reads tokens, else the samples."""
    if prediction.tokens_per_s is not None:
        return prediction.tokens_per_s, "tokens"
    return prediction.samples_per_s, "samples"


def columns(prediction: Prediction) -> tuple[Column, ...]:
    """Return the columns of `cells`."""
    return (
        ("plan", False),
        ("step\ntime", True),
        ("90 %\ninterval", True),
        (f"{throughput(prediction)[1]}\nper s", True),
        ("MFU", True),
        (f"memory, of\n{bytes_text(prediction.device_memory_bytes)}", True),
    )


def cells(plan: Plan, prediction: Prediction) -> tuple[str, ...]:
    """Return the row of one plan."""
    return (
        degrees_text(plan),
        seconds_text(prediction.step_time_s),
        interval_text(*prediction.interval_s),
        rate_text(throughput(prediction)[0], "").removesuffix(" /s"),
        percent_text(prediction.mfu),
        bytes_text(prediction.peak_memory_bytes),
    )


def heading(plan: Plan, hardware: Hardware) -> str:
    """Return what is trained, and on what."""
    length = f" × {plan.sequence_length} tokens" if plan.sequence_length else ""
    return (
        f"{plan.network} on {hardware.devices_text(plan.devices)} ({hardware.name}), global batch "
        f"{plan.global_batch}{length}, {plan.precision}, {plan.optimizer}"
    )


def certainty(plan: Plan, prediction: Prediction) -> str:
    """Return how sure plan and prediction are, in one line."""
    certificate = plan.certificate
    gap = f"gap {percent_text(certificate.gap)}"
    proof = {"optimal": f"optimal, {gap}", "bounded": f"near the optimum, {gap}"}
    found = proof.get(str(certificate.status), "heuristic: no bound")
    meaning = {
        "calibrated": "by measured runs of this hardware",
        "interpolated": "hardware and software were measured, not together",
        "extrapolated": "no measured run is near",
    }
    label = str(prediction.label)
    return f"{found}; prediction {label}" + (f" ({meaning[label]})" if label in meaning else "")


def plain_text_table(head: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Lay a table out as text; headings may have two lines, and the longest text wraps where 80 columns are full."""
    rows = list(rows)
    titles = [name.split("\n") for name, _ in head]
    depth = max(map(len, titles))
    lines = [[([""] * depth + title)[-depth:][line] for title in titles] for line in range(depth)]
    widths = [max(len(row[i]) for row in [*lines, *rows]) for i in range(len(head))]
    over = sum(widths) + 2 * (len(widths) - 1) - _COLUMNS
    texts = [place for place, (_, number) in enumerate(head) if not number]
    if over > 0 and texts:
        text = max(texts, key=widths.__getitem__)
        widths[text] = max(_LEAST, widths[text] - over)
        rows = [part for row in rows for part in _below(row, text, widths[text])]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, (_, number) in zip(row, widths, head, strict=True)
        ).rstrip()
        for row in [*lines, *rows]
    )


def _below(row: Sequence[str], text: int, width: int) -> Iterator[tuple[str, ...]]:
    """The lines of a row whose text is wrapped."""
    for number, part in enumerate(textwrap.wrap(row[text], width) or [""]):
        yield tuple(part if i == text else "" if number else cell for i, cell in enumerate(row))
