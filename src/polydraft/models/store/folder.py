"""A folder of `save_pretrained` as a store: its JSON files are read once, and its safetensors files checked once."""

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polydraft.errors import ModelLoadError
from polydraft.files.schema import CONFIG, fault, read_json
from polydraft.models.store.gguf import SAMPLING, positive

if TYPE_CHECKING:
    from polydraft.models.store.packed_codes import PackedWeight
    from polydraft.models.store.scaled_weights import Scaling
    from polydraft.models.store.tensor_files import FolderTensor

CONFIGURATION = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
VOCABULARY = "tokenizer.json"


class FolderStore:
    """A folder; see `store.Store`. What it has no file for, it says nothing of.

    Raises (wherever a file is read):
        ModelLoadError: it is damaged, by name.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._said: dict[str, Mapping[str, Any]] = {}

    def said(self, name: str) -> Mapping[str, Any]:
        """What one of its files of JSON says; nothing where there is none."""
        if name not in self._said:
            self._said[name] = _json(self.place / name)
        return self._said[name]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of config.json, as it is written."""
        return self.said(CONFIGURATION)

    @property
    def generation(self) -> Mapping[str, Any]:
        """Of generation_config.json."""
        return self.said(GENERATION)

    @property
    def context(self) -> int | None:
        reads_source = self.settings.get("is_encoder_decoder")
        return None if reads_source else positive(self.settings.get("max_position_embeddings"))

    @property
    def vocab_size(self) -> int | None:
        return positive(self.settings.get("vocab_size"))

    @property
    def raw_tokens(self) -> bytes:
        file = self.place / VOCABULARY
        return file.read_bytes() if file.is_file() else b""

    @property
    def vocabulary(self) -> Mapping[str, int] | None:
        """Ids by token of tokenizer.json, without those that were added to it."""
        return _vocabulary(_json(self.place / VOCABULARY))

    @property
    def tokens(self) -> Mapping[str, int]:
        written = _json(self.place / VOCABULARY)
        vocabulary = _vocabulary(written)
        added = written.get("added_tokens")
        if vocabulary is None or not isinstance(added, list):
            return {}
        whole = [token for token in added if isinstance(token, Mapping) and "id" in token]
        named = {t["content"]: t["id"] for t in whole if isinstance(t.get("content"), str)}
        return {**vocabulary, **named}

    @property
    def has_template(self) -> bool:
        beside = any(self.place.glob("*chat_template*"))
        return beside or bool(self.said(TOKENIZER).get("chat_template"))

    @property
    def sampling(self) -> Mapping[str, Any]:
        return {field: self.generation.get(field) for field in SAMPLING}

    @cached_property
    def _tensors(self) -> "tuple[dict[str, FolderTensor], list[str]]":
        from polydraft.models.store.tensor_files import entries_of

        return entries_of(self.place)

    @property
    def entries(self) -> "Mapping[str, FolderTensor]":
        """What is stored of each tensor, in the file that it is to be read from."""
        return self._tensors[0]

    @property
    def twice(self) -> list[str]:
        """Tensors that a second file has, too."""
        return self._tensors[1]

    @property
    def scalings(self) -> "Mapping[str, Scaling]":
        """What makes numbers of the weights of one byte, where it does of all; none where transformers has to know."""
        from polydraft.models.store.mx_blocks import is_mx
        from polydraft.models.store.scaled_weights import scalings_of, unexplained

        scalings = scalings_of(self.entries, self.settings)
        return {} if is_mx(self.settings) or unexplained(self.entries, scalings) else scalings

    @cached_property
    def packed(self) -> "dict[str, PackedWeight]":
        """Weights of four bits in groups that are blocks of GGUF files, by the names that they would have as numbers."""
        from polydraft.models.store.packed_codes import Packing, packed_weights, packing_of, zeros_of
        from polydraft.models.store.tensor_files import FolderWeights

        packing = packing_of(self.settings.get("quantization_config"))
        if not isinstance(packing, Packing):
            return {}
        reader = FolderWeights(self.entries, {})
        zeros = (name for name in self.entries if name.endswith(".qzeros"))
        symmetric = all((zeros_of(packing, reader.tensor(name)) == 8).all() for name in zeros)
        return packed_weights(self.entries, packing, symmetric)

    def check(self) -> None:
        """Refuse a folder without configuration, with numbers there that cannot be, or without readable safetensors weights of types that are known.

        Raises:
            ModelLoadError: naming what is missing or which file is corrupt.
        """
        _ = self._is_whole

    @cached_property
    def _is_whole(self) -> bool:
        self._check_configurations()
        self._check_files()
        self._check_types()
        return True

    def _check_configurations(self) -> None:
        folder = self.place
        if not (folder / CONFIGURATION).is_file():
            if (folder / "adapter_config.json").is_file():
                raise ModelLoadError(
                    f"{str(folder)!r} is a LoRA adapter without its model. Merge the two with peft (`merge_and_unload`) and save the whole."
                )
            raise ModelLoadError(
                f"{str(folder)!r} has no config.json. A folder of `save_pretrained` is expected."
            )
        for name in (CONFIGURATION, GENERATION):
            if problem := fault(self.said(name), CONFIG):
                raise _damaged(folder / name, problem)

    def _check_files(self) -> None:
        from safetensors import SafetensorError, safe_open

        from polydraft.models.store.tensor_files import used_files

        weights = used_files(self.place)
        if not weights:
            raise self._without_weights()
        for file in weights:
            try:
                file.open("rb").close()
                with safe_open(file, "np"):
                    pass
            except OSError as error:
                raise ModelLoadError(
                    f"{str(file)!r} cannot be read: {error.strerror or error}. Check its permissions and links."
                ) from error
            except SafetensorError as error:
                raise ModelLoadError(
                    f"{str(file)!r} is corrupt or cut off ({error}). Copy or download it again."
                ) from error

    def _without_weights(self) -> ModelLoadError:
        others = sorted(file.name for file in self.place.glob("*.safetensors"))
        pickled = [file.name for file in self.place.glob("*.bin")]
        advice = (
            f"It has {pickled[0]}, which would be unpickled: load it where you trust it and save it again with `save_pretrained`."
            if pickled
            else f"Copy model.safetensors (and its index, where there is one) into it{f'; it has {others[0]}' if others else ''}."
        )
        return ModelLoadError(f"{str(self.place)!r} has no weights in safetensors format. {advice}")

    def _check_types(self) -> None:
        """Refuse weights of one byte that neither scales beside them nor the configuration make numbers of."""
        from polydraft.models.store.scaled_weights import scalings_of, unexplained

        strange = unexplained(self.entries, scalings_of(self.entries, self.settings))
        if strange is not None and not self.is_quantized_for_transformers:
            raise ModelLoadError(
                f"the weight {strange!r} of {str(self.place)!r} is of type {self.entries[strange].dtype}, and nothing says which numbers it stands "
                "for: a scale beside it that fits, or a quantization_config that is known. Give the folder of the model in bfloat16, or a GGUF file of it."
            )

    @property
    def is_quantized_for_transformers(self) -> bool:
        """Whether transformers knows the quantization that its configuration asks for."""
        text = self.settings.get("text_config")
        quantization = self.settings.get("quantization_config") or (
            text.get("quantization_config") if isinstance(text, Mapping) else None
        )
        if not isinstance(quantization, Mapping):
            return False
        if find_spec("transformers") is None:
            return False
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

        by_bits = quantization.get("load_in_8bit") or quantization.get("load_in_4bit")
        return bool(by_bits) or quantization.get("quant_method") in [*AUTO_QUANTIZER_MAPPING]


def _vocabulary(written: Mapping[str, Any]) -> Mapping[str, int] | None:
    model = written.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    return vocabulary if isinstance(vocabulary, Mapping) else None


def _json(file: Path) -> Mapping[str, Any]:
    try:
        said = read_json(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(said, Mapping):
        raise _damaged(file, f"it is {said!r:.40}; expected settings by name")
    return said


def _damaged(file: Path, problem: str) -> ModelLoadError:
    return ModelLoadError(f"the configuration {str(file)!r} cannot be: {problem}. Copy or download it again.")
