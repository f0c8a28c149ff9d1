"""Fit what hardware and software leave open in steps of layered networks, on published rows.

Minimised is the sum over rows of ``weight * log(1 + (log(predicted / measured) / scale)²)`` with a Gaussian prior on
the logarithm of every coefficient. Coefficients belong to device families and stacks, never to a network or a row.
What devices of one maker have in common is a coefficient of its own, so that a device of which few rows tell is taken
to be as its kin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.cost.stacks import LayeredCoefficients, Stack, family_of
from planner.cost.training_run import LayeredNetwork, TrainingRun
from planner.published.fitting import Prior
from planner.published.layered.prediction import parameter_columns, parameters_of
from planner.published.layered.table import LayeredTable, keeps_planes, layered_times
from planner.published.reading import MeasuredRow

FloatArray = npt.NDArray[np.float64]
Key = tuple[str, str, str]
_RESIDUAL_SCALE = 0.12
_BATCH_DECIDES = ("clip", "sound", "sentence")
_KNOWN_BATCH, _UNKNOWN_BATCH = 1.0, 0.3
"""Weights: published rates of recurrent networks state no batch, which decides them; they may only settle the rest."""
_STEP = 1e-3
_ITERATIONS = 120
_SETTLED, _NO_GAIN = 2e-3, 1e-3
_STUCK = 1e6
_DEVICES = ("volta", "ampere", "hopper", "blackwell", "ascend910", "ascend910b")
_STACKS = (
    Stack.CHANNELS_LAST, Stack.EAGER, Stack.COMPILED, Stack.TENSORFLOW, Stack.PADDLE, Stack.MXNET, Stack.ONEFLOW,
    Stack.MINDSPORE, f"{Stack.MINDSPORE}_gpu", Stack.MINDSPORE_TOOLKIT,
)  # fmt: skip
"""Devices and stacks that are predicted without a row of theirs, by what is expected of them."""
EVERYWHERE_PRIORS = {
    "balance": Prior(centre=0.6, spread=0.5),
    "winograd": Prior(centre=1.7, spread=0.15),
    "planes": Prior(centre=1.6, spread=0.3),
    "reach": Prior(centre=0.3, spread=0.5),
    "untuned": Prior(centre=0.9, spread=0.1),
}
"""Of all devices. In convolutions they reach the less of their peak, the more operations they could take in the time
in which their memory delivers one element; without tensor units the peak is easily reached. Where images lie in planes,
input and output of a convolution are turned around: both are read and written once more (2), but for the outputs of
kernels that write planes themselves (``nhwckrsc_nchw`` of cuDNN; 4/3 if all of two passes do). Of the bandwidth a
kernel reaches the less, the more bytes a multiprocessor is to take in a cycle: with powers of 0.4 and 0.6 in published
timings of activations and of norms on A40 and A100, 0 in those of sums. Reproducible kernels, and those that cuDNN
takes without trying them out, are some tenth slower."""
COMMON_PRIORS = {
    "products": Prior(centre=0.55, spread=0.13),
    "matmuls": Prior(centre=1.0, spread=0.3),
    "memory": Prior(centre=1.0, spread=0.06),
    "grouped": Prior(centre=1.0, spread=0.6),
    "columns_half": Prior(centre=1.0, spread=0.2),
    "depth_half": Prior(centre=1.0, spread=0.2),
    "outputs_half": Prior(centre=1.0, spread=0.6),
    "kernel_s": Prior(centre=1.0, spread=0.2),
}
"""What devices of one maker have in common, as factors on `DEVICE_PRIORS`. What convolutions reach differs more between
stacks than between devices of one maker, so that one slow stack does not make a device slow for all others."""
DEVICE_PRIORS = {
    "products": Prior(centre=1.0, spread=0.06),
    "matmuls": Prior(centre=1.0, spread=0.03),
    "memory": Prior(centre=0.85, spread=0.05),
    "grouped": Prior(centre=0.12, spread=0.2),
    "columns_half": Prior(centre=32.0, spread=0.1),
    "depth_half": Prior(centre=64.0, spread=0.1),
    "outputs_half": Prior(centre=1.5e5, spread=0.15),
    "kernel_s": Prior(centre=5e-6, spread=0.1),
    "launch": Prior(centre=1.0, spread=0.2),
}
STREAMED = {"volta": 0.89, "ampere": 0.835, "hopper": 0.876, "blackwell": 0.876}
"""Share of the bandwidth that copies and sums of long streams reach in published timings: what ``memory`` of a device
is expected to be (``kernels.elementwise`` in the profiles of V100, A100 of 80 GB and H100; B200 as H100)."""
SINK_PRIORS = {"launch": Prior(centre=0.05, spread=0.3), "kernel_s": Prior(centre=1.4e-5, spread=0.1)}
"""Of Ascend devices, which launch the kernels of a whole graph themselves."""
LAYOUT_PRIORS = {"layout_bytes": Prior(centre=200.0, spread=0.4), "turned": Prior(centre=3.0, spread=0.5)}
"""Of Ascend 910. Its matrix units take operands in a fractal layout, to which kernels of their own (TransData) bring
what dense layers take and from which they bring it back; those of Ascend 910B turn rows around while they load them
(``Nd2NzParams`` of Ascend C, from Atlas A2 on). Of the steps of VGG-11 to 19, in three sources, 37 to 49 ms follow
neither the images nor the convolutions, on one device as on eight: 300 to 400 bytes for each of 124 million dense
weights, of which updates and reading them explain a third."""
STACK_PRIORS = {
    "products": Prior(centre=1.0, spread=0.15),
    "memory": Prior(centre=1.0, spread=0.1),
    "grouped": Prior(centre=1.0, spread=0.2),
    "kernel_s": Prior(centre=1.0, spread=0.3),
    "unfused": Prior(centre=0.7, spread=0.4),
    "launch_s": Prior(centre=8e-6, spread=0.8),
    "casts": Prior(centre=0.1, spread=1.0),
    "update_bytes": Prior(centre=20.0, spread=0.3),
    "updates": Prior(centre=1.0, spread=0.3),
    "step_overhead_s": Prior(centre=2e-3, spread=0.4),
    "crowding": Prior(centre=0.1, spread=0.7),
    "exposed": Prior(centre=0.2, spread=0.7),
    "contention": Prior(centre=0.03, spread=0.5),
}
_MINDSPORE_PRIORS = {
    "launch_s": Prior(centre=8e-5, spread=0.6),
    "unfused": Prior(centre=0.3, spread=0.5),
    "vector": Prior(centre=4.0, spread=0.3),
    "crowding": Prior(centre=0.01, spread=0.5),
}
STACK_OWN_PRIORS: Mapping[str, Mapping[str, Prior]] = {
    Stack.CHANNELS_LAST: {"unfused": Prior(centre=1.0, spread=0.1), "contention": Prior(centre=0.06, spread=1.0)},
    Stack.EAGER: {
        "unfused": Prior(centre=1.0, spread=0.1),
        "contention": Prior(centre=0.06, spread=1.0),
        "launch_s": Prior(centre=2e-5, spread=0.4),
        "casts": Prior(centre=3.0, spread=0.5),
        "update_bytes": Prior(centre=110.0, spread=0.7),
        "updates": Prior(centre=6.0, spread=0.5),
    },
    Stack.TENSORFLOW: {
        "launch_s": Prior(centre=3e-5, spread=0.3),
        "unfused": Prior(centre=0.4, spread=0.4),
        "pooled": Prior(centre=0.3, spread=0.3),
        "updates": Prior(centre=3.0, spread=0.5),
        "coordination_s": Prior(centre=7.5e-3, spread=0.3),
        "step_overhead_s": Prior(centre=4e-3, spread=0.6),
    },
    Stack.COMPILED: {"unfused": Prior(centre=0.4, spread=0.4)},
    Stack.PADDLE: {"unfused": Prior(centre=0.35, spread=0.4)},
    Stack.MXNET: {"unfused": Prior(centre=0.25, spread=0.4)},
    f"{Stack.MINDSPORE}_gpu": {"launch_s": Prior(centre=8e-5, spread=0.6)},
    Stack.MINDSPORE: {
        **_MINDSPORE_PRIORS,
        "unfused": Prior(centre=0.25, spread=0.4),
        "vector": Prior(centre=2.0, spread=0.5),
    },
    Stack.MINDSPORE_TOOLKIT: {
        **_MINDSPORE_PRIORS,
        "kernel_s": Prior(centre=2.0, spread=0.15),
        "exposed": Prior(centre=0.2, spread=0.3),
        "boxes_s": Prior(centre=8e-3, spread=1.0),
        "gates_s": Prior(centre=1e-8, spread=1.5),
    },
}
"""PyTorch launches operators one by one, fuses none of them and keeps images in planes, which tensor units do not take:
half precision is copied around convolutions, elements of two bytes at a lower rate than those of four. Kernels beside
its messages take 18.9 % longer (arXiv:2507.03114), 6 % of a step of which a third is beside them. Its optimizers are
single operators as well: Adam with decay moves 88 bytes a weight in six kernels, gradients that are zeroed,
unscaled and clipped 24 more. TensorFlow schedules operators one by one, and for each tensor of weights its update, its
decay and its part of the norm of all gradients. Horovod looks every 5 ms which gradients are there everywhere (1 ms
from 0.21 of November 2020 on): the last one of a step waits for half a cycle, and for one more until all have said so.
NVIDIA measured its examples with XLA, which fuses what follows a convolution, and those for MXNet with norms that take
sum and ReLU along (``--fuse-bn-relu``, ``--fuse-bn-add-relu`` in ``MxNet/Classification/RN50v1.5/runner``).
MindSpore's graphs run as operators where no device takes them whole, and its vector units take several passes for norms
over channels, softmax and GELU. What gates of single pixels take is told by one source alone: it is hardly expected."""
HOST_PRIORS = {
    "image": Prior(centre=2e-4, spread=0.5),
    "augmented image": Prior(centre=2e-4, spread=0.5),
    "policy image": Prior(centre=2e-4, spread=0.5),
    "annotated image": Prior(centre=5e-4, spread=0.5),
    "mosaic image": Prior(centre=3e-3, spread=1.0),
    "small image": Prior(centre=2e-4, spread=1.0),
    "small volume": Prior(centre=1e-3, spread=0.7),
    "volume": Prior(centre=1e-2, spread=1.0),
}
PYTHON_HOST_PRIORS = {
    "image": Prior(centre=6e-4, spread=0.2),
    "augmented image": Prior(centre=1.6e-3, spread=0.2),
    "bicubic augmented image": Prior(centre=1.8e-3, spread=0.2),
    "noisy augmented image": Prior(centre=2.05e-3, spread=0.2),
    "policy image": Prior(centre=1.4e-3, spread=0.3),
    "annotated image": Prior(centre=2e-3, spread=1.0),
    "mosaic image": Prior(centre=5e-3, spread=1.0),
}
"""Where the host transforms images: in MindCV and MindYOLO, and in PyTorch and TensorFlow what augments images by
rules. One policy for each image (AutoAugment) takes less than random rules with erasing and mixing. Bicubic
interpolation takes longer than bilinear one, and so does erasing with noise instead of a constant."""
_TWELVE_WORKERS = Prior(centre=PYTHON_HOST_PRIORS["image"].centre * 8 / 12, spread=0.2)
"""Of MindSpore's own networks, which prepare plain images by the same operators as MindCV in twelve workers instead of
eight (``get_num_parallel_workers(12)`` in their ``dataset.py``; ``num_parallel_workers: 8`` in MindCV's recipes)."""
_OWN_HOST = Prior(centre=1.0, spread=0.25)
"""Of a source: one machine, whose cores prepare samples faster or slower than those of others, however many rows it
has. Its factor serves the fit alone; strangers are predicted by what sources have in common."""
_BOUNDS = {"unfused": 1.0, "exposed": 1.0, "products": 1.6, "memory": 1.1, "contention": 0.2}


@dataclass(frozen=True, kw_only=True, eq=False)
class LayeredFit:
    """Fitted coefficients, what they are made of, and the logarithm of predicted over measured of the rows."""

    coefficients: LayeredCoefficients
    values: Mapping[Key, float]
    residuals: FloatArray


def _maker(family: str) -> str:
    return "ascend" if family.startswith("ascend") else "nvidia"


def priors() -> dict[Key, Prior]:
    """All coefficients, as ``(everywhere, common, devices or stacks, group, name)``."""
    found: dict[Key, Prior] = {("everywhere", "", name): prior for name, prior in EVERYWHERE_PRIORS.items()}
    for family in _DEVICES:
        device = DEVICE_PRIORS | (SINK_PRIORS if family.startswith("ascend") else {})
        device |= LAYOUT_PRIORS if family == "ascend910" else {}
        if family in STREAMED:
            device |= {"memory": replace(DEVICE_PRIORS["memory"], centre=STREAMED[family])}
        found |= {("devices", family, name): prior for name, prior in device.items()}
        found |= {("common", _maker(family), name): prior for name, prior in COMMON_PRIORS.items()}
    for stack in _STACKS:
        software = STACK_PRIORS | dict(STACK_OWN_PRIORS.get(stack, {}))
        found |= {("stacks", str(stack), name): prior for name, prior in software.items()}
        for kind, prior in _host_priors(stack).items():
            found["stacks", str(stack), f"host_{kind.replace(' ', '_')}_s"] = prior
    return found


def _host_priors(stack: str) -> dict[str, Prior]:
    if stack == Stack.MINDSPORE:
        return HOST_PRIORS | {"image": _TWELVE_WORKERS, "annotated image": PYTHON_HOST_PRIORS["annotated image"]}
    if stack == Stack.MINDSPORE_TOOLKIT:
        return HOST_PRIORS | PYTHON_HOST_PRIORS
    if stack in (Stack.EAGER, Stack.TENSORFLOW):
        return HOST_PRIORS | {kind: prior for kind, prior in PYTHON_HOST_PRIORS.items() if "augmented" in kind}
    return HOST_PRIORS


def fit_layered(rows: Sequence[MeasuredRow], near: LayeredFit | None = None) -> LayeredFit:
    """Coefficients that predict `rows` best; a source counts with the square root of its number of rows.

    ``near`` is where the search begins, a fit on nearly the same rows; by default it begins at the priors.
    """
    runs = [row.run for row in rows if row.run]
    sources = [row.source for row in rows if row.run]
    steps = Steps(runs, sources)
    target = np.log([row.measured_time_s for row in rows])
    weights = _weights(runs, sources)
    known = priors() | {("sources", source, "host"): _OWN_HOST for source in dict.fromkeys(sources)}
    keys = list(known)
    centres = np.log([known[key].centre for key in keys])
    spreads = np.array([known[key].spread for key in keys])
    upper = np.log([_BOUNDS.get(key[2], np.inf) for key in keys]) - _STEP
    place = steps.places(keys)

    def cost(error: FloatArray, theta: FloatArray) -> float:
        return float(weights @ np.log1p(error**2) + np.sum(((theta - centres) / spreads) ** 2))

    def errors(theta: FloatArray) -> FloatArray:
        return np.asarray((steps.logarithms(keys, theta) - target) / _RESIDUAL_SCALE)

    start = centres if near is None else np.log([near.values.get(key, 1.0) for key in keys])
    theta = np.minimum(start, upper)
    error, damping = errors(theta), 1e-3
    for _ in range(_ITERATIONS):
        slopes = steps.slopes(keys, theta, place) / _RESIDUAL_SCALE
        bent = weights / (1 + error**2)  # the weights of a least-squares problem with the same slope
        normal = (slopes * bent[:, None]).T @ slopes + np.diag(spreads**-2)
        gradient = (slopes * bent[:, None]).T @ error + (theta - centres) / spreads**2
        before = cost(error, theta)
        while damping < _STUCK:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial = np.minimum(theta + step, upper)
            found = errors(trial)
            if cost(found, trial) <= before:
                break
            damping *= 6
        if damping >= _STUCK:
            break
        moved = float(np.abs(trial - theta).max())
        theta, error, damping = trial, found, max(damping / 5, 1e-6)
        if moved < _SETTLED or before - cost(error, theta) < _NO_GAIN:
            break
    values = dict(zip(keys, np.exp(theta).tolist(), strict=True))
    return LayeredFit(coefficients=combined(values), values=values, residuals=error * _RESIDUAL_SCALE)


def _weights(runs: Sequence[TrainingRun], sources: Sequence[str]) -> FloatArray:
    weights = np.array([1 / np.sqrt(sources.count(source)) for source in sources])
    weights *= [_KNOWN_BATCH if _kind(run) not in _BATCH_DECIDES else _UNKNOWN_BATCH for run in runs]
    return np.asarray(weights * np.sqrt(len(runs)) / np.linalg.norm(weights))


def _kind(run: TrainingRun) -> str:
    return run.network.sample if isinstance(run.network, LayeredNetwork) else ""


class Steps:
    """Runs (N,) to be timed with many sets of coefficients; those with the same parameters are known by one of them."""

    def __init__(self, runs: Sequence[TrainingRun], sources: Sequence[str] = ()) -> None:
        self._table = LayeredTable(runs)
        self._sources = tuple(sources)
        self._families = [family_of(run.hardware.device_name) for run in runs]
        self._stacks = [run.stack_key for run in runs]
        alike: dict[tuple[object, ...], int] = {}
        self._alike = [alike.setdefault(_told_apart(run), index) for index, run in enumerate(runs)]
        self._first = sorted(set(self._alike))

    def predicted(self, coefficients: LayeredCoefficients, hosts: Mapping[str, float] | None = None) -> FloatArray:
        """Logarithm (N,) of the predicted seconds; ``hosts`` are factors of sources on preparing a sample."""
        known = {index: parameters_of(coefficients, self._table.runs[index]) for index in self._first}
        columns = parameter_columns(self._table, [known[index] for index in self._alike])
        if hosts:
            columns["host_s"] = columns["host_s"] * [hosts[source] for source in self._sources]
        return np.asarray(np.log(sum(layered_times(self._table, columns).values())))

    def logarithms(self, keys: Sequence[Key], theta: FloatArray) -> FloatArray:
        """The same by logarithms of the coefficients of `keys`."""
        values = dict(zip(keys, np.exp(theta).tolist(), strict=True))
        hosts = {group: value for (part, group, _), value in values.items() if part == "sources"}
        return self.predicted(combined(values), hosts)

    def places(self, keys: Sequence[Key]) -> dict[tuple[str, str], npt.NDArray[np.intp]]:
        """For each part and name the index of each run's key, −1 where it has none."""
        index = {key: number for number, key in enumerate(keys)}
        groups: Mapping[str, Sequence[str]] = {
            "everywhere": [""] * len(self._families),
            "common": [_maker(family) for family in self._families],
            "devices": self._families,
            "stacks": self._stacks,
            "sources": self._sources,
        }
        return {
            (part, name): np.array([index.get((part, group, name), -1) for group in groups[part]])
            for part, name in dict.fromkeys((part, name) for part, _, name in keys)
        }

    def slopes(
        self, keys: Sequence[Key], theta: FloatArray, places: Mapping[tuple[str, str], npt.NDArray[np.intp]]
    ) -> FloatArray:
        """Derivatives (N, keys) of the logarithms by differences.

        A run depends on one device and one stack: coefficients of the same name are moved together.
        """
        base = self.logarithms(keys, theta)
        found = np.zeros((len(base), len(keys)))
        for place in places.values():
            own = np.flatnonzero(place >= 0)
            if not len(own):
                continue
            moved = theta.copy()
            moved[np.unique(place[own])] -= _STEP
            found[own, place[own]] = (base - self.logarithms(keys, moved))[own] / _STEP
        return found


def _told_apart(run: TrainingRun) -> tuple[object, ...]:
    """What the parameters of a run depend on."""
    setup = run.setup
    return (
        run.hardware.hash, run.stack_key, setup.precision, setup.plain_graph, setup.graph_engine,
        setup.untuned_convolutions, keeps_planes(run),
    )  # fmt: skip


def combined(values: Mapping[Key, float]) -> LayeredCoefficients:
    """Coefficients of devices and stacks: a device's own times what it has in common with others."""
    groups: dict[str, dict[str, dict[str, float]]] = {"devices": {}, "stacks": {}}
    for (part, group, name), value in values.items():
        if part in groups:
            groups[part].setdefault(group, {})[name] = value
    for family, device in groups["devices"].items():
        for name in COMMON_PRIORS:
            device[name] *= values["common", _maker(family), name]
        device |= {name: values["everywhere", "", name] for name in EVERYWHERE_PRIORS}
    return LayeredCoefficients(**groups)
