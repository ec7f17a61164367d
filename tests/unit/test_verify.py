"""The statistics of `outrider verify`, and what it makes of what it finds."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.noise import Role, coupled_choice, gumbel_row_keys, subkey
from outrider.verify import check, chi2, command, law, noise, search, texts
from outrider.verify.door import CannotJudge, Deployment, Door, Reply, Wish
from outrider.verify.report import Outcome, Report
from outrider.verify.texts import Difference, Equality

Samples = list[tuple[int, ...]]


# ---- chi-square ----


@pytest.mark.parametrize(
    ("x", "df", "tail"),
    [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (10.827566, 1, 0.001), (99.607228, 60, 0.001), (0, 3, 1.0)],
)
def test_the_tail_is_that_of_the_tables(x: float, df: int, tail: float) -> None:
    """Guards the closed forms for odd and even degrees of freedom (NIST handbook, 1.3.6.7.4)."""
    assert chi2.survival(x, df) == pytest.approx(tail, rel=1e-5)
    if x:
        assert chi2.critical(tail, df) == pytest.approx(x, rel=1e-5)


def test_the_noncentral_tail_is_what_shifted_normals_have() -> None:
    """Guards the stated power: against simulation, and that the noncentrality it asks for has it."""
    rng = np.random.default_rng(0)
    for df, shift in ((1, 4.0), (12, 9.0), (40, 60.0)):
        normals = rng.normal(size=(20_000, df))
        normals[:, 0] += np.sqrt(shift)
        bound = df + shift
        simulated = np.mean((normals**2).sum(axis=1) > bound)
        assert chi2.noncentral_survival(bound, df, shift) == pytest.approx(simulated, abs=0.015)
    needed = chi2.noncentrality(12, 0.001, 0.95)
    assert chi2.noncentral_survival(chi2.critical(0.001, 12), 12, needed) == pytest.approx(0.95, abs=1e-6)


# ---- the law ----


def draw(rng: np.random.Generator, chances: Any, n: int) -> Samples:
    """n samples of three tokens: 0, then two letters by an index into their joint chances."""
    width = int(np.sqrt(len(chances)))
    return [(0, int(index) // width, int(index) % width) for index in rng.choice(len(chances), n, p=chances)]


def p_values(alike: Callable[[np.random.Generator], tuple[Samples, Samples]], runs: int) -> Any:
    """Of all tests of each run, [runs, tests], without the correction for their number."""
    rng, found = np.random.default_rng(1), []
    for _ in range(runs):
        sets = alike(rng)
        found.append([law.homogeneity(law.count(view)) for view in (sets, *law.views(sets))])
    return np.array(found)


def test_under_one_law_p_values_are_uniform() -> None:
    """Guards the false-alarm rate: rare outcomes, of which there are many, must not distort it."""
    chances = np.random.default_rng(2).dirichlet(np.full(144, 0.1))
    values = p_values(lambda rng: (draw(rng, chances, 400), draw(rng, chances, 400)), 200)
    assert values.shape[1] == law._TESTS
    for test in values.T:
        for level in (0.01, 0.05, 0.25, 0.5, 0.75):
            spread = np.sqrt(level * (1 - level) / len(test))
            assert np.mean(test < level) == pytest.approx(level, abs=4 * spread)


def test_a_difference_of_the_detectable_size_is_found_as_often_as_stated() -> None:
    """Guards the stated power, for the difference that moves the statistic least: in proportion to the chances."""
    rng = np.random.default_rng(3)
    chances = np.full(36, 1 / 36)
    n = 800
    detectable = law.compare(draw(rng, chances, n), draw(rng, chances, n)).detectable_tv
    assert 0.05 < detectable < 0.3
    signs = np.tile([1.0, -1.0], 18)
    other = chances * (1 + 2 * detectable * signs)
    found = [not law.compare(draw(rng, chances, n), draw(rng, other, n)).equal for _ in range(60)]
    assert np.mean(found) >= 0.87


def test_what_only_happens_behind_a_token_is_found() -> None:
    """Guards against a test of marginals: here tokens 2 and 3 have the same laws, and only their joint law differs."""
    rng = np.random.default_rng(4)
    even, together = np.full(4, 0.25), np.array([0.35, 0.15, 0.15, 0.35])
    assert not law.compare(draw(rng, even, 2_000), draw(rng, together, 2_000)).equal


def test_shared_noise_and_dropped_tokens_are_found_where_hardly_an_outcome_comes_twice() -> None:
    """Guards the views by id and by frequency: pooled by their prefix, such outcomes show nothing."""
    rng = np.random.default_rng(5)
    first = rng.permutation(200)

    def samples(n: int, skew: float, repeat: float) -> Samples:
        second = (rng.random(n) ** skew * 50_000).astype(int)
        second[rng.random(n) < repeat] = 7
        return [(int(one), int(two), 0) for one, two in zip(rng.choice(first, n), second, strict=True)]

    plain = samples(3_000, 1.0, 0.1)
    assert law.compare(plain, samples(3_000, 1.0, 0.1)).equal
    for found in (samples(3_000, 1.3, 0.1), samples(3_000, 1.0, 0.17)):
        assert not law.compare(plain, found).equal
        assert law.homogeneity(law.count([plain, found])) > law.LEVEL


def test_rare_outcomes_are_pooled_below_their_prefix_and_lost_nowhere() -> None:
    """Guards the cells: none smaller than asked for, and as many samples as there were."""
    outcomes = Counter({(0, 0, 0): 50, (0, 0, 1): 9, (0, 0, 2): 8, (0, 1, 0): 3, (7, 7, 7): 4})
    cells = law.pool(outcomes, 10)
    assert cells[0, 0, 1] == cells[0, 0, 2] == (0, 0)
    assert cells[0, 1, 0] == cells[7, 7, 7]
    sizes: Counter[Any] = Counter()
    for outcome, cell in cells.items():
        sizes[cell] += outcomes[outcome]
    assert sizes.total() == outcomes.total()
    assert min(sizes.values()) >= 10


def test_a_law_without_choice_is_equal_and_detects_what_it_can() -> None:
    """Guards against a division by zero where everybody says the same."""
    found = law.compare([(1, 2, 3)] * 200, [(1, 2, 3, 4)] * 200)
    assert (found.p_value, found.tv, found.samples) == (1.0, 0.0, 200)
    with pytest.raises(ValueError, match="3 tokens"):
        law.compare([(1, 2)], [(1, 2, 3)])


def test_the_search_likes_rejections_and_few_outcomes() -> None:
    """Guards against an opening on which nothing is ever rejected, which can show nothing."""
    few = Reply((1,), ((1, 2, 3),) * 8, drafted=16, accepted=8)
    many = Reply((1,), tuple((1, token, 3) for token in range(8)), drafted=16, accepted=8)
    accepted = Reply((1,), ((1, 2, 3),) * 8, drafted=16, accepted=16)
    nothing = Reply((1,), ((1, 2, 3),) * 8, drafted=0, accepted=0)
    scores = [search.judge("x", [reply]).score for reply in (few, many, accepted, nothing)]
    assert scores[0] > scores[1] > scores[2] == scores[3] == 0


async def test_the_search_takes_the_opening_that_shows_most() -> None:
    """Guards against one that is decided by the first few samples, and against the last one that was tried."""
    shows, asked = {"never": 16, "often": 8, "seldom": 14}, Counter[str]()

    class Replies:
        async def all(self, wishes: Sequence[Wish]) -> list[Reply]:
            asked.update(wish.prompt for wish in wishes)
            return [Reply((1,), ((1, 2, 3),) * wish.n, drafted=16, accepted=shows[wish.prompt]) for wish in wishes]

    for openings in itertools.permutations(shows):
        found = await search.best(cast(Door, Replies()), openings, n=8, gamma=2)
        assert (found.prompt, found.rejected) == ("often", 1.0)
    assert asked["often"] == 6 * (1 + search._MORE)


# ---- the report ----


def report(**changes: Any) -> Report:
    """Of a pair that passes."""
    equal = Equality(equal=4, compared=4, drafted=10, differences=())
    found = law.Law(p_value=0.4, tv=0.01, detectable_tv=0.05, samples=1_000)
    values: dict[str, Any] = {"greedy": equal, "coupled": equal, "near_ties": 0, "law": found, "law_drafted": 5}
    return Report(**{**values, "dtype": "float32", **changes})


DIFFERS = Equality(
    equal=3,
    compared=4,
    drafted=10,
    differences=(Difference(Wish("a", 4, 0.0), (1,), 0, (1, 2), (1, 3), 1),),
)


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, Outcome.PASSED),
        ({"greedy": DIFFERS}, Outcome.FAILED),
        ({"coupled": DIFFERS, "near_ties": 1}, Outcome.PASSED),
        ({"law": law.Law(1e-4, 0.2, 0.05, 1_000)}, Outcome.FAILED),
        ({"law_drafted": 0}, Outcome.COULD_NOT_JUDGE),
        ({"greedy": Equality(4, 4, 0, ())}, Outcome.COULD_NOT_JUDGE),
        ({"law_drafted": 0, "greedy": DIFFERS}, Outcome.FAILED),
    ],
)
def test_the_outcome_is_the_exit_code(changes: Any, outcome: Outcome) -> None:
    """Guards against a pass where nothing was drafted, and against a difference excused by that."""
    made = report(**changes)
    assert made.outcome is outcome
    assert json.loads(made.to_json())["passed"] is {0: True, 1: False, 2: None}[int(outcome)]


def test_the_json_line_has_the_documented_keys() -> None:
    """Guards programs that read it."""
    line = json.loads(report().to_json())
    assert list(line) == [
        "passed",
        "greedy_equal",
        "coupled_equal",
        "near_ties",
        "unexplained",
        "drafted",
        "dtype",
        "law",
    ]
    assert list(line["law"]) == ["p_value", "tv", "detectable_tv", "samples"]
    assert line["greedy_equal"] == [4, 4]


# ---- the door ----


def door(answer: Callable[[httpx.Request], httpx.Response]) -> Door:
    return Door(httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://door"))


READY = {
    "degraded": [],
    "max_num_seqs": 20,
    "target": {
        "model": "t",
        "dtype": "bfloat16",
        "kind": "target",
        "batch_invariant": False,
        "batch_invariance_note": "row 3 differs",
    },
    "draft": {"model": "", "kind": "ngram"},
}


async def test_the_door_takes_half_of_the_places() -> None:
    """Guards against a check that takes a server's places from its users."""
    found = await door(lambda request: httpx.Response(200, json=READY)).deployment()
    assert found == Deployment("t", "bfloat16", invariant=False, note="row 3 differs", draft="ngram", places=10)
    assert found.n == 10


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, {**READY, "draft": None, "degraded": [{"part": "draft", "reason": "refused"}]}, "no draft.*refused"),
        (503, {**READY, "target": None}, "not ready"),
        (200, {"hello": "world"}, "no coordinator"),
    ],
)
async def test_what_cannot_be_judged_is_said(status: int, body: Any, why: str) -> None:
    """Guards against a verdict on a pair that is not there."""
    with pytest.raises(CannotJudge, match=why):
        await door(lambda request: httpx.Response(status, json=body)).deployment()


