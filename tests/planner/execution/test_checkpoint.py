"""Checkpoints: what is saved by one plan is read by any other, and a crash loses none."""

import json
import os
import pickle
import re
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from planner.execution.checkpoints import checkpoint
from planner.execution.checkpoints.checkpoint import (
    RECORD,
    CheckpointRecord,
    Piece,
    checkpoint_name,
    find_checkpoint,
    finished_checkpoints,
    load_checkpoint,
    place_of,
    read_record,
    remove_unfinished,
    save_checkpoint,
    state_pieces,
    write_record,
)
from planner.execution.checkpoints.options import Begin, checkpoints, find_beginning, prepare_folder
from planner.execution.data.samples import Position
from planner.execution.job import own_piece
from planner.execution.optimizers import hyperparameters, make_step
from planner.sharding.placement import Mesh, MeshAxis
from simulator.calibration.launch import run_workers
from simulator.errors import ExecutionError, InputError
from tests.planner.execution.made import make_plan, run

RECORD_OF_TEN = CheckpointRecord(
    step=10,
    samples=160,
    network="zoo:mlp",
    fingerprint="f" * 64,
    optimizer="adam",
    learning_rate=0.001,
    precision="fp64",
    global_batch=16,
    data=None,
    seed=3,
    devices=2,
)


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    shape=st.lists(st.integers(1, 13), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_place_is_where_the_piece_was_cut_out(sizes, shape, data):
    mesh = Mesh(tuple(MeshAxis(f"axis{i}", size) for i, size in enumerate(sizes)))
    placements = tuple(data.draw(st.integers(-1, len(shape) - 1)) for _ in sizes)
    coordinates = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    whole = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    place = place_of(tuple(shape), mesh, placements, coordinates)
    window = tuple(slice(at, at + size) for at, size in zip(place.offsets, place.sizes, strict=True))
    try:
        piece = own_piece(whole, mesh, placements, coordinates)
    except IndexError:  # fewer pieces than ranks: this one has none
        assert 0 in place.sizes
        return
    assert torch.equal(whole[window], piece)


# One process


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(optimizer, dtype, steps=3):
    """A parameter after some steps of an optimizer, with the optimizer."""
    torch.manual_seed(0)
    parameter, step = torch.randn(4, 6, dtype=dtype), make_step(optimizer, hyperparameters(optimizer))
    for number in range(steps):
        step(parameter, gradient(number, dtype))
    return parameter, step


def gradient(number, dtype):
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number)).to(dtype)


WHOLE = {"w": place_of((4, 6), Mesh(()), (), ())}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "lamb"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_training_goes_on_to_the_bit(group, tmp_path, optimizer, dtype):
    parameter, step = trained(optimizer, dtype)
    path = save_checkpoint(tmp_path, RECORD_OF_TEN, state_pieces({"w": parameter}, {"w": step}, WHOLE))
    assert path.name == "step-00000010"
    resumed, again = torch.zeros_like(parameter), make_step(optimizer, hyperparameters(optimizer))
    load_checkpoint(path, {"w": resumed}, {"w": again}, WHOLE)
    for number in (3, 4):
        step(parameter, gradient(number, dtype))
        again(resumed, gradient(number, dtype))
    assert torch.equal(resumed, parameter)
    assert list(tmp_path.iterdir()) == [path], "nothing unfinished stays"


