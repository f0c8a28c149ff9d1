"""HCCL's rank tables: which device of which server has which rank.

Four forms are read: the oldest with ``group_list``, ``server_list`` in versions 1.0 and 1.2, the latter with
``super_pod_list``, and ``rank_list`` in version 2.0 (Atlas 350, 850 and 950). Numbers are strings in them, as HCCL
writes them; plain integers are taken too.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from simulator.errors import ProfileError
from simulator.input_file import FileKind

REMEDY = "see docs/topology.md, Rank tables"
RANK_TABLE = FileKind(name="rank table", remedy=REMEDY, max_bytes=16 << 20, error=ProfileError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDevice:
    """One rank: the server it is on, the number of its device there, and the address of the device's port."""

    rank: int
    server: str
    device: int
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """The ranks of a job in ascending order.

    Attributes
    ----------
    chip
        the chip or the type of server that the table names; empty if it names none.
    super_pods
        servers of each supernode; empty where the table has none.
    """

    version: str
    chip: str
    devices: tuple[RankedDevice, ...]
    super_pods: tuple[tuple[str, ...], ...] = ()

    @property
    def servers(self) -> tuple[str, ...]:
        """Servers in the order of their first ranks."""
        return tuple(dict.fromkeys(device.server for device in self.devices))

    def of(self, server: str) -> tuple[RankedDevice, ...]:
        """Ranks of one server, ascending."""
        return tuple(device for device in self.devices if device.server == server)


def is_rank_table(content: bytes) -> bool:
    """Whether a file has what only rank tables have: a JSON object with a list of servers, groups or ranks."""
    return content.lstrip()[:1] == b"{" and any(
        key in content for key in (b'"server_list"', b'"group_list"', b'"rank_list"')
    )


def read_rank_table(path: str) -> RankTable:
    """Rank table in the file `path`; ProfileError says what is wrong."""
    return parse_rank_table(RANK_TABLE.read(path), path)


def parse_rank_table(content: bytes, file: str) -> RankTable:
    """Rank table from the bytes of `file`.

    Raises
    ------
    ProfileError
        names `file` and what is wrong: no JSON, a field, a rank, device or address that occurs twice, ranks that do not
        run from 0 on, server by server.
    """
    data = _data(content, file)
    form = next(form for key, form in _FORMS.items() if key in data)
    try:
        part = form.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the table"
        message = first["msg"].removeprefix("Value error, ")
        raise ProfileError(f"rank table {file}: {place}: {message}; {REMEDY}") from None
    table = part.table()
    for problem in itertools.chain(_ranks(table), _devices(table), _addresses(table), _order(table), _pods(table)):
        raise ProfileError(f"rank table {file}: {problem}")
    return table


def _data(content: bytes, file: str) -> dict[str, Any]:
    data = RANK_TABLE.json(content, file)
    if not isinstance(data, dict) or not _FORMS.keys() & set(data):
        raise ProfileError(f"{file} has none of {', '.join(_FORMS)}, so it is no rank table; {REMEDY}")
    return data


# The forms


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_number(value: object) -> object:
    if isinstance(value, bool | float):
        raise ValueError(f'{value!r} is no number of a device or rank; write it as a string, for example "0"')
    if isinstance(value, str):
        if not value.isascii() or not value.isdigit():
            raise ValueError(f'{value!r} is no number of a device or rank; write digits, for example "0"')
        return int(value)
    return value


_Number = Annotated[int, Field(ge=0, le=2**31), BeforeValidator(_as_number)]
_Text = Annotated[str, Field(max_length=128), BeforeValidator(_as_text)]
_Server = Annotated[str, Field(min_length=1, max_length=63), BeforeValidator(_as_text)]


class _Part(BaseModel):
    # HCCL's own readers pass over keys they do not know, and new releases add some.
    model_config = ConfigDict(extra="ignore", frozen=True)


class _OldDevice(_Part):
    device_id: _Number
    device_ip: _Text = ""


class _Instance(_Part):
    devices: Annotated[list[_OldDevice], Field(min_length=1, max_length=64)]
    rank_id: _Number
    server_id: _Server

    @model_validator(mode="after")
    def _one_device(self) -> Self:
        if len(self.devices) != 1:
            raise ValueError(f"rank {self.rank_id} has {len(self.devices)} devices; a rank is one device")
        return self


