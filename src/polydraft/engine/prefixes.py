"""Prefix caches of an engine's models, and the file in which they outlive a restart."""

import logging
import threading
import warnings
from pathlib import Path
from time import perf_counter

from polydraft.engine.loop import Loop
from polydraft.errors import PolydraftError, PrefixWarning
from polydraft.models.prefix_cache import PrefixCache
from polydraft.models.prefix_file import Contents, load_prefixes, prefix_contents, save_prefixes
from polydraft.models.slot_pool import Slots

log = logging.getLogger("polydraft.engine")
WRITE_SECONDS = 30.0
"""Minimum from the last writing of the file, or the start, to the next: so much is lost where a process is killed."""
WRITE_SHARE = 0.05
"""Of the time that may be spent on writing: a large file is written less often."""


class PrefixKeeping(Loop):
    """A loop whose prefix caches can be stored. draft_slots: of the draft model, where there is one.  prefix_cache_file: where they are stored, or None."""

    draft_slots: Slots | None = None
    prefix_cache_file: Path | None = None

    @property
    def prefix_caches(self) -> dict[str, tuple[Slots, PrefixCache]]:
        """Those of the target and of the draft model that there are, each with the slots that fill it."""
        slots = {"target": self._seats.slots} | (
            {} if self.draft_slots is None else {"draft": self.draft_slots}
        )
        return {role: (of, of.prefix_cache) for role, of in slots.items() if of.prefix_cache is not None}

    def save_prefixes(self, path: str | Path) -> int:
        """Write the KV cache entries of texts that have finished to a file, for `load_prefixes` of another engine of these models; how many tokens.

        Raises:
            InvalidInputError, CapacityError: as of `prefix_file.save_prefixes`.
        """
        return save_prefixes(path, self.prefix_contents())

    def prefix_contents(self) -> Contents:
        """What `save_prefixes` would write now."""
        with self._stepping:
            return prefix_contents(self.prefix_caches)

    def load_prefixes(self, path: str | Path) -> int:
        """Take what `save_prefixes` wrote, as far as it is of these very models and fits; how many tokens. A warning says why others are not taken.

        Raises:
            InvalidInputError: a file of another kind.
        """
        with self._stepping:
            num_tokens, reason = load_prefixes(path, self.prefix_caches)
        if reason is not None:
            warnings.warn(
                f"the prefix cache in {str(path)!r} is not used: {reason}.", PrefixWarning, stacklevel=2
            )
        return num_tokens


class PrefixWriter:
    """Writes an engine's prefix caches to their file now and then, beside what runs, so that little is lost where the process is killed.

    changed: whether requests have run since it was written.
    """

    def __init__(self, engine: PrefixKeeping) -> None:
        self._engine = engine
        self.changed = False
        self._due = perf_counter() + WRITE_SECONDS
        self._thread = threading.Thread()

    def write_if_due(self) -> float | None:
        """Begin to write, where nobody waits and it is time for it: seconds until it is, or None where nothing has changed."""
        if self._engine.prefix_cache_file is None or not self.changed:
            return None
        if self._thread.is_alive():
            return WRITE_SECONDS
        if (seconds := self._due - perf_counter()) > 0:
            return seconds
        if not self._engine.has_unfinished_requests:
            self.changed = False
            contents = self._engine.prefix_contents()
            self._thread = threading.Thread(target=self._write, args=(contents,), name="polydraft-prefixes")
            self._thread.start()
        return None

    def write(self) -> None:
        """Write what is there, behind what is being written."""
        if self._engine.prefix_cache_file is not None:
            if self._thread.ident is not None:
                self._thread.join()
            self._write(self._engine.prefix_contents())

    def _write(self, contents: Contents) -> None:
        file = self._engine.prefix_cache_file
        start = perf_counter()
        assert file is not None
        try:
            log.info("%d tokens of prompts are stored in %s", save_prefixes(file, contents), file)
        except PolydraftError as error:
            log.error("%s", error)
        seconds = perf_counter() - start
        self._due = perf_counter() + max(WRITE_SECONDS, seconds / WRITE_SHARE)
