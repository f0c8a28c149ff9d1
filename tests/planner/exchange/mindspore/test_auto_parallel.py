"""`AutoParallel` and `Pipeline`: every method sets what it says, wrong values are refused, and plans follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner import AutoParallel, ContextError, Pipeline
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.graph.chain import chain
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import Compute
from planner.lowering.stages import BACKWARD, FORWARD, lower_stages
from planner.networks import load_network
from planner.networks.marks import Marks, Swap, marks_of
from planner.planning.placing import PlacedMarks
from planner.plans.file import read_plan
from planner.plans.pins import Pins
from planner.sharding.cuts import OperatorCuts
from simulator.errors import InputError, NetworkError, UnsupportedError
from simulator.pipeline_operators import PLAIN

CLUSTER = "ascend910b-atlas800t-a2"
FACTORY = "py:tests.planner.exchange.mindspore.networks:make_double_recursion"
CONFIG = {
    "_backbone.layer1": 0,
    "_backbone.relu1": 0,
    "_backbone.layer2": 1,
    "_backbone.relu2": 1,
    "_backbone.layer3": 1,
}
BY_SIZE = {"mode": "size", "config": 8}
QUICK: dict[str, Any] = {"sensitivity": False, "top": 1}


def parallel(**options: Any) -> Any:
    return AutoParallel(Pipeline("zoo:mlp", 4), device_num=8, **options)


@pytest.mark.parametrize(
    ("act", "key", "value"),
    [
        (
            lambda p: p.hsdp(),
            "parallel_optimizer_config",
            {"parallel_optimizer_threshold": 64, "optimizer_level": "level1"},
        ),
        (
            lambda p: p.hsdp(shard_size=2, threshold=0, optimizer_level="level3"),
            "parallel_optimizer_config",
            {"parallel_optimizer_threshold": 0, "optimizer_level": "level3", "optimizer_weight_shard_size": 2},
        ),
        (lambda p: p.hsdp(), "enable_parallel_optimizer", True),
        (lambda p: p.pipeline(stages=2), "pipeline_stages", 2),
        (lambda p: setattr(p, "dataset_strategy", ((8, 1),)), "dataset_strategy", ((8, 1),)),
        (lambda p: setattr(p, "full_batch", True), "full_batch", True),
        (lambda p: setattr(p, "gradients_mean", True), "gradients_mean", True),
        (lambda p: p.enable_gradients_mean(), "gradients_mean", True),
        (lambda p: p.enable_fp32_communication(), "gradient_fp32_sync", True),
        (lambda p: p.disable_gradient_fp32_sync(), "gradient_fp32_sync", False),
        (lambda p: p.disable_loss_repeated_mean(), "loss_repeated_mean", False),
        (lambda p: p.comm_fusion({"allreduce": BY_SIZE}), "comm_fusion", {"allreduce": BY_SIZE}),
    ],
)
def test_methods_set_keys(act: Callable[[AutoParallel], None], key: str, value: Any) -> None:
    made = parallel()
    act(made)
    assert made.context.is_set(key)
    assert made.context.get(key) == value


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("semi_auto", ("semi_auto_parallel", "dynamic_programming")),
        ("sharding_propagation", ("auto_parallel", "sharding_propagation")),
        ("recursive_programming", ("auto_parallel", "recursive_programming")),
    ],
)
def test_modes(mode: str, expected: tuple[str, str]) -> None:
    made = parallel(parallel_mode=mode)
    assert (made.context.get("parallel_mode"), made.context.get("search_mode")) == expected


def test_devices_are_those_of_the_current_context() -> None:
    with planner.auto_parallel_context(parallel_mode="auto_parallel", device_num=4):
        assert AutoParallel("zoo:mlp").context.get("device_num") == 4
        assert AutoParallel("zoo:mlp", device_num=2).context.get("device_num") == 2


@pytest.mark.parametrize(
    ("scheduler", "interleave", "schedule"),
    [
        ("gpipe", False, "gpipe"),
        ("1f1b", False, "1f1b"),
        ("1f1b", True, "interleaved_1f1b"),
        ("interleaved_1f1b", False, "interleaved_1f1b"),
        ("zero_bubble_v", False, "zbv"),
    ],
)
def test_schedulers(scheduler: str, interleave: bool, schedule: str) -> None:
    made = parallel()
    made.pipeline(stages=2, scheduler=scheduler, interleave=interleave)
    assert made.pins() == Pins(schedule=schedule, micro_batches=4)
    assert made.get_pipeline_stages() == 2


WRONG: Any = Pipeline
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: parallel(parallel_mode="auto"), "parallel_mode='auto' is not one of semi_auto"),
    (lambda: parallel(parallel_mode=2), "parallel_mode=2 is not one of"),
    (lambda: AutoParallel("zoo:mlp", device_num=0), "device_num=0 is out of range"),
    (lambda: AutoParallel(7), "network 7 is of type int; give a specification"),
    (lambda: AutoParallel(lambda: None), "define the factory at the top of a file"),
    (lambda: AutoParallel(nn.Linear(2, 2)), "its inputs are missing; give example inputs"),
    (lambda: AutoParallel("zoo:mlp", inputs=(torch.ones(2),)), "inputs and loss go with a module"),
    (lambda: parallel().hsdp(shard_size=0), "shard_size=0 is out of range"),
    (lambda: parallel().hsdp(shard_size=True), "shard_size=True is of type bool"),
    (lambda: parallel().hsdp(threshold=-1), "threshold=-1 is out of range"),
    (lambda: parallel().hsdp(optimizer_level="level4"), "optimizer_level='level4' is not one of level1"),
    (lambda: parallel().pipeline(stages=0), "pipeline_stages=0 is out of range"),
    (lambda: parallel().pipeline(stages=3), "pipeline_stages=3 does not divide device_num=8; use 2 or 4"),
    (lambda: parallel().pipeline(stages=8), "every stage needs a micro-batch; use micro_size=8"),
    (lambda: parallel().pipeline(stages=2, scheduler="2f2b"), "scheduler='2f2b' is not one of gpipe"),
    (lambda: parallel().pipeline(stages=2, scheduler="gpipe", interleave=True), "chunks are interleaved in 1f1b"),
    (lambda: parallel().pipeline(stages=2, interleave=1), "interleave=1 is of type int"),
    (lambda: parallel().comm_fusion({"allgather": {"mode": "index"}}), "allgather.mode='index' is not one of"),
    (lambda: parallel().comm_fusion("auto"), "it must be a dict"),
    (lambda: setattr(parallel(), "full_batch", 1), "full_batch=1 is of type int"),
    (lambda: setattr(parallel(), "dataset_strategy", ((3, 1),)), "the parts must divide them"),
    (lambda: setattr(parallel(), "gradients_mean", "yes"), "gradients_mean='yes' is of type str"),
    (lambda: parallel().save_param_strategy_file(""), "the path of a JSON file is needed"),
    (lambda: parallel().save_param_strategy_file("x.ckpt"), "use a name that ends in .json"),
    (lambda: parallel().load_operator_strategy_file("x.yaml"), "use a name that ends in .json"),
    (lambda: parallel().load_param_strategy_file(3), "the path of a JSON file is needed"),
    (lambda: WRONG("zoo:mlp", 0), "micro_size=0 is out of range"),
    (lambda: WRONG("zoo:mlp", 4.0), "micro_size=4.0 is of type float"),
    (lambda: WRONG("zoo:mlp", 4, stage_config={}), "it must map names of modules to stages"),
    (lambda: WRONG("zoo:mlp", 4, stage_config=[("a", 1)]), "it must map names of modules to stages"),
    (lambda: WRONG("zoo:mlp", 4, stage_config={1: 0}), "for the name of a module"),
    (lambda: WRONG("zoo:mlp", 4, stage_config={"a": "0"}), "stage_config['a']='0' is of type str"),
    (lambda: WRONG("zoo:mlp", 4, stage_config={"a": -1}), "stage_config['a']=-1 is out of range"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "words"), BAD, ids=[words for _, words in BAD])
def test_wrong_values_are_refused(act: Callable[[], Any], words: str) -> None:
    with pytest.raises(ContextError) as error:
        act()
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda p: p.pipeline(stages=2, scheduler="seqpipe"), "micro-batches are not cut along the sequence"),
        (lambda p: p.pipeline(stages=2, output_broadcast=True), "outputs stay on the last stage"),
    ],
)
def test_what_is_not_supported_says_so(act: Callable[[AutoParallel], None], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        act(parallel())


def test_one_file_is_loaded() -> None:
    made = parallel()
    made.load_param_strategy_file("a.json")
    with pytest.raises(ContextError, match="load one of them"):
        made.load_operator_strategy_file("b.json")


def test_a_context_beside_is_refused() -> None:
    with pytest.raises(ContextError, match="has a context of its own"):
        planner.plan(parallel(), CLUSTER, planner.AutoParallelContext())


def test_a_pin_that_contradicts_is_refused() -> None:
    made = parallel(parallel_mode="dynamic_programming")
    with pytest.raises(ContextError, match="pin micro_batches=2 contradicts micro_batches=4 of AutoParallel"):
        planner.plan(made, CLUSTER, pins={"micro_batches": "2"})


@pytest.fixture(scope="module")
def staged() -> tuple[planner.Planned, OperatorGraph]:
    """The network of the double recursion case: two uneven stages, 1F1B, four micro-batches, recomputed ReLUs."""
    made = AutoParallel(Pipeline(FACTORY, 4, stage_config=CONFIG), "recursive_programming", device_num=8)
    made.hsdp()
    made.pipeline(stages=2, scheduler="1f1b")
    found = planner.plan(made, CLUSTER, **QUICK)
    return found, load_network(FACTORY).capture()


def test_the_case_of_the_reference_is_planned_as_it_says(staged: tuple[planner.Planned, OperatorGraph]) -> None:
    plan = staged[0].plan
    assert [(c.rank, c.first, c.last) for c in plan.chunks] == [
        (0, "module.layer1", "module.layer1"),
        (1, "module.layer2", "module.layer3"),
    ]
    assert (plan.pipeline, plan.schedule, plan.micro_batches) == (2, "1f1b", 4)
    assert (plan.optimizer_sharding, plan.sharding_threshold_bytes) == ("zero1", 64 * 1024)
    assert [(r.first, r.last, r.mode) for r in plan.recompute_ranges] == [
        ("module.layer1", "module.layer2", "selective")
    ]


def test_what_runs_has_the_stages_and_the_recomputed_operators(staged: tuple[planner.Planned, OperatorGraph]) -> None:
    plan, graph = staged[0].plan, staged[1]
    lowered = lower_stages(plan, checked_graph(plan, graph))
    run = [
        {
            phase: [lowered.graph.nodes[step.node].name for step in one.instructions if isinstance(step, Compute)]
            for phase, one in ((FORWARD, stage.passes[FORWARD, PLAIN]), (BACKWARD, stage.passes[BACKWARD, PLAIN]))
        }
        for stage in lowered.stages
    ]
    assert "module.relu1/relu" in run[0][FORWARD]
    assert "module.relu1/relu" in run[0][BACKWARD]
    assert "module.relu2/relu" in run[1][BACKWARD]
    assert "module.layer1/addmm" not in run[0][BACKWARD]
    assert not any("layer2" in name for name in run[0][FORWARD])


def test_a_saved_plan_is_loaded_again(tmp_path: Path) -> None:
    first = AutoParallel("zoo:mlp", "dynamic_programming", device_num=2)
    first.save_param_strategy_file(str(tmp_path / "plan.json"))
    first.save_operator_strategy_file(str(tmp_path / "operators.json"))
    found = planner.plan(first, CLUSTER, **QUICK)
    second = AutoParallel("zoo:mlp", "dynamic_programming", device_num=2)
    second.load_param_strategy_file(str(tmp_path / "plan.json"))
    again = planner.plan(second, CLUSTER)
    assert again.result is None
    assert again.plan == found.plan == read_plan(tmp_path / "plan.json")
    assert "parallel_strategy_item" in (tmp_path / "operators.json").read_text()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("saved") / "plan.json")
    made = AutoParallel(
        Pipeline("zoo:mlp", 4, stage_config={"layers.0": 0, "layers.1": 1}), "dynamic_programming", device_num=2
    )
    made.save_param_strategy_file(path)
    planner.plan(made, CLUSTER, **QUICK)
    return path


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        (Marks(stages={"layers.0": 0, "layers.1": 0, "layers.2": 1}), "cuts the network behind layers.0, and marks"),
        (Marks(recompute={"": True}), "computes again nothing"),
        (Marks(fusion={"layers.1": 1}), "fuses other gradients"),
        (
            Marks(cuts={"layers.1": OperatorCuts(inputs=((1, 1), (2, 1)))}),
            "needs 2 devices, and a stage has 1",
        ),
    ],
)
def test_a_file_that_does_otherwise_than_is_marked_is_refused(saved: str, marks: Marks, words: str) -> None:
    context = planner.AutoParallelContext(parallel_mode="auto_parallel", device_num=2, strategy_ckpt_load_file=saved)
    planner.plan("zoo:mlp", CLUSTER, context, marks=Marks(stages={"layers.0": 0, "layers.1": 1, "layers.2": 1}))
    with pytest.raises(ContextError, match=words):
        planner.plan("zoo:mlp", CLUSTER, context, marks=marks)


def test_a_module_of_this_program_is_planned_and_stays_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).eval()
    planner.recompute(module[1])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    made = AutoParallel(
        module, "dynamic_programming", device_num=2, inputs=(torch.ones(8, 16), torch.ones(8, 1)), loss=nn.L1Loss()
    )
    found = planner.plan(made, CLUSTER, **QUICK)
    assert found.plan.recompute == "selective"
    assert not module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    with pytest.raises(NetworkError, match="plan it from a factory"):
        load_network(found.plan.network)


# Stages


def placed(stages: dict[str, int], network: str = "zoo:mlp") -> PlacedMarks:
    graph = load_network(network).capture()
    return PlacedMarks(Marks(stages=stages), graph, chain(graph))


@pytest.mark.parametrize(
    ("stages", "cuts"),
    [
        ({"layers.0": 0, "layers.1": 1, "layers.2": 1}, (range(1, 2),)),
        ({"layers.0": 0, "layers.1": 0, "layers.2": 1}, (range(2, 3),)),
        ({"layers.0": 0, "layers.2": 1}, (range(1, 3),)),
        ({"layers.0": 0, "layers.1": 1, "layers.2": 2}, (range(1, 2), range(2, 3))),
    ],
)
def test_stages_leave_the_cuts_between_them(stages: dict[str, int], cuts: tuple[range, ...]) -> None:
    assert placed(stages).cuts() == cuts


def test_stages_of_folded_layers() -> None:
    stages = {"token_embedding": 0, **{f"blocks.{n}": int(n > 2) for n in range(12)}, "norm": 1}
    found = placed(stages, "zoo:gpt2")
    assert found.cuts() == (range(4, 5),)
    assert found.names[3] == "blocks.2"


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({"layer1": 0}, "names 'layer1', which is no module of"),
        ({"layers.0": 0, "layers.1": 2}, "stage 1 is not"),
        ({"layers.0": 1, "layers.1": 0}, "puts 'layers.1' on stage 0 behind 'layers.0' on stage 1"),
        ({"layers.1": 1}, "stage 0 is not"),
    ],
)
def test_impossible_stages_are_refused(stages: dict[str, int], words: str) -> None:
    with pytest.raises(ContextError) as error:
        placed(stages).cuts()
    assert words in str(error.value)


def test_stages_that_no_cut_parts_are_refused() -> None:
    with pytest.raises(ContextError, match="stage_config cuts unit 'blocks.0'"):
        placed({"blocks.0.attention": 0, "blocks.0.expand": 1}, "zoo:gpt2").cuts()


def test_marked_stages_and_other_counts_contradict() -> None:
    network = Pipeline("zoo:mlp", 4, stage_config={"layers.0": 0, "layers.1": 1})
    made = AutoParallel(network, "dynamic_programming", device_num=8)
    made.pipeline(stages=4)
    with pytest.raises(InputError, match="stage_config uses 2 stages, and 4 are asked for"):
        planner.plan(made, CLUSTER)
    made.pipeline(stages=2, scheduler="interleaved_1f1b")
    with pytest.raises(InputError, match="gives each rank several pieces of the network, stage_config one"):
        planner.plan(made, CLUSTER)


# Recomputation


def modes(again: dict[str, bool], network: str = "zoo:gpt2") -> list[int]:
    graph = load_network(network).capture()
    return list(PlacedMarks(Marks(recompute=again), graph, chain(graph)).modes())


def test_single_layers_compute_again() -> None:
    assert modes({"blocks.3": True, "blocks.7": True}) == [0, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert modes({"blocks": True, "blocks.3": False}) == [0, 2, 2, 2, 0, *[2] * 8, 0]


def test_a_part_of_a_unit_alone_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="marks a part of unit 'blocks.2'.*mark .* as well"):
        modes({"blocks.2.expand": True})


def test_modules_have_activations_on_the_host() -> None:
    away = {"blocks.1": Swap(prefetch=2), "blocks.2.expand": Swap()}
    graph = load_network("zoo:gpt2").capture()
    placed = PlacedMarks(Marks(offload=away), graph, chain(graph))
    found = {name: swap for name, swap in zip(placed.names, placed.swaps(), strict=True) if swap is not None}
    assert found == {"blocks.1": Swap(prefetch=2), "blocks.2": Swap(operators=(".expand/addmm",))}
    network = nn.Sequential(planner.offload(nn.Linear(2, 2), 3), nn.ReLU())
    assert marks_of(network).offload == {"0": Swap(prefetch=3)}
    for wrong in (0, "soon", True):
        with pytest.raises(ContextError, match="backward_prefetch"):
            planner.offload(nn.ReLU(), wrong)


def test_recomputed_layers_are_those_of_the_plan() -> None:
    context = planner.AutoParallelContext(parallel_mode="auto_parallel", device_num=2)
    found = planner.plan(
        "zoo:gpt2-tiny", CLUSTER, context, marks=Marks(recompute={"blocks.1": True, "blocks.2": True}), **QUICK
    ).plan
    assert [(r.first, r.last, r.mode) for r in found.recompute_ranges] == [("blocks.1", "blocks.2", "full")]
    with pytest.raises(InputError, match="pin recompute=full and recompute.. of 'blocks.1' both say"):
        planner.plan(
            "zoo:gpt2-tiny", CLUSTER, context, marks=Marks(recompute={"blocks.1": True}), pins={"recompute": "full"}
        )


@pytest.mark.slow
def test_the_case_of_the_reference_is_executed() -> None:
    made = AutoParallel(Pipeline(FACTORY, 4, stage_config=CONFIG), "recursive_programming", device_num=4)
    made.hsdp()
    made.pipeline(stages=2, scheduler="1f1b")
    found = planner.plan(made, "dgx-a100", precision="fp32", **QUICK)
    report = execute_plan(found.plan, ExecuteOptions(strategy="unused", steps=2, verify=True, precision="fp64"))
    assert report.verified
