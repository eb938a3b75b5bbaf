"""What is known of an engine before weights are read: which models it is of, whether they fit each other, and how long its texts may be.

It is told from names, headers and small files; a model that has to be downloaded first is not looked into.
"""

from typing import NamedTuple

from polydraft.config import EngineConfig
from polydraft.errors import CapacityError
from polydraft.models import pair
from polydraft.models.loading.matching import check_draft_vocabulary, check_same_context, check_same_tokens
from polydraft.models.store import hub
from polydraft.models.store.catalogue import default_draft
from polydraft.models.store.store import Store, opened

OF_ONE_VOCABULARY = ("auto", "model", "amusd")
"""Drafters whose draft models have the target's tokens; others are asked once they are imported."""


class Plan(NamedTuple):
    """config: of the engine.  name: of the target.  method: the drafter's name without its kind, "" for an object.
    draft_name: of the draft model that is named, or that the table of models has.
    target, draft: their stores, None for a model that is not here yet.
    """

    config: EngineConfig
    name: str
    method: str
    draft_name: str | None
    target: Store | None
    draft: Store | None

    @classmethod
    def of(cls, config: EngineConfig) -> "Plan":
        """Of a configuration.

        Example:
            >>> plan = Plan.of(EngineConfig(max_model_len=512))
            >>> plan.name, plan.method, plan.draft_name is not None, plan.length
            ('embedded', 'auto', True, 512)
        """
        name = config.model or pair.EMBEDDED
        method = config.drafter.partition(":")[0] if isinstance(config.drafter, str) else ""
        listed = default_draft(name) if method in ("auto", "model") else None
        draft_name = config.draft_model or listed
        draft = None if draft_name is None else _store(draft_name)
        return cls(config, name, method, draft_name, _store(name), draft)

    @property
    def length(self) -> int | None:
        """Of the longest text, where it is known."""
        return None if self.target is None else self.config.max_model_len or self.target.context

    def check(self) -> None:
        """Refuse models that do not fit each other, or are asked for longer texts than they hold.

        Raises:
            IncompatibleError, CapacityError, InvalidInputError: each says what to do.
        """
        self._check_tokens()
        for store in (self.target, self.draft):
            asked = self.config.max_model_len or 0
            if store is not None and store.context is not None and asked > store.context:
                raise CapacityError(
                    f"max_model_len={asked} was given; the model's context holds {store.context}. Give at most that."
                )
        if self.draft is None or self.config.drafter in (None, "none"):
            return
        if self.draft.vocab_size is not None:
            check_draft_vocabulary(self.config.draft_vocabulary, self.draft.vocab_size)
        if self.length is not None and self.draft.context is not None:
            check_same_context(self.length, self.draft.context)

    def _check_tokens(self) -> None:
        if self.target is None or self.draft is None or self.method not in OF_ONE_VOCABULARY:
            return
        if self.target.raw_tokens == self.draft.raw_tokens:
            return
        ours = self.target.tokens
        theirs = self.draft.tokens
        if ours and theirs:
            check_same_tokens(ours, theirs)


def _store(name: str) -> Store | None:
    place = hub.local(name)
    return None if place is None else opened(place)
