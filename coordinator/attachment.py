"""What a decoder is attached to now, and what is wrong with it."""

from __future__ import annotations

import time

from coordinator.acceptance_watch import AcceptanceWatch
from coordinator.draft_side import DraftSide
from coordinator.parts import DecoderState, Degraded, kv_use, replayed
from coordinator.target_side import TargetSide


def attachment(targets: TargetSide, drafts: DraftSide, acceptance: AcceptanceWatch) -> DecoderState:
    """Looks at both sides and at the acceptance."""
    now_s = time.monotonic()
    up = [link.info for link in targets.links if link.is_up]
    draft, health = drafts.link, drafts.health
    draft_info = draft.info if draft is not None and draft.is_up else None
    degraded = [Degraded("target", link.reason, now_s - link.changed_s) for link in targets.links if not link.is_up]
    if draft is not None and not draft.is_up:
        degraded.append(Degraded("draft", draft.reason, now_s - draft.changed_s))
    elif health.out_reason is not None:
        degraded.append(Degraded("draft", health.out_reason, now_s - health.since_s))
    degraded += acceptance.degraded
    last_s = targets.last_verdict_s
    sides = {"target": up, "draft": [draft_info]}
    return DecoderState(
        target=next(iter(up), None),
        draft=draft_info,
        targets_up=len(up),
        degraded=degraded,
        last_step_age_s=now_s - last_s if last_s is not None else None,
        max_num_seqs=sum(info.max_num_seqs for info in up if info is not None),
        acceptance=acceptance.view,
        kv_use={part: share for part, infos in sides.items() if (share := kv_use(infos)) is not None},
        replayed={part: share for part, infos in sides.items() if (share := replayed(infos)) is not None},
    )
