"""`outrider generate`: one prompt to a running stack."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from outrider.client import Answer, Client, request
from outrider.commands.options import Authority, CaCerts, ClientCert, ClientKey
from outrider.console import show_pieces
from outrider.local.stack import running_state
from outrider.rpc.credentials import TlsFiles


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
    ssl_ca_certs: CaCerts = None,
    ssl_certfile: ClientCert = None,
    ssl_keyfile: ClientKey = None,
    authority: Authority = None,
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
    tls = TlsFiles(certfile=ssl_certfile, keyfile=ssl_keyfile, ca_certs=ssl_ca_certs)
    with Client(address or running_state().grpc, tls, authority) as client:
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
