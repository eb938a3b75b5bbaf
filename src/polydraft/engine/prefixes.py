"""Prefix caches of an engine's models, and the file that keeps them across restarts."""

import warnings
from pathlib import Path

from polydraft.engine.loop import Loop
from polydraft.errors import PrefixWarning
from polydraft.models.prefix_cache import PrefixCache
from polydraft.models.prefix_file import load_prefixes, save_prefixes
from polydraft.models.slots import Slots

__all__ = ["PrefixKeeping"]


class PrefixKeeping(Loop):
    """A loop whose prefix caches can be kept. draft_slots: of the draft model, where there is one.  prefix_cache_file: where they are kept, or None."""

    draft_slots: Slots | None = None
    prefix_cache_file: Path | None = None

    @property
    def prefix_caches(self) -> dict[str, tuple[Slots, PrefixCache]]:
        """Those of the target and of the draft model that there are, each with the slots that fill it."""
        slots = {"target": self._slots} | ({} if self.draft_slots is None else {"draft": self.draft_slots})
        return {role: (of, of.prefix_cache) for role, of in slots.items() if of.prefix_cache is not None}

    def save_prefixes(self, path: str | Path) -> int:
        """Write the KV cache entries of texts that have finished to a file, for `load_prefixes` of another engine of these models; how many tokens.

        Raises:
            InvalidInputError, CapacityError: as of `prefix_file.save_prefixes`.
        """
        with self._stepping:
            return save_prefixes(path, self.prefix_caches)

    def load_prefixes(self, path: str | Path) -> int:
        """Take what `save_prefixes` wrote, as far as it is of these very models and fits; how many tokens. A warning says why others are not taken.

        Raises:
            InvalidInputError: a file of another kind.
        """
        with self._stepping:
            num_tokens, reason = load_prefixes(path, self.prefix_caches)
        if reason is not None:
            warnings.warn(f"the prefix cache in {str(path)!r} is not used: {reason}.", PrefixWarning, stacklevel=2)
        return num_tokens
