"""Every parser of the product, each with inputs that are right."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as once
from http.server import ThreadingHTTPServer
from importlib import resources
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import planner.networks.hugging_face_modules  # noqa: F401 the first import of transformers takes seconds
from planner.cli.config import PlanSettings, with_config
from planner.cost.software import software_named
from planner.cost.software_file import parse_software
from planner.exchange.checking import read_file
from planner.exchange.formats import rounded
from planner.exchange.registry import FORMATS
from planner.execution.checkpoints.checkpoint import (
    METADATA,
    RECORD,
    CheckpointRecord,
    check_undamaged,
    read_record,
    write_record,
)
from planner.execution.data.formats import read_idx, read_tokens
from planner.graph import cache
from planner.graph.scaling import at_batch
from planner.networks import load_network
from planner.plans.file import plan_to_text, read_strategy, rule_from_text
from planner.plans.hints import load_hints
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest, checked_pins
from planner.published.measurement_file import read_rows
from planner.what_if.journal import read as read_journal
from reports.served import Served, State, server
from simulator.calibration.from_run import correct_profile, read_run
from simulator.calibration.measurement_files import read_measurements
from simulator.cluster_files import infragraph
from simulator.errors import InputError
from simulator.hardware import describe
from simulator.profiles import check_profile, load_cluster, load_profile, write_profile
from simulator.schedules import format_schedule_csv, make_schedule, parse_schedule_csv
from simulator.shipped_profiles import new_profile
from tests.measurements import write_measurements
from tests.planner.exchange.training_configs import usual
from tests.results import make_plan
from tests.simulator.test_rank_table import old, ranked


@dataclass(frozen=True, kw_only=True)
class Parser:
    """How a file is read, what it is called, and inputs that are right."""

    read: Callable[[Path], object]
    seeds: Callable[[], list[bytes]]
    file: str = "input.yaml"


def _json(*documents: object) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(document).encode() for document in documents]


def _text(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


@once
def _profile() -> dict[str, Any]:
    """A shipped profile with what must be there, and one of each part that may."""
    data: dict[str, Any] = yaml.safe_load((resources.files("hw_profiles") / "dgx-a100.yaml").read_text())
    data["operators"]["matmul"] = {"bfloat16": data["operators"]["matmul"]["bfloat16"]}
    data["collectives"] = data.get("collectives", [])[:1]
    return data


def _profile_seeds() -> list[bytes]:
    needed = ("format", "version", "name", "description", "default_precision", "device", "kernels", "topology")
    more = ("overlaps_communication", "uncertainty")
    small = {name: _profile()[name] for name in (*needed, *more)}
    return [json.dumps(small).encode(), json.dumps(_profile()).encode(), yaml.safe_dump(small).encode()]


def _software_seeds() -> list[bytes]:
    data = yaml.safe_load((resources.files("hw_profiles") / "software" / "training.yaml").read_text())
    data["layered"]["devices"] = dict(list(data["layered"]["devices"].items())[:2])
    for part in (data["stacks"], data["layered"]["stacks"]):
        for name in list(part)[2:]:
            del part[name]
    data["intervals"] = [entry for entry in data["intervals"] if entry["family"] == "*" and entry["stack"] == "*"]
    return [json.dumps(data).encode()]


def _strategies() -> list[bytes]:
    return [plan_to_text(make_plan()).encode(), plan_to_text(make_plan(1, 1)).encode()]


def _run_seeds() -> list[bytes]:
    work = {"kernel": "matmul", "dtype": "bfloat16", "flops": 2e9, "bytes_moved": 1e6, "calls": 3}
    times = {"predicted_s": 1e-3, "measured_s": 2e-3}
    message = {"collective": "all_reduce", "group_size": 2, "payload_bytes": 1e6, "calls": 4, **times, "waited_s": 1e-4}
    comparison = {"network": "zoo:mlp", "hardware": "dgx-a100", "hardware_hash": load_profile("dgx-a100").hash,
                  "processes": 2, "work": [{**work, **times, "busy_s": 2e-3}], "messages": [message]}  # fmt: skip
    return [json.dumps({"backend": "gloo", "comparison": comparison}).encode()]


def _correct(path: Path) -> object:
    read_run(path)
    return correct_profile([path], None, path.with_name("corrected.yaml"))


def _record(path: Path) -> object:
    path.rename(path.with_name(RECORD))
    return read_record(path.parent)


def _record_of_three() -> CheckpointRecord:
    return CheckpointRecord(
        step=3, samples=24, network="zoo:mlp", fingerprint="f", optimizer="adamw", learning_rate=1e-3, precision="fp32",
        global_batch=8, data=None, seed=0, devices=2,
    )  # fmt: skip


def _records() -> list[bytes]:
    return [_record_of_three().model_dump_json().encode()]


def _index(path: Path) -> None:
    path.rename(path.with_name(METADATA))
    write_record(path.with_name(RECORD), _record_of_three())
    check_undamaged(path.parent)


def _indices() -> list[bytes]:
    def index(*sizes: int) -> Metadata:
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(sizes)), sizes=torch.Size(sizes))
        entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(sizes), [chunk])
        place = MetadataIndex("w", chunk.offsets, 0)
        return Metadata({"w": entry}, storage_data={place: _StorageInfo(RECORD, 0, 1)})

    return [pickle.dumps(index(*sizes), protocol) for sizes in ((), (4, 3)) for protocol in (2, 4)]


def _graph(path: Path) -> object:
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(path.parent), cache.SWITCH: ""}):
        kept = path.parent / "meshwright"
        kept.mkdir(exist_ok=True)
        path.replace(kept / "input.json")
        return at_batch(graph, 2) if (graph := cache.load("input")) else None


def _graphs() -> list[bytes]:
    with TemporaryDirectory() as folder, patch.dict(os.environ, {"XDG_CACHE_HOME": folder, cache.SWITCH: ""}):
        cache.store("input", load_network("zoo:mlp").capture())
        return [path.read_bytes() for path in Path(folder).rglob("input.json")]


class _Connection:
    """A client that has sent all it sends, and does not look at the answer."""

    def __init__(self, sent: bytes) -> None:
        self._sent = sent

    def makefile(self, *_: object) -> BytesIO:
        return BytesIO(self._sent)

    def settimeout(self, seconds: float) -> None:
        pass

    def sendall(self, answer: bytes) -> None:
        pass


class _Unplanned(Served):
    """Reads what a page asks for and plans nothing."""

    def page(self, state: State) -> tuple[str, bool]:
        try:
            state.request(self.networks, self.profiles)
        except InputError as error:
            return str(error), False
        return state.link(), True


@once
def _server() -> ThreadingHTTPServer:
    return server(0, _Unplanned.with_shipped())


def _requests() -> list[bytes]:
    asked = "/?network=zoo%3Amlp&hw=dgx-a100&devices=16&global_batch=64&seq_len=8&precision=bf16&pins=tp%3D2+pp%3D1"
    head = "Host: 127.0.0.1:8765\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n"
    return [f"GET {path} HTTP/1.1\r\n{head}".encode() for path in (asked, "/", "/other", "http://[::1]:8765/")]


def _npy() -> list[bytes]:
    found = []
    for dtype in ("<u2", ">i8", "u1"):
        stream = BytesIO()
        np.save(stream, np.arange(20).astype(dtype))
        found.append(stream.getvalue())
    return [*found, struct.pack("<3i", 20240520, 1, 4) + bytes(1012) + bytes(8), bytes(range(40))]


def _pins(path: Path) -> object:
    pairs = (line.partition("=") for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines())
    pins = {name: value for name, _, value in pairs}
    known = {name: value for name, value in pins.items() if name in PINNED}
    return checked_pins(PlanRequest(network="zoo:mlp", hardware="dgx-a100", devices=8, pins=Pins.read(known)))


PINNED = {
    *("dp", "tp", "pp", "vpp", "cp", "ep", "micro_batch", "micro_batches", "shard_size", "recompute", "order"),
    *("optimizer_sharding", "schedule", "bucket_mb", "sharding_threshold_kb", "copies", "stage_layers"),
    *("recompute_layers", "sequence_parallel", "offload_to", "offload_optimizer", "expert_cut", "tensor_cut"),
}


def _rules(path: Path) -> object:
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    return [rule_from_text(line) for line in text.splitlines()]


def _profile_read(path: Path) -> object:
    return describe(check_profile(str(path)))


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")


def _new_profile(path: Path) -> object:
    name, base, *settings = [*_words(path), "", ""]
    return write_profile(new_profile(name, base, [s for s in settings if s]), path.with_name("new.yaml"))


def _exchange(name: str) -> Parser:
    """Files of a format are read, by its name and recognised, and their rules checked."""
    form = FORMATS[name]

    def read(path: Path) -> object:
        return form.violations(read_file(path, name)[1].config)

    def seeds() -> list[bytes]:
        """One stage, a pipeline and experts; those in YAML as JSON as well, whose values are mutated one by one."""
        one = usual(pp=1, schedule="none", overlap_gradients=False, overlap_parameters=False, devices=16)
        even = {"ep": 4, "layers": (9, 8, 8, 7), "recompute": "mixed"}
        modes = ("full",) * 8 + ("none",) * 24
        found = list[bytes]()
        for config in (usual(), one, usual(**even, recompute_layers=modes)):
            text = form.write(rounded(config, form.table)).text
            found.append(text.encode())
            if form.suffix in (".yaml", ".yml"):
                found.append(json.dumps(yaml.safe_load(text)).encode())
        return found

    return Parser(read=read, seeds=seeds, file=f"input{form.suffix}")


def _infragraphs() -> list[bytes]:
    return [json.dumps(infragraph(load_profile(name), 16)).encode() for name in ("dgx-a100", "ascend910b-atlas800t-a2")]


def _adapters(path: Path) -> object:
    path.with_name("config.json").write_text(json.dumps(GPT2), encoding="utf-8")
    return load_network(f"hf:{path}")


GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 64, "vocab_size": 256, "n_positions": 64}
LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["c_attn"], "base_model_name_or_path": "."}
SERVERS = [{"server_id": f"10.0.0.{s}", "device": [
    {"device_id": str(d), "device_ip": f"192.168.{s}.{d + 1}", "rank_id": str(8 * s + d)} for d in range(8)
]} for s in range(2)]  # fmt: skip
RANKS = {"version": "1.0", "server_count": "2", "server_list": SERVERS, "status": "completed"}
CONFIG = {"network": "zoo:mlp", "hw": "dgx-a100", "devices": 8, "global-batch": 64, "pin": {"tp": 2}, "top": 3}
MINDFORMERS = {
    "parallel": {"parallel_mode": 1, "gradients_mean": False, "enable_parallel_optimizer": True, "full_batch": True},
    "parallel_config": {"data_parallel": 2, "model_parallel": 4, "pipeline_stage": 1, "micro_batch_num": 1},
    "recompute_config": {"recompute": True, "select_recompute": False},
    "runner_config": {"batch_size": 4},
}
HINTS = [
    {"operators": "blocks.*.expand", "axis": "tensor", "outputs": ["S(1)"]},
    {"operators": "head", "in_strategy": [[2, 1], [1, 4]]},
]
CLUSTER = {"format": "meshwright-cluster", "version": 1, "name": "two", "nodes": [
    {"profile": "dgx-a100", "count": 2}, {"profile": "dgx1-v100", "count": 1},
], "fabric": {"kind": "fat-tree"}}  # fmt: skip
MATRIX = "\n".join(
    ["\t" + "\t".join(f"GPU{i}" for i in range(4)) + "\tNIC0\tCPU Affinity"]
    + [f"GPU{i}\t" + "\t".join(" X " if i == j else "NV12" for j in range(4)) + "\tPXB\t0-23" for i in range(4)]
)
TABLE = "m,n,k,time_ms\n1,2,3,0.5\n4,5,6,1e-3\n"
POINT = {"hardware": "dgx-a100", "devices": 8, "refused": False, "result": {"status": "optimal"}}

PARSERS: dict[str, Parser] = {
    "profile": Parser(read=_profile_read, seeds=_profile_seeds),
    "cluster": Parser(read=lambda path: load_cluster(str(path)), seeds=_json(CLUSTER)),
    "rank table": Parser(
        read=lambda path: load_profile(f"ascend910b-atlas800t-a2@{path}"),
        seeds=lambda: _json(RANKS, ranked(2, 8), old(list(range(8))))(),
        file="ranks.json",
    ),
    "infragraph": Parser(read=lambda path: load_profile(f"dgx-h100@{path}"), seeds=_infragraphs, file="graph.json"),
    "matrix": Parser(read=lambda path: load_profile(f"dgx-a100@{path}"), seeds=_text(MATRIX), file="matrix.txt"),
    "software": Parser(read=lambda path: parse_software(path.read_text(errors="replace"), "s"), seeds=_software_seeds),
    "config": Parser(read=lambda path: with_config(PlanSettings(), path), seeds=_json(CONFIG, MINDFORMERS)),
    "hints": Parser(read=load_hints, seeds=_json(HINTS)),
    "network": Parser(read=lambda path: load_network(f"hf:{path}"), seeds=_json(GPT2, LLAMA), file="config.json"),
    "adapters": Parser(read=_adapters, seeds=_json(LORA), file="adapter_config.json"),
    "strategy": Parser(read=read_strategy, seeds=_strategies, file="strategy.json"),
    "schedule": Parser(
        read=parse_schedule_csv,
        seeds=lambda: [format_schedule_csv(make_schedule(name, 2, 4)).encode() for name in ("1f1b", "zb_h1")],
    ),
    "measurements": Parser(read=read_rows, seeds=lambda: _measured(), file="rows.csv"),
    "table": Parser(read=lambda path: read_measurements(path, ["m", "time_ms"]), seeds=_text(TABLE), file="table.csv"),
    "run": Parser(read=_correct, seeds=_run_seeds, file="run.json"),
    "index": Parser(read=_index, seeds=_indices),
    "graph": Parser(read=_graph, seeds=_graphs),
    "request": Parser(
        read=lambda path: _server().finish_request(_Connection(path.read_bytes()), ("127.0.0.1", 0)),  # type: ignore[arg-type]
        seeds=_requests,
    ),
    "record": Parser(read=_record, seeds=_records),
    "tokens": Parser(read=read_tokens, seeds=_npy, file="tokens.npy"),
    "images": Parser(read=read_idx, seeds=lambda: [b"\0\0\x08\x01\0\0\0\x05hello"], file="images"),
    "journal": Parser(
        read=lambda path: read_journal(path, [], []),
        seeds=_json({"key": "k", "check": "c", "point": POINT}),
    ),
    "pins": Parser(
        read=_pins, seeds=_text("tp=2\norder=pp-dp-tp", "recompute=full\nschedule=1f1b\npp=2\nstage_layers=4-4")
    ),
    "software setting": Parser(
        read=lambda path: [software_named(word) for word in _words(path)],
        seeds=_text("megatron:overlaps=false,deterministic=true", "megatron_core:loss_chunks=4"),
    ),
    "new profile": Parser(
        read=_new_profile,
        seeds=_text(
            "mine\ndgx-h100\nnodes.network=100Gb\nnodes.devices=4\nnodes.nics=2",
            "mine\ndgx-a100\ndevice.memory=96GiB\ndevice.power=500W\ntopology.levels.1.latency_s=5us",
        ),
    ),
    **{f"exchange {name}": _exchange(name) for name in FORMATS},
    "rules": Parser(read=_rules, seeds=_text("S(0), R -> S(0)", "S(0), R -> S(0), R; reduces 128", "S(1)\nP\nR")),
}


def _measured() -> list[bytes]:
    with TemporaryDirectory() as folder:
        return [write_measurements(Path(folder) / "rows.csv", {}, {"tp": "4"}).read_bytes()]
