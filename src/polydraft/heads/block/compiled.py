"""A block diffusion drafter in compiled code: layers of the Llama family over [last token, masks], with the target's states in their caches.

Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036); Christopher et al. 2024, SpecDiff (arXiv 2408.05636).

    columns    one for each committed token that the target has read: keys and values of every layer, made of norm(fc(its states there))
    block      the last token, which sees the columns; behind it masks and revealed tokens, which see columns, last token and each other
    distribution j      what is at the j-th place behind the last token, of the draft vocabulary; the mask is none of it

It is a `layers` model: a pass over a block is a pass over a root with auxiliary rows. A block with all masks gives distributions by depth.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.compiled_code import njit
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.checkpoint import embeddings
from polydraft.heads.depth_compiled import DepthDistributions
from polydraft.models.checkpoint import EMBEDDING, HEAD, Checkpoint, head_width
from polydraft.models.compiled.cache import new_memory, whole
from polydraft.models.compiled.forward import compiled_pass
from polydraft.models.compiled.kernels import rms_norm
from polydraft.models.compiled.layers import model_arrays, multiply
from polydraft.models.compiled.parts.attention import place_heads
from polydraft.models.compiled.products import FORMATS, Packed, packed
from polydraft.models.compiled.weights import packed_weights
from polydraft.models.compiled.workspace import CHUNK, Sizes, workspace
from polydraft.models.slots import TREE_ROOM

__all__ = ["CompiledBlock"]


class Injection(NamedTuple):
    """What the target's states go through: to rows, and to keys and values of every layer; see `layers.Weights`."""

    fc: Packed
    gain: np.ndarray
    qkv: Packed
    bias: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


@njit(cache=True, nogil=True)
def inject_states(model, weights, slot, begin, states):
    """Make the columns begin .. of a slot of the target's states [CHUNK or fewer, F]."""
    sizes, memory, work = model.sizes, model.memory, model.work
    rows, zero = len(states), np.int64(0)
    multiply(states, weights.fc, 0, work.rounded, work.update, rows)
    rms_norm(work.update, weights.gain, sizes.epsilon, work.normed, zero, rows)  # pyright: ignore[reportArgumentType]
    for layer in range(len(weights.bias)):
        multiply(work.normed, weights.qkv, layer, work.rounded, work.qkv, rows)
        bias, q_norm, k_norm = weights.bias[layer], weights.q_norm[layer], weights.k_norm[layer]
        for t in range(rows):
            cos, sin = weights.cos[0, begin + t], weights.sin[0, begin + t]
            place_heads(work.qkv[t], bias, q_norm, k_norm, sizes, cos, sin, memory, layer, slot, begin + t)


class CompiledBlock(DepthDistributions):
    """A block drafter as a draft model; see `DepthLaws`.

    quantization: of its matrices; it changes no distribution of the output.

    Raises:
        IncompatibleError: a drafter of another target.
    """

    def __init__(self, head: BlockCheckpoint, target: Any, *, quantization: str = "int8") -> None:
        head.check(target)
        super().__init__(target, head.ids, head.depths, head.kind)
        c, tensors, kind = head.config, head.tensors, FORMATS[quantization]
        self.mask = target.vocab_size
        read = {f"model.{name}": tensor for name, tensor in tensors.items()}
        read |= {EMBEDDING: torch.cat([embeddings(target), tensors["mask"][None].bfloat16()]), HEAD: head.output(target)}
        cpu, columns = torch.device("cpu"), whole(target.max_model_len + TREE_ROOM)
        files = Checkpoint(c, None, read, read.__getitem__, False, cpu, torch.float32)
        weights = packed_weights(files, columns, None if quantization == "float32" else quantization).weights
        H, G, D = c.num_attention_heads, c.num_key_value_heads, head_width(c)
        epsilon, scale = np.float32(c.rms_norm_eps), np.float32(D**-0.5)
        sizes = Sizes(H, G, D, c.intermediate_size, self.arrays.sizes.outputs, epsilon, scale)
        slots = target.max_num_seqs
        memory = new_memory((c.num_hidden_layers, slots, G), D, columns, self._lengths)
        self.cache_bytes += memory.keys.nbytes + memory.values.nbytes
        w, fc = weights, packed([tensors["fc.weight"].float()], kind)
        gain = tensors["hidden_norm.weight"].float().numpy()
        self.injection = Injection(fc, gain, w.qkv, w.bias, w.q_norm, w.k_norm, w.cos, w.sin)
        self.weight_bytes = sum(x.nbytes for x in (w.qkv, w.out, w.gate_up, w.down, w.head, fc))
        work = workspace(weights, sizes, columns, 1, tensors["fc.weight"].shape[1])
        self.weights, self.net = weights, model_arrays(weights, sizes, memory, work)
        self.roots = np.zeros(target.max_num_seqs, np.int64)
        """The last token of each slot."""

    def inject(self, slot: int, begin: int, states: Float[Tensor, "T F"], following: Sequence[int] = ()) -> None:
        """See `network.BlockModel.inject`."""
        rows = states.float().contiguous().numpy()
        for i in range(0, len(rows), CHUNK):
            inject_states(self.net, self.injection, slot, begin + i, rows[i : i + CHUNK])
        self.filled(slot, begin + len(rows))

    def denoise(self, slots: Sequence[int], blocks: Int[np.ndarray, "B X"]) -> Float[np.ndarray, "B X D"]:
        """Logits at every place of blocks of masks and revealed tokens: one pass."""
        B, X = blocks.shape
        block_logits, most = np.empty((B, X, self.arrays.sizes.outputs), np.float32), max(CHUNK // (1 + X), 1)
        for i in range(0, B, most):
            here, tokens = np.array(slots[i : i + most]), blocks[i : i + most]
            n, places = len(here), np.broadcast_to(np.arange(1, X + 1), tokens.shape)
            extra, mask = np.stack([tokens, places, np.zeros_like(places)], 1), np.ones((n, X, X), np.bool_)
            parents, zeros, ones = np.full((n, 1), -1), np.zeros(n, np.int64), np.ones(n, np.int64)
            untaken, hidden = np.full(len(self.weights.attention_norm) + 1, -1), np.empty((0, 0, 0), np.float32)
            logits = np.empty((n * X, block_logits.shape[2]), np.float32)
            compiled_pass(
                self.net, here, self.roots[here][:, None], parents, zeros, ones, ones, logits, hidden, untaken, extra, mask
            )
            block_logits[i : i + most] = logits.reshape(n, X, -1)
        self.passes += 1
        return block_logits

    def know(self, slots: Sequence[int], states: Float[Tensor, "B F"]) -> None:
        """One pass over a block of masks. The states are injected already."""
        self.arrays.logits[list(slots)] = self.denoise(slots, np.full((len(slots), self.depths), self.mask))
