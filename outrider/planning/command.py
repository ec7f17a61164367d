"""`outrider plan`: the command, and what it prints."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.console import out
from outrider.errors import InvalidArgument
from outrider.local.layout import GIB
from outrider.planning import cards, shape
from outrider.planning.forecast import BANDWIDTH_SHARE, FLOPS_SHARE, Forecast, Side
from outrider.planning.prices import parse_prices

_GAMMA_MAX = 8
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS_PER_HOUR = 3600

CONFIG, CARD, GIVEN, ASSUMED, MEASURED = "config", "card data", "given", "assumed", "measured"


def plan(
    target: Annotated[str, typer.Option(help="Served model: hub id or folder; a config.json is enough.")],
    draft: Annotated[str, typer.Option(help="Draft model, likewise.")],
    target_gpu: Annotated[str, typer.Option(help="Card by name, or NAME:memory_gb:bandwidth_gb_s:tflops.")] = "H100",
    draft_gpu: Annotated[str, typer.Option(help="Card by name, or NAME:memory_gb:bandwidth_gb_s:tflops.")] = "L4",
    streams: Annotated[int, typer.Option(help="Streams that decode at once.")] = 16,
    context: Annotated[int, typer.Option(help="Tokens of a stream, prompt and answer so far.")] = 2048,
    alpha: Annotated[float | None, typer.Option(help="Chance of a drafted token to be accepted; unset: 0.7.")] = None,
    report: Annotated[
        str | None, typer.Option(help="report.json of a sweep: take measured acceptance from it.")
    ] = None,
    rtt: Annotated[float, typer.Option(help="Milliseconds that a round spends on the links.")] = 1.0,
    price: Annotated[str | None, typer.Option(help="Price of a device hour: target=2.5,draft=0.6.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say what a pair needs and gives on two cards before anything is rented or downloaded."""
    for name, value in (("streams", streams), ("context", context)):
        if value < 1:
            raise InvalidArgument(name, f"must be at least 1, got {value}")
    if not 0 <= rtt < float("inf"):
        raise InvalidArgument("rtt", f"must be a number of milliseconds, got {rtt:g}")
    acceptance, source = _acceptance(alpha, report)
    forecast = Forecast(
        Side(shape.load("target", target, "target"), cards.find("target-gpu", target_gpu)),
        Side(shape.load("draft", draft, "draft"), cards.find("draft-gpu", draft_gpu)),
        acceptance,
        context,
        rtt / 1000,
    )
    figures = describe(forecast, streams, parse_prices(price), acceptance_source=source)
    if as_json:
        print(json.dumps(figures, allow_nan=False))  # noqa: T201 - for programs
    else:
        _show(figures)


def describe(forecast: Forecast, streams: int, prices: dict[str, float], *, acceptance_source: str) -> dict[str, Any]:
    """Every figure with its source, as JSON values."""
    target, draft = forecast.target, forecast.draft
    fits_target, fits_draft = forecast.streams_that_fit()
    gamma = forecast.best_gamma(streams)
    crossover = forecast.crossover()
    sides = {
        name: {
            "model": side.shape.name,
            "card": side.card.name,
            "weights_gib": round(side.shape.weights_bytes / GIB, 2),
            "weights_source": MEASURED if side.shape.weights_source == "weight files" else CONFIG,
            "kv_kib_per_token": round(side.shape.kv_bytes_per_token / 1024, 1),
            "kv_tokens": max(0, side.kv_tokens),
            "streams_that_fit": max(0, fits),
            "fits": side.kv_tokens >= forecast.context,
        }
        for name, side, fits in (("target", target, fits_target), ("draft", draft, fits_draft))
    }
    loads = [
        {
            "streams": batch,
            "gamma": best,
            "plain_tokens_per_s": round(forecast.tokens_per_s(batch, 0), 1),
            "tokens_per_s": round(forecast.tokens_per_s(batch, best), 1),
            "ratio": round(forecast.ratio(batch, best), 3),
            "fits": batch <= min(fits_target, fits_draft),
        }
        for batch in sorted({*_BATCHES, streams})
        for best in (forecast.best_gamma(batch),)
    ]
    link = {"q_mbit_per_s": round(forecast.q_mbit_per_s(streams, gamma), 2)}
    if draft.shape.is_feature_head:
        link["feature_mbit_per_s"] = round(forecast.feature_mbit_per_s(streams, gamma), 1)
    return {
        "sides": sides,
        "fills_first": "target" if fits_target <= fits_draft else "draft",
        "loads": loads,
        "at": {
            "streams": streams,
            "context": forecast.context,
            "gamma": gamma,
            "plain_step_ms": round(1000 * forecast.plain_s(streams), 3),
            "verification_ms": round(1000 * target.pass_s(streams * (gamma + 1), streams * forecast.context), 3),
            "draft_ms": round(1000 * gamma * draft.pass_s(streams, streams * forecast.context), 3),
            "break_even_round_trip_ms": round(1000 * forecast.break_even_round_trip_s(streams), 3),
            **link,
        },
        "crossover_streams": crossover,
        "cost_per_million_tokens": _costs(forecast, streams, gamma, prices),
        "acceptance": [round(rate, 4) for rate in forecast.acceptance],
        "acceptance_source": acceptance_source,
        "round_trip_ms": 1000 * forecast.round_trip_s,
        "assumed": {"bandwidth_share": BANDWIDTH_SHARE, "flops_share": FLOPS_SHARE},
    }


