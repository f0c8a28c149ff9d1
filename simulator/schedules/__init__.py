"""Pipeline schedules: generated and imported."""

from simulator.schedules.exchange import format_schedule_csv, parse_schedule_csv
from simulator.schedules.generators import SCHEDULES, TWO_CHUNKS, make_schedule
from simulator.schedules.schedule import Action, ActionKind, Schedule, check_schedule

__all__ = [
    "SCHEDULES",
    "TWO_CHUNKS",
    "Action",
    "ActionKind",
    "Schedule",
    "check_schedule",
    "format_schedule_csv",
    "make_schedule",
    "parse_schedule_csv",
]
