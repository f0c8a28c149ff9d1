"""Settings of the whole test suite."""

from __future__ import annotations

import os

from hypothesis import settings

# One thread a process: the suite runs several processes side by side, and results do not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("meshwright", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "meshwright"))
