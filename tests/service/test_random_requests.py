"""The short form of `random_requests`, and errors on purpose that it must find. The long form is run by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from outrider.engine.block_manager import BlockManager
from outrider.engine.prefix_index import BlockNames
from outrider.engine.streams import Streams
from tests.service.drawn_requests import Drawn, draw
from tests.service.kv_audit import KVAudit
from tests.service.random_requests import Outcome, make_models, run, total

pytestmark = [pytest.mark.drafts, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("models"))


async def outcome(
    models: dict[str, str], draft: str = "near", *, wanted: Sequence[Drawn], restarts: int = 0
) -> Outcome:
    audit = KVAudit()
    return total([await run(models["self"], wanted, models[draft], audit, restarts=restarts)], audit)


@pytest.mark.parametrize("draft", ["self", "near", "ngram"])
async def test_texts_are_those_of_the_requests_alone_and_no_block_is_lost(models: dict[str, str], draft: str) -> None:
    """Guards everything at once: lengths, gammas around the block size, stops, samples, cancels, preemptions, restarts
    of both sides."""
    found = await outcome(models, draft, wanted=draw(40, 7), restarts=2)
    assert found.faults == []
    counts = found.counts
    assert counts["finished"] > 20 and counts["left"] > 0
    assert counts["ended by stop"] > 0 and counts["ended by length"] > 0
    assert counts["restarts"] == 2 and counts["drafted"] > 0
    assert counts["checks of Verifier"] > 100


def _gives_up_one_too_many(truncate: Callable[..., None]) -> Callable[..., None]:
    """A cut that gives up one block more than it should."""

    def cut(pool: BlockManager, table: list[int], tokens: int) -> None:
        truncate(pool, table, max(tokens - pool.block_size, 0))

    return cut


def _forgets_blocks(free: Callable[..., None]) -> Callable[..., None]:
    """The end of a stream that keeps its last block."""

    def end(streams: Streams, sequence: Any) -> None:
        del sequence.blocks[-1:]
        free(streams, sequence)

    return end


def _copies_one_token_too_few(copy: Callable[..., None]) -> Callable[..., None]:
    """A fork whose last block lacks the KV of its last position."""

    def short(pool: BlockManager, source: int, target: int, tokens: int) -> None:
        copy(pool, source, target, tokens - 1)

    return short


def _names_by_place(upto: Callable[..., list[bytes]]) -> Callable[..., list[bytes]]:
    """Blocks found again for where they stood, whatever is in them."""

    def names(self: BlockNames, tokens: Any, blocks: int) -> list[bytes]:
        return [index.to_bytes(4) for index in range(len(upto(self, tokens, blocks)))]

    return names


@pytest.mark.parametrize(
    ("kind", "name", "plant"),
    [
        (BlockManager, "truncate", _gives_up_one_too_many),
        (Streams, "_free", _forgets_blocks),
    ],
)
async def test_a_wrong_account_of_blocks_is_seen(
    models: dict[str, str], kind: type, name: str, plant: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the audit: a block too few, and one that is never given back."""
    monkeypatch.setattr(kind, name, plant(getattr(kind, name)))
    found = await outcome(models, wanted=draw(12, 7))
    assert any("KV" in fault or "blocks" in fault for fault in found.faults)


@pytest.mark.parametrize(
    ("kind", "name", "plant"),
    [
        (BlockManager, "copy", _copies_one_token_too_few),
        (BlockNames, "upto", _names_by_place),
    ],
)
async def test_keys_and_values_of_other_tokens_are_seen(
    models: dict[str, str], kind: type, name: str, plant: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the comparison: the accounts agree, and the texts are wrong."""
    monkeypatch.setattr(kind, name, plant(getattr(kind, name)))
    forking = [one for one in draw(400, 7) if one.message.n > 1]
    found = await outcome(models, wanted=forking[:16])
    assert any("is not" in fault for fault in found.faults)
