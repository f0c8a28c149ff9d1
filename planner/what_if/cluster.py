"""A sweep on a Dask cluster, through joblib's Dask backend."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from planner.graph.cache import code_digest
from planner.what_if.options import point_name
from planner.what_if.rows import WhatIfRow, Work, graph_text, plan_numbered
from simulator.errors import InputError, MeshwrightError

if TYPE_CHECKING:
    from distributed import Client

    from planner.graph.operator_graph import OperatorGraph
    from planner.planning.planning import PlanRequest

SCHEME = "dask://"
CONNECT_S = 10.0
"""How long a scheduler and its first worker may take to answer."""
LOST_S = 30.0
"""How long a sweep waits for a cluster that has no workers or no scheduler any more."""
_POLL_S = 1.0


def on_cluster(
    graph: OperatorGraph,
    waiting: Mapping[int, PlanRequest],
    address: str,
    *,
    lost_s: float = LOST_S,
    work: Work = plan_numbered,
) -> Generator[tuple[int, WhatIfRow], None, None]:
    """Plan points on the workers of a Dask cluster; closing the generator takes back what has not begun.

    Parameters
    ----------
    graph
        The captured network; workers need neither torch nor its source.
    waiting
        Points by number, in the order in which to begin them.
    address
        ``dask://HOST:PORT`` of the scheduler.
    lost_s
        Seconds to wait for a cluster that went away.
    work
        Plans one point on a worker.

    Yields
    ------
    tuple of int and WhatIfRow
        In the order in which they are done.

    Raises
    ------
    InputError
        Dask is not installed, nothing answers at the address, or its workers run other code.
    MeshwrightError
        Workers died again and again at one point, or the cluster went away.
    """
    with _client(address) as client:
        _check_workers(client, address)
        done = _Feed(client, graph, waiting, work)
        quiet_s = 0.0
        for _ in waiting:
            while (item := done.next(_POLL_S)) is None:
                quiet_s = 0.0 if _workers(client) else quiet_s + _POLL_S
                if quiet_s >= lost_s:
                    raise MeshwrightError(
                        f"--cluster {address!r}: the scheduler or all of its workers went away {quiet_s:.0f} s ago; "
                        "start them again and repeat the command"
                    )
            quiet_s = 0.0
            if isinstance(item, Exception):
                raise item
            yield item


@contextmanager
def _client(address: str) -> Iterator[Client]:
    target = _target(address)
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError(
            f"--cluster {address!r} needs Dask, which is not installed; install it with "
            "pip install 'meshwright[dask]', or leave --cluster out to use the cores of this machine"
        ) from error
    # What it logs of lost connections would only repeat the message that the user gets.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    try:
        client = _in_time(lambda: Client(target, timeout=CONNECT_S, set_as_default=False))
    except (OSError, ValueError, TimeoutError) as error:
        raise InputError(
            f"--cluster {address!r}: no Dask scheduler answers there within {CONNECT_S:.0f} s; start one with "
            "`dask scheduler` and `dask worker`, or correct the address"
        ) from error
    try:
        yield client
    finally:
        client.close(timeout=_POLL_S)


def _in_time(connect: Callable[[], Client]) -> Client:
    """Connect, or TimeoutError: Dask's own limit does not hold where something listens and stays silent."""
    answer: Future[Client] = Future()

    def answered() -> None:
        try:
            answer.set_result(connect())
        except Exception as error:  # noqa: BLE001 (raised where the answer is awaited)
            answer.set_exception(error)

    threading.Thread(target=answered, daemon=True).start()
    return answer.result(timeout=CONNECT_S + 1.0)


def _target(address: str) -> str:
    """The address as Dask writes it."""
    host, colon, port = address.removeprefix(SCHEME).rpartition(":")
    if not address.startswith(SCHEME) or not host or not colon or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"--cluster {address!r} is no address of a Dask scheduler; write dask://HOST:PORT")
    return f"tcp://{host}:{port}"


def _workers(client: Client) -> list[str]:
    """Addresses of the workers; none where the scheduler does not answer."""
    try:
        return list(client.sync(client.scheduler.ncores, callback_timeout=_POLL_S))
    except (OSError, TimeoutError, RuntimeError, AttributeError):
        return []


def _check_workers(client: Client, address: str) -> None:
    """Fail before any work where there are no workers or where they would plan by other code."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_S)
    except TimeoutError as error:
        raise InputError(
            f"--cluster {address!r}: the scheduler has had no worker for {CONNECT_S:.0f} s; "
            "start some with `dask worker`"
        ) from error
    asked = {worker: client.submit(code_digest, workers=[worker], pure=False) for worker in _workers(client)}
    for worker, answer in asked.items():
        try:
            same = answer.result(timeout=3 * CONNECT_S) == code_digest()
        except Exception as error:
            raise InputError(
                f"--cluster {address!r}: worker {worker} cannot run meshwright ({type(error).__name__}: {error}); "
                "install the same version there as here"
            ) from error
        if not same:
            raise InputError(
                f"--cluster {address!r}: worker {worker} has another version of meshwright than this process; "
                "install the same there and start it again"
            )


class _Feed:
    """Rows of joblib's generator, taken over by a thread so that waiting for one can end.

    joblib waits for a task without limit, and its Dask backend leaves a task that Dask itself gave up
    (its workers died) unanswered: such an error comes through `report`.
    """

    def __init__(self, client: Client, graph: OperatorGraph, waiting: Mapping[int, PlanRequest], work: Work) -> None:
        self.items: queue.SimpleQueue[tuple[int, WhatIfRow] | Exception] = queue.SimpleQueue()
        self.waiting = waiting
        self.work = work
        text = graph_text(graph)
        tasks = [(number, request, text) for number, request in waiting.items()]
        threading.Thread(target=self._fill, args=(client, tasks), daemon=True).start()

    def next(self, timeout_s: float) -> tuple[int, WhatIfRow] | Exception | None:
        """The next row or what went wrong; None after `timeout_s` seconds."""
        try:
            return self.items.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def report(self, number: int, answer: Future[Any]) -> None:
        """Pass on that Dask gave up a point; other errors come through joblib."""
        error = None if answer.cancelled() else answer.exception()
        if error is not None:
            self.items.put(
                MeshwrightError(
                    f"{point_name(self.waiting[number])}: the cluster gave this point up ({type(error).__name__}: "
                    "its workers died or left); give them more memory, or leave the point out of --devices and --hw"
                )
            )

    def _fill(self, client: Client, tasks: list[tuple[int, PlanRequest, str]]) -> None:
        from joblib import Parallel, delayed
        from joblib._dask import DaskDistributedBackend

        feed = self

        class Reporting(DaskDistributedBackend):  # type: ignore[misc]
            def submit(self, func: Any, callback: Any = None) -> Any:
                answer = super().submit(func, callback)
                answer.add_done_callback(partial(feed.report, func.items[0][1][0]))
                return answer

        try:
            parallel = Parallel(
                n_jobs=-1,
                backend=Reporting(client=client),
                batch_size=1,
                pre_dispatch="all",
                return_as="generator_unordered",
            )
            for item in parallel(delayed(self.work)(*task) for task in tasks):
                self.items.put(item)
        except Exception as error:  # noqa: BLE001 (raised where the rows are awaited)
            self.items.put(error)
