"""The tokenizer of a folder whose `tokenizer.json` says all of it, built by the `tokenizers` library; transformers is not imported."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from polydraft.errors import check_installed
from polydraft.models.store.folder import TOKENIZER, VOCABULARY, FolderStore
from polydraft.models.tokens.tokenizer import ROLES, BackendTokenizer, Tokenizer

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


def folder_tokenizer(store: FolderStore) -> Tokenizer:
    """The tokenizer of a folder of `save_pretrained`, made by transformers where its files say more than is read here.

    Example:
        >>> from polydraft.models import pair
        >>> words = folder_tokenizer(FolderStore(pair.target_folder()))
        >>> len(words), words.eos_token, words("def f")["input_ids"] == words.backend_tokenizer.encode("def f").ids
        (2048, '<|endoftext|>', True)
    """
    tokenizer = _of_files(store) or (_of_transformers if find_spec("transformers") else _as_written)(store)
    if not tokenizer.chat_template:
        # where models of pictures and text have theirs
        written = store.said("chat_template.json").get("chat_template")
        tokenizer.chat_template = written if isinstance(written, str) else tokenizer.chat_template
    return tokenizer


def _of_transformers(store: FolderStore) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(store.place, trust_remote_code=False)


def _as_written(store: FolderStore) -> BackendTokenizer:
    """As tokenizer.json has it, whatever classes of transformers make of the settings beside it.

    Raises:
        IncompatibleError: there is none, and transformers, which can do without, is not installed.
    """
    file = store.place / VOCABULARY
    if not file.is_file():
        check_installed(f"{str(store.place)!r} has no {VOCABULARY}", "transformers", extra="torch")
    from tokenizers import Tokenizer

    settings = store.said(TOKENIZER)
    names = {role: settings.get(role) for role in ROLES}
    roles = {
        role: name["content"] if isinstance(name, Mapping) else name for role, name in names.items() if name
    }
    return BackendTokenizer(
        Tokenizer.from_file(str(file)),
        roles,
        chat_template=_template(store),
        add_bos_token=bool(settings.get("add_bos_token")),
    )


def _template(store: FolderStore) -> str | None:
    file = store.place / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else store.said(TOKENIZER).get("chat_template")


def _of_files(store: FolderStore) -> BackendTokenizer | None:
    folder = store.place
    settings = store.said(TOKENIZER)
    more_files = ("added_tokens.json", "special_tokens_map.json", "additional_chat_templates")
    has_vocabulary = (folder / VOCABULARY).is_file()
    if not has_vocabulary or not _is_plain(settings) or any((folder / name).exists() for name in more_files):
        return None
    from tokenizers import Tokenizer

    backend: Any = Tokenizer.from_file(str(folder / VOCABULARY))
    roles = {role: settings[role] for role in ROLES if settings.get(role) is not None}
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    if backend.truncation or backend.padding or not added.issuperset(roles.values()):
        return None
    return BackendTokenizer(backend, roles, chat_template=_template(store))


def _is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether `tokenizer_config.json` says no more than is read here."""
    # other classes make a tokenizer of parts of the file
    whole = ("PreTrainedTokenizerFast", "TokenizersBackend")
    if settings.get("tokenizer_class") not in whole or settings.keys() - SETTINGS:
        return False
    texts = [settings.get(name) for name in (*ROLES, "chat_template")]
    are_texts = all(text is None or isinstance(text, str) for text in texts)
    return are_texts and not settings.get("clean_up_tokenization_spaces")
