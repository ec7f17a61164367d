"""`outrider bench sweep`: batch sizes x gamma x context, each arm beside plain decoding."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest import bootstrap, window
from loadtest.cells import Cell, CellResult, Grid, Visit, speculation_field
from loadtest.client import Client, Endpoint, stopwatch
from loadtest.outcome import Outcome, Piece
from loadtest.prompts import Prompt, PromptPool, lengthened
from loadtest.series import Snapshot, refuse_busy, scrape
from loadtest.workload import Sampling
from outrider.errors import Unavailable

_WARM_UP_TOKENS = 24
_CHARACTERS_PER_TOKEN = 4.0
"""Where the server has not yet said otherwise."""
_WINDOW_SHARE = 0.5
"""Of an answer's tokens that every stream has to make while all of them decode; fewer tell nothing of this batch."""
_LONGEST = 4
"""Answers are doubled until that is so, up to this many times the length asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """How the grid is measured.

    Attributes:
        output_tokens: of every answer in every arm; more where a batch needs it to decode all at once for a while.
        passes: visits of each cell.
        max_passes: to this many, for cells whose interval is wider than `interval_width`.
        interval_width: high end minus low end of the 95 % interval of a ratio; None never lengthens a run.
        min_streams: streams measured per visit; a smaller batch runs several times in a row.
    """

    grid: Grid
    output_tokens: int = 128
    temperature: float | None = 0.0
    passes: int = 3
    max_passes: int = 3
    interval_width: float | None = None
    min_streams: int = 4
    allow_busy: bool = False
    seed: int = 0


class Sweep:
    """Runs a sweep against one server."""

    def __init__(
        self,
        client: Client,
        pool: PromptPool,
        options: SweepOptions,
        *,
        on_visit: Callable[[CellResult], None] = lambda _: None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.results = {cell: CellResult(cell) for cell in options.grid.cells}
        self._client = client
        self._pool = pool
        self._options = options
        self._on_visit = on_visit
        self._warn = warn
        self._rng = random.Random(options.seed)
        self._characters_per_token = _CHARACTERS_PER_TOKEN
        self._longer: dict[tuple[int, int], int] = {}

    async def run(self) -> list[CellResult]:
        """All passes over the grid. What the server refuses is a result of its cell.

        Raises:
            Unavailable: the server answers others, or does not answer the warm-up.
        """
        options = self._options
        if not options.allow_busy and (note := await refuse_busy(self._client)):
            self._warn(note)
        await self._warm_up()
        for number in range(max(options.passes, options.max_passes)):
            blocks = None if number < options.passes else self._wide_blocks()
            if blocks is not None and not blocks:
                break
            for block in options.grid.order(self._rng, blocks):
                await self._visit_block(block)
        return list(self.results.values())

    async def _visit_block(self, block: Sequence[Cell]) -> None:
        """All gammas at one batch and context, on the same questions."""
        batch, _, context = block[0]
        groups = math.ceil(self._options.min_streams / batch)
        questions = [self._questions(batch, context) for _ in range(groups)]
        pending, visited, shown = list(block), list[Cell](), set[Cell]()
        while pending:
            cell = pending.pop(0)
            result = self.results[cell]
            if result.refusal is None:
                try:
                    result.visits.append(await self._visit(cell, questions))
                    visited.append(cell)
                except (window.TooShort, ValueError, Unavailable) as error:
                    if isinstance(error, window.TooShort) and self._lengthen(cell, error):
                        for done in visited:
                            self.results[done].visits.pop()
                        pending, visited = list(block), []
                        continue
                    result.refusal = str(error)
                    self._warn(f"{cell}: {error}")
            if cell not in shown:
                shown.add(cell)
                self._on_visit(result)

    def _lengthen(self, cell: Cell, reason: window.TooShort) -> bool:
        """Doubles the answers of a batch, in all its arms, if that is still allowed."""
        tokens = 2 * self._tokens(cell)
        if tokens > _LONGEST * self._options.output_tokens:
            return False
        self._longer[cell.batch, cell.context] = tokens
        self._warn(f"{cell}: {reason}; all arms of this batch again, with answers of {tokens} tokens")
        return True

    def _tokens(self, cell: Cell) -> int:
        return self._longer.get((cell.batch, cell.context), self._options.output_tokens)

    async def _visit(self, cell: Cell, questions: Sequence[Sequence[Prompt]]) -> Visit:
        rates: list[float] = []
        outcomes: list[Outcome] = []
        seconds, rounds, total_s = 0.0, 0, 0.0
        series: Snapshot | None = None
        for group in questions:
            answered, counted = await self._batch(cell, self._pool.fresh(group), self._tokens(cell))
            seen = window.measure(answered, int(_WINDOW_SHARE * self._options.output_tokens))
            rates += seen.rates
            seconds += seen.seconds
            rounds += seen.rounds
            outcomes += answered
            total_s += max(outcome.end_s for outcome in answered)
            series = counted if series is None or counted is None else series.plus(counted)
        return Visit(tuple(rates), seconds, rounds, series, tuple(outcomes), total_s)

    async def _batch(
        self, cell: Cell, prompts: Sequence[Prompt], output_tokens: int
    ) -> tuple[list[Outcome], Snapshot | None]:
        """Start a stream per prompt at once; also what the server counted while all of them decoded.

        Raises:
            Unavailable: a stream failed; the message is the server's.
        """
        watch = _Watch(self._client, len(prompts))
        sampling = Sampling(output_tokens=output_tokens, temperature=self._options.temperature, ignore_eos=True)
        clock = stopwatch()

        async def send(index: int, prompt: Prompt) -> Outcome:
            fields = sampling.fields(prompt, index) | speculation_field(cell.gamma)
            body = self._client.endpoint.body(prompt.text, stream=True, each_usage=True, fields=fields)
            outcome = await self._client.send(
                body, task=prompt.task, planned_s=clock(), clock=clock, on_piece=watch.piece(index)
            )
            watch.ended()
            return outcome

        outcomes = await asyncio.gather(*(send(index, prompt) for index, prompt in enumerate(prompts)))
        for outcome in outcomes:
            if outcome.failure:
                raise Unavailable(f"{outcome.failure}: {outcome.detail}")
        return outcomes, await watch.counted()

    async def _warm_up(self) -> None:
        """Every gamma once at the smallest and the largest batch, short; it also learns how long a token is."""
        grid = self._options.grid
        for batch in {grid.batches[0], grid.batches[-1]}:
            for gamma in grid.gammas:
                prompts = self._pool.fresh(self._pool.take(batch))
                try:
                    outcomes, _ = await self._batch(Cell(batch, gamma, 0), prompts, _WARM_UP_TOKENS)
                except Unavailable as error:
                    if gamma == 0 and batch == grid.batches[0]:
                        raise Unavailable(f"the warm-up failed: {error}") from None
                    continue  # the cell itself will say so
                tokens = sum(outcome.prompt_tokens for outcome in outcomes)
                if tokens:
                    self._characters_per_token = sum(len(prompt.text) for prompt in prompts) / tokens

    def _questions(self, batch: int, context: int) -> list[Prompt]:
        prompts = self._pool.take(batch)
        if not context:
            return prompts
        characters = int(context * self._characters_per_token)
        return [lengthened(prompt, self._pool.filler(self._rng), characters) for prompt in prompts]

    def _wide_blocks(self) -> list[tuple[int, int]]:
        """Blocks with a cell whose interval is wider than wanted."""
        wanted = self._options.interval_width
        if wanted is None:
            return []
        rng = np.random.default_rng(self._options.seed)
        wide = set()
        for cell, result in self.results.items():
            plain = self.results[cell._replace(gamma=0)]
            if cell.gamma == 0 or not result.visits or not plain.visits:
                continue
            low, high = bootstrap.interval(bootstrap.ratio_draws(result.rates, plain.rates, rng))
            if high - low > wanted:
                wide.add((cell.batch, cell.context))
        return sorted(wide)


class _Watch:
    """Reads the server's series when the last stream has begun and when the first one ends."""

    def __init__(self, client: Client, streams: int) -> None:
        self._client = client
        self._waiting = set(range(streams))
        self._before: asyncio.Task[Snapshot | None] | None = None
        self._after: asyncio.Task[Snapshot | None] | None = None

    def piece(self, index: int) -> Callable[[Piece], None]:
        def seen(_: Piece) -> None:
            if index in self._waiting:
                self._waiting.discard(index)
                if not self._waiting:
                    self._before = asyncio.create_task(scrape(self._client))

        return seen

    def ended(self) -> None:
        if self._after is None:
            self._after = asyncio.create_task(scrape(self._client))

    async def counted(self) -> Snapshot | None:
        """What the server counted in between; None where it exports nothing."""
        if self._before is None or self._after is None:
            return None
        before, after = await self._before, await self._after
        return None if before is None or after is None else after.since(before)


async def sweep(
    endpoint: Endpoint,
    pool: PromptPool,
    options: SweepOptions,
    *,
    on_visit: Callable[[CellResult], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> list[CellResult]:
    """Run a sweep; see `Sweep.run`."""
    async with Client(endpoint, connections=max(options.grid.batches)) as client:
        return await Sweep(client, pool, options, on_visit=on_visit, warn=warn).run()
