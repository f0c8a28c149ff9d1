"""Which plans are run: three networks on 1, 2, 4 and 8 processes."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plans.pins import FREE, Pins


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedNetwork:
    """A network at one size of batch; all its plans train the same steps."""

    name: str
    spec: str
    global_batch: int
    optimizer: str
    sequence_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan: what is pinned, and how the same parallelism is written by hand, where it is."""

    network: TrainedNetwork
    processes: int
    pins: Pins = FREE
    by_hand: str | None = None

    @property
    def name(self) -> str:
        """What the plan is called in tables."""
        words = " ".join(f"{name}={value}" for name, value in self.pins.named().items() if value not in ("none", "1"))
        return words or "one process"


MLP = TrainedNetwork(
    name="MLP", spec="py:planner.networks.small:multilayer_perceptron", global_batch=64, optimizer="adamw"
)
RESNET = TrainedNetwork(
    name="ResNet-50, 32 × 32", spec="py:planner.networks.small:resnet50_small_images", global_batch=32,
    optimizer="momentum",
)  # fmt: skip
GPT = TrainedNetwork(name="GPT-2 small", spec="zoo:gpt2", global_batch=8, optimizer="adamw", sequence_length=32)
TINY = TrainedNetwork(
    name="tiny MLP", spec="py:planner.networks.small:tiny_perceptron", global_batch=16, optimizer="adamw"
)


def all_cases() -> tuple[Case, ...]:
    """Every plan, those of few processes and small networks first: what is left out for want of time comes last."""
    return (
        _case(MLP, 1),
        _case(RESNET, 1),
        _case(GPT, 1),
        _case(MLP, 2, "DDP", dp=2),
        _case(MLP, 2, "tensor parallel", tp=2),
        _case(RESNET, 2, dp=2),
        _case(GPT, 2, "DDP", dp=2),
        _case(GPT, 2, tp=2),
        _case(MLP, 4, "DDP", dp=4),
        _case(MLP, 4, "tensor parallel", tp=4),
        _case(RESNET, 4, dp=4),
        _case(GPT, 4, dp=2, tp=2),
        _case(MLP, 8, dp=8),
        _case(RESNET, 8, dp=8),
        _case(GPT, 8, dp=4, tp=2),
        _case(MLP, 2, "FSDP2", dp=2, optimizer_sharding="zero3"),
        _case(MLP, 4, dp=2, tp=2),
        _case(MLP, 2, pp=2, micro_batch=16),
        _case(RESNET, 2, pp=2, micro_batch=8),
        _case(GPT, 2, pp=2, micro_batch=2),
        _case(RESNET, 4, dp=2, pp=2, micro_batch=8),
        _case(MLP, 8, dp=4, tp=2),
    )


def tiny_cases() -> tuple[Case, ...]:
    """A few plans of a network of no size, to try the command."""
    return (_case(TINY, 1), _case(TINY, 2, "DDP", dp=2), _case(TINY, 2, "tensor parallel", tp=2))


def _case(network: TrainedNetwork, processes: int, by_hand: str | None = None, **given: str | int) -> Case:
    plain = Pins(dp=1, tp=1, pp=1, cp=1, optimizer_sharding="none")
    pins = Pins.read(given).over(plain) if processes > 1 else FREE
    return Case(network=network, processes=processes, pins=pins, by_hand=by_hand)
