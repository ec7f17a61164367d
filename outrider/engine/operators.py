"""What a compiler takes as it is when it traces a pass: attention over paged KV, and linear layers in oneDNN's layout.

Both become operators of one name with the module's number as an argument, so that the graph does not depend on the
batch, the KV pool or the layout of weights.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_LIBRARY = torch.library.Library("outrider", "DEF")
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, int module, float? scaling, int? window, float? softcap, "
    "Tensor? sinks) -> Tensor"
)
_LIBRARY.define("linear(Tensor rows, int module, int width) -> Tensor")

_numbers = itertools.count()
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def number(modules: list[nn.Module]) -> None:
    """Gives modules the number by which the operators find them, as `outrider_number`."""
    for module in modules:
        module.outrider_number = next(_numbers)  # type: ignore[assignment]
        _modules[module.outrider_number] = module  # type: ignore[index]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    module: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[1, query_heads, rows, width] -> [1, rows, query_heads, value_dim]; see `attention.paged_attention`."""
    layer = _modules[module].outrider_layer
    return layer(query, key, value, scaling, window, softcap, sinks).contiguous()  # type: ignore[no-any-return, operator]


def _attended(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _linear(rows: Tensor, module: int, width: int) -> Tensor:
    """[..., in_features] -> [..., width]."""
    return _modules[module](rows)  # type: ignore[no-any-return]


def _transformed(rows: Tensor, _: int, width: int) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], width)


for _name, _run, _shape in (("attend", _attend, _attended), ("linear", _linear, _transformed)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"outrider::{_name}", _shape, lib=_LIBRARY)
