"""A whole stack of processes under test: draft and target behind wires of the test's, a coordinator on Ray Serve.

Whoever runs the parts for real (compose, Kubernetes, `outrider up`) starts one again that has ended; so does this.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from outrider.health import ask
from outrider.ports import free_port
from outrider.rpc.options import channel_options
from outrider.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc
from tests.chaos.wire import Wire

WITHIN_S = 300.0
"""How long a part may take to come up; far above what a loaded machine needs."""
MAX_NUM_SEQS = 8
"""Of the target, so that a burst fills the queue."""
_POLL_S = 0.05
_RESTART_S = 0.5


@dataclass
class Part:
    """One part, which is started again whenever it ends, as long as it is `wanted`.

    Attributes:
        port: of its gRPC server, or of the coordinator's HTTP door.
        starts: how often it was started.
    """

    role: str
    command: list[str]
    folder: Path
    port: int
    wanted: bool = False
    starts: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command],
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(self.folder), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self.starts += 1

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """A signal to its main process, if there is one."""
        if self.process is not None and self.is_alive:
            self.process.send_signal(number)

    def family(self) -> list[psutil.Process]:
        """Its process and all below it."""
        if not self.is_alive or self.process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []

    def relatives(self, word: str) -> list[psutil.Process]:
        """Those of the family whose name or command line holds the word."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if word in process.name() or word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    async def serves(self) -> bool:
        """What its health says."""
        return await asyncio.to_thread(lambda: ask(f"127.0.0.1:{self.port}", 1.0).serving)


class Site:
    """Draft, target and coordinator of a pair.

    Args:
        target, draft: model names or folders.
        coordinators, targets: how many of them.
    """

    def __init__(self, folder: Path, target: str, draft: str, *, targets: int = 1, coordinators: int = 1) -> None:
        self.folder = folder
        self.draft = self._service("draft", draft, [])
        seats = ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", "2048", "--drain-seconds", "3"]
        self.targets = [self._service("target", target, seats, index) for index in range(targets)]
        self.draft_wire = Wire(self.draft.port)
        self.target_wires = [Wire(part.port) for part in self.targets]
        self._coordinators = coordinators
        self.coordinators: list[Part] = []
        self.http = httpx.AsyncClient(trust_env=False, timeout=10.0, limits=httpx.Limits(max_connections=None))
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def target(self) -> Part:
        return self.targets[0]

    @property
    def target_wire(self) -> Wire:
        return self.target_wires[0]

    @property
    def coordinator(self) -> Part:
        return self.coordinators[0]

    @property
    def parts(self) -> list[Part]:
        return [self.draft, *self.targets, *self.coordinators]

    def url(self, index: int = 0) -> str:
        return f"http://127.0.0.1:{self.coordinators[index].port}"

    def _service(self, role: str, model: str, more: list[str], index: int = 0) -> Part:
        port = free_port()
        given = ["--model", model, "--port", str(port), "--threads", "1"]
        if not model.startswith("stub:"):
            given += ["--dtype", "float32", "--kv-cache-tokens", "65536", "--profile-seconds", "0"]
        return Part(role, [f"{role}_service", *given, *more], self.folder / f"{role}{index}", port)

    async def start(self) -> None:
        """Starts all parts and waits until they serve, draft included."""
        for wire in (self.draft_wire, *self.target_wires):
            await wire.start()
        targets = ",".join(f"127.0.0.1:{wire.port}" for wire in self.target_wires)
        for index in range(self._coordinators):
            port = free_port()
            given = ["--target", targets, "--draft", f"127.0.0.1:{self.draft_wire.port}", "--port", str(port)]
            given += ["--grpc-port", "0", "--served-model-name", "chaos", "--drain-seconds", "20"]
            command = ["coordinator", *given]
            self.coordinators.append(Part("coordinator", command, self.folder / f"coordinator{index}", port))
        self._tasks.append(asyncio.create_task(self._keep(), name="start parts again"))
        for part in (self.draft, *self.targets):
            part.wanted = True
            part.start()
        for index, part in enumerate(self.coordinators):  # two Rays that start at once hold each other up
            part.wanted = True
            part.start()
            await self.until(partial(self._answers, index), "the coordinator answers")
        await self.until(self.is_well, "the stack is up")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for part in reversed(self.parts):
            part.wanted = False
            part.send(signal.SIGCONT)
            part.send(signal.SIGTERM)
        for part in self.parts:
            if part.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(part.process.wait, 30.0)
                part.send(signal.SIGKILL)
        for wire in (self.draft_wire, *self.target_wires):
            await wire.close()
        await self.http.aclose()

    async def _keep(self) -> None:
        """Starts what has ended and is wanted."""
        while True:
            for part in self.parts:
                if part.wanted and not part.is_alive:
                    await asyncio.sleep(_RESTART_S)
                    if part.wanted and not part.is_alive:
                        part.start()
            await asyncio.sleep(_POLL_S)

    # ---- how it is ----

    async def ready(self, index: int = 0) -> tuple[int, dict[str, Any]]:
        """Status and body of `/ready`; 0 where nobody answers."""
        try:
            response = await self.http.get(f"{self.url(index)}/ready")
            return response.status_code, response.json()
        except (httpx.HTTPError, ValueError):
            return 0, {}

    async def missing(self, index: int = 0) -> list[str]:
        """What does not do its work."""
        status, body = await self.ready(index)
        if status != 200:
            return [f"coordinator ({status})"]
        return [f"{one['part']}: {one['reason']}" for one in body["degraded"] if "accept" not in one["reason"]]

    async def _answers(self, index: int) -> bool:
        return (await self.ready(index))[0] != 0

    async def is_well(self) -> bool:
        """Whether all parts are attached."""
        return not any([await self.missing(index) for index in range(len(self.coordinators))])

    async def series(self, name: str, index: int = 0) -> float:
        """Sum of a series over its labels."""
        text = (await self.http.get(f"{self.url(index)}/metrics")).text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    async def held(self) -> dict[str, int]:
        """Streams and blocks that the services hold, by part; only what is not nothing."""
        found = {}
        for part in (self.draft, *self.targets):
            stub = {"draft": draft_pb2_grpc.DraftServiceStub, "target": target_pb2_grpc.TargetServiceStub}[part.role]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{part.port}", options=channel_options()) as channel:
                info = (await stub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=10)).info
            found[f"{part.role} streams"] = info.open_streams
            found[f"{part.role} blocks"] = info.kv_blocks_used
        return {what: count for what, count in found.items() if count}

    async def until(self, condition: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> float:
        """Waits for something; returns the seconds that it took.

        Raises:
            AssertionError: it did not happen.
        """
        began_s = time.monotonic()
        while not await condition():
            assert time.monotonic() - began_s < within_s, f"not within {within_s:g} s: {what} {await self.missing()}"
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - began_s


@asynccontextmanager
async def site(folder: Path, target: str, draft: str, **counts: int) -> AsyncIterator[Site]:
    """A stack that serves; gone at the end."""
    made = Site(folder, target, draft, **counts)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
