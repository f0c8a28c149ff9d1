"""`meshwright serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.options import DebugFlag, JsonFlag, QuietFlag, TrustFile, natural_or_zero
from planner.cli.terminal import Terminal


def serve(
    networks: Annotated[
        list[str] | None,
        typer.Argument(help="Networks beside those of the zoo, as `plan` takes them.", metavar="[NETWORK]..."),
    ] = None,
    hardware: Annotated[
        list[str] | None, typer.Option("--hw", metavar="PROFILE", help="A profile of yours; may be repeated.")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", parser=natural_or_zero, metavar="N", help="Port; 0 takes a free one.")
    ] = 8765,
    trust_file: TrustFile = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Serve a page that plans: network, hardware, devices and pins as controls, plans and the step as pictures.

    The page is at 127.0.0.1 and nowhere else. Its address holds its state: the same link shows the same plans. It plans
    the networks of the zoo on the shipped profiles, and those that are named here. Ctrl-C ends it.

    \b
    Example:
      meshwright serve
      meshwright serve hf:config.json --hw my-cluster.yaml --port 8800
    """
    from planner.networks import load_network
    from reports.served import LOOPBACK, Served, server
    from simulator.profiles import load_profile

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    for name in hardware or ():
        load_profile(name)
    for name in networks or ():
        load_network(name)
    with server(port, Served.with_shipped(networks or (), hardware or ())) as running:
        address = f"http://{LOOPBACK}:{running.server_address[1]}/"
        terminal.result({"address": address}, address, lambda: (f"{address}  (Ctrl-C ends it)",))
        terminal.out.flush()
        running.serve_forever()
