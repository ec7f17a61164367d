"""A whole pair over mutual TLS, and what becomes of it when certificates change."""

from __future__ import annotations

from pathlib import Path

from coordinator.decoder import Decoder
from outrider.certs.issue import issue
from outrider.rpc.credentials import TlsFiles
from tests.service.stack import answer, config, draft_service, request, target_service, until

TOKENS = [5 + i * i % 90 for i in range(60)]
SCRIPT = "stub:script?tokens=" + ",".join(map(str, TOKENS))


def server(folder: Path, part: str) -> dict[str, str]:
    return {
        "ssl_certfile": str(folder / f"{part}.pem"),
        "ssl_keyfile": str(folder / f"{part}.key"),
        "ssl_ca_certs": str(folder / "ca.pem"),
    }


def client(folder: Path, part: str = "coordinator") -> TlsFiles:
    return TlsFiles(
        certfile=str(folder / f"{part}.pem"), keyfile=str(folder / f"{part}.key"), ca_certs=str(folder / "ca.pem")
    )


async def test_a_pair_over_mutual_tls_answers_and_outlives_new_files(tmp_path: Path) -> None:
    """Guards the links end to end: a wrong authority is named, right files are taken up without a restart."""
    known, foreign, own = tmp_path / "known", tmp_path / "foreign", tmp_path / "own"
    issue(known)
    issue(foreign)
    issue(own)  # of an authority that the services do not know, at first
    async with (
        target_service(SCRIPT, **server(known, "target")) as target,
        draft_service("ngram", prompt_lookup_min=1, **server(known, "draft")) as draft,
    ):
        made = Decoder(config(target, draft, tls=client(own)))
        await made.start()
        try:
            link = made._target.links[0]
            await until(lambda: "not answered yet" not in link.reason)
            assert not made.state.targets_up
            assert str(target) in link.reason
            for name in ("ca.pem", "coordinator.key", "coordinator.pem"):
                (own / name).write_bytes((known / name).read_bytes())
            await until(lambda: made.state.targets_up == 1 and made.state.draft is not None)
            other = Decoder(config(target, tls=client(known, "probe")))
            await other.start()
            await until(lambda: "only outrider-coordinator may open a link" in other._target.links[0].reason)
            await other.close()
            given = await answer(made, request([1, 2, 3], 20, temperature=0.0))
            assert given.tokens == TOKENS[:20]
        finally:
            await made.close()
