"""The engine behind the target service: its model, and the verifier that serves from it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from outrider.engine.block_manager import BlockManager
from outrider.engine.grammar import Grammars
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.profile import Profiler
from outrider.engine.stub import StubSpec, is_stub, parse
from outrider.engine.stub_model import StubModel, load_stub
from outrider.errors import InvalidArgument, ModelUnavailable
from outrider.rpc import tokenizer_files
from outrider.rpc.cost_codec import costs_to_pb
from outrider.rpc.info import ServiceInfo, Serving, model_info
from outrider.service.engine_backend import EngineBackend
from outrider.service.profiling import profiler
from outrider.vocabulary import Vocabulary
from target_service.config import TargetConfig
from target_service.intake import Message
from target_service.verifier import Limits, Verifier

logger = logging.getLogger(__name__)


class Backend(EngineBackend[Message]):
    """Verifies with a model, or a stub of one, in the engine thread.

    Args:
        config: of the service.
        on_fatal: called, in the engine thread, when the engine stops for good.
        lease_s: how long a lost link's streams are kept.

    Raises:
        InvalidArgument: naming the field.
    """

    def __init__(self, config: TargetConfig, on_fatal: Callable[[BaseException], None], lease_s: float) -> None:
        super().__init__(self._build, on_fatal)
        self._config = config
        self._engine_config = config.engine()
        self._stub = _parse_stub(config.model)
        self._tokenizer_folder = tokenizer_files.folder_of(config.model, config.load_format)
        self._lease_s = lease_s
        self._model: LoadedModel | StubModel | None = None
        self._vocabulary: Vocabulary | None = None
        self._block_manager: BlockManager | None = None
        self._verifier: Verifier | None = None
        self._profiler: Profiler | None = None

    def info(self, instance_id: str) -> ServiceInfo:
        """For GetInfo; only when ready."""
        assert self._model is not None and self._verifier is not None and self._block_manager is not None
        serving = Serving(
            max_model_len=self._model.info.max_positions,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_slots=self._config.max_slots,
            open_streams=len(self._verifier.streams),
            kv_blocks_used=self._block_manager.used_blocks,
            kv_blocks_total=self._block_manager.num_blocks,
            allow_planted_errors=self._config.allow_planted_errors,
            preemptions=self._verifier.scheduler.preemptions,
            prefix_tokens_asked=self._verifier.streams.kv.prefix_tokens.asked,
            prefix_tokens_found=self._verifier.streams.kv.prefix_tokens.found,
        )
        info = model_info(instance_id, serving, self._model.info, self._vocabulary, self._runner.stats())
        info.hidden_size = self._model.info.hidden_size
        info.feature_bytes = self._verifier.features.held_bytes
        if self._profiler is not None:
            info.costs.CopyFrom(costs_to_pb(self._profiler.profile, self._profiler.state))
        return info

    def tokenizer(self) -> AsyncIterator[tokenizer_files.Piece]:
        """For GetTokenizer."""
        return tokenizer_files.pieces(self._tokenizer_folder)

    def _build(self) -> tuple[LoadedModel | StubModel, Verifier]:
        """Runs in the engine thread."""
        stub = self._stub
        model = load_stub(stub, self._engine_config) if stub else load_model(self._engine_config)
        model.allocate_kv(model.num_blocks)
        info = model.info
        self._vocabulary = _vocabulary(self._tokenizer_folder, info.vocab_rows)
        self._block_manager = BlockManager(model.num_blocks, info.block_size, reuse=not self._config.no_prefix_caching)
        grammars = Grammars(self._tokenizer_folder, info.vocab_rows, info.eos_token_ids)
        grammars.load()
        self._verifier = Verifier(
            self._block_manager,
            vocab=info.vocab_rows,
            drawable=len(self._vocabulary.tokens) if self._vocabulary and not stub else info.vocab_rows,
            limits=Limits(self._config.max_num_seqs, self._config.max_num_batched_tokens, info.max_positions),
            lease_s=self._lease_s,
            hidden_states=model.hidden_states if isinstance(model, LoadedModel) else None,
            allow_planted_errors=self._config.allow_planted_errors,
            grammars=grammars,
        )
        self._profiler = profiler(self._config, model, self._block_manager)
        self._runner.when_idle(self._profiler)
        self._model = model
        return model, self._verifier


def _parse_stub(model: str) -> StubSpec | None:
    if not is_stub(model):
        return None
    spec = parse(model)
    if spec.is_draft:
        raise InvalidArgument("model", f"{model} is a draft; a target is one of script, markov")
    return spec


def _vocabulary(folder: Path | None, rows: int) -> Vocabulary | None:
    if folder is None:
        return Vocabulary.stub_bytes().with_rows(rows)
    try:
        return Vocabulary.from_folder(folder).with_rows(rows)
    except ModelUnavailable as error:
        logger.warning("text cannot be served, only token ids: %s", error)
        return None
