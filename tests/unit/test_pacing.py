"""Paced and padded streams: an onlooker sees even beats and even sizes, a client sees the same text."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from coordinator.front import FrontConfig
from coordinator.pacing import Pacer, padded
from tests.scripted_decoder import ScriptedDecoder, http_client


@pytest.mark.parametrize("size", [4, 64, 1_000])
@pytest.mark.parametrize("length", [0, 1, 61, 62, 63, 64, 65, 999])
def test_a_padded_write_is_a_multiple_and_ends_with_a_comment(length: int, size: int) -> None:
    """Guards clients: what is added must be a comment of the event stream, whatever room there is for it."""
    data = b"x" * length
    out = padded(data, size)
    assert len(out) % size == 0 and out
    assert out.startswith(data)
    filler = out[length:]
    assert not filler or (filler.startswith(b":") and filler.endswith(b"\n\n") and not filler[1:-2].strip())
    assert padded(data, 0) == data


async def test_writes_leave_at_even_beats_whatever_comes_when() -> None:
    """Guards against bursts that show through: five frames at once and none for a while look the same."""
    written: list[tuple[float, bytes]] = []
    loop = asyncio.get_running_loop()

    async def write(data: bytes) -> None:
        written.append((loop.time(), data))

    async with Pacer(write, 0.05, 32) as pacer:
        for number in range(5):
            pacer.put(f"data: {number}\n\n".encode())
        await asyncio.sleep(0.22)
        pacer.put(b"data: last\n\n")
    sizes = {len(data) for _, data in written[1:]}
    assert sizes == {32}, sizes
    assert b"".join(data for _, data in written).count(b"data:") == 6
    gaps = [later - sooner for (sooner, _), (later, _) in pairwise(written)]
    assert len(gaps) >= 4 and all(gap > 0.03 for gap in gaps), gaps


async def test_a_failure_ends_the_beat() -> None:
    """Guards against writes behind the error frame."""
    written: list[bytes] = []

    async def write(data: bytes) -> None:
        written.append(data)

    with pytest.raises(RuntimeError):
        async with Pacer(write, 0.01, 8):
            raise RuntimeError
    seen = len(written)
    await asyncio.sleep(0.05)
    assert len(written) == seen


@pytest.mark.parametrize("fields", [{"stream_pad": 512}, {"stream_pacing_s": 0.01, "stream_pad": 512}])
async def test_a_client_sees_the_same_stream(fields: dict[str, float]) -> None:
    """Guards the API: the events are those of a stream that hides nothing."""
    body = {"prompt": "hello", "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}, "seed": 3}

    async def events(config: FrontConfig) -> tuple[list[str], bytes]:
        async with http_client(ScriptedDecoder(), config) as client:
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200
            lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
            return [line.partition('"text"')[2] for line in lines], response.content

    plain, _ = await events(FrontConfig())
    hidden, raw = await events(FrontConfig(**fields))  # type: ignore[arg-type]
    assert hidden == plain
    assert len(raw) % 512 == 0
