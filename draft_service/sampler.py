"""Sampler: from the draft's logits to drafted slots, each with the very q that its token was drawn from."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from enum import Enum, auto

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.draft_ids import DraftIds
from draft_service.intake import known_ids
from draft_service.job import Job, Slot
from draft_service.planted import raw_q
from outrider import noise
from outrider.distribution import CountRow, draw_rows, quantise_rows
from outrider.engine import draws
from outrider.engine import logits as processing
from outrider.engine.edits import RowContext
from outrider.engine.sequence import Sequence
from outrider.engine.transfer import indices, to_device
from outrider.noise import Role
from outrider.sampling import Form, Rule
from outrider.seam import U32


class _Way(Enum):
    """How a row's token is chosen and what travels."""

    GREEDY = auto()
    """The argmax; one-hot."""
    COUPLED = auto()
    """The argmax under the noise that the target will use; one-hot."""
    SPARSE = auto()
    """Drawn from integer counts, which travel."""
    DENSE = auto()
    """Drawn from the whole row, which travels."""


class Sampler:
    """Draws one token for each of many streams.

    Args:
        draft_top_k: ids in a sparse q at most.
        greedy_draft: whether the standard rule gets argmax tokens (`draft_sample_method` greedy) rather than draws.
        ids: which ids the columns of the logits stand for, where that is not their number.
    """

    def __init__(self, *, draft_top_k: int, greedy_draft: bool, ids: DraftIds | None = None) -> None:
        self._draft_top_k = draft_top_k
        self._greedy_draft = greedy_draft
        self._ids = ids

    def draw(self, logits: Tensor, rows: Rows[tuple[Job, Sequence]], excluded: dict[bytes, U32]) -> list[Slot | None]:
        """The next slot of each row; None where the model left no distribution to draw from.

        Args:
            logits: float32 [rows, columns]; may be edited.
            rows: the job and sequence of each row; the token drawn goes behind the sequence's last one.
            excluded: ids that q must not hold, by coordinator.
        """
        self._exclude(logits, [job.owner for job, _ in rows], excluded)
        slots: list[Slot | None] = [None] * len(rows)
        kinds = [(self._way(job), self._needs_all_ids(job)) for job, _ in rows]
        for kind in set(kinds):
            way, wide = kind
            members = [index for index, other in enumerate(kinds) if other == kind]
            part = logits if len(members) == len(rows) else logits[indices(members, logits.device)]
            ids = self._ids
            if ids is not None and wide:
                part, ids = ids.widen(part), None
            drawn = self._draw_alike(way, part, [rows[index] for index in members], ids)
            for index, slot in zip(members, drawn, strict=True):
                slots[index] = slot
        return slots

    def _way(self, job: Job) -> _Way:
        opened = job.opened
        if opened.params.greedy:
            return _Way.GREEDY
        if opened.rule is Rule.COUPLED:
            return _Way.COUPLED
        if opened.form is Form.DENSE:
            return _Way.DENSE
        return _Way.GREEDY if self._greedy_draft else _Way.SPARSE

    def _needs_all_ids(self, job: Job) -> bool:
        """Whether columns must be ids: where whole rows travel, and where the request edits logits by id."""
        return self._ids is not None and (self._way(job) is _Way.DENSE or not job.opened.params.plain)

    def _draw_alike(
        self, way: _Way, logits: Tensor, rows: Rows[tuple[Job, Sequence]], ids: DraftIds | None
    ) -> list[Slot | None]:
        contexts = [
            RowContext(
                job.opened.params,
                sequence.tokens,
                len(sequence.tokens),
                job.opened.prompt_length,
                sequence.matcher,
                sequence.counts,
            )
            for job, sequence in rows
        ]
        if way is _Way.GREEDY:
            choice = processing.greedy(logits, contexts)
            tokens = _tokens(choice.ids, ids)
            sure = _confidences(logits, [job for job, _ in rows])
            return [
                None if index in choice.faults else Slot(token, confidence=sure[index])
                for index, token in enumerate(tokens)
            ]
        processed = processing.process(logits, contexts)
        jobs = [job for job, _ in rows]
        if way is _Way.SPARSE:
            return self._sparse(processed, jobs, ids)
        if way is _Way.COUPLED:
            drawn = self._coupled(processed.p, jobs, [len(sequence.tokens) for _, sequence in rows], ids)
        else:
            drawn = self._dense(processed.p, jobs)
        return [None if index in processed.faults else slot for index, slot in enumerate(drawn)]

    def _coupled(self, p: Tensor, jobs: Rows[Job], positions: list[int], ids: DraftIds | None) -> list[Slot]:
        keys = noise.gumbel_row_keys(
            np.array([job.opened.gumbel_key for job in jobs], np.uint64),
            np.array(positions, np.uint32),
            np.array([job.opened.sample_index for job in jobs], np.uint32),
        )
        chosen = draws.coupled_choice(p, keys, None if ids is None else ids.on(p.device))
        return [Slot(token) for token in _tokens(chosen, ids)]

    def _sparse(self, processed: processing.Processed, jobs: Rows[Job], ids: DraftIds | None) -> list[Slot | None]:
        columns, probs = draws.draft_distribution(processed.p, self._draft_top_k)
        slots: list[Slot | None] = [None] * len(jobs)
        good = [index for index in range(len(jobs)) if index not in processed.faults]
        if not good:
            return slots
        columns, probs, jobs = columns[good], probs[good], [jobs[index] for index in good]
        supports = quantise_rows(probs, columns if ids is None else ids.of(columns))
        drawn = draw_rows(supports, noise.sixteen_bits(*_counters(jobs), Role.DRAFT))
        chosen = raw_q(jobs, supports, drawn).tolist()
        for index, support, place in zip(good, supports, chosen, strict=True):
            slots[index] = _sparse_slot(support, place)
        return slots

    def _dense(self, p: Tensor, jobs: Rows[Job]) -> list[Slot]:
        if self._greedy_draft:
            chosen = p.argmax(dim=1, keepdim=True)
            p = torch.zeros_like(p).scatter_(1, chosen, 1.0)
        tokens = draws.inverse_cdf(p, noise.uniforms(*_counters(jobs), Role.DRAFT)).tolist()
        return [Slot(token, dense=row) for token, row in zip(tokens, p.cpu().numpy(), strict=True)]

    def _exclude(self, logits: Tensor, owners: list[bytes], excluded: dict[bytes, U32]) -> None:
        """Gives excluded ids probability 0 before anything else, so that top_k and top_p are filled with legal ones."""
        for owner in set(owners):
            if not len(excluded[owner]):
                continue
            columns = (
                known_ids(excluded[owner], logits.shape[1]).astype(np.int64)
                if self._ids is None
                else self._ids.columns(excluded[owner])
            )
            if not len(columns):
                continue
            members = indices([index for index, other in enumerate(owners) if other == owner], logits.device)
            logits[members[:, None], to_device(columns, logits.device)] = -torch.inf


