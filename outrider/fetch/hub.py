"""The model hub: what it says about a model, what is cached of it, and the download.

`huggingface_hub` reads HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the proxy and certificate variables by
itself; nothing here reads them a second time. The download runs as a process of its own
(`python -m outrider.fetch.hub`), so that Ctrl-C ends it at once.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants

from outrider.errors import ModelUnavailable
from outrider.fetch import child, hub_errors
from outrider.fetch.cache import existing_parent, free_bytes, require_room
from outrider.fetch.folder import PICKLED, has_tokenizer, is_head, missing_files, read_json
from outrider.fetch.reporter import Plan, Progress, Reporter

# The library would tell the hub what runs it, and ask for a list to know that by; Outrider sends no telemetry.
constants.HF_HUB_DISABLE_TELEMETRY = True

# Weights as safetensors, the configuration and the tokenizer, all at the top of the repository: no pickles, no other
# framework's weights, no second copy of the same ones.
WANTED = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "LICENSE*",
    "README.md",  # names the licence
)
UNWANTED = ("*/*", "consolidated*", "adapter_*", "*.fp16.*", "*.fp32.*", "*.bf16.*")
_SOURCE_CODE = ("*.py",)


@dataclass(frozen=True, slots=True)
class Repository:
    """A model as the hub describes it.

    Attributes:
        model_id: `owner/name`.
        revision: The commit that branch or tag names now.
        licence: The hub's identifier; "unknown" when the model card states none.
        gated: Whether its terms have to be accepted before it can be fetched.
        download_bytes: Size of the wanted files.
        weight_bytes: Size of the weights among them; 0 when there are none that can be used.
        pickled: Whether the weights are those of a draft head that is published as `PICKLED` alone.
    """

    model_id: str
    revision: str
    licence: str
    gated: bool
    download_bytes: int
    weight_bytes: int
    pickled: bool = False


def cache_folder() -> Path:
    """Where the hub's library keeps models (HF_HUB_CACHE, else HF_HOME/hub)."""
    return Path(constants.HF_HUB_CACHE)


def endpoint() -> str:
    """The hub's address (HF_ENDPOINT)."""
    return constants.ENDPOINT


