"""`meshwright serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.options import TrustFile, natural_or_zero, option, tells
from planner.cli.terminal import Terminal


@tells
def serve(
    terminal: Terminal,
    networks: Annotated[
        list[str] | None,
        typer.Argument(help="Networks beside those of the zoo, as `plan` takes them.", metavar="[NETWORK]..."),
    ] = None,
    hardware: Annotated[list[str] | None, option("--hw", "A profile of yours; may be repeated.", "PROFILE")] = None,
    port: Annotated[int, option("--port", "Port; 0 takes a free one.", "N", natural_or_zero)] = 8765,
    trust_file: TrustFile = False,
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

    for name in hardware or ():
        load_profile(name)
    for name in networks or ():
        load_network(name)
    with server(port, Served.with_shipped(networks or (), hardware or ())) as running:
        address = f"http://{LOOPBACK}:{running.server_address[1]}/"
        terminal.result({"address": address}, address, lambda: (f"{address}  (Ctrl-C ends it)",))
        terminal.out.flush()
        running.serve_forever()
