"""For those who want only the verifier: a draft and the target's distributions in, a verdict out."""

from jaxtyping import Float

from polydraft.core import Draft, Verdict, Verifier
from polydraft.core.arrays import Array
from polydraft.errors import IncompatibleError
from polydraft.methods import registry
from polydraft.verifiers import inputs


def verify(name: str | Verifier, draft: Draft, target_probs: Float[Array, "B N V"]) -> Verdict:
    """Apply a verifier to a draft; the verdict has arrays of the kind of `target_probs`: NumPy's, PyTorch's or JAX's.

    name: of `polydraft methods`, or the verifier itself, such as `importance.of(512)`.
    target_probs: distribution of the next token at every node, after sampling parameters; rows sum to 1.

    Raises:
        UnknownNameError: no verifier of that name.
        IncompatibleError: the verifier is not exact for this draft sampling or shape.
        InvalidInputError: a malformed tree, rows that do not exist or are no distributions, a drawn token without probability; see `verifiers.inputs`.

    Example:
        >>> import numpy as np
        >>> from polydraft import Draft, DraftSampling, TokenTree, TreeShape
        >>> q, p = np.array([[[0.5, 0.5]]]), np.array([[[0.25, 0.75], [0.5, 0.5]]])
        >>> chain = TokenTree.chain(np.array([[0, 0]]))  # the root, then token 0 drawn from q
        >>> draft = Draft(chain, DraftSampling.IID, TreeShape.CHAIN, q, np.array([[-1, 0]]))
        >>> verify("speculative", draft, p).stop.tolist()
        [[0.5, 0.5]]
    """
    verifier = registry.verifier(name) if isinstance(name, str) else name
    if draft.sampling not in verifier.info.draft_sampling or draft.shape not in verifier.info.shapes:
        raise IncompatibleError(
            f"a {draft.shape.name} draft with draft sampling {draft.sampling.name} was given to the verifier {verifier.info.name!r}; it is exact for draft sampling "
            f"{sorted(x.name for x in verifier.info.draft_sampling)} and shapes {sorted(x.name for x in verifier.info.shapes)}. Choose another verifier."
        )
    inputs.check(draft, target_probs)
    return verifier(draft, target_probs)
