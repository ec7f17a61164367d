"""What several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Target = Annotated[str, typer.Option(help="Served model: folder, hub id, a name from `outrider models list`, stub:...")]
Draft = Annotated[str, typer.Option(help="Draft model over the same vocabulary, `ngram`, `suffix`, or `none`.")]
Device = Annotated[str, typer.Option(help="GPU number as in nvidia-smi, several (0,1), a UUID, cpu, or auto.")]
Dtype = Annotated[str, typer.Option(help="Number format: auto, bfloat16, float16, float32 or float64.")]
CaCerts = Annotated[str | None, typer.Option(help="PEM file with the server's authority: TLS.")]
ClientCert = Annotated[str | None, typer.Option(help="PEM file with the certificate to show, for mutual TLS.")]
ClientKey = Annotated[str | None, typer.Option(help="PEM file with its key.")]
Authority = Annotated[str | None, typer.Option(help="Name in the server's certificate, if not the address's host.")]
Speculative = Annotated[str, typer.Option(help="Drafted tokens per round: a number, or auto.")]
