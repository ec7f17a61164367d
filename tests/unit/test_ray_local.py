"""A private Ray that does not start at once: a machine can be too busy for Ray's fixed 30 s."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator import ray_local
from outrider.errors import Unavailable


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories in which a start was tried; the settings of this process stay as they are."""
    monkeypatch.setattr(ray_local, "_isolate", lambda: None)
    return []


def failing(tried: list[Path], times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first starts fail as Ray's do."""

    def start(directory: Path) -> None:
        assert directory.is_dir()
        tried.append(directory)
        if len(tried) <= times:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray_local, "_init", start)


def test_a_ray_that_is_late_is_started_again(tried: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a start beside other work; what a failed try left is gone before the next one begins."""
    failing(tried, 2, monkeypatch)
    with ray_local.local_ray() as directory:
        assert [one.exists() for one in tried] == [False, False, True]
        assert directory == tried[-1]
    assert not directory.exists()


def test_a_ray_that_never_starts_says_so(tried: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a start that is tried for ever, and against files that stay."""
    failing(tried, 99, monkeypatch)
    with pytest.raises(Unavailable, match=r"3 tries: The current node timed out"), ray_local.local_ray():
        pass
    assert len(tried) == 3 and not any(one.exists() for one in tried)
