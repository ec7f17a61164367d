"""Model names and the lines a user reads when a model cannot be had. Downloads themselves: tests/service."""

from __future__ import annotations

import errno
import json
import logging
import ssl
from pathlib import Path

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from outrider import models
from outrider.errors import ModelUnavailable
from outrider.fetch import cache as user_cache
from outrider.fetch import hub, hub_errors, wheel
from outrider.fetch.folder import licence_of, missing_files
from outrider.fetch.reporter import LogReporter, Plan, Progress
from tests.fake_hub import COMMIT, FakeHub


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"w" * 64)
    return folder


def refusal(name: str, **options: str) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        models.resolve(name, **options)  # type: ignore[arg-type]
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_local_folder_resolves_to_itself(cache: Path) -> None:
    """Guards against a folder being looked up on the hub."""
    folder = model_folder(cache / "mine")
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: own\n---\n")
    found = models.resolve(str(folder))
    assert found == models.ResolvedModel(str(folder), "mine", "", "own", "folder")
    assert found.folder == folder


def test_a_relative_path_that_is_missing_is_no_hub_id(cache: Path) -> None:
    """Guards against a typing error in a path ending as 'repository not found'."""
    assert "nowhere is not a folder" in refusal("./nowhere")


def test_a_folder_with_a_missing_shard_names_it(cache: Path) -> None:
    """Guards against a half-copied model failing deep inside the loader."""
    folder = model_folder(cache / "mine")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    assert "model-2.safetensors missing" in refusal(str(folder))


@pytest.mark.parametrize(
    ("name", "role", "source"),
    [("stub:markov?p=1", "target", "stub"), ("ngram", "draft", "builtin"), ("suffix", "draft", "builtin")],
)
def test_names_without_weights_pass_through(name: str, role: models.Role, source: str) -> None:
    """Guards against stubs and model-free drafts touching the network."""
    found = models.resolve(name, role=role)
    assert (found.path, found.source, found.folder) == (name, source, None)


def test_default_depends_on_the_role() -> None:
    """Guards against the draft silently being the target's model."""
    assert models.canonical("default", "target") == "smollm2-135m"
    assert models.canonical("default", "draft") == "ngram"


def test_a_converted_entry_is_found_without_any_network(cache: Path) -> None:
    """Guards against a warm start that waits for a hub."""
    entry = models.ENTRIES["smollm2-135m"]
    folder = model_folder(wheel.folder_of("smollm2-135m", entry.package, cache / "outrider"))
    found = models.resolve("default")
    assert (found.path, found.source, found.licence) == (str(folder), "package", "apache-2.0")
    assert models.list_models()[0].path == folder


def test_an_unconverted_entry_is_listed_with_its_size(cache: Path) -> None:
    """Guards against a list that downloads, or hides what is not there yet."""
    assert models.list_models() == [
        models.Listing("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0", 269_060_552, None)
    ]


def test_an_entry_can_be_planned_for_before_it_is_downloaded(cache: Path) -> None:
    """Guards against a memory plan that needs the weights first."""
    found = models.describe("default")
    assert (found.weight_bytes, found.cached, found.config["num_hidden_layers"]) == (269_060_552, False, 30)


def test_a_hub_model_is_described_without_its_weights(fake_hub: FakeHub) -> None:
    """Guards against fetching gigabytes to print a table; only safetensors at the top count as weights."""
    found = models.describe("tiny/model")
    assert (found.weight_bytes, found.revision, found.licence, found.cached) == (4096, COMMIT, "mit", False)
    assert found.config["vocab_size"] == 8
    assert not any("safetensors" in request for request in fake_hub.served)


def test_the_hub_is_asked_for_nothing_but_the_model(fake_hub: FakeHub) -> None:
    """Guards "no telemetry": the hub's library also fetches a list by which to tell what runs it."""
    models.describe("tiny/model")
    assert fake_hub.served and all("tiny/model" in request for request in fake_hub.served)


def test_an_unknown_id_says_where_it_was_looked_for(fake_hub: FakeHub) -> None:
    """Guards against a traceback for a typing error."""
    line = refusal("tiny/modle")
    assert "tiny/modle was not found" in line and "check the spelling" in line and "HF_TOKEN" in line


