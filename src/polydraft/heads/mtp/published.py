"""Modules for multi-token prediction as others publish them: in the target's own folder, or in one of vLLM's speculators.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2 (arXiv 2412.19437). With h[t] the target's last state and x[t+1] the token behind it:

    a[t] = norm(layer(P [norm(embedding of x[t+1]); norm(h[t])]))      the target's output rows give the distribution of x[t+2]

and a[t] in the place of h[t] drafts on, with what it drafted. The layer is one of the target's family, with its experts, gates and rotation, and
transformers runs it, for trees in slots as it runs any model (`models.torch.hf`).

    Qwen3-Next, Qwen3.5          mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.layers.0.*, mtp.norm
    DeepSeek-V3, GLM             model.layers.N.{eh_proj, enorm, hnorm, shared_head.norm}, N behind the target's layers, and the layer's
    speculators                  mtp_layers.0.{input_proj, token_layernorm, hidden_layernorm, final_layernorm}, and the layer's

Trap: the first two read h behind the target's final norm, speculators' before it. Targets give the state behind it; its weight is divided out, and the module's
own norm of a state does not see the factor that stays.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.core import Needs, Scores, Target, TokenTree
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.heads.checkpoint import flat, probe
from polydraft.heads.network import ReadsStates
from polydraft.methods.head_folders import settings_of
from polydraft.models.compiled.architectures.predictor import BEHIND, OF_QWEN, Layout
from polydraft.models.loading.silence import silent_loading
from polydraft.models.loading.tensor_files import files_of
from polydraft.models.slots import TREE_ROOM
from polydraft.models.torch.hf import HFTarget

__all__ = ["MtpModule", "PublishedMtp", "reads"]

NAMES = {
    "mtp.": OF_QWEN,
    "mtp_layers.0.": Layout("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    "": BEHIND,
}
"""By prefix."""
UNREAD = ("embed_tokens.weight", "shared_head.head.weight", "verifier_lm_head.weight")
"""Copies of the target's."""
PROVED = 64
"""Tokens of the vocabulary with which the layer is tried on trees; the target's embeddings and rows draft."""


def reads(settings: Mapping[str, Any]) -> bool:
    """Whether a configuration says that its folder has such a module."""
    if "speculators_model_type" in settings:
        return settings["speculators_model_type"] == "mtp"
    inner = {**settings, **(settings.get("text_config") or {})}
    return any(
        isinstance(inner.get(name), int) and inner[name] > 0
        for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    )


@dataclass(frozen=True)
class PublishedMtp:
    """A module's files. settings: of its layer, as of the target's config.json.  parts: the projection and the three norms of `NAMES`.
    layer: tensors of the layer, by the names of its family.  before_norm: whether it reads the state before the target's final norm.
    """

    kind = "mtp"
    settings: dict[str, Any]
    parts: tuple[Tensor, ...]
    layer: dict[str, Tensor]
    before_norm: bool

    @classmethod
    def load(cls, folder: str | Path) -> "PublishedMtp":
        """Read a folder; of a whole model's the module's tensors alone.

        Raises:
            ModelLoadError: no such module, or one with tensors that are missing or not understood, by name.
        """
        from safetensors import safe_open

        place = Path(folder).expanduser()
        folder_settings = settings_of(folder)
        settings = flat(folder_settings)
        theirs = "speculators_model_type" in folder_settings
        inner = {**settings, **(settings.get("text_config") or {})}
        try:
            files = files_of(place)
            behind = f"model.layers.{inner['num_hidden_layers']}."
            prefix = next(
                (p for p in ("mtp_layers.0.", "mtp.", behind) if any(name.startswith(p) for name in files)),
                None,
            )
            if prefix is None:
                raise ValueError("no tensor of it is there")
            *parts, layer = NAMES["" if prefix == behind else prefix]
            tensors = dict[str, Tensor]()
            for name, file in files.items():
                if name.startswith(prefix) and not name.endswith(UNREAD):
                    with safe_open(file, "pt") as opened:
                        tensors[name.removeprefix(prefix)] = opened.get_tensor(name)
            parts_of_module = tuple(tensors.pop(f"{part}.weight") for part in parts)
        except Exception as error:  # whatever these files hold: they are somebody else's
            raise ModelLoadError(
                f"{str(folder)!r} was given as a module for multi-token prediction, and cannot be read as one: {error!r}. Expected a folder "
                "with config.json and safetensors, in which the target's, or speculators', module is."
            ) from error
        if strange := [name for name in tensors if not name.startswith(layer)]:
            raise ModelLoadError(
                f"the module in {str(folder)!r} has {prefix}{strange[0]}, which is not understood. Use another head."
            )
        return cls(
            inner, parts_of_module, {name.removeprefix(layer): x for name, x in tensors.items()}, theirs
        )

    def layers_of(self, target: Target) -> tuple[int, ...]:
        """The last."""
        return (max(target.offers.hidden, default=0),)

    def check(self, target: Target) -> None:
        """Refuse another target than the module belongs to.

        Raises:
            IncompatibleError: another width, vocabulary or number of layers.
        """
        name = target.name or type(target).__name__
        width = probe(target).shape[1]
        last = max(target.offers.hidden, default=0)
        facts = {"hidden_size": width, "num_hidden_layers": last, "vocab_size": target.vocab_size}
        for field, theirs in facts.items():
            ours = self.settings.get(field)
            if ours is not None and (ours < theirs if field == "vocab_size" else ours != theirs):
                raise IncompatibleError(
                    f"the module for multi-token prediction is for a model with {field}={ours}; {name} has {theirs}. Use the target's own."
                )