def test_a_checkpoint_is_replaced_whole(group, tmp_path):
    for value in (1.0, 2.0):
        pieces = {"parameters/w": Piece(local=torch.full((4, 6), value), place=WHOLE["w"])}
        path = save_checkpoint(tmp_path, RECORD_OF_TEN, pieces)
    found = torch.zeros(4, 6)
    load_checkpoint(path, {"w": found}, {"w": make_step("sgd", hyperparameters("sgd"))}, WHOLE)
    assert found.unique().tolist() == [2.0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_of_another_network_is_refused(group, tmp_path):
    parameter, step = trained("adam", torch.float64)
    path = save_checkpoint(tmp_path, RECORD_OF_TEN, state_pieces({"w": parameter}, {"w": step}, WHOLE))
    other = {"w": place_of((4, 5), Mesh(()), (), ())}
    with pytest.raises(InputError, match=r"'w' of shape \(4, 5\), the checkpoint one of shape \(4, 6\)"):
        load_checkpoint(path, {"w": torch.zeros(4, 5)}, {"w": step}, other)
    with pytest.raises(InputError, match="'v' of shape .*, the checkpoint none"):
        load_checkpoint(path, {"v": parameter}, {"v": step}, {"v": WHOLE["w"]})


def test_an_index_cannot_run_anything(group, tmp_path):
    parameter, step = trained("sgd", torch.float64)
    path = save_checkpoint(tmp_path, RECORD_OF_TEN, state_pieces({"w": parameter}, {"w": step}, WHOLE))

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    (path / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(InputError, match=r"it names posix.mkdir, which no checkpoint needs"):
        load_checkpoint(path, {"w": parameter}, {"w": step}, WHOLE)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"junk", pickle.dumps({"a": 1})])
def test_a_damaged_index_is_named(group, tmp_path, content):
    parameter, step = trained("sgd", torch.float64)
    path = save_checkpoint(tmp_path, RECORD_OF_TEN, state_pieces({"w": parameter}, {"w": step}, WHOLE))
    (path / ".metadata").write_bytes(content)
    with pytest.raises(InputError, match=r"\.metadata is not the index of a checkpoint"):
        load_checkpoint(path, {"w": parameter}, {"w": step}, WHOLE)


def test_truncated_data_are_named(group, tmp_path):
    parameter, step = trained("sgd", torch.float64)
    path = save_checkpoint(tmp_path, RECORD_OF_TEN, state_pieces({"w": parameter}, {"w": step}, WHOLE))
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ExecutionError, match=r"step-00000010 cannot be read: rank 0"):
        load_checkpoint(path, {"w": parameter}, {"w": step}, WHOLE)


def test_a_folder_that_cannot_be_made_is_named(group, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExecutionError, match=r"checkpoint .*file.* could not be written"):
        save_checkpoint(tmp_path / "file", RECORD_OF_TEN, {})


# What is found in a folder


def fake_checkpoint(folder, step):
    path = folder / checkpoint_name(step)
    path.mkdir(parents=True)
    write_record(path / RECORD, RECORD_OF_TEN.model_copy(update={"step": step}))
    return path


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    for step in (20, 9, 100_000_000):
        fake_checkpoint(tmp_path, step)
    (tmp_path / "step-00000030").mkdir()  # without its record
    (tmp_path / ".step-00000040.0123abcd.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    assert [path.name for path in finished_checkpoints(tmp_path)] == [
        "step-00000009",
        "step-00000020",
        "step-100000000",
    ]
    assert find_checkpoint(tmp_path).name == "step-100000000"
    assert find_checkpoint(tmp_path / "step-00000020").name == "step-00000020"
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "notes", "only what a crash left goes"


@pytest.mark.parametrize(("name", "words"), [("", "holds no whole checkpoint"), ("gone", "is no folder")])
def test_no_checkpoint(tmp_path, name, words):
    with pytest.raises(InputError, match=words):
        find_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"step": -1}, "step"), ({"seed": "x"}, "seed"), ({"extra": 1}, "extra"), ({"version": 2}, "version")],
)
def test_a_record_is_checked(tmp_path, change, words):
    path = fake_checkpoint(tmp_path, 10)
    content = json.loads((path / RECORD).read_text()) | change
    (path / RECORD).write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"{RECORD}: {words}"):
        read_record(path)


@pytest.fixture(scope="module")
def mlp():
    return replace(make_plan("zoo:mlp", 2, batch=16, tp=2), optimizer="adam", precision="fp64")