def test_an_unknown_revision_is_named(fake_hub: FakeHub) -> None:
    """Guards against falling back to another revision."""
    assert "no revision 'v9'" in refusal("tiny/model", revision="v9")


def test_a_gated_model_without_a_token_says_how_to_get_one(fake_hub: FakeHub) -> None:
    """Guards against a download that starts and fails with 401."""
    fake_hub.models["tiny/model"].gated = True
    line = refusal("tiny/model")
    assert "gated" in line and f"{fake_hub.url}/tiny/model" in line and "HF_TOKEN" in line


def test_a_failing_hub_says_try_later(fake_hub: FakeHub) -> None:
    """Guards against blaming the user for an outage."""
    fake_hub.failing_status = 503
    assert "503" in refusal("tiny/model")


def test_a_repository_without_safetensors_is_refused_before_the_download(fake_hub: FakeHub) -> None:
    """Guards against unpickling weights, and against downloading what cannot be loaded."""
    files = fake_hub.models["tiny/model"].files
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    assert "no safetensors weights" in refusal("tiny/model")


def test_too_little_disk_is_refused_before_the_download(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a download that cannot end."""
    monkeypatch.setattr(user_cache, "free_bytes", lambda _path: 100)
    line = refusal("tiny/model")
    assert "disk full" in line and "HF_HOME" in line


def test_a_hub_that_is_away_names_the_switches(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an unexplained connection error. Nothing listens on port 1 of loopback."""
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    line = refusal("tiny/model")
    assert "cannot be reached" in line and "HTTPS_PROXY" in line and "not in the cache" in line


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk full"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot write to"),
        (ssl.SSLCertVerificationError("certificate verify failed: unable to get local issuer"), "SSL_CERT_FILE"),
        (type("ProxyError", (Exception,), {})("403 Forbidden"), "HTTPS_PROXY"),
        (TimeoutError("timed out"), "cannot be reached"),
        (RuntimeError("first line\nsecond line"), "goes on where it stopped"),
    ],
)
def test_every_failure_is_one_line_with_its_remedy(error: Exception, expected: str, tmp_path: Path) -> None:
    """Guards against tracebacks, wrapped as the hub's library wraps them."""
    wrapped = OSError("could not load")
    wrapped.__cause__ = error
    line = hub_errors.explain(wrapped, "tiny/model", None, "http://hub", tmp_path)
    assert expected in line and "\n" not in line


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OUTRIDER_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/outrider"),
        ({}, str(Path("~/.cache/outrider").expanduser())),
    ],
)
def test_the_cache_lies_where_the_environment_says(environ: dict[str, str], expected: str) -> None:
    """Guards against writing to a home folder that the user moved away from."""
    assert user_cache.cache_root(environ) == Path(expected)


def test_an_unwritable_cache_is_one_line(tmp_path: Path) -> None:
    """Guards against a traceback on a read-only home."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(ModelUnavailable, match="OUTRIDER_CACHE"),
        user_cache.exclusive("x", LogReporter(), tmp_path / "file"),
    ):
        pass


def test_progress_is_logged_sparingly(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Guards against a line of log per chunk."""
    caplog.set_level(logging.INFO)
    reporter = LogReporter(interval_s=3600)
    reporter.plan(Plan("tiny/model", COMMIT, "mit", "hub", 10**9, 2 * 10**6, tmp_path, 10**10))
    for done in range(100):
        reporter.progress(Progress("downloading", done, 100, "B"))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "tiny/model (mit, revision 0123456789ab) from hub",
        "downloading",
    ]
    assert "1.0 GB to download, 2.0 MB of disk" in caplog.text and "10.0 GB free" in caplog.text


def test_a_card_without_front_matter_has_no_licence(tmp_path: Path) -> None:
    """Guards against reading a licence out of prose."""
    (tmp_path / "README.md").write_text("# model\n---\nlicense: prose\n---\n")
    assert licence_of(tmp_path) == "unknown"
    assert missing_files(tmp_path) == ["config.json", "model.safetensors"]
