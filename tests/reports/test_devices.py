"""The picture of which device does what."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import meshwright as mw
from reports.devices import MOST_NODES, devices_figure, devices_svg


def boxes(svg: str) -> list[tuple[int, tuple[str, ...]]]:
    """Number of each device that is drawn, and the texts of its box."""
    found = re.findall(r"<g><title>device (\d+)</title>.*?</g>", svg)
    groups = re.findall(r"<g><title>device \d+</title>(.*?)</g>", svg)
    return [(int(n), tuple(re.findall(r">([^<]+)</text>", g))) for n, g in zip(found, groups, strict=True)]


@pytest.fixture(scope="module")
def best() -> mw.TrainingPlan:
    return mw.plan("zoo:gpt2-tiny", hardware="dgx-a100", devices=16, global_batch=64, tp=2, pp=2, top=1).best


def test_every_device_has_a_place_of_its_own(best: mw.TrainingPlan) -> None:
    drawn = boxes(devices_svg(best.plan, 8))
    assert [number for number, _ in drawn] == list(range(16))
    assert len({texts for _, texts in drawn}) == 16
    stages = Counter(texts[0] for _, texts in drawn)
    assert stages == {"pp 0": 8, "pp 1": 8}


def test_tensor_ranks_are_neighbours_in_their_group(best: mw.TrainingPlan) -> None:
    drawn = dict(boxes(devices_svg(best.plan, 8)))
    axis = next(i for i, axis in enumerate(best.plan.mesh.axes) if axis.name == "tensor")
    for number in range(16):
        assert f"tp {best.plan.mesh.coordinates(number)[axis]}" in drawn[number]


def test_of_many_nodes_the_first_and_the_last_are_drawn(best: mw.TrainingPlan) -> None:
    svg = devices_svg(best.plan, 1)
    assert [number for number, _ in boxes(svg)] == [*range(MOST_NODES - 1), 15]
    assert f"… {16 - MOST_NODES} nodes more" in svg


def test_the_caption_names_the_links(best: mw.TrainingPlan) -> None:
    """A pair of ranks in one node of eight meets over NVSwitch, one of two nodes over InfiniBand."""
    text = devices_figure(best.plan, best.hardware).text
    strides = {"pp": best.plan.pipeline_stride, "tp": best.plan.mesh.stride(1)}
    for pin, stride in strides.items():
        assert f"{pin} (2) over {'NVSwitch' if stride < 8 else 'InfiniBand'}" in text
    assert "stage 1: " in text
