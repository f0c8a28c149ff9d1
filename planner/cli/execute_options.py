"""Options of `meshwright execute`, by what they are about."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import Precision, natural, natural_or_zero, rate, seconds


class Device(StrEnum):
    """What to run on."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


# What to run

Strategy = Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")]
Processes = Annotated[
    int | None,
    typer.Option("--processes", parser=natural, metavar="N", help="Local processes; default: the plan's devices."),
]
DeviceKind = Annotated[Device | None, typer.Option("--device", help="Default: the best there is.")]
OtherPrecision = Annotated[Precision | None, typer.Option("--precision", help="Default: the plan's.")]
ForceFlag = Annotated[
    bool, typer.Option("--force", help="Start even if the prediction says that memory does not suffice.")
]
DryRunFlag = Annotated[bool, typer.Option("--dry-run", help="Only tell what each rank would do; start nothing.")]
TopPlans = Annotated[
    int | None,
    typer.Option("--top", parser=natural, metavar="K", help="Run the best K plans, and compare their order."),
]


# Training

Steps = Annotated[
    int | None,
    typer.Option("--steps", parser=natural, metavar="N", help="Training steps [10; virtual ones 3]."),
]
Data = Annotated[
    str | None, typer.Option("--data", metavar="DATASET", help="Default: a real data set that fits the network.")
]
Seed = Annotated[
    int | None, typer.Option("--seed", parser=natural_or_zero, metavar="N", help="Seed of parameters and data [0].")
]
LearningRate = Annotated[
    float | None, typer.Option("--learning-rate", parser=rate, metavar="X", help="Default: the optimizer's.")
]
VerifyFlag = Annotated[
    bool, typer.Option("--verify", help="Train again in one process; exit code 4 if the losses differ.")
]


# Waiting for others

Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", parser=seconds, metavar="SECONDS", help="How long a rank may keep the others waiting [60]."
    ),
]
JoinTimeout = Annotated[
    float | None,
    typer.Option("--join-timeout", parser=seconds, metavar="SECONDS", help="How long to wait for all processes [300]."),
]


# Checkpoints

SaveFolder = Annotated[
    Path | None, typer.Option("--save", metavar="DIR", help="Save a checkpoint in this folder at the end.")
]
SaveEvery = Annotated[
    int | None, typer.Option("--save-every", parser=natural, metavar="N", help="And after every N steps.")
]
ResumeFrom = Annotated[
    Path | None,
    typer.Option("--resume", metavar="DIR", help="Go on from a checkpoint, or the newest in a folder of them."),
]


# What is said, written and measured

LogFolder = Annotated[
    Path | None, typer.Option("--log-dir", metavar="DIR", help="Keep what every rank says in DIR/device<rank>.")
]
LogEvery = Annotated[
    int | None,
    typer.Option("--log-every", parser=natural, metavar="N", help="Say the loss after every N steps, on stderr."),
]
VirtualFlag = Annotated[
    bool, typer.Option("--virtual", help="Sleep instead of computing: any number of ranks on a few cores.")
]
MeasureFlag = Annotated[
    bool, typer.Option("--measure", help="Clock every instruction, and say why the prediction was off.")
]
RunTrace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write the step as predicted and as measured for Perfetto."),
]
OutFile = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the result as JSON.")]
