"""What `meshwright simulate` may be given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from planner.cli.options import (
    DebugFlag,
    JsonFlag,
    QuietFlag,
    Slowdown,
    SlowLinks,
    Stragglers,
    TrustFile,
    natural_or_zero,
    rate,
)
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.cli.reliability import ReliabilityOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateArguments:
    """Arguments and options, None where not given."""

    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")]
    hardware: Annotated[
        str | None, typer.Option("--hw", metavar="PROFILE", help="Default: the one the plan was made for.")
    ] = None
    software: Annotated[
        str | None,
        typer.Option("--software", metavar="NAME", help="Default: that of the plan; usual for what is usual."),
    ] = None
    engine: Annotated[Literal["fast", "reference"], typer.Option("--engine", help="Array based, or SimPy.")] = "fast"
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write the step for Perfetto or Chrome.")
    ] = None
    schedule_file: Annotated[
        Path | None, typer.Option("--schedule-file", metavar="CSV", help="Order of passes, as PyTorch writes it.")
    ] = None
    stragglers: Stragglers = None
    slowdown: Slowdown = None
    slow_link: SlowLinks = None
    goodput: Annotated[bool, typer.Option("--goodput", help="Also what failures and checkpoints leave.")] = False
    checkpoint_interval: Annotated[
        float | None,
        typer.Option("--checkpoint-interval", parser=rate, metavar="SECONDS", help="Default: Daly's optimum."),
    ] = None
    asynchronous: Annotated[
        bool, typer.Option("--async-checkpoint", help="Checkpoints are written while training goes on.")
    ] = False
    device_mtbf: Annotated[
        float | None,
        typer.Option("--device-mtbf", parser=rate, metavar="SECONDS", help="Between failures of one device."),
    ] = None
    restart: Annotated[
        float | None,
        typer.Option("--restart", parser=rate, metavar="SECONDS", help="From a failure to a running job."),
    ] = None
    storage_bandwidth: Annotated[
        float | None,
        typer.Option("--storage-bandwidth", parser=rate, metavar="BYTES/S", help="What one node writes."),
    ] = None
    snapshot_bandwidth: Annotated[
        float | None,
        typer.Option("--snapshot-bandwidth", parser=rate, metavar="BYTES/S", help="From a device to its host."),
    ] = None
    days: Annotated[
        float | None, typer.Option("--days", parser=rate, metavar="N", help="Length of the simulated jobs [30].")
    ] = None
    seed: Annotated[
        int, typer.Option("--seed", parser=natural_or_zero, metavar="N", help="Of slow ranks and failures.")
    ] = 0
    trust_file: TrustFile = False
    as_json: JsonFlag = False
    quiet: QuietFlag = False
    debug: DebugFlag = False

    def reliability(self) -> ReliabilityOptions:
        """What is asked of slow ranks and failures.

        Raises
        ------
        InputError
            Options are given that mean nothing without another.
        """
        from planner.cli.reliability import JobOptions, ReliabilityOptions, SlowOptions

        given = {
            "device_mtbf_s": self.device_mtbf,
            "restart_s": self.restart,
            "storage_bandwidth_bytes_per_s": self.storage_bandwidth,
            **({"snapshot_bandwidth_bytes_per_s": self.snapshot_bandwidth} if self.asynchronous else {}),
        }
        job = JobOptions(
            given=given,
            interval_s=self.checkpoint_interval,
            asynchronous=self.asynchronous,
            days=self.days,
            seed=self.seed,
        )
        job.check(wanted=self.goodput)
        slow = SlowOptions.read(self.stragglers, self.slowdown, self.slow_link or (), seed=self.seed)
        if self.snapshot_bandwidth is not None and not self.asynchronous:
            raise InputError("--snapshot-bandwidth was given without --async-checkpoint; add it")
        return ReliabilityOptions(
            slow=slow if slow.ranks is not None or slow.links else None, job=job if self.goodput else None
        )
