"""Outputs with the target's own distribution, given that they are valid: for grammars with finitely many outputs.

A mask at each token samples another distribution: it renormalises the target's row where a token cannot be followed, and so takes up prefixes that
the model hardly ever completes (arXiv 2605.07698). Here each token is weighed by the probability that the target itself completes it:

    w(x)      = 1 where x ends the output, else the sum over tokens t that may follow of p(t | x) w(x t)
    p(t | x)  the target's probability with the request's sampling parameters, without the form
    P(t | x)  = p(t | x) w(x t) / w(x), whose product along an output is p(output) / p(all valid outputs)

The sums run over the tree of all prefixes, which the target scores once, before the first draft. Weights are a part of the logits, the draft's too,
so drafts and verifiers know nothing of them. Trap: the weights belong behind the temperature, so they are scaled by it where they stand before it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float

from polydraft.core import Request, SamplingParams, Target, TokenTree
from polydraft.engine.sequence import Sequence
from polydraft.errors import InvalidInputError
from polydraft.models.slots import TREE_ROOM
from polydraft.sampling import processing as sampling

MOST_PREFIXES = 1024
"""Prefixes of all outputs together: rows that the target scores before a first token, as of a prompt of so many tokens."""
MOST_TOKENS = 64
"""Tokens of one output: a path has to fit a forward pass."""
MOST_LOGITS = 1 << 24
"""Of one forward pass; 64 MB."""
REMEMBERED = 16
"""Prompts whose weights stay for further samples."""
OVER = -1
"""In place of a node: the output has ended."""
TOO_LARGE = (
    "structured_outputs.exact was given with {reason}; expected at most {most}. Give fewer or shorter texts, or leave exact out: outputs then follow "
    "the distribution that is masked at each token."
)


@dataclass(frozen=True)
class Prefixes:
    """All prefixes of the outputs of a grammar, in tokens, each behind its parent and before its siblings (preorder); node 0 is the empty one.

    tokens, parents, depths: of each node.  may_end: whether an output may end there.  children: node by next token.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    may_end: list[bool]
    children: list[dict[int, int]]

    @classmethod
    def of(cls, following: Callable[[tuple[int, ...]], Seq[int]], stop_ids: Seq[int]) -> "Prefixes":
        """following: the tokens that may come next behind a prefix.

        Raises:
            InvalidInputError: more than MOST_PREFIXES of them, or outputs of more than MOST_TOKENS.

        Example:
            >>> found = Prefixes.of(lambda path: [[1, 2], [0]][len(path)], stop_ids=[0])
            >>> found.tokens, found.parents, found.may_end
            ([-1, 1, 2], [-1, 0, 0], [False, True, True])
        """
        made = cls([], [], [], [], [])
        open_ = list[tuple[tuple[int, ...], int]]([((), -1)])
        while open_:
            path, parent = open_.pop()
            node = made._add(path, parent)
            ids = following(path)
            after = [token for token in ids if token not in stop_ids]
            made.may_end.append(len(after) < len(ids))
            if after and len(path) >= MOST_TOKENS:
                raise InvalidInputError(
                    TOO_LARGE.format(reason="a longer output", most=f"{MOST_TOKENS} tokens")
                )
            if node + len(open_) + len(after) >= MOST_PREFIXES:
                raise InvalidInputError(
                    TOO_LARGE.format(
                        reason="a form of more prefixes", most=f"{MOST_PREFIXES} prefixes of all its outputs"
                    )
                )
            open_ += [((*path, token), node) for token in reversed(after)]
        return made

    def _add(self, path: tuple[int, ...], parent: int) -> int:
        """A node at the end of a path, which is not known yet to be the end of an output."""
        node = len(self.tokens)
        self.tokens.append(path[-1] if path else -1)
        self.parents.append(parent)
        self.depths.append(len(path))
        self.children.append({})
        if parent >= 0:
            self.children[parent][path[-1]] = node
        return node

    def ancestors(self, node: int) -> list[int]:
        """Above a node, from the root down."""
        above = list[int]()
        while (node := self.parents[node]) >= 0:
            above.append(node)
        return above[::-1]

    def tree(self, nodes: Seq[int], root: int) -> TokenTree:
        """Of some nodes with all above them, behind a token."""
        place = {node: n for n, node in enumerate(nodes)}
        tokens = np.array([[root, *(self.tokens[node] for node in nodes[1:])]])
        parents = np.array([[-1, *(place[self.parents[node]] for node in nodes[1:])]])
        return TokenTree.of(tokens, parents)

    def pieces(self, most: int) -> Iterator[tuple[list[int], int]]:
        """Nodes of trees of at most so many, and how many of them stand in an earlier one: the ancestors of the first that is new.

        Example:
            >>> found = Prefixes.of(lambda path: [[1, 2, 3], [0]][len(path)], stop_ids=[0])
            >>> list(found.pieces(3))
            [([0, 1, 2], 0), ([0, 3], 1)]
        """
        first = 0
        while first < len(self.tokens):
            above = self.ancestors(first)
            end = min(len(self.tokens), first + most - len(above))
            yield [*above, *range(first, end)], len(above)
            first = end


