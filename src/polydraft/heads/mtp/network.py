"""Modules for multi-token prediction in torch: those that are trained here, and those that others publish.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2 (arXiv 2412.19437); Cai et al. 2025, FastMTP (arXiv 2509.18362): one module for all depths.

    a_1[t] = block(P [norm(embedding of x[t+1]); norm(h[t])])           h[t]: the target's last state; distribution of x[t+2]
    a_k[t] = block(P [norm(embedding of x[t+k]); norm(a_(k-1)[t])])     of x[t+k+1]

Trap: x[t+1] belongs to h[t], the state that it was drawn from: off by one, the module learns to repeat a token.

Training is EAGLE-3's, with weights 0.6^(k-1) of the steps (FastMTP, arXiv 2509.18362).

On disk it is an EAGLE-3 head, but for what its layer reads, and it is applied to its own output.

A published module lies in the target's own folder, or in one of vLLM's speculators (`models.loading.predictor` has the names of its tensors):

    a[t] = norm(layer(P [norm(embedding of x[t+1]); norm(h[t])]))      the target's output rows give the distribution of x[t+2]

and a[t] in the place of h[t] drafts on, with what it drafted. The layer is one of the target's family, with its experts, gates and rotation, and
transformers runs it, for trees in slots as it runs any model (`models.torch.hf`).

Trap: modules in targets' folders read h behind the target's final norm, speculators' before it. Targets give the state behind it; its weight is divided
out, and the module's own norm of a state does not see the factor that stays.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.core import Needs, Scores, TokenTree
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.heads.checkpoint import HeadCheckpoint
from polydraft.heads.eagle.network import EagleHead, EagleModel, EagleRecipe
from polydraft.heads.mtp.checkpoint import MtpCheckpoint, Published
from polydraft.heads.network import ReadsStates, device_of
from polydraft.models.slots import TREE_ROOM, RowAndStates
from polydraft.models.torch.door import into, inward, outward
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.llama_layer import LlamaLayer, RMSNorm
from polydraft.models.torch.silence import silent_loading
from polydraft.numerics.floats import as_float32

PROVED = 64
"""Tokens of the vocabulary with which the layer is tried on trees; the target's embeddings and rows draft."""