def cached(model_id: str, revision: str | None) -> Path | None:
    """The complete snapshot of a model in the cache, or None; asks no network."""
    config = huggingface_hub.try_to_load_from_cache(model_id, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if not missing_files(folder) and has_tokenizer(folder) else None


def all_cached() -> list[tuple[str, Path]]:
    """Every model with a complete `main` snapshot in the cache, by id."""
    folders = sorted(cache_folder().glob("models--*"))
    ids = (folder.name.removeprefix("models--").replace("--", "/") for folder in folders)
    return [(model_id, snapshot) for model_id in ids if (snapshot := cached(model_id, None)) is not None]


def inspect(model_id: str, revision: str | None, *, timeout_s: float) -> Repository:
    """Ask the hub about a model, within `timeout_s` whatever the network does.

    Raises:
        ModelUnavailable: one line with its remedy.
    """
    found: list[Any] = []

    def ask() -> None:
        try:
            api = huggingface_hub.HfApi()
            found.append(api.model_info(model_id, revision=revision, timeout=timeout_s, files_metadata=True))
        except Exception as error:
            found.append(error)

    # A thread, because a name server that does not answer is outside every timeout that an HTTP library offers.
    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(timeout_s + 1.0)
    answer = found[0] if found else TimeoutError(f"no answer within {timeout_s:.0f} s")
    if isinstance(answer, Exception):
        raise ModelUnavailable(_explain(answer, model_id, revision)) from answer
    return _repository(model_id, answer)


def config(model_id: str, repository: Repository) -> dict[str, Any]:
    """The model's `config.json`, fetched into the cache when it is not there yet (a few KB).

    Raises:
        ModelUnavailable: one line with its remedy.
    """
    try:
        path = huggingface_hub.hf_hub_download(model_id, "config.json", revision=repository.revision)
    except Exception as error:
        raise ModelUnavailable(_explain(error, model_id, repository.revision)) from error
    return read_json(Path(path))


def download(repository: Repository, revision: str | None, reporter: Reporter, *, remote_code: bool = False) -> Path:
    """Fetch what is still missing of a model and return its snapshot folder.

    Args:
        repository: From `inspect`.
        revision: As the user gave it, so that the cache remembers the branch or tag.
        reporter: Told the plan first, then the progress in bytes.
        remote_code: Also fetch the repository's Python files.

    Raises:
        ModelUnavailable: one line with its remedy.
    """
    model_id, place = repository.model_id, cache_folder()
    if not repository.weight_bytes:
        raise ModelUnavailable(f"{model_id} has no safetensors weights; take a repository that has, or convert it")
    if repository.gated and not huggingface_hub.get_token():
        raise ModelUnavailable(hub_errors.gated(model_id, f"{endpoint()}/{model_id}"))
    blobs = place / ("models--" + model_id.replace("/", "--")) / "blobs"
    remaining = max(0, repository.download_bytes - _size(blobs))
    reporter.plan(
        Plan(
            model_id=model_id,
            revision=repository.revision,
            licence=repository.licence,
            source=endpoint(),
            download_bytes=remaining,
            disk_bytes=remaining,
            place=existing_parent(place) if not place.exists() else place,
            free_bytes=free_bytes(place),
        )
    )
    require_room(remaining, place, "set HF_HOME to another disk")
    return _run_download(repository, revision, blobs, reporter, remote_code=remote_code)


def _run_download(
    repository: Repository, revision: str | None, blobs: Path, reporter: Reporter, *, remote_code: bool
) -> Path:
    answer: dict[str, str] = {}
    arguments = {
        "model_id": repository.model_id,
        "revision": revision,
        "remote_code": remote_code,
        "pickled": repository.pickled,
    }
    before = _size(blobs)
    total = max(repository.download_bytes, before)
    task = f"downloading {repository.model_id}"
    try:
        ended = child.run(
            [sys.executable, "-m", "outrider.fetch.hub", json.dumps(arguments)],
            on_line=lambda line: answer.update(json.loads(line)),
            on_tick=lambda: reporter.progress(Progress(task, min(_size(blobs), total), total, "B")),
        )
    except KeyboardInterrupt:
        raise ModelUnavailable(f"{task} was interrupted; the same command goes on where it stopped") from None
    if "folder" in answer:
        reporter.progress(Progress(task, total, total, "B"))
        return Path(answer["folder"])
    reason = answer.get("error") or f"{task} failed ({ended.last_line}); the same command goes on where it stopped"
    raise ModelUnavailable(reason)


def _repository(model_id: str, info: Any) -> Repository:
    everything = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    sizes = {name: size for name, size in everything.items() if _wanted(name)}
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    pickled = not weights and PICKLED in everything and is_head(info.config or {})
    if pickled:
        sizes[PICKLED] = weights[PICKLED] = everything[PICKLED]
    card = info.card_data.to_dict() if info.card_data is not None else {}
    licence = card.get("license_name") or card.get("license") or "unknown"
    return Repository(
        model_id=model_id,
        revision=info.sha or "unknown",
        licence=licence if isinstance(licence, str) else ", ".join(licence),
        gated=bool(info.gated),
        download_bytes=sum(sizes.values()),
        weight_bytes=sum(weights.values()),
        pickled=pickled,
    )


def _wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WANTED) and not any(fnmatch(name, p) for p in UNWANTED)


def _size(blobs: Path) -> int:
    """Bytes in a blob folder, unfinished files included; those may vanish while we look."""
    total = 0
    for path in blobs.glob("*"):
        try:
            total += path.stat().st_blocks * 512 if path.suffix == ".incomplete" else path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _explain(error: BaseException, model_id: str, revision: str | None) -> str:
    return hub_errors.explain(error, model_id, revision, endpoint(), cache_folder())


def _main(arguments: dict[str, Any]) -> int:
    """The child's side: one JSON line with the folder, or with the reason why there is none."""
    model_id, revision = arguments["model_id"], arguments["revision"]
    more = (*(_SOURCE_CODE if arguments["remote_code"] else ()), *([PICKLED] if arguments["pickled"] else ()))
    try:
        folder = huggingface_hub.snapshot_download(
            model_id, revision=revision, allow_patterns=[*WANTED, *more], ignore_patterns=list(UNWANTED)
        )
        answer = {"folder": folder}
    except Exception as error:
        answer = {"error": _explain(error, model_id, revision)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0 if "folder" in answer else 1


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
