"""What the comparison of one file in several engines measures: continuations, and starts of engines."""

from dataclasses import dataclass
from typing import NamedTuple

CONTEXT = 2048
DRAFT_LENGTH = 4
"""Tokens that llama.cpp drafts with a draft model; its own default is 3."""
PEER_MODES = ("plain", "draft", "ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_mod", "ngram_cache")
"""What llama.cpp offers: no drafts, the draft model, and lookups in the text so far."""
PROGRAM = "python -m studies.same_file"
OURS = "polydraft"
PEER = "llama.cpp"
IK = "ik_llama.cpp"
OPENVINO = "OpenVINO"
PEERS = (PEER, IK, OPENVINO)
TRANSFORMERS = "transformers"
OPENVINO_MODES = ("plain", "draft", "lookup")
"""What OpenVINO GenAI offers: no drafts, the draft model, and lookups in the prompt."""


@dataclass(frozen=True)
class Continuation:
    """One answer. mode: engine and mode.  first_tokens: that came with the first step, whose speed is the prompt's."""

    mode: str
    threads: int
    temperature: float
    category: str
    prompt: int
    repetition: int
    first_token_seconds: float
    seconds: float
    first_tokens: int
    num_tokens: int

    @property
    def cell(self) -> tuple[str, int, float, int, int]:
        """What there is one of."""
        return self.mode, self.threads, self.temperature, self.prompt, self.repetition


@dataclass(frozen=True)
class Start:
    """Of one engine: seconds until it answers, and the most memory that its process held, in MB."""

    engine: str
    threads: int
    start_seconds: float
    memory_mb: float


class Job(NamedTuple):
    """What a worker is sent."""

    mode: str
    token_ids: list[int]
    num_tokens: int
    temperature: float
    seed: int
