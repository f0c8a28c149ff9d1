"""Training configurations drawn at random."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from planner.exchange.training_config import CHEAP_MODULES, TrainingConfig

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe_v")
CHUNKS = {"interleaved_1f1b": (2, 4), "zbv": (2, 2), "dualpipe_v": (2, 2)}
LAYERS = 48


@st.composite
def training_configs(draw: st.DrawFn) -> TrainingConfig:
    """Any configuration that a plan of a network of 48 layers and 16 experts may have."""
    tp, pp, cp = (2 ** draw(st.integers(0, 3)) for _ in range(3))
    data = 2 ** draw(st.integers(0, 5))
    ep = 2 ** draw(st.integers(0, min(4, data.bit_length() - 1)))
    etp = draw(st.sampled_from(sorted({1, tp}))) if ep > 1 else tp
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else "none"
    vpp = draw(st.integers(*CHUNKS.get(schedule, (1, 1))))
    micro_batch, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    sharding = draw(st.sampled_from(("none", "zero1", "zero2", "zero3"))) if data > 1 else "none"
    mode = draw(st.sampled_from(("none", "selective", "full", "mixed")))
    modules = {"selective": CHEAP_MODULES[: 3 if ep > 1 else 2]}.get(mode, ())
    by_layer = draw(_modes()) if mode == "mixed" else ()
    away = draw(st.booleans())
    sequence = tp > 1 and draw(st.booleans())
    overlaps = data > 1 and draw(st.booleans())
    return TrainingConfig(
        devices=tp * pp * cp * data,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep * (tp if ep > 1 and etp == 1 else 1),
        etp=etp,
        num_layers=LAYERS,
        layers=_layers(pp * vpp, draw(st.integers(0, 3))) if pp > 1 and pp * vpp < LAYERS else (),
        schedule=schedule,
        micro_batch=micro_batch,
        global_batch=micro_batch * pp * rounds * data,
        sequence_length=4096,
        precision=draw(st.sampled_from(("fp32", "fp16", "bf16", "fp8"))),
        optimizer="adamw",
        optimizer_sharding=sharding,
        shard_size=draw(st.sampled_from((0, data // 2))) if sharding != "none" and data > 2 else 0,
        sequence_parallel=sequence,
        context_algorithm=draw(st.sampled_from(("ring", "all_to_all"))) if cp > 1 else "none",
        recompute=mode,
        recompute_modules=modules,
        recompute_layers=by_layer,
        recompute_count=0,
        offload_optimizer=away,
        offload_parameters=away and draw(st.booleans()),
        offload_activations=draw(st.booleans()),
        tensor_overlap=sequence and draw(st.booleans()),
        expert_overlap=ep > 1 and draw(st.booleans()),
        tokens_once=ep > 1 and draw(st.booleans()),
        overlap_gradients=overlaps,
        overlap_parameters=overlaps and sharding != "none",
    )


def _layers(chunks: int, moved: int) -> tuple[int, ...]:
    """Layers of chunks where the last chunk has given some to the first."""
    each, rest = divmod(LAYERS, chunks)
    sizes = [each + (place < rest) for place in range(chunks)]
    moved = min(moved, sizes[-1] - 1)
    if moved <= 0 and not rest:
        return ()
    return (sizes[0] + moved, *sizes[1:-1], sizes[-1] - moved)


@st.composite
def _modes(draw: st.DrawFn) -> tuple[str, ...]:
    first, second = draw(st.permutations(("none", "selective", "full")))[:2]
    count = draw(st.integers(1, LAYERS - 1))
    return (first,) * count + (second,) * (LAYERS - count)


def usual(**changes: object) -> TrainingConfig:
    """A configuration of 8 data-parallel, 2 tensor and 4 pipeline ranks."""
    base = TrainingConfig(
        devices=64,
        tp=2,
        pp=4,
        vpp=1,
        cp=1,
        ep=1,
        etp=2,
        num_layers=32,
        layers=(),
        schedule="1f1b",
        micro_batch=1,
        global_batch=128,
        sequence_length=4096,
        precision="bf16",
        optimizer="adamw",
        optimizer_sharding="zero1",
        shard_size=0,
        sequence_parallel=True,
        context_algorithm="none",
        recompute="none",
        recompute_modules=(),
        recompute_layers=(),
        recompute_count=0,
        offload_optimizer=False,
        offload_parameters=False,
        offload_activations=False,
        tensor_overlap=False,
        expert_overlap=False,
        tokens_once=False,
        overlap_gradients=True,
        overlap_parameters=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]
