"""`meshwright networks`."""

from __future__ import annotations

from dataclasses import asdict

from planner.cli.options import tells
from planner.cli.terminal import Terminal


@tells
def networks(terminal: Terminal) -> None:
    """List the networks that are built in.

    \b
    Example:
      meshwright networks
      meshwright networks --quiet     # names only

    Besides zoo:NAME, NETWORK may be hf:PATH (a Hugging Face config.json or the folder that holds one),
    py:module:factory (a function that returns a module and example inputs) or pt2:FILE (a saved
    torch.export program with its loss; loading one may run code in it, so --trust-file is asked for).
    """
    from planner.networks import list_networks

    found = list_networks()
    if terminal.json:
        terminal.document({"networks": [asdict(network) for network in found]})
    elif terminal.quiet:
        for network in found:
            terminal.line(network.spec)
    else:
        from planner.cli.catalogue_tables import network_table

        terminal.show(network_table(found))