class _ServerGroup(_Part):
    device_num: _Number | None = None
    server_num: _Number | None = None
    instance_count: _Number | None = None
    instance_list: Annotated[list[_Instance], Field(min_length=1, max_length=65536)]

    @model_validator(mode="after")
    def _counts(self) -> Self:
        ranks, servers = len(self.instance_list), len({instance.server_id for instance in self.instance_list})
        for name, said, found in (
            ("device_num", self.device_num, ranks),
            ("instance_count", self.instance_count, ranks),
            ("server_num", self.server_num, servers),
        ):
            if said is not None and said != found:
                raise ValueError(f"{name} says {said}, instance_list has {found}; make them agree")
        return self


class _GroupTable(_Part):
    chip_info: _Text = ""
    group_count: _Number | None = None
    group_list: Annotated[list[_ServerGroup], Field(min_length=1, max_length=1)]
    status: Literal["completed"] = "completed"

    def table(self) -> RankTable:
        found = (
            RankedDevice(
                rank=instance.rank_id,
                server=instance.server_id,
                device=instance.devices[0].device_id,
                address=instance.devices[0].device_ip,
            )
            for instance in self.group_list[0].instance_list
        )
        return RankTable(version="group_list", chip=self.chip_info, devices=_ascending(found))


class _Device(_Part):
    device_id: _Number
    rank_id: _Number
    device_ip: _Text = ""


class _ServerEntry(_Part):
    server_id: _Server
    hardware_type: _Text = ""
    device: Annotated[list[_Device], Field(min_length=1, max_length=64)]


class _PodServer(_Part):
    server_id: _Server


class _Pod(_Part):
    super_pod_id: _Text
    server_list: Annotated[list[_PodServer], Field(min_length=1, max_length=65536)]


class _ServerTable(_Part):
    version: Literal["1.0", "1.2"]
    server_count: _Number | None = None
    server_list: Annotated[list[_ServerEntry], Field(min_length=1, max_length=65536)]
    super_pod_list: Annotated[list[_Pod], Field(max_length=65536)] = []
    status: Literal["completed"] = "completed"

    @model_validator(mode="after")
    def _servers(self) -> Self:
        if self.server_count is not None and self.server_count != len(self.server_list):
            raise ValueError(
                f"server_count says {self.server_count}, server_list has {len(self.server_list)}; make them agree"
            )
        repeated = [name for name, count in Counter(entry.server_id for entry in self.server_list).items() if count > 1]
        if repeated:
            raise ValueError(f"server_id {repeated[0]!r} stands twice in server_list; every server has one entry")
        if self.super_pod_list and self.version != "1.2":
            raise ValueError(f'super_pod_list belongs to version "1.2", the table says {self.version!r}')
        return self

    def table(self) -> RankTable:
        found = (
            RankedDevice(rank=device.rank_id, server=entry.server_id, device=device.device_id, address=device.device_ip)
            for entry in self.server_list
            for device in entry.device
        )
        pods = tuple(tuple(server.server_id for server in pod.server_list) for pod in self.super_pod_list)
        types = {entry.hardware_type for entry in self.server_list}
        chip = types.pop() if len(types) == 1 else ""
        return RankTable(version=self.version, chip=chip, devices=_ascending(found), super_pods=pods)


class _Address(_Part):
    addr: _Text = ""


class _NetLevel(_Part):
    net_layer: _Number
    net_instance_id: _Server
    rank_addr_list: Annotated[list[_Address], Field(max_length=1024)] = []


class _RankEntry(_Part):
    rank_id: _Number
    local_id: _Number
    device_id: _Number
    level_list: Annotated[list[_NetLevel], Field(min_length=1, max_length=64)]


class _RankList(_Part):
    """Version 2.0 has no servers: devices count from 0 in each, in the instance of the innermost network."""

    version: Literal["2.0"]
    rank_count: _Number | None = None
    rank_list: Annotated[list[_RankEntry], Field(min_length=1, max_length=65536)]
    status: Literal["completed"] = "completed"

    @model_validator(mode="after")
    def _count(self) -> Self:
        if self.rank_count is not None and self.rank_count != len(self.rank_list):
            raise ValueError(f"rank_count says {self.rank_count}, rank_list has {len(self.rank_list)}; make them agree")
        return self

    def table(self) -> RankTable:
        pods: dict[str, list[str]] = {}
        found: list[RankedDevice] = []
        held: set[int] = set()
        for rank in sorted(self.rank_list, key=lambda one: one.rank_id):
            level = min(rank.level_list, key=lambda one: one.net_layer)
            servers = pods.setdefault(level.net_instance_id, [])
            if not servers or rank.local_id in held:
                servers.append(f"{level.net_instance_id}/{len(servers)}")
                held = set()
            held.add(rank.local_id)
            addresses = [address.addr for address in level.rank_addr_list]
            found.append(
                RankedDevice(
                    rank=rank.rank_id,
                    server=servers[-1],
                    device=rank.local_id,
                    address=addresses[0] if addresses else "",
                )
            )
        several = any(len(servers) > 1 for servers in pods.values())
        super_pods = tuple(map(tuple, pods.values())) if several else ()
        return RankTable(version=self.version, chip="", devices=tuple(found), super_pods=super_pods)


