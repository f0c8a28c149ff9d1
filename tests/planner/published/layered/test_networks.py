"""Networks by name: published counts of parameters and multiplications, and the names they go by."""

from __future__ import annotations

import numpy as np
import pytest

from planner.published.layered import lookup, lookup_by_parameters, sequence
from planner.published.layered.builder import NetworkBuilder, divisible
from planner.published.layered.lookup import PUBLISHED, plain_name
from planner.published.layered.table import layer_arrays
from simulator.program import Kernel

# Millions of parameters as torchvision, timm, Ultralytics or the papers publish them.
PARAMETERS = {
    "resnet18": 11.690,
    "resnet34": 21.798,
    "resnet50": 25.557,
    "resnet101": 44.549,
    "resnet152": 60.193,
    "resnext50_32x4d": 25.029,
    "resnext101_64x4d": 83.455,
    "wide_resnet50_2": 68.883,
    "se_resnext101_32x4d": 48.955,
    "seresnet50": 28.088,
    "resnetv2_50": 25.549,
    "res2net50": 25.699,
    "res2net101": 45.207,
    "resnest50": 27.483,
    "vgg11": 132.863,
    "vgg16": 138.358,
    "vgg19": 143.667,
    "alexnet": 61.101,
    "densenet121": 7.979,
    "densenet169": 14.149,
    "densenet201": 20.014,
    "googlenet": 6.999,
    "inception_v3": 27.161,
    "inception_v4": 42.680,
    "xception": 22.856,
    "dpn92": 37.669,
    "hrnet_w32": 41.233,
    "mobilenet_v2_100": 3.505,
    "mobilenet_v3_small_100": 2.543,
    "mobilenet_v3_large_100": 5.483,
    "mnasnet_100": 4.383,
    "shufflenet_v2_x1_0": 2.279,
    "shufflenet_v2_x2_0": 7.394,
    "squeezenet1_0": 1.248,
    "squeezenet1_1": 1.235,
    "ghostnet_100": 5.183,
    "rexnet_10": 4.797,
    "efficientnet_b0": 5.289,
    "efficientnet_b4": 19.342,
    "efficientnet_v2_s": 21.458,
    "regnet_x_800mf": 7.260,
    "regnet_y_800mf": 6.264,
    "regnet_y_1_6gf": 11.202,
    "repvgg_a0": 9.109,
    "repvgg_b2": 89.022,
    "vit_b_16": 86.568,
    "vit_b_32": 88.224,
    "vit_l_32": 306.535,
    "swin_tiny": 28.288,
    "swinv2_tiny_window8": 28.350,
    "convnext_tiny": 28.589,
    "convnext_base": 88.591,
    "convnextv2_tiny": 28.635,
    "pvt_tiny": 13.229,
    "pvt_v2_b0": 3.667,
    "pvt_v2_b2": 25.363,
    "pit_ti": 4.847,
    "pit_b": 73.765,
    "poolformer_s12": 11.915,
    "crossvit_9": 8.553,
    "cait_s24": 46.92,
    "mobilevit_xx_small": 1.272,
    "mobilevit_small": 5.579,
    "yolov3": 61.949,
    "yolov5_s": 7.235,
    "yolov5_l": 46.564,
    "yolov8_s": 11.167,
    "yolov8_m": 25.903,
    "yolov8_x": 68.230,
    "yolox_s": 8.968,
    "yolox_l": 54.209,
    "mask_rcnn": 44.401,
    "unet": 31.031,
    "unet_medical": 34.512,
    "unet_industrial": 1.850,
    "efficientdet": 3.830,
    "jasper": 332.632,
    "quartznet": 18.924,
    "gnmt": 159.62,
    "tacotron2": 27.99,
    "waveglow": 268.0,
}
# Billions of multiplications and additions of one image.
MULTIPLICATIONS = {
    "resnet18": 1.81,
    "resnet50": 4.09,
    "resnet152": 11.51,
    "resnext50_32x4d": 4.23,
    "vgg16": 15.47,
    "mobilenet_v2_100": 0.301,
    "mobilenet_v3_large_100": 0.217,
    "densenet121": 2.83,
    "inception_v3": 5.71,
    "efficientnet_b0": 0.386,
    "regnet_x_800mf": 0.800,
    "vit_b_16": 17.56,
    "swin_tiny": 4.49,
    "convnext_tiny": 4.46,
    "yolov5_s": 8.2,
    "yolov8_s": 14.3,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_network_has_its_published_parameters(name: str) -> None:
    network = lookup(name)
    assert network is not None
    assert network.parameters == pytest.approx(PARAMETERS[name] * 1e6, rel=0.002)


@pytest.mark.parametrize("name", MULTIPLICATIONS)
def test_a_network_has_its_published_multiplications(name: str) -> None:
    network = lookup(name)
    assert network is not None
    products = sum(layer.flops * layer.count for layer in network.layers) / 2
    assert products == pytest.approx(MULTIPLICATIONS[name] * 1e9, rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "Classification/ConvNets/resnet50v1.5", "Classification/RN50v1.5", "RN50v1.5", "resnet50", "ResNet50-v1.5",
        "ConvNets resnet50", "ResNet-50",
    ],
)  # fmt: skip
def test_one_network_has_many_names(name: str) -> None:
    network, plain = lookup(name), lookup("resnet50")
    assert network is not None
    assert plain is not None
    assert network.layers == plain.layers


