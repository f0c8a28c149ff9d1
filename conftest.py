"""Settings of the whole test suite."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hypothesis import settings

# One thread a process: the suite runs several processes side by side, and results do not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Captured graphs are kept from run to run beside pytest's own cache, not in the user's home.
os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parent / ".pytest_cache" / "captures"))

# What runs in the background may have interrupts ignored, and with it every process that tests start to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("meshwright", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "meshwright"))
