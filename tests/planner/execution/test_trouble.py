"""A rank in trouble stops the whole job, with its own error; nothing of the job stays."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from planner.execution import worker
from planner.execution.launch import watch
from planner.execution.launch.joining import meet
from planner.execution.launch.membership import Membership
from planner.execution.launch.watch import ALARM, Agreement, Watch, waits_for_others
from planner.execution.verification import TOLERANCES
from planner.plans.file import write_plan
from simulator.errors import ExecutionError, InputError
from tests.planner.execution.made import make_plan, run

ROOT = Path(__file__).parents[3]
SICK_STEP, SICK_RANK = 2, 1


def sleep_for_ever():
    while True:
        time.sleep(3600)


def trouble(kind, loss):
    """What happens to the sick rank in its step."""
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "raises":
        raise ValueError("the disk is full")
    elif kind == "hangs":
        sleep_for_ever()
    elif kind == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    return {"has no number": math.nan, "differs": None if loss is None else loss * 1.001}.get(kind, loss)


def sicken(kind):
    """Let one rank of this process's job fall ill, with a shorter patience than the usual."""
    watch.STALL_S, watch.SILENT_S = 5.0, 8.0
    healthy, steps = worker.Trainer.run, []

    def run(trainer, batches):
        steps.append(len(steps))
        loss, seconds = healthy(trainer, batches)
        if steps[-1] == SICK_STEP and dist.get_rank() == SICK_RANK:
            loss = trouble(kind, loss)
        return loss, seconds

    worker.Trainer.run = run


def sick_train(kind, pids, job, membership=None):
    """Train as a rank of a job one rank of which falls ill."""
    sicken(kind)
    (pids / str(os.getpid())).touch()
    return worker.train(job, membership)


def alive(pid):
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def assert_gone(pids):
    found = [int(path.name) for path in pids.iterdir()]
    assert found
    end = time.monotonic() + 30
    while any(map(alive, found)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in found if alive(pid)]


@pytest.fixture(scope="module")
def mlp():
    return make_plan("zoo:mlp", 2, batch=16, tp=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dies", "rank 1 of 2 failed: it was ended by signal SIGKILL"),
        ("raises", "rank 1 of 2 failed: ValueError: the disk is full"),
        ("hangs", r"rank 1 of 2 hangs: no progress for 5 s in sleep_for_ever \(.*test_trouble.py:\d+\)"),
        (
            "is stopped",
            "rank 1 of 2 (is dead or stopped: it has not been heard of for 8 s|failed: it has been stopped)",
        ),
        ("has no number", "training diverged at step 2: loss nan; lower --learning-rate"),
        ("differs", r"ranks diverged at step 2: rank 1 has loss .*, rank 0 .*, 1.0\de-03 apart"),
    ],
)
def test_one_rank_in_trouble(mlp, tmp_path, monkeypatch, kind, words):
    pids, logs = tmp_path / "pids", tmp_path / "logs"
    pids.mkdir()
    monkeypatch.setattr("planner.execution.run.train", partial(sick_train, kind, pids))
    with pytest.raises(ExecutionError, match=words):
        run(mlp, steps=50, verify=False, log_dir=logs)
    assert_gone(pids)
    said = (logs / "device1" / "train.log").read_text()
    assert "step: 1, loss: " in said
    assert {"raises": "ValueError: the disk is full", "hangs": "in sleep_for_ever"}.get(kind, "") in said


SICK_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.planner.execution.test_trouble import sicken
if __name__ == "__main__":
    sicken({kind!r})
    from planner.cli import main
    main()
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def run_agents(folder, *, program=("-m", "planner.cli"), options=()):
    """Two agents of torchrun, each with one rank, as two hosts would have them: exit code, output and errors of each.

    They write to files: while one is waited for, the pipe of the other could fill up, and both would wait for ever.
    """
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "localhost"]
    launcher += ["--master-port", free_port(), "--node-rank"]
    arguments = ["execute", str(folder / "strategy.json"), "--precision", "fp64", *options]
    files = [(folder / f"agent{node}.out", folder / f"agent{node}.err") for node in range(2)]
    with ExitStack() as opened:
        started = []
        for node, paths in enumerate(files):
            out, errors = (opened.enter_context(path.open("w")) for path in paths)
            command = [sys.executable, *launcher, str(node), *program, *arguments]
            started.append(subprocess.Popen(command, stdout=out, stderr=errors, cwd=ROOT))
            opened.callback(started[-1].kill)
        codes = [agent.wait(timeout=300) for agent in started]
    return [(code, out.read_text(), errors.read_text()) for code, (out, errors) in zip(codes, files, strict=True)]


