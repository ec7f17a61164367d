"""`outrider demo`: speculative decoding at work, with and without the draft."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from outrider import demo as demonstration
from outrider import models
from outrider.client import Client
from outrider.commands.options import Draft, Target
from outrider.commands.termination import TerminationInterrupts
from outrider.console import Downloads, Steps, out, say, show_comparison, show_pieces, show_plan
from outrider.local import devices, suggest
from outrider.local.options import StackOptions
from outrider.local.stack import make_plan, private

_GRACE_S = 10.0


def demo(
    target: Target = "default",
    draft: Draft = "default",
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 160,
) -> None:
    """Show speculative decoding at work on a small pair, with and without the draft in one run."""
    options = StackOptions(target=target, draft=draft)
    cards = devices.cards()
    if cards:
        out.print(f"{len(cards)} GPU(s) found; the demo takes its small pair all the same, since it is quick to fetch")
    steps = Steps(5)
    steps(f"models: target {models.canonical(target, 'target')}, draft {models.canonical(draft, 'draft')}")
    seats = make_plan(options)
    show_plan(seats)
    with TerminationInterrupts(), Downloads() as downloads:
        models.resolve(options.target, reporter=downloads)
        steps("starting draft service, target service and coordinator, three processes that talk over gRPC")
        with private(options, seats, downloads, say) as stack, Client(stack.state.grpc) as client:
            result = demonstration.compare(
                client, stack.state.target, max_tokens=max_tokens, show=show_pieces, step=steps
            )
            stack.supervisor.stop(_GRACE_S)
    show_comparison(result)
    if cards:
        pair = suggest.command(cards)
        out.print(f"a real pair for these cards: {pair}" if pair else "no ungated pair that we know fits these cards")
    summary: dict[str, object] = {
        "target": stack.state.model,
        "draft": seats[1].model if len(seats) > 1 else "none",
        "tokens_per_s": round(result.tokens_per_s, 2),
        "tokens_per_s_plain": round(result.tokens_per_s_plain, 2),
        "speedup": round(result.speedup, 3),
        "mean_acceptance_length": round(float(result.speculative.metrics["mean_acceptance_length"]), 3),  # type: ignore[arg-type]
        "draft_acceptance_rate": round(float(result.speculative.metrics["draft_acceptance_rate"]), 3),  # type: ignore[arg-type]
        "text_identical": result.text_identical,
    }
    if result.divergence:
        summary["first_divergence"] = result.divergence._asdict()
    print(json.dumps(summary))  # noqa: T201 - the machine-readable last line, free of any styling
    if result.divergence and not result.divergence.explained:
        raise typer.Exit(1)
