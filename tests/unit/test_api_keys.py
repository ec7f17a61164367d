"""API keys at both doors."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from coordinator.api_keys import ApiKeys, Caller, Keyring
from coordinator.app import build_app
from coordinator.arguments import parse
from coordinator.front import Front, FrontConfig
from coordinator.prepare import cache_salt
from coordinator.servicer import CoordinatorServicer
from outrider.api_key import VARIABLE
from outrider.errors import InvalidArgument, Status, Unauthenticated
from outrider.local import layout, parts
from outrider.local.options import StackOptions
from outrider.models import ResolvedModel
from outrider.v1 import coordinator_pb2
from tests.scripted_decoder import MODEL, ScriptedDecoder, running_front

HASHED = "sha256:" + hashlib.sha256(b"key-of-bob").hexdigest()
FILE = f"# who may come in\nalice key-of-alice\n\nbob  {HASHED}\nalice second-key\n"
GOOD = {"model": MODEL, "prompt": "hi", "max_tokens": 2}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


@asynccontextmanager
async def doors(file: Path) -> AsyncIterator[tuple[Front, httpx.AsyncClient]]:
    decoder = ScriptedDecoder()
    async with running_front(decoder, FrontConfig(api_keys=ApiKeys.of(str(file), "key-of-all"))) as front:
        transport = httpx.ASGITransport(build_app(lambda: front))
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            yield front, client


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Bearer key-of-alice", "alice"),
        ("Bearer second-key", "alice"),
        ("bearer key-of-bob", "bob"),
        ("Bearer key-of-all", "default"),
        ("", None),
        ("key-of-alice", None),
        ("Basic key-of-alice", None),
        ("Bearer ", None),
        ("Bearer key-of-alic", None),
        ("Bearer key-of-alice2", None),
        ("Bearer " + HASHED, None),  # who reads the file has no key
        ("Bearer \u00e9\udc80", None),
    ],
)
def test_a_key_has_the_name_of_its_line(file: Path, header: str, name: str | None) -> None:
    """Guards the comparison: whole keys, their scheme, and hashes that are no keys."""
    keyring = Keyring(ApiKeys.of(str(file), "key-of-all"))
    if name is None:
        with pytest.raises(Unauthenticated):
            keyring.caller(header)
    else:
        assert keyring.caller(header) == Caller(name, name)


def test_without_keys_everybody_may_come_in_and_headers_keep_prefixes_apart() -> None:
    assert Keyring(ApiKeys()).caller("Bearer x") == Caller("", "Bearer x")
    assert Keyring(ApiKeys.of(None, None)).caller("") == Caller("", "")


def test_keys_of_one_name_share_prefixes_and_those_of_two_do_not(file: Path) -> None:
    """Guards the wall between tenants, and a client's cache when its key is exchanged."""
    keyring = Keyring(ApiKeys.of(str(file), None))
    first, second, other = (
        cache_salt(keyring.caller(f"Bearer {key}").tenant, "") for key in ("key-of-alice", "second-key", "key-of-bob")
    )
    assert first == second != other


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("hidden-key\n", ":1: must be NAME KEY"),
        ("alice a\nbob hidden-key more\n", ":2: must be NAME KEY"),
        ("al/ice hidden-key\n", ":1: must be NAME KEY"),
        ("alice hidden-k\u00e9y\n", ":1: must be NAME KEY"),
        ("alice sha256:hidden-key\n", ":1: sha256: wants 64"),
        ("alice hidden-key\nbob hidden-key\n", ":2: the key of another line"),
    ],
)
def test_a_faulty_file_is_refused_with_its_line_and_without_its_keys(tmp_path: Path, text: str, wanted: str) -> None:
    """An empty file must never open the doors, and no message may show a key."""
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=r"^api_key_file") as raised:
        ApiKeys.of(str(path), None)
    assert wanted in str(raised.value)
    assert "hidden" not in str(raised.value)


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards keys that are withdrawn while the coordinator runs."""
    now = [0.0]
    monkeypatch.setattr("coordinator.api_keys.time.monotonic", lambda: now[0])
    keyring = Keyring(ApiKeys.of(str(file), "key-of-all"))

    def change(text: str) -> None:
        now[0] += 2
        file.write_text(text)
        os.utime(file, ns=(int(now[0] * 1e9), int(now[0] * 1e9)))

    change("carol key-of-carol\n")
    assert keyring.caller("Bearer key-of-carol").name == "carol"
    assert keyring.caller("Bearer key-of-all").name == "default"
    with pytest.raises(Unauthenticated):
        keyring.caller("Bearer key-of-alice")
    change("")
    assert keyring.caller("Bearer key-of-carol").name == "carol"
    with pytest.raises(Unauthenticated):
        keyring.caller("")
    file.unlink()
    now[0] += 2
    assert keyring.caller("Bearer key-of-carol").name == "carol"


def test_keys_are_held_and_sent_as_hashes(file: Path) -> None:
    """Guards what travels to other nodes, and what a log or a dump may show."""
    keys = ApiKeys.of(str(file), "key-of-all")
    for form in (pickle.dumps(keys), repr(keys).encode(), repr(vars(Keyring(keys))).encode()):
        assert b"key-of" not in form
        assert b"second-key" not in form


def test_the_command_line_takes_a_file_and_the_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag takes a key: others could read it in the list of processes."""
    assert parse([]).front.api_keys == ApiKeys()
    monkeypatch.setenv(VARIABLE, "key-of-all")
    keys = parse(["--api-key-file", str(file)]).front.api_keys
    assert [key.name for key in keys.of_file + keys.fixed] == ["alice", "bob", "alice", "default"]
    with pytest.raises(SystemExit):
        parse(["--api-key", "x"])
    monkeypatch.setenv(VARIABLE, "two words")
    with pytest.raises(SystemExit):
        parse([])


