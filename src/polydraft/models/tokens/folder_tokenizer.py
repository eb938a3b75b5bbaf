"""The tokenizer of a folder whose `tokenizer.json` says all of it, built by the `tokenizers` library; transformers is not imported."""

from pathlib import Path
from typing import Any

from polydraft.files.schema import read_json
from polydraft.models.tokens.tokenizer import ROLES, BackendTokenizer

SETTINGS = frozenset(
    {
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "is_local",
        "local_files_only",
        "model_input_names",
    }
    | {"model_max_length", "padding_side", "tokenizer_class", *ROLES}
)
"""Of `tokenizer_config.json`, that change nothing of how texts are read, or that are read here."""


def folder_tokenizer(folder: Path) -> BackendTokenizer | None:
    """The tokenizer of a folder of `save_pretrained`, or None where transformers has to make it.

    Example:
        >>> from polydraft.models import pair
        >>> words = folder_tokenizer(pair.target_folder())
        >>> len(words), words.eos_token, words("def f")["input_ids"] == words.backend_tokenizer.encode("def f").ids
        (2048, '<|endoftext|>', True)
    """
    file = folder / "tokenizer.json"
    template = folder / "chat_template.jinja"
    settings = _settings(folder / "tokenizer_config.json")
    more_files = ("added_tokens.json", "special_tokens_map.json", "additional_chat_templates")
    if settings is None or not file.is_file() or any((folder / name).exists() for name in more_files):
        return None
    from tokenizers import Tokenizer

    backend: Any = Tokenizer.from_file(str(file))
    roles = {role: settings[role] for role in ROLES if settings.get(role) is not None}
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    if backend.truncation or backend.padding or not added.issuperset(roles.values()):
        return None
    written = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    return BackendTokenizer(backend, roles, chat_template=written)


def processor_template(folder: Path) -> str | None:
    """The chat template of `chat_template.json`, where models of pictures and text have theirs; None where there is none."""
    file = folder / "chat_template.json"
    template = read_json(file.read_bytes()) if file.is_file() else None
    written = template.get("chat_template") if isinstance(template, dict) else None
    return written if isinstance(written, str) else None


def _settings(file: Path) -> dict[str, Any] | None:
    """What the file says, or None where it says more than is read here."""
    if not file.is_file():
        return None
    settings = read_json(file.read_bytes())
    whole = (
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    )  # the others make a tokenizer of parts of the file
    if (
        not isinstance(settings, dict)
        or settings.get("tokenizer_class") not in whole
        or settings.keys() - SETTINGS
    ):
        return None
    texts = [settings.get(name) for name in (*ROLES, "chat_template")]
    plain = all(text is None or isinstance(text, str) for text in texts)
    return settings if plain and not settings.get("clean_up_tokenization_spaces") else None
