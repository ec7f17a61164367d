"""The `train-draft` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider import models
from outrider.console import Downloads, out
from outrider.errors import InvalidArgument
from outrider.fetch.cache import cache_root, free_bytes
from outrider.fetch.reporter import megabytes
from outrider.training.plan import Budget, Estimate, Kind, Stage

if TYPE_CHECKING:  # torch is an extra, and takes seconds to import
    from outrider.training.loop import Report

_RESERVE_BYTES = 2_000_000_000


def train_draft(
    target: Annotated[
        str, typer.Option(help="Model to draft for: folder, hub id, or a name from `outrider models list`.")
    ],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the finished draft.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, one JSON string or object with `messages` or `prompt` a line; unset: the built-in set."
        ),
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Time to spend, resumed runs included.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Answer tokens to train on, in place of --hours.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder of answers and checkpoints; unset: in the cache.")] = None,
    stage: Annotated[
        Stage,
        typer.Option(
            help="answers or training alone: two processes can share a work folder and work at the same time."
        ),
    ] = Stage.BOTH,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the work folder holds.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of prompts, draws, weights and order.")] = 0,
    draft_vocab: Annotated[int, typer.Option(help="Ids that a head can propose.")] = 8192,
    kind: Annotated[
        Kind, typer.Option(help="eagle3: a head on the target's features; lm: a copy of the target, few layers deep.")
    ] = Kind.EAGLE3,
    layers: Annotated[int, typer.Option(min=1, help="Layers that --kind lm keeps.")] = 6,
    disk_limit: Annotated[
        float | None,
        typer.Option(
            min=0, help="GB for the target's features and distributions; beyond it they are computed anew. Unset: room."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads; unset: all cores.")] = None,
) -> None:
    """Train a draft from a target alone, on the target's own answers.

    Interrupt it at any time; --resume goes on.
    """
    if (hours is None) == (tokens is None):
        raise InvalidArgument("hours", "and --tokens: give one of the two")
    if (hours or tokens or 0) <= 0:
        raise InvalidArgument("hours", "or --tokens must be positive")
    import torch

    from outrider.training.run import Options, Run
    from outrider.training.store import Store

    if threads is not None:
        torch.set_num_threads(threads)
    with Downloads() as downloads:
        found = models.resolve(target, reporter=downloads)
    if found.folder is None:
        raise InvalidArgument("target", f"{target} has no weights to learn from")
    work_folder = work or cache_root() / "training" / found.model_id.split("/")[-1].lower()
    disk_bytes = _disk_bytes(disk_limit, work_folder, Store(work_folder).used_bytes)
    options = Options(
        target=found,
        out=out_folder,
        work=work_folder,
        prompts=prompts,
        budget=Budget(hours, tokens, stage),
        seed=seed,
        draft_vocab=draft_vocab,
        kind=kind,
        layers=layers,
        disk_bytes=disk_bytes,
        device=device,
        resume=resume,
    )
    with _Display(work_folder, disk_bytes) as display:
        try:
            Run(options, display)()
        except KeyboardInterrupt:
            out.print("interrupted; the same command with --resume goes on")
            raise typer.Exit(130) from None
    out.print(f"the answers are in {options.work}" if stage is Stage.ANSWERS else f"the draft is in {out_folder}")


def _disk_bytes(limit_gb: float | None, work: Path, used_bytes: int) -> int:
    """What shards may take, those included that are there.

    Raises:
        InvalidArgument: the disk has not that much, or no room for checkpoints.
    """
    room = free_bytes(work) - _RESERVE_BYTES
    if room < 0:
        raise InvalidArgument(
            "work", f"{work} has {megabytes(free_bytes(work))} free; checkpoints need {megabytes(_RESERVE_BYTES)}"
        )
    room += used_bytes
    if limit_gb is None:
        return room
    if limit_gb * 1e9 > room:
        raise InvalidArgument("disk_limit", f"{limit_gb:g} GB: {work} has room for {megabytes(room)}")
    return int(limit_gb * 1e9)


class _Display:
    """Progress bars, and a line for each evaluation."""

    def __init__(self, work: Path, disk_bytes: int) -> None:
        self._work = work
        self._disk_bytes = disk_bytes
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=out)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def planned(self, estimate: Estimate) -> None:
        free = free_bytes(self._work)
        out.print(f"  {estimate}; work folder {self._work} ({megabytes(free)} free)")
        if estimate.disk_bytes > self._disk_bytes:
            out.print(
                f"  of that {megabytes(self._disk_bytes)} are kept; what the target computes along the other answers "
                "is computed again whenever they are trained on, which takes longer than estimated"
            )

    def progress(self, stage: str, share: float, detail: str) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=1.0, detail=detail)
        self._bar.update(self._tasks[stage], completed=share, detail=detail)

    def evaluated(self, report: Report) -> None:
        out.print(f"  {report.seconds:5.0f} s, {report.tokens:9,} tokens, loss {report.loss:.3f}: {report.acceptance}")
