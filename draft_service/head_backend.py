"""A head (EAGLE-3 or MTP) behind the draft service: what its engine thread is built from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from draft_service.config import DraftConfig
from draft_service.draft_ids import DraftIds
from draft_service.head_proposer import HeadProposer
from draft_service.intake import Message
from draft_service.kinds import Kind, kind_of
from draft_service.sampler import Sampler
from outrider import models, mtp
from outrider.engine.block_manager import BlockManager
from outrider.engine.eagle3_loader import brings_embeddings, load_head, target_of
from outrider.engine.head_info import HeadLimits
from outrider.engine.head_model import HeadModel
from outrider.engine.mtp_loader import load_mtp
from outrider.engine.streams import Streams
from outrider.errors import InvalidArgument, ModelUnavailable
from outrider.rpc import tokenizer_files
from outrider.rpc.feature_codec import request_to_pb
from outrider.rpc.info import ServiceInfo, Serving, model_info
from outrider.rpc.options import LEASE_S, credit
from outrider.service.engine_backend import EngineBackend


class HeadBackend(EngineBackend[Message]):
    """Drafts with a head in the engine thread; see `ModelBackend` for the arguments."""

    def __init__(
        self, config: DraftConfig, on_fatal: Callable[[BaseException], None], lease_s: float = LEASE_S
    ) -> None:
        if config.draft_window is not None:
            raise InvalidArgument("draft_window", "is for draft models; a head looks back feature_window positions")
        super().__init__(self._build, on_fatal)
        self._config = config
        self._lease_s = lease_s
        self._model: HeadModel | None = None
        self._streams: Streams | None = None
        self._seats: BlockManager | None = None

    def info(self, instance_id: str) -> ServiceInfo:
        assert self._model is not None and self._streams is not None and self._seats is not None
        serving = Serving(
            max_model_len=self._model.info.max_positions,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_slots=self._config.max_slots,
            open_streams=len(self._streams),
            kv_blocks_used=self._seats.used_blocks,
            kv_blocks_total=self._seats.num_blocks,
            allow_planted_errors=self._config.allow_planted_errors,
        )
        info = model_info(instance_id, serving, self._model.info, None, self._runner.stats())
        info.draft_kind = self._model.kind
        info.kv_cache_tokens = self._model.kv_tokens
        info.hidden_size = self._model.info.hidden_size
        info.features.CopyFrom(request_to_pb(self._model.request))
        info.trained_for = self._model.trained_for
        info.feature_bytes = self._model.features.held_bytes
        return info

    def tokenizer(self) -> AsyncIterator[tokenizer_files.Piece]:
        return tokenizer_files.pieces(Path(mtp.checkpoint(self._config.model)))

    def _build(self) -> tuple[HeadModel, HeadProposer]:
        """Runs in the engine thread."""
        config = self._config
        model = _load(config)
        self._seats = BlockManager(credit(config.max_num_seqs), model.info.block_size, reuse=False)
        self._streams = Streams(self._seats, self._lease_s, allow_planted_errors=config.allow_planted_errors)
        self._model = model
        proposer = HeadProposer(
            self._streams,
            Sampler(
                draft_top_k=config.draft_top_k,
                greedy_draft=config.draft_sample_method == "greedy",
                ids=DraftIds(model.target_ids, model.info.vocab_rows),
            ),
            model.features,
            vocab_rows=model.info.vocab_rows,
            max_model_len=model.info.max_positions,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        return model, proposer


def _load(config: DraftConfig) -> HeadModel:
    if config.compile:
        raise InvalidArgument("compile", "is for causal LMs; the one layer of a head is not worth it")
    limits = HeadLimits(window=config.feature_window, seats=credit(config.max_num_seqs), slots=config.max_slots)
    if kind_of(config) is Kind.MTP:
        return load_mtp(replace(config.engine(), model=mtp.checkpoint(config.model)), limits=limits)
    return load_head(config.engine(), target=_target(Path(config.model), config.embeddings), limits=limits)


def _target(head: Path, asked: str | None) -> Path | None:
    """Folder of the target whose embeddings a head uses; None if it uses its own, or names no target.

    Raises:
        ModelUnavailable: the target cannot be had.
    """
    name = asked or (None if brings_embeddings(head) else target_of(head))
    if name is None:
        return None
    try:
        return Path(models.resolve(name).path)
    except ModelUnavailable as error:
        if asked:
            raise
        raise ModelUnavailable(
            f"{head} was trained for {name}, whose embeddings it needs: {error}; or name a folder with --embeddings"
        ) from error
