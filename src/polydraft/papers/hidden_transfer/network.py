"""Hidden transfer in torch: k maps of the target's states, whose pseudo rows run through the target's remaining layers.

Wu et al. 2024 (arXiv 2404.12022). At position n, with h^l[n] the target's state behind layer l:

    row i    W_i h^(t_i)[n] at position n + i, through layers t_i + 1 .. L; it sees the text up to n and rows 1 .. i      distribution of x[n+i+1]

In training, rows of the text go through the remaining layers once, without a gradient, and pseudo rows stand at every `EVERY`-th position, another
set each time. Drafted rows attend to the target's own KV cache.

The loss of training, the target as it is:

    sum over i of 0.8^(i-1) times -sum_v p(v) ln q_i(v), p the target's distribution there, q_i: of row i

On disk, see `heads.checkpoint`:

    config.json          `transfer_layers`: t_1 .. t_k, rising: map i takes the target's state behind layer t_i
    model.safetensors    maps.{i}.weight: [h, h]
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.core import Target
from polydraft.errors import InvalidInputError
from polydraft.heads.checkpoint import HeadCheckpoint, head_config
from polydraft.heads.losses import unrolled
from polydraft.heads.network import DepthModel, HeadNetwork, Material
from polydraft.heads.recipe import Batch, Figures, Loss, Recipe
from polydraft.models.torch.door import into
from polydraft.models.torch.llama_layer import KeyValues, rms_norm, target_layer
from polydraft.numerics.floats import as_float32
from polydraft.papers.target_layers import llama_checkpoint

EVERY = 8
"""Positions of a text for one from which pseudo rows go out."""


class TransferNet(HeadNetwork):
    """The maps as they are trained, and the target's remaining layers."""

    target_norm: Tensor

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        checkpoint = llama_checkpoint(material.target, "hidden-transfer")
        h = material.hidden_size
        self.begins = material.layers
        self.num_depths = len(material.layers)
        self.epsilon = float(checkpoint.config.rms_norm_eps)
        self.last = int(checkpoint.config.num_hidden_layers)
        maps = [nn.Linear(h, h, bias=False) for _ in self.begins]
        for matrix in maps:
            nn.init.eye_(matrix.weight)
        self.maps = nn.ModuleList(maps)
        self.layers = nn.ModuleList(target_layer(checkpoint, l) for l in range(self.begins[0], self.last))
        self.register_buffer(
            "target_norm", into(as_float32(checkpoint.read("model.norm.weight"))), persistent=False
        )

    def pseudo(
        self,
        states: Float[Tensor, "B A F"],
        positions: Int[Tensor, "..."],
        text_of: Callable[[int], KeyValues],
    ) -> Float[Tensor, "B A k h"]:
        """Rows behind the last layer and the norm. states: behind layers t_1 .. t_k.  positions: of the first rows.  text_of: keys and values of
        the text in a layer, called for one after the other."""
        entering = states.float().chunk(self.num_depths, -1)
        rows = entering[0][:, :, None][:, :, :0]
        for l in range(self.begins[0], self.last + 1):
            if l in self.begins:
                i = self.begins.index(l)
                linear: Any = self.maps[i]
                pseudo = linear(entering[i].to(linear.weight.dtype)).float()
                rows = torch.cat([rows, pseudo[:, :, None]], 2)
            if l < self.last:
                i = torch.arange(rows.shape[2], device=rows.device)
                rows, _ = self.layers[l - self.begins[0]](
                    rows, positions[..., None] + i, [text_of(l)], i <= i[:, None]
                )
        return rms_norm(rows, self.target_norm, self.epsilon)

    def rows(self, states: Float[Tensor, "B T F"], at: Int[Tensor, " A"]) -> Float[Tensor, "B A k h"]:
        """Pseudo rows of the positions `at` of texts."""
        every = torch.arange(states.shape[1], device=states.device)
        text = states.float().chunk(self.num_depths, -1)[0][:, None]
        causal = every <= every[:, None]
        visible = every <= at[:, None, None]

        def text_of(l: int) -> KeyValues:
            nonlocal text
            with torch.no_grad():
                text, (keys, values, _) = self.layers[l - self.begins[0]](text, every, [], causal)
            return KeyValues(keys[:, 0], values[:, 0], visible)

        return self.pseudo(states[:, at], at + 1, text_of)

    def depths(self, batch: Batch) -> Iterator[tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]]:
        """Logits and the target's distributions of each row."""
        k = self.num_depths
        T = batch.tokens.shape[1]
        at = torch.arange(int(torch.randint(EVERY, ())), T - 1 - k, EVERY, device=batch.tokens.device)
        rows = self.rows(batch.states, at)
        for i in range(1, k + 1):
            counted = batch.counted[:, at + i + 1]
            yield self.vocabulary(rows[:, :, i - 1][counted]), batch.distributions[:, at + i][counted]


class TransferCheckpoint(HeadCheckpoint):
    """Maps of a target's states to those of the next positions."""

    kind = "hidden-transfer"
    LAYERS = "transfer_layers"

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Of the maps."""
        h = self.config.hidden_size
        return {f"maps.{i}.weight": (h, h) for i in range(len(self.layers))}

    def check(self, target: Target) -> None:
        """Refuse another target than the maps were trained for, and layers that are not there or fall.

        Raises:
            IncompatibleError: another width, vocabulary or model.
            InvalidInputError: layers out of range or order.
        """
        last = max(target.offers.hidden, default=0)
        if (
            not self.layers
            or list(self.layers) != sorted(set(self.layers))
            or not 1 <= self.layers[0] <= self.layers[-1] <= last
        ):
            raise InvalidInputError(
                f"hidden transfer behind layers {self.layers} was given; expected rising ones of 1 to {last}, which the target has."
            )
        super().check(target)


class TransferModel(DepthModel):
    """Maps of a target's states, and its own remaining layers, as a draft model in the target's slots; see `DepthModel`."""

    network_class = TransferNet

    def __init__(self, head: HeadCheckpoint, target: Any) -> None:
        llama_checkpoint(target, "hidden-transfer")
        super().__init__(head, target)

    def foretold(self, slots: Sequence[int], states: Float[Tensor, "B F"]) -> Float[Tensor, "B K D"]:
        """Of the tokens behind the root. states: of each slot's newest token behind layers t_1 .. t_k."""
        lengths = torch.from_numpy(self.target.lengths[slots]).to(states.device)[:, None]
        visible = (torch.arange(int(lengths.max()), device=states.device) < lengths)[:, None, None]
        rows = self.network.pseudo(
            states[:, None], lengths, lambda l: KeyValues(*self.target.cached(l, slots), visible)
        )
        return self.network.vocabulary(rows[:, 0])


class TransferRecipe(Recipe):
    """See the module. `layers` of the options are t_1 .. t_k."""

    checkpoint = TransferCheckpoint
    network = TransferNet

    def layers(self, last: int) -> tuple[int, ...]:
        """Three rows, each a layer behind the one before; the first one behind four fifths of all."""
        first = max(1, min(4 * last // 5, last - 3))
        return first, first + 1, first + 2

    def fresh(self, material: Material) -> TransferNet:
        """Maps that change nothing."""
        return TransferNet(head_config({"hidden_size": material.hidden_size}), material)

    def loss(self, network: TransferNet, batch: Batch, *, steps: int, loss: Loss) -> Figures:
        """Of all rows."""
        return unrolled(network.depths(batch), loss)
