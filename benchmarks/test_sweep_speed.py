"""How long `what-if` takes over many device counts, and what a second process gains.

The goal is ten counts in 30 s on two cores, of GPT-2 and of GPT-3. Starting processes and sending them the network are
included; `extra_info` holds the seconds of computation of one process, which other work on the machine hardly changes.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from planner.what_if import WhatIfOptions, prepare, run
from planner.what_if.rows import graph_text, shared_of

COUNTS = tuple(8 * 2**i for i in range(10))
GPT2 = WhatIfOptions(network="zoo:gpt2", hardware=("dgx-a100",), device_counts=COUNTS)
GPT3 = WhatIfOptions(network="zoo:gpt3-175b", hardware=("dgx-a100",), device_counts=COUNTS, batch_per_device=2)


@pytest.mark.parametrize("options", [GPT2, GPT3], ids=["gpt2", "gpt3-175b"])
def test_ten_counts(benchmark: BenchmarkFixture, options: WhatIfOptions) -> None:
    """Two processes; `extra_info` holds the seconds of one."""
    sweep = prepare(options)
    run(prepare(replace(options, device_counts=COUNTS[:1])))
    started, computed = time.perf_counter(), time.process_time()
    alone = run(sweep, jobs=1)
    one, computed = time.perf_counter() - started, time.process_time() - computed
    rows = benchmark.pedantic(run, args=(sweep,), kwargs={"jobs": 2}, rounds=1)
    benchmark.extra_info["with one process, s"] = round(one, 1)
    benchmark.extra_info["computation of one process, s"] = round(computed, 1)
    benchmark.extra_info["speed-up of two"] = round(one / benchmark.stats.stats.max, 2)
    benchmark.extra_info["plans"] = sum(row.best is not None for row in rows)
    assert [row.best and row.best.plan for row in rows] == [row.best and row.best.plan for row in alone]


def test_network_for_a_process(benchmark: BenchmarkFixture) -> None:
    """Writing and reading the captured network once, which is what sending it to a process costs."""
    graph = prepare(GPT3).graph

    def sent() -> None:
        shared_of.cache_clear()
        assert shared_of(graph_text(graph)).graph == graph

    benchmark(sent)
