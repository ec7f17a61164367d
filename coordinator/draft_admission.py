"""DraftAdmission: whether a draft service suits the target, found out once per instance of either side."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from coordinator.config import DecoderConfig
from coordinator.counters import Counters
from coordinator.link import Link
from coordinator.parts import PartInfo, TargetFiles, check_features, compare_files
from coordinator.rows import ProposeRow
from outrider.errors import Mismatch, Unavailable
from outrider.seam import U32, ProposalBatch

logger = logging.getLogger(__name__)


class DraftAdmission:
    """Compares vocabularies and fingerprints."""

    def __init__(self, config: DecoderConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._admitted: tuple[str, str, U32] | None = None
        self._refused = ""

    async def admit(self, link: Link[ProposeRow, ProposalBatch], info: PartInfo, target: TargetFiles | None) -> U32:
        """The ids that the draft's q must never hold.

        Args:
            target: the target's tokenizer, None before a target was reached.

        Raises:
            Unavailable: not before a target has been reached.
            Mismatch: the draft does not suit the target.
        """
        if target is None:
            raise Unavailable("waiting for the target, to compare vocabularies")
        try:
            check_features(target.info, info)
        except Mismatch as error:
            raise self._refusing(info, error) from error
        key = (target.info.tokenizer_hash, info.instance_id)
        if self._admitted is not None and self._admitted[:2] == key:
            return self._admitted[2]
        files = await link.tokenizer_files()
        try:
            comparison = await asyncio.to_thread(compare_files, target, (files, info))
            if comparison is not None:
                comparison.require(allow_mismatch=self._config.allow_vocab_mismatch)
        except Mismatch as error:
            raise self._refusing(info, error) from error
        if comparison is not None and comparison.message:
            logger.warning("%s", comparison.message)
        # An MTP layer comes from its target's own files.
        same = info.features is None and info.weight_hash and info.weight_hash == target.info.weight_hash
        if same and not self._config.self_draft:
            logger.warning("draft and target are the same model (%s): decoding cannot become faster", info.model_id)
        excluded = np.array(comparison.excluded_ids if comparison is not None else (), np.uint32)
        self._admitted = (*key, excluded)
        return excluded

    def _refusing(self, info: PartInfo, error: Mismatch) -> Mismatch:
        """The error that keeps a draft out; counted once per instance, however often it is tried."""
        if self._refused != info.instance_id:
            self._refused = info.instance_id
            self._counters.draft_failures["refused"] += 1
        return Mismatch(f"refused as a draft: {error}")
