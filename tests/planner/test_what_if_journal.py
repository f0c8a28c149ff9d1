"""The journal of a sweep: what an interruption leaves, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.graph.operator_graph import OperatorGraph
from planner.planning import planning
from planner.planning.planning import Candidate, PlanRequest, SearchResult, capture_for, plan_network
from planner.plans.pins import Pins
from planner.what_if import WhatIfOptions, prepare, run
from planner.what_if.journal import discard, journal_of, point_key, read, writer
from planner.what_if.rows import WhatIfRow, row_of
from simulator.errors import InputError, ProfileError
from tests.results import infeasible_result, make_plan, make_prediction, make_result

NETWORK = "zoo:gpt2"
COUNTS = (8, 16, 32, 64)
OPTIONS = WhatIfOptions(network=NETWORK, hardware=("dgx-a100", "dgx-h100"), device_counts=COUNTS)


@cache
def graph() -> OperatorGraph:
    return capture_for(PlanRequest(network=NETWORK, hardware="dgx-a100", devices=8))


def result_of(request: PlanRequest) -> SearchResult:
    if request.devices == 8:
        return infeasible_result()
    plan = make_plan(request.devices // 2, 2, hardware=request.hardware)
    prediction = make_prediction(0.1 + 1 / request.devices, request.global_batch or 0)
    return replace(make_result(), candidates=(Candidate(plan=plan, prediction=prediction, reason=""),))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    """Plan without searching; gives what was planned. 64 H100 are refused."""
    made: list[PlanRequest] = []

    def plan_network(request: PlanRequest, *, shared: object, **_: object) -> SearchResult:
        made.append(request)
        if request.devices == 64 and request.hardware == "dgx-h100":
            raise ProfileError("64 devices do not fit")
        return result_of(request)

    monkeypatch.setattr(planning, "plan_network", plan_network)
    return made


def interrupted_after(points: int) -> Callable[[], None]:
    left = iter(range(points - 1))

    def advance() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return advance


def test_an_interrupted_search_ends_the_sweep_and_keeps_no_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journal = tmp_path / "report.html.partial.jsonl"
    monkeypatch.setattr(
        planning,
        "plan_network",
        lambda request, **_: replace(result_of(request), interrupted=True),
    )
    with pytest.raises(KeyboardInterrupt):
        run(prepare(OPTIONS, journal=journal))
    assert prepare(OPTIONS, journal=journal).kept == {}


def test_an_interrupted_sweep_goes_on_from_there(planned: list[PlanRequest], tmp_path: Path) -> None:
    journal = tmp_path / "report.html.partial.jsonl"
    whole = run(prepare(OPTIONS))
    planned.clear()
    with pytest.raises(KeyboardInterrupt):
        run(prepare(OPTIONS, journal=journal), advance=interrupted_after(5))
    before = list(planned)
    again = prepare(OPTIONS, journal=journal)
    assert again.notes == ("5 of 8 points from the interrupted run (--fresh plans them anew)",)
    assert run(again) == whole
    assert len(before) == 5
    assert len(planned) == 8
    assert {(r.hardware, r.devices) for r in planned} == {(row.hardware, row.devices) for row in whole}


def test_a_fresh_sweep_forgets_the_journal(planned: list[PlanRequest], tmp_path: Path) -> None:
    journal = tmp_path / "a.jsonl"
    run(prepare(OPTIONS, journal=journal))
    assert prepare(OPTIONS, journal=journal, fresh=True).kept == {}
    assert not journal.exists()


def test_a_sweep_of_more_points_takes_over_what_it_shares(planned: list[PlanRequest], tmp_path: Path) -> None:
    journal = tmp_path / "a.jsonl"
    run(prepare(replace(OPTIONS, hardware=("dgx-h100",), global_batch=64), journal=journal))
    wider = prepare(replace(OPTIONS, global_batch=64), journal=journal)
    assert sorted(wider.kept) == [4, 5, 6, 7]
    other = prepare(replace(OPTIONS, global_batch=128), journal=journal)
    assert other.kept == {}
    assert other.notes == (f"{journal}: 4 lines are of another sweep, profile or version and ignored",)


def test_the_result_of_a_real_search_comes_back_as_it_was(tmp_path: Path) -> None:
    request = PlanRequest(network=NETWORK, hardware="dgx-a100", devices=4, global_batch=32, top=1)
    row = row_of(request, plan_network(request, graph=graph()))
    with writer(tmp_path / "a.jsonl") as write:
        write(request, graph(), row)
    assert read(tmp_path / "a.jsonl", [request], [graph()]).rows == {0: row}


def test_the_last_line_of_a_point_counts(tmp_path: Path) -> None:
    request = PlanRequest(network=NETWORK, hardware="dgx-a100", devices=16, global_batch=64)
    rows = [row_of(request, replace(result_of(request), elapsed_s=seconds)) for seconds in (1.0, 2.0)]
    with writer(tmp_path / "a.jsonl") as write:
        for row in rows:
            write(request, graph(), row)
    assert read(tmp_path / "a.jsonl", [request], [graph()]).rows == {0: rows[1]}


REQUESTS = tuple(
    PlanRequest(network=NETWORK, hardware="dgx-a100", devices=count, global_batch=64, top=1) for count in COUNTS
)
ROWS = {number: row_of(request, result_of(request)) for number, request in enumerate(REQUESTS)}


@cache
def whole_journal() -> bytes:
    with TemporaryDirectory() as folder:
        return written(Path(folder) / "a.jsonl", ROWS)


def written(path: Path, rows: dict[int, WhatIfRow]) -> bytes:
    with writer(path) as write:
        for number, row in rows.items():
            write(REQUESTS[number], graph(), row)
    return path.read_bytes()


@given(st.data())
def test_a_cut_anywhere_loses_the_cut_line_alone(data: st.DataObject) -> None:
    content = whole_journal()
    cut = data.draw(st.integers(0, len(content)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(content[:cut])
        kept = read(path, REQUESTS, [graph()] * len(REQUESTS)).rows
        ends = [at for at, byte in enumerate(content) if byte == ord("\n")]
        assert kept == {number: ROWS[number] for number, end in enumerate(ends) if end <= cut}
        written(path, {number: row for number, row in ROWS.items() if number not in kept})
        assert read(path, REQUESTS, [graph()] * len(REQUESTS)).rows == ROWS


@given(st.data())
def test_no_damage_makes_another_result(data: st.DataObject) -> None:
    content = bytearray(whole_journal())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(content)
        kept = read(path, REQUESTS, [graph()] * len(REQUESTS))
        assert kept.rows.items() <= ROWS.items()
        if kept.rows != ROWS:
            assert any("ignored" in note for note in kept.notes)


@pytest.mark.parametrize(
    "line", [b"[]", b"{}", b"nonsense", b'{"key": 1, "check": 2, "point": 3}', b"\xff\xfe", b"[" * 100_000]
)
def test_lines_that_are_no_points_are_ignored(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n" + whole_journal())
    kept = read(path, REQUESTS, [graph()] * len(REQUESTS))
    assert kept.rows == ROWS
    assert kept.notes[-1] == f"{path}: 1 line is damaged and ignored"


OTHER = {
    "network": "zoo:mlp",
    "hardware": "dgx-h100",
    "devices": 9,
    "global_batch": 65,
    "sequence_length": 512,
    "precision": "fp32",
    "optimizer": "sgd",
    "search_mode": "recursive_programming",
    "parallel_mode": "data_parallel",
    "pins": Pins(tp=2),
    "expert_imbalance": 1.5,
    "top": 2,
}


@pytest.mark.parametrize("name", [field.name for field in fields(PlanRequest)])
def test_the_key_tells_requests_apart(name: str) -> None:
    request = REQUESTS[0]
    other = replace(request, **{name: OTHER.get(name, "another")})
    assert point_key(other, graph()) != point_key(request, graph())


def test_the_key_tells_networks_and_code_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    key = point_key(REQUESTS[0], graph())
    assert key == point_key(replace(REQUESTS[0]), graph())
    assert key != point_key(REQUESTS[0], replace(graph(), fingerprint="another"))
    monkeypatch.setattr("planner.what_if.journal.code_digest", lambda: "another")
    assert key != point_key(REQUESTS[0], graph())


def test_the_journal_lies_beside_the_report(tmp_path: Path) -> None:
    assert journal_of(tmp_path / "a.html") == tmp_path / "a.html.partial.jsonl"
    assert journal_of(Path("/dev/null")) is None


def test_a_journal_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(InputError, match="choose another --out"):
        read(tmp_path / "a.jsonl", REQUESTS, [graph()] * len(REQUESTS))
    with pytest.raises(InputError, match="choose another --out"), writer(tmp_path / "a.jsonl"):
        pass
    discard(tmp_path / "never there")
