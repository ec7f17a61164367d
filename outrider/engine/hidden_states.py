"""Hidden states of chosen decoder layers, for drafts that build on them. Costs nothing until somebody wants one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class HiddenStates:
    """What entered the chosen layers in the latest forward pass.

    A layer's input is looked at, never touched or copied, so a pass computes the same bits with and without.

    Attributes:
        count: decoder layers that can be chosen; 0 where the network does not list them.
        width: of a hidden state.
    """

    def __init__(self, network: Any) -> None:
        """
        Args:
            network: a transformers causal LM.
        """
        text = network.config.get_text_config()
        self._layers = _decoder_layers(network.get_decoder(), text.num_hidden_layers)
        self.count = len(self._layers)
        self.width: int = text.hidden_size if self.count else 0
        self._seen: dict[int, Tensor] = {}

    def want(self, layers: Sequence[int]) -> None:
        """From the next pass on, keeps what enters these layers too.

        Raises:
            IndexError: the model has no such layer.
        """
        for index in layers:
            if not 0 <= index < self.count:
                raise IndexError(f"layer {index} of {self.count}")
            if index not in self._seen:
                self._seen[index] = torch.empty(0)
                self._layers[index].register_forward_pre_hook(self._keep(index), with_kwargs=True)

    def rows(self, layers: Sequence[int], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Rows of the latest pass, as bytes.

        Args:
            layers: all of them wanted before that pass.
            rows: [n] indices in the order in which the spans were fed.

        Returns:
            uint8 [n, layers x width x 2]: the layers side by side in bfloat16, little-endian.
        """
        index = torch.from_numpy(rows)
        parts = [self._seen[layer].index_select(0, index.to(self._seen[layer].device)) for layer in layers]
        side_by_side = torch.cat([part.to(torch.bfloat16).cpu() for part in parts], dim=1)
        return side_by_side.view(torch.uint8).numpy()

    def _keep(self, index: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            self._seen[index] = states.flatten(0, -2)

        return hook


def _decoder_layers(decoder: nn.Module, count: int) -> Sequence[nn.Module]:
    """The list of decoder layers, however the architecture calls it."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []
