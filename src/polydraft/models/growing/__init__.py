"""One grower of trees, for draft models, heads and spare siblings: a tree within a budget, drawn from rows of probabilities in compiled code.

    drawn       a tree by position, or a chain that ends by itself; spare siblings beside it, and chains behind these
    ranked      the most probable nodes, best first
    rows        where the rows come from: a hook for each kind of model
    proposals   both in one call for a whole batch, as draft models offer them

The readable forms grow the same trees a depth at a time through any model's `score`: `drafters.model.by_depth` and `drafters.model.best_first`.
"""
