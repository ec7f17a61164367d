"""Random requests through a real pair that is restarted meanwhile, each compared with the same request alone.

Target, draft and coordinator with its gRPC door run in this process. What must hold is said in
`bench/random_requests.py`, which is the long form.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from safetensors.torch import load_file, save_file

from coordinator.config import DecoderConfig
from coordinator.decoder import Decoder
from coordinator.front import Front, FrontConfig
from coordinator.generate_request import query_from_pb
from coordinator.prepare import prepare
from coordinator.servicer import CoordinatorServicer
from outrider.errors import OutriderError
from outrider.rpc.options import COORDINATOR_SERVICE_NAME
from outrider.rpc.server import Server
from outrider.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.service.drawn_requests import LARGEST_GAMMA, Drawn
from tests.service.harness import channel_to
from tests.service.kv_audit import KVAudit
from tests.service.restarted_pair import RestartedPair
from tests.service.stack import decoder, target_service, until
from tests.unit.tiny import tiny_llama

AT_ONCE = 24
FINISH = {coordinator_pb2.FINISH_REASON_STOP: "stop", coordinator_pb2.FINISH_REASON_LENGTH: "length"}
MAY_FAIL = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class Text(NamedTuple):
    """One answer."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str | None


@dataclass
class Got:
    """What became of a request.

    Attributes:
        texts: by sample; those of a request that was left or failed have no reason of their end.
        error: status and message, or None.
        restarts: whether a part was down at any time while it ran.
    """

    texts: list[Text]
    error: tuple[grpc.StatusCode, str] | None = None
    restarts: bool = False


