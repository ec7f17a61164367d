"""Hidden states between decoder layers, for drafts that build on them. Costs nothing until somebody wants one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.engine.transfer import to_device


class HiddenStates:
    """What entered the chosen layers in the latest forward pass, or left the last one.

    They are numbered as in transformers' `hidden_states`: i is the input of layer i, and the one behind the last layer
    is what its final norm makes of its output. A state is looked at, never touched or copied, so a pass computes the
    same bits with and without.

    Attributes:
        count: decoder layers, 0 where the network does not list them; states 0 .. count can be chosen if there are any.
        width: of a hidden state.
    """

    def __init__(self, network: Any) -> None:
        """
        Args:
            network: a transformers causal LM.
        """
        text = network.config.get_text_config()
        self._decoder = network.get_decoder()
        self._layers = _decoder_layers(self._decoder, text.num_hidden_layers)
        self.count = len(self._layers)
        self.width: int = text.hidden_size if self.count else 0
        self._seen: dict[int, Tensor] = {}

    def want(self, layers: Sequence[int]) -> None:
        """From the next pass on, keeps these states too.

        Raises:
            IndexError: the model has no such state.
        """
        for index in layers:
            if not 0 <= index <= self.count or not self.count:
                raise IndexError(f"hidden state {index} of {self.count} layers")
            if index in self._seen:
                continue
            self._seen[index] = torch.empty(0)
            if index == self.count:
                self._decoder.register_forward_hook(self._keep_last)
            else:
                self._layers[index].register_forward_pre_hook(self._keep(index), with_kwargs=True)

    def rows(self, layers: Sequence[int], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Rows of the latest pass, as bytes.

        Args:
            layers: all of them wanted before that pass.
            rows: [n] indices in the order in which the spans were fed.

        Returns:
            uint8 [n, layers x width x 2]: the layers side by side in bfloat16, little-endian.
        """
        seen = [self._seen[layer] for layer in layers]
        index = {device: to_device(rows, device) for device in {states.device for states in seen}}
        parts = [states.index_select(0, index[states.device]).to(torch.bfloat16) for states in seen]
        side_by_side = torch.cat([part.to(parts[0].device) for part in parts], dim=1)
        return side_by_side.cpu().view(torch.uint8).numpy()

    @property
    def wanted(self) -> tuple[int, ...]:
        """All that are kept, in the order in which somebody wanted them."""
        return tuple(self._seen)

    def latest(self, layer: int) -> Tensor:
        """[rows, width] of the latest pass, padding included."""
        return self._seen[layer]

    def show(self, states: Mapping[int, Tensor]) -> None:
        """Takes the states of a pass that ran without the network's modules, as `latest` gives them."""
        self._seen.update(states)

    def _keep_last(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self._seen[self.count] = output[0].flatten(0, -2)

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
