"""Step times and memory of layered networks: how they answer to batch, devices, precision and the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.memory.device import training_memory
from planner.cost.stacks import USUAL_BALANCE, USUAL_REACH, LayeredCoefficients, LayeredParameters, Stack, family_of
from planner.cost.training_run import (
    NOVOGRAD,
    LayeredNetwork,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)
from planner.published.layered import lookup
from planner.published.layered.builder import NetworkBuilder
from planner.published.layered.prediction import parameter_columns, parameters_of, predict_layered, typical_batch
from planner.published.layered.table import LayeredTable, bytes_per_cycle, layered_times
from simulator.errors import InputError
from simulator.profiles import load_profile

NEUTRAL = LayeredParameters()
A2 = "ascend910b-atlas800t-a2"


def network(name: str = "resnet50") -> LayeredNetwork:
    found = lookup(name)
    assert found is not None
    return found


def run(
    devices: int = 8,
    batch: int = 128,
    name: str = "resnet50",
    profile: str = "dgx-a100",
    precision: str = "fp16",
    stack: Stack = Stack.EAGER,
) -> TrainingRun:
    setup = TrainingSetup(devices=devices, dp=devices, micro_batch=batch, precision=precision, stack=stack)
    return TrainingRun(network=network(name), setup=setup, hardware=load_profile(profile))


def seconds(wanted: TrainingRun, parameters: LayeredParameters = NEUTRAL) -> float:
    return predict_layered(wanted, parameters).step_time_s


def test_the_parts_add_up() -> None:
    estimate = predict_layered(run(devices=16), NEUTRAL)
    assert sum(estimate.breakdown.values()) == pytest.approx(estimate.step_time_s)
    assert all(part >= 0 for part in estimate.breakdown.values())


@settings(deadline=None, max_examples=15)
@given(
    batch=st.integers(1, 256),
    more=st.integers(1, 64),
    name=st.sampled_from(["resnet18", "mobilenet_v2_100", "vit_b_16"]),
)
def test_larger_batches_take_longer_but_not_more_per_sample(batch: int, more: int, name: str) -> None:
    small, large = seconds(run(batch=batch, name=name)), seconds(run(batch=batch + more, name=name))
    assert large >= small
    assert large / (batch + more) <= small / batch * (1 + 1e-9)


def test_more_devices_take_no_less_time_for_the_same_batch_of_each() -> None:
    times = [seconds(run(devices=devices)) for devices in (1, 8, 64)]
    assert times == sorted(times)


def test_single_precision_is_slower() -> None:
    half, tf32 = seconds(run(precision="fp16")), seconds(run(precision="tf32"))
    assert half < tf32
    assert seconds(run(profile="dgx1-v100", precision="fp32")) > 2 * seconds(run(profile="dgx1-v100"))


def test_float32_products_outside_convolutions_run_without_tf32() -> None:
    assert seconds(run(name="vit_b_16", precision="fp32")) > 2 * seconds(run(name="vit_b_16", precision="tf32"))
    assert seconds(run(precision="fp32")) < 1.2 * seconds(run(precision="tf32"))


def test_a_slow_host_decides() -> None:
    starved = replace(NEUTRAL, host_s={"image": 0.01})
    assert seconds(run(batch=128), starved) == pytest.approx(1.28, rel=0.05)
    assert seconds(run(batch=128, name="vit_b_16"), starved) < 1.0  # its samples are of another kind


def test_launches_bind_small_batches_only() -> None:
    slow = replace(NEUTRAL, launch_s=1e-4)
    assert seconds(run(batch=2), slow) > 2 * seconds(run(batch=2))
    assert seconds(run(batch=256), slow) < 1.1 * seconds(run(batch=256))


def test_fusion_casts_and_contention_show_in_time() -> None:
    base = seconds(run())
    assert seconds(run(), replace(NEUTRAL, unfused=0.3)) < base
    assert seconds(run(), replace(NEUTRAL, casts=1.0)) > base
    assert seconds(run(precision="tf32"), replace(NEUTRAL, casts=1.0)) > seconds(run(precision="tf32"))
    single = run(profile="dgx1-v100", precision="fp32")  # without tensor units nothing is copied
    assert seconds(single, replace(NEUTRAL, casts=1.0)) == seconds(single)
    assert seconds(run(), replace(NEUTRAL, contention=0.2)) > base


def test_images_lie_in_planes_for_tf32_whatever_the_software_does_for_half_precision() -> None:
    known = LayeredCoefficients(
        devices={"ampere": {"planes": 2.0}}, stacks={"mxnet": {"casts": 0.1, "unfused": 0.2}, "eager": {"casts": 3.0}}
    )
    half, tf32 = (parameters_of(known, run(stack=Stack.MXNET, precision=kind)) for kind in ("fp16", "tf32"))
    assert (half.casts, half.unfused) == (0.1, 0.2)
    assert (tf32.casts, tf32.unfused) == (2.0, NEUTRAL.unfused)
    assert parameters_of(known, run(stack=Stack.EAGER)).casts == 3.0


def test_what_a_step_does_beside_its_network_counts_by_weights_and_by_tensors() -> None:
    bare = replace(NEUTRAL, update_bytes=0.0, updates=0.0)
    wanted = run(name="vgg16", batch=1, devices=1)
    moved = network("vgg16").parameters * 100 / (wanted.hardware.memory_bandwidth * NEUTRAL.memory)
    assert seconds(wanted, replace(bare, update_bytes=100.0)) - seconds(wanted, bare) == pytest.approx(moved)
    launched = replace(bare, launch_s=1e-3)  # the host alone decides: 53 convolutions, 53 norms, one product
    small = run(devices=1, batch=1)
    longer = seconds(small, replace(launched, updates=5.0)) - seconds(small, launched)
    assert longer == pytest.approx(5 * 1e-3 * (53 + 2 * 53 + 1), rel=1e-3)


def test_dense_layers_are_turned_to_the_layout_of_matrix_units_and_convolutions_are_not() -> None:
    wanted = run(name="vgg16", batch=1, devices=1)
    dense = 25088 * 4096 + 4096 * 4096 + 4096 * 1000  # of 138 million weights
    moved = dense * 100 / (wanted.hardware.memory_bandwidth * NEUTRAL.memory)
    assert seconds(wanted, replace(NEUTRAL, layout_bytes=100.0)) - seconds(wanted) == pytest.approx(moved)
    turned = replace(NEUTRAL, turned=6.0)
    convolutions, tokens = (run(name=name) for name in ("resnet50", "vit_b_16"))
    assert seconds(tokens, turned) > 1.2 * seconds(tokens)
    assert seconds(convolutions, turned) < 1.01 * seconds(convolutions)  # its classifier alone


def test_batch_norms_stay_in_float32_where_software_keeps_them_there() -> None:
    def passes(name: str, stack: Stack, precision: str = "fp16") -> float:
        wanted = run(name=name, profile="ascend910-atlas800", stack=stack, precision=precision)
        parts = predict_layered(wanted, NEUTRAL).breakdown
        return parts["forward"] + parts["backward"]

    kept, cast = Stack.MINDSPORE_TOOLKIT, Stack.MINDSPORE
    assert passes("resnet50", kept) > 1.1 * passes("resnet50", cast)
    assert passes("resnet50", kept, "fp32") == passes("resnet50", cast, "fp32")
    assert passes("vit_b_16", kept) == passes("vit_b_16", cast)  # norms over channels


def test_products_of_an_ascend_910_read_and_write_half_precision_whatever_the_network() -> None:
    def parts(profile: str, precision: str) -> float:
        found = predict_layered(run(name="mnasnet_100", profile=profile, precision=precision, batch=256), NEUTRAL)
        return found.breakdown["forward"] + found.breakdown["backward"]

    first, later = (parts(name, "fp32") / parts(name, "fp16") for name in ("ascend910-atlas800", A2))
    assert 1.1 < first < 0.9 * later


def test_gradients_wait_until_all_devices_have_agreed_on_them() -> None:
    slow = replace(NEUTRAL, coordination_s=0.01)
    assert seconds(run(devices=8), slow) == pytest.approx(seconds(run(devices=8)) + 0.01)
    assert seconds(run(devices=1), slow) == seconds(run(devices=1))


def test_a_plain_graph_fuses_nothing() -> None:
    known = LayeredCoefficients(stacks={"tensorflow": {"unfused": 0.4}})
    compiled = run(stack=Stack.TENSORFLOW)
    plain = replace(compiled, setup=replace(compiled.setup, plain_graph=True))
    assert [parameters_of(known, one).unfused for one in (compiled, plain)] == [0.4, 1.0]


def test_convolutions_whose_kernels_nobody_tried_out_are_slower() -> None:
    known = LayeredCoefficients(devices={"ampere": {"products": 0.5, "untuned": 0.8}})
    tuned = run()
    untuned = replace(tuned, setup=replace(tuned.setup, untuned_convolutions=True))
    assert [parameters_of(known, one).products for one in (tuned, untuned)] == [0.5, 0.4]


def test_volumes_lie_in_planes_in_half_precision_too() -> None:
    known = LayeredCoefficients(
        devices={"volta": {"planes": 2.0}}, stacks={"tensorflow": {"casts": 0.1}, "eager": {"casts": 3.0}}
    )

    def casts(name: str, precision: str = "fp16", profile: str = "dgx1-v100", stack: Stack = Stack.TENSORFLOW) -> float:
        return parameters_of(known, run(name=name, precision=precision, profile=profile, stack=stack)).casts

    assert [casts(name) for name in ("vnet", "unet_3d_medical", "unet_medical", "resnet50")] == [3.0, 3.0, 0.1, 0.1]
    assert casts("vnet", "fp32") == 0.1  # without tensor units nothing is copied
    assert casts("vnet", stack=Stack.MXNET) == NEUTRAL.casts


def test_convolutions_whose_copies_have_no_room_do_without_tensor_units() -> None:
    def per_sample(batch: int, precision: str = "tf32", stack: Stack = Stack.TENSORFLOW) -> float:
        wanted = run(name="unet_3d_medical", batch=batch, precision=precision, devices=1, stack=stack)
        return predict_layered(wanted, NEUTRAL).breakdown["forward"] / batch

    # 32 channels of 128^3 voxels before and behind: 2 * 8 * 32 * 128^3 * 4 bytes are 4 GiB, beside the weights.
    assert per_sample(8) > 1.25 * per_sample(7)
    assert per_sample(8, precision="fp16") < 1.01 * per_sample(7, precision="fp16")
    assert per_sample(8, stack=Stack.EAGER) < 1.01 * per_sample(7, stack=Stack.EAGER)


def test_norms_of_volumes_are_single_operators_in_float32_where_nothing_fuses_them() -> None:
    def passes(name: str, precision: str, *, plain: bool) -> float:
        wanted = run(name=name, precision=precision, profile="dgx1-v100", stack=Stack.TENSORFLOW)
        parts = predict_layered(replace(wanted, setup=replace(wanted.setup, plain_graph=plain)), NEUTRAL).breakdown
        return parts["forward"] + parts["backward"]

    added = [passes("vnet", kind, plain=True) - passes("vnet", kind, plain=False) for kind in ("fp32", "fp16")]
    fused = 8 * (2 + NEUTRAL.unfused) / 3  # for 26 passes, whose elements have four bytes in half precision as well
    assert added[1] / added[0] == pytest.approx((26 - fused / 2) / (26 - fused))
    assert passes("resnet50", "fp16", plain=True) == passes("resnet50", "fp16", plain=False)


def test_host_and_device_take_turns_where_the_loss_is_read_before_the_backward_pass() -> None:
    hosted = replace(NEUTRAL, launch_s=1e-5, updates=0.0)
    wanted = run(name="tacotron2", devices=1, batch=128, precision="tf32")
    early = replace(wanted, setup=replace(wanted.setup, early_loss=True))
    together, in_turn = (predict_layered(one, hosted).breakdown for one in (wanted, early))
    assert (together["forward"], together["backward"]) == (in_turn["forward"], in_turn["backward"])
    assert in_turn["waiting for the host"] > together["waiting for the host"]
    quick = replace(hosted, launch_s=1e-9)
    assert seconds(early, quick) == pytest.approx(seconds(wanted, quick), rel=1e-6)


def test_what_runs_in_the_backward_pass_alone_takes_it_all() -> None:
    usual = network("tacotron2")
    both = replace(usual, layers=tuple(replace(layer, backward_only=False) for layer in usual.layers))
    late, spread = (predict_layered(replace(run(name="tacotron2"), network=one), NEUTRAL) for one in (usual, both))
    assert late.breakdown["forward"] < 0.9 * spread.breakdown["forward"]
    assert sum(late.breakdown[part] for part in ("forward", "backward")) == pytest.approx(
        sum(spread.breakdown[part] for part in ("forward", "backward"))
    )


def test_frozen_layers_take_their_forward_pass_alone() -> None:
    kept = network()
    frozen = replace(kept, layers=tuple(replace(layer, frozen=True) for layer in kept.layers))
    parts = [predict_layered(replace(run(), network=one), NEUTRAL).breakdown for one in (kept, frozen)]
    assert parts[0]["forward"] == parts[1]["forward"]
    assert parts[0]["backward"] > parts[1]["backward"] == 0


def test_few_rows_of_wide_products_fill_a_device_but_for_their_tiles() -> None:
    def rate(rows: int, columns: int) -> float:
        net = NetworkBuilder(4096, rows).linear(columns)
        one = replace(run(devices=1, batch=1), network=net.finish("one product"))
        table = LayeredTable([one])
        columns_of = parameter_columns(table, [replace(NEUTRAL, memory=1e6, kernel_s=0.0)])
        return sum(layer.flops for layer in net.layers) / float(layered_times(table, columns_of)["forward"][0])

    assert rate(256, 4096) > 4 * rate(256, 64)
    assert rate(4, 65536) < 0.2 * rate(256, 65536)


def test_matrix_products_have_a_rate_of_their_own() -> None:
    slow = replace(NEUTRAL, matmuls=0.5)
    assert seconds(run(name="vit_b_16"), slow) > 1.2 * seconds(run(name="vit_b_16"))
    assert seconds(run(), slow) < 1.01 * seconds(run())


def test_devices_of_a_host_share_its_cores_where_they_are_pooled() -> None:
    starved = replace(NEUTRAL, host_s={"image": 0.01})
    pooled = replace(starved, pooled=1.0)
    assert seconds(run(devices=1), pooled) == seconds(run(devices=1), starved)
    assert seconds(run(devices=8), pooled) == pytest.approx(8 * seconds(run(devices=8), starved), rel=0.05)


def test_mindspore_away_from_its_devices_has_coefficients_of_its_own() -> None:
    known = LayeredCoefficients(stacks={"mindspore": {"unfused": 0.2}, "mindspore_gpu": {"unfused": 0.6}})
    assert parameters_of(known, run(stack=Stack.MINDSPORE)).unfused == 0.6
    assert parameters_of(known, run(stack=Stack.MINDSPORE, profile="ascend910-atlas800")).unfused == 0.2


def test_memory_grows_with_the_batch() -> None:
    small, large = (training_memory(run(batch=batch)).fullest.components() for batch in (32, 64))
    assert large["activations"] == pytest.approx(2 * small["activations"], rel=0.05)
    assert large["parameters"] == small["parameters"]
    # Published peaks of ResNet-50 at 256 images in TF32 are about 28 GB.
    assert 18e9 < training_memory(run(batch=256, precision="tf32")).reserved_bytes < 32e9


def test_a_usual_batch_fits_and_is_a_power_of_two() -> None:
    small, large = load_profile("dgx1-v100"), load_profile("dgx-a100")
    assert typical_batch(network(), large, "fp16") == 256
    assert typical_batch(network("efficientnet_b4"), small, "fp32") < typical_batch(network(), small, "fp32")
    assert typical_batch(network("unet_3d_medical"), small, "fp32") >= 1


def test_coefficients_of_device_and_stack_are_combined() -> None:
    coefficients = LayeredCoefficients(
        devices={"ampere": {"products": 0.5, "memory": 0.8, "launch": 2.0}},
        stacks={
            "eager": {
                "products": 0.9,
                "memory": 0.5,
                "launch_s": 1e-5,
                "host_image_s": 1e-4,
                "host_mosaic_image_s": 1e-3,
            }
        },
    )
    half = parameters_of(coefficients, run())
    assert half.products == pytest.approx(0.45)
    assert half.memory == pytest.approx(0.4)
    assert half.launch_s == pytest.approx(2e-5)
    assert half.host_s == pytest.approx({"image": 1e-4, "mosaic image": 1e-3})
    assert parameters_of(coefficients, run(profile="dgx-h100")).products == pytest.approx(0.9 * NEUTRAL.products)
    assert parameters_of(LayeredCoefficients(), run()) == NEUTRAL


def test_boxes_of_mosaics_keep_an_ascend_910_and_no_later_device() -> None:
    coefficients = LayeredCoefficients(stacks={"mindspore_toolkit": {"boxes_s": 0.01}})

    def seconds(profile: str, name: str) -> tuple[float, float]:
        wanted = run(devices=1, profile=profile, name=name, batch=8, stack=Stack.MINDSPORE_TOOLKIT)
        plain = parameters_of(LayeredCoefficients(), wanted)
        known = parameters_of(coefficients, wanted)
        return predict_layered(wanted, known).step_time_s, predict_layered(wanted, plain).step_time_s

    first, without = seconds("ascend910-atlas800", "yolov5_s")
    assert first - without == pytest.approx(8 * 0.01, rel=0.01)  # no kernel hides it
    mixed, plain = seconds("ascend910-atlas800", "yolox_s")
    assert mixed - plain == pytest.approx(2 * 8 * 0.01, rel=0.01)  # two mosaics an image
    for profile, name in ((A2, "yolov5_s"), ("ascend910-atlas800", "resnet50")):
        first, without = seconds(profile, name)
        assert first == without


def test_convolutions_of_one_pixel_are_slow_where_no_graph_engine_compiles_them() -> None:
    coefficients = LayeredCoefficients(stacks={"mindspore_toolkit": {"gates_s": 1e-7}})

    def longer(name: str, profile: str = "ascend910-atlas800", *, engine: bool = False) -> float:
        wanted = run(devices=1, profile=profile, name=name, batch=64, stack=Stack.MINDSPORE_TOOLKIT)
        wanted = replace(wanted, setup=replace(wanted.setup, graph_engine=engine))
        plain = parameters_of(LayeredCoefficients(), wanted)
        return seconds(wanted, parameters_of(coefficients, wanted)) - seconds(wanted, plain)

    # 32, 96, 144, 144, ... expanded channels to a quarter of the block's inputs and back: 2 x (8,960 + 366 + ...)
    gates = network("efficientnet_b0").gates
    assert 2 * 8960 < gates < 2 * 8960 * 1.1
    assert longer("efficientnet_b0") == pytest.approx(64 * gates * 1e-7, rel=0.01)  # no kernel hides it
    assert longer("efficientnet_b0", engine=True) == longer("efficientnet_b0", A2) == longer("resnet50") == 0
    # SENet's gates are dense layers in the code, those of SKNet and ResNeSt convolutions.
    assert network("seresnet18").gates == 0 < network("skresnet18").gates < network("resnest50").gates


def test_the_more_operations_for_an_element_of_memory_the_fewer_are_reached() -> None:
    device = {"products": 0.4, "balance": 0.5}
    coefficients = LayeredCoefficients(devices=dict.fromkeys(("volta", "ampere", "hopper"), device))
    ampere, hopper = (parameters_of(coefficients, run(profile=name)).products for name in ("dgx-a100", "dgx-h100"))
    assert hopper < ampere
    wanted = run(profile="dgx-h100")
    share = (wanted.hardware.peak("float16") * 2 / wanted.hardware.memory_bandwidth / USUAL_BALANCE) ** -0.5
    assert hopper == pytest.approx(0.4 * share)
    # TF32 takes half the operations on elements of twice the size: the same share of its peak.
    tf32 = parameters_of(coefficients, run(profile="dgx-h100", precision="tf32")).products
    assert tf32 == pytest.approx(hopper)
    # Without tensor units memory keeps up easily.
    assert parameters_of(coefficients, run(profile="dgx1-v100", precision="fp32")).products > 1.5 * ampere


def test_no_device_exceeds_its_peak() -> None:
    device = {"products": 0.7, "balance": 0.5}
    coefficients = LayeredCoefficients(devices={"volta": device})
    assert parameters_of(coefficients, run(profile="dgx1-v100", precision="fp32")).products == 1.0


@pytest.mark.parametrize(
    ("profile", "clock"), [("dgx1-v100", 1.53e9), ("dgx-a100", 1.41e9), ("rtx-a6000", 1.8e9), ("h100-pcie", 1.755e9)]
)
def test_the_more_bytes_for_a_multiprocessor_the_less_of_the_bandwidth_is_reached(profile: str, clock: float) -> None:
    wanted = run(profile=profile, devices=1)
    hardware, family = wanted.hardware, family_of(wanted.hardware.device_name)
    each = hardware.memory_bandwidth / hardware.multiprocessors / clock
    assert bytes_per_cycle(hardware) == pytest.approx(each, rel=0.01)
    coefficients = LayeredCoefficients(devices={family: {"memory": 0.8, "reach": 0.5}})
    assert parameters_of(coefficients, wanted).memory == pytest.approx(0.8 * (USUAL_REACH / each) ** 0.5, rel=0.01)


def test_novograd_keeps_the_device_waiting_for_its_host() -> None:
    bare = replace(NEUTRAL, update_bytes=0.0, updates=6.0, launch_s=1e-3)
    wanted = run(devices=1, batch=1)
    waiting = replace(wanted, setup=replace(wanted.setup, optimizer=NOVOGRAD))
    parts = predict_layered(waiting, bare).breakdown
    tensors = 53 + 2 * 53 + 1
    assert parts["optimizer"] == pytest.approx(20 * tensors * 1e-3)
    assert predict_layered(wanted, bare).breakdown["optimizer"] == 0.0


def test_winograd_helps_3_by_3_convolutions_without_tensor_units() -> None:
    plain, fast = replace(NEUTRAL, winograd=1.0), replace(NEUTRAL, winograd=2.0)
    single = run(profile="dgx1-v100", precision="fp32", name="vgg16")
    assert seconds(single, fast) < 0.7 * seconds(single, plain)
    half = run(profile="dgx1-v100", name="vgg16")
    assert seconds(half, fast) == seconds(half, plain)
    # Products of matrices have no windows.
    tokens = run(profile="dgx1-v100", precision="fp32", name="vit_b_16")
    assert seconds(tokens, fast) == seconds(tokens, plain)


def test_devices_of_one_host_wait_for_its_launches() -> None:
    bound, crowded = replace(NEUTRAL, launch_s=1e-3), replace(NEUTRAL, launch_s=1e-3, crowding=0.2)
    assert seconds(run(devices=1, batch=2), crowded) == seconds(run(devices=1, batch=2), replace(bound, crowding=0.0))
    ratios = [
        seconds(run(devices=devices, batch=2), crowded)
        / seconds(run(devices=devices, batch=2), replace(bound, crowding=0.0))
        for devices in (2, 8, 16)
    ]
    assert ratios == pytest.approx([1.2, 1.6, 1.6], rel=0.01)  # eight devices share a host of a DGX A100


def test_vector_units_decide_where_norms_sum_over_channels() -> None:
    slow = replace(NEUTRAL, vector=5.0)
    assert seconds(run(name="vit_b_16"), slow) > 1.1 * seconds(run(name="vit_b_16"))
    assert seconds(run(name="bit_resnet50"), slow) > 1.1 * seconds(run(name="bit_resnet50"))
    assert seconds(run(), slow) == seconds(run())  # batch norms stand beside convolutions


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.tuples(st.sampled_from(["resnet18", "unet", "vit_b_16"]), st.integers(1, 64)), min_size=1, max_size=5)
)
def test_runs_are_timed_together_as_one_by_one(wanted: list[tuple[str, int]]) -> None:
    runs = [run(name=name, batch=batch, devices=1 + batch % 8) for name, batch in wanted]
    table = LayeredTable(runs)
    parts = layered_times(table, parameter_columns(table, [NEUTRAL] * len(runs)))
    assert sum(parts.values()) == pytest.approx([seconds(one) for one in runs], rel=1e-12)


def test_only_data_parallel_runs_of_layered_networks_are_predicted() -> None:
    cut = TrainingSetup(devices=8, dp=4, tp=2, micro_batch=8)
    with pytest.raises(InputError, match="set tp, pp and cp to 1"):
        predict_layered(replace(run(), setup=cut), NEUTRAL)
    shape = TransformerShape(
        name="gpt", layers=2, hidden=64, heads=4, key_value_heads=4, head_size=16, feed_forward=256,
        vocabulary=1000, sequence_length=128,
    )  # fmt: skip
    with pytest.raises(InputError, match="is a transformer"):
        predict_layered(replace(run(), network=shape), NEUTRAL)


def test_every_optimizer_of_a_layered_network_has_states() -> None:
    wanted = run(name="jasper", devices=1, batch=8)
    kept = [
        training_memory(replace(wanted, setup=replace(wanted.setup, optimizer=name))).reserved_bytes
        for name in (NOVOGRAD, "momentum", "adam")
    ]
    assert kept[0] == kept[1] < kept[2]
