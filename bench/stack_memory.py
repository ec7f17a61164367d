"""Memory of a whole stack, and the seconds until it serves.

    python bench/stack_memory.py [--target smollm2-135m] [--draft default]

Starts a stack, answers a few prompts, then adds up the proportional set size (private memory, and shared memory divided
by those who share it) of every process below this one. The bars for the default pair: 4 GB, and 60 s from a warm cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil

from outrider.client import Answer, Client, request
from outrider.fetch.reporter import LogReporter
from outrider.local.options import StackOptions
from outrider.local.stack import make_plan, private

_STREAMS = 8
_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    arguments = parser.parse_args()
    options = StackOptions(target=arguments.target, draft=arguments.draft)
    began = time.monotonic()
    with private(options, make_plan(options), LogReporter(), print) as stack:
        ready_s = time.monotonic() - began
        with Client(stack.state.grpc) as client, ThreadPoolExecutor(_STREAMS) as threads:
            list(threads.map(lambda number: _answer(client, number), range(2 * _STREAMS)))
        sizes = _proportional_bytes()
    for part, size in sizes.most_common():
        print(f"{size / 1e6:8.0f} MB  {part}")
    total = sum(sizes.values())
    print(json.dumps({"ready_s": round(ready_s, 1), "memory_gb": round(total / 1e9, 2)}))


def _answer(client: Client, number: int) -> None:
    for _ in client.generate(request(f"Count from {number} on:", max_tokens=_TOKENS), Answer()):
        pass


def _proportional_bytes() -> Counter[str]:
    """Proportional set size by kind of process, without this one."""
    sizes: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        name = " ".join(process.cmdline()[:8])
        kind = next((part for part in ("target_service", "draft_service", "coordinator", "ray") if part in name), name)
        sizes[kind] += process.memory_full_info().pss
    return sizes


if __name__ == "__main__":
    main()
