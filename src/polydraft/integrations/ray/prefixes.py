"""Which replica still holds the beginning of a prompt, as far as those who send prompts can know. Nothing here knows Ray.

A prompt is known by the digests of its first 1, 2, 3 ... blocks of characters, so two prompts share as many digests as they share blocks. Of
each replica the last prompts are remembered, as many as it has slots: what it has since forgotten costs a prefill, never an answer.
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from hashlib import blake2s

BLOCK = 128
"""Characters of a block: about thirty tokens, below which a prefill costs less than a longer queue."""


def prompt_of(body: bytes) -> str:
    """The beginning of what a request asks, as text; empty where it asks nothing that can be read.

    Example:
        >>> prompt_of(b'{"prompt": "import os", "n": 1}'), prompt_of(b'{"messages": [{"role": "user"}]}'), prompt_of(b"{")
        ('"import os"', '[{"role": "user"}]', '')
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(fields, dict):
        return ""
    prompt = next((fields[name] for name in ("prompt", "messages", "input") if name in fields), "")
    instructions = fields.get("instructions") or ""
    return (f"{instructions}" + json.dumps(prompt))[: BLOCK * 256]  # so many blocks are looked at


def digests(text: str) -> tuple[bytes, ...]:
    """Of its first block, its first two, and so on; what is left behind the last whole one counts for nothing."""
    running = blake2s(digest_size=8)
    digests = list[bytes]()
    for end in range(BLOCK, len(text) + 1, BLOCK):
        running.update(text[end - BLOCK : end].encode(errors="surrogatepass"))
        digests.append(running.digest())
    return tuple(digests)


class SentPrefixes:
    """What was sent where. prompts: that a replica remembers.

    Example:
        >>> known, text = SentPrefixes(prompts=2), "x" * 300
        >>> known.learn("a", digests(text))
        >>> [known.shared(replica, digests(text + "y")) for replica in ("a", "b")]
        [2, 0]
    """

    def __init__(self, prompts: int = 8) -> None:
        self._prompts = prompts
        self._of: dict[Hashable, OrderedDict[tuple[bytes, ...], None]] = {}

    def shared(self, replica: Hashable, prompt: Sequence[bytes]) -> int:
        """Blocks at the beginning that a prompt of this replica has too."""
        own_digests = {digest for earlier in self._of.get(replica, ()) for digest in earlier}
        return next((i for i, digest in enumerate(prompt) if digest not in own_digests), len(prompt))

    def size(self, replica: Hashable) -> int:
        """Blocks that it remembers."""
        return sum(map(len, self._of.get(replica, ())))

    def learn(self, replica: Hashable, prompt: tuple[bytes, ...]) -> None:
        """This prompt was sent there."""
        prompts = self._of.setdefault(replica, OrderedDict())
        prompts[prompt] = None
        prompts.move_to_end(prompt)
        while len(prompts) > self._prompts:
            prompts.popitem(last=False)

    def retain(self, replicas: Collection[Hashable]) -> None:
        """Forget all others."""
        self._of = {
            replica: replica_digests for replica, replica_digests in self._of.items() if replica in replicas
        }
