"""Models and tokenizers from folders, and whether two of them speak of the same tokens."""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Int

from polydraft.config import ModelConfig, settings
from polydraft.core import EncoderDecoder, Target
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.loading.matching import check_same_tokens, without_padding
from polydraft.models.networks import lacks
from polydraft.models.plan import ModelPlan
from polydraft.models.rotary import unchanging_length
from polydraft.models.store.gguf import GgufStore
from polydraft.models.store.hub import located
from polydraft.models.store.store import opened
from polydraft.models.supported import is_encoder_decoder
from polydraft.models.tokens.encoding import Cuts, failures_as, token_ids
from polydraft.models.tokens.folder_tokenizer import folder_tokenizer
from polydraft.models.tokens.gguf_tokenizer import gguf_tokenizer
from polydraft.models.tokens.tokenizer import ROLES, BackendTokenizer, Tokenizer

BACKENDS = settings(ModelConfig)["backend"].choices


def load_model(name: str, *, as_draft: bool = False, **fields: Any) -> Target:
    """A target (or draft) model: the Llama family compiled in float32 on a CPU, else through transformers, see `in_transformers`.

    name: a folder of `save_pretrained`, a GGUF file, a name of `polydraft models list` or `OWNER/NAME` of the Hugging Face hub; see
        `hub.located`.
    as_draft: the model will draft: a file's blocks of more than four bits are rounded to four where no quantization is given.
    fields: of `config.ModelConfig`. Quantization and a KV cache in other than float32 make another model of a target; on a draft model they cost
        nothing but acceptance. Products with blocks of integers take activations rounded to eight bits a block by default, as llama.cpp's do.

    Raises:
        ModelLoadError: the folder is missing, incomplete, corrupt or no language model that is known.
        InvalidInputError: a dtype, device or backend that does not exist.
        IncompatibleError: backend="compiled" for a model that it does not cover; says why.
        CapacityError: the cache does not fit.

    Example:
        >>> from polydraft.models import pair
        >>> load_model(str(pair.draft_folder()), max_num_seqs=1).vocab_size
        2048
    """
    plan = ModelPlan.of(name, ModelConfig(**fields))
    if plan.is_spread:
        return _spread(plan)
    if plan.files is not None:
        return _compiled(plan, plan.files, as_draft)
    return _read_by_transformers(plan)


def _compiled(plan: ModelPlan, files: Checkpoint, as_draft: bool) -> Target:
    """From its files."""
    options = plan.compiled_options
    if as_draft and options["quantization"] is None and files.has_blocks:
        options["quantization"] = "int4"
    model = CompiledModel(files, **options)
    _check_sound(model, ((weight, files.read(weight)) for weight in files.outlines), plan.place)
    _say_fixed_rotary(files.config, model, plan.name)
    return model


def _read_by_transformers(plan: ModelPlan) -> Target:
    """A module of transformers: as the compiled path takes it, or as it is."""
    from polydraft.models.torch.module import load_module

    name = plan.name
    asked = plan.config
    module = load_module(
        plan.place, dtype=asked.dtype, device=asked.device, max_model_len=asked.max_model_len
    )
    reason = CompiledModel.why_unsupported(module)
    if reason is not None and asked.backend == "compiled":
        raise IncompatibleError(
            f"backend='compiled' was asked for {name!r}, but {reason}. Use backend='transformers'."
        )
    if reason is None and asked.backend in ("auto", "compiled"):
        model = CompiledModel(module, **plan.compiled_options)
        warnings.warn(
            f"{name!r} was read through transformers, with a second copy of its weights meanwhile: {plan.why_left}.",
            stacklevel=3,
        )
        _check_sound(model, _arrays_of(module), plan.place)
        model.checkpoint = None  # the module's memory is given back
        _say_fixed_rotary(module.config, model, name)
        return model
    plan.refuse_choices(reason or "as asked")
    if asked.backend == "auto" and plan.why_left is not None:
        parts = lacks(module.config)
        lack = f"That lacks {parts}" if parts else f"The reason: {plan.why_left}"
        warnings.warn(
            f"{name!r} runs through transformers, several times slower than the compiled path would. {lack}.",
            stacklevel=3,
        )
    target = in_transformers(module, name, **plan.sizes)
    _check_sound(target, _arrays_of(module), plan.place)
    return target


