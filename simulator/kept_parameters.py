"""Parameters that DeepSpeed's ZeRO-3 gathers anew although the pass that needs them has used them before.

It keeps what is needed again before ``stage3_max_reuse_distance`` other parameters are used, and releases the rest
(``get_reuse_distance_in_numel`` and ``_keep_for_later`` of ``deepspeed/runtime/zero/stage3.py``). Where a layer is
computed again, its backward pass needs every parameter a second time: those of the feed-forward network, two thirds of
a layer, soon, those of attention behind the feed-forward network's both forward and backward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.program import Collective

FloatArray = NDArray[np.float64]
REUSED_WITHIN = 1e9
"""Parameters: the default, which runs keep (``experiments/gpt2-meg-ds-zero`` of github.com/bigscience-workshop)."""
ATTENTION = 1 / 3
"""Part of a layer's parameters that attention has: 4 of 12 squares of the width."""
_HALF_BYTES = 2.0


def gathered_again(elements: FloatArray) -> FloatArray:
    """Part of the parameters of layers of so many ``elements`` on a rank that their backward pass gathers anew."""
    between = 2 * (1 - ATTENTION) * elements
    return np.where(between >= REUSED_WITHIN, ATTENTION, 0.0)


def gathers(collective: Collective, payload: FloatArray) -> FloatArray:
    """By what a gather of a layer of `payload` bytes in 16 bits grows, of which a step has two."""
    if collective is not Collective.ALL_GATHER:
        return np.ones(1)
    return 1.0 + gathered_again(np.asarray(payload) / _HALF_BYTES) / 2