async def test_an_overloaded_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against hanging for ever on 429, and against waiting requests that are passed over."""
    monkeypatch.setattr("outrider.verify.door._PATIENCE_S", 0.02)
    monkeypatch.setattr("outrider.verify.door._RETRY_S", 0.001)
    monkeypatch.setattr("outrider.verify.door._LOOK_EVERY_S", 0.001)
    error = {"error": {"message": "full", "param": None}}
    full = door(lambda request: httpx.Response(429, json=error, text=None))
    with pytest.raises(CannotJudge, match="429: full"):
        await full.ask(Wish("a", 4, 0.0))
    busy = door(lambda request: httpx.Response(200, text="outrider:num_requests_waiting 3.0\n"))
    with pytest.raises(CannotJudge, match="overloaded"):
        await busy.all([Wish("a", 4, 0.0)])


async def test_what_the_server_refuses_is_a_reason_not_to_judge() -> None:
    """Guards against a traceback where a server does not allow planted errors."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/ready":
            return httpx.Response(200, json=READY)
        return httpx.Response(400, json={"error": {"message": "seed: is refused", "param": "seed"}})

    with pytest.raises(CannotJudge, match="seed"):
        await check.verify(door(answer), samples=100, say=lambda line: None)


async def test_a_draft_that_never_drafts_is_no_pass() -> None:
    """Guards against thousands of samples of plain decoding, compared with plain decoding."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/completions":
            return httpx.Response(200, json=READY)
        row = {"top_logprobs": [{}] * 4}
        choice = {"token_ids": [1, 2, 3, 4], "prompt_token_ids": [5], "logprobs": row}
        counts = {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0}
        body = {"choices": [choice] * json.loads(request.content)["n"], "metrics": {"speculative_decoding": counts}}
        return httpx.Response(200, json=body)

    said: list[str] = []
    with pytest.raises(CannotJudge, match="nothing was drafted"):
        await check.verify(door(answer), samples=100, say=said.append, prompts=["a"])
    assert any("1 of 1 greedy" in line for line in said)


def test_errors_are_planted_only_where_speculation_is_on() -> None:
    """Guards the plain side of every comparison."""
    wish = Wish("a", 4, 1.0, planted="raw-q")
    assert "planted_error" not in wish.body()["speculative"]
    assert wish._replace(gamma=2).body()["speculative"]["planted_error"] == "raw-q"
    assert all(wish.gamma == 0 for wish in texts.greedy(check.TEXTS))


# ---- near ties ----


def reply(*rows: dict[int, float], ids: tuple[int, ...]) -> Reply:
    return Reply((1,), (ids,), drafted=0, accepted=0, tops=(rows,))


def test_the_band_is_the_largest_change_of_a_lead_behind_one_prefix() -> None:
    """Guards against a normaliser's shift taken for noise, and against rows behind prefixes that differ."""
    one = reply({1: -0.5, 2: -1.0}, {3: -0.1, 4: -3.0}, {5: -0.2, 6: -2.0}, ids=(1, 3, 5))
    other = reply({1: -0.6, 2: -1.1}, {4: -3.2, 3: -0.1}, {5: -9.0, 6: -0.1}, ids=(1, 4, 5))
    assert noise.change(one, other, 0) == pytest.approx(0.2)


