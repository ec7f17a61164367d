"""Cleans up after a coordinator that was killed: ends what is left of its private Ray, and removes its files.

Run as a script by `coordinator.ray_local`, with the standard library only. Ray's own processes notice the loss of
their driver, but its agents may outlive it by minutes. The keeper waits for the end of its standard input, which is the
end of the coordinator however that comes about.

A process belongs to the private Ray if its standard output or error is a file in the private directory: Ray redirects
both, and no other program would write there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

_GRACE_S = 1.0
_GIVE_UP_S = 15.0
_POLL_S = 0.1


def main() -> None:
    directory = os.path.realpath(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    began = time.monotonic()
    while (left := members(directory)) and time.monotonic() - began < _GIVE_UP_S:
        if time.monotonic() - began > _GRACE_S:
            for process_id in left:
                _kill(process_id)
        time.sleep(_POLL_S)
    shutil.rmtree(directory, ignore_errors=True)


def members(directory: str) -> list[int]:
    """Processes of this user whose standard output or error is a file in `directory`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and any(_writes_to(entry, descriptor, directory) for descriptor in ("1", "2")):
            found.append(int(entry))
    return found


def _writes_to(process_id: str, descriptor: str, directory: str) -> bool:
    try:
        return os.readlink(f"/proc/{process_id}/fd/{descriptor}").startswith(directory + os.sep)
    except OSError:  # it ended, or is another user's
        return False


def _kill(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


if __name__ == "__main__":
    main()
