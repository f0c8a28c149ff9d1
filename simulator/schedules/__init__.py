"""Pipeline schedules: generated, imported, and their published formulas."""

from simulator.schedules.generators import SCHEDULES, TWO_CHUNKS, make_schedule
from simulator.schedules.schedule import Action, ActionKind, Schedule, check_schedule

__all__ = ["SCHEDULES", "TWO_CHUNKS", "Action", "ActionKind", "Schedule", "check_schedule", "make_schedule"]
