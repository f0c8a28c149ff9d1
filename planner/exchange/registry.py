"""The formats of other frameworks, by name; of several that recognise a file the first one counts."""

from __future__ import annotations

from collections.abc import Mapping

from planner.exchange.accelerate import ACCELERATE
from planner.exchange.automodel import AUTOMODEL
from planner.exchange.bridge import BRIDGE
from planner.exchange.deepspeed import DEEPSPEED
from planner.exchange.formats import ExchangeFormat
from planner.exchange.galvatron import GALVATRON
from planner.exchange.megatron import MEGATRON
from planner.exchange.mindspeed import MINDSPEED, MINDSPEED_FSDP2
from planner.exchange.mindspore.graph_yaml import MINDFORMERS
from planner.exchange.mindspore.pynative import MINDFORMERS_PYNATIVE
from planner.exchange.simumax import SIMUMAX
from planner.exchange.torchtitan import TORCHTITAN, TORCHTITAN_OLD
from planner.exchange.torchtitan_npu import TORCHTITAN_NPU

FORMATS: Mapping[str, ExchangeFormat] = {
    one.name: one
    for one in (
        *(MINDSPEED, MEGATRON, TORCHTITAN_NPU, TORCHTITAN_OLD, TORCHTITAN, DEEPSPEED, ACCELERATE, BRIDGE, AUTOMODEL),
        *(MINDFORMERS, MINDFORMERS_PYNATIVE, MINDSPEED_FSDP2, GALVATRON, SIMUMAX),
    )
}
