"""A whole proposal of iid draws on a device: passes, laws and draws follow one another without a word from the host.

The tree of each row is fixed beforehand, see `models/layout.py`. The noise of a draw is that of its node, and nodes that spell the same
tokens so far draw from one row, the first one's: the same draft, up to rounding, as growing it through `score`. Only the tokens are
read back, once.
"""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import noise, sampling
from polydraft import tree as trees_of_tokens
from polydraft.budget import Stop
from polydraft.core import NoiseKey, SamplingParams, SiblingLaw, TokenTree
from polydraft.models.compiled.proposals import Proposal
from polydraft.models.layout import layouts
from polydraft.models.slots import SlotModel
from polydraft.staging import fetched, sent

__all__ = ["StaticProposals"]


def _law(logits: Float[Tensor, "B M V"], params: Sequence[SamplingParams]) -> Float[Tensor, "B M V"]:
    flat = TokenTree.chain(torch.zeros(logits.shape[:2], dtype=torch.int64))
    empty = [()] * len(params)
    return sampling.soften(sampling.process(logits, flat, empty, [0] * len(params), params, checked=False), params)


def _between(begin: Int[np.ndarray, " B"], end: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B W"]:
    """The nodes begin .. end - 1 of every row, padded with -1."""
    nodes = begin[:, None] + np.arange((end - begin).max())
    return np.where(nodes < end[:, None], nodes, -1)


class StaticProposals(SlotModel):
    """What a static model offers as a draft model, see `core.Target`: proposals of iid draws without a look at them."""

    device: torch.device

    @abstractmethod
    def feed(
        self, slots: Sequence[int], ids: Int[Tensor, "B M"], offsets: np.ndarray, parents: np.ndarray
    ) -> Float[Tensor, "B M V"]:
        """Logits of some nodes of trees whose tokens only the device knows; the nodes above them were fed before."""

    @torch.inference_mode()
    def propose_paths(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        keys: tuple[Sequence[int], Sequence[int], Sequence[int]],
        trees: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        *,
        law: SiblingLaw = SiblingLaw.IID,
        stops: Sequence[Stop | None] = (),
    ) -> Proposal | None:
        """As `CompiledProposals.propose_paths`, but trees are drawn whole whatever the stops; the rows that tokens were drawn from stay on the device.

        None for draws that are not iid, and for sampling parameters that depend on the path.

        Example:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from polydraft.models.static.llama import StaticLlama
            >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = StaticLlama(LlamaForCausalLM(config).eval(), max_model_len=64, max_num_seqs=1)
            >>> asked = [0], [[3, 1, 4]], ([7], [0], [3]), [(-1, 0, 0, 1, 2)], [SamplingParams()]
            >>> tree, rows, probs, *_ = model.propose_paths(*asked)
            >>> tree.parents.tolist(), probs.shape
            ([[-1, 0, 0, 1, 2]], torch.Size([1, 3, 32]))
        """
        if law is not SiblingLaw.IID or any(p.has_penalties or p.min_tokens for p in params):
            return None
        live = [b for b, parents in enumerate(trees) if len(parents) > 1]
        if behind := [b for b in live if len(pending[b]) > 1]:
            self.prefill([slots[b] for b in behind], [pending[b][:-1] for b in behind])
        key = NoiseKey.of(*([part[b] for b in live] for part in keys))
        tree, rows, probs = _drawn(
            self,
            [slots[b] for b in live],
            [pending[b][-1] for b in live],
            key,
            [trees[b] for b in live],
            [params[b] for b in live],
        )
        if len(live) == len(slots):
            return Proposal(tree, rows, probs)
        index, bare = torch.tensor(live), torch.tensor([[ids[-1]] for ids in pending])
        tokens = torch.cat([bare, bare.new_zeros(len(slots), tree.num_nodes - 1)], 1).index_copy(0, index, tree.tokens)
        none = tokens.new_full(tokens.shape, -1)
        tree, rows = TokenTree(tokens, none.index_copy(0, index, tree.parents)), none.index_copy(0, index, rows)
        whole = probs.new_full((len(slots), *probs.shape[1:]), 1 / probs.shape[2])
        return Proposal(tree, rows, whole.index_copy(0, index.to(probs.device), probs))


def _drawn(
    model: StaticProposals,
    slots: Sequence[int],
    roots: Sequence[int],
    key: NoiseKey,
    trees: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
) -> tuple[TokenTree, Int[Tensor, "B N"], Float[Tensor, "B R V"]]:
    """Trees below the roots, whose slots hold all tokens before them."""
    (parents, starts, inner), device = layouts(tuple(trees)), model.device
    (B, N), above, depths = parents.shape, np.maximum(parents, 0), range(starts.shape[1] - 2)
    uniforms = sent(noise.uniforms(key, noise.Stream.DRAFT, N), device)
    given = np.array(roots)
    inside = [_between(starts[:, d], inner[:, d]) for d in depths]
    below = [_between(starts[:, d + 1], starts[:, d + 2]) for d in depths]
    nodes = np.concatenate(below, 1)
    parent = [
        np.where(n >= 0, np.take_along_axis(above, n, 1) - starts[:, d, None], 0) for d, n in zip(depths, below, strict=True)
    ]
    ends = np.cumsum([0, *(n.shape[1] for n in below)])
    places = sent(torch.from_numpy(np.stack([np.maximum(nodes, 0), np.concatenate(parent, 1)])), device)
    drawn, laws = [sent(torch.from_numpy(given)[:, None], device)], list[Tensor]()
    same = torch.ones(B, 1, 1, dtype=torch.bool, device=device)  # nodes of a depth that spell the same
    for d, frontier in zip(depths, inside, strict=True):
        laws.append(_law(model.feed(slots, drawn[-1][:, : frontier.shape[1]], frontier, parents), params))
        node, behind = places[:, :, ends[d] : ends[d + 1]]
        W = behind.shape[1]
        first = same.int().argmax(2).gather(1, behind)
        rows = laws[-1].gather(1, first[..., None].expand(-1, -1, laws[-1].shape[2]))
        drawn.append(noise.try_choose(rows.flatten(0, 1), uniforms.gather(1, node).flatten()).view(B, W))
        contexts = same.gather(1, behind[..., None].expand(-1, -1, same.shape[2])).gather(2, behind[:, None].expand(-1, W, -1))
        same = contexts & (drawn[-1][:, :, None] == drawn[-1][:, None])
    chosen = fetched(torch.cat(drawn[1:], 1)).numpy()  # the one look at what was drawn
    tokens = np.zeros((B, N), np.int64)
    tokens[:, 0] = given
    b, k = (nodes >= 0).nonzero()
    tokens[b, nodes[b, k]] = chosen[b, k]
    tree = TokenTree.of(tokens, parents.copy())
    return tree, _rows(tree, inside), torch.cat(laws, 1)


def _rows(tree: TokenTree, inside: Sequence[np.ndarray]) -> Int[Tensor, "B N"]:
    """Where in the laws of all depths, one for each of the nodes inside, each node's is: that of its parent's first copy."""
    parents, nodes = tree.host[1], np.concatenate(inside, 1)
    place = np.zeros(parents.shape, np.int64)
    b, k = (nodes >= 0).nonzero()
    place[b, nodes[b, k]] = k
    above = np.take_along_axis(trees_of_tokens.first_copies(tree).numpy(), np.maximum(parents, 0), 1)
    return torch.from_numpy(np.where(parents >= 0, np.take_along_axis(place, above, 1), -1))
