"""The `outrider` command."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Annotated

import httpx
import typer
from rich.table import Table
from rich.text import Text

import outrider
from outrider import demo as demonstration
from outrider import models
from outrider.client import Answer, Client, request
from outrider.console import Downloads, Steps, announce, err, out, say, show_comparison, show_pieces, show_plan
from outrider.errors import OutriderError, Unavailable
from outrider.fetch.cache import cache_root
from outrider.fetch.reporter import megabytes
from outrider.local import devices, suggest
from outrider.local.stack import HTTP_PORT, Stack, StackOptions, make_plan, running, running_state
from outrider.local.state import state_file, stop
from outrider.rpc.options import COORDINATOR_PORT, DRAFT_PORT, TARGET_PORT
from outrider.training.command import train_draft

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Split speculative decoding: a draft on a cheap device rides ahead of the served model, exactly.",
)
models_app = typer.Typer(no_args_is_help=True, help="Models that services can load.")
app.add_typer(models_app, name="models")
app.command("train-draft")(train_draft)

_GRACE_S = 10.0
_DOWN_TIMEOUT_S = 30.0

Target = Annotated[str, typer.Option(help="Served model: folder, hub id, a name from `outrider models list`, stub:...")]
Draft = Annotated[str, typer.Option(help="Draft model over the same vocabulary, `ngram`, or `none`.")]
Device = Annotated[str, typer.Option(help="GPU number as in nvidia-smi, several (0,1), a UUID, cpu, or auto.")]
Dtype = Annotated[str, typer.Option(help="Number format: auto, bfloat16, float16, float32 or float64.")]
Speculative = Annotated[str, typer.Option(help="Drafted tokens per round: a number, or auto.")]


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=lambda asked: _version(asked), is_eager=True)] = False,
) -> None:
    """Split speculative decoding: a draft on a cheap device rides ahead of the served model, exactly."""


def main() -> None:
    """Entry point: domain errors become one line and exit code 1."""
    try:
        app()
    except OutriderError as error:
        err.print(Text(f"outrider: {error}", style="red"))
        sys.exit(1)


@app.command()
def up(
    target: Target = "default",
    draft: Draft = "default",
    target_device: Device = "auto",
    draft_device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest stream in tokens; unset: the model's own.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that the API answers to.")] = None,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port of the API.")] = HTTP_PORT,
    grpc_port: Annotated[int, typer.Option(help="Port of the gRPC Generate service.")] = COORDINATOR_PORT,
    draft_port: Annotated[int, typer.Option(help="Port of the draft service (loopback).")] = DRAFT_PORT,
    target_port: Annotated[int, typer.Option(help="Port of the target service (loopback).")] = TARGET_PORT,
    num_speculative_tokens: Speculative = "auto",
    rejection_sample_method: Annotated[str, typer.Option(help="auto, standard or coupled.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of the target on the hub.")] = None,
    draft_revision: Annotated[str | None, typer.Option(help="Revision of the draft on the hub.")] = None,
    allow_vocab_mismatch: Annotated[
        bool, typer.Option(help="Draft with another vocabulary, confined to the ids that agree.")
    ] = False,
) -> None:
    """Serve a pair on this machine; Ctrl-C stops it."""
    options = StackOptions(
        target=target,
        draft=draft,
        target_device=target_device,
        draft_device=draft_device,
        dtype=dtype,
        max_model_len=max_model_len,
        served_model_name=served_model_name,
        host=host,
        port=port,
        grpc_port=grpc_port,
        draft_port=draft_port,
        target_port=target_port,
        num_speculative_tokens=num_speculative_tokens,
        rejection_sample_method=rejection_sample_method,
        revision=revision,
        draft_revision=draft_revision,
        allow_vocab_mismatch=allow_vocab_mismatch,
    )
    seats = make_plan(options)
    show_plan(seats)
    with _TerminationInterrupts(), Downloads() as downloads:
        try:
            with running(options, seats, downloads, say, exclusive=True) as stack:
                announce(stack)
                _serve(stack)
        except KeyboardInterrupt:
            pass
        out.print("stopped")


def _serve(stack: Stack) -> None:
    """Watch the parts until a signal asks to stop; then let the answers under way end."""
    try:
        while True:
            stack.supervisor.watch()
            time.sleep(0.2)
    except KeyboardInterrupt:
        out.print(f"stopping; running answers have {_GRACE_S:g} s to end, a second Ctrl-C stops at once")
        stack.supervisor.stop(_GRACE_S)


@app.command()
def demo(
    target: Target = "default",
    draft: Draft = "default",
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 160,
) -> None:
    """Show speculative decoding at work on a small pair, with and without the draft in one run."""
    options = StackOptions(target=target, draft=draft, port=0, grpc_port=0, draft_port=0, target_port=0)
    cards = devices.cards()
    if cards:
        out.print(f"{len(cards)} GPU(s) found; the demo takes its small pair all the same, since it is quick to fetch")
    steps = Steps(5)
    steps(f"models: target {models.canonical(target, 'target')}, draft {models.canonical(draft, 'draft')}")
    seats = make_plan(options)
    show_plan(seats)
    with _TerminationInterrupts(), Downloads() as downloads:
        models.resolve(options.target, reporter=downloads)
        steps("starting draft service, target service and coordinator, three processes that talk over gRPC")
        with running(options, seats, downloads, say, exclusive=False) as stack, Client(stack.state.grpc) as client:
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


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; a single - reads it from standard input.")],
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; unset: the model's own default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Probability mass kept.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Ids kept by rank.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Generated tokens at most.")] = 128,
    chat: Annotated[bool, typer.Option(help="Render the prompt with the model's chat template.")] = False,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Decode with the target alone.")] = False,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Drafted tokens per round.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    address: Annotated[
        str | None, typer.Option(help="gRPC address of a coordinator; unset: the running stack.")
    ] = None,
) -> None:
    """Answer one prompt with the running stack."""
    message = request(
        sys.stdin.read() if prompt == "-" else prompt,
        chat=chat,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        speculate=not no_speculation,
        num_speculative_tokens=num_speculative_tokens,
    )
    answer = Answer()
    with Client(address or running_state().grpc) as client:
        pieces = client.generate(message, answer)
        if as_json:
            for _ in pieces:
                pass
        else:
            show_pieces(pieces)
    if as_json:
        body = {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "usage": answer.usage,
            "metrics": {"speculative_decoding": answer.metrics, "tokens_per_s": round(answer.tokens_per_s, 2)},
        }
        print(json.dumps(body))  # noqa: T201 - for programs


@app.command()
def status() -> None:
    """Say what the running stack is and how its parts are."""
    state = running_state()
    table = Table("part", "process", "address", box=None)
    addresses = {"coordinator": f"{state.http}, gRPC {state.grpc}", "target": state.target, "draft": state.draft or ""}
    for role, pid in state.parts.items():
        table.add_row(role, str(pid), addresses[role])
    out.print(f"serving {state.model} (process {state.pid}, logs in {state.logs})")
    out.print(table)
    try:
        ready = httpx.get(f"{state.http}/ready", timeout=5.0, trust_env=False)
    except httpx.HTTPError as error:
        raise Unavailable(f"{state.http} does not answer ({error}); see the logs in {state.logs}") from None
    out.print(f"ready: {ready.json()}")
    if ready.status_code != 200:
        raise typer.Exit(1)


@app.command()
def down() -> None:
    """Stop the running stack, and nothing else."""
    out.print("stopped" if stop(state_file(cache_root()), _DOWN_TIMEOUT_S) else "no stack is running")


@models_app.command("list")
def list_models() -> None:
    """The named models, and what is in the hub's cache."""
    table = Table("name", "model", "licence", "weights", "place", box=None)
    for entry in models.list_models():
        place = str(entry.path) if entry.path else "not downloaded"
        table.add_row(entry.name, entry.model_id, entry.licence, megabytes(entry.weight_bytes), place)
    out.print(table)


@models_app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="Hub id or a name from `outrider models list`.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
) -> None:
    """Download a model, or a newer revision of it."""
    with Downloads() as downloads:
        found = models.pull(name, revision=revision, reporter=downloads)
    out.print(f"{found.model_id} ({found.licence}) is in {found.path}")


class _TerminationInterrupts:
    """SIGTERM stops like Ctrl-C: an orderly end either way."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @staticmethod
    def _interrupt(*_: object) -> None:
        raise KeyboardInterrupt


def _version(asked: bool) -> None:
    if asked:
        out.print(f"outrider {outrider.__version__}")
        raise typer.Exit
