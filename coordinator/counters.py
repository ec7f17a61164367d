"""Raw counts of what the decoding loop did; whatever is derived from them is derived where it is shown.

acceptance rate         = num_accepted_tokens / num_draft_tokens
alpha-hat               = num_accepted_tokens / num_tested_tokens
mean acceptance length  = 1 + num_accepted_tokens / num_drafts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from coordinator.config import MAX_GAMMA
from coordinator.wire import KINDS
from outrider.seam import Note, Timings

DRAFT_FAILURES = ("overdue", "link_lost", "unreadable", "malformed_q", "lying", "refused", "error")
"""Why the draft did not do what it was asked for: no answer in time; its link ended; a message that makes no sense; a q
that is no distribution; a token that contradicts its q; versions or vocabulary that do not fit; an item answered with
an error."""

DRAFT_SKIPPED = (
    "off",
    "no_draft",
    "out",
    "catching_up",
    "no_features",
    "held",
    "kv",
    "context",
    "no_room",
    "gamma_0",
    "empty",
)
"""Why a stretch was decoded plainly: the server or the request turned speculation off; no draft attached; the draft is
out after failures; its KV was being brought up to date; it lacked the target's features, which a plain token brings;
this stream's last proposal was overdue; the draft has no KV for it; it is longer than the draft's context; one token or
no context left; the controller chose 0; the draft proposed nothing."""

OnStep = Callable[[str, Timings], None]


def _gammas() -> list[int]:
    return [0] * (MAX_GAMMA + 1)


@dataclass(slots=True)
class Counters:
    """Counted after the cut, since the decoder was made.

    Attributes:
        rounds: rounds of any kind; every plain token is one.
        num_drafts: rounds with at least one drafted slot.
        num_draft_tokens, num_tested_tokens, num_accepted_tokens: slots sent, looked at by the rule, accepted.
        generated_tokens: tokens emitted.
        rounds_by_accepted: speculative rounds by how many slots were accepted.
        gamma: rounds by slots asked for; entry 0 counts plain tokens.
        draft_failures, draft_skipped: by reason, all of them from the start.
        streams_opened, streams_ended: the difference is open now.
        wire: by link, bytes by what they are for (`wire.KINDS`), both ways.
        prefix_tokens: by link, prompt tokens whose KV the service found.
        preemptions: by link, times that a stream lost its KV to another one.
        reopened: times that a stream's tokens had to be sent to a target anew.
        on_step: called with "draft" or "target" and the timings of each message.
    """

    rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_tested_tokens: int = 0
    num_accepted_tokens: int = 0
    generated_tokens: int = 0
    streams_opened: int = 0
    streams_ended: int = 0
    reopened: int = 0
    rounds_by_accepted: list[int] = field(default_factory=_gammas)
    gamma: list[int] = field(default_factory=_gammas)
    draft_failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFT_FAILURES, 0))
    draft_skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFT_SKIPPED, 0))
    wire: dict[str, dict[str, int]] = field(
        default_factory=lambda: {part: dict.fromkeys(KINDS, 0) for part in ("draft", "target")}
    )
    prefix_tokens: dict[str, int] = field(default_factory=lambda: {"draft": 0, "target": 0})
    preemptions: dict[str, int] = field(default_factory=lambda: {"draft": 0, "target": 0})
    on_step: list[OnStep] = field(default_factory=list)

    def count_round(self, emitted: int, drafted: int, tested: int, accepted: int) -> None:
        """Adds one round."""
        self.rounds += 1
        self.generated_tokens += emitted
        if drafted:
            self.num_drafts += 1
            self.num_draft_tokens += drafted
            self.num_tested_tokens += tested
            self.num_accepted_tokens += accepted
            self.rounds_by_accepted[accepted] += 1

    def count_note(self, link: str, note: Note) -> None:
        """Adds what a service did for a stream beside answering."""
        self.prefix_tokens[link] += note.prefix_tokens
        self.preemptions[link] += note.preemptions

    @property
    def accepted_per_pos(self) -> list[int]:
        """Entry i: rounds in which slot i was accepted; divided by `num_drafts` it is the unconditional rate."""
        return _at_least(self.rounds_by_accepted)


def _at_least(rounds_by_length: list[int]) -> list[int]:
    """From how many rounds reached exactly k slots to how many reached slot i, that is, more than i of them."""
    return list(accumulate(reversed(rounds_by_length[1:])))[::-1]