_FORMS: Mapping[str, type[_GroupTable | _ServerTable | _RankList]] = {
    "group_list": _GroupTable,
    "server_list": _ServerTable,
    "rank_list": _RankList,
}
_EID = re.compile(r"[0-9a-fA-F]{32}")
"""Addresses of devices on a unified bus, as tables of version 2.0 have them."""


def _ascending(devices: Iterator[RankedDevice]) -> tuple[RankedDevice, ...]:
    return tuple(sorted(devices, key=lambda device: device.rank))


# What must hold in every form


def _ranks(table: RankTable) -> Iterator[str]:
    ranks = [device.rank for device in table.devices]
    for rank, count in Counter(ranks).items():
        if count > 1:
            yield f"rank_id {rank} stands {count} times; every rank is one device: give them 0 to {len(ranks) - 1}"
    missing = sorted(set(range(len(ranks))) - set(ranks))
    if missing:
        yield f"{len(ranks)} ranks, but none with rank_id {missing[0]}; ranks run from 0 to {len(ranks) - 1}"


def _devices(table: RankTable) -> Iterator[str]:
    places = Counter((device.server, device.device) for device in table.devices)
    for (server, number), count in places.items():
        if count > 1:
            yield (
                f"device_id {number} of server {server} stands {count} times; every device has one rank: give each its "
                "own device_id, or leave the others out"
            )


def _addresses(table: RankTable) -> Iterator[str]:
    several = len(table.servers) > 1
    for device in table.devices:
        if not device.address:
            if several:
                yield (
                    f"rank {device.rank} has no device_ip; with {len(table.servers)} servers every device needs the "
                    f"address of its port (/etc/hccn.conf)"
                )
            continue
        if table.version == "2.0" and _EID.fullmatch(device.address):
            continue
        try:
            ipaddress.ip_address(device.address)
        except ValueError:
            yield f"device_ip {device.address!r} of rank {device.rank} is no IP address, for example 192.168.100.10"
    for address, count in Counter(device.address for device in table.devices if device.address).items():
        if count > 1:
            yield f"device_ip {address} stands {count} times; give every port its own address (/etc/hccn.conf)"


def _order(table: RankTable) -> Iterator[str]:
    """Ranks go through the servers one by one and through the devices of each in order: as the topology counts."""
    seen = [server for server, _ in itertools.groupby(device.server for device in table.devices)]
    if len(seen) != len(set(seen)):
        server = next(name for name, count in Counter(seen).items() if count > 1)
        yield (
            f"the ranks of server {server} do not follow one another; ranks of one server are consecutive, as HCCL "
            f"numbers them: renumber rank_id"
        )
    for server in table.servers:
        numbers = [device.device for device in table.of(server)]
        if numbers != sorted(numbers):
            yield (
                f"server {server}: device_id is {', '.join(map(str, numbers))} in the order of ranks; devices of a "
                f"server ascend with the ranks: renumber rank_id"
            )


def _pods(table: RankTable) -> Iterator[str]:
    if not table.super_pods:
        return
    listed = [server for pod in table.super_pods for server in pod]
    for server, count in Counter(listed).items():
        if count > 1:
            yield f"server {server} stands in {count} places of super_pod_list; a server is in one supernode"
        if server not in table.servers:
            yield f"super_pod_list names server {server}, which server_list does not have"
    alone = [server for server in table.servers if server not in listed]
    if alone:
        yield f"server {alone[0]} is in no supernode of super_pod_list; list it in one"
    order = _runs(table)
    if len(order) != len(set(order)):
        yield "ranks go back to a supernode they have left; ranks of one supernode are consecutive: renumber rank_id"


def _runs(table: RankTable) -> Sequence[int]:
    pod_of = {server: number for number, pod in enumerate(table.super_pods) for server in pod}
    return [pod for pod, _ in itertools.groupby(pod_of.get(server, -1) for server in table.servers)]