def beginning(resume, plan, **options):
    given = {"steps": 20, "precision": "fp64", "seed": None, "data": None, "learning_rate": None, **options}
    return find_beginning(resume, plan, **given)


def test_what_the_user_leaves_out_is_taken_over(group, tmp_path, mlp):
    save_checkpoint(tmp_path, RECORD_OF_TEN.model_copy(update={"fingerprint": mlp.fingerprint}), {})
    found = beginning(tmp_path, mlp)
    assert (found.seed, found.learning_rate, found.position) == (3, 0.001, Position(step=10, sample=160))
    assert beginning(tmp_path, mlp, learning_rate=0.5).learning_rate == 0.5
    assert beginning(None, mlp).position == Position()
    for options, words in (
        ({"steps": 10}, "has 10 steps already"),
        ({"seed": 4}, "trained with seed 3"),
        ({"data": "synthetic"}, "trained on the default data"),
        ({"precision": "fp32"}, "its precision is fp64, the plan's fp32"),
    ):
        with pytest.raises(InputError, match=words):
            beginning(tmp_path, mlp, **options)
    with pytest.raises(InputError, match="its optimizer is adam, the plan's lamb"):
        beginning(tmp_path, replace(mlp, optimizer="lamb"))
    with pytest.raises(InputError, match="its network is"):
        beginning(tmp_path, replace(mlp, fingerprint="0" * 64))


def cut(file):
    file.write_bytes(file.read_bytes()[:50])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: cut(path / RECORD), "checkpoint.json: "),
        (lambda path: cut(path / ".metadata"), "is not the index of a checkpoint"),
        (lambda path: (path / ".metadata").unlink(), "does not exist"),
        (lambda path: cut(next(path.glob("*.distcp"))), r"distcp has 50 of \d+ bytes"),
        (lambda path: next(path.glob("*.distcp")).unlink(), "distcp cannot be read: No such file"),
    ],
    ids=["record", "index", "no index", "data", "no data"],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(group, tmp_path, mlp, damage, words):
    parameter, step = trained("adam", torch.float64)
    pieces = state_pieces({"w": parameter}, {"w": step}, WHOLE)
    record = RECORD_OF_TEN.model_copy(update={"fingerprint": mlp.fingerprint})
    first = save_checkpoint(tmp_path, record, pieces)
    newest = save_checkpoint(tmp_path, record.model_copy(update={"step": 15, "samples": 240}), pieces)
    assert beginning(tmp_path, mlp).position.step == 15
    damage(newest)
    found = beginning(tmp_path, mlp)
    assert (found.position.step, found.resume) == (10, first)
    assert len(found.notes) == 1
    assert re.search(rf"step-00000015.*{words}.*; resumed from step-00000010 instead", found.notes[0])
    with pytest.raises(InputError, match=words):
        beginning(newest, mlp)
    damage(first)
    with pytest.raises(InputError, match="every checkpoint there is damaged"):
        beginning(tmp_path, mlp)


def test_where_to_save(tmp_path):
    fresh = Begin(seed=0, data=None, learning_rate=None)
    fake_checkpoint(tmp_path, 10)
    with pytest.raises(InputError, match="holds checkpoints already, the newest step-00000010; .*--resume"):
        checkpoints(tmp_path, None, fresh, RECORD_OF_TEN)
    with pytest.raises(InputError, match="--save-every 5 needs a folder"):
        checkpoints(None, 5, fresh, RECORD_OF_TEN)
    resumed = replace(fresh, resume=tmp_path / "step-00000010", position=Position(step=10, sample=160))
    orders = checkpoints(tmp_path, 4, resumed, RECORD_OF_TEN)
    assert [done for done in range(11, 20) if orders.is_due(done, 19)] == [12, 16, 19]
    assert not any(checkpoints(None, None, fresh, RECORD_OF_TEN).is_due(done, 5) for done in range(6))


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    fresh = Begin(seed=0, data=None, learning_rate=None)
    for place in (tmp_path / "file" / "below", "/proc"):
        with pytest.raises(InputError, match=f"--save {place}: it cannot be written to: .*; name a folder"):
            prepare_folder(checkpoints(place, None, fresh, RECORD_OF_TEN))
    prepare_folder(checkpoints(tmp_path / "new" / "below", None, fresh, RECORD_OF_TEN))
    assert list((tmp_path / "new" / "below").iterdir()) == []