@dataclass
class Outcome:
    """Of a run.

    Attributes:
        counts: raw counts.
        faults: what must not have happened; empty for a right pair.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


async def run(model: str, wanted: Sequence[Drawn], draft: str, audit: KVAudit, *, restarts: int) -> Outcome:
    """Serves the requests, then answers each alone, and compares."""
    outcome, pair, began = Outcome(), RestartedPair(model, draft), time.monotonic()
    with audit.running():
        for part in pair.ports:
            await pair.start(part)
        gamma, addresses = LARGEST_GAMMA, {part: f"127.0.0.1:{port}" for part, port in pair.ports.items()}
        made = Decoder(
            DecoderConfig(
                target=(addresses["target"],),
                draft=addresses["draft"],
                self_draft=True,
                max_num_speculative_tokens=gamma,
            )
        )
        front = Front(made, FrontConfig(max_speculative_tokens=gamma, max_num_seqs=AT_ONCE))
        server = Server(COORDINATOR_SERVICE_NAME, message_limit=1 << 20)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(CoordinatorServicer(front), server.grpc)
        port = await server.start("127.0.0.1", 0)
        await front.start()
        try:
            await until(lambda: not front.readiness.reason and made.state.draft is not None, 120)
            before = await pair.used()
            got = await _serve(port, wanted, pair, restarts)
            await until(lambda: made.counters.streams_ended == made.counters.streams_opened, 120)
            await pair.all_free()
            after = await pair.used()
            model_served, policy = front.model, front.config.policy
            prepared = [prepare(query_from_pb(one.message, None), model_served, policy) for one in wanted]
        finally:
            await server.stop()
            await front.close()
            await pair.close()
    if before != after:
        outcome.faults.append(f"(open streams, used blocks) were {before}, are {after}")
    outcome.faults += [f"{kind}: {free} of {all_} blocks free" for kind, free, all_ in audit.pools() if free != all_]
    outcome.faults += audit.faults
    counters = made.counters
    outcome.counts.update(
        drafted=counters.num_draft_tokens,
        accepted=counters.num_accepted_tokens,
        tokens=counters.generated_tokens,
        reopened=counters.reopened,
        no_draft_room=counters.draft_skipped["kv"],
        restarts=pair.ended,
    )
    served = time.monotonic()
    alone = await _alone(model, prepared, got)
    outcome.counts.update(served_s=round(served - began), alone_s=round(time.monotonic() - served))
    for index, (one, texts) in enumerate(zip(got, alone, strict=True)):
        _compare(index, wanted[index], one, texts, outcome)
    return outcome


async def _serve(port: int, wanted: Sequence[Drawn], pair: RestartedPair, restarts: int) -> list[Got]:
    """So many requests at a time; parts are started again when equal shares of the requests are done."""
    seats, done = asyncio.Semaphore(AT_ONCE), 0
    async with channel_to(port) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)

        async def one(drawn: Drawn) -> Got:
            nonlocal done
            async with seats:
                before = pair.ended
                got = await _answer(stub, drawn)
                got.restarts = pair.began > before
                done += 1
                return got

        async def restart() -> None:
            for index in range(restarts):
                await until(lambda index=index: done > len(wanted) * (index + 1) / (restarts + 1), 3_600)  # type: ignore[misc]
                await pair.again(("draft", "target")[index % 2])

        restarting = asyncio.create_task(restart())
        got = list(await asyncio.gather(*map(one, wanted)))
        await restarting
    return got


async def _answer(stub: coordinator_pb2_grpc.CoordinatorServiceStub, drawn: Drawn) -> Got:
    n = drawn.message.n or 1
    ids: list[list[int]] = [[] for _ in range(n)]
    parts: list[list[str]] = [[] for _ in range(n)]
    reasons: list[str | None] = [None] * n
    error = None
    call = stub.Generate(drawn.message)
    try:
        async for response in call:
            ids[response.choice] += response.token_ids
            parts[response.choice].append(response.text)
            reasons[response.choice] = FINISH.get(response.finish_reason)
            if drawn.leaves_after is not None and sum(map(len, ids)) > drawn.leaves_after:
                break
    except grpc.aio.AioRpcError as failure:
        error = (failure.code(), failure.details() or "")
    finally:
        call.cancel()
    texts = [Text(tuple(ids[i]), "".join(parts[i]), reasons[i]) for i in range(n)]
    return Got(texts, error)


async def _alone(model: str, prepared: Sequence[Any], got: Sequence[Got]) -> list[list[Text]]:
    """Each answer by itself, without speculation, on a target that shares no prefixes."""
    async with target_service(model, dtype="float32", no_prefix_caching=True) as port, decoder(port) as made:
        found = []
        for one, seen in zip(prepared, got, strict=True):
            texts = []
            for asked, text in zip(one.requests, one.texts, strict=True):
                if not any(answer.ids for answer in seen.texts):
                    break
                ids: list[int] = []
                shown, reason = "", None
                try:
                    async for emission in made.open(replace(asked, num_speculative_tokens=0, prompt_group=0)):
                        reason = emission.finish_reason
                        ids += emission.tokens
                        shown += text.take(emission.tokens, last=reason is not None).text
                except OutriderError as error:
                    reason = f"{type(error).__name__}: {error}"
                texts.append(Text(tuple(ids), shown, reason))
            found.append(texts)
        return found


def _compare(index: int, drawn: Drawn, got: Got, alone: Sequence[Text], outcome: Outcome) -> None:
    counts, faults = outcome.counts, outcome.faults
    kind = "failed" if got.error else "left" if any(text.finish_reason is None for text in got.texts) else "finished"
    counts[kind] += 1
    if got.error is not None:
        code, message = got.error
        if code not in MAY_FAIL or not message or not got.restarts:
            faults.append(f"request {index}: {code.name}: {message} (a part was down: {got.restarts})")
    elif kind == "left" and drawn.leaves_after is None:
        faults.append(f"request {index}: ended without a reason")
    for sample, (text, right) in enumerate(zip(got.texts, alone, strict=False)):
        whole = text.finish_reason is not None
        counts[f"ended by {text.finish_reason}"] += whole
        counts["samples of several"] += len(got.texts) > 1
        same = text == right if whole else text.ids == right.ids[: len(text.ids)] and right.text.startswith(text.text)
        if not same:
            faults.append(f"request {index}, sample {sample}: {text} is not {right}; {drawn.message}")


def make_models(folder: Path) -> dict[str, str]:
    """What is served as draft, by name; `self` is the target."""
    target, near = tiny_llama(folder / "self", vocab=260, tokenizer=True), folder / "near"
    shutil.copytree(target, near)
    weights = load_file(near / "model.safetensors")
    save_file({name: weight.bfloat16().float() for name, weight in weights.items()}, near / "model.safetensors")
    return {"self": str(target), "near": str(near), "ngram": "ngram"}


def total(outcomes: Sequence[Outcome], audit: KVAudit) -> Outcome:
    """All runs together."""
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    counts.update(preemptions=audit.preemptions, evictions=audit.evictions)
    counts.update({f"checks of {kind}": number for kind, number in audit.checks.items()})
    return Outcome(counts, list(dict.fromkeys(fault for outcome in outcomes for fault in outcome.faults)))