def in_transformers(module: Any, name: str = "", **options: Any) -> Target:
    """A module of transformers as a target: in a KV cache of ours where it follows masks, else in its own, see `own_cache`.

    name: for what is said of it.  options: `max_model_len`, `max_num_seqs`.

    Raises:
        CapacityError: the cache does not fit.
    """
    from polydraft.models.torch.hf import HFTarget
    from polydraft.models.torch.own_cache import OwnCacheTarget
    from polydraft.models.torch.seq2seq import Seq2SeqTarget

    if is_encoder_decoder(module.config):
        return Seq2SeqTarget(module, **options)
    try:
        target: HFTarget | OwnCacheTarget = HFTarget(module, **options)
    except ModelLoadError:
        target = OwnCacheTarget(module, **options)
        if target.reads_again:
            warnings.warn(
                f"{name!r} reads its whole text again for each token, which is slow: logits in the cache of transformers differ from those without.",
                stacklevel=3,
            )
    _say_fixed_rotary(module.config, target, name)
    return target


def _say_fixed_rotary(config: Any, target: Target, name: str) -> None:
    unchanging = unchanging_length(config)
    if unchanging is not None and unchanging < target.max_model_len:
        warnings.warn(
            f"the rotary frequencies of {name!r} depend on the length of a text; those of max_model_len={target.max_model_len} are taken for all "
            f"texts. Give max_model_len={unchanging} or less for those of short ones.",
            stacklevel=4,
        )


def _check_sound(target: Target, weights: Iterable[tuple[str, np.ndarray]], place: Path) -> None:
    """Refuse weights that are no numbers, by a forward pass of one token, which shows them.

    Raises:
        ModelLoadError: naming the tensor.
    """
    if isinstance(target, EncoderDecoder):  # its forward pass takes a source
        return
    is_sound = bool(np.isfinite(target.prefill([0], [[0]]).logits).all())
    target.release([0])
    target.passes = 0
    if not is_sound:
        wrong = next((name for name, weight in weights if not np.isfinite(weight).all()), "of many")
        raise ModelLoadError(
            f"the weights in {str(place)!r} hold NaN or infinity (tensor {wrong!r}); expected numbers. Copy or download it again."
        )


def _arrays_of(module: Any) -> Iterator[tuple[str, np.ndarray]]:
    """A module's weights by name."""
    from polydraft.models.torch.door import out

    return ((name, out(weight)) for name, weight in module.named_parameters())


