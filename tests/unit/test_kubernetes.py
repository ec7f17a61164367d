"""The manifests under deploy/kubernetes: valid by Kubernetes' own schemas, and right in what schemas do not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from coordinator.arguments import parse as parse_coordinator
from draft_service.config import parse as parse_draft
from outrider.certs.issue import issue
from target_service.config import parse as parse_target

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
DOCUMENTS = [
    document for name in KUSTOMIZATION["resources"] for document in yaml.safe_load_all((FOLDER / name).read_text())
]
DEPLOYMENTS = {
    document["metadata"]["name"]: document["spec"] for document in DOCUMENTS if document["kind"] == "Deployment"
}
PARSERS = {"target": parse_target, "draft": parse_draft, "coordinator": parse_coordinator}


def container(part: str) -> dict[str, Any]:
    (found,) = DEPLOYMENTS[part]["template"]["spec"]["containers"]
    return dict(found)


def replaced(word: str, places: tuple[str, ...], by: str) -> str:
    for place in places:
        word = word.replace(place, by)
    return word


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: f"{d['kind']}/{d['metadata']['name']}")
def test_it_is_valid_by_the_schema(document: dict[str, Any]) -> None:
    """Guards against a field that the server drops or refuses."""
    kubernetes_validate.validate(document, "1.33", strict=True)


def test_the_schema_would_notice_a_wrong_field() -> None:
    """Guards the test above."""
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"ports": [{"prot": 1}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


@pytest.mark.parametrize("part", PARSERS)
def test_the_arguments_are_ones_that_the_part_takes(part: str, tmp_path: Path) -> None:
    """Guards against a pod that restarts for ever. The certificates have the names that `outrider certs` gives them."""
    issue(tmp_path)
    (tmp_path / "keys").write_text("a sha256:" + "0" * 64)
    places = ("/certs/", "/run/secrets/outrider/")
    module, *arguments = [replaced(word, places, f"{tmp_path}/") for word in container(part)["args"]]
    assert module.removesuffix("_service") == part
    made = PARSERS[part](arguments)
    grace = DEPLOYMENTS[part]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > (made.drain_timeout_s if part == "coordinator" else made.drain_seconds)


@pytest.mark.parametrize("part", PARSERS)
def test_every_pod_is_locked_down(part: str) -> None:
    """Guards against root, a writable image, capabilities and a token of the cluster in a pod that needs none."""
    pod, own = DEPLOYMENTS[part]["template"]["spec"], container(part)["securityContext"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("part", PARSERS)
def test_secrets_are_files_of_their_own_part(part: str) -> None:
    """Guards keys against `ps`, the environment and other parts; the arguments name paths only."""
    pod, own = DEPLOYMENTS[part]["template"]["spec"], container(part)
    mounted = {one["name"]: one for one in own["volumeMounts"]}
    volumes = [one for one in pod["volumes"] if "secret" in one]
    expected = {"coordinator": {"outrider-api-keys"}}.get(part, {"hf-token"})
    assert {one["secret"]["secretName"] for one in volumes} == expected | {f"outrider-certs-{part}"}
    assert all(mounted[one["name"]]["readOnly"] is True for one in volumes)
    assert all(one["secret"]["defaultMode"] & 0o007 == 0 for one in volumes)
    assert not [one for one in own.get("env", []) if "valueFrom" in one]
    for word in own["args"]:
        flag, _, value = word.partition("=")
        if any(name in flag for name in ("key", "token", "cert")):
            assert value.startswith(tuple(one["mountPath"] for one in mounted.values())), word


@pytest.mark.parametrize("part", PARSERS)
def test_every_pod_is_probed(part: str) -> None:
    """Guards a slow load against the liveness probe, and a hung engine against going unnoticed."""
    probes = container(part)
    wait_s = probes["startupProbe"]["periodSeconds"] * probes["startupProbe"]["failureThreshold"]
    assert wait_s >= (1_800 if part != "coordinator" else 120)
    assert probes["readinessProbe"] and probes["livenessProbe"]["failureThreshold"] >= 3
    if part == "coordinator":
        assert probes["livenessProbe"]["httpGet"]["path"] == "/health"
        assert probes["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_names_fit_together() -> None:
    """Guards selectors, claims, addresses and images, which fail in silence or at the third pod."""
    kinds = {(document["kind"], document["metadata"]["name"]): document for document in DOCUMENTS}
    for part, deployment in DEPLOYMENTS.items():
        labels = deployment["template"]["metadata"]["labels"]
        assert deployment["selector"]["matchLabels"].items() <= labels.items()
        assert kinds["Service", part]["spec"]["selector"].items() <= labels.items()
        claims = [volume.get("persistentVolumeClaim") for volume in deployment["template"]["spec"]["volumes"]]
        assert all(("PersistentVolumeClaim", claim["claimName"]) in kinds for claim in claims if claim)
        assert container(part)["image"] in {image["name"] for image in KUSTOMIZATION["images"]}
    addresses = [word for word in container("coordinator")["args"] if word.startswith(("--target", "--draft"))]
    assert addresses == ["--target=target:50052", "--draft=draft:50051"]
    budget = kinds["PodDisruptionBudget", "coordinator"]["spec"]
    assert budget["minAvailable"] < DEPLOYMENTS["coordinator"]["replicas"]


def test_only_coordinators_reach_the_services() -> None:
    """Guards the links, on which whoever connects may ask for anything."""
    policies = {d["metadata"]["name"]: d["spec"] for d in DOCUMENTS if d["kind"] == "NetworkPolicy"}
    (rule,) = policies["services"]["ingress"]
    assert [list(source) for source in rule["from"]] == [["podSelector"]]
    assert rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "coordinator"
