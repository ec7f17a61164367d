"""The coordinator's command line: what it refuses before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.arguments import parse
from coordinator.options import open_to_strangers, url
from draft_service.config import parse as parse_draft
from outrider.certs.issue import issue
from outrider.errors import InvalidArgument
from target_service.config import parse as parse_target


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    issue(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--host", "0.0.0.0"], "host: 0.0.0.0 is not loopback"),
        (["--target", "127.0.0.1:1,target:50052"], "target: target is not loopback"),
        (["--draft", "draft:50051"], "draft: draft is not loopback"),
        (["--ssl-certfile", "x"], "ssl_keyfile: certificate and key go together"),
        (["--ssl-ca-certs", "x"], "ssl_ca_certs: needs ssl_certfile"),
        (["--link-ssl-ca-certs", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_plain_text_on_a_network_and_half_a_certificate_are_refused(
    arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards prompts against a forgotten flag: one line, status 2, nothing started."""
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert wanted in capsys.readouterr().err


def test_certificates_or_a_word_let_it_start(certs: Path) -> None:
    far = ["--host", "0.0.0.0", "--target", "target:50052", "--draft", "draft:50051"]
    plain = parse([*far, "--insecure"])
    assert url(plain.addresses) == "http://0.0.0.0:8000/v1"
    doors = ["--ssl-certfile", str(certs / "coordinator.pem"), "--ssl-keyfile", str(certs / "coordinator.key")]
    encrypted = parse([*far, *doors, "--link-ssl-ca-certs", str(certs / "ca.pem")])
    assert url(encrypted.addresses) == "https://0.0.0.0:8000/v1"
    assert encrypted.decoder.tls.ca_certs == str(certs / "ca.pem")
    assert encrypted.addresses.tls.ca_certs is None


@pytest.mark.parametrize("flags", [["--drain-seconds", "900"], ["--request-timeout-s", "900"]])
def test_serve_waits_for_all_that_may_still_run(flags: list[str]) -> None:
    """Guards answers against Serve's own limit, which would kill the coordinator beneath them."""
    assert parse(flags).grace_s == 900


def test_an_open_door_on_a_network_is_said(certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the operator who forgot the keys; on loopback, with keys or client certificates nobody is warned."""
    keys = tmp_path / "keys"
    keys.write_text("alice key-of-alice")
    far = ["--host", "0.0.0.0", "--insecure"]
    doors = ["--ssl-certfile", str(certs / "coordinator.pem"), "--ssl-keyfile", str(certs / "coordinator.key")]
    assert open_to_strangers(parse(far))
    assert open_to_strangers(parse([*far, *doors]))
    assert not open_to_strangers(parse([]))
    assert not open_to_strangers(parse([*far, *doors, "--ssl-ca-certs", str(certs / "ca.pem")]))
    assert not open_to_strangers(parse([*far, "--api-key-file", str(keys)]))
    monkeypatch.setenv("OUTRIDER_API_KEY", "key-of-all")
    assert not open_to_strangers(parse(far))


@pytest.mark.parametrize("read", [parse_draft, parse_target])
def test_services_want_a_certificate_or_a_word_off_loopback(read: object, certs: Path) -> None:
    model = ["--model", "stub:markov", "--host", "0.0.0.0"]
    with pytest.raises(InvalidArgument, match=r"host: 0\.0\.0\.0 is not loopback"):
        read(model)  # type: ignore[operator]
    assert read([*model, "--insecure"]).insecure  # type: ignore[operator]
    files = ["--ssl-certfile", str(certs / "draft.pem"), "--ssl-keyfile", str(certs / "draft.key")]
    assert read([*model, *files]).tls.certfile  # type: ignore[operator]
