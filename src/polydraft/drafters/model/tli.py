"""Drafts from a model with another vocabulary, restricted to the common tokens.

Timor et al. 2025 (arXiv 2502.05202), TLI; see `models.tokens.translated` for the distribution. The draft model looks like one of the target's
vocabulary, so all kinds of `drafters.model.paths` and all verifiers for them serve unchanged.
"""

from dataclasses import replace
from typing import Any

from polydraft.core import DraftSampling, Target, TreeShape
from polydraft.drafters.base import Parts
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import method
from polydraft.models.slot_pool import Slots
from polydraft.models.tokens.translated import TranslatedModel
from polydraft.models.tokens.vocabulary import Translation


class TliDrafter(ModelDrafter):
    """A smaller model of another tokenizer as a drafter; kinds and errors as for `ModelDrafter`.

    Example:
        >>> TliDrafter.methods[0].arxiv
        '2502.05202'
    """

    methods = (
        method(
            "tli",
            "Smaller model of another vocabulary, common tokens",
            "2502.05202",
            {DraftSampling.IID},
            {TreeShape.CHAIN, TreeShape.PATHS},
            own_vocabulary=True,
        ),
    )

    def __init__(
        self, model: Target, kind: str = "paths", *, stop_ids: Any = (), slots: Slots | None = None
    ) -> None:
        super().__init__(model, kind, stop_ids=stop_ids, slots=slots)
        name = "tli" if kind == "paths" else f"tli:{kind}"
        general = self.info
        same = {"draft_sampling": general.draft_sampling, "shapes": general.shapes, "ranked": general.ranked}
        self.info = replace(self.methods[0], name=name, **same)

    @classmethod
    def build(cls, parts: Parts, *, kind: str = "paths") -> "TliDrafter":
        """For the engine: translate between its tokenizer and the draft's.

        Raises:
            InvalidInputError: a draft model or one of the tokenizers is missing.
            IncompatibleError: no token in common.
        """
        check_parts(parts, "tli")
        assert parts.draft_model is not None
        V = parts.target.vocab_size
        translation = Translation.of(parts.tokenizer, parts.draft_tokenizer, V, parts.draft_model.vocab_size)
        model = TranslatedModel(parts.draft_model, translation, V)
        return cls(model, kind, stop_ids=parts.eos_token_ids, slots=parts.draft_slots)


def check_parts(parts: Parts, name: str) -> None:
    """Refuse to go from one vocabulary to another without a draft model and both tokenizers."""
    needed = {
        "a draft model": parts.draft_model,
        "a tokenizer": parts.tokenizer,
        "a draft_tokenizer": parts.draft_tokenizer,
    }
    missing = [what for what, part in needed.items() if part is None]
    if missing:
        raise InvalidInputError(
            f"drafter {name!r} was asked for without {' and '.join(missing)}; expected a draft model and both tokenizers. "
            "Build the engine with from_pretrained(target, draft_model=...), or give them to Engine.of."
        )
