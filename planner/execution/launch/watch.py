"""One rank in trouble stops the job: ranks tell each other that they are there, and why one gives up."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.execution.verification import TOLERANCES, relative_difference
from simulator.calibration.launch import is_peer_failure, record_failure
from simulator.errors import ExecutionError

BEAT_S = 1.0
SILENT_S = 15.0
"""A rank that has not been heard of for so long is taken for dead."""
STALL_S = 15.0
"""A rank that neither computes nor waits for another for so long hangs."""
GRACE_S = 5.0
"""How long a rank may take to end by itself once the job has failed."""
BEATS_TO_TELL = 3
"""Beats of this rank while another has none, from which the other is taken for dead when its connection is lost."""
PROGRESS_S = 5e-4
"""Processor time that shows that a rank is at work."""
KEPT_LOSSES = 64
FAILED = 4

Found = TypeVar("Found")

ALARM = "alarm"
DONE = "done"
WAITS = ("wait(", "recv(", "barrier(", "synchronize(")
DISTRIBUTED = str(Path(dist.__file__).parent)


class Watch:
    """Watches one rank from a thread of its own.

    Every rank sets a counter in the store once a second. Rank 0 looks whether all do, the others whether rank 0 does;
    each looks whether the store answers, whether any rank has raised the alarm, and whether its own step goes on. A
    rank whose step neither uses the processor nor waits for another rank hangs: it raises the alarm, shows where it
    stands and ends.

    Parameters
    ----------
    store : Store
        What the ranks share.
    stalls : bool
        Whether a rank without processor time hangs; not so where it waits for an accelerator.
    end : callable
        Ends this process, given an exit code.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        stalls: bool = True,
        silent_s: float | None = None,
        stall_s: float | None = None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._silent_s, self._stall_s = silent_s or SILENT_S, stall_s or STALL_S
        self._end = end
        self._main = threading.get_ident()
        self._clock = _clock_of(self._main) if stalls else None
        self._armed = False
        self._closed = threading.Event()
        self._heard = time.monotonic()
        self._alarm: str | None = None
        self._explained: Exception | None = None
        self._alarmed_at = 0.0
        self._talk = PrefixStore("watch", store.clone())
        self._talk.set(f"beat/{rank}", "0")
        self._threads = [
            threading.Thread(target=self._talking, daemon=True, name="watch-talk"),
            threading.Thread(target=self._looking, daemon=True, name="watch-look"),
        ]

    def start(self) -> None:
        """Begin to watch; all ranks have come by now."""
        self._heard = time.monotonic()
        for thread in self._threads:
            thread.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Expect progress inside; loading and saving wait for disks, which is no stall."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def close(self) -> None:
        """Stop watching: this rank has done its work."""
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * BEAT_S)
        self._try(lambda: self._talk.set(f"beat/{self._rank}", DONE))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise an error of what is inside as `explain` has it; one that was explained before goes on as it is."""
        try:
            yield
        except Exception as error:
            if error is self._explained:
                raise
            self._explained = self.explain(error)
            if self._explained is error:
                raise
            raise self._explained from error

    def explain(self, error: Exception) -> Exception:
        """Tell the other ranks of this rank's error; one that only names a connection becomes what caused it.

        A rank that was killed has raised no alarm: where there is none, those that no longer beat are named.
        """
        if not is_peer_failure(error):
            self._raise_alarm(f"rank {self._rank} of {self._size} failed: {type(error).__name__}: {error}")
            return error
        before = self._try(self._beats)
        end = time.monotonic() + GRACE_S
        while self._alarm is None and time.monotonic() < end:
            self._alarm = self._try(self._read_alarm)
            time.sleep(BEAT_S / 10)
        if self._alarm is None and before is not None:
            self._alarm = self._who_is_gone(before, error)
        return error if self._alarm is None else ExecutionError(self._alarm)

    def _who_is_gone(self, before: Sequence[bytes], error: Exception) -> str | None:
        """Say which ranks have not beaten since, and tell the others; nothing where this one has hardly either."""
        now = self._try(self._beats)
        if now is None or int(now[self._rank]) - int(before[self._rank]) < BEATS_TO_TELL:
            return None
        gone = [str(rank) for rank, beat in enumerate(now) if beat == before[rank] != DONE.encode()]
        if not gone:
            return None
        many = len(gone) > 1
        text = (
            f"{'ranks' if many else 'rank'} {', '.join(gone)} of {self._size} died or stopped without an error of "
            f"{'their' if many else 'its'} own, as processes do that are killed; rank {self._rank} lost its connection "
            f"({error}). See the log and the host of the first"
        )
        self._raise_alarm(text)
        return text

    def _beats(self) -> list[bytes]:
        return list(self._talk.multi_get([f"beat/{rank}" for rank in range(self._size)]))

    # In the threads

    def _talking(self) -> None:
        counts: dict[int, tuple[bytes, int]] = {}
        beat = 0
        while not self._closed.wait(BEAT_S):
            beat += 1
            self._try(lambda beat=beat: self._beat(beat, counts))  # type: ignore[misc]

    def _beat(self, beat: int, counts: dict[int, tuple[bytes, int]]) -> None:
        self._talk.set(f"beat/{self._rank}", str(beat))
        alarm = self._read_alarm()
        if alarm is not None and self._alarm is None:
            self._alarm, self._alarmed_at = alarm, time.monotonic()
        self._heard = time.monotonic()
        self._listen(beat, counts)

    def _listen(self, beat: int, counts: dict[int, tuple[bytes, int]]) -> None:
        """Look who is silent, on rank 0 any rank, on the others rank 0, beside whose process the store may live on.

        Own beats are the clock, which goes slower on an overloaded host.
        """
        heard = self._beats() if self._rank == 0 else [self._talk.get("beat/0")] if self._talk.check(["beat/0"]) else []
        for rank, count in enumerate(heard):
            if counts.get(rank, (b"", 0))[0] != count:
                counts[rank] = (count, beat)
            elif count != DONE.encode() and (beat - counts[rank][1]) * BEAT_S > self._silent_s:
                self._raise_alarm(
                    f"rank {rank} of {self._size} is dead or stopped: it has not been heard of for "
                    f"{self._silent_s:g} s; see its log and its host"
                )

    def _looking(self) -> None:
        before, since = 0.0, time.monotonic()
        last = since
        while not self._closed.wait(BEAT_S):
            now = time.monotonic()
            if now - last > 3 * BEAT_S:
                # This thread itself did not run: nothing can be said of the others, or of the main thread.
                self._heard += now - last
                since = now
            last = now
            if self._alarm is not None and now - self._alarmed_at > GRACE_S:
                self._stop(self._alarm)
            elif now - self._heard > self._silent_s:
                self._stop(
                    f"rank 0 of {self._size}, which keeps the job together, has not answered rank {self._rank} for "
                    f"{self._silent_s:g} s; see its log and its host"
                )
            if self._clock is None:
                continue
            used = time.clock_gettime(self._clock)
            if self._makes_progress(used - before):
                before, since = used, now
            elif now - since > self._stall_s:
                self._report_stall(sys._current_frames()[self._main])

    def _makes_progress(self, used_s: float) -> bool:
        """Whether the main thread computes, waits for others, or is not in a step.

        Its frame is looked at only if it used no processor, and not kept: it keeps alive the tensors that it names.
        """
        if not self._armed or used_s > PROGRESS_S:
            return True
        frame = sys._current_frames().get(self._main)
        return frame is None or waits_for_others(frame)

    def _report_stall(self, frame: FrameType) -> None:
        code = frame.f_code
        text = (
            f"rank {self._rank} of {self._size} hangs: no progress for {self._stall_s:g} s in {code.co_name} "
            f"({code.co_filename}:{frame.f_lineno}); its log shows the whole stack"
        )
        sys.stderr.write("".join(traceback.format_stack(frame)))
        self._raise_alarm(text)
        self._stop(text)

    def _stop(self, text: str) -> None:
        """End this process, whose main thread does not come back."""
        record_failure(ExecutionError(text))
        sys.stderr.write(f"meshwright: {text}\n")
        sys.stderr.flush()
        self._end(FAILED)

    # The store

    def _read_alarm(self) -> str | None:
        return self._talk.get(ALARM).decode() if self._talk.check([ALARM]) else None

    def _raise_alarm(self, text: str) -> None:
        def tell() -> None:
            if self._talk.add("alarms", 1) == 1:  # the first is the cause
                self._talk.set(ALARM, text)

        self._try(tell)

    @staticmethod
    def _try(work: Callable[[], Found]) -> Found | None:
        """Do something with the store, which may be gone."""
        try:
            return work()
        except (RuntimeError, OSError):
            return None


class Agreement:
    """Ranks that must know the same loss compare it after every step.

    The first of them tells its loss through the store, the others compare theirs with it.
    """

    def __init__(self, store: Store, group: str, rank: int, leader: int, precision: str) -> None:
        self._store = PrefixStore(f"losses/{group}", store)
        self._rank, self._leader, self._allowed = rank, leader, TOLERANCES[precision]

    def check(self, step: int, loss: float, timeout_s: float) -> None:
        """Raise ExecutionError where this rank's loss is another than the first rank's."""
        if self._rank == self._leader:
            self._store.set(str(step), repr(loss))
            if step >= KEPT_LOSSES:
                self._store.delete_key(str(step - KEPT_LOSSES))
            return
        self._store.wait([str(step)], timedelta(seconds=timeout_s))
        expected = float(self._store.get(str(step)))
        difference = relative_difference(loss, expected)
        if difference > self._allowed:
            raise ExecutionError(
                f"ranks diverged at step {step}: rank {self._rank} has loss {loss!r}, rank {self._leader} "
                f"{expected!r}, {difference:.2e} apart; check the memory and the software of both hosts"
            )


def waits_for_others(frame: FrameType) -> bool:
    """Whether a thread stands in an operation that ends when another rank or a device does its part."""
    name = frame.f_code.co_filename
    line = linecache.getline(name, frame.f_lineno)
    return name.startswith(DISTRIBUTED) or any(sign in line for sign in WAITS)


def _clock_of(thread: int) -> int | None:
    """The clock of a thread's processor time; None where the system has none."""
    found = getattr(time, "pthread_getcpuclockid", None)
    return None if found is None else int(found(thread))