@pytest.mark.parametrize("name", ["", "V1", "large", "RetinaFace + Resnet50", "Wide-ResNet-50 C448 W4", "bigtransfer"])
def test_a_name_that_says_too_little_is_no_network(name: str) -> None:
    assert lookup(name) is None


def test_every_published_name_is_known() -> None:
    assert [name for name in PUBLISHED if lookup(name) is None] == []


def test_a_network_is_known_by_its_parameters() -> None:
    densenet = lookup_by_parameters(8.06e6)  # with running statistics, which frameworks count as well
    resnext = lookup_by_parameters(25.03e6)
    assert densenet is not None
    assert densenet.name == "densenet121"
    assert resnext is not None
    assert resnext.name == "resnext50_32x4d"
    group_normed, batch_normed = lookup_by_parameters(25.55e6), lookup_by_parameters(25.60e6)
    assert group_normed is not None
    assert group_normed.name == "bit_resnet50"  # its norms keep no statistics
    assert batch_normed is not None
    assert batch_normed.name == "resnetv2_50"
    assert lookup_by_parameters(7.0e6) is None
    assert lookup_by_parameters(19.9e6) is None


def test_a_batch_tells_networks_of_as_many_parameters_apart() -> None:
    efficientnet = lookup_by_parameters(5.33e6, 224, 128)
    assert efficientnet is not None
    assert efficientnet.name == "efficientnet_b0"
    assert lookup_by_parameters(5.33e6, 224, 256) is None  # NASNet, by MindCV's recipe


def test_the_smallest_yolox_take_small_images_and_all_of_them_two_mosaics() -> None:
    small, tiny, stated, five = lookup("yolox_s"), lookup("yolox_tiny"), lookup("yolox_n", 640), lookup("yolov5_s")
    assert small is not None
    assert tiny is not None
    assert stated is not None
    assert five is not None
    assert small.area == stated.area == pytest.approx(2 * five.area)
    assert tiny.area == pytest.approx(small.area * (416 / 640) ** 2)


def test_larger_images_take_more_work_but_no_more_weights() -> None:
    small, large = lookup("resnet50", 224), lookup("resnet50", 448)
    assert small is not None
    assert large is not None
    work = [sum(layer.flops for layer in network.layers) for network in (small, large)]
    assert work[1] == pytest.approx(4 * work[0], rel=0.01)
    assert large.parameters == small.parameters


def test_the_notation_follows_the_size() -> None:
    net = NetworkBuilder(3, 224, 224).unit(64, 7, 2).pool(3, 2)
    assert (net.channels, net.size) == (64, (56, 56))
    with net.branch():
        net.convolution(256, 1, 2)
        assert net.size == (28, 28)
    assert (net.channels, net.size) == (64, (56, 56))
    net.become(64, 100).convolution(32, 11, 2)
    assert net.size == (50,)
    assert NetworkBuilder(1, 8, 8, 8).transposed(4).size == (16, 16, 16)


def test_a_tensor_is_kept_once() -> None:
    net = NetworkBuilder(8, 4, 4)
    with net.branch():
        net.convolution(8, 1)
    net.convolution(8, 1)
    assert [layer.saved for layer in net.layers] == [128.0, 0.0]


def test_dropout_keeps_a_byte_an_element_and_no_tensor() -> None:
    net = NetworkBuilder(8, 4, 4).dropout()
    assert (net.layers[0].elements_moved, net.layers[0].saved) == (2.5 * 128, 128 / 2)
    assert NetworkBuilder(8, 4, 4).dropout().dropout().layers[1].saved == 128 / 2


def test_gradients_of_slices_are_as_large_as_the_whole() -> None:
    # A write of zeros, and two reads and a write for the sum, of all 7 x 10 for each slice.
    net = NetworkBuilder(10, 7).sliced(7)
    assert sum(2 * layer.elements_moved * layer.count for layer in net.layers) == 4 * 70 * 7