def _module(head: Published, dtype: torch.dtype) -> Any:
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
    generator = torch.Generator().manual_seed(0)
    h = len(head.outer["project"])
    rows = {
        name: torch.randn(PROVED, h, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    own = {**head.layer, "model.norm.weight": head.outer["norm"]}
    tensors = {name: into(weight) for name, weight in own.items()} | rows
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

    def __init__(self, head: HeadCheckpoint, module: Published, target: Any) -> None:
        head.check(target)
        device = device_of(target)
        self._own = False
        self._states = torch.empty(0)
        dtype = torch.float32 if device.type == "cpu" else target.dtype
        model = _module(module, dtype).to(device)
        super().__init__(model, max_model_len=target.max_model_len, max_num_seqs=target.max_num_seqs)
        self._own = True
        self.target = target
        self.name = head.kind
        self.vocab_size = target.vocab_size
        matrix = module.outer["project"]
        parts = {
            "project": nn.Linear(*matrix.T.shape, bias=False),
            "embedding_norm": deepcopy(model.model.norm),
            "state_norm": deepcopy(model.model.norm),
        }
        for name, part in parts.items():
            part.weight = nn.Parameter(into(module.outer[name], device).to(dtype), requires_grad=False)
        self._project, *self._norms = parts.values()
        self._shares = _norm_weight(target).to(device) if module.before_norm else None
        self._outputs = torch.zeros(self.max_num_seqs, TREE_ROOM, matrix.shape[0], device=device)

    def _check(self, model: Any, max_model_len: int | None) -> None:
        """Whatever the target's layers are: the module's is one of full attention."""

    @property
    def offers(self) -> Needs:
        """Nothing beyond its logits."""
        return Needs() if self._own else super().offers

    def states_read(self, slot: int, count: int) -> Float[Tensor, "T h"]:
        """See `ReadsStates.states_read`."""
        states = inward(self.take(slot, count), self, torch.float32)
        return states if self._shares is None else states / self._shares

    def _forward(
        self, inputs: Tensor, mask: np.ndarray, positions: np.ndarray, columns: np.ndarray, **options: Any
    ) -> Any:
        if not self._own:
            return super()._forward(inputs, mask, positions, columns, **options)
        embedded = inward(self.target.embed(outward(inputs)), self)
        dtype = self.dtype
        pairs = [norm(x.to(dtype)) for norm, x in zip(self._norms, (embedded, self._states), strict=True)]
        x = self._project(torch.cat(pairs, -1))
        options |= {"output_hidden_states": True}
        out = super()._forward(x, mask, positions, columns, **options)
        self._read = out.hidden_states[-1]
        return out

    def logits_of(self, output: Any, *rows: Sequence[int]) -> Float[np.ndarray, "*shape V"]:
        """See `HFTarget.logits_of`; by the target's output matrix."""
        if not self._own:
            return super().logits_of(output, *rows)
        states = output.hidden_states[-1]
        return self.target.head(outward(states[rows] if rows else states))

    @torch.inference_mode()
    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[RowAndStates]:
        """See `slots.SlotModel.append`; one text at a time, each of its length."""
        last_logits = list[RowAndStates]()
        for slot, ids in token_ids.items():
            self._states = self.states_read(slot, len(ids))[None] if self._own else self._states
            last_logits += super().append({slot: ids}, () if self._own else hidden)
        return last_logits

    @torch.inference_mode()
    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """One forward pass over the nodes `since` .. N-1, whose parents were scored before; see `core.Target.score`."""
        order = self._row_order(slots)
        if not self._own or order != list(range(len(order))):
            return super().score(slots, tree, hidden=hidden, since=since)
        self._states = self.states_of(slots, tree, since)
        scores = super().score(slots, tree, since=since)
        self.put_out(slots, since, self._read)
        return scores


def _norm_weight(target: Any) -> Tensor:
    """What the target's final norm multiplies by.

    Raises:
        IncompatibleError: it cannot be had, or has zeros.
    """
    checkpoint = target.checkpoint
    weight = None
    if checkpoint is not None:
        weight = as_float32(checkpoint.read("model.norm.weight")) + np.float32(checkpoint.norm_offset)
    if weight is None or not weight.all():
        raise IncompatibleError(
            "the module reads states before the target's final norm, whose weight cannot be had of this target. Use another head, or a target of a folder."
        )
    return into(weight)


class MtpHead(EagleHead):
    """The module as it is trained and drafts."""

    def open(self, num_states: int) -> LlamaLayer:
        """The projection, and a layer that reads what it puts out."""
        h = self.config.hidden_size
        self.project = nn.Linear(2 * h, h, bias=False)
        layer = LlamaLayer(self.config)
        layer.attention_norm = RMSNorm(h, self.config.rms_norm_eps)
        return layer

    @property
    def first(self) -> nn.Linear:
        """The projection."""
        return self.project

    def read(self, features: Float[Tensor, "B T h"]) -> Float[Tensor, "B T h"]:
        """The target's last states, as they are."""
        return features.float()

    def join(self, pairs: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The projection of the pairs, and its norm."""
        x = self.project(pairs.to(self.project.weight.dtype))
        return x, self.midlayer.attention_norm(x)  # pyright: ignore[reportCallIssue]


class MtpModel(EagleModel):
    """The module as a draft model with a KV cache of its own; see `EagleModel`."""

    network_class = MtpHead


def in_torch(head: MtpCheckpoint, target: Any) -> MtpModel | MtpModule:
    """The module as a draft model in torch: another's is run by transformers."""
    return MtpModel(head, target) if head.published is None else MtpModule(head, head.published, target)


class MtpRecipe(EagleRecipe):
    """See the module."""

    checkpoint = MtpCheckpoint
    network = MtpHead
    decay = 0.6
    reads_three = False
    published: ClassVar = {}
