"""Which prompts, temperatures and gammas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, islice, zip_longest

from loadtest.prompts import Prompt
from outrider.errors import InvalidArgument


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts, taking tasks in turn.

    Raises:
        InvalidArgument: there are fewer.
    """
    if count > len(prompts):
        raise InvalidArgument("prompts", f"must be at most {len(prompts)}, the size of the data set, got {count}")
    by_task: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_task[prompt.task].append(prompt)
    in_turn = chain.from_iterable(zip_longest(*by_task.values()))
    return list(islice((prompt for prompt in in_turn if prompt is not None), count))


def numbers(field: str, text: str, low: float, high: float, *, whole: bool = False) -> list[float]:
    """`0,1`, each one once, in the given order.

    Raises:
        InvalidArgument: not numbers, or out of range.
    """
    try:
        values = [float(int(part)) if whole else float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(low <= value <= high for value in values):
        kind = "whole numbers" if whole else "numbers"
        raise InvalidArgument(field, f"must be {kind} from {low:g} to {high:g}, with commas between, got {text!r}")
    return list(dict.fromkeys(values))
