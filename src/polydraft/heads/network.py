"""What the torch networks of heads share: what they are made of, and how they draft for targets that the compiled path does not serve.

A network is trained and drafts as it is, on its target's device: products in the target's number format there, everything else in float32. The
compiled form of a kind is the same function, against which it is tested.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from polydraft.core import Needs, Scores, TokenTree
from polydraft.heads.checkpoint import HeadCheckpoint
from polydraft.heads.foretold import DepthDistributions
from polydraft.heads.states import GivenStates
from polydraft.models.torch.door import into, inward, outward
from polydraft.models.torch.slots import TorchModel


@dataclass(frozen=True)
class Material:
    """What a network is made of. layers: whose states it reads.  ids: [D] the draft vocabulary.  embeddings, output: the target's, [V, h]
    and [D, h], in bfloat16.  sizes: those that `Recipe.sizes` names.
    """

    target: Any
    layers: tuple[int, ...]
    ids: np.ndarray
    embeddings: Tensor
    output: Tensor
    sizes: Mapping[str, int]
    tokenizer: Any = None

    @property
    def hidden_size(self) -> int:
        """Width of a state of the target."""
        return self.output.shape[1]


class HeadNetwork(nn.Module):
    """A head in torch. config: as of `HeadCheckpoint`.  Embeddings and output rows are the target's and stay as they are."""

    embeddings: Tensor
    output: Tensor
    owns_output = False
    """Whether its output rows are others than its target's."""

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embeddings", material.embeddings, persistent=False)
        self.register_buffer("output", material.output, persistent=False)

    @classmethod
    def of(cls, checkpoint: HeadCheckpoint, material: Material) -> Any:
        """The network of a checkpoint, whose output rows may be others than the target's."""
        output = into(checkpoint.output(material.target)).to(material.output.dtype)
        network = cls(checkpoint.config, replace(material, output=output))
        network.owns_output = "lm_head.weight" in checkpoint.tensors
        network.load_state_dict(
            {name: into(checkpoint.tensors[cls.stored(name)]).float() for name in network.state_dict()}
        )
        return network

    @staticmethod
    def stored(name: str) -> str:
        """What checkpoints call a weight of the network."""
        return name

    def vocabulary(self, states: Float[Tensor, "... h"]) -> Float[Tensor, "... D"]:
        """Logits of states behind the norm, over the draft vocabulary."""
        return linear(states.to(self.output.dtype), self.output)


def _loaded(head: HeadCheckpoint, target: Any, network_class: type[HeadNetwork]) -> HeadNetwork:
    """A network to draft with, on the target's device."""
    device = device_of(target)
    dtype = torch.float32 if device.type == "cpu" else target.dtype
    bare = Material(
        target, head.layers_of(target), head.ids, torch.empty(0), torch.empty(0, head.config.hidden_size), {}
    )
    network = network_class.of(head, bare).eval().requires_grad_(False)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    network.output = network.output[: int((head.ids < target.vocab_size).sum())].to(dtype)
    return network.to(device)


def device_of(target: Any) -> torch.device:
    """Where a network drafts for a target."""
    return getattr(target, "device", torch.device("cpu"))


class Embeddings:
    """What a head's own embedding, or the target's where it has none, makes of tokens, on the target's device."""

    def __init__(self, head: HeadCheckpoint, target: Any) -> None:
        self.device = device_of(target)
        rows = head.tensors.get("embed_tokens.weight")
        self._rows = None if rows is None else into(rows, self.device)
        self._target = target

    def __call__(self, tokens: Int[np.ndarray, "*shape"]) -> Float[Tensor, "*shape h"]:
        if self._rows is None:
            return inward(self._target.embed(tokens), self).float()
        return self._rows[inward(tokens, self)].float()


