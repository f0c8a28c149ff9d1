"""What all schedules promise, and their exchange with PyTorch's files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.errors import InputError, ProgramError
from simulator.schedules import (
    SCHEDULES,
    ActionKind,
    check_schedule,
    format_schedule_csv,
    make_schedule,
    parse_schedule_csv,
)

EVERY = pytest.mark.parametrize("name", list(SCHEDULES))


def shapes(name: str, data: st.DataObject) -> tuple[int, int, int | None]:
    """Ranks, micro-batches and chunks that a schedule takes."""
    if name == "gradient_accumulation":
        return 1, data.draw(st.integers(1, 9)), None
    if name == "dualpipe":
        half = data.draw(st.integers(1, 4))
        return 2 * half, 2 * data.draw(st.integers(2 * half, 2 * half + 5)), None
    ranks = data.draw(st.integers(1, 8))
    if name == "dualpipe_v":
        return ranks, data.draw(st.integers(2 * ranks, 2 * ranks + 5)), None
    micro_batches = data.draw(st.integers(1, 20)) * (2 if name == "multi_copy" else 1)
    return ranks, micro_batches, data.draw(st.integers(1, 4)) if name == "interleaved_1f1b" else None


@EVERY
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_schedule_keeps_the_contract(name: str, data: st.DataObject) -> None:
    ranks, micro_batches, chunks = shapes(name, data)
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    check_schedule(schedule)
    assert (schedule.name, schedule.ranks, schedule.micro_batches) == (name, ranks, micro_batches)
    assert np.bincount(schedule.stage_rank, minlength=ranks).tolist() == [schedule.stages // ranks] * ranks
    assert not schedule.paired[schedule.offsets[1:] - 1].any(), "a pair stays on its rank"
    assert np.count_nonzero(schedule.kind == ActionKind.FORWARD) == schedule.chain_stages * micro_batches
    assert schedule is make_schedule(name, ranks, micro_batches, chunks)


@EVERY
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_written_schedules_read_back(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    schedule = make_schedule(name, *shapes(name, data))
    if schedule.chains > 1:
        with pytest.raises(InputError, match="dualpipe_v"):
            format_schedule_csv(schedule)
        return
    path = tmp_path_factory.mktemp("schedule") / "schedule.csv"
    path.write_text(format_schedule_csv(schedule))
    read = parse_schedule_csv(path)
    for field in ("stage_rank", "offsets", "kind", "stage", "micro_batch"):
        np.testing.assert_array_equal(getattr(read, field), getattr(schedule, field))
    if name != "multi_copy":
        np.testing.assert_array_equal(read.paired, schedule.paired)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "chunks", "message"),
    [
        ("2f2b", 2, 2, None, "Unknown schedule '2f2b': use one of gpipe"),
        ("1f1b", 0, 2, None, "at least one rank"),
        ("1f1b", 2, 2, 2, r"1f1b has 1 stage\(s\) a rank, but 2"),
        ("zbv", 2, 4, 1, r"zbv has 2 stage\(s\)"),
        ("dualpipe", 3, 12, None, "even"),
        ("dualpipe_v", 4, 6, None, "at least 2 x ranks"),
        ("multi_copy", 2, 3, None, "in pairs, but there are 3"),
        ("gradient_accumulation", 2, 3, None, "no pipeline"),
    ],
)
def test_wrong_shapes_are_refused(name: str, ranks: int, micro_batches: int, chunks: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_schedule(name, ranks, micro_batches, chunks)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.csv"
    path.write_text(text)
    return path


def test_comms_are_checked_and_left_out(tmp_path: Path) -> None:
    rows = ["0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD", "1RECV_F0,1F0,1I0,1SEND_B0,1W0"]
    schedule = parse_schedule_csv(written(tmp_path, "\n".join(rows)))
    assert [[str(action) for action in schedule.actions(rank)] for rank in (0, 1)] == [
        ["0F0", "0B0"],
        ["1F0", "1I0", "1W0"],
    ]


def test_waits_for_sends_come_behind_what_they_wait_for(tmp_path: Path) -> None:
    receiver = "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0"
    good = "0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0"
    assert str(parse_schedule_csv(written(tmp_path, f"{good}\n{receiver}\n")).actions(0)[0]) == "0F0"
    stuck = "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n0F0,0WAIT_SEND_F0,0SEND_F0,0RECV_B0,0B0\n"
    with pytest.raises(ProgramError, match=r"rank 1 at 0WAIT_SEND_F0 \(line 2, column 2\) waits for 1RECV_F0"):
        parse_schedule_csv(written(tmp_path, stuck))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", InputError, "holds no action"),
        ("0F0,0X0\n", InputError, "plan.csv, line 1, column 2: '0X0' is not an action that torch up to 2.15 writes"),
        ("0F0,0B0\n1F0,(1B0)OVERLAP_F_B\n", InputError, "line 2, column 2: .* does not hold two actions"),
        ("0F0,0PREFETCH,0B0\n", InputError, "column 2: '0PREFETCH' is not an action that torch up to 2.15 writes"),
        ("0F\n", InputError, "column 1: '0F' is not an action"),
        ("0F0,0B0,1F0,1B0\n\n2F0,2B0\n", InputError, "rank 1 computes nothing"),
        ("0F0,0B0\n2F0,2B0\n", InputError, "stage 1 is missing, but stage 2 is there"),
        ("0F0,0B0,0F10000000000000,0B1\n", InputError, "micro-batch 2 is missing|micro-batch 1"),
        ("0F0\n1F0,1B0\n", ProgramError, r"Stage 0 \(rank 0\) needs one backward pass.* F 1, B 0, I 0, W 0"),
        ("0F0,0F0,0B0\n", ProgramError, "needs one forward pass F of micro-batch 0"),
        ("0F0,0I0\n", ProgramError, "needs one backward pass, B or I and W"),
        ("0B0,0F0\n", ProgramError, "Rank 0 runs 0B0 before 0F0"),
        ("0F0,0W0,0I0\n", ProgramError, "Rank 0 runs 0W0 before 0I0"),
        ("0F0,0B0\n1F0,0F1,1B0,0B1,1F1,1B1\n", ProgramError, "Action 0F1 is on rank 1, but stage 0 is held by rank 0"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            ProgramError,
            r"Deadlock .* rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0",
        ),
        (
            "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            ProgramError,
            r"rank 0 at 0B0 \(line 1, column 3\) waits for 0RECV_B0",
        ),
        ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", ProgramError, "rank 1 at 1RECV_F0 .* waits for 0SEND_F0"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0,0SEND_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            ProgramError,
            "rank 0 runs 0SEND_B0, but no rank runs -1RECV_B0",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_schedule_csv(written(tmp_path, text))


CELLS = st.one_of(
    st.text(max_size=4),
    st.builds(lambda s, k, m: f"{s}{k}{m}", st.integers(0, 3), st.sampled_from("FBIW"), st.integers(0, 3)),
    st.sampled_from(
        ["0SEND_F0", "1RECV_F0", "(0F0;1B0)OVERLAP_F_B", "()OVERLAP_F_B", "(0F0)", "99999999999999999999F0"]
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(CELLS, max_size=5), max_size=3),
    name=st.sampled_from(["1f1b", "zbv", "dualpipe_v"]),
    place=st.integers(0, 40),
    cell=CELLS,
)
def test_any_file_is_a_schedule_or_an_error(
    rows: list[list[str]], name: str, place: int, cell: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Arbitrary cells, and valid files with one cell changed."""
    valid = format_schedule_csv(make_schedule(name, 2, 4)).replace("\n", ",\n,").split(",")
    valid[place % len(valid)] = cell
    path = tmp_path_factory.mktemp("any") / "any.csv"
    for text in ("\n".join(",".join(row) for row in rows), ",".join(valid)):
        path.write_text(text)
        with suppress(InputError, ProgramError):
            check_schedule(parse_schedule_csv(path))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="schedule .*none.csv.* does not exist"):
        parse_schedule_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(InputError, match="byte 0 is not UTF-8"):
        parse_schedule_csv(tmp_path / "binary.csv")


def test_interleaving_is_that_of_megatron() -> None:
    """Warm-up 2(p - r - 1) + (v - 1)g and the table of groups; groups of 5 where p = 4 leaves 2 of 14 over."""
    schedule = make_schedule("interleaved_1f1b", 4, 14, 2)
    first = schedule.actions(0)
    assert [str(action) for action in first[:12]] == [
        *(f"0F{i}" for i in range(5)),
        *(f"4F{i}" for i in range(5)),
        "0F5",
        "0F6",
    ]
    assert [next(i for i, a in enumerate(schedule.actions(r)) if a.kind) for r in range(4)] == [12, 10, 8, 6]
