"""Prices of device hours, as the command line takes them."""

from __future__ import annotations

from outrider.errors import InvalidArgument

SIDES = ("target", "draft")


def parse_prices(text: str | None) -> dict[str, float]:
    """`target=2.5,draft=0.6` by side; empty for None.

    Raises:
        InvalidArgument: not of this form.
    """
    prices: dict[str, float] = {}
    for part in (text or "").split(","):
        side, _, number = part.strip().partition("=")
        if not side:
            continue
        try:
            prices[side] = float(number)
        except ValueError:
            prices[side] = -1.0
        if side not in SIDES or not 0 <= prices[side] < float("inf"):
            raise InvalidArgument("price", f"{part!r} is not target=NUMBER or draft=NUMBER (per device hour)")
    return prices