def new_cache(
    attentions: Sequence[Any], slots: int, columns: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Keys and values of a network's layers, [layers, slots, columns, groups, width]. attentions: of the layers."""
    first = attentions[0]
    room = len(attentions), slots, columns, first.num_groups, first.width
    return tuple(torch.zeros(room, dtype=first.k_proj.weight.dtype, device=device) for _ in range(2))


class ReadsStates(GivenStates):
    """Of draft models that read tokens with the target's states before them, and drafted ones with what their parents put out."""

    _outputs: Float[Tensor, "slots N h"]
    """Of the nodes of each slot's proposal."""

    @abstractmethod
    def states_read(self, slot: int, count: int) -> Float[Tensor, "T h"]:
        """Those before the next tokens, as the head reads them."""

    def states_of(self, slots: Sequence[int], tree: TokenTree, since: int) -> Float[Tensor, "B M h"]:
        """What nodes are read with. since: 0, the root alone; or behind it, nodes whose parents were read."""
        if since == 0:
            assert tree.num_nodes == 1, "a tree is read a depth at a time"
            return torch.stack([self.states_read(slot, 1) for slot in slots])
        rows = torch.tensor(slots)[:, None].to(self._outputs.device)
        above = inward(tree.host.parents[:, since:].clip(min=0), self._outputs)
        return self._outputs[rows, above]

    def put_out(self, slots: Sequence[int], since: int, outputs: Float[Tensor, "B M h"]) -> None:
        """Remember what nodes from `since` on put out."""
        rows = torch.tensor(slots)[:, None].to(self._outputs.device)
        nodes = torch.arange(since, since + outputs.shape[1], device=self._outputs.device)
        self._outputs[rows, nodes] = outputs.float()


class HeadModel(TorchModel):
    """A network as a draft model in slots, a depth at a time; see `core.Target`.

    Raises:
        IncompatibleError: a head of another target.
    """

    network_class: ClassVar[type[HeadNetwork]]

    def __init__(self, head: HeadCheckpoint, target: Any) -> None:
        head.check(target)
        self.target = target
        self.name = head.kind
        self.vocab_size = target.vocab_size
        self.take_place(device_of(target), torch.float32)
        self.draft_ids = head.ids[head.ids < target.vocab_size]
        self.network: Any = _loaded(head, target, self.network_class)
        self.embedded = Embeddings(head, target)

    @property
    def offers(self) -> Needs:
        """Nothing beyond its logits."""
        return Needs()

    def wide(self, logits: Float[Tensor, "... D"]) -> Float[np.ndarray, "... V"]:
        """Logits of the draft vocabulary as logits of all tokens."""
        narrow = outward(logits)
        if not len(self.draft_ids):
            return narrow
        rows = np.full((*narrow.shape[:-1], self.vocab_size), -np.inf, np.float32)
        rows[..., self.draft_ids] = narrow
        return rows

    def _scores(
        self, slots: Sequence[int], tree: TokenTree, since: int, logits: Float[Tensor, "B M D"]
    ) -> Scores:
        self.passes += 1
        self.scored(slots, tree.num_nodes)
        return Scores(tree.nodes_from(since), self.wide(logits))


class DepthModel(DepthDistributions):
    """A network that foretells several depths from one state as a draft model; see `DepthDistributions`.

    Raises:
        IncompatibleError: a head of another target.
    """

    network_class: ClassVar[type[HeadNetwork]]

    def __init__(self, head: HeadCheckpoint, target: Any) -> None:
        head.check(target)
        self.device = device_of(target)
        self.network: Any = _loaded(head, target, self.network_class)
        super().__init__(target, head.ids, self.network.num_depths, head.kind, head.bias)

    @torch.inference_mode()
    def know(self, slots: Sequence[int], states: Float[np.ndarray, "B F"]) -> None:
        """What the network says behind these states."""
        logits = outward(self.foretold(slots, inward(states, self, torch.float32)))
        self.arrays.logits[list(slots), :, : logits.shape[-1]] = logits
        self.passes += 1

    @abstractmethod
    def foretold(self, slots: Sequence[int], states: Float[Tensor, "B F"]) -> Float[Tensor, "B K D"]:
        """Logits by depth."""


class CachingModel(DepthModel):
    """One with a KV cache of its own, of what the target's states of committed tokens became. roots: the last token of each slot."""

    def __init__(self, head: HeadCheckpoint, target: Any) -> None:
        super().__init__(head, target)
        slots = target.max_num_seqs
        self._cache = new_cache(self.network.attentions, slots, target.max_model_len, self.device)
        self.cache_bytes += sum(store.nbytes for store in self._cache)
        self.embedded = Embeddings(head, target)
        self.roots = np.zeros(slots, np.int64)
        self._read = np.zeros(slots, np.int64)
        """Tokens whose states each slot holds."""
