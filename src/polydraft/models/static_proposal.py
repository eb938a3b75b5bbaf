"""A whole proposal of iid paths on a device: passes, laws and draws follow one another without a word from the host.

Every row b of the batch has K_b paths of depth L_b, those after the first of depth S_b (0: likewise), below a trunk of T_b tokens, all
fixed before the first draw. Nodes are numbered depth by depth, the noise of a draw is that of its node, and paths that spell the same
tokens so far draw from one row, the first one's: the same draft, up to rounding, as growing it through `score`. Only the tokens are
read back, once.

    node(d, k) = 1 + d + (K_b - 1) (min(d, S_b) - T_b)+ + k   the k-th path's token d, drawn from the row of node(d - 1, k), or of the root
    node(d, k) = 1 + d                                        in the trunk, d < T_b, where all columns k draw one token with one noise
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import noise, sampling
from polydraft import tree as trees
from polydraft.core import NoiseKey, SamplingParams, TokenTree
from polydraft.models.static import StaticLlama

__all__ = ["propose_paths"]


def _numbers(sizes: Sequence[tuple[int, int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """node(d, k) of every row, [B, L, K], and where it is a node of its own: not beyond the row's width or a path's depth, once in the trunk."""
    K, L, T, S = (np.array(x)[:, None, None] for x in zip(*sizes, strict=True))
    S = np.where(S > 0, S, L)
    d, k = np.arange(L.max())[None, :, None], np.arange(K.max())[None, None]
    numbers = 1 + d + (K - 1) * np.maximum(np.minimum(d, S) - T, 0) + np.where(d < T, 0, k)
    return numbers, (d < L) & (k < np.where((d < T) | (d >= S), 1, K))


def _law(logits: Float[Tensor, "B M V"], params: Sequence[SamplingParams]) -> Float[Tensor, "B M V"]:
    flat = TokenTree.chain(torch.zeros(logits.shape[:2], dtype=torch.int64))
    empty = [()] * len(params)
    return sampling.soften(sampling.process(logits, flat, empty, [0] * len(params), params, checked=False), params)


@torch.inference_mode()
def propose_paths(
    model: StaticLlama,
    slots: Sequence[int],
    roots: Sequence[int],
    key: NoiseKey,
    sizes: Sequence[tuple[int, int, int, int]],
    params: Sequence[SamplingParams],
) -> tuple[TokenTree, Int[Tensor, "B N"], Float[Tensor, "B R V"]]:
    """Draw paths below the roots, whose slots hold all tokens before them.

    sizes: K_b, L_b, T_b and S_b; a depth of 0 gives a bare root, a trunk is shorter than the depth or 0, and so is S_b.  params: without what depends on the path.
    Returns the trees and each node's row of `probs`, on the host, and `probs`, on the model's device.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = StaticLlama(LlamaForCausalLM(config).eval(), max_model_len=64, max_num_seqs=1)
        >>> _ = model.prefill([0], [[3, 1, 4]])
        >>> tree, rows, probs = propose_paths(model, [0], [1], NoiseKey.of([7], [0], [4]), [(2, 3, 0, 0)], [SamplingParams()])
        >>> tree.parents.tolist(), probs.shape
        ([[-1, 0, 0, 1, 2, 3, 4]], torch.Size([1, 5, 32]))
    """
    numbers, own = _numbers(sizes)
    (B, L, K), device = numbers.shape, model.device
    given = np.where(own, numbers, -1)
    N = int(given.max()) + 1
    parents = np.full((B, N), -1, np.int64)
    above = np.concatenate([np.zeros_like(numbers[:, :1]), numbers[:, :-1]], 1)
    parents[own.nonzero()[0], numbers[own]] = above[own]
    uniforms = noise.uniforms(key, noise.Stream.DRAFT, N).to(device, non_blocking=True)
    places = torch.from_numpy(np.minimum(numbers, N - 1)).to(device, non_blocking=True)
    ids, offsets = torch.tensor(roots)[:, None].to(device, non_blocking=True), np.zeros((B, 1), np.int64)
    same = torch.ones(B, K, K, dtype=torch.bool, device=device)
    drawn: list[Tensor] = []
    laws: list[Tensor] = []
    for d in range(L):
        if d:
            ids, offsets = drawn[-1], np.where(own[:, d], given[:, d - 1], -1)  # only what has children
        q = _law(model.feed(slots, ids, offsets, parents), params)
        laws.append(q)
        first = same.int().argmax(2) if d else torch.zeros(B, K, dtype=torch.int64, device=device)
        rows = q.gather(1, first[..., None].expand(-1, -1, q.shape[2]))
        drawn.append(noise.try_choose(rows.flatten(0, 1), uniforms.gather(1, places[:, d]).flatten()).view(B, K))
        same = same & (drawn[-1][:, :, None] == drawn[-1][:, None])
    chosen = torch.stack(drawn, 1).cpu()  # the one look at what was drawn
    tokens = torch.zeros(B, N, dtype=torch.int64)
    tokens[:, 0] = torch.tensor(roots)
    real = torch.from_numpy(own)
    tokens[real.nonzero()[:, 0], torch.from_numpy(numbers)[real]] = chosen[real]
    tree = TokenTree(tokens, torch.from_numpy(parents))
    return tree, _rows(tree, given, K), torch.cat(laws, 1)


def _rows(tree: TokenTree, numbers: np.ndarray, K: int) -> Int[Tensor, "B N"]:
    """Where in the laws of all depths, K of them below the root, each node's is: that of its parent's first copy."""
    place = np.zeros(tree.tokens.shape, np.int64)
    b, d, k = (numbers >= 0).nonzero()
    place[b, numbers[b, d, k]] = 1 + d * K + k
    above = trees.first_copies(tree).gather(1, tree.parents.clamp(min=0))
    return torch.where(tree.parents >= 0, torch.from_numpy(place).gather(1, above), -1)
