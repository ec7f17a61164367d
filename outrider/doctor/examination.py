"""All checks of a stack on this machine, in the order in which one would look."""

from __future__ import annotations

import resource
import shutil
import socket
import sys

from outrider import models, mtp
from outrider.doctor import machine, pair, versions
from outrider.doctor.finding import Finding
from outrider.fetch.cache import cache_root, existing_parent, free_bytes
from outrider.local import devices
from outrider.local.options import StackOptions
from outrider.local.stack import make_plan
from outrider.local.state import read, state_file


def examine(options: StackOptions) -> list[Finding]:
    """Looks at everything that `outrider up` with these options would need; starts and downloads nothing."""
    cards = devices.cards()
    findings = machine.check_cards(cards, has_driver_tool=shutil.which("nvidia-smi") is not None)
    runtime = versions.installed("nvidia-cuda-runtime") or versions.installed("nvidia-cuda-runtime-cu12")
    cuda = machine.check_cuda(cards, versions.installed("torch"), runtime)
    findings += [cuda] if cuda is not None else []
    findings.append(versions.check_python(sys.version_info[:2]))
    findings += versions.check_versions()

    target = models.canonical(options.target, "target")
    draft = mtp.of_target(models.canonical(options.draft, "draft"), target)
    sides = (
        pair.check_model(target, options.revision, "target"),
        pair.check_model(draft, options.draft_revision, "draft"),
    )
    findings += [finding for side in sides for finding in side.findings]
    if sides[0].description is not None and sides[1].description is not None:
        described = (sides[0].description, sides[1].description)
        findings.append(
            pair.check_vocabularies(target, draft, described, mismatch_allowed=options.allow_vocab_mismatch)
        )
        findings += pair.check_memory(lambda: make_plan(options))

    cache = cache_root()
    stack = read(state_file(cache))
    ports = (
        ("port", options.host, options.port),
        ("grpc-port", options.host, options.grpc_port),
        ("target-port", "127.0.0.1", options.target_port),
        ("draft-port", "127.0.0.1", options.draft_port),
    )
    findings.append(machine.check_ports(ports, _taken, stack.http if stack else ""))
    findings.append(machine.check_files(*resource.getrlimit(resource.RLIMIT_NOFILE)))
    needed = sum(side.download_bytes for side in sides)
    findings.append(machine.check_disk(cache, existing_parent(cache), free_bytes(cache), needed))
    return findings


def _taken(host: str, port: int) -> str | None:
    """Why this port cannot be taken, or None."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None
