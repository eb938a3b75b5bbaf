"""Medusa: heads on the target's last state, each for a token so far ahead, draft chains and trees of independent guesses.

Cai et al. 2024 (arXiv 2401.10774). The heads see nothing of what is drafted, so that one product with the output rows serves all depths;
`heads.medusa.compiled` computes, `heads.depth_drafter` drafts. Trap: the authors' typical acceptance changes the distribution, as does a redraw after a
failed match; here any verifier that is exact for the draws decides.
"""

from polydraft.heads.depth_drafter import DepthDrafter
from polydraft.heads.drafter import head_methods
from polydraft.heads.medusa.checkpoint import MedusaCheckpoint

__all__ = ["MedusaDrafter"]


class MedusaDrafter(DepthDrafter):
    """Medusa's heads as a drafter; kinds as for `ModelDrafter`.

    Example:
        >>> MedusaDrafter.methods[0].name
        'medusa'
    """

    methods = head_methods("medusa", "Medusa heads", "2401.10774")
    checkpoint = MedusaCheckpoint
    forms = "polydraft.heads.medusa.compiled:CompiledMedusa", "polydraft.heads.medusa.network:MedusaModel"
