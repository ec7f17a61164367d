"""Item: what a coordinator wants of one stream, from its arrival to its last answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.engine.formation import Work
from outrider.engine.sequence import Sequence
from outrider.features import NOT_WANTED
from outrider.sampling import SamplingParams
from outrider.seam import StreamOpen
from target_service.answers import ReplyTo
from target_service.features import FeatureRing
from target_service.logprobs import PromptScores
from target_service.proposal import Proposal


class Key(NamedTuple):
    """What a reply echoes. Keys of a stream's answers only grow, so none is ever answered twice."""

    generation: int
    committed: int


NEVER = Key(-1, 0)


@dataclass(slots=True, eq=False)
class Item:
    """An outstanding item.

    Attributes:
        link: where to answer.
        generation: of the item.
        proposal: its slots; none for a plain run.
        run_end: committed length at which a plain run ends; 0 for a round with slots.
        ready_s: when it arrived, or when the previous token of its run was answered.
        features_from: first position whose features are wanted with its last answer.
    """

    link: ReplyTo
    generation: int
    proposal: Proposal
    run_end: int
    ready_s: float
    features_from: int = NOT_WANTED


@dataclass(slots=True, eq=False)
class Stream:
    """A decoding stream of this service.

    Attributes:
        sequence: its tokens and KV.
        item: its one outstanding item.
        answered: key of its last answer.
        run: the key at which its latest plain run began, as long as nothing else came after; None otherwise.
        ring: features of its last positions, once a draft has asked for them.
        prompt: log-probabilities of its prompt, if they are wanted and until the first round is past.
        most: committed length that it never exceeds.
    """

    sequence: Sequence
    item: Item | None = None
    answered: Key = NEVER
    run: Key | None = None
    ring: FeatureRing | None = None
    prompt: PromptScores | None = None
    most: int = 0

    @property
    def feature_window(self) -> int:
        """Last positions whose features a draft looks at; 0 if none does."""
        return self.ring.request.window if self.ring is not None else 0

    @property
    def opened(self) -> StreamOpen:
        return self.sequence.opened

    @property
    def key(self) -> Key:
        """Of the round at hand, if there is one."""
        return NEVER if self.item is None else Key(self.item.generation, self.sequence.committed)

    @property
    def tail(self) -> int:
        """Logits rows of the round at hand."""
        assert self.item is not None, "a round at hand has an item"
        return len(self.item.proposal.x) + 1

    def work(self) -> Work:
        """What the scheduler must know of the round at hand."""
        tail = self.tail
        known = len(self.sequence.tokens)
        return Work(
            tokens=known,
            rows=known - min(self.sequence.cached, known - tail),
            tail=tail,
            scored=self.scores_prompt,
            most=self.most,
        )

    @property
    def scores_prompt(self) -> bool:
        """Whether logits are wanted for every token that is fed."""
        return self.prompt is not None and not self.prompt.complete(self.opened.prompt_length)


def run_limit(opened: StreamOpen, max_model_len: int) -> int:
    """Committed length that a plain run never exceeds."""
    return min(opened.prompt_length + opened.params.max_tokens, max_model_len)


def stops(params: SamplingParams, token: int) -> bool:
    """Whether a drawn token ends the text. Stop ids that come too early (min_tokens) are never drawn."""
    return token in params.stop_token_ids
