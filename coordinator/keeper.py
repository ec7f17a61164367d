"""Cleans up after a coordinator that was killed: ends what is left of its private Ray, and removes its files.

Run as a script by `coordinator.ray_local`, with the standard library only. Ray's own processes notice the loss of
their driver, but its agents may outlive it by minutes. The keeper waits for the end of its standard input, which is the
end of the coordinator however that comes about.

A process belongs to the private Ray if it has a file in the private directory open for writing: all of Ray's processes
log there, and nothing else does.
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
    """Processes of this user that have a file in `directory` open for writing, without the one that waits for us."""
    numbers = [entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getppid()]
    return [int(number) for number in numbers if _writes_in(number, directory + os.sep)]


def _writes_in(process_id: str, prefix: str) -> bool:
    try:
        return any(
            os.readlink(f"/proc/{process_id}/fd/{descriptor}").startswith(prefix) and _writable(process_id, descriptor)
            for descriptor in os.listdir(f"/proc/{process_id}/fd")
        )
    except OSError:  # it ended, or is another user's
        return False


def _writable(process_id: str, descriptor: str) -> bool:
    with open(f"/proc/{process_id}/fdinfo/{descriptor}", encoding="ascii") as lines:
        flags = next(line.split()[1] for line in lines if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _kill(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


if __name__ == "__main__":
    main()
