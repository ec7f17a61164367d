"""The chi-square distribution, central and not, for whole degrees of freedom."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

_PRECISION = 1e-8
_NEGLIGIBLE = 1e-13


def survival(x: float, df: int) -> float:
    """P(X > x) for a chi-square variable: Q(df / 2, x / 2), which is a finite sum for whole df.

    Abramowitz and Stegun 26.4.4 and 26.4.5.
    """
    half = x / 2
    if half <= 0:
        return 1.0
    odd = df % 2
    total = math.erfc(math.sqrt(half)) if odd else 0.0
    for k in range(df // 2):
        power = k + odd / 2
        total += math.exp(power * math.log(half) - half - math.lgamma(power + 1))
    return min(total, 1.0)


def noncentral_survival(x: float, df: int, noncentrality: float) -> float:
    """P(X > x) for a noncentral chi-square variable: a Poisson mixture of central ones."""
    mean = noncentrality / 2
    total = seen = 0.0
    k = 0
    while seen < 1 - _NEGLIGIBLE and (k <= mean or seen < 0.5 or k < 10_000):
        weight = math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) if mean > 0 else float(k == 0)
        if k > mean and weight < _NEGLIGIBLE:
            break
        total += weight * survival(x, df + 2 * k)
        seen += weight
        k += 1
    return min(total, 1.0)


def critical(level: float, df: int) -> float:
    """The value that a chi-square variable exceeds with probability `level`."""
    return _root(lambda x: level - survival(x, df), float(df))


@cache
def noncentrality(df: int, level: float, power: float) -> float:
    """How far off the law must be for a test of this level to see it with this power."""
    bound = critical(level, df)
    return _root(lambda value: noncentral_survival(bound, df, value) - power, float(df))


def _root(rising: Callable[[float], float], start: float) -> float:
    """Where a rising function crosses 0 on the positive axis, by bisection."""
    low, high = 0.0, max(start, 1.0)
    while rising(high) < 0:
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
