"""What one coordinator can pass on, HTTP in to HTTP out, with stub services that take no time of their own.

    python bench/capacity.py [--streams 64] [--seconds 60] [--gamma 4] [--ingress serve|uvicorn] [--profile 20]

Starts the stub pair (acceptance .8, 0 ms), a coordinator, and a client that keeps so many streams open. Counts the
events that arrive (one per stream and round) and the tokens in them, the lag of the coordinator's event loop as it
exports it, and the CPU time of every process. The bars: 3,000 stream-rounds/s and 10,000 tokens/s on one core, p99 of
the lag under 50 ms.

Where all parts share few cores, rounds per second of wall-clock time say how fast the machine is. So the figure to
compare is CPU time: what a coordinator's own process spends per stream-round, and the rate at which that would fill
one core. `--ingress uvicorn` serves the same application without Ray, which shows what Ray Serve costs. `--profile`
samples the coordinator with py-spy for so many seconds, behind the measurement, and says by file where time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from loadtest.series import Snapshot, parse
from outrider.local.supervisor import PartSpec, Supervisor
from outrider.ports import free_port

BAR_ROUNDS, BAR_TOKENS, BAR_LAG_S = 3_000, 10_000, 0.05
_READY_S = 300.0
_SETTLE_S = 3.0
_ANSWER_TOKENS = 7_000
_EVENT = b'data: {"id"'
_OURS = ("coordinator", "outrider", "cluster")
_LIBRARIES = ("ray", "uvicorn", "starlette", "fastapi", "grpc", "asyncio", "prometheus_client", "httptools")


def main() -> None:
    given = _arguments()
    if given.serve:
        _serve_plain(int(given.serve), given.rest)
        return
    if given.profile:
        _py_spy()  # said now, not behind a minute of measuring
    with _stack(given) as url:
        figures = asyncio.run(_measure(given, url))
    _show(figures)
    print(json.dumps(figures))


# ---- the stack ----


@contextmanager
def _stack(given: argparse.Namespace) -> Iterator[str]:
    """Yields the coordinator's address."""
    target, draft, port = free_port(), free_port(), free_port()
    at = "127.0.0.1"
    own = ["--target", f"{at}:{target}", "--draft", f"{at}:{draft}", "--port", str(port), "--grpc-port", "0"]
    own += ["--num-speculative-tokens", str(given.gamma), "--max-num-seqs", str(given.streams)]
    most = ("--max-num-seqs", str(given.streams), "--profile-seconds", "0")
    url = f"http://{at}:{port}"
    with tempfile.TemporaryDirectory() as logs:
        supervisor = Supervisor(
            [
                _part("target", "target_service", "--model", "stub:markov", "--port", str(target), *most),
                _part("draft", "draft_service", "--model", "stub:accept?p=0.8", "--port", str(draft), *most),
                PartSpec("coordinator", "coordinator", tuple(own), partial(_is_ready, url))
                if given.ingress == "serve"
                else PartSpec("coordinator", "bench.capacity", ("--serve", str(port), *own), partial(_is_ready, url)),
            ],
            Path(logs),
            lambda line: print(line, file=sys.stderr),
        )
        try:
            supervisor.wait_ready(_READY_S)
            yield url
        finally:
            supervisor.stop(10)


def _part(role: str, module: str, *arguments: str) -> PartSpec:
    return PartSpec(role, module, arguments, lambda: True)


def _is_ready(url: str) -> bool:
    try:
        ready = httpx.get(url + "/ready", timeout=5, trust_env=False)
    except httpx.HTTPError:
        return False
    return ready.status_code == 200 and not ready.json()["degraded"]


def _roles() -> dict[str, psutil.Process]:
    """The processes that pass tokens on: both services, the coordinator, and Serve's proxy if there is one."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        line = " ".join(process.cmdline())
        for role, marks in {
            "target": ("target_service",),
            "draft": ("draft_service",),
            "proxy": ("ray::ProxyActor",),
            "coordinator": ("ray::ServeReplica", "bench.capacity --serve"),
        }.items():
            if any(mark in line for mark in marks):
                found[role] = process
    return found


def _serve_plain(port: int, arguments: list[str]) -> None:
    """The coordinator's application behind uvicorn alone, in this process."""
    import uvicorn
    import uvloop

    from coordinator.app import build_app
    from coordinator.arguments import parse as options_of
    from coordinator.decoder import Decoder
    from coordinator.front import Front

    options = options_of(arguments)

    async def serve() -> None:
        front = Front(Decoder(options.decoder), options.front)
        await front.start()
        config = uvicorn.Config(build_app(lambda: front), host="127.0.0.1", port=port, log_level="warning")
        await uvicorn.Server(config).serve()
        await front.close()

    uvloop.run(serve())


# ---- measuring ----


