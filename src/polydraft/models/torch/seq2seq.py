"""Encoder-decoders of transformers (T5, BART and Marian families) as targets: the source is read once, trees are scored in the decoder.

    B  sequences of a call    T  rows of a forward pass    C  columns that they see    S  tokens of the longest source

Per slot: keys and values of the cross-attention, made when its source is encoded, and the decoder's own in the `SlotCache`. Positions
are by depth: learned and sinusoidal ones are looked up, T5's biases follow the distance between two nodes' depths. Both are put in from
outside for the length of a forward pass; `HFTarget` proves when it is built that a branching tree then gives the logits of its paths.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from polydraft.errors import CapacityError, InvalidInputError, ModelLoadError
from polydraft.models.supported import check_rolls_back, context_length
from polydraft.models.torch.cache import PassRecorder
from polydraft.models.torch.door import outward
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.proof import proof_text

RELATIVE_CONTEXT = 512
"""Tokens of a side where positions are relative and the configuration names no end: what T5 was trained with."""


class _Read(NamedTuple):
    """Of one source: keys and values by layer, [H, S, D] each."""

    keys: list[Tensor]
    values: list[Tensor]


class _Joined(NamedTuple):
    """Sources of slots together: keys and values by layer, padded, and the mask over them."""

    slots: list[int]
    layers: list[tuple[Tensor, Tensor]]
    mask: Float[Tensor, "B 1 1 S"]


class _Both(EncoderDecoderCache):
    """The decoder's own cache beside cross-attention that is there already, or is to be taken."""

    def __init__(self, cache: Cache, cross: Any, ready: bool) -> None:
        self.self_attention_cache = cache
        self.cross_attention_cache = cross
        self.is_updated = dict.fromkeys(range(len(cross.layers)), ready)


