"""Settings that every unit test shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples on every run, and no verdict that depends on how busy the machine is.
settings.register_profile("outrider", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("outrider")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Has torch compute in one thread, which tiny models need for their speed and comparisons for their bits."""
    import torch  # not for the tests that do without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