async def _measure(given: argparse.Namespace, url: str) -> dict[str, Any]:
    counts = Counter[str]()
    roles = _roles()
    readers = [asyncio.create_task(_read(url, index, counts)) for index in range(given.streams)]
    await asyncio.sleep(_SETTLE_S)
    before, cpu, since_s, events = await _series(url), _cpu(roles), time.monotonic(), counts["events"]
    await asyncio.sleep(given.seconds)
    elapsed_s, events = time.monotonic() - since_s, counts["events"] - events
    spent = {role: after - cpu[role] for role, after in _cpu(roles).items()}
    series = (await _series(url)).since(before)
    if given.profile:
        _show_profile(await _profile(roles["coordinator"], given.profile))
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    assert not counts["refused"], f"{counts['refused']} requests were refused"
    tokens, own_s = series.value("generation_tokens_total"), spent["coordinator"] / events
    return {
        "streams": given.streams,
        "gamma": given.gamma,
        "ingress": given.ingress,
        "seconds": round(elapsed_s, 1),
        "stream_rounds_per_s": round(events / elapsed_s),
        "tokens_per_s": round(tokens / elapsed_s),
        "tokens_per_round": round(tokens / events, 2),
        "event_loop_lag_p99_s": _quantile(series, 0.99),
        "cpu_us_per_round": {role: round(1e6 * s / events) for role, s in spent.items()},
        "cores": {role: round(s / elapsed_s, 2) for role, s in spent.items()},
        "one_core_stream_rounds_per_s": round(1 / own_s),
        "one_core_tokens_per_s": round(tokens / events / own_s),
    }


async def _series(url: str) -> Snapshot:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        return parse((await client.get(url + "/metrics")).text)


def _cpu(roles: dict[str, psutil.Process]) -> dict[str, float]:
    return {role: sum(process.cpu_times()[:2]) for role, process in roles.items()}


def _quantile(series: Snapshot, share: float) -> float:
    """Upper bound of the bucket in which this share of the event loop's lags ends."""
    name = "event_loop_lag_seconds_bucket"
    buckets = sorted(
        (float(dict(labels)["le"]), count) for (key, labels), count in series.samples.items() if key == name
    )
    return next(bound for bound, count in buckets if count >= share * buckets[-1][1])


async def _read(url: str, index: int, counts: Counter[str]) -> None:
    """One stream after another; a client that parses nothing, so that it takes little of the machine."""
    host, port = url.removeprefix("http://").split(":")
    wanted = {"prompt": chr(65 + index % 26), "max_tokens": _ANSWER_TOKENS, "temperature": 0, "stream": True}
    body = json.dumps(wanted).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    while True:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + body)
            counts["refused"] += b" 200 " not in await reader.readline()
            rest = b""  # the last bytes of one read and the first of the next may make a mark together
            while data := await reader.read(1 << 16):
                data = rest + data
                counts["events"] += data.count(_EVENT)
                rest = data[-len(_EVENT) + 1 :]
        finally:
            writer.close()


# ---- where time goes ----


async def _profile(process: psutil.Process, seconds: int) -> list[str]:
    """Stacks with their number of samples, in py-spy's raw form; needs py-spy and the right to trace processes."""
    command = [_py_spy(), "record", "--nonblocking", "--gil", "-r", "200", "-f", "raw", "-o", "/dev/stdout"]
    command += ["-p", str(process.pid), "-d", str(seconds)]
    sampling = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    output, _ = await sampling.communicate()
    return [line for line in output.decode().splitlines() if ";" in line and line.rpartition(" ")[2].isdecimal()]


def _py_spy() -> str:
    """Its path: of this environment, which need not be activated, or of the search path; exits when there is none."""
    found = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    return found or sys.exit("--profile needs py-spy, which is not installed: pip install py-spy")


def _show_profile(lines: list[str]) -> None:
    """Each sample counts for the innermost of our own files in its stack, or else of the known libraries."""
    places = Counter[str]()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        places[_place(stack.split(";"))] += int(count)
    total = sum(places.values())
    print(f"where the coordinator's time goes ({total} samples):")
    for place, count in places.most_common(30):
        print(f"  {100 * count / total:5.1f} %  {place}")


def _place(frames: list[str]) -> str:
    for frame in reversed(frames):
        if any(f"({part}/" in frame or f"/{part}/" in frame for part in _OURS):
            return frame
    for frame in reversed(frames):
        for library in _LIBRARIES:
            if f"({library}/" in frame or f"/{library}/" in frame:
                return f"{library}: {frame}"
    return frames[-1]


def _show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['streams']} streams, gamma {figures['gamma']}, {figures['ingress']}, {figures['seconds']} s: "
        f"{figures['stream_rounds_per_s']} stream-rounds/s, {figures['tokens_per_s']} tokens/s as it ran"
    )
    print(
        f"  one core of the coordinator: {figures['one_core_stream_rounds_per_s']} stream-rounds/s (bar {BAR_ROUNDS}), "
        f"{figures['one_core_tokens_per_s']} tokens/s (bar {BAR_TOKENS})"
    )
    print(f"  event loop: p99 lag at most {1_000 * figures['event_loop_lag_p99_s']:g} ms (bar {1_000 * BAR_LAG_S:g})")
    for role, spent in figures["cpu_us_per_round"].items():
        print(f"  {role:<12}{spent:6} us of CPU per stream-round, {figures['cores'][role]:.2f} cores")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--ingress", choices=("serve", "uvicorn"), default="serve")
    parser.add_argument("--profile", type=int, default=0, metavar="SECONDS")
    parser.add_argument("--serve", metavar="PORT", help=argparse.SUPPRESS)
    given, given.rest = parser.parse_known_args()
    return given


if __name__ == "__main__":
    main()
