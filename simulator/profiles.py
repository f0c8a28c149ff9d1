"""Hardware profiles by name or path: shipped ones, files, and files that describe one real cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.errors import ProfileError
from simulator.hardware import PROFILE_SUFFIX, PROFILE_SUFFIXES, Hardware, is_profile_path, split_settings
from simulator.input_file import is_regular
from simulator.shipped_profiles import shipped_names as profile_names
from simulator.shipped_profiles import shipped_text

if TYPE_CHECKING:
    from simulator.mixed_cluster import MixedCluster

__all__ = [
    "CLUSTER_FORMAT",
    "check_profile",
    "cluster_at",
    "is_cluster_file",
    "load_cluster",
    "load_profile",
    "profile_names",
    "profile_text",
    "split_cluster_file",
    "write_profile",
]
CLUSTER_FILE_SUFFIXES = (".json", ".txt")
CLUSTER_FORMAT = re.compile(rb"^format: *meshwright-cluster *$", re.MULTILINE)


def load_profile(name_or_path: str) -> Hardware:
    """Load a profile by its name in `hw_profiles` or by the path of a YAML file.

    Whatever ends in ``.yaml`` or ``.yml`` or holds a path separator is a path. ``PROFILE@FILE`` is a profile cut and
    joined as the file of a real cluster says: an HCCL rank table (``.json``), the text of ``nvidia-smi topo -m`` or an
    InfraGraph (``.json``, ``.yaml``); a rank table that names its chip needs no profile before it.
    ``PROFILE:KEY=VALUE,…`` is a shipped profile with numbers set, as ``meshwright profiles new`` writes it.

    >>> load_profile("dgx-h100:network=200Gb").levels[-1].bandwidth_bytes_per_s / 1e9
    23.75
    """
    from simulator.profile_file import parse_profile

    base, settings = split_settings(name_or_path)
    if settings:
        return _with_settings(name_or_path, base, settings)
    chip, file = split_cluster_file(name_or_path)
    if file:
        return _described(chip, file)
    content, place = profile_text(name_or_path)
    return (_parse if is_profile_path(name_or_path) else parse_profile)(content, place)


@lru_cache(maxsize=64)
def _with_settings(text: str, base: str, settings: tuple[str, ...]) -> Hardware:
    """A shipped profile with some numbers set, under the name that says so."""
    from simulator.profile_file import check_content
    from simulator.shipped_profiles import new_profile

    _, hardware = check_content(new_profile("with-settings", base, settings), text)
    return replace(hardware, name=text)


def profile_text(name_or_path: str) -> tuple[bytes, str]:
    """The text of a profile that `load_profile` reads, and the file that it stands in."""
    from simulator.profile_file import PROFILE

    if is_profile_path(name_or_path):
        path = os.path.expanduser(name_or_path)  # noqa: PTH111 pathlib raises where it knows no home
        return PROFILE.read(path), path
    return shipped_text(name_or_path), f"hw_profiles/{name_or_path}{PROFILE_SUFFIX}"


def split_cluster_file(text: str) -> tuple[str, str]:
    """Profile and file in ``PROFILE@FILE`` or ``FILE.json``; no file where `text` names a profile alone.

    >>> split_cluster_file("dgx-a100@topo.txt"), split_cluster_file("rank_table.json"), split_cluster_file("l40s")
    (('dgx-a100', 'topo.txt'), ('', 'rank_table.json'), ('l40s', ''))
    """
    profile, at, file = text.rpartition("@")
    if at and profile and not is_regular(text) and (is_regular(file) or not text.endswith(PROFILE_SUFFIXES)):
        return profile, file
    return ("", text) if text.endswith(CLUSTER_FILE_SUFFIXES) else (text, "")


def is_cluster_file(text: str) -> bool:
    """Whether what names a profile is a file that describes one real cluster."""
    return bool(split_cluster_file(text)[1])


def check_profile(path: str) -> Hardware:
    """Read the profile in file `path`, whatever the file is called; ProfileError says what is wrong.

    ``PROFILE@FILE`` and rank tables are read as `load_profile` does.
    """
    from simulator.profile_file import PROFILE

    profile, file = split_cluster_file(path)
    if file and profile:
        return _described(profile, file)
    return _parse(PROFILE.read(path), path)


def _described(profile: str, file: str) -> Hardware:
    """Hardware of the cluster that `file` describes, of the devices of `profile`."""
    from simulator.cluster_files import described_hardware, infragraph_hardware, is_infragraph, matrix_hardware
    from simulator.profile_file import PROFILE

    content = PROFILE.read(file)
    read = described_hardware if file.endswith(".json") else matrix_hardware
    return (infragraph_hardware if is_infragraph(content) else read)(content, file, profile, load_profile)


def _parse(content: bytes, file: str) -> Hardware:
    """The profile in `content`, or what the slowest parts of the cluster of several device types there make."""
    if CLUSTER_FORMAT.search(content):
        from simulator.mixed_cluster import pacing_hardware, parse_cluster

        return pacing_hardware(parse_cluster(content, file, load_profile))
    from simulator.cluster_files import described_hardware, is_matrix, is_rank_table
    from simulator.profile_file import parse_profile

    if is_rank_table(content):
        return described_hardware(content, file, "", load_profile)
    if is_matrix(content):
        raise ProfileError(
            f"{file}: this is the matrix of `nvidia-smi topo -m`, which says how devices are joined and not what they "
            f"are; give the profile of the devices before it, for example dgx-a100@{file}"
        )
    return parse_profile(content, file)


def write_profile(content: Mapping[str, object], path: str | Path) -> Hardware:
    """Validate `content` (the profile as nested plain data) and write it to `path`, whole or not at all."""
    from simulator.profile_file import write_content

    return write_content(content, Path(path))


def load_cluster(path: str) -> MixedCluster:
    """Read the description of a cluster of several device types; ProfileError says which field is wrong."""
    from simulator.mixed_cluster import CLUSTER, parse_cluster

    return parse_cluster(CLUSTER.read(path), path, load_profile)


def cluster_at(hardware: str) -> MixedCluster | None:
    """The cluster of several device types that what names a profile is the path of; None where it is none."""
    from simulator.mixed_cluster import parse_cluster
    from simulator.profile_file import PROFILE

    if not hardware.endswith(PROFILE_SUFFIXES) or not is_profile_path(hardware):
        return None
    content = PROFILE.read(hardware)
    return parse_cluster(content, hardware, load_profile) if CLUSTER_FORMAT.search(content) else None
