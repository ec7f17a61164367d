"""Models of which only the shape is real: random weights from a `config.json`, for measuring speed and nothing else."""

from __future__ import annotations

from pathlib import Path

from outrider import models
from outrider.errors import ModelUnavailable
from outrider.models import ResolvedModel

LOAD_FORMAT = "dummy"
LOAD_FORMATS = ("auto", LOAD_FORMAT)
MARK = " (dummy weights)"
"""Behind the name of such a model, wherever it is shown."""


def resolve(name: str, role: models.Role) -> ResolvedModel:
    """The folder of a model whose `config.json` is all that is needed; other names as in `models.resolve`.

    Args:
        name: a folder, its `config.json`, or any other name of a model.

    Raises:
        ModelUnavailable: there is no `config.json`.
    """
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(f"{path} has no config.json, which dummy weights are made from")
        folder = path.resolve()
        return ResolvedModel(str(folder), folder.name, LOAD_FORMAT, "none", "folder")
    return models.resolve(name, role=role)