@pytest.mark.parametrize(
    "net", [NetworkBuilder(8, 4, 4).convolution(6, 1, bias=True), NetworkBuilder(8, 2, 2).transposed(6)]
)
def test_a_bias_is_read_and_written_and_its_gradient_read(net: NetworkBuilder) -> None:
    product, bias = net.layers
    assert (bias.elements_moved * 2, bias.saved) == (3 * 6 * 16, 0.0)
    assert net.parameters == product.weights + 6


@pytest.mark.parametrize(
    ("net", "fast"),
    [
        (NetworkBuilder(64, 56, 56).convolution(64, 3), True),
        (NetworkBuilder(64, 56, 56).convolution(64, 5), True),
        (NetworkBuilder(64, 1000).convolution(64, 25), True),
        (NetworkBuilder(64, 56, 56).convolution(64, 1), False),
        (NetworkBuilder(64, 56, 56).convolution(64, 3, 2), False),
        (NetworkBuilder(64, 16, 16, 16).convolution(64, 3), False),
        (NetworkBuilder(64, 1000).convolution(64, 25, groups=64), False),
        (NetworkBuilder(3, 56, 56).convolution(64, 5), False),
    ],
)
def test_windows_that_fast_algorithms_take(net: NetworkBuilder, fast: bool) -> None:
    assert layer_arrays(net.finish("one layer")).columns["winograd"].tolist() == [fast]


def test_batches_of_speech_are_padded_beyond_what_their_rates_count() -> None:
    sentences = lookup("gnmt")
    assert sentences is not None
    assert all(layer.m * layer.count * 2 > sentences.units for layer in sentences.layers if layer.n == 32320)


def test_v_net_keeps_the_width_of_what_it_concatenates() -> None:
    network = lookup("vnet")
    assert network is not None
    inner = [layer for layer in network.layers if layer.kernel is Kernel.CONVOLUTION and layer.n == layer.k / 27]
    assert [layer.n for layer in inner] == [32] * 3 + [64] * 3 + [128] * 3 + [128] * 3 + [64] * 3


def test_the_u_net_of_small_images_enlarges_by_copies_and_keeps_their_side() -> None:
    network = lookup("unet_industrial")
    assert network is not None
    enlarged = [layer for layer in network.layers if layer.kernel is Kernel.CONVOLUTION and layer.k == 4 * layer.n]
    assert [layer.n for layer in enlarged] == [64, 32, 16]  # the first halves its channels as well
    last = network.layers[-2]
    assert (last.m, last.n) == (512**2, 1)


def test_transposed_windows_of_u_net_are_the_examples_or_the_papers() -> None:
    examples, papers = lookup("unet_medical"), lookup("unet")
    assert examples is not None
    assert papers is not None
    places = {28 * 28, 52 * 52, 100 * 100, 196 * 196}
    for network, window in ((examples, 9), (papers, 4)):
        turned = [layer for layer in network.layers if layer.kernel is Kernel.CONVOLUTION and layer.m in places]
        assert [layer.n for layer in turned if layer.k in (1024, 512, 256, 128)] == [
            channels * window for channels in (512, 256, 128, 64)
        ]


def test_gradients_of_slices_have_no_forward_pass() -> None:
    network = lookup("tacotron2")
    assert network is not None
    later = [layer for layer in network.layers if layer.backward_only]
    assert [layer.count for layer in later] == [860, 860]
    assert later[0].elements_moved == 2 * 256 * 860


def test_waveglow_copies_its_spectrogram_for_each_layer_and_pads_the_gradients_of_halves() -> None:
    network = lookup("waveglow")
    assert network is not None
    copies = [layer for layer in network.layers if layer.kernel is Kernel.COPY]
    assert sum(layer.elements_moved == 2 * 640 * 1000 for layer in copies) == 12 * 8
    assert [layer.elements_moved for layer in copies if layer.backward_only] == [3.5 * 1024 * 1000] * 12 * 7
    assert copies[-1].weights == pytest.approx(4 * network.parameters)


def test_a_weighted_sum_scales_divides_and_stacks_each_tensor() -> None:
    net = NetworkBuilder(64, 8, 8).weighted_sum(3)
    assert net.layers[0].elements_moved == (3 * (2 + 2 + 2 + 1) + 1) * net.elements


def test_augmenting_goes_by_pixels_and_reading_does_not() -> None:
    areas = [network.area for side in (1, 224, 448) if (network := lookup("efficientnet_v2_s", side))]
    assert areas == pytest.approx([3 / 8, 1.0, 3 / 8 + 4 * 5 / 8], rel=1e-4)


def test_a_recurrent_layer_counts_its_weights_once() -> None:
    net = NetworkBuilder(10, 7).recurrent(20, bidirectional=True)
    assert (net.channels, net.size) == (40, (7,))
    assert net.parameters == 2 * 4 * (10 * 20 + 20 * 20 + 2 * 20)
    assert sum(layer.count for layer in net.layers if layer.kernel is Kernel.MATMUL) == 2 * (1 + 7)


