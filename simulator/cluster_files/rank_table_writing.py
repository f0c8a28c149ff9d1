"""Writing rank tables, in each form that HCCL reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from simulator.cluster_files.described import check_rules
from simulator.cluster_files.rank_table import RankedDevice, RankTable, parse_rank_table
from simulator.errors import InputError
from simulator.hardware import Hardware


class TableForm(StrEnum):
    """Forms of a rank table."""

    GROUP_LIST = "group_list"
    SERVER_LIST = "1.0"
    SUPER_POD = "1.2"


def table_form(name: str) -> TableForm:
    """The form of this name; InputError lists those there are."""
    if name not in list(TableForm):
        raise InputError(f"a rank table has no form {name!r}; use one of {', '.join(TableForm)}")
    return TableForm(name)


def numbered_table(hardware: Hardware, servers: Sequence[str], devices: int, address: str) -> RankTable:
    """Ranks of the first `devices` devices of each server, in order, checked by HCCL's rules.

    Parameters
    ----------
    address
        address of a device's port, with ``{server}`` and ``{device}`` for their numbers from 0.
    """
    names = [server.strip() for server in servers]
    try:
        ranked = tuple(
            RankedDevice(
                rank=place * devices + device,
                server=server,
                device=device,
                address=address.format(server=place, device=device),
            )
            for place, server in enumerate(names)
            for device in range(devices)
        )
    except (KeyError, IndexError, ValueError) as error:
        raise InputError(
            f"the address {address!r} cannot be filled in ({error}); use {{server}} and {{device}}, for example "
            f"192.{{device}}.27.{{server}}"
        ) from None
    found = RankTable(version=TableForm.SERVER_LIST, chip="", devices=ranked)
    checked = parse_rank_table(rank_table_text(found, TableForm.SERVER_LIST).encode(), "to be written")
    check_rules(checked, hardware, "to be written")
    return checked


def rank_table_text(table: RankTable, form: TableForm) -> str:
    """`table` as JSON text in the given form; reading it gives the same ranks, devices and addresses."""
    content = _group_list(table) if form is TableForm.GROUP_LIST else _server_list(table, form)
    return json.dumps(content, indent=2) + "\n"


def _group_list(table: RankTable) -> dict[str, Any]:
    count, servers = str(len(table.devices)), str(len(table.servers))
    return {
        **({"chip_info": table.chip} if table.chip else {}),
        "group_count": "1",
        "group_list": [
            {
                "device_num": count,
                "server_num": servers,
                "group_name": "",
                "instance_count": count,
                "instance_list": [
                    {
                        "devices": [{"device_id": str(device.device), "device_ip": device.address}],
                        "rank_id": str(device.rank),
                        "server_id": device.server,
                    }
                    for device in table.devices
                ],
            }
        ],
        "status": "completed",
    }


def _server_list(table: RankTable, form: TableForm) -> dict[str, Any]:
    content: dict[str, Any] = {
        "version": form.value,
        "server_count": str(len(table.servers)),
        "server_list": [
            {"server_id": server, "device": [_device(device) for device in table.of(server)]}
            for server in table.servers
        ],
    }
    if form is TableForm.SUPER_POD:
        pods = table.super_pods or (table.servers,)
        content["super_pod_list"] = [
            {"super_pod_id": str(number), "server_list": [{"server_id": server} for server in pod]}
            for number, pod in enumerate(pods)
        ]
    return {**content, "status": "completed"}


def _device(device: RankedDevice) -> dict[str, str]:
    address = {"device_ip": device.address} if device.address else {}
    return {"device_id": str(device.device), **address, "rank_id": str(device.rank)}
