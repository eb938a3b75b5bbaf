"""Proof, when a model of transformers is built, that a KV cache or a state gives the logits of a forward pass over the whole text.

Windows are narrowed for it, see `windows.narrowed`, so that a text of `LENGTH` tokens crosses them several times: at true widths it would
take as long as a prompt of thousands of tokens, and the masks come from the same lines.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from polydraft.core import Outcome, Target, TokenTree
from polydraft.errors import CapacityError, ModelLoadError
from polydraft.models.supported import context_length
from polydraft.models.torch.slots import TorchModel

LENGTH = 12
PREFIX = 5
ROOT_AND_DRAFTS = 4
NARROW = 3
"""Tokens of the text, of what is read of it at once, of the path of a tree, and of a window."""


def proof_text(vocab_size: int, max_model_len: int) -> list[int]:
    """Token ids of the text; low ones, which no picture stands for.

    Example:
        >>> proof_text(100, 4)
        [2, 5, 8, 11]
    """
    return [(2 + 3 * i) % vocab_size for i in range(min(LENGTH, max_model_len))]


def position_behind_padding(config: Any) -> int | None:
    """The first position of models that count from the row behind that of padding, as RoBERTa and its kin do; None where there can be none.

    Example:
        >>> from transformers import RobertaConfig
        >>> position_behind_padding(RobertaConfig(pad_token_id=1))
        2
    """
    padding = getattr(config, "pad_token_id", None)
    context = context_length(config)
    if not isinstance(padding, int) or padding < 0 or context is None or padding + 1 + LENGTH > context:
        return None
    return padding + 1


def fitting_context(target: Target, config: Any, first: int, max_model_len: int | None) -> int:
    """Tokens of a sequence whose first one is at this position. max_model_len: as asked for.

    Raises:
        CapacityError: more were asked for.
    """
    holds = (context_length(config) or target.max_model_len + first) - first
    if max_model_len is not None and max_model_len > holds:
        problem = f"max_model_len={max_model_len} was given; the model's context holds {holds}, as positions begin at {first}"
        raise CapacityError(f"{problem}. Give at most that.")
    return min(target.max_model_len, holds)


def tree_of(text: list[int], sibling_token: int) -> tuple[TokenTree, list[int]]:
    """A tree whose path is the text, and the nodes of it. sibling_token: token of the siblings and of their children, which lie between them.

    Example:
        >>> tree, path = tree_of([5, 6, 7], sibling_token=9)
        >>> tree.tokens.tolist(), tree.parents.tolist(), path
        ([[5, 9, 9, 6, 9, 7]], [[-1, 0, 1, 0, 3, 3]], [0, 3, 5])
    """
    tokens = [text[0]]
    parents = [-1]
    path = [0]
    for depth, token in enumerate(text[1:], 1):
        above = path[-1]
        sibling = len(tokens)
        tokens = [*tokens, sibling_token]
        parents = [*parents, above]
        if depth < len(text) - 1:
            tokens = [*tokens, sibling_token]
            parents = [*parents, sibling]
        tokens = [*tokens, token]
        parents = [*parents, above]
        path.append(len(tokens) - 1)
    return TokenTree(np.array([tokens]), np.array([parents])), path


def prove_trees(target: TorchModel, text: list[int], plain: Float[np.ndarray, "L V"]) -> None:
    """Read a prefix of the text, then steps of a tree each, of whose paths a part is accepted. plain: logits of a forward pass over the text.

    Raises:
        ModelLoadError: other logits, by how much.
    """
    at = min(PREFIX, len(text) - 1)
    scored = [target.prefill([0], [text[:at]]).logits[0]] if at else []
    expected = [plain[at - 1 : at]] if at else []
    while at < len(text):
        tree, path = tree_of(text[at : at + ROOT_AND_DRAFTS], sibling_token=text[0])
        scored.append(target.score([0], tree).logits[0, path])
        expected.append(plain[at : at + len(path)])
        accepted = path[1 : len(path) - (at == PREFIX)]  # all but the last, then all
        target.commit([0], Outcome.of_paths([accepted]))
        at += 1 + len(accepted)
    target.release([0])
    check_close(np.concatenate(scored), np.concatenate(expected), target, "trees of drafts")


def check_close(
    logits: Float[np.ndarray, "M V"], plain: Float[np.ndarray, "M V"], target: TorchModel, what: str
) -> None:
    """Refuse logits that are not those of a plain forward pass.

    Raises:
        ModelLoadError: by how much they are off.
    """
    if not is_close(logits, plain, target.dtype):
        error = float(np.abs(logits - plain).max())
        raise ModelLoadError(
            f"{target.name or type(target).__name__} gives other logits for {what} than for its paths (off by {error:.1e}, at most "
            f"{_tolerance(plain, target.dtype):.1e} expected): it does not follow the mask, the positions or the cache. Use another model."
        )


def is_close(logits: Float[np.ndarray, "M V"], plain: Float[np.ndarray, "M V"], dtype: torch.dtype) -> bool:
    """Whether logits are those of another forward pass of a model, but for the rounding of its number format."""
    return float(np.abs(logits - plain).max()) <= _tolerance(plain, dtype)


def _tolerance(plain: np.ndarray, dtype: torch.dtype) -> float:
    return float(np.abs(plain).max()) * (1e-3 if dtype in (torch.float32, torch.float64) else 5e-2)
