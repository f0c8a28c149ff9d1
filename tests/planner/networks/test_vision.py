"""Networks of torchvision on images of a stated size."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.networks import load_network
from simulator.errors import InputError

pytest.importorskip("torchvision")


def test_images_have_the_side_that_is_stated() -> None:
    usual, small = load_network("tv:squeezenet1_1"), load_network("tv:squeezenet1_1@96")
    assert usual.inputs[0].shape == (3, 224, 224)
    assert small.inputs[0].shape == (3, 96, 96)
    assert small.spec == "tv:squeezenet1_1@96"
    assert sum(n.flops for n in small.capture().nodes) < 0.3 * sum(n.flops for n in usual.capture().nodes)


@pytest.mark.parametrize(("name", "side"), [("inception_v3", 299), ("efficientnet_b1", 240), ("mc3_18", 112)])
def test_torchvision_says_the_side_that_its_weights_take(name: str, side: int) -> None:
    assert load_network(f"tv:{name}").inputs[0].shape[-2:] == (side, side)


@pytest.mark.parametrize("side", ["", "0", "-3", "x", "96x96", "8193"])
def test_a_side_is_a_whole_number(side: str) -> None:
    with pytest.raises(InputError, match="side of images"):
        load_network(f"tv:squeezenet1_1@{side}")


def test_regions_are_read_as_roi_align_reads_them() -> None:
    from torchvision.ops import MultiScaleRoIAlign, roi_align

    from planner.networks.vision import region_features

    torch.manual_seed(0)
    level = torch.randn(2, 3, 12, 20, dtype=torch.float64)
    middle, sides = 0.8 * torch.rand(2, 5, 2, dtype=torch.float64) - 0.4, 0.2 + torch.rand(2, 5, 2, dtype=torch.float64)
    found = region_features([level], torch.cat((middle, sides), dim=-1), MultiScaleRoIAlign(["0"], 7, 2))
    corners = torch.cat((middle - sides / 2, middle + sides / 2), dim=-1)
    pixels = (corners + 1) / 2 * torch.tensor([20, 12, 20, 12])
    torch.testing.assert_close(found, roi_align(level, list(pixels), 7, sampling_ratio=2, aligned=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), [("ssdlite320_mobilenet_v3_large", 320), ("fcos_resnet50_fpn", 800)])
def test_a_network_that_detects_in_one_pass_is_captured(name: str, side: int) -> None:
    network = load_network(f"tv:{name}")
    assert [spec.shape for spec in network.inputs] == [(3, side, side), (), (4,)]
    graph = network.capture()
    assert all(parameter.gradient for parameter in graph.parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("fasterrcnn_mobilenet_v3_large_320_fpn", [(512,), (512, 4), (5,)]),
        ("maskrcnn_resnet50_fpn", [(512,), (512, 4), (5,), (128, 28, 28)]),
        ("keypointrcnn_resnet50_fpn", [(512,), (512, 4), (5,), (128, 17)]),
        ("raft_small", [(3, 224, 224), (2, 224, 224)]),
    ],
)
def test_networks_of_regions_and_of_motion_are_captured(name: str, given: list[tuple[int, ...]]) -> None:
    network = load_network(f"tv:{name}")
    assert [spec.shape for spec in network.inputs[1:]] == given
    graph = network.capture()
    assert all(parameter.gradient for parameter in graph.parameters)


def test_a_constructor_that_reads_widths_from_tensors_is_made() -> None:
    from planner.networks.vision import _make

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert any(True for _ in _make("tv", "regnet_x_400mf", None).parameters())
