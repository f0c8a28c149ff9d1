"""`meshwright profiles`."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.options import check_out, option, tells
from planner.cli.terminal import Terminal

profiles = typer.Typer(rich_markup_mode=None, invoke_without_command=True, add_completion=False)


@profiles.callback()
@tells
def _profiles(context: typer.Context, terminal: Terminal) -> None:
    """List, show, check and make hardware profiles; write rank tables.

    \b
    Example:
      meshwright profiles
      meshwright profiles show dgx-a100
      meshwright profiles check my-cluster.yaml
      meshwright profiles new my-h100 --from dgx-h100 --set nodes.network=100Gb
      meshwright profiles rank-table ascend910b-atlas800t-a2 --servers 10.0.0.1,10.0.0.2
    """
    if context.invoked_subcommand is None:
        list_profiles(terminal)


def list_profiles(terminal: Terminal) -> None:
    """List the profiles that are built in.

    \b
    Example:
      meshwright profiles list --json
    """
    from planner.planning.documents import profile_document
    from simulator.profiles import load_profile, profile_names

    if terminal.quiet and not terminal.json:
        for name in profile_names():
            terminal.line(name)
        return
    found = [load_profile(name) for name in profile_names()]
    if terminal.json:
        terminal.document({"profiles": [profile_document(hardware) for hardware in found]})
    else:
        from planner.cli.catalogue_tables import profile_table

        terminal.show(profile_table(found))


profiles.command("list")(tells(list_profiles))


@profiles.command()
@tells
def show(
    terminal: Terminal,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A profile's name or the path of one.")],
) -> None:
    """Show every number of a profile with its source.

    \b
    Example:
      meshwright profiles show dgx-a100
    """
    from planner.planning.documents import profile_document
    from simulator.hardware import describe
    from simulator.profiles import load_profile

    hardware = load_profile(name)
    if terminal.json:
        rows = [{"field": row.field, "value": row.value, "source": row.source} for row in describe(hardware)]
        terminal.document({**profile_document(hardware), "rows": rows})
    elif terminal.quiet:
        for row in describe(hardware):
            terminal.line(f"{row.field}\t{row.value}\t{row.source}")
    else:
        from planner.cli.catalogue_tables import profile_details

        terminal.show(*profile_details(hardware))


@profiles.command()
@tells
def check(
    terminal: Terminal,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The YAML file of a profile, or PROFILE@FILE of a real cluster.")
    ],
) -> None:
    """Check the YAML file of a profile, or a rank table; the error names the field that is wrong.

    \b
    Example:
      meshwright profiles check my-cluster.yaml
      meshwright profiles check ascend910b-atlas800t-a2@rank_table.json
    """
    from planner.planning.documents import profile_document
    from simulator.profiles import check_profile, is_cluster_file

    hardware = check_profile(file)
    if terminal.json:
        terminal.document({**profile_document(hardware), "file": file, "valid": True})
    elif not terminal.quiet:
        terminal.line(f"{file}: profile {hardware.name} is valid ({len(hardware.rows)} numbers with their sources)")
        if is_cluster_file(file):
            terminal.line(f"{hardware.max_devices} devices as the file joins them: plan with --hw {file}")


@profiles.command("new")
@tells
def new_profile(
    terminal: Terminal,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new profile.")],
    base: Annotated[str, option("--from", "The shipped profile that it is based on.", "PROFILE")],
    settings: Annotated[list[str] | None, option("--set", "A number that is other than there.", "KEY=VALUE")] = None,
    out: Annotated[str | None, option("--out", "Where to write it; NAME.yaml unless given.")] = None,
) -> None:
    """Write a profile that is a shipped one with some numbers set.

    Keys are nodes.devices, nodes.network (the rate of a port), nodes.nics, nodes.links, nodes.memory, device.name,
    device.memory, device.bandwidth, device.power, or the path of any number that `profiles show` lists.

    \b
    Example:
      meshwright profiles new my-h100 --from dgx-h100 --set nodes.network=100Gb --set nodes.devices=4
      meshwright plan zoo:gpt2 --hw my-h100.yaml --devices 8
    """
    from planner.planning.documents import profile_document
    from simulator.profiles import write_profile
    from simulator.shipped_profiles import new_profile as made

    path = out or f"{name}.yaml"
    check_out("--out", path)
    hardware = write_profile(made(name, base, settings or ()), path)
    if terminal.json:
        terminal.document({**profile_document(hardware), "file": path, "valid": True})
    elif not terminal.quiet:
        terminal.line(f"{path}: profile {name}, based on {base}; plan with --hw {path}")


@profiles.command("infragraph")
@tells
def infragraph(
    terminal: Terminal,
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="Profile of the nodes.")],
    devices: Annotated[int, typer.Option("--devices", min=1, help="Devices of whole nodes.")],
    out: Annotated[str, option("--out", "Where to write it.")] = "infragraph.json",
) -> None:
    """Write nodes of a profile as an InfraGraph, for simulators of networks.

    \b
    Example:
      meshwright profiles infragraph dgx-h100 --devices 16
      meshwright plan zoo:gpt2 --hw dgx-h100@infragraph.json --devices 16
    """
    import json

    from simulator.cluster_files import infragraph as made
    from simulator.profiles import load_profile
    from simulator.whole_file import write_whole

    check_out("--out", out)
    path = write_whole(out, json.dumps(made(load_profile(name), devices), indent=1) + "\n")
    said = f"{path}: {devices} devices of {name}"
    terminal.result({"infragraph": str(path), "devices": devices}, str(path), lambda: iter([said]))


@profiles.command("rank-table")
@tells
def rank_table(
    terminal: Terminal,
    source: Annotated[str, typer.Argument(metavar="PROFILE|FILE", help="Profile of the servers, or a rank table.")],
    servers: Annotated[
        str | None, option("--servers", "Addresses of the servers in the order of their ranks: A,B,…")
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices-per-server", min=1, help="Devices of each server; all unless given.")
    ] = None,
    address: Annotated[
        str, option("--device-ip", "Address of a port; {server} and {device} count from 0.")
    ] = "192.{device}.27.{server}",
    form: Annotated[str, option("--form", "group_list, 1.0 or 1.2.")] = "1.0",
    out: Annotated[str, option("--out", "Where to write it.")] = "rank_table.json",
) -> None:
    """Write an HCCL rank table for servers of a profile, or rewrite one in another form.

    \b
    Example:
      meshwright profiles rank-table ascend910b-atlas800t-a2 --servers 10.0.0.1,10.0.0.2
      meshwright profiles rank-table old_table.json --form 1.0 --out rank_table.json
      meshwright plan zoo:gpt2 --hw ascend910b-atlas800t-a2@rank_table.json --devices 16
    """
    from simulator.cluster_files import numbered_table, rank_table_text, read_rank_table, table_form
    from simulator.errors import InputError
    from simulator.profiles import load_profile, split_cluster_file
    from simulator.whole_file import write_whole

    _, file = split_cluster_file(source)
    check_out("--out", out, (file or None,))
    if file and (servers or devices):
        raise InputError(f"{source} lists its servers and devices; leave out --servers and --devices-per-server")
    if file:
        table = read_rank_table(file)
    elif servers is None:
        raise InputError(
            f"--servers is missing: say which servers of {source} take part, for example --servers 10.0.0.1"
        )
    else:
        hardware = load_profile(source)
        table = numbered_table(hardware, servers.split(","), devices or hardware.devices_per_node, address)
    path = write_whole(out, rank_table_text(table, table_form(form)))
    if terminal.json:
        found = {"servers": len(table.servers), "devices": len(table.devices), "form": form}
        terminal.document({"rank_table": str(path), **found})
    elif not terminal.quiet:
        terminal.line(f"{path}: {len(table.devices)} ranks on {len(table.servers)} servers")
