"""Networks of torchvision on images of a stated size."""

from __future__ import annotations

import pytest

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
