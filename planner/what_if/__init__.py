"""The best plan of one network on many clusters: one row for each profile and device count."""

from planner.what_if.options import WhatIfOptions, batch_rule
from planner.what_if.rows import WhatIfRow, finish_rows, row_document
from planner.what_if.sweep import Sweep, prepare, run, what_if

__all__ = [
    "Sweep",
    "WhatIfOptions",
    "WhatIfRow",
    "batch_rule",
    "finish_rows",
    "prepare",
    "row_document",
    "run",
    "what_if",
]
