"""HCCL rank tables: three forms, their rules, and the hardware they become."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cluster_files import RankedDevice, RankTable, TableForm, parse_rank_table, rank_table_text
from simulator.collectives import collective_time
from simulator.errors import ProfileError
from simulator.hardware import Hardware
from simulator.profiles import load_profile, split_cluster_file
from simulator.program import Collective
from simulator.topology import group_shape, topology_graph

Table = dict[str, Any]


def servers(count: int, devices: list[int], version: str = "1.0") -> Table:
    """A table of `count` servers, each with these devices."""
    return {
        "version": version,
        "server_count": str(count),
        "server_list": [
            {
                "server_id": f"10.0.0.{server}",
                "device": [
                    {"device_id": str(device), "device_ip": f"192.{server}.27.{device}", "rank_id": str(rank)}
                    for rank, device in enumerate(devices, server * len(devices))
                ],
            }
            for server in range(count)
        ],
        "status": "completed",
    }


def ranked(count: int, devices: int) -> Table:
    """A table of version 2.0: `count` servers on one network, whose devices count from 0 in each."""
    return {
        "version": "2.0",
        "status": "completed",
        "rank_count": count * devices,
        "rank_list": [
            {
                "rank_id": rank,
                "local_id": rank % devices,
                "device_id": rank % devices,
                "level_list": [
                    {"net_layer": 1, "net_instance_id": "all", "net_type": "CLOS", "rank_addr_list": []},
                    {
                        "net_layer": 0,
                        "net_instance_id": "pod0",
                        "net_type": "TOPO_FILE_DESC",
                        "rank_addr_list": [{"addr_type": "EID", "addr": f"{rank:032x}", "ports": ["0/0"]}],
                    },
                ],
            }
            for rank in range(count * devices)
        ],
    }


def _set_address(table: Table, address: str) -> None:
    table["rank_list"][0]["level_list"][1]["rank_addr_list"][0]["addr"] = address


def old(devices: list[int], chip: str = "910") -> Table:
    """A table of the oldest form: one server."""
    return {
        "chip_info": chip,
        "group_count": "1",
        "group_list": [
            {
                "device_num": str(len(devices)),
                "server_num": "1",
                "instance_count": str(len(devices)),
                "instance_list": [
                    {
                        "devices": [{"device_id": str(device), "device_ip": f"192.1.27.{device}"}],
                        "rank_id": str(rank),
                        "server_id": "10.0.0.1",
                    }
                    for rank, device in enumerate(devices)
                ],
            }
        ],
        "status": "completed",
    }


@pytest.fixture
def hardware(tmp_path: Path) -> Callable[..., Hardware]:
    def load(table: Table, chip: str = "") -> Hardware:
        path = tmp_path / "rank_table.json"
        path.write_text(json.dumps(table))
        return load_profile(f"{chip}@{path}" if chip else str(path))

    return load


def seconds(found: Hardware, size: int, stride: int = 1) -> float:
    return collective_time(found, Collective.ALL_REDUCE, 1e9, group_shape(found, size, stride))


def test_the_old_form_becomes_the_profile_of_its_chip(hardware: Callable[..., Hardware]) -> None:
    found, profile = hardware(old(list(range(8)))), load_profile("ascend910-atlas800")
    assert (found.name, found.max_devices) == ("ascend910-atlas800@rank_table", 8)
    assert seconds(found, 8) == seconds(profile, 8)
    assert len(topology_graph(found, 8).devices) == 8
    with pytest.raises(ProfileError, match="16 devices do not fit"):
        found.check_devices(16)


def test_half_a_full_mesh_has_three_links_of_seven(hardware: Callable[..., Hardware]) -> None:
    found = hardware(servers(2, [0, 1, 2, 3]), "ascend910b-atlas800t-a2")
    profile = load_profile("ascend910b-atlas800t-a2")
    assert (found.max_devices, found.devices_per_node) == (8, 4)
    inner, outer = found.levels
    assert (inner.size, outer.size) == (4, 8)
    assert inner.bandwidth_bytes_per_s == pytest.approx(profile.levels[0].bandwidth_bytes_per_s * 3 / 7)
    assert seconds(found, 4) == pytest.approx(seconds(profile, 4))


def test_supernodes_bound_the_unified_bus(hardware: Callable[..., Hardware]) -> None:
    table = servers(4, list(range(16)), version="1.2")
    table["super_pod_list"] = [
        {"super_pod_id": str(pod), "server_list": [{"server_id": f"10.0.0.{2 * pod + place}"} for place in range(2)]}
        for pod in range(2)
    ]
    found = hardware(table)
    assert found.name.startswith("cloudmatrix384@")
    assert [level.size for level in found.levels] == [32, 64]
    assert seconds(found, 2, stride=32) > seconds(found, 2, stride=16)


def edited(table: Table, edit: Callable[[Table], None]) -> Table:
    edit(table)
    return table


def first(table: Table) -> Table:
    entry: Table = table["server_list"][0]["device"][0]
    return entry


A2 = "ascend910b-atlas800t-a2"
A800 = "ascend910-atlas800"
PODS = [{"server_id": "10.0.0.0"}]
WRONG: dict[str, tuple[Table, str, str]] = {
    "no chip": (servers(1, [0]), "", "does not say which chip.*--hw ascend910b"),
    "unknown chip": (old([0], chip="310"), "", "'310' is not known"),
    "not Ascend": (servers(1, [0]), "dgx-a100", "rank tables describe Ascend servers"),
    "three devices": (servers(1, [0, 1, 2]), A800, "3 devices on one server; HCCL takes 1, 2, 4, 8"),
    "across quads": (old([2, 3, 4, 5]), "", "devices 2, 3, 4, 5; .* 4 to 7 .*use 0, 1, 2, 3 or 4, 5, 6, 7"),
    "two half servers": (servers(2, [0, 1, 2, 3]), A800, "several servers of ascend910-atlas800 take part with all 8"),
    "device 8": (servers(1, [8]), A2, "device_id 8 .* does not exist; .* devices 0 to 7"),
    "unequal servers": (
        edited(servers(2, [0, 1]), lambda t: t["server_list"][1]["device"].pop()),
        A2,
        "10.0.0.1 has 1 devices and server 10.0.0.0 2",
    ),
    "rank twice": (
        edited(servers(1, [0, 1]), lambda t: first(t).update(rank_id="1")),
        A2,
        "rank_id 1 stands 2 times",
    ),
    "rank missing": (edited(servers(1, [0, 1]), lambda t: first(t).update(rank_id="2")), A2, "none with rank_id 0"),
    "device twice": (
        edited(servers(1, [0, 1]), lambda t: first(t).update(device_id="1")),
        A2,
        "device_id 1 of server 10.0.0.0 stands 2 times",
    ),
    "address twice": (
        edited(servers(1, [0, 1]), lambda t: first(t).update(device_ip="192.0.27.1")),
        A2,
        "device_ip 192.0.27.1 stands 2 times",
    ),
    "no address": (edited(servers(2, [0]), lambda t: first(t).pop("device_ip")), A2, "rank 0 has no device_ip"),
    "bad address": (edited(servers(1, [0]), lambda t: first(t).update(device_ip="10.*.*.*")), A2, "is no IP address"),
    "number as float": (edited(servers(1, [0]), lambda t: first(t).update(rank_id=0.0)), A2, "0.0 is no number"),
    "negative": (edited(servers(1, [0]), lambda t: first(t).update(rank_id="-1")), A2, "rank_id: '-1' is no number"),
    "count": (edited(servers(2, [0]), lambda t: t.update(server_count="3")), A2, "server_count says 3, .* has 2"),
    "version": (edited(servers(1, [0]), lambda t: t.update(version="2.0")), A2, "version: .*'1.0' or '1.2'"),
    "initializing": (edited(servers(1, [0]), lambda t: t.update(status="initializing")), A2, "status"),
    "pods in 1.0": (
        edited(servers(1, [0]), lambda t: t.update(super_pod_list=[{"super_pod_id": "0", "server_list": PODS}])),
        A2,
        "super_pod_list belongs to version",
    ),
    "devices descend": (servers(1, [1, 0]), A2, "device_id is 1, 0 in the order of ranks"),
    "old count": (edited(old([0, 1]), lambda t: t["group_list"][0].update(device_num="8")), "", "device_num says 8"),
    "odd dies": (servers(1, [0, 1, 2], version="1.2"), "cloudmatrix384", "two dies, and both take part"),
    "no table": ({"format": "x"}, A2, "none of group_list, server_list, rank_list"),
    "newer count": (ranked(1, 4) | {"rank_count": 5}, A2, "rank_count says 5, rank_list has 4"),
    "newer chip": (ranked(1, 4), "", "version 2.0 are of Atlas 350, 850 or 950.*write the profile"),
    "newer address": (edited(ranked(1, 4), lambda t: _set_address(t, "x")), A2, "'x' of rank 0 is no IP address"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_breaks_a_rule_is_named(case: str, hardware: Callable[..., Hardware]) -> None:
    table, chip, message = WRONG[case]
    with pytest.raises(ProfileError, match=message):
        hardware(table, chip)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"server_list": [1,]}', r"line 1, column \d+: .*a comma before a closing bracket"),
        ('{"version": "1.0", "version": "1.2", "server_list": []}', "key 'version' stands 2 times"),
        ('{"server_list": NaN}', "NaN is no number"),
        ("[" * 100_000, "not valid JSON"),
        ("\xff", "not valid JSON|neither|not UTF-8"),
    ],
)
def test_broken_files_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rank_table.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ProfileError, match=message):
        load_profile(f"{A2}@{path}")


@given(count=st.integers(1, 6), devices=st.integers(1, 8), form=st.sampled_from(TableForm))
def test_what_is_written_is_read_again(count: int, devices: int, form: TableForm) -> None:
    table = RankTable(
        version="1.0",
        chip="",
        devices=tuple(
            RankedDevice(
                rank=rank, server=f"10.0.0.{rank // devices}", device=rank % devices, address=f"192.168.0.{rank}"
            )
            for rank in range(count * devices)
        ),
    )
    read = parse_rank_table(rank_table_text(table, form).encode(), "rank_table.json")
    assert read.devices == table.devices
    assert [server for pod in read.super_pods for server in pod] == (
        list(table.servers) if form is TableForm.SUPER_POD else []
    )


def test_files_are_told_from_profiles() -> None:
    assert split_cluster_file("dgx-a100@machine.txt") == ("dgx-a100", "machine.txt")
    assert split_cluster_file("/home/a@b/mine.yaml") == ("/home/a@b/mine.yaml", "")
    assert split_cluster_file("mine.yaml@tables/two.json") == ("mine.yaml", "tables/two.json")


def test_tables_of_version_2_have_servers_where_devices_begin_anew() -> None:
    table = parse_rank_table(json.dumps(ranked(2, 4)).encode(), "table.json")
    assert table.servers == ("pod0/0", "pod0/1")
    assert [device.device for device in table.devices] == [0, 1, 2, 3] * 2
    assert table.super_pods == (("pod0/0", "pod0/1"),)
    assert parse_rank_table(json.dumps(ranked(1, 8)).encode(), "table.json").super_pods == ()


@pytest.mark.parametrize(
    ("kind", "profile"), [("800T-A2-64G", "ascend910b-atlas800t-a2"), ("800I-A3-64G", "cloudmatrix384")]
)
def test_the_type_of_a_server_tells_its_chip(kind: str, profile: str, tmp_path: Path) -> None:
    table = servers(1, [0, 1, 2, 3])
    table["server_list"][0]["hardware_type"] = kind
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    assert load_profile(str(path)).name.startswith(f"{profile}@")
