"""A model's pass compiled by `torch.compile`: norms, rotations, gates and residuals fused into few loops.

The whole pass is one graph for any number of rows: a row's result then cannot depend on which of several graphs its
step happened to take. Attention over paged KV and the packed linear layers stay as they are (`operators`). What is
compiled is used for every pass of the model, prompts included, because its bits are not those of the ordinary pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.engine import operators
from outrider.engine.batch import RowRule, Span
from outrider.engine.packing import PackedLinear
from outrider.errors import InvalidArgument

if TYPE_CHECKING:
    from outrider.engine.causal_lm import PagedCausalLM

log = logging.getLogger(__name__)

Pass = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Ids and positions [1, rows], wanted rows [n] -> logits [n, vocab_rows]."""

LEAST_ROWS = 2
"""A compiler makes a case of its own of a single row."""

_TRACED = ((3, 1), (5, 2), (17, 17))
"""Rows and wanted rows of the first passes, unlike each other, or the graph would be one for equal numbers only."""


def rules_for(rules: Sequence[RowRule]) -> tuple[RowRule, ...]:
    """The row rules under which a compiled pass never sees a single row."""
    return tuple(RowRule(max(rule.minimum, LEAST_ROWS), rule.multiple) for rule in rules)


def compile_pass(network: PagedCausalLM, run: Pass) -> Pass:
    """A model's pass, to be compiled when it is first called."""
    operators.number([module for module in network.network.modules() if _is_opaque(module)])
    # Worker processes would stay for good, and what they are forked from holds threads and sockets.
    compiled: Pass = torch.compile(run, dynamic=True, fullgraph=True, options={"compile_threads": 1})
    return compiled


def warm_up(network: PagedCausalLM) -> None:
    """Runs a compiled model's first passes, so that nothing is compiled while streams wait.

    Args:
        network: its KV pool is replaced by a small one and has to be allocated again.

    Raises:
        InvalidArgument: the pass cannot be compiled, and why.
    """
    began_s = time.monotonic()
    most = max(rows for rows, _ in _TRACED)
    per_stream = -(-most // network.block_size)
    network.allocate_kv(per_stream)
    try:
        for rows, wanted in _TRACED:
            network.forward([Span(0, [*range(rows)], 0, wanted, [*range(per_stream)], 0, 0)])
    except Exception as error:  # whatever a compiler raises where it meets what it does not know
        reason = str(error).strip().partition("\n")[0]
        raise InvalidArgument("compile", f"this model's pass cannot be compiled: {reason}") from error
    log.info("compiled the pass in %.1f s", time.monotonic() - began_s)


def _is_opaque(module: torch.nn.Module) -> bool:
    return isinstance(module, PackedLinear) or hasattr(module, "outrider_layer")