def _spread(plan: ModelPlan) -> Target:
    """A target over several processes, or over several devices of this one."""
    from polydraft.models.torch.distributed import ShardedTarget
    from polydraft.models.torch.hf import HFTarget
    from polydraft.models.torch.module import load_module

    asked = plan.config
    if asked.tensor_parallel is not None:
        return ShardedTarget(
            plan.place,
            num_ranks=asked.tensor_parallel,
            dtype=asked.dtype,
            device=asked.device,
            **plan.sizes,
        )
    module = load_module(
        plan.place,
        dtype=asked.dtype,
        max_model_len=asked.max_model_len,
        device_map=asked.device_map,
    )
    return HFTarget(module, **plan.sizes)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model, whose name is as in `hub.located`.

    Raises:
        ModelLoadError: none there, or unreadable.

    Example:
        >>> from polydraft.models import pair
        >>> len(load_tokenizer(str(pair.target_folder())))
        2048
    """
    place = located(name)
    with failures_as(
        lambda reason: ModelLoadError(
            f"no tokenizer could be loaded from {name!r} ({reason}). "
            "Save the model's tokenizer into its folder, or give token ids instead of text."
        )
    ):
        store = opened(place)
        tokenizer = gguf_tokenizer(store) if isinstance(store, GgufStore) else folder_tokenizer(store)
        tokenizer.decode(tokenizer("a")["input_ids"])  # some damage shows only in use
        return tokenizer


def encode(tokenizer: Any, text: str, *, source: bool = False, parse_special: bool = True) -> list[int]:
    """Token ids of a prompt, as the tokenizer makes them: BOS once where it wants one, and no EOS that the text lacks.

    source: for an encoder, which reads all that the tokenizer puts around a text.
    parse_special: special tokens in the text are control tokens; False: they are text.

    Raises:
        InvalidInputError: text that the tokenizer fails on.

    Example:
        >>> from polydraft.models import pair
        >>> tokenizer = load_tokenizer(str(pair.target_folder()))
        >>> tokenizer.decode(encode(tokenizer, "def add(a, b):"))
        'def add(a, b):'
    """
    if parse_special:
        ids = token_ids(tokenizer, text, add_special_tokens=True)
    else:
        cuts = Cuts(tokenizer, text)
        around = token_ids(tokenizer, "", add_special_tokens=True)
        head = around[: around[:1] == [tokenizer.bos_token_id]]
        ids = [*head, *cuts.encode(cuts.put(text)), *around[len(head) :]]
    if source:
        return ids
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    if bos is not None:
        num_bos = 0
        while ids[num_bos : num_bos + 1] == [bos]:
            num_bos += 1
        wants_bos = num_bos > 0 or bool(getattr(tokenizer, "add_bos_token", False))
        ids = [bos] * wants_bos + ids[num_bos:]
    if (
        eos is not None
        and len(ids) > 1
        and ids[-1] == eos
        and not (parse_special and text.endswith(tokenizer.eos_token))
    ):
        ids.pop()
    return ids


def num_token_ids(tokenizer: Any, num_rows: int) -> int:
    """How many ids a tokenizer has; rows of a model's logits beyond them are padding, which gets no mass.

    num_rows: rows of the model's logits, which the result does not exceed.

    Example:
        >>> from polydraft.models import pair
        >>> num_token_ids(load_tokenizer(str(pair.target_folder())), 2176)
        2048
    """
    return min(int(known_ids(tokenizer).max()) + 1, num_rows)


def take_vocabulary(model: Target, tokenizer: Any, size: int | None = None) -> None:
    """Give probability 0 to the ids of a model that its tokenizer has no token for: rows beyond the last token are cut off, see `num_token_ids`.

    size: that number, where it is known.
    """
    ids = known_ids(tokenizer)
    model.vocab_size = min(int(ids.max()) + 1, model.vocab_size) if size is None else size
    absent = np.ones(model.vocab_size, np.bool_)
    absent[ids[ids < len(absent)]] = False
    model.absent_ids = np.flatnonzero(absent).tolist()


_KNOWN: WeakKeyDictionary[Any, tuple[int, np.ndarray]] = WeakKeyDictionary()
"""Ids by backends of tokenizers that live, with how many tokens they had then: a dictionary of 150,000 takes a tenth of a second."""


def known_ids(tokenizer: Any) -> Int[np.ndarray, " K"]:
    """Ids that have a token, without padding."""
    if not isinstance(tokenizer, BackendTokenizer):
        return np.fromiter(token_names(tokenizer).values(), np.int64)
    backend = tokenizer.backend_tokenizer
    num_tokens, ids = _KNOWN.get(backend, (0, np.zeros(0, np.int64)))
    if num_tokens != len(tokenizer):
        ids = np.fromiter(token_names(tokenizer).values(), np.int64)
        _KNOWN[backend] = len(tokenizer), ids
    return ids


def token_names(tokenizer: Any) -> dict[str, int]:
    """The tokens of a tokenizer with their ids, without padding."""
    return without_padding(tokenizer.get_vocab())


def check_same_vocabulary(
    target: Any, draft: Any, target_size: int, draft_size: int, *, role: str = "draft"
) -> int:
    """Refuse a draft whose tokens are not the target's; returns how many ids there are.

    target, draft: tokenizers.  role: what the second one is called, "amateur" for that of a decoding method.
    target_size, draft_size: rows of the models' logits; those beyond the tokenizer are padding, and their number may differ:
        set both models' `vocab_size` to the number returned, see `num_token_ids`.
    Different special roles (another EOS, say) only cost acceptance: they are warned about.

    Raises:
        IncompatibleError: naming the first token that differs, or the model that does not cover the vocabulary.
    """
    backends = [getattr(tokenizer, "backend_tokenizer", tokenizer) for tokenizer in (target, draft)]
    if backends[0] is not backends[1]:
        check_same_tokens(token_names(target), token_names(draft), role=role)
    last = int(known_ids(target).max())
    for name, size in (("target", target_size), (role, draft_size)):
        if last >= size:
            raise IncompatibleError(
                f"the tokenizer has ids up to {last}, but the {name} has only {size} rows of logits. "
                "Use one that covers the vocabulary."
            )
    for special in ROLES:
        if getattr(target, special) != getattr(draft, special):
            warnings.warn(
                f"{special} is {getattr(target, special)!r} in the target and {getattr(draft, special)!r} in the {role}; "
                "the output is not affected, but drafts may be accepted less often.",
                stacklevel=2,
            )
    return last + 1
