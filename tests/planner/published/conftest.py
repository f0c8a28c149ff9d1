"""What tests of published runs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from planner.published import planned


@pytest.fixture(autouse=True, scope="package")
def runs_are_predicted_in_this_process() -> Iterator[None]:
    """Processes that predict at once import and capture anew; tests that are about them say how many cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "available_cores", lambda: 1)
        yield