def _module(head: PublishedMtp, dtype: torch.dtype) -> Any:
    """A model of one layer with the module's weights, and few tokens of its own.

    Raises:
        ModelLoadError: tensors that the layer lacks, or that it has no place for, by name.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    inner = {name: value for name, value in head.settings.items() if not name.endswith("_config")}
    config = AutoConfig.for_model(**{**inner, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    for name, value in {"vocab_size": PROVED, "first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1, "mtp_num_hidden_layers": 0,
                        "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "pad_token_id": None}.items():  # fmt: skip
        if hasattr(config, name):
            setattr(config, name, value)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    matrix, *_, last = head.parts
    generator = torch.Generator().manual_seed(0)
    h = len(matrix)
    rows = {
        name: torch.randn(PROVED, h, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors = (
        {f"model.layers.0.{name}": x for name, x in head.layer.items()} | {"model.norm.weight": last} | rows
    )
    try:
        with silent_loading():
            module, info = kind.from_pretrained(
                None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # whatever transformers says of it
        raise ModelLoadError(
            f"the module's layer is none that transformers runs: {error!r}. Use another head."
        ) from error
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *info.get("mismatched_keys", ())]
    if wrong:
        raise ModelLoadError(
            f"the module's layer has not the tensors of its family: {wrong[0]}. Get the files again."
        )
    return module


class MtpModule(ReadsStates, HFTarget):
    """The module as a draft model in slots; see `core.Target`. It reads tokens with the target's states before them, given by `give`.

    Raises:
        IncompatibleError: a module of another target.
    """

    def __init__(self, head: PublishedMtp, target: Any) -> None:
        head.check(target)
        device = target.device
        self._own = False
        self._states = torch.empty(0)
        dtype = torch.float32 if device.type == "cpu" else target.dtype
        module = _module(head, dtype).to(device)
        super().__init__(module, max_model_len=target.max_model_len, max_num_seqs=target.max_num_seqs)
        self._own = True
        self.target = target
        self.name = head.kind
        self.vocab_size = target.vocab_size
        matrix, token, state, _ = head.parts
        self._project = nn.Linear(*matrix.T.shape, bias=False)
        self._norms = deepcopy(module.model.norm), deepcopy(module.model.norm)
        with torch.no_grad():
            for part, weight in zip((self._project, *self._norms), (matrix, token, state), strict=True):
                part.weight = nn.Parameter(weight.to(device, dtype), requires_grad=False)
        self._shares = _norm_weight(target).to(device) if head.before_norm else None
        self._outputs = torch.zeros(self.max_num_seqs, TREE_ROOM, matrix.shape[0], device=device)

    def _check(self, model: Any, max_model_len: int | None) -> None:
        """Whatever the target's layers are: the module's is one of full attention."""

    @property
    def offers(self) -> Needs:
        """Nothing beyond its logits."""
        return Needs() if self._own else super().offers

    def _next_states(self, slot: int, count: int) -> Float[Tensor, "T h"]:
        states = self.take(slot, count).to(self.device).float()
        return states if self._shares is None else states / self._shares

    def _forward(
        self, inputs: Tensor, mask: np.ndarray, positions: np.ndarray, columns: np.ndarray, **options: Any
    ) -> Any:
        if not self._own:
            return super()._forward(inputs, mask, positions, columns, **options)
        embedded = self.target.embed(inputs).to(self.device)
        dtype = self.dtype
        pairs = [norm(x.to(dtype)) for norm, x in zip(self._norms, (embedded, self._states), strict=True)]
        x = self._project(torch.cat(pairs, -1))
        options |= {"output_hidden_states": True}
        out = super()._forward(x, mask, positions, columns, **options)
        self._read = out.hidden_states[-1]
        return out

    def _logits(self, output: Any) -> Float[Tensor, "B T V"]:
        if not self._own:
            return super()._logits(output)
        return self.target.head(output.hidden_states[-1]).to(self.device).float()

    @torch.inference_mode()
    def append(
        self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]
    ) -> list[tuple[Tensor, list[Tensor]]]:
        """See `slots.SlotModel.append`; one text at a time, each of its length."""
        last_logits = list[tuple[Tensor, list[Tensor]]]()
        for slot, ids in token_ids.items():
            self._states = self._next_states(slot, len(ids))[None] if self._own else self._states
            last_logits += super().append({slot: ids}, () if self._own else hidden)
        return last_logits

    @torch.inference_mode()
    def score(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        *,
        hidden: Sequence[int] = (),
        since: int = 0,
    ) -> Scores:
        """One forward pass over the nodes `since` .. N-1, whose parents were scored before; see `core.Target.score`."""
        order = self._row_order(slots)
        if not self._own or order != list(range(len(order))):
            return super().score(slots, tree, hidden=hidden, since=since)
        rows = torch.tensor(list(slots), device=self.device)[:, None]
        if since == 0:
            assert tree.num_nodes == 1, "a tree is read a depth at a time"
            self._states = torch.stack([self._next_states(slot, 1) for slot in slots])
        else:
            self._states = self._outputs[rows, tree.parents[:, since:].to(self.device).clamp(min=0)]
        scores = super().score(slots, tree, since=since)
        self._outputs[rows, torch.arange(since, tree.num_nodes, device=self.device)] = self._read.float()
        return scores


def _norm_weight(target: Any) -> Tensor:
    """What the target's final norm multiplies by.

    Raises:
        IncompatibleError: it cannot be had, or has zeros.
    """
    checkpoint = target.checkpoint
    weight = (
        None if checkpoint is None else checkpoint.read("model.norm.weight").float() + checkpoint.norm_offset
    )
    if weight is None or not weight.all():
        raise IncompatibleError(
            "the module reads states before the target's final norm, whose weight cannot be had of this target. Use another head, or a target of a folder."
        )
    return weight
