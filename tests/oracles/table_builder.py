"""Task tables written task by task; tables of many tasks are filled with numpy instead."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.task_table import StreamKind, TaskTable


class TableBuilder:
    """Collects streams, links, meetings and tasks; each call returns the number of what it adds."""

    def __init__(self) -> None:
        self._streams: list[tuple[int, int]] = []
        self._capacities: list[float] = []
        self._meeting_sizes: list[int] = []
        self._integers = {name: array("q") for name in ("stream", "meeting", "dependencies", "links", "label")}
        self._reals = {name: array("d") for name in ("work", "latency_s", "rate_bytes_per_s", "link_weights")}
        self._dependency_offsets, self._link_offsets = array("q", [0]), array("q", [0])
        self._labels: dict[str, int] = {}

    def stream(self, rank: int, kind: StreamKind) -> int:
        """Add a stream to a rank."""
        self._streams.append((rank, int(kind)))
        return len(self._streams) - 1

    def link(self, capacity: float) -> int:
        """Add a link of `capacity` bytes/s."""
        self._capacities.append(capacity)
        return len(self._capacities) - 1

    def meeting(self, size: int = 0) -> int:
        """Add a meeting of `size` tasks: 2 for a send and its receive, 0 where any number will do."""
        self._meeting_sizes.append(size)
        return len(self._meeting_sizes) - 1

    def task(
        self,
        stream: int,
        *,
        work: float = 0.0,
        latency_s: float = 0.0,
        rate: float = 0.0,
        meeting: int = -1,
        after: Sequence[int] = (),
        links: Sequence[int] = (),
        weights: Sequence[float] = (),
        label: str = "",
    ) -> int:
        """Add a task behind those of its stream; `weights` are 1 where they are left out."""
        integers, reals = self._integers, self._reals
        number = len(integers["stream"])
        integers["stream"].append(stream)
        integers["meeting"].append(meeting)
        integers["label"].append(self._labels.setdefault(label, len(self._labels)))
        reals["work"].append(work)
        reals["latency_s"].append(latency_s)
        reals["rate_bytes_per_s"].append(rate)
        integers["dependencies"].extend(after)
        self._dependency_offsets.append(len(integers["dependencies"]))
        integers["links"].extend(links)
        reals["link_weights"].extend(weights or repeat(1.0, len(links)))
        self._link_offsets.append(len(integers["links"]))
        return number

    def build(self, **keywords: Any) -> TaskTable:
        """The table of all that was added; `keywords` are further fields of it, such as ``compute_speed``."""
        streams = np.array(self._streams, dtype=np.int64).reshape(-1, 2)
        arrays: dict[str, npt.NDArray[Any]] = {
            **{name: np.array(values, dtype=np.int64) for name, values in self._integers.items()},
            **{name: np.array(values, dtype=np.float64) for name, values in self._reals.items()},
            "dependency_offsets": np.array(self._dependency_offsets, dtype=np.int64),
            "link_offsets": np.array(self._link_offsets, dtype=np.int64),
            "link_capacity": np.array(self._capacities, dtype=np.float64),
            "meeting_size": np.array(self._meeting_sizes, dtype=np.int64),
            "stream_rank": streams[:, 0].copy(),
            "stream_kind": streams[:, 1].copy(),
        }
        return TaskTable(**{**arrays, "labels": tuple(self._labels), **keywords})
