"""Cost profiles to and from protobuf: seconds inside, milliseconds on the wire."""

from __future__ import annotations

from outrider.costs import CostProfile, StepCost
from outrider.v1 import common_pb2


def costs_to_pb(profile: CostProfile | None, state: str) -> common_pb2.CostProfile:
    """What a service's steps cost, as far as it is known."""
    message = common_pb2.CostProfile(state=state)
    if profile is not None:
        message.seconds = profile.seconds
        message.fixed_ms, message.floor_ms = 1e3 * profile.fit.fixed_s, 1e3 * profile.fit.floor_s
        message.row_ms, message.context_ms = 1e3 * profile.fit.row_s, 1e3 * profile.fit.context_s
        for step in profile.steps:
            message.steps.add(
                streams=step.streams,
                tokens=step.tokens,
                context=step.context,
                forward_ms=1e3 * step.forward_s,
                sample_ms=1e3 * step.sample_s,
            )
    return message


def costs_from_pb(message: common_pb2.CostProfile) -> CostProfile | None:
    """None while nothing is measured."""
    if not message.steps:
        return None
    steps = [
        StepCost(step.streams, step.tokens, step.context, step.forward_ms / 1e3, step.sample_ms / 1e3)
        for step in message.steps
    ]
    return CostProfile(tuple(steps), "cache" if message.state == "cached" else "measured", message.seconds)
