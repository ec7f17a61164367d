"""A causal LM, or a stub of one, behind the draft service: what its engine thread is built from."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from draft_service.config import DraftConfig
from draft_service.faults import Faults
from draft_service.intake import Message, send_as_is
from draft_service.kinds import Kind
from draft_service.proposer import Proposer
from draft_service.sampler import Sampler
from outrider.engine.block_manager import BlockManager
from outrider.engine.grammar import Grammars
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.profile import Profiler
from outrider.engine.streams import Streams
from outrider.engine.stub import StubSpec, is_stub, parse
from outrider.engine.stub_model import StubModel, load_stub
from outrider.errors import InvalidArgument, ModelUnavailable
from outrider.rpc import tokenizer_files
from outrider.rpc.cost_codec import costs_to_pb
from outrider.rpc.info import ServiceInfo, Serving, model_info
from outrider.rpc.options import LEASE_S
from outrider.service.engine_backend import EngineBackend
from outrider.service.profiling import profiler
from outrider.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class ModelBackend(EngineBackend[Message]):
    """Drafts with a model in the engine thread."""

    def __init__(
        self, config: DraftConfig, on_fatal: Callable[[BaseException], None], lease_s: float = LEASE_S
    ) -> None:
        """
        Args:
            config: of the service.
            on_fatal: called, in the engine thread, when the engine stops for good.
            lease_s: how long a lost link's streams are kept.

        Raises:
            InvalidArgument: naming the field.
        """
        super().__init__(self._build, on_fatal)
        self._config = config
        self._engine_config = config.engine()
        self._stub = _parse_stub(config.model)
        self._tokenizer_folder = tokenizer_files.folder_of(config.model, config.load_format)
        self._lease_s = lease_s
        self._model: LoadedModel | StubModel | None = None
        self._vocabulary: Vocabulary | None = None
        self._streams: Streams | None = None
        self._blocks: BlockManager | None = None
        self._profiler: Profiler | None = None

    def info(self, instance_id: str) -> ServiceInfo:
        assert self._model is not None and self._streams is not None and self._blocks is not None
        serving = Serving(
            max_model_len=self._model.info.max_positions,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_slots=self._config.max_slots,
            open_streams=len(self._streams),
            kv_blocks_used=self._blocks.used_blocks,
            kv_blocks_total=self._blocks.num_blocks,
            allow_planted_errors=self._config.allow_planted_errors,
            prefix_tokens_asked=self._streams.kv.prefix_tokens.asked,
            prefix_tokens_found=self._streams.kv.prefix_tokens.found,
        )
        info = model_info(instance_id, serving, self._model.info, self._vocabulary, self._runner.stats())
        info.draft_kind = Kind.STUB if self._stub else Kind.CAUSAL_LM
        if self._profiler is not None:
            info.costs.CopyFrom(costs_to_pb(self._profiler.profile, self._profiler.state))
        return info

    def tokenizer(self) -> AsyncIterator[tokenizer_files.Piece]:
        return tokenizer_files.pieces(self._tokenizer_folder)

    def _build(self) -> tuple[LoadedModel | StubModel, Proposer]:
        """Runs in the engine thread."""
        config, stub = self._config, self._stub
        model = load_stub(stub, self._engine_config) if stub else load_model(self._engine_config)
        model.allocate_kv(model.num_blocks)
        self._blocks = BlockManager(model.num_blocks, model.info.block_size, reuse=not config.no_prefix_caching)
        grammars = Grammars(self._tokenizer_folder, model.info.vocab_rows, model.info.eos_token_ids)
        grammars.load()
        self._streams = Streams(
            self._blocks,
            self._lease_s,
            allow_planted_errors=config.allow_planted_errors,
            matcher=grammars.mirror,
        )
        self._vocabulary = _vocabulary(self._tokenizer_folder, model.info.vocab_rows)
        self._profiler = profiler(config, model, self._blocks)
        self._runner.when_idle(self._profiler)
        self._model = model
        proposer = Proposer(
            self._streams,
            Sampler(draft_top_k=config.draft_top_k, greedy_draft=config.draft_sample_method == "greedy"),
            vocab_rows=model.info.vocab_rows,
            max_model_len=model.info.max_positions,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            window=config.draft_window,
            send=Faults(stub.fault, stub.after, stub.late_ms).send if stub and stub.fault else send_as_is,
        )
        return model, proposer


def _parse_stub(model: str) -> StubSpec | None:
    if not is_stub(model):
        return None
    spec = parse(model)
    if not spec.is_draft:
        raise InvalidArgument("model", f"{model} is a target; a draft is one of perfect, wrong, accept, table, bad")
    return spec


def _vocabulary(folder: Path | None, rows: int) -> Vocabulary | None:
    if folder is None:
        return Vocabulary.stub_bytes().with_rows(rows)
    try:
        return Vocabulary.from_folder(folder).with_rows(rows)
    except ModelUnavailable as error:
        logger.warning("no vocabulary to compare with the target's: %s", error)
        return None