def test_up_gives_the_file_to_the_coordinator_and_the_variable_to_no_service(file: Path) -> None:
    """Draft and target serve whoever has a certificate; they need no client's key."""
    options = StackOptions(target="stub:markov", draft="stub:perfect", api_key_file=str(file))
    footprint = layout.Footprint()
    seats = tuple(
        layout.Seat(role, f"stub:{role}", None, None, footprint, None, shared=False) for role in ("target", "draft")
    )
    models = [ResolvedModel(seat.model, seat.model, "", "", "stub") for seat in seats]
    target, draft, coordinator = parts.specs(options, seats, models, parts.Ports(1, 2, 3, 4))
    assert target.environment[VARIABLE] == draft.environment[VARIABLE] == ""
    assert VARIABLE not in coordinator.environment  # it inherits the launcher's
    arguments = coordinator.arguments
    assert arguments[arguments.index("--api-key-file") + 1] == str(file)


async def test_only_health_and_readiness_are_open(file: Path) -> None:
    """Guards every other route, those that do not exist included, before a body is looked at."""
    async with doors(file) as (_, client):
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        closed = ["/v1/models", "/version", "/metrics", "/openapi.json", "/none", "/health/", "/healthy"]
        for path in closed:
            assert (await client.get(path)).status_code == 401, path
        answer = await client.post("/v1/completions", content=b"no JSON", headers={"authorization": "Bearer wrong"})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        assert "wrong" not in answer.text
        key = {"authorization": "Bearer key-of-bob"}
        assert (await client.get("/v1/models", headers=key)).status_code == 200
        assert (await client.post("/v1/completions", json=GOOD, headers=key)).json()["choices"][0]["text"] == "ab"
        exposition = (await client.get("/metrics", headers=key)).text
        assert f'request_rejected_total{{status="401"}} {len(closed) + 1}.0' in exposition


class Call:
    """As much of a gRPC context as Generate looks at."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def time_remaining(self) -> None:
        return None


async def test_grpc_asks_for_the_same_keys(file: Path) -> None:
    """Guards the other door."""
    message = coordinator_pb2.GenerateRequest(text="hi")
    message.params.max_tokens = 2
    async with doors(file) as (front, _):
        servicer = CoordinatorServicer(front)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(Unauthenticated) as raised:
                async for _response in servicer.Generate(message, Call(*metadata)):  # type: ignore[arg-type]
                    pytest.fail("answered")
            assert raised.value.status is Status.UNAUTHENTICATED
        call = Call(("authorization", "Bearer key-of-alice"))
        answers = [response async for response in servicer.Generate(message, call)]  # type: ignore[arg-type]
        assert "".join(answer.text for answer in answers) == "ab"
