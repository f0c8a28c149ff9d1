"""A page on this machine that plans: a form, the plans, and a picture of the step. Its address holds its state."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from planner.planning import planning, summary
from planner.planning.mixed_cluster import plan_on_cluster
from planner.plans.pins import read_pins
from planner.plans.request import PlanRequest
from reports import page
from reports.page import Html
from simulator.errors import InputError, MeshwrightError
from simulator.hardware import split_settings
from simulator.profiles import load_profile, profile_names
from simulator.quantities import bytes_text, interval_text, percent_text, rate_text, seconds_text

LOOPBACK = "127.0.0.1"
MOST_LETTERS = 2000
"""Letters of an address."""
TOP = 5
_PRECISIONS = ("", "bf16", "fp16", "fp32", "fp8")


@dataclass(frozen=True, kw_only=True)
class State:
    """What the page plans: fields of the query of its address, as text.

    >>> State.of("network=zoo%3Amlp&devices=16").link()
    '/?network=zoo%3Amlp&hw=dgx-h100&devices=16'
    """

    network: str = "zoo:gpt2"
    hw: str = "dgx-h100"
    devices: str = "8"
    global_batch: str = ""
    seq_len: str = ""
    precision: str = ""
    pins: str = ""

    @classmethod
    def of(cls, query: str) -> State:
        """Read the query of an address.

        Raises
        ------
        InputError
            It has a name that the page does not know.
        """
        found = dict(parse_qsl(query))
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(found) - known):
            raise InputError(f"{unknown[0]!r} is nothing that the page knows; use {', '.join(sorted(known))}")
        return cls(**{name: text.strip() for name, text in found.items()})

    def link(self) -> str:
        """The address of the page in this state."""
        return "/?" + urlencode({field.name: text for field in fields(self) if (text := getattr(self, field.name))})

    def request(self, networks: Sequence[str], profiles: Sequence[str]) -> PlanRequest:
        """What is to be planned.

        Raises
        ------
        InputError
            A number or a pin is wrong, or a network or profile is not among those that are served.
        """
        if self.network not in networks:
            raise InputError(f"network {self.network!r} is not served; name it behind `meshwright serve`")
        if self.hw not in profiles and split_settings(self.hw)[0] not in profiles:
            raise InputError(f"profile {self.hw!r} is not served; name it with `meshwright serve --hw`")
        return PlanRequest(
            network=self.network,
            hardware=self.hw,
            devices=_number("devices", self.devices) or 1,
            global_batch=_number("global_batch", self.global_batch),
            sequence_length=_number("seq_len", self.seq_len),
            precision=self.precision or None,
            pins=read_pins(self.pins.replace(",", " ").split()),
            top=TOP,
        )


def _number(name: str, text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text)):
        raise InputError(f"{name} is {text!r}; write a whole number of at least 1")
    return int(text)


@dataclass(frozen=True)
class Served:
    """The networks and profiles that pages may plan: others may run code or read files."""

    networks: tuple[str, ...]
    profiles: tuple[str, ...]

    @classmethod
    def with_shipped(cls, networks: Sequence[str] = (), profiles: Sequence[str] = ()) -> Served:
        """The shipped ones, and those that are named."""
        from planner.networks import list_networks

        zoo = tuple(network.spec for network in list_networks())
        return cls((*networks, *zoo), (*profiles, *profile_names()))

    def page(self, state: State) -> tuple[str, bool]:
        """The page in a state, and whether what it asks for could be read."""
        try:
            with _one_at_a_time:  # each search takes a core
                parts, good = _parts(self, state), True
        except MeshwrightError as error:
            parts, good = (Html(f'<p><span class="bad">{page.escape(str(error))}</span></p>'),), False
        text = page.page("Meshwright", [self._form(state), *parts], footer=f"Link: {state.link()}", interactive=False)
        return text, good

    def _form(self, state: State) -> Html:
        inputs = [
            _select("network", self.networks, state.network, "Network"),
            _field("hw", state.hw, "Hardware", "list=profiles size=28"),
            _field("devices", state.devices, "Devices", "inputmode=numeric size=6"),
            _field("global_batch", state.global_batch, "Global batch", "inputmode=numeric size=6"),
            _field("seq_len", state.seq_len, "Sequence length", "inputmode=numeric size=6"),
            _select("precision", _PRECISIONS, state.precision, "Precision"),
            _field("pins", state.pins, "Pins", "placeholder='tp=8 pp=2' size=28"),
        ]
        options = "".join(f"<option>{page.escape(name)}</option>" for name in self.profiles)
        return Html(
            f'<style>{_STYLE}</style><form class="ask" method="get" action="/">{"".join(inputs)}'
            f'<button>Plan</button><datalist id="profiles">{options}</datalist></form>'
        )


_STYLE = """
.ask { display: flex; flex-wrap: wrap; gap: 12px; align-items: end; margin: 16px 0 24px; }
.ask label { display: grid; gap: 2px; color: var(--soft); font-size: 13px; max-width: 100%; }
.ask input, .ask select, .ask button { font: inherit; padding: 6px 8px; border: 1px solid var(--rule);
  border-radius: 8px; background: var(--card); color: var(--ink); max-width: 100%; }
