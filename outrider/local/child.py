"""Run one part as a child that dies with its launcher, on chosen cores.

`python -m outrider.local.child PARENT CPUS MODULE [ARGUMENT ...]`, CPUS being `all` or core numbers. The kernel's
parent-death signal is set from inside the child, because a function run between fork and exec is unsafe in a process
with threads.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, cpus, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if cpus != "all":
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    if os.getppid() != int(parent):  # the launcher died before the signal was set
        sys.exit(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