@pytest.mark.slow
def test_two_agents_train_as_one_process_does(mlp, tmp_path):
    write_plan(mlp, tmp_path / "strategy.json")
    options = ["--steps", "3", "--verify", "--quiet", "--log-dir", str(tmp_path / "logs")]
    ended = run_agents(tmp_path, options=options)
    assert [(code, bool(out.strip())) for code, out, _ in ended] == [(0, True), (0, False)], ended
    log = (tmp_path / "logs" / "device1" / "train.log").read_text()
    assert "step: 2, loss: " in log
    assert "profiler" not in log
    assert "MASTER_PORT=" in (tmp_path / "logs" / "device1" / "env.log").read_text()


@pytest.mark.slow
def test_trouble_on_one_host_reaches_the_other(mlp, tmp_path):
    write_plan(mlp, tmp_path / "strategy.json")
    program = tmp_path / "sick.py"
    program.write_text(SICK_PROGRAM.format(root=str(ROOT), kind="hangs"))
    for code, _, errors in run_agents(tmp_path, program=[str(program)], options=["--steps", "50", "--quiet"]):
        assert code
        assert "rank 1 of 2 hangs: no progress" in errors


# Coming together


def place(rank, port, size=2):
    return Membership(launcher="test", rank=rank, world_size=size, local_rank=rank, address="localhost", port=int(port))