def _show(figures: dict[str, Any]) -> None:
    table = Table("side", "model", "card", "weights", "from", "KV per token", "KV tokens", "streams that fit", box=None)
    for name, side in figures["sides"].items():
        room = f"{side['kv_tokens']:,}" if side["fits"] else "does not fit"
        table.add_row(
            name,
            side["model"],
            side["card"],
            f"{side['weights_gib']:.2f} GiB",
            side["weights_source"],
            f"{side['kv_kib_per_token']:g} KiB",
            room,
            f"{side['streams_that_fit']:,}",
        )
    out.print(table)
    at = figures["at"]
    out.print(f"the {figures['fills_first']} fills first, at {at['context']:,} tokens a stream\n")

    table = Table("streams", "best gamma", "plain tokens/s", "tokens/s", "ratio", "", box=None)
    for load in figures["loads"]:
        numbers = (f"{load['plain_tokens_per_s']:,.0f}", f"{load['tokens_per_s']:,.0f}", f"{load['ratio']:.2f}")
        table.add_row(str(load["streams"]), str(load["gamma"]), *numbers, "" if load["fits"] else "KV does not fit")
    out.print(table)
    crossover = figures["crossover_streams"]
    out.print(
        f"speculation stops paying at {crossover:,} streams" if crossover else "speculation pays up to 4,096 streams"
    )

    accepted = ", ".join(f"{rate:g}" for rate in figures["acceptance"][:3])
    table = Table(f"at {at['streams']} streams, gamma {at['gamma']}", "", "source", box=None)
    rows = [
        ("plain step", f"{at['plain_step_ms']:.2f} ms", CARD),
        ("verification", f"{at['verification_ms']:.2f} ms", CARD),
        ("drafting", f"{at['draft_ms']:.2f} ms", CARD),
        ("links of a round", f"{figures['round_trip_ms']:g} ms", GIVEN),
        ("break-even round trip", f"{at['break_even_round_trip_ms']:.2f} ms", CARD),
        ("q on each link", f"{at['q_mbit_per_s']:.1f} Mbit/s", f"{MEASURED} bytes, {CARD}"),
        ("acceptance of the first slots", accepted, figures["acceptance_source"]),
    ]
    if "feature_mbit_per_s" in at:
        rows.insert(6, ("features on each link", f"{at['feature_mbit_per_s']:.0f} Mbit/s", CONFIG))
    costs = figures["cost_per_million_tokens"]
    if costs:
        rows.append(
            ("a million tokens", f"{costs['speculative']:.3f}, plain {costs['plain']:.3f}", f"{GIVEN} prices, {CARD}")
        )
    for row in rows:
        table.add_row(*row)
    out.print(table)
    shares = figures["assumed"]
    out.print(
        f"card data: published bandwidth x {shares['bandwidth_share']}, dense bf16 speed x {shares['flops_share']} "
        f"({ASSUMED}); a sweep on the cards themselves measures all of this: outrider bench sweep"
    )


def _acceptance(alpha: float | None, report: str | None) -> tuple[list[float], str]:
    if alpha is not None and report is not None:
        raise InvalidArgument("alpha", "and --report both say how much is accepted; leave one out")
    if report is not None:
        return _measured_acceptance(report), MEASURED
    value = 0.7 if alpha is None else alpha
    if not 0 <= value <= 1:
        raise InvalidArgument("alpha", f"must be from 0 to 1, got {value:g}")
    return [value] * _GAMMA_MAX, ASSUMED if alpha is None else GIVEN


def _measured_acceptance(path: str) -> list[float]:
    """s_i of the cell that drafted deepest; beyond its depth nothing is forecast."""
    try:
        with open(path, encoding="utf-8") as file:
            cells = json.load(file)["cells"]
        rates = max((cell["acceptance_given_tested"] for cell in cells if cell["gamma"] != "auto"), key=len)
        found = [float(rate) for rate in rates]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument("report", f"{path} is no report of a sweep: {error}") from None
    if not found:
        raise InvalidArgument("report", f"{path} holds no acceptance: nothing was drafted there")
    return found


def _costs(forecast: Forecast, streams: int, gamma: int, prices: dict[str, float]) -> dict[str, float] | None:
    """Both devices are paid for under speculation, the target alone without it."""
    if "target" not in prices:
        return None
    per_token = 1e6 / _SECONDS_PER_HOUR
    both = prices["target"] + prices.get("draft", 0.0)
    return {
        "speculative": round(per_token * both / forecast.tokens_per_s(streams, gamma), 4),
        "plain": round(per_token * prices["target"] / forecast.tokens_per_s(streams, 0), 4),
    }
