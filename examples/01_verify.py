"""Only the rule: two drafted paths go in, a verdict comes out, and enumeration shows that the distribution is kept."""

from itertools import product

import torch

from polydraft import Draft, DraftSampling, TokenTree, TreeShape, verify

V = 3
K = 2
L = 2  # vocabulary, paths, depth
CONTEXTS = [path for depth in range(L + 2) for path in product(range(V), repeat=depth)]
noise = torch.Generator().manual_seed(0)


def distribution() -> torch.Tensor:
    return torch.softmax(torch.randn(V, generator=noise, dtype=torch.float64), 0)


p = {
    context: distribution() for context in CONTEXTS
}  # a toy target: one random distribution for every context
q = {context: (p[context] + distribution()) / 2 for context in CONTEXTS}  # and a draft that is half right


def draft(paths: tuple[tuple[int, ...], ...]) -> tuple[Draft, torch.Tensor, list[tuple[int, ...]]]:
    """K sampled paths as a draft, with the target's distribution at every node."""
    nodes: list[tuple[int, ...]] = [(), *(path[: d + 1] for path in paths for d in range(L))]
    parents = [-1] + [0 if d == 0 else 1 + k * L + d - 1 for k in range(K) for d in range(L)]
    tokens = torch.tensor([[0] + [node[-1] for node in nodes[1:]]])
    above = sorted({node[:-1] for node in nodes[1:]})
    rows = torch.tensor([[-1] + [above.index(node[:-1]) for node in nodes[1:]]])
    tree = TokenTree(tokens, torch.tensor([parents]))
    drawn_from = torch.stack([q[c] for c in above])[None]
    return (
        Draft(tree, DraftSampling.IID, TreeShape.PATHS, drawn_from, rows),
        torch.stack([p[c] for c in nodes])[None],
        nodes,
    )


def prob(distribution: dict[tuple[int, ...], torch.Tensor], path: tuple[int, ...]) -> float:
    return float(torch.stack([distribution[path[:d]][x] for d, x in enumerate(path)]).prod()) if path else 1.0


emitted = dict.fromkeys(product(range(V), repeat=L + 1), 0.0)
tokens_per_step = 0.0
for paths in product(product(range(V), repeat=L), repeat=K):
    weight = prob(q, paths[0]) * prob(q, paths[1])
    given, target_probs, nodes = draft(paths)
    verdict = verify("greedy_traversal", given, target_probs)
    for n, stop in enumerate(verdict.stop[0].tolist()):
        tokens_per_step += weight * stop * (len(nodes[n]) + 1)
        for extra, chance in enumerate(verdict.after(torch.tensor([n]))[0].tolist()):
            block = (*nodes[n], extra)
            for text in emitted:  # the target goes on from the block
                if text[: len(block)] == block:
                    emitted[text] += weight * stop * chance * prob(p, text) / prob(p, block)
error = max(abs(emitted[text] - prob(p, text)) for text in emitted)
print(
    f"drafts enumerated: {V ** (K * L)}, tokens per step: {tokens_per_step:.4f}, distribution exact to 1e-12: {error < 1e-12}"
)

# drafts enumerated: 81, tokens per step: 2.5454, distribution exact to 1e-12: True
