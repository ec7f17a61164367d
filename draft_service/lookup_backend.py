"""Lookup in the text itself behind the draft service: one thread, no model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor

from draft_service.config import NGRAM, DraftConfig
from draft_service.intake import Message
from draft_service.lookup import Index, LookupProposer
from draft_service.ngram import NgramIndex
from draft_service.suffix import SuffixIndex
from outrider.engine.block_manager import BlockManager
from outrider.engine.streams import Streams
from outrider.errors import ModelUnavailable, Unavailable
from outrider.rpc import tokenizer_files
from outrider.rpc.info import ServiceInfo, Serving, base_info
from outrider.rpc.options import LEASE_S

_LONGEST_STREAM = 1 << 20


class LookupBackend:
    """Looks proposals up in a worker thread."""

    def __init__(self, config: DraftConfig, lease_s: float = LEASE_S) -> None:
        self._config = config
        # The streams hold tokens and leases only; a pool there must be.
        self._streams = Streams(
            BlockManager(1, 1, reuse=False), lease_s, allow_planted_errors=config.allow_planted_errors
        )
        self._proposer = LookupProposer(self._streams, self._new_index)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=config.model)
        self.ready: Future[None] = Future()

    def start(self) -> None:
        self.ready.set_result(None)

    def submit(self, message: Message) -> None:
        """Takes a message to the thread.

        Raises:
            Unavailable: the thread has stopped.
        """
        try:
            self._thread.submit(self._proposer.receive, message)
        except RuntimeError:
            raise Unavailable("the service has stopped") from None

    def tick(self) -> None:
        """Frees what leases have ended."""
        self._thread.submit(self._proposer.tick)

    @property
    def is_stuck(self) -> bool:
        return False

    def info(self, instance_id: str) -> ServiceInfo:
        config = self._config
        serving = Serving(
            max_model_len=config.max_model_len or _LONGEST_STREAM,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_slots=config.max_slots,
            open_streams=len(self._streams),
            allow_planted_errors=config.allow_planted_errors,
        )
        info = base_info(instance_id, serving)
        info.model_id = info.draft_kind = config.model
        info.device_name = "cpu"
        info.batch_invariant = True
        return info

    def tokenizer(self) -> AsyncIterator[tokenizer_files.Piece]:
        raise ModelUnavailable(f"{self._config.model} has no tokenizer: it proposes the target's own ids")

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _new_index(self) -> Index:
        config = self._config
        if config.model == NGRAM:
            return NgramIndex(config.prompt_lookup_min, config.longest_ngram)
        return SuffixIndex(config.prompt_lookup_min, config.kept_tokens)
