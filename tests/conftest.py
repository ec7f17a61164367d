"""Fixtures that several suites share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and for the services that tests start: workers side by side with a pool of threads each
# wait for one another at every product, and tiny models gain nothing from a second thread.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from huggingface_hub import constants

from outrider import models
from outrider.errors import ModelUnavailable
from tests.fake_hub import FakeHub, FakeModel, running_hub

SPEC_BENCH = Path(__file__).parents[2] / "shared" / "data" / "spec_bench.jsonl"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--prompts",
        type=Path,
        default=SPEC_BENCH if SPEC_BENCH.is_file() else None,
        help="JSON lines with `category` and `turns` to take the model tests' prompts from; unset: a built-in set.",
    )
    parser.addoption(
        "--coupled-requests", type=int, default=48, help="seeded requests of the coupled rule's test; 200 in full"
    )
    parser.addoption(
        "--coupled-minutes", type=float, default=15.0, help="after which no more of them begin on the default model"
    )
    parser.addoption(
        "--coupled-dtype", default="auto", help="of the default model; unset: the one that it is served in here"
    )

    chaos = parser.getgroup("chaos", "tests/chaos, run by `make chaos`")
    chaos.addoption("--chaos-requests", type=int, default=50, help="requests at least; 500 in the full form")
    chaos.addoption("--chaos-times", type=int, default=1, help="each kind of fault so often; 10 in the full form")
    chaos.addoption("--chaos-kinds", default="", help="words of the names of faults, separated by commas; unset: all")
    chaos.addoption("--chaos-pair", choices=("stub", "tiny"), default="stub", help="what is served")
    chaos.addoption("--seed", type=int, default=1, help="of the order of faults, and of the requests")
    chaos.addoption("--draft-away-s", type=float, default=30.0, help="how long the draft is away in its own test")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Folder of the default target; tests that need it are skipped, with the reason, where it cannot be had."""
    try:
        folder = models.resolve(models.DEFAULT_TARGET).folder
    except ModelUnavailable as error:
        pytest.skip(f"the default model is not available: {error}")
    assert folder is not None
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of this test's own, for Outrider and for the hub's library, here and in child processes."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "outrider"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    return tmp_path


@pytest.fixture
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub on loopback that this process and its children take for the real one."""
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for proxy in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(proxy, raising=False)
        hub.models["tiny/model"] = FakeModel(
            {
                "config.json": b'{"model_type": "llama", "vocab_size": 8}',
                "tokenizer.json": b"{}",
                "model.safetensors": b"w" * 4096,
                "README.md": b"---\nlicense: mit\n---\n# tiny",
                "pytorch_model.bin": b"p" * 4096,
                "original/consolidated.safetensors": b"o" * 4096,
            }
        )
        yield hub
