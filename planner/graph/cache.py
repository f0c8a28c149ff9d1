"""Captured graphs on disk, so that planning a network a second time needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from functools import cache as remember
from importlib import metadata
from pathlib import Path
from typing import Any

from planner.graph.operator_graph import OperatorGraph
from planner.graph.serialization import graph_from_json, graph_to_json
from simulator.errors import InputError
from simulator.whole_file import write_whole

SWITCH = "MESHWRIGHT_CACHE"
KEPT_FILES = 512


def folder() -> Path | None:
    """Where graphs are kept: ``$XDG_CACHE_HOME/meshwright``; ``None`` with ``MESHWRIGHT_CACHE=off`` or no home."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no"):
        return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "meshwright"
    except RuntimeError:  # nobody knows this user's home
        return None


@remember
def toolchain() -> str:
    """Everything but the network that a captured graph depends on: versions, and the code that captures."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted([*root.glob("graph/**/*.py"), *root.glob("networks/**/*.py")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"python {python} torch {version('torch')} transformers {version('transformers')} code {digest.hexdigest()}"


def load(key: str) -> OperatorGraph | None:
    """Read the graph stored under `key`; a missing or damaged file is no graph."""
    document = read(key)
    return None if document is None else graph_from_json(document)


def store(key: str, graph: OperatorGraph) -> None:
    """Write a graph whole, or leave the cache as it was (a full or read-only disk is no error)."""
    write(key, graph_to_json(graph))


def read(key: str) -> Any:
    """Read the document stored under `key`; None where the file is missing or damaged."""
    place = folder()
    if place is None:
        return None
    try:
        digest, _, content = (place / f"{key}.json").read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != _digest(content):
        return None
    with suppress(OSError):
        os.utime(place / f"{key}.json")
    return json.loads(content)


def _digest(content: bytes) -> bytes:
    """The first line of a file, as JSON: what follows is what was written."""
    return json.dumps(hashlib.sha256(content).hexdigest()).encode()


def write(key: str, document: object) -> None:
    """Write a document whole, or leave the cache as it was (a full or read-only disk is no error)."""
    place = folder()
    if place is None:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        content = json.dumps(document, separators=(",", ":")).encode()
        write_whole(place / f"{key}.json", _digest(content) + b"\n" + content)
        # Keep the files used last: those of other versions of the code are never read again.
        files = sorted(place.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[KEPT_FILES:]:
            file.unlink(missing_ok=True)
    except (OSError, InputError):
        return


@remember
def code_digest() -> str:
    """Digest of the version and of all code and profiles that plans and simulates."""
    digest = hashlib.sha256(metadata.version("meshwright").encode())
    root = Path(__file__).parents[2]
    for package in ("hw_profiles", "simulator", "planner"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def version(distribution: str) -> str:
    """`importlib.metadata.version` without parsing what a package says of itself, which may be long; or absent."""
    try:
        said = metadata.distribution(distribution).read_text("METADATA") or ""
    except metadata.PackageNotFoundError:
        return "absent"
    found = re.search(r"^Version: *(\S+)", said, re.MULTILINE)
    return found[1] if found else metadata.version(distribution)
