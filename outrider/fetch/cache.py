"""The user's cache: where it lies, who may write to it now, and whether there is room."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from outrider.errors import ModelUnavailable
from outrider.fetch.reporter import Reporter, megabytes

_NOTE_EVERY_S = 4.0


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """Outrider's folder in the user's cache.

    OUTRIDER_CACHE overrides it, XDG_CACHE_HOME moves it. The environment is read here and not in a launcher because
    every process of a stack, whoever started it, has to find the same locks.
    """
    environ = os.environ if environ is None else environ
    if override := environ.get("OUTRIDER_CACHE"):
        return Path(override).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache")).expanduser() / "outrider"


@contextmanager
def exclusive(name: str, reporter: Reporter, root: Path) -> Iterator[None]:
    """Hold the machine-wide lock on fetching `name`, waiting audibly while another process has it.

    Raises:
        ModelUnavailable: when the cache folder cannot be written.
    """
    path = root / "locks" / (re.sub(r"[^\w.-]+", "--", name) + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        _acquire(lock, name, reporter)
    except OSError as error:
        raise unwritable(root, error) from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, name: str, reporter: Reporter) -> None:
    start_s = time.monotonic()
    timeout_s = 0.0
    while True:
        try:
            lock.acquire(timeout=timeout_s)
            return
        except Timeout:
            waited_s = time.monotonic() - start_s
            reporter.note(f"another process is fetching {name}; waiting for it ({waited_s:.0f} s)")
            timeout_s = _NOTE_EVERY_S


def existing_parent(path: Path) -> Path:
    """The nearest folder at or above `path` that exists, for asking its file system for room."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Free space for this user on the file system that holds, or will hold, `path`."""
    return shutil.disk_usage(existing_parent(path)).free


def require_room(needed_bytes: int, place: Path, how_to_move: str) -> None:
    """Refuse to start what cannot end.

    Raises:
        ModelUnavailable: when less than `needed_bytes` are free at `place`.
    """
    free = free_bytes(place)
    if free < needed_bytes:
        raise ModelUnavailable(
            f"disk full: {megabytes(needed_bytes)} are needed in {place}, {megabytes(free)} are free; "
            f"make room or {how_to_move}"
        )


def unwritable(place: Path, error: OSError) -> ModelUnavailable:
    """The one-line form of an error of the file system under `place`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelUnavailable(f"disk full: no space left in {place}; make room or set OUTRIDER_CACHE to another disk")
    return ModelUnavailable(
        f"cannot write to {place} ({error.strerror or error}); set OUTRIDER_CACHE to a folder of your own"
    )
