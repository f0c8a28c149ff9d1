"""Numbers in order."""

from __future__ import annotations

import numpy as np

from simulator.task_table import IntArray


def stable_order(numbers: IntArray, limit: int) -> IntArray:
    """Places (n,) of whole `numbers` from 0 to below `limit`, ascending, equal ones as they stand.

    numpy sorts integers of 16 bits by radix, several times as fast as wider ones.
    """
    narrow = numbers.astype(np.uint16) if limit <= 2**16 else numbers
    return np.argsort(narrow, kind="stable")
