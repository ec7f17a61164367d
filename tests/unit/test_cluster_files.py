"""The files under deploy/ray and deploy/kuberay: what Ray's own schemas say of them, and that they fit together."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cluster import arguments
from cluster.plan import Plan
from outrider.certs.issue import issue
from tests.unit.test_project import PINS

# Ray's schemas are imported where they are used, so that what they warn of is not what the tests warn of.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


def read(path: str) -> dict[str, Any]:
    found = yaml.safe_load((DEPLOY / path).read_text())
    assert isinstance(found, dict)
    return found


def hosts(plan: Plan, nodes: Mapping[str, Mapping[str, float]]) -> None:
    """Fails unless each kind of node has room for what is meant for it."""
    for kind, wanted, replicas in (
        ("target", plan.target.resources, plan.target.replicas),
        ("draft", plan.draft.resources if plan.draft else {}, plan.draft.replicas if plan.draft else 0),
        ("head", plan.coordinator_resources, plan.most_coordinators),
    ):
        for name, amount in wanted.items():
            assert nodes[kind].get(name, 0) >= amount * replicas, (kind, name)


def local(words: str, given: Path, folder: Path) -> str:
    """With the folder of certificates as it is on this machine, and a file of keys in it."""
    issue(folder)
    (folder / "keys").write_text("a sha256:" + "0" * 64)
    return words.replace(str(given), str(folder)).replace("/run/secrets/outrider", str(folder))


def test_ray_up_takes_the_cluster_file(tmp_path: Path) -> None:
    """Ray validates it on `ray up`, after minutes of installing."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = read("ray/cluster.yaml")
    validate_config(prepare_config(config))
    kinds = config["available_node_types"]
    # The command that the file's head tells to run on it.
    command = (
        (DEPLOY / "ray/cluster.yaml").read_text().split("'outrider deploy ")[1].split("'\n")[0].replace("\n#", " ")
    )
    (certs,) = map(Path, config["file_mounts"])
    assert "ca.key" in config["rsync_exclude"]
    words = shlex.split(local(command, certs, tmp_path))
    plan = arguments.plan(arguments.parser().parse_args(words), has_gpus=True)
    guarded(plan)
    nodes = {
        kind: {name: amount * one.get("min_workers", 1) for name, amount in one["resources"].items()}
        for kind, one in kinds.items()
    }
    hosts(plan, nodes)
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]


def guarded(plan: Plan) -> None:
    """Fails unless all links are mutual TLS and requests need a key, without a word of either in an argument."""
    assert plan.options.decoder.tls.ca_certs and not plan.insecure
    assert all(one.config.tls.ca_certs for one in (plan.target, plan.draft) if one is not None)
    assert plan.options.front.api_keys.of_file


def test_the_operator_takes_the_service_file(tmp_path: Path) -> None:
    """The operator reports a file that does not fit as a service that never gets ready."""
    from ray.serve.schema import ServeDeploySchema

    service = read("kuberay/rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert set(service["spec"]) == {"serveConfigV2", "rayClusterConfig"}
    serving = ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = serving.applications
    module, _, function = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    given = json.loads(local(json.dumps(application.args), Path(application.args["certs"]), tmp_path))
    plan = arguments.plan(arguments.from_mapping(given), has_gpus=True)
    guarded(plan)
    assert plan.name == application.name

    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == PINS["ray"]
    groups = {"head": cluster["headGroupSpec"]} | {one["groupName"]: one for one in cluster["workerGroupSpecs"]}
    assert set(groups) == {"head", "target", "draft"}
    nodes = {}
    for name, group in groups.items():
        (container,) = group["template"]["spec"]["containers"]
        volumes = {one["name"] for one in group["template"]["spec"]["volumes"]}
        assert {one["name"] for one in container["volumeMounts"]} == volumes
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, "1.33", strict=True)
        secrets = {one["secret"]["secretName"] for one in group["template"]["spec"]["volumes"] if "secret" in one}
        own = {"outrider-certs-coordinator", "outrider-api-keys"} if name == "head" else {"hf-token"}
        assert secrets == own | ({f"outrider-certs-{name}"} if name != "head" else set())
        assert container["resources"]["requests"] == container["resources"]["limits"]
        count = group.get("replicas", 1)
        custom = json.loads(json.loads(group["rayStartParams"]["resources"]))  # quoted once more for a shell
        custom["GPU"] = float(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        nodes[name] = {resource: amount * count for resource, amount in custom.items()}
    hosts(plan, nodes)
    ports = {one["name"]: one["containerPort"] for one in groups["head"]["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": 8000, "generate": 50050}
    assert serving.http_options.port == ports["serve"]
    assert plan.options.addresses.grpc_port == ports["generate"]


def test_the_image_has_the_ray_that_is_tested() -> None:
    """Nodes of different versions of Ray do not speak to one another."""
    assert f"rayproject/ray:{PINS['ray']}-" in (DEPLOY / "ray/Dockerfile").read_text()
