"""Where services run: a placement group per role, with a bundle per replica, and an actor in each bundle.

Ray keeps both: a bundle whose node is gone is placed again when there is room, and its actor starts anew in it.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster import names
from cluster.host import ServiceHost
from cluster.plan import ServicePlan
from cluster.resources import Resources, actor_options, describe, fit

_STRATEGY = "SPREAD"
"""Replicas go to different nodes as far as there are any: one dead node should not take all of them."""


def find_group(name: str) -> PlacementGroup | None:
    """The live placement group of that name."""
    for group_id, entry in placement_group_table().items():
        if entry["name"] == name and entry["state"] != "REMOVED":
            return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id)))
    return None


def is_placed(group: PlacementGroup) -> bool:
    """Whether all its bundles have their resources."""
    return bool(placement_group_table(group).get("state") == "CREATED")


def ensure_group(application: str, plan: ServicePlan) -> PlacementGroup:
    """The placement group of a role, made if there is none."""
    name = names.group(application, plan.role)
    bundles = [dict(plan.resources) for _ in range(plan.replicas)]
    return find_group(name) or placement_group(bundles, strategy=_STRATEGY, name=name, lifetime="detached")


def ensure_service(application: str, plan: ServicePlan, index: int, group: PlacementGroup) -> Any:
    """The actor of one replica, made if there is none."""
    options = ray.remote(ServiceHost).options(
        name=names.service(application, plan.role, index),
        namespace=names.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        **actor_options(plan.resources),
    )
    return options.remote(plan.config)


def remove_groups(application: str) -> None:
    """Frees the resources of all roles."""
    for role in ("target", "draft"):
        if (group := find_group(names.group(application, role))) is not None:
            remove_placement_group(group)


def some_node_has(resources: Resources) -> bool:
    """Whether a node has that much, taken or not."""
    return any(fit(resources, node["Resources"]) for node in ray.nodes() if node["Alive"])


def shortage(what: str, resources: Resources) -> str:
    """Why something is not placed: what it wants, and what each node has."""
    nodes = "; ".join(
        f"{node['NodeManagerAddress']} has {describe(node['Resources'])}" for node in ray.nodes() if node["Alive"]
    )
    return (
        f"no room for {what} with {describe(resources)} each: {nodes}; "
        f"free in the whole cluster: {describe(ray.available_resources())}"
    )
