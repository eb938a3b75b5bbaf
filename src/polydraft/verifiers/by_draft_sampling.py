"""A rule for each draft sampling: where rounds are drafted by several drafters, each draft meets the rule that is best for how it was drawn."""

from jaxtyping import Float
from torch import Tensor

from polydraft.core import Draft, DraftSampling, Method, NoiseKey, Outcome, Verdict, Verifier, Walking
from polydraft.verifiers.match import match


class VerifierByDraftSampling:
    """A verifier that uses, for each draft sampling, a rule of its own.

    Which rule it is follows from how the draft was drawn, not from what was drawn: exact wherever the rules are.

    Example:
        >>> from polydraft.verifiers.block import block
        >>> VerifierByDraftSampling({DraftSampling.IID: block, DraftSampling.POINT_MASS: match}).info.name
        'block or match'
    """

    def __init__(self, rules: dict[DraftSampling, Verifier]) -> None:
        infos = list(dict.fromkeys(r.info for r in rules.values()))
        self.rules = rules
        self.info = Method(
            " or ".join(i.name for i in infos),
            "A rule for each draft sampling",
            "",
            max(i.year for i in infos),
            "",
            frozenset(rules),
            frozenset().union(*(i.shapes for i in infos)),
            lossless=all(i.lossless for i in infos),
        )

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> Verdict:
        return self.rules.get(draft.sampling, match)(draft, target_probs)

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """That of the draft's rule, where it has one; see `core.Verifier`."""
        rule = self.rules.get(draft.sampling, match)
        return rule.walk(draft, logits, key) if isinstance(rule, Walking) else None