def _confidences(logits: Tensor, jobs: Rows[Job]) -> list[float]:
    """Probability of the most probable id of each row, where a job may stop for it; else 1.

    Of the model's own distribution at the request's temperature, and at 1 where that is 0.
    """
    if not any(job.least_survival for job in jobs):
        return [1.0] * len(jobs)
    scale = [1.0 / job.opened.params.temperature if not job.opened.params.greedy else 1.0 for job in jobs]
    scaled = logits * to_device(np.array(scale), logits.device).to(logits.dtype)[:, None]
    return torch.exp(scaled.amax(dim=1) - scaled.logsumexp(dim=1)).tolist()


def _sparse_slot(support: CountRow, index: int) -> Slot:
    token = int(support.ids[index])
    return Slot(token) if len(support.ids) == 1 else Slot(token, int(support.counts[index]), support)


def _tokens(columns: NDArray[np.int64], ids: DraftIds | None) -> list[int]:
    return (columns if ids is None else ids.of(columns)).tolist()


def _counters(jobs: Rows[Job]) -> tuple[noise.U64, U32, U32, U32]:
    """Keys and counter words of the next draft draw of each job: start of the round, slot, sample index."""
    return (
        np.array([job.opened.draft_key for job in jobs], np.uint64),
        np.array([job.committed for job in jobs], np.uint32),
        np.array([len(job.slots) for job in jobs], np.uint32),
        np.array([job.opened.sample_index for job in jobs], np.uint32),
    )