def met(members, timeout_s=60.0, digests=("a", "a", "a")):
    """What comes of processes that meet, here threads: a store or an error."""
    found = [None] * len(members)

    def come(i):
        try:
            found[i] = meet(members[i], timeout_s, digests[i])
        except (ExecutionError, InputError) as error:
            found[i] = error

    threads = [threading.Thread(target=come, args=(i,)) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_come():
    port = free_port()
    stores = met([place(0, port), place(1, port)])
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


def test_one_does_not_come(monkeypatch):
    monkeypatch.setattr("planner.execution.launch.joining.LINGER_S", 0.2)
    port = free_port()
    first, second = met([place(0, port, 3), place(2, port, 3)], timeout_s=2.0)
    words = f"only 2 of 3 processes came to localhost:{port} within 2 s, missing rank 1; .*--join-timeout"
    assert isinstance(first, ExecutionError)
    assert re.match(words, str(first))
    assert isinstance(second, ExecutionError)


def test_the_first_does_not_come():
    port = free_port()
    with pytest.raises(ExecutionError, match=rf"rank 1 of 2 did not reach localhost:{port} within 1 s"):
        meet(place(1, port), 1.0, "a")


def test_the_port_is_taken():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        with pytest.raises(ExecutionError, match=r"rank 0 cannot listen at .*: the port is taken; set MASTER_PORT"):
            meet(place(0, other.getsockname()[1]), 1.0, "a")


def test_two_have_the_same_rank(monkeypatch):
    monkeypatch.setattr("planner.execution.launch.joining.LINGER_S", 0.2)
    port = free_port()
    found = met([place(0, port, 3), place(1, port, 3), place(1, port, 3)], timeout_s=2.0)
    assert any("two processes have rank 1 of 3" in str(error) for error in found)


def test_all_are_told_who_was_asked_for_something_else(monkeypatch):
    monkeypatch.setattr("planner.execution.launch.joining.LINGER_S", 0.1)
    port = free_port()
    for error in met([place(rank, port, 3) for rank in range(3)], digests=("a", "b", "a")):
        assert isinstance(error, InputError)
        assert "rank 1 was started with another strategy or other options than rank 0" in str(error)


# Watching


def _clonable(store):
    """A store in this process, as a watch asks for it."""
    return type("Clonable", (), {"clone": lambda self: store})()


def watching(store, rank, size, **options):
    ends = []
    done = threading.Event()

    def end(code):
        ends.append(code)
        done.set()

    watched = Watch(store, rank, size, end=end, **options)
    return watched, ends, done


def test_losses_that_differ_by_more_than_rounding_are_found():
    store = dist.HashStore()
    leader, other = (Agreement(store, "all", rank, 0, "fp64") for rank in range(2))
    leader.check(0, 1.0, 5.0)
    other.check(0, 1.0 + TOLERANCES["fp64"] / 2, 5.0)
    leader.check(1, 2.0, 5.0)
    with pytest.raises(ExecutionError, match=r"ranks diverged at step 1: rank 1 has loss 2.01, rank 0 2.0"):
        other.check(1, 2.01, 5.0)


def test_the_first_alarm_is_what_all_are_told():
    store = dist.HashStore()
    first, second = (watching(_clonable(store), rank, 2)[0] for rank in range(2))
    own = ValueError("the disk is full")
    assert first.explain(own) is own
    second.explain(ValueError("later"))
    told = second.explain(RuntimeError("Connection closed by peer"))
    assert isinstance(told, ExecutionError)
    assert str(told) == "rank 0 of 2 failed: ValueError: the disk is full"


def test_the_others_are_told_before_the_group_is_taken_down(monkeypatch):
    """Taking a group down may wait for ranks that know nothing yet."""
    store, known = dist.HashStore(), []

    @contextmanager
    def group(*_):
        try:
            yield
        finally:
            known.append(PrefixStore("watch", store).get(ALARM).decode())

    def fail(*_):
        raise ValueError("the disk is full")

    monkeypatch.setattr(worker, "meet", lambda *_: _clonable(store))
    monkeypatch.setattr(worker, "process_group", group)
    monkeypatch.setattr(worker, "_train_rank", fail)
    lowered = SimpleNamespace(host_parameters=())
    job = SimpleNamespace(logs=None, device_type="cpu", join_timeout_s=1.0, timeout_s=1.0, digest="", lowered=lowered)
    place = Membership(launcher="torchrun", rank=0, world_size=2, local_rank=0, address="localhost", port=1)
    with pytest.raises(ValueError, match="the disk is full"):
        worker.train(job, place)
    assert known == ["rank 0 of 2 failed: ValueError: the disk is full"]


def beating(monkeypatch, *, others, own):
    """What rank 1 of 3 says of a lost connection while its own count and those of ranks 0 and 2 go on so far."""
    monkeypatch.setattr(watch, "GRACE_S", 0.05)
    monkeypatch.setattr(watch, "BEAT_S", 0.05)
    store = dist.HashStore()
    subject = watching(_clonable(store), 1, 3)[0]
    counts = iter([["5", "5", "5"], [others[0], own, others[1]]])
    monkeypatch.setattr(subject, "_beats", lambda: [count.encode() for count in next(counts)])
    return str(subject.explain(RuntimeError("Connection closed by peer"))), PrefixStore("watch", store)


def test_a_killed_rank_is_named_by_one_that_lost_its_connection(monkeypatch):
    told, talk = beating(monkeypatch, others=("9", "5"), own="9")
    assert told.startswith("rank 2 of 3 died or stopped without an error of its own")
    assert "rank 1 lost its connection (Connection closed by peer)" in told
    assert talk.get(ALARM).decode() == told


@pytest.mark.parametrize(("others", "own"), [(("9", "9"), "9"), (("9", watch.DONE), "9"), (("5", "5"), "6")])
def test_no_rank_is_named_that_may_live(others, own, monkeypatch):
    """All beat, one has done its work, or the host is so busy that this rank hardly beats either."""
    told, talk = beating(monkeypatch, others=others, own=own)
    assert told == "Connection closed by peer"
    assert not talk.check([ALARM])


@pytest.fixture
def fast(monkeypatch):
    """Beats ten times as fast."""
    monkeypatch.setattr(watch, "BEAT_S", 0.1)
    monkeypatch.setattr(watch, "GRACE_S", 0.1)


def test_an_alarm_ends_a_rank_that_waits(fast, capsys):
    store = dist.HashStore()
    PrefixStore("watch", store).set(ALARM, "rank 7 of 8 failed: ValueError: of its own")
    watched, ends, done = watching(_clonable(store), 1, 8)
    watched.start()
    assert done.wait(60)
    watched._closed.set()
    assert ends[0] == 4
    assert "meshwright: rank 7 of 8 failed" in capsys.readouterr().err


@pytest.mark.parametrize(("silent", "other"), [(1, 0), (0, 1)])
def test_a_silent_rank_is_noticed_by_the_first_and_the_first_by_the_others(fast, silent, other):
    store = dist.HashStore()
    PrefixStore("watch", store).set(f"beat/{silent}", "0")
    watched, _, _ = watching(_clonable(store), other, 2, silent_s=0.5)
    watched.start()
    PrefixStore("watch", store).wait([ALARM], timedelta(seconds=20))
    watched.close()
    assert f"rank {silent} of 2 is dead or stopped" in PrefixStore("watch", store).get(ALARM).decode()


def test_a_rank_that_has_done_its_work_may_be_silent(fast):
    store = dist.HashStore()
    first, _, _ = watching(_clonable(store), 0, 2, silent_s=0.2)
    second, _, _ = watching(_clonable(store), 1, 2)
    second.close()
    first.start()
    time.sleep(1)
    first.close()
    assert not PrefixStore("watch", store).check([ALARM])


def test_waiting_for_others_is_no_stall():
    frames = []

    def wait(work):
        work.wait()

    class Work:
        def wait(self):
            frames.extend([sys._getframe(), sys._getframe(1)])

    wait(Work())
    here, caller = frames
    assert waits_for_others(caller)
    assert not waits_for_others(here)


def test_who_looks_at_a_rank_keeps_nothing_alive(fast, monkeypatch):
    watched, _, _ = watching(_clonable(dist.HashStore()), 0, 1)

    def hold():
        held = dist.HashStore()
        time.sleep(0.5)  # no processor is used, so its frame is looked at
        monkeypatch.setattr(watch, "BEAT_S", 60.0)
        time.sleep(0.3)
        return weakref.ref(held)

    watched.start()
    with watched.step():
        reference = hold()
    assert reference() is None
    watched._closed.set()