def test_a_near_tie_lies_within_the_band_noise_of_the_rule_included() -> None:
    """Guards the excuse: under the coupled rule log p - log e is compared, and no other difference is excused."""
    row = {2: -1.0, 3: -1.1}
    greedy = Difference(Wish("a", 4, 0.0), (1,), 0, (1, 2), (1, 3), 1)
    assert noise.lead(greedy, row) == pytest.approx(0.1)
    seeded = greedy._replace(wish=Wish("a", 4, 1.0, seed=7, method="coupled"))
    keys = gumbel_row_keys(
        np.array([subkey(7, Role.GUMBEL)], np.uint64), np.array([2], np.uint32), np.zeros(1, np.uint32)
    )
    chances = np.zeros((1, 4))
    for lead_of_2 in (-8.0, -0.3, 0.0, 0.3, 8.0):
        chances[0, 2:] = np.exp([-5.0 + lead_of_2, -5.0])
        lead = noise.lead(seeded, {2: -5.0 + lead_of_2, 3: -5.0})
        assert lead is not None
        assert int(coupled_choice(chances, keys)[0]) == (2 if lead > 0 else 3)
    assert not noise.Tie(greedy, noise.lead(greedy, {2: -1.0})).within(10.0)
    assert noise.lead(greedy._replace(speculative=(1,)), row) is None


# ---- the command ----


@pytest.mark.parametrize(
    ("found", "code", "says"),
    [
        (report(), 0, '"passed": true'),
        (report(greedy=DIFFERS), 1, '"passed": false'),
        (report(law_drafted=0), 2, '"passed": null'),
        (CannotJudge("no draft is attached"), 2, '{"passed": null, "error": "no draft is attached"}'),
    ],
)
def test_the_command_s_exit_code(monkeypatch: pytest.MonkeyPatch, found: Any, code: int, says: str) -> None:
    """Guards scripts that look at nothing else."""

    async def checked(*_: Any) -> Report:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(command, "_check", checked)
    result = CliRunner().invoke(app, ["verify", "--url", "http://door", "--json"])
    assert result.exit_code == code
    assert says in result.output


@pytest.mark.parametrize("arguments", [["--samples", "5"], ["--plant", "nonsense"]])
def test_the_command_names_what_it_cannot_use(arguments: list[str]) -> None:
    """Guards against exit code 1, which says that the pair failed."""
    result = CliRunner().invoke(app, ["verify", "--url", "http://door", *arguments])
    assert result.exit_code == 2
    assert arguments[0].removeprefix("--") in result.output
