"""Fuzzed requests at the HTTP door of a whole stack, and what has to be true after every thousand of them.

    python -m tests.chaos.fuzz_http --count 10000 --schema 20

Stub services, a coordinator, and requests of all kinds, sixteen at a time. No answer may be a 5xx or hold an internal
error, no process may end, and whenever the stack is idle both services hold no stream and no KV block, and a good
request gets its text. `--schema` then has schemathesis (`pip install 'outrider[fuzz]'`) do so many examples of each
operation of `/openapi.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx

from coordinator.fields import Door
from outrider.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc
from tests.chaos.bodies import Body, random_body
from tests.e2e.processes import Part, coordinator, service

AT_ONCE = 16
ROUND = 1_000
PATHS = {Door.COMPLETIONS: "/v1/completions", Door.CHAT: "/v1/chat/completions"}
GOOD = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
TEXT = "pqrstuvw"
_ANSWERED_WITHIN_S = 120.0
_IDLE_WITHIN_S = 60.0


class Stack(NamedTuple):
    """The parts under test."""

    target: Part
    draft: Part
    door: Part


class Held(NamedTuple):
    """What a service holds."""

    streams: int
    blocks: int


class Defect(Exception):
    """Something that must not happen, and the request behind it."""


@contextmanager
def running(folder: Path) -> Iterator[Stack]:
    """Stub services with a short context, so that answers without a limit stay short, and a coordinator."""
    with (
        service("target_service", "stub:markov", folder / "target", "--max-model-len", "512") as target,
        service("draft_service", "stub:perfect", folder / "draft") as draft,
    ):
        links = ["--target", f"127.0.0.1:{target.port}", "--draft", f"127.0.0.1:{draft.port}"]
        with coordinator(folder / "door", *links, "--num-speculative-tokens", "3", path="/ready") as door:
            yield Stack(target, draft, door)


async def fuzz(stack: Stack, count: int, seed: int) -> Counter[str]:
    """Sends `count` requests.

    Returns:
        How many had which status; "hung up" for those whose client went away.

    Raises:
        Defect: of an answer or of what is left behind.
    """
    dice, outcomes = random.Random(seed), Counter[str]()
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    async with httpx.AsyncClient(
        base_url=stack.door.url, trust_env=False, timeout=_ANSWERED_WITHIN_S, limits=limits
    ) as client:
        await check(stack, client)
        for done in range(0, count, ROUND):
            bodies = [random_body(dice) for _ in range(min(ROUND, count - done))]
            took_s = -time.monotonic()
            outcomes += await _send(client, bodies)
            await check(stack, client)
            print(f"{done + len(bodies)} requests, {took_s + time.monotonic():.0f} s: {dict(outcomes)}", flush=True)
    return outcomes


async def check(stack: Stack, client: httpx.AsyncClient) -> None:
    """
    Raises:
        Defect: a part has ended, a good request does not work, or something of another one is left.
    """
    for part in stack:
        if part.process.poll() is not None:
            raise Defect(f"a part ended:\n{part.text()[-2_000:]}")
    answer = await client.post(PATHS[Door.COMPLETIONS], json=GOOD)
    if answer.status_code != 200 or answer.json()["choices"][0]["text"] != TEXT:
        raise Defect(f"the good request got {answer.status_code} {answer.text}")
    end_s = time.monotonic() + _IDLE_WITHIN_S
    while (left := [await _held(stack.target, target_pb2_grpc.TargetServiceStub)]) + (
        also := [await _held(stack.draft, draft_pb2_grpc.DraftServiceStub)]
    ) != [Held(0, 0)] * 2:
        if time.monotonic() > end_s:
            raise Defect(f"left behind: {left[0]} on the target, {also[0]} on the draft")
        await asyncio.sleep(0.1)


async def _send(client: httpx.AsyncClient, bodies: list[Body]) -> Counter[str]:
    outcomes, waiting = Counter[str](), iter(bodies)

    async def work() -> None:
        for body in waiting:
            outcomes[await _ask(client, body)] += 1

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return outcomes


async def _ask(client: httpx.AsyncClient, body: Body) -> str:
    try:
        async with client.stream("POST", PATHS[body.door], content=body.data) as answer:
            said = b""
            async for part in answer.aiter_bytes():
                said += part
                if body.hangs_up is not None and len(said) >= body.hangs_up:
                    return "hung up"
    except httpx.HTTPError as error:
        raise Defect(f"{type(error).__name__} {error} for {body}") from None
    if answer.status_code >= 500 or b'"internal_error"' in said:
        raise Defect(f"{answer.status_code} {said[:500]!r} for {body}")
    if answer.status_code >= 400 and b'"error"' not in said:
        raise Defect(f"{answer.status_code} without an error object: {said[:500]!r} for {body}")
    return str(answer.status_code)


async def _held(part: Part, stub: type[target_pb2_grpc.TargetServiceStub | draft_pb2_grpc.DraftServiceStub]) -> Held:
    options = (("grpc.enable_http_proxy", 0),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{part.port}", options) as channel:
        answer = await stub(channel).GetInfo(common_pb2.GetInfoRequest())  # type: ignore[arg-type]
    return Held(answer.info.open_streams, answer.info.kv_blocks_used)


def run_schema(url: str, examples: int, seed: int) -> int:
    """schemathesis on `/openapi.json`; its exit status."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks=not_a_server_error"]
    command += [f"--max-examples={examples}", f"--seed={seed}", "--request-timeout=120", "--phases=examples,fuzzing"]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schema", type=int, default=0, metavar="EXAMPLES", help="of schemathesis; 0 leaves it out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as stack:
        try:
            outcomes = asyncio.run(fuzz(stack, given.count, given.seed))
            print(f"no defect in {given.count} requests: {dict(outcomes)}")
            if given.schema and (status := run_schema(stack.door.url, given.schema, given.seed)):
                return status
            if given.schema:
                asyncio.run(fuzz(stack, 0, given.seed))
        except Defect as defect:
            print(f"DEFECT: {defect}")
            print(stack.door.text()[-3_000:])
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
