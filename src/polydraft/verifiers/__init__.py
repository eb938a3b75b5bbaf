"""For those who want only the verifier: a draft and the target's distributions in, a verdict out."""

from jaxtyping import Float
from torch import Tensor

from polydraft.core import Draft, Verdict
from polydraft.errors import IncompatibleError
from polydraft.methods import registry
from polydraft.verifiers import inputs


def verify(name: str, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> Verdict:
    """Apply the verifier `name` to a draft.

    target_probs: distribution of the next token at every node, after sampling parameters; rows sum to 1.

    Raises:
        UnknownNameError: no verifier of that name.
        IncompatibleError: the verifier is not exact for this draft sampling or shape.
        InvalidInputError: a malformed tree, rows that do not exist or are no distributions, a drawn token without probability; see `verifiers.inputs`.

    Example:
        >>> import torch
        >>> from polydraft import Draft, DraftSampling, TokenTree, TreeShape
        >>> q, p = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
        >>> chain = TokenTree.chain(torch.tensor([[0, 0]]))  # the root, then token 0 drawn from q
        >>> draft = Draft(chain, DraftSampling.IID, TreeShape.CHAIN, q, torch.tensor([[-1, 0]]))
        >>> verify("speculative", draft, p).stop.tolist()
        [[0.5, 0.5]]
    """
    verifier = registry.verifier(name)
    if draft.sampling not in verifier.info.draft_sampling or draft.shape not in verifier.info.shapes:
        raise IncompatibleError(
            f"a {draft.shape.name} draft with draft sampling {draft.sampling.name} was given to the verifier {name!r}; it is exact for draft sampling "
            f"{sorted(x.name for x in verifier.info.draft_sampling)} and shapes {sorted(x.name for x in verifier.info.shapes)}. Choose another verifier."
        )
    inputs.check(draft, target_probs)
    return verifier(draft, target_probs)
