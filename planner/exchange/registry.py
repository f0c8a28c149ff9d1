"""The formats of other frameworks, by name; of several that recognise a file the first one counts."""

from __future__ import annotations

from collections.abc import Mapping

from planner.exchange.accelerate import ACCELERATE
from planner.exchange.bridge import BRIDGE
from planner.exchange.deepspeed import DEEPSPEED
from planner.exchange.formats import ExchangeFormat
from planner.exchange.megatron import MEGATRON
from planner.exchange.torchtitan import TORCHTITAN, TORCHTITAN_OLD

FORMATS: Mapping[str, ExchangeFormat] = {
    one.name: one for one in (MEGATRON, TORCHTITAN_OLD, TORCHTITAN, DEEPSPEED, ACCELERATE, BRIDGE)
}