class Seq2SeqTarget(HFTarget):
    """An encoder-decoder of transformers that scores token trees in its decoder, in slots; see `core.EncoderDecoder`.

    model: T5, BART or Marian, and their kin, in evaluation mode from now on.
    max_model_len: most tokens of an output, start token included. Default: the model's context, 512 where positions are relative.
    max_source_len: most tokens of a source. Default: the model's context; where positions are relative, 512 or `max_model_len` if that is more.

    Attributes as of `HFTarget`; decoder_prompt: the ids that every output begins with (the start token, and a first token that is forced).
    Ids that the generation settings ban (`bad_words_ids` of one token, `suppress_tokens`) have probability zero.
    `score` and `prefill` need `encode` of the slot before; `release` forgets it.

    Raises:
        ModelLoadError: another kind of model, one without decoder start token, or one that does not follow masks and positions.
        CapacityError: a cache larger than the free memory, or a context longer than the model's.

    Example:
        >>> from polydraft.core import TokenTree
        >>> from transformers import T5Config, T5ForConditionalGeneration
        >>> config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
        >>> target = Seq2SeqTarget(T5ForConditionalGeneration(config), max_num_seqs=2)
        >>> target.encode([0], [[3, 1, 4, 1]])
        >>> target.score([0], TokenTree(np.array([[0, 5, 9]]), np.array([[-1, 0, 0]]))).logits.shape
        (1, 3, 32)
    """

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_source_len: int | None = None,
    ) -> None:
        self._sources: dict[int, _Read] = {}
        self._joined: _Joined | None = None
        context = context_length(model.config)
        self.max_source_len = max_source_len or context or max(RELATIVE_CONTEXT, max_model_len or 0)
        self.decoder_prompt, self._banned = _settings(model)
        super().__init__(
            model, max_model_len=max_model_len or context or RELATIVE_CONTEXT, max_num_seqs=max_num_seqs
        )

    # Building

    _said_length = 0  # positions that are looked up by it are put in from outside

    def _check(self, model: Any, max_model_len: int | None) -> None:
        check_rolls_back(model.config, max_model_len, model)
        if not model.config.is_encoder_decoder:
            raise ModelLoadError(
                f"{type(model).__name__} was given, which has no encoder; expected T5, BART or Marian. Use HFTarget."
            )

    def _choose_attention(self) -> str:
        super()._choose_attention()
        return self.model.config._attn_implementation

    @torch.inference_mode()
    def _build(self, max_model_len: int | None, max_num_seqs: int) -> None:
        decoder = self.model.get_decoder()
        self._positions_module: nn.Module | None = getattr(decoder, "embed_positions", None)
        self._biased: list[Any] = [
            m for m in decoder.modules() if getattr(m, "has_relative_attention_bias", False)
        ]
        if (self._positions_module is None) != bool(self._biased):
            raise ModelLoadError(
                f"{type(self.model).__name__} has neither absolute positions nor relative biases that are known here. Use T5, BART or Marian."
            )
        self._bias_tables = [_by_distance(m) for m in self._biased]
        text = proof_text(self.model.config.vocab_size, max_model_len or RELATIVE_CONTEXT)
        source = torch.tensor([[0, 2]], device=self.device)
        path = torch.tensor([text], device=self.device)
        out = self.model(input_ids=source, decoder_input_ids=path, output_hidden_states=True)
        states = out.decoder_hidden_states
        self.vocab_size: int = out.logits.shape[-1]
        self._num_states = len(states)
        head = self.model.get_output_embeddings()
        self._plain_head = head is not None and torch.allclose(
            head(states[-1]), out.logits, rtol=1e-2, atol=1e-3
        )
        self._allocate(self._read(source)[0], max_model_len, max_num_seqs)
        self._column_positions = np.tile(np.arange(self._cache.num_columns), (self.max_num_seqs, 1))
        banned = self._banned
        self._banned = []
        self.encode([0], [source[0].tolist()])
        self._prove(text, outward(out.logits[0]))
        self._banned = banned

    # Sources

    def _read(self, source: Tensor, mask: Tensor | None = None) -> tuple[PassRecorder, PassRecorder]:
        """What the decoder's layers make of a start token and of padded sources."""
        self_attention = PassRecorder()
        cross = PassRecorder()
        start = torch.zeros(len(source), 1, dtype=torch.long, device=self.device)
        mask = torch.ones_like(source) if mask is None else mask
        self.model(
            input_ids=source,
            attention_mask=mask,
            decoder_input_ids=start,
            past_key_values=_Both(self_attention, cross, False),
            use_cache=True,
        )
        return self_attention, cross

    @torch.inference_mode()
    def encode(self, slots: Sequence[int], sources: Sequence[Sequence[int]]) -> None:
        """Read the source of each slot, equal ones once, and store the cross-attention's keys and values with the slot.

        Raises:
            CapacityError: a source longer than `max_source_len`.
            InvalidInputError: an empty source.
        """
        for slot, ids in zip(slots, sources, strict=True):
            self.check_source(ids, f"slot {slot}")
        texts = list(dict.fromkeys(map(tuple, sources)))
        padded = pad_sequence([torch.tensor(ids, device=self.device) for ids in texts], batch_first=True)
        mask = torch.arange(padded.shape[1], device=self.device) < torch.tensor(
            [[len(ids)] for ids in texts], device=self.device
        )
        self.passes += 1
        encoded = self._read(padded, mask.long())[1].states
        layers = range(len(encoded))
        read = {
            ids: _Read(
                *([encoded[layer][side][b, :, : len(ids)].clone() for layer in layers] for side in (0, 1))
            )
            for b, ids in enumerate(texts)
        }
        self._sources |= {slot: read[tuple(ids)] for slot, ids in zip(slots, sources, strict=True)}
        self._joined = None

    def check_source(self, ids: Sequence[int], whose: str) -> None:
        """Refuse a source that is empty or too long; errors as of `encode`."""
        if not ids:
            raise InvalidInputError(
                f"an empty source was given for {whose}; expected at least one token. Give some text."
            )
        if len(ids) > self.max_source_len:
            raise CapacityError(
                f"a source of {len(ids)} tokens was given for {whose}; the encoder takes at most {self.max_source_len}. "
                "Shorten it, or split the text."
            )

    def _cross(self, slots: list[int]) -> _Joined:
        """The sources of these slots; those of the last forward pass are reused."""
        if self._joined is not None and self._joined.slots == slots:
            return self._joined
        missing = [slot for slot in slots if slot not in self._sources]
        if missing:
            raise InvalidInputError(
                f"slot {missing[0]} was to be scored and has no source. Call `encode` first."
            )
        read = [self._sources[slot] for slot in slots]
        sizes = torch.tensor([x.keys[0].shape[1] for x in read])
        layers = [
            (_padded([x.keys[layer] for x in read]), _padded([x.values[layer] for x in read]))
            for layer in range(len(read[0].keys))
        ]
        longest = int(sizes.max())
        mask = torch.zeros(len(read), longest).masked_fill(
            torch.arange(longest) >= sizes[:, None], -torch.inf
        )
        self._joined = _Joined(list(slots), layers, mask[:, None, None].to(self.device, self.dtype))
        return self._joined

    # Forward passes

    def _forward(
        self, inputs: Tensor, mask: np.ndarray, positions: np.ndarray, columns: np.ndarray, **options: Any
    ) -> Any:
        self.passes += 1
        slots = self._cache.slots
        first_columns = self._cache.first_columns
        sources = self._cross(slots)
        cross = SimpleNamespace(layers=[SimpleNamespace(keys=k, values=v) for k, v in sources.layers])
        states = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device).expand(
            len(slots), sources.mask.shape[-1], -1
        )
        kind = "decoder_inputs_embeds" if inputs.ndim == 3 else "decoder_input_ids"
        with self._placed(slots, first_columns, positions, mask.shape[2]):
            out = self.model(
                **{kind: inputs},
                decoder_attention_mask=torch.from_numpy(mask)[:, None].to(self.device, self.dtype),
                encoder_outputs=BaseModelOutput(last_hidden_state=states),  # pyright: ignore
                attention_mask=sources.mask.expand(-1, -1, inputs.shape[1], -1),
                past_key_values=_Both(self._cache, cross, True),
                use_cache=True,
                **options,
            )
        return SimpleNamespace(logits=out.logits, hidden_states=out.decoder_hidden_states)

    @contextmanager
    def _placed(
        self, slots: Sequence[int], first_columns: np.ndarray, positions: np.ndarray, width: int
    ) -> Iterator[None]:
        """The positions of this forward pass in the place of the module's own, for its length. width: C."""
        with ExitStack() as undo:
            if self._positions_module is not None:
                here = torch.from_numpy(positions).to(self.device)
                offset = getattr(self._positions_module, "offset", 0)

                def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
                    return embedding(here + offset, module.weight)

                undo.callback(self._positions_module.register_forward_hook(hook).remove)
            else:
                distance = self._distances(slots, first_columns, positions, width)
                for module, table in zip(self._biased, self._bias_tables, strict=True):
                    bias = table[distance.clamp(max=len(table) - 1)].permute(0, 3, 1, 2)
                    module.compute_bias = _constant(bias)
                    undo.callback(delattr, module, "compute_bias")
            yield

    def _distances(
        self, slots: Sequence[int], first_columns: np.ndarray, positions: np.ndarray, width: int
    ) -> Tensor:
        """By how many tokens each row lies behind each column, [B, T, C]; 0 for what it does not see."""
        columns = np.arange(width)
        at = np.array(slots)[:, None]
        self._column_positions[at, first_columns[:, None] + np.arange(positions.shape[1])] = positions
        key_positions = np.where(
            columns < self.lengths[slots][:, None], columns, self._column_positions[at, columns]
        )
        return torch.from_numpy(positions[:, :, None] - key_positions[:, None]).clamp(min=0).to(self.device)

    def logits_of(self, output: Any, *rows: Sequence[int]) -> Float[np.ndarray, "*shape V"]:
        """See `HFTarget.logits_of`; without the banned tokens."""
        logits = super().logits_of(output, *rows)
        if self._banned:
            logits[..., self._banned] = -np.inf
        return logits

    # Slots

    def copy(self, source: int, slot: int, length: int) -> None:
        """See `slots.SlotModel.copy`; what was read of the source is shared."""
        super().copy(source, slot, length)
        self._sources[slot] = self._sources[source]
        self._joined = None

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots and forget their sources."""
        super().release(slots)
        for slot in slots:
            if self._sources.pop(slot, None) is not None:
                self._joined = None


def _settings(model: Any) -> tuple[tuple[int, ...], list[int]]:
    """Ids that outputs begin with, and ids that are banned, of the generation settings or the configuration."""
    config = model.config
    settings = getattr(model, "generation_config", None)

    def setting(name: str) -> Any:
        value = getattr(settings, name, None)
        return getattr(config, name, None) if value is None else value

    start = setting("decoder_start_token_id")
    if start is None:
        start = setting("bos_token_id")
    if start is None:
        raise ModelLoadError(
            f"{type(model).__name__} has no decoder start token; expected an id with which outputs begin. "
            'Write "decoder_start_token_id" into its config.json (the pad token for T5 and Marian).'
        )
    first = setting("forced_bos_token_id")
    banned = [ids[0] for ids in setting("bad_words_ids") or [] if len(ids) == 1] + list(
        setting("suppress_tokens") or []
    )
    return (start,) if first is None else (start, first), sorted(set(banned))


def _by_distance(module: Any) -> Float[Tensor, "L H"]:
    """T5's bias of a decoder row for a column so many tokens before it; from the last on it stays the same."""
    length = module.relative_attention_max_distance + 1
    more = (
        {"cache_position": torch.arange(length)}
        if "cache_position" in signature(module.compute_bias).parameters
        else {}
    )
    return module.compute_bias(length, length, **more)[0, :, -1].flip(-1).T.contiguous()


def _constant(bias: Tensor) -> Callable[..., Tensor]:
    return lambda *_, **__: bias


def _padded(rows: Sequence[Float[Tensor, "H _ D"]]) -> Float[Tensor, "B H S D"]:
    """A single row is taken as it is."""
    if len(rows) == 1:
        return rows[0][None]
    return pad_sequence([x.transpose(0, 1) for x in rows], batch_first=True).transpose(1, 2)
