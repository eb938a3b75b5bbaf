"""`speculation` in a request, which is ours: how it is drafted for."""

from typing import Annotated

from pydantic import ConfigDict, Field

from polydraft.core import Budget
from polydraft.core import geometry as tree
from polydraft.server.bodies import Body


class RequestedSpeculation(Body):
    """How one request is drafted for.

    enabled: False decodes plainly.  depth, num_paths: a fixed size of its drafts; without them the server's policy.
    drafter: one that the server was started with.  verifier: any that is exact for it.
    seed_exact: the text is a function of the seed alone, whatever the load; refused where drafter, verifier and size do not give that.
    trace: tell the origin of each token, and the tree of each step.
    """

    model_config = ConfigDict(extra="forbid")  # it is ours: an unknown field is a mistake

    enabled: bool = True
    depth: Annotated[int, Field(ge=1, le=255)] | None = None
    num_paths: Annotated[int, Field(ge=1, le=255)] | None = None
    drafter: str | None = None
    verifier: str | None = None
    seed_exact: bool = False
    trace: bool = False

    def budget(self) -> Budget | None:
        """The size that was asked for."""
        if not self.enabled:
            return Budget.fixed((-1,))
        if self.depth is None and self.num_paths is None:
            return None
        return Budget.fixed(tree.paths(self.num_paths or 1, self.depth or 5))
