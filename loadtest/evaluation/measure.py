"""Asks a running pair, one answer at a time: to learn acceptance and costs, then to measure what they promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx

from loadtest.evaluation.acceptance import Acceptance, count
from loadtest.evaluation.prediction import Costs, best_gamma, costs_of, predict
from loadtest.evaluation.reading import Arrival, Reading, read, round_s
from loadtest.prompts import Prompt
from loadtest.series import Snapshot, parse
from outrider import api_key
from outrider.client import Answer, Client, request
from outrider.errors import InvalidArgument, Unavailable

DEPTH = 8
_LEARNT_WITH = (0, 1, 3, DEPTH)
"""Gammas that acceptance and costs are learnt from: passes of 1, 2, 4 and 9 rows, and every position."""
_METRICS_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How texts are sampled: at temperature 0 both rules are one, called greedy."""

    temperature: float
    rule: str

    def __str__(self) -> str:
        return "temperature 0" if not self.temperature else f"temperature {self.temperature:g}, {self.rule}"


@dataclass(frozen=True, slots=True)
class Found:
    """Of one draft under one setting.

    Attributes:
        learnt: answers that acceptance and costs come from.
        measured: answers of the measurement, by gamma; 0 is plain decoding, and lists are parallel.
    """

    setting: Setting
    learnt: tuple[Reading, ...]
    costs: Costs
    predicted: dict[int, float]
    measured: dict[int, list[Reading]]

    def acceptance(self, task: str | None = None) -> Acceptance:
        """Of one task, or of all."""
        return count((one for one in self.learnt if task is None or one.task == task), DEPTH)

    @property
    def tasks(self) -> list[str]:
        return sorted({one.task for one in self.learnt})


class Stopped(KeyboardInterrupt):
    """The measurement was interrupted; `found` has what was learnt, and the prompts that every arm had answered."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found


class Pair:
    """A pair that runs and answers nobody else."""

    def __init__(self, client: Client, url: str, max_tokens: int) -> None:
        self._client = client
        self._url = url
        self._max_tokens = max_tokens
        self._chat = True

    def warm_up(self, prompt: Prompt) -> None:
        """Finds out whether the model has a chat template, and lets first steps be slow."""
        try:
            self.ask(prompt, Setting(0.0, "greedy"), 1, 0)
        except InvalidArgument:
            self._chat = False
            self.ask(prompt, Setting(0.0, "greedy"), 1, 0)

    def ask(self, prompt: Prompt, setting: Setting, gamma: int, seed: int) -> Reading:
        """One answer."""
        message = request(
            prompt.text,
            chat=self._chat,
            max_tokens=self._max_tokens,
            temperature=setting.temperature,
            seed=seed,
            speculate=gamma > 0,
            num_speculative_tokens=gamma or None,
            rule=setting.rule if setting.temperature else None,
        )
        before, answer, arrivals = self.series(), Answer(), []
        for piece in self._client.generate(message, answer):
            if piece.token_id >= 0:
                arrivals.append(Arrival(answer.seconds, piece.drafted))
        counted = self.series().since(before)
        reading = read(prompt.task, gamma, arrivals, limit=self._max_tokens, depth=DEPTH)
        return replace(
            reading,
            drafts=int(counted.value("spec_decode_num_drafts_total")),
            tested=int(counted.value("spec_decode_num_tested_tokens_total")),
            accepted_tokens=int(counted.value("spec_decode_num_accepted_tokens_total")),
        )

    def series(self) -> Snapshot:
        """The coordinator's series now.

        Raises:
            Unavailable: it does not answer.
        """
        try:
            headers = api_key.headers(api_key.from_environment())
            answer = httpx.get(f"{self._url}/metrics", headers=headers, timeout=_METRICS_TIMEOUT_S, trust_env=False)
            return parse(answer.raise_for_status().text)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._url} does not answer: {error}") from None


def evaluate(
    pair: Pair, prompts: Sequence[Prompt], setting: Setting, gammas: Sequence[int], say: Callable[[str], None]
) -> Found:
    """Learns, predicts, measures.

    Args:
        gammas: to be measured, besides plain decoding and the best gamma by prediction.

    Raises:
        Unavailable: nothing was drafted, or the answers are too short.
        Stopped: interrupted once the prediction stood.
    """
    began_s = time.monotonic()
    learnt: list[Reading] = []
    for seed, prompt in enumerate(prompts):
        learnt += [pair.ask(prompt, setting, gamma, seed) for gamma in _in_turn(_LEARNT_WITH, seed)]
        say(f"{setting}: prompt {seed + 1} of {len(prompts)} after {time.monotonic() - began_s:.0f} s")
    costs = costs_of(pair.series())
    took_s = round_s(learnt)
    if len(took_s) < len(_LEARNT_WITH):
        raise Unavailable(f"{setting}: the answers are too short to time rounds of {DEPTH} drafted tokens")
    predicted = predict(count(learnt, DEPTH).by_position, learnt, took_s)
    arms = sorted({0, best_gamma(predicted), *gammas})
    left_s = (time.monotonic() - began_s) * len(arms) / len(_LEARNT_WITH)
    say(f"{setting}: learnt from {len(learnt)} answers; measuring gamma {arms[1:]} in about {left_s:.0f} s")
    measured: dict[int, list[Reading]] = {gamma: [] for gamma in arms}
    try:
        for seed, prompt in enumerate(prompts):
            for gamma in _in_turn(arms, seed):
                measured[gamma].append(pair.ask(prompt, setting, gamma, seed))
    except KeyboardInterrupt:
        whole = min(len(own) for own in measured.values())
        kept = {gamma: own[:whole] for gamma, own in measured.items()} if whole else {0: []}
        raise Stopped(Found(setting, tuple(learnt), costs, predicted, kept)) from None
    return Found(setting, tuple(learnt), costs, predicted, measured)


def _in_turn(gammas: Sequence[int], turn: int) -> list[int]:
    """Every gamma comes first in its turn, so that a drift of the machine meets all alike."""
    first = turn % len(gammas)
    return [*gammas[first:], *gammas[:first]]
