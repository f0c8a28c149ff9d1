"""Which devices behave alike in whole training steps."""

from __future__ import annotations

import re
from functools import lru_cache

_FAMILIES = (
    (r"V100|P40|T4", "volta"),
    (r"A100|A800|A40|A30|RTX.*30|RTX A", "ampere"),
    (r"GB200|GB300|B100|B200|B300", "blackwell"),
    (r"H100|H800|H200|GH200|H20|L40|RTX.*40|4090", "hopper"),
    (r"910B|910C|910_9", "ascend910b"),
    (r"Ascend.?910", "ascend910"),
)


@lru_cache(maxsize=256)
def family_of(device_name: str) -> str:
    """Device family by the name of the device: the generation whose kernels and clocks behave alike.

    >>> family_of("NVIDIA A100-SXM4-80GB"), family_of("Ascend 910B")
    ('ampere', 'ascend910b')
    """
    return next((family for pattern, family in _FAMILIES if re.search(pattern, device_name)), "other")