@dataclass
class ExactGrammar:
    """A `params.ConstraintSource` of outputs that are weighed. prefixes: of all outputs.  stop_ids: that end one.

    remembered: weights by prompt and sampling parameters; they are the target's own, the same for each sample.
    """

    prefixes: Prefixes
    stop_ids: tuple[int, ...]
    vocab_size: int
    remembered: OrderedDict[object, Float[np.ndarray, " P"]] = field(
        default_factory=OrderedDict[object, np.ndarray]
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def longest(self) -> int:
        """Tokens of the longest output, without the one that ends it."""
        return max(self.prefixes.depths)

    def constraint(self, prompt_length: int) -> "ExactOutput":
        """Of one output, which begins behind so many tokens."""
        return ExactOutput(self, prompt_length)


@dataclass
class ExactOutput:
    """A `params.WeightedConstraint`. log_completed: [P] the logarithm of w at each prefix, None until the target has scored them."""

    source: ExactGrammar
    prompt_length: int
    log_completed: Float[np.ndarray, " P"] | None = None

    def allowed(self, context: Seq[int], tokens: Seq[int], parents: Seq[int]) -> Bool[np.ndarray, "N V"]:
        """See `params.Constraint`."""
        return self.log_weights(context, tokens, parents) > -np.inf

    def log_weights(self, context: Seq[int], tokens: Seq[int], parents: Seq[int]) -> Float[np.ndarray, "N V"]:
        """See `params.WeightedConstraint`.

        Raises:
            InvalidInputError: a target to which no output is possible.
        """
        weights = self._weights
        nodes: list[int | None] = [self._end_of(context[self.prompt_length :])]
        rows = np.zeros((len(tokens), self.source.vocab_size))
        for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if n:
                nodes.append(self._next(nodes[parent], token) if parent >= 0 else None)
            node = nodes[n]
            if node is None:
                continue
            rows[n] = -np.inf
            if node == OVER or self.source.prefixes.may_end[node]:
                rows[n, list(self.source.stop_ids)] = 0.0
            if node != OVER:
                after = self.source.prefixes.children[node]
                rows[n, list(after)] = weights[list(after.values())]
        return rows

    @property
    def _weights(self) -> Float[np.ndarray, " P"]:
        weights = self.log_completed
        assert weights is not None, "a step weighs outputs before it drafts"
        if weights[0] == -np.inf:
            raise InvalidInputError(
                "structured_outputs.exact was given with texts that the model's own distribution does not have; expected one of them to be possible. "
                "Look at logit_bias."
            )
        return weights

    def _next(self, node: int | None, token: int) -> int | None:
        """Where a token leads: OVER behind the end, None where it may not be."""
        if node is None:
            return None
        if token in self.source.stop_ids:
            return OVER if node == OVER or self.source.prefixes.may_end[node] else None
        return None if node == OVER else self.source.prefixes.children[node].get(token)

    def _end_of(self, output: Seq[int]) -> int:
        node: int | None = 0
        for token in output:
            node = self._next(node, token)
        if node is None:
            raise InvalidInputError(
                f"an output of {len(output)} tokens was given that its form does not have."
            )
        return node

    def weigh(self, target: Target, slot: int, request: Request) -> None:
        """Have the target score all prefixes behind a prompt, which is in a slot up to its last token."""
        params = request.params.with_(structured_outputs=None)
        name = request.source_token_ids, request.prompt_token_ids, _logits_of(params)
        with self.source.lock:
            self.log_completed = self.source.remembered.get(name)
        if self.log_completed is not None:
            return
        edges = log_probs_of(self.source, target, slot, request.prompt_token_ids, params)
        self.log_completed = completed(self.source.prefixes, edges)
        with self.source.lock:
            self.source.remembered[name] = self.log_completed
            while len(self.source.remembered) > REMEMBERED:
                self.source.remembered.popitem(last=False)


def _logits_of(params: SamplingParams) -> tuple[object, ...]:
    """What the target's distribution depends on, truncation apart."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return params.temperature, *penalties, tuple(sorted(params.logit_bias.items()))


@dataclass(frozen=True)
class EdgeLogProbs:
    """log p(t | x) of the target at each prefix. tokens: [P] of the token that leads to a node.  end: [P] of all tokens that end the output there."""

    tokens: Float[np.ndarray, " P"]
    end: Float[np.ndarray, " P"]


def log_probs_of(
    source: ExactGrammar, target: Target, slot: int, prompt: Seq[int], params: SamplingParams
) -> EdgeLogProbs:
    """Of every prefix, in as many forward passes as they need; the KV cache stays as it is. params: without the form."""
    prefixes = source.prefixes
    made = EdgeLogProbs(*np.full((2, len(prefixes.tokens)), -np.inf))
    rows = min(TREE_ROOM, max(2 + MOST_TOKENS, MOST_LOGITS // source.vocab_size))
    for nodes, num_known in prefixes.pieces(rows):
        tree = prefixes.tree(nodes, prompt[-1])
        logits = target.score([slot], tree).logits
        decoded = sampling.in_context(logits, tree, [prompt], [len(prompt)], [params], source.stop_ids)[0]
        for node, row in zip(nodes[num_known:], decoded[num_known:], strict=True):
            scaled = row.astype(np.float64) / params.temperature
            log_probs = scaled - np.logaddexp.reduce(scaled)
            if prefixes.may_end[node]:
                made.end[node] = np.logaddexp.reduce(log_probs[list(source.stop_ids)])
            for token, child in prefixes.children[node].items():
                made.tokens[child] = log_probs[token]
    return made


def completed(prefixes: Prefixes, edges: EdgeLogProbs) -> Float[np.ndarray, " P"]:
    """The logarithm of w, [P]: of the probability that the target goes on from a prefix to any valid output.

    Example:
        >>> both = Prefixes([-1, 1, 2], [-1, 0, 0], [0, 1, 1], [False, True, True], [{1: 1, 2: 2}, {}, {}])
        >>> np.exp(completed(both, EdgeLogProbs(np.log([1.0, 0.5, 0.25]), np.log([1e-9, 0.8, 0.4])))).round(3).tolist()
        [0.5, 0.8, 0.4]
    """
    log_completed = edges.end.copy()
    log_completed[[not ends for ends in prefixes.may_end]] = -np.inf
    for node in range(len(prefixes.tokens) - 1, 0, -1):
        parent = prefixes.parents[node]
        reached = edges.tokens[node] + log_completed[node]
        log_completed[parent] = np.logaddexp(log_completed[parent], reached)
    return log_completed


def weigh(target: Target, sequences: Seq[Sequence]) -> None:
    """Before a step: the target scores the prefixes of outputs that are weighed and have not begun."""
    for s in sequences:
        output = s.request.params.structured_outputs
        if isinstance(output, ExactOutput) and output.log_completed is None:
            output.weigh(target, s.cursor.slot, s.request)
