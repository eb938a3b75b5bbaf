"""P-EAGLE: an EAGLE-3 head that drafts all depths in one forward pass, from masks behind the entries of committed tokens.

vLLM's speculators, `peagle`; EAGLE-3 is Li, Wei, Zhang & Zhang 2025 (arXiv 2503.01840). Its drafts do not depend on one another: see `heads.foretold`.
"""

from polydraft.heads.depth_drafter import CachingDrafter
from polydraft.heads.drafter import head_methods
from polydraft.heads.peagle.checkpoint import PeagleCheckpoint

__all__ = ["PeagleDrafter"]


class PeagleDrafter(CachingDrafter):
    """A head of the target as a drafter; kinds as for `ModelDrafter`.

    Example:
        >>> PeagleDrafter.methods[0].name
        'peagle'
    """

    methods = head_methods("peagle", "P-EAGLE head, one pass", "2602.01469")
    checkpoint = PeagleCheckpoint
    forms = "polydraft.heads.peagle.compiled:CompiledPeagle", "polydraft.heads.peagle.network:PeagleModel"
