"""A picture of a cluster under a plan: which device does what, node by node."""

from __future__ import annotations

import html

from planner.plans.pins import AXES_BY_PIN
from planner.plans.plan import Plan
from reports import page
from reports.page import PALETTE, Html
from simulator.hardware import Hardware
from simulator.topology import level_of_axis

MOST_NODES = 8
"""Of more nodes only the first ones and the last are drawn."""
MOST_STAGES = 8
"""Of more stages no list is written beneath."""
_ACROSS = 16
"""Devices of a row; a node of more takes several rows."""
_WIDE, _GAP, _NAMES, _LINE = 58, 4, 70, 20
_PIN_OF = {axis: pin for pin, axis in AXES_BY_PIN.items()}


def devices_figure(plan: Plan, hardware: Hardware) -> Html:
    """Draw the devices of a plan in their nodes, each with its place on every axis, and say what links an axis."""
    axes = [(axis.name, axis.size, plan.mesh.stride(place)) for place, axis in enumerate(plan.mesh.axes)]
    if plan.pipeline > 1:
        axes.insert(0, ("pipeline", plan.pipeline, plan.pipeline_stride))
    links = [
        f"{_PIN_OF[name]} ({size}) over {level_of_axis(hardware, size, stride)}"
        for name, size, stride in axes
        if size > 1
    ]
    caption = "A box is a device and shows its place on each axis"
    caption += "; its colour is the pipeline stage." if plan.pipeline > 1 else "."
    caption += f" Messages: {', '.join(links)}." if links else ""
    if hardware.members:
        caption += f" In order: {hardware.devices_text(plan.devices)}."
    svg = devices_svg(plan, hardware.devices_per_node)
    return page.picture(svg, title="Which device does what", caption=caption)


def devices_svg(plan: Plan, devices_per_node: int) -> str:
    """Draw the devices as SVG text, a node after the other, and beneath them the layers of each stage."""
    starts = list(range(0, plan.devices, devices_per_node))
    left_out = max(0, len(starts) - MOST_NODES)
    shown = [*starts[: MOST_NODES - 1], starts[-1]] if left_out else starts
    high = 12 + 14 * max(1, len(_places(plan, 0)))
    parts: list[str] = []
    top = 2
    for start in shown:
        if left_out and start == starts[-1]:
            parts.append(_text(0, top + 14, f"… {left_out} nodes more in the same order"))
            top += _LINE
        parts.append(_text(0, top + high // 2 + 4, f"node {start // devices_per_node}"))
        held = min(devices_per_node, plan.devices - start)
        for place in range(held):
            row, column = divmod(place, _ACROSS)
            corner = _NAMES + column * (_WIDE + _GAP), top + row * (high + _GAP)
            parts.append(_device(plan, start + place, corner, high))
        top += -(-held // _ACROSS) * (high + _GAP) + _GAP
    for stage in range(plan.pipeline if 1 < plan.pipeline <= MOST_STAGES else 0):
        parts.append(f'<rect x="{_NAMES}" y="{top + 4}" width="12" height="12" {_fill(stage)}/>')
        parts.append(_text(_NAMES + 20, top + 14, f"stage {stage}: {_layers(plan, stage)}"))
        top += _LINE
    width = max(_NAMES + min(devices_per_node, plan.devices, _ACROSS) * (_WIDE + _GAP), 480)
    return (
        f'<svg class="plot" role="img" viewBox="0 0 {width} {top}" style="min-width: {width}px; max-width: {width}px" '
        f'font-family="system-ui, sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def _places(plan: Plan, rank: int) -> list[tuple[str, int]]:
    """Place of a device on every axis that has more than one, by the names of the pins."""
    stage = [("pp", _stage(plan, rank))] if plan.pipeline > 1 else []
    coordinates = zip(plan.mesh.axes, plan.mesh.coordinates(rank), strict=True)
    return stage + [(_PIN_OF[axis.name], place) for axis, place in coordinates if axis.size > 1]


def _stage(plan: Plan, rank: int) -> int:
    return rank // plan.pipeline_stride % plan.pipeline if plan.pipeline > 1 else 0


def _device(plan: Plan, rank: int, corner: tuple[int, int], high: int) -> str:
    left, top = corner
    words = [f"{pin} {place}" for pin, place in _places(plan, rank)] or ["all"]
    texts = [_text(left + _WIDE // 2, top + 17 + 14 * row, word, middle=True) for row, word in enumerate(words)]
    box = f'<rect x="{left}" y="{top}" width="{_WIDE}" height="{high}" rx="4" {_fill(_stage(plan, rank))}/>'
    return f"<g><title>device {rank}</title>{box}{''.join(texts)}</g>"


def _fill(stage: int) -> str:
    color = PALETTE[stage % len(PALETTE)]
    return f'fill="{color}" fill-opacity="0.22" stroke="{color}"'


def _text(left: int, base: int, text: str, *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle" font-size="11"' if middle else ""
    return f'<text x="{left}" y="{base}" fill="currentColor"{anchor}>{html.escape(text)}</text>'


def _layers(plan: Plan, stage: int) -> str:
    held = [f"{one.first} to {one.last}" for one in plan.chunks if one.rank == stage]
    return ", ".join(held[:2]) + (f" and {len(held) - 2} chunks more" if len(held) > 2 else "")