# Real runs


GPT = {
    "two stages": (2, {"pp": 2, "micro_batch": 2}),
    "three stages": (3, {"pp": 3, "micro_batch": 2}),
    "one device": (1, {}),
    "zero": (2, {"dp": 2, "optimizer_sharding": "zero3"}),
    "data and tensor": (4, {"dp": 2, "tp": 2}),
}


def gpt(name):
    devices, pins = GPT[name]
    return make_plan("zoo:gpt2-tiny", devices, batch=8, **pins)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("two stages", "data and tensor"),
        ("zero", "two stages"),
        ("data and tensor", "one device"),
        ("three stages", "zero"),
    ],
)
def test_another_plan_goes_on_as_if_nothing_had_been(tmp_path, before, after):
    """`run` verifies against one process that trains all steps without a break."""
    first = run(gpt(before), steps=2, save=tmp_path, verify=False)
    assert first.checkpoint == str(tmp_path / "step-00000002")
    second = run(gpt(after), steps=4, resume=tmp_path)
    assert second.first_step == 2
    assert len(second.losses) == len(second.reference_losses) == 2
    assert second.max_loss_difference < 1e-10
    assert second.losses[0] != first.losses[0]


@pytest.mark.slow
def test_the_same_plan_goes_on_to_the_bit(tmp_path, mlp):
    whole = run(mlp, steps=5, save=tmp_path, save_every=2, verify=False)
    assert [path.name for path in finished_checkpoints(tmp_path)] == [checkpoint_name(n) for n in (2, 4, 5)]
    rest = run(mlp, steps=5, resume=tmp_path / checkpoint_name(2), verify=False)
    assert rest.losses == whole.losses[2:]


def dying(folder, place):
    """Save a checkpoint, then die in the middle of saving another."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = Mesh((MeshAxis("data", 2),))
    local = torch.arange(4.0).reshape(2, 2) + 4 * rank
    pieces = {f"parameters/{i}": Piece(local=local, place=place_of((4, 2), mesh, (0,), (rank,))) for i in range(5)}
    save_checkpoint(folder, RECORD_OF_TEN, pieces)
    looked_up = []

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    class Dying(checkpoint._SavePlanner):
        def lookup_object(self, index):
            looked_up.append(index)
            if place == "writing" and rank == 1 and len(looked_up) == 3:
                die()
            return super().lookup_object(index)

    checkpoint._SavePlanner = Dying
    if place == "naming":
        checkpoint.write_record = lambda *_: die()
    save_checkpoint(folder, RECORD_OF_TEN.model_copy(update={"step": 20}), pieces)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["writing", "naming"])
def test_death_while_saving_loses_no_earlier_checkpoint(tmp_path, place):
    with pytest.raises(ExecutionError, match="SIGKILL"):
        run_workers(dying, (tmp_path, place), 2)
    assert [path.name for path in finished_checkpoints(tmp_path)] == ["step-00000010"]
    left = [path.name for path in tmp_path.iterdir()]
    assert any(name.startswith(".step-00000020") for name in left), "it died in the middle"
    remove_unfinished(tmp_path)
    found = torch.zeros(4, 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        place_whole = place_of((4, 2), Mesh(()), (), ())
        step = make_step("sgd", hyperparameters("sgd"))
        load_checkpoint(find_checkpoint(tmp_path), {"3": found}, {"3": step}, {"3": place_whole})
    finally:
        dist.destroy_process_group()
    assert torch.equal(found, torch.arange(8.0).reshape(4, 2))
