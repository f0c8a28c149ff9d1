"""Sweeps on a Dask cluster: a real one on this machine, and clusters that cannot be used."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from planner.graph.operator_graph import OperatorGraph
from planner.planning.planning import PlanRequest, capture_for
from planner.what_if import WhatIfOptions, cluster, row_document, what_if
from planner.what_if.cluster import on_cluster
from planner.what_if.options import requests_of
from planner.what_if.rows import WhatIfRow, row_of, shared_of
from simulator.errors import InputError, MeshwrightError, UnsupportedError
from tests.results import infeasible_result

OPTIONS = WhatIfOptions(network="zoo:gpt2-tiny", hardware=("dgx-a100",), device_counts=(8, 9, 16))


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return capture_for(requests_of(OPTIONS)[0])


def requests() -> dict[int, PlanRequest]:
    return dict(enumerate(requests_of(OPTIONS)))


# What the workers do instead of planning


def answer(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    assert shared_of(text).graph.fingerprint
    return number, row_of(request, infeasible_result())


def die_at_16(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    if request.devices == 16:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(number, request, text)


def hit_once(by: signal.Signals, mark: Path, number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    with suppress(FileExistsError):
        mark.touch(exist_ok=False)
        os.kill(os.getpid(), by)
    return answer(number, request, text)


def refuse(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    raise UnsupportedError("pp is not supported yet")


def fail(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    raise RuntimeError("a defect")


def sleep(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    time.sleep(60)
    return answer(number, request, text)


# Clusters that cannot be used


@pytest.mark.parametrize("address", ["localhost:8786", "dask://", "dask://host", "dask://host:port", "ray://a:1"])
def test_an_address_that_is_none_says_what_to_write(address: str) -> None:
    with pytest.raises(InputError, match="dask://HOST:PORT"):
        what_if(OPTIONS, cluster=address)


def test_without_dask_the_remedy_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError, match=r"dask://localhost:8786.*not installed.*meshwright\[dask\]"):
        what_if(OPTIONS, cluster="dask://localhost:8786")


@pytest.mark.parametrize("listens", [False, True], ids=["nothing listens", "something silent listens"])
def test_a_scheduler_that_does_not_answer_is_an_error_in_time(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="needs Dask: pip install 'meshwright[dask]'")
    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        started = time.monotonic()
        with pytest.raises(InputError, match="no Dask scheduler answers there within"):
            what_if(OPTIONS, cluster=f"dask://127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - started < 120  # the client waits for ever of its own accord


# A real cluster on this machine


@pytest.fixture(scope="module")
def dask() -> Iterator[str]:
    """Address of a scheduler with two worker processes."""
    distributed = pytest.importorskip("distributed", reason="needs Dask: pip install 'meshwright[dask]'")
    with local_cluster(distributed, workers=2) as here:
        yield address_of(here)


def local_cluster(distributed: object, *, workers: int) -> object:
    return distributed.LocalCluster(  # type: ignore[attr-defined]
        n_workers=workers, threads_per_worker=1, processes=True, scheduler_port=0, dashboard_address=":0"
    )


def address_of(here: object) -> str:
    return "dask://" + here.scheduler_address.partition("://")[2]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_cluster_plans_the_same_rows(dask: str) -> None:
    found = [[row_document(row) for row in rows] for rows in (what_if(OPTIONS), what_if(OPTIONS, cluster=dask))]
    for document in (*found[0], *found[1]):
        for name in ("elapsed_s", "capture_s", "simulation_s", "timings"):
            del document["search"][name]
    assert found[0] == found[1]
    assert [row["plan"] is None for row in found[0]] == [False, True, False]


@pytest.mark.slow
def test_every_point_is_planned_once(dask: str, graph: OperatorGraph) -> None:
    options = replace(OPTIONS, device_counts=tuple(range(8, 48, 8)))
    waiting = dict(enumerate(requests_of(options)))
    rows = list(on_cluster(graph, waiting, dask, work=answer))
    assert sorted(number for number, _ in rows) == list(waiting)


@pytest.mark.slow
@pytest.mark.parametrize(("work", "error"), [(refuse, UnsupportedError), (fail, RuntimeError)])
def test_errors_of_workers_arrive_as_they_were(
    work: object, error: type[Exception], dask: str, graph: OperatorGraph
) -> None:
    with pytest.raises(error, match="a defect|not supported yet"):
        list(on_cluster(graph, requests(), dask, work=work))  # type: ignore[arg-type]


@pytest.mark.slow
def test_workers_with_other_code_are_refused(dask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "code_digest", other_code)
    with pytest.raises(InputError, match="another version of meshwright"):
        what_if(OPTIONS, cluster=dask)


def other_code() -> str:
    return str(os.getpid())


@pytest.mark.slow
def test_a_point_at_which_workers_die_is_named(dask: str, graph: OperatorGraph) -> None:
    with pytest.raises(MeshwrightError, match="gpt2-tiny on 16 devices of dgx-a100: the cluster gave this point up"):
        list(on_cluster(graph, requests(), dask, work=die_at_16))


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_points_of_a_worker_that_is_lost_are_planned_on_another(
    by: signal.Signals, graph: OperatorGraph, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed", reason="needs Dask: pip install 'meshwright[dask]'")
    import dask

    # Dask gives a worker up that has been silent for so long: 5 minutes by default.
    with (
        dask.config.set({"distributed.scheduler.worker-ttl": "3 s"}),
        local_cluster(distributed, workers=2) as here,  # type: ignore[attr-defined]
    ):
        rows = on_cluster(graph, requests(), address_of(here), work=partial(hit_once, by, tmp_path / "hit"))
        assert sorted(number for number, _ in rows) == [0, 1, 2]


@pytest.mark.slow
def test_a_cluster_without_workers_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed", reason="needs Dask: pip install 'meshwright[dask]'")
    monkeypatch.setattr(cluster, "CONNECT_S", 1.0)
    with (
        local_cluster(distributed, workers=0) as here,  # type: ignore[attr-defined]
        pytest.raises(InputError, match="has had no worker for 1 s"),
    ):
        what_if(OPTIONS, cluster=address_of(here))


@pytest.mark.slow
def test_a_cluster_that_goes_away_is_an_error_in_time(graph: OperatorGraph) -> None:
    distributed = pytest.importorskip("distributed", reason="needs Dask: pip install 'meshwright[dask]'")
    with local_cluster(distributed, workers=1) as here:  # type: ignore[attr-defined]
        rows = on_cluster(graph, requests(), address_of(here), lost_s=2.0, work=sleep_or_answer)
        assert next(rows)
        here.close()
        with pytest.raises(MeshwrightError, match="went away|gave this point up"):
            next(rows)


def sleep_or_answer(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    return answer(number, request, text) if number == 0 else sleep(number, request, text)
