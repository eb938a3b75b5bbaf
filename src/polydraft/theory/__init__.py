"""What theory says of verifiers, for rows of probabilities: optima, acceptance in closed form, bounds on tokens, best trees, speed.

    optimum     the largest acceptance of any lossless verifier at one node, for every draft sampling; the gap of a verifier to it
    acceptance  of each verifier at one node, in closed form or by an exact recursion
    bounds      what no lossless verifier exceeds over several tokens: paths, deterministic trees, races (channel simulation);
                the optimum of one node or of whole blocks by linear programming, for small cases
    trees       the best draft tree by position (Sequoia), of a race (ERSD), or by path probability (OPT-Tree, EAGLE-2)
    speed       tokens per step against what a call costs
    compare     expected tokens of every lossless verifier on rows p and q, and the bound, as a table and a plot

Rows are float64 arrays of NumPy, [V], that sum to one. Papers are named where their formula stands.
"""

from polydraft.theory.comparison import Compared, Comparison, compare

__all__ = ["Compared", "Comparison", "compare"]
