"""A whole proposal of iid paths on a device: passes, laws and draws follow one another without a word from the host.

Every row b of the batch has K_b paths of depth L_b, fixed before the first draw. Nodes are numbered depth by depth, the noise
of a draw is that of its node, and paths that spell the same tokens so far draw from one row, the first one's: the same draft,
up to rounding, as growing it through `score`. Only the tokens are read back, once.

    node(d, k) = 1 + d K_b + k      the k-th path's token d, drawn from the row of node(d - 1, k), or of the root
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


def _numbers(widths: Sequence[int], depths: Sequence[int]) -> np.ndarray:
    """node(d, k) of every row, [B, L, K]; -1 beyond its width or depth."""
    d, k = np.arange(max(depths))[None, :, None], np.arange(max(widths))[None, None]
    K, L = np.asarray(widths)[:, None, None], np.asarray(depths)[:, None, None]
    return np.where((k < K) & (d < L), 1 + d * K + k, -1)


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
    widths: Sequence[int],
    depths: Sequence[int],
    params: Sequence[SamplingParams],
) -> tuple[TokenTree, Int[Tensor, "B N"], Float[Tensor, "B R V"]]:
    """Draw paths below the roots, whose slots hold all tokens before them.

    widths, depths: K_b and L_b; a depth of 0 gives a bare root.  params: without what depends on the path.
    Returns the trees and each node's row of `probs`, on the host, and `probs`, on the model's device.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = StaticLlama(LlamaForCausalLM(config).eval(), max_model_len=64, max_num_seqs=1)
        >>> _ = model.prefill([0], [[3, 1, 4]])
        >>> tree, rows, probs = propose_paths(model, [0], [1], NoiseKey.of([7], [0], [4]), [2], [3], [SamplingParams()])
        >>> tree.parents.tolist(), probs.shape
        ([[-1, 0, 0, 1, 2, 3, 4]], torch.Size([1, 5, 32]))
    """
    B, K, L, device = len(slots), max(widths), max(depths), model.device
    numbers = _numbers(widths, depths)
    N = int(numbers.max()) + 1
    parents = np.full((B, N), -1, np.int64)
    for b, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        size = width * depth
        parents[b, 1 : size + 1] = np.maximum(np.arange(1, size + 1) - width, 0)
    uniforms = noise.uniforms(key, noise.Stream.DRAFT, N).to(device, non_blocking=True)
    places = torch.from_numpy(numbers).clamp(min=0).to(device, non_blocking=True)
    ids, offsets = torch.tensor(roots)[:, None].to(device, non_blocking=True), np.zeros((B, 1), np.int64)
    same = torch.ones(B, K, K, dtype=torch.bool, device=device)
    drawn: list[Tensor] = []
    laws: list[Tensor] = []
    for d in range(L):
        if d:
            ids, offsets = drawn[-1], numbers[:, d - 1]
        q = _law(model.feed(slots, ids, offsets, parents), params)
        laws.append(q)
        first = same.int().argmax(2) if d else torch.zeros(B, K, dtype=torch.int64, device=device)
        rows = q.gather(1, first[..., None].expand(-1, -1, q.shape[2]))
        drawn.append(noise.try_choose(rows.flatten(0, 1), uniforms.gather(1, places[:, d]).flatten()).view(B, K))
        same = same & (drawn[-1][:, :, None] == drawn[-1][:, None])
    chosen = torch.stack(drawn, 1).cpu()  # the one look at what was drawn
    tokens = torch.zeros(B, N, dtype=torch.int64)
    tokens[:, 0] = torch.tensor(roots)
    real = torch.from_numpy(numbers >= 0)
    tokens[real.nonzero()[:, 0], torch.from_numpy(numbers)[real]] = chosen[real]
    tree = TokenTree(tokens, torch.from_numpy(parents))
    return tree, _rows(tree, numbers, K), torch.cat(laws, 1)


def _rows(tree: TokenTree, numbers: np.ndarray, K: int) -> Int[Tensor, "B N"]:
    """Where in the laws of all depths, K of them below the root, each node's is: that of its parent's first copy."""
    place = np.zeros(tree.tokens.shape, np.int64)
    b, d, k = (numbers >= 0).nonzero()
    place[b, numbers[b, d, k]] = 1 + d * K + k
    above = trees.first_copies(tree).gather(1, tree.parents.clamp(min=0))
    return torch.where(tree.parents >= 0, torch.from_numpy(place).gather(1, above), -1)
