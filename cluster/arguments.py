"""The command line of `python -m cluster`, and the same options as the arguments of a Serve configuration file."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.plan import Plan, ServicePlan
from cluster.resources import Resources, device
from cluster.resources import parse as resources
from coordinator import arguments as coordinator
from coordinator.flags import HTTP_PORT
from draft_service import config as draft_service
from outrider import models, mtp
from outrider.certs.names import Part
from outrider.errors import InvalidArgument
from target_service import config as target_service

APPLICATION = "outrider"
_GPU_SHARE = 0.9
_OWN = ("--target", "--draft", "--host", "--port", "--model", "--device")
"""What the flags of a part may not say: it is decided for it."""


def parser() -> argparse.ArgumentParser:
    """Of `outrider deploy`."""
    made = argparse.ArgumentParser(
        prog="outrider deploy",
        description=(
            "Serves a pair on a Ray cluster: actors host the services, Ray Serve runs the coordinators. Outrider has "
            "to be installed on every node. Only this command joins a cluster; it touches its own application only."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    action = made.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_true", help="say how the application is; status 1 unless all serves")
    action.add_argument("--remove", action="store_true", help="end the application and all that belongs to it")
    action.add_argument("--restart", action="store_true", help="start its parts anew, one after the other")
    add = made.add_argument
    add("--json", action="store_true", help="with --status: one JSON object, for programs")
    add(
        "--address", default="auto", help="of the cluster: auto (RAY_ADDRESS, or on this machine), HOST:PORT, ray://..."
    )
    add("--name", default=APPLICATION, help="of the Serve application; several can run beside one another")
    add("--route-prefix", default="/", help="below which the API answers")
    add("--host", default="127.0.0.1", help="address of Serve's HTTP door, if Serve does not run yet")
    add("--port", type=int, default=HTTP_PORT, help="of Serve's HTTP door, if Serve does not run yet")
    add("--placement-timeout-s", type=float, default=120.0, help="how long to wait for room on the cluster")
    add("--start-timeout-s", type=float, default=1800.0, help="how long to wait until everything serves")
    _plan_options(made)
    return made


def _plan_options(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add("--target", default="default", help="served model: folder on every node, hub id, named model, stub:...")
    add("--draft", default="default", help="draft model over the same vocabulary, mtp, ngram, suffix, or none")
    add("--target-replicas", type=int, default=1, help="each holds the whole target")
    add("--draft-replicas", type=int, default=1, help="coordinators are spread over them")
    add("--coordinator-replicas", default="1", help="a number, or a range such as 1-4 for Serve to scale in")
    for role in ("target", "draft"):
        help_text = f'of one {role}, as JSON: {{"GPU": 1, "accelerator_type": "H100"}}; default: a GPU if there is any'
        add(f"--{role}-resources", help=help_text)
    add("--coordinator-resources", default='{"CPU": 1}', help="of one coordinator, as JSON")
    add("--certs", help="folder made by `outrider certs`, the same on every node and here: TLS on all links and doors")
    add("--insecure", action="store_true", help="plain text between nodes is meant: the cluster's network is trusted")
    for module in ("target_service", "draft_service", "coordinator"):
        role = module.removesuffix("_service")
        add(f"--{role}-flags", default="", help=f"further flags, as `python -m {module} --help` lists them")


def plan(given: argparse.Namespace, *, has_gpus: bool) -> Plan:
    """
    Args:
        given: from `parser`.
        has_gpus: whether the cluster has any.

    Raises:
        InvalidArgument: naming the option.
    """
    target_name = models.canonical(given.target, "target")
    draft_name = mtp.of_target(models.canonical(given.draft, "draft"), target_name)
    least, _, most = given.coordinator_replicas.partition("-")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise InvalidArgument("coordinator-replicas", f"{given.coordinator_replicas!r} is not a number or a range")
    options = coordinator.parse([*_encrypted("coordinator", given), *_flags("coordinator", given.coordinator_flags)])
    return Plan(
        name=given.name,
        target=_target(given, target_name, has_gpus=has_gpus),
        draft=None if draft_name == "none" else _draft(given, draft_name, target_name, has_gpus=has_gpus),
        options=options,
        least_coordinators=int(least),
        most_coordinators=int(most or least),
        coordinator_resources=resources("coordinator-resources", given.coordinator_resources),
        certs=given.certs,
        insecure=given.insecure,
    )


def from_mapping(arguments: Mapping[str, Any]) -> argparse.Namespace:
    """The options of a configuration file: `{"target": "...", "target-replicas": 2, "target-resources": {...}}`.

    Raises:
        InvalidArgument: an option that does not exist, or a value that it does not take.
    """
    reader = argparse.ArgumentParser(prog="args", allow_abbrev=False, exit_on_error=False, add_help=False)
    reader.add_argument("--name", default=APPLICATION)
    _plan_options(reader)
    words = []
    for name, value in arguments.items():
        if isinstance(value, bool):
            words += [f"--{name.replace('_', '-')}"] if value else []
            continue
        words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    try:
        given, unknown = reader.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise InvalidArgument("args", str(error)) from None
    if unknown:
        raise InvalidArgument("args", f"unknown: {', '.join(word for word in unknown if word.startswith('--'))}")
    return given


def _target(given: argparse.Namespace, model: str, *, has_gpus: bool) -> ServicePlan:
    wanted = _resources("target-resources", given.target_resources, model, has_gpus=has_gpus)
    words = ["--model", model, *_placed(wanted), *_encrypted("target", given), *_flags("target", given.target_flags)]
    return ServicePlan(config=target_service.parse(words), replicas=given.target_replicas, resources=wanted)


def _draft(given: argparse.Namespace, model: str, target: str, *, has_gpus: bool) -> ServicePlan:
    wanted = _resources("draft-resources", given.draft_resources, model, has_gpus=has_gpus)
    words = ["--model", model, *_placed(wanted), *_encrypted("draft", given)]
    if not _is_weightless(model) and not _is_weightless(target):
        words += ["--embeddings", target]  # of use to heads that share the target's
    words += _flags("draft", given.draft_flags)
    return ServicePlan(config=draft_service.parse(words), replicas=given.draft_replicas, resources=wanted)


def _encrypted(part: Part, given: argparse.Namespace) -> list[str]:
    """The flags of a part for mutual TLS on the links and TLS on the doors, or for meaning neither."""
    words = ["--insecure"] if given.insecure else []
    if given.certs is None:
        return words
    files = [f"{given.certs}/{part}.pem", f"{given.certs}/{part}.key", f"{given.certs}/ca.pem"]
    words += ["--ssl-certfile", files[0], "--ssl-keyfile", files[1]]
    if part != "coordinator":  # its clients are users, who have no certificates
        return [*words, "--ssl-ca-certs", files[2]]
    links = ("--link-ssl-certfile", "--link-ssl-keyfile", "--link-ssl-ca-certs")
    return [*words, *(word for pair in zip(links, files, strict=True) for word in pair)]


def _resources(field: str, given: str | None, model: str, *, has_gpus: bool) -> Resources:
    if given is not None:
        return resources(field, given)
    return {"GPU": 1.0} if has_gpus and not _is_weightless(model) else {"CPU": 1.0}


def _is_weightless(model: str) -> bool:
    return model in models.LOOKUP_DRAFTS or model.startswith(models.STUB_PREFIX)


def _placed(wanted: Resources) -> list[str]:
    gpus = wanted.get("GPU", 0.0)
    share = ["--gpu-memory-utilization", f"{_GPU_SHARE * gpus:g}"] if 0 < gpus < 1 else []
    return ["--device", device(wanted), *share]


def _flags(role: str, text: str) -> Sequence[str]:
    words = shlex.split(text)
    for word in words:
        if word.partition("=")[0] in _OWN:
            raise InvalidArgument(f"{role}-flags", f"{word} is decided by deploy")
    return words