def test_a_cell_takes_input_and_state_step_by_step_and_its_weights_once() -> None:
    net = NetworkBuilder(10, 7).cell(20)
    assert (net.channels, net.size) == (20, (7,))
    assert net.parameters == 4 * (10 * 20 + 20 * 20 + 20)
    products = [layer for layer in net.layers if layer.kernel is Kernel.MATMUL]
    assert [(layer.k, layer.n, layer.count) for layer in products] == [(30, 80, 7)]


def test_what_is_frozen_has_no_backward_pass_and_no_update() -> None:
    trained, frozen = NetworkBuilder(8, 16, 16), NetworkBuilder(8, 16, 16)
    frozen.frozen = True
    for net in (trained, frozen):
        net.unit(8).convolution(8, 3)
    assert [layer_arrays(net.finish("two layers")).tensors for net in (trained, frozen)] == [4, 0]
    assert all(layer_arrays(frozen.finish("two layers")).columns["frozen"])


def test_fixed_norms_read_and_write_once() -> None:
    net = NetworkBuilder(8, 16, 16)
    net.fixed_norms = True
    norm = net.norm().layers[0]
    assert (norm.kernel, norm.elements_moved, norm.saved, net.parameters) == (Kernel.ELEMENTWISE, 2 * 2048, 0, 16)


def test_mask_r_cnn_trains_neither_stem_nor_first_stage() -> None:
    network = lookup("maskrcnn")
    assert network is not None
    kept = [layer for layer in network.layers if layer.frozen and layer.kernel is Kernel.CONVOLUTION]
    assert len(kept) == 1 + 3 * 3 + 1
    gathered = [layer.elements_moved / 128 for layer in network.layers if layer.kernel is Kernel.EMBEDDING]
    assert gathered == [256 * 512 * 7**2, 256 * 128 * 14**2]


def test_a_smoothed_loss_is_float32() -> None:
    network = lookup("gnmt")
    assert network is not None
    assert sum(layer.elements_moved for layer in network.layers if layer.single) == 7 * 32 * 32320


@pytest.mark.parametrize(
    ("name", "anchors"), [("ssd_vgg16", 8732), ("ssd_mobilenetv2", 1917), ("ssd_resnet50_fpn", 51150)]
)
def test_mindspores_ssd_has_a_focal_loss_of_all_anchors_in_float32(name: str, anchors: int) -> None:
    network = lookup(name)
    assert network is not None
    assert sum(layer.elements_moved for layer in network.layers if layer.single) == 39 * anchors * 81


def test_names_are_made_plain() -> None:
    assert plain_name("Classification/ConvNets/SE-ResNeXt101_32x4d") == "se_resnext101_32x4d"
    assert plain_name("ResNet50-v1.5") == "resnet50_v1_5"


def test_channels_are_rounded_to_multiples_of_eight() -> None:
    assert [divisible(32 * 0.75), divisible(16 * 0.75), divisible(3.0)] == [24, 16, 8]


def test_random_batches_are_as_long_as_their_longest_utterance() -> None:
    """Drawn by the thousand from the same utterances; with the mean and percentiles that are published of these."""
    seconds = np.interp(np.linspace(0, 1, 20001), sequence.SHARES, sequence.SECONDS)
    stretched = np.concatenate([seconds / speed for speed in (0.9, 1.0, 1.1)])
    published = {0.05: 4.2, 0.1: 6.4, 0.25: 11.4, 0.5: 13.8, 0.75: 15.3, 0.9: 16.7, 0.95: 17.3, 0.99: 18.1}
    assert np.quantile(stretched, list(published)) == pytest.approx(list(published.values()), abs=0.06)
    assert seconds.mean() == pytest.approx(100.6 * 3600 / 28539, rel=0.005)
    random, some = np.random.default_rng(0), seconds[seconds <= sequence.LONGEST_S]
    for utterances in (24, 48):
        drawn = random.choice(some, (4000, utterances)) * random.uniform(*sequence.SPEEDS, (4000, utterances))
        frames = np.ceil(drawn.max(axis=1) * 100 / sequence.ALIGNED_FRAMES) * sequence.ALIGNED_FRAMES
        assert sequence.padded_frames(utterances) == pytest.approx(frames.mean(), rel=0.003)
        frames = frames.reshape(-1, 8)
        slowest = (2 * frames[:-1] / 3 + frames[1:] / 3).max(axis=1)
        assert sequence.padded_frames(utterances, 8) == pytest.approx(slowest.mean(), rel=0.003)
