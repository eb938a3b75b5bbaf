"""Requests go where their prefix is: the router of the replicas' handle, in each process that sends them.

The replica that holds the longest beginning of the prompt is asked first, unless it has `margin` requests more than the idlest: a prefix
is worth a prefill, not a queue. Without a common beginning the idlest is first, and of equals the one that holds the fewest. Full ones are
passed over by Serve itself.
"""

from typing import Any

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from polydraft.integrations.ray.prefixes import SentPrefixes


class PrefixRouter(RequestRouter):
    """A request's first argument is a `ingress.Call`."""

    def initialize_state(self, prompts: int = 8, margin: int = 4) -> None:
        """prompts: that a replica remembers.  margin: requests that a replica may have more than the idlest."""
        self._prefixes = SentPrefixes(prompts)
        self._margin = margin

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, each a rank of its own, the one to ask first in front."""
        digests = _digests(pending_request)
        prefixes = self._prefixes
        waiting = {
            r.replica_id: self.replica_queue_len_cache.get(r.replica_id) or 0 for r in candidate_replicas
        }
        most = min(waiting.values(), default=0) + self._margin
        ranks = {
            name: (waiting[name] > most, -prefixes.shared(name, digests), waiting[name], prefixes.size(name))
            for name in waiting
        }
        return [
            [replica]
            for replica in sorted(candidate_replicas, key=lambda candidate: ranks[candidate.replica_id])
        ]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It holds this prompt from now on."""
        if digests := _digests(pending_request):
            self._prefixes.learn(replica_id, digests)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """What went away holds nothing."""
        super().update_replicas(replicas)
        self._prefixes.retain({replica.replica_id for replica in replicas})


def _digests(request: PendingRequest | None) -> tuple[bytes, ...]:
    return request.args[0].digests if request is not None and request.args else ()
