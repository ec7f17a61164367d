"""The application for Serve's configuration files and for KubeRay: `import_path: cluster.application:build`.

    applications:
      - name: outrider
        route_prefix: /
        import_path: cluster.application:build
        args: {target: Qwen/Qwen3-32B, draft: Qwen/Qwen3-0.6B, target-resources: {GPU: 1}, draft-resources: {GPU: 1}}

The first coordinator starts the keeper, and the keeper the services.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from cluster import arguments, coordinators


def build(args: dict[str, Any]) -> serve.Application:
    """
    Args:
        args: options of `outrider deploy` without their dashes; JSON may be written as YAML.

    Raises:
        InvalidArgument: naming the option.
    """
    given = arguments.from_mapping(args)
    return coordinators.bind(arguments.plan(given, has_gpus=bool(ray.cluster_resources().get("GPU"))))
