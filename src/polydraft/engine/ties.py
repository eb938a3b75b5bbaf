"""Greedy decoding in low precision: near ties are decided by a pass that depends on the token ids alone.

In float16 and bfloat16 the rows of a tree, a batch and a grown cache differ in their last bits, so where the two best logits
lie within that error the winner depends on how the text was drafted. Such rows, on the path that greedy decoding takes, are
scored again over the whole text, alone and without a cache. Plain decoding does the same, so both take the same token
wherever the error of a row is below half the margin.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from polydraft import sampling
from polydraft import tree as trees
from polydraft.core import Scores, Target
from polydraft.engine.sequence import Sequence as Running
from polydraft.errors import IncompatibleError, InvalidInputError


class _Fresh(Protocol):
    def fresh(self, token_ids: Sequence[int]) -> Float[Tensor, " V"]: ...


def check_margin(target: Target, margin: float | None) -> None:
    """Refuse a margin that is no positive number, and a target that has no `fresh` pass.

    Raises:
        InvalidInputError, IncompatibleError: saying what to do.
    """
    if margin is None:
        return
    if not margin > 0:
        raise InvalidInputError(f"tie_margin={margin} was given; expected a number > 0, in logits. Use None to switch it off.")
    if not hasattr(target, "fresh"):
        raise IncompatibleError(
            f"tie_margin={margin} was given for {type(target).__name__}, whose rows do not depend on their batch: it needs none. "
            "Leave it out, or use backend='transformers'."
        )


def rescored(target: Target, scores: Scores, sequences: Sequence[Running], margin: float, stop_ids: Sequence[int]) -> Scores:
    """The scores with the near ties on each greedy path scored again; those of a text with faulty logits stay, for the rule to refuse.

    margin: a row is scored again where its two best processed logits differ by less.
    """
    assert hasattr(target, "fresh")
    exact: _Fresh = target  # pyright: ignore[reportAssignmentType]
    logits = scores.logits.clone()
    for b, s in enumerate(sequences):
        if not s.request.params.greedy:
            continue
        tree = trees.subtree(scores.tree, b)
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        node, path = 0, list(s.token_ids)
        with suppress(InvalidInputError):
            while node >= 0:
                best = _best(logits[b : b + 1, : len(tokens)], tree, s, stop_ids, node)
                if (best.values[0] - best.values[1]).item() < margin:
                    logits[b, node] = exact.fresh(path).to(logits.device)
                    best = _best(logits[b : b + 1, : len(tokens)], tree, s, stop_ids, node)
                token = int(best.indices[best.values == best.values[0]].min())
                path.append(token)
                node = next((n for n in range(node + 1, len(tokens)) if parents[n] == node and tokens[n] == token), -1)
    return replace(scores, logits=logits)


def _best(logits: Float[Tensor, "1 N V"], tree: trees.TokenTree, s: Running, stop_ids: Sequence[int], node: int):
    """The largest processed logits of a node."""
    params = [s.request.params]
    rows = sampling.process(logits, tree, [s.token_ids], [s.num_prompt_tokens], params, stop_ids)
    return rows[0, node].topk(2)