.ask button { background: var(--accent); color: #ffffff; padding: 6px 20px; }
"""


def _field(name: str, value: str, title: str, more: str) -> str:
    return f'<label>{title}<input name="{name}" value="{page.escape(value)}" {more}></label>'


def _select(name: str, values: Sequence[str], chosen: str, title: str) -> str:
    options = "".join(
        f"<option{' selected' if value == chosen else ''}>{page.escape(value)}</option>" for value in values
    )
    return f'<label>{title}<select name="{name}">{options}</select></label>'


_one_at_a_time = threading.Lock()


@lru_cache(maxsize=64)
def _parts(served: Served, state: State) -> tuple[Html, ...]:
    """Plans and pictures of a state."""
    from reports.devices import devices_figure
    from reports.timeline import picture_svg, plan_picture

    asked = state.request(served.networks, served.profiles)
    result, request = plan_on_cluster(planning.with_usual_software(asked))
    if not result.candidates:
        return (Html(f'<p><span class="bad">No plan fits: {page.escape(result.infeasible)}</span></p>'),)
    best = result.candidates[0]
    prediction, hardware = best.prediction, load_profile(request.hardware)
    speed = summary.throughput(prediction)
    memory = bytes_text(prediction.peak_memory_bytes)
    cards = [
        ("Step time", seconds_text(prediction.step_time_s), f"90 %: {interval_text(*prediction.interval_s)}"),
        ("Throughput", rate_text(*speed), f"MFU {percent_text(prediction.mfu)}"),
        ("Memory", memory, f"of {bytes_text(prediction.device_memory_bytes)}, fits: {percent_text(prediction.p_fits)}"),
        ("Sure", str(best.plan.certificate.status), f"prediction {prediction.label}"),
    ]
    columns = [name.replace("\n", " ") for name, _ in summary.columns(prediction)]
    numbers = tuple(place for place, (_, number) in enumerate(summary.columns(prediction)) if number)
    rows = [summary.cells(one.plan, one.prediction) for one in result.candidates]
    kinds = sorted(prediction.memory_at_peak.items(), key=lambda item: -item[1])
    held = [[kind.replace("_", " "), bytes_text(size)] for kind, size in kinds if size]
    whole = prediction.step_time_s
    spent = [[name.removesuffix("_s").replace("_", " "), seconds_text(part), percent_text(part / whole)]
             for name, part in prediction.breakdown.items()]  # fmt: skip
    picture = picture_svg(plan_picture(best.plan, Path("strategy.json")))
    return (
        page.paragraph(summary.heading(best.plan, hardware), lead=True),
        page.cards(cards, four=True),
        page.table(columns, rows, caption="Best plans", numbers=numbers, close=True),
        page.drawing(picture, title="One step, simulated", caption="Below, the memory of one device."),
        devices_figure(best.plan, hardware),
        page.grid(
            page.table(["", "time", "share"], spent, caption="Where the time goes", numbers=(1, 2)),
            page.table(["", "size"], held, caption="Memory at its peak", numbers=(1,)),
        ),
        *(page.paragraph(message) for message in result.messages[:3]),
    )


def server(port: int, served: Served) -> ThreadingHTTPServer:
    """A server on the loopback; port 0 takes a free one.

    Raises
    ------
    InputError
        The port is taken or not allowed.
    """

    class Handler(BaseHTTPRequestHandler):
        """Answers GET of the one page; requests by another name than the loopback's are refused."""

        timeout = 30

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0] or (self.headers.get("Host") or "")
            try:
                address = urlsplit(self.path)
            except ValueError as error:
                self._answer(HTTPStatus.BAD_REQUEST, str(error))
                return
            if host not in (LOOPBACK, "localhost"):
                self._answer(HTTPStatus.FORBIDDEN, "use the address that meshwright serve prints")
            elif address.path != "/" or len(self.path) > MOST_LETTERS:
                self._answer(HTTPStatus.NOT_FOUND, "there is one page, /")
            else:
                self._page(address.query)

        def _page(self, query: str) -> None:
            try:
                text, good = served.page(State.of(query))
            except InputError as error:
                self._answer(HTTPStatus.BAD_REQUEST, str(error))
            else:
                self._answer(HTTPStatus.OK if good else HTTPStatus.BAD_REQUEST, text, "text/html")

        def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header(
                "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'"
            )
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing of single requests."""

    try:
        found = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise InputError(f"--port {port}: {error}; choose another, or 0 for a free one") from error
    found.daemon_threads = True
    return found
