"""Training a block head with a Markov part and a confidence part: DSpark (DeepSeek-AI 2026, DeepSpec).

Behind the last known token x[n+1] stands a block of it and X - 1 masks; place k foretells x[n+2+k], and what is known of the token before it is added:

    q_k = softmax(U o_k + W2 W1[x[n+1+k]])         o_k the state behind the norm at place k, U the target's output rows
    c_k = sigmoid(v [o_k; W1[x[n+1+k]]] + b)       the chance that a draft of place k is accepted, if all before it are

    loss = sum over k of decay^k loss(p_k, q_k) + the mean of the cross-entropy of c_k with sum_v min(p_k(v), q_k(v)), which trains v and b alone

W1 begins with the target's embeddings in the directions in which they differ most, W2 with nothing.

Blocks stand at every `EVERY`-th position, another set each time, and where steps really begin: from each of these blocks a step is played with its
acceptance rates, and a block stands at the token that takes the place of the first rejected draft (on-policy replay). Drafts begin behind rejections, where
text is harder to foretell than elsewhere. The loss is the mean over both.

The confidence part is calibrated on held-out text: the scale and the shift of its logits that foretell acceptance best are found on every other text and go
into its weights; the error is measured on the others.

Trap: a head whose places are trained with all tokens before them known drafts well behind its own tokens only because a place counts if all before it
were accepted, and accepted tokens have the target's distribution.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from polydraft.errors import IncompatibleError
from polydraft.heads.block.network import BlockNet
from polydraft.heads.block.training import BlockRecipe
from polydraft.heads.losses import Figures, Loss, distance
from polydraft.heads.recipe import Batch, Material, fresh_config

EVERY = 4
"""Positions of a text for one from which a block goes out."""


class Rows(nn.Module):
    """W1 and W2. words: [V, r].  drafts: [D, r]."""

    def __init__(self, words: Tensor, num_drafts: int) -> None:
        super().__init__()
        rank = words.shape[1]
        self.markov_w1 = nn.Embedding.from_pretrained(words, freeze=False)
        self.markov_w2 = nn.Linear(rank, num_drafts, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class Confidence(nn.Module):
    """v and b."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class BlockPlaces(NamedTuple):
    """Of places that count, behind the norm. states: [n, h].  words: [n, r] of the token before each.  distributions: the target's, [n, D].
    depth: [n] from 0 on.  block: [n] which of the blocks.
    """

    states: Tensor
    words: Tensor
    distributions: Tensor
    depth: Tensor
    block: Tensor


class DSparkNet(BlockNet):
    """See the module."""

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        rank = int(config.markov_rank)
        words = (
            _directions(material.embeddings.float(), rank)
            if material.embeddings.numel()
            else torch.empty(0, rank)
        )
        self.markov_head = Rows(words, len(material.ids))
        self.confidence_head = Confidence(config.hidden_size + rank)

    def places(
        self, batch: Batch, text: list[tuple[Tensor, Tensor]], rows: Tensor, at: Tensor
    ) -> BlockPlaces:
        """Of blocks that go out from the positions `at` of the texts `rows`; text: keys and values of all texts in each layer."""
        X = self.num_depths
        T = batch.tokens.shape[1]
        roots = at[:, None] + 1
        depths = torch.arange(X, device=at.device)
        before = roots + depths
        counted = batch.counted[rows[:, None], (before + 1).clamp(max=T - 1)]
        block, depth = (counted & (before + 1 < T)).nonzero(as_tuple=True)
        root_rows = self.embeddings[batch.tokens[rows, at + 1]]
        shown = self.shown(root_rows[None, :, None].expand(-1, -1, X, -1), (depths > 0).expand(1, len(at), X))
        outputs = torch.empty_like(shown[0])
        for b in rows.unique().tolist():  # blocks of one text share its keys and values
            mine = (rows == b).nonzero()[:, 0]
            entries = [(keys[b : b + 1], values[b : b + 1]) for keys, values in text]
            of_text = self.outputs(shown[:, mine], before[mine], entries, roots[mine])
            outputs[mine] = of_text[0].to(outputs.dtype)
        token_before = rows[block], before[block, depth]
        words = self.markov_head.markov_w1(batch.tokens[token_before])
        return BlockPlaces(outputs[block, depth], words, batch.distributions[token_before], depth, block)

    def drafted(self, places: BlockPlaces) -> Float[Tensor, "n D"]:
        """Logits of drafts."""
        bias = linear(
            places.words.to(self.output.dtype), self.markov_head.markov_w2.weight.to(self.output.dtype)
        )
        return self.vocabulary(places.states) + bias

    def confidence(self, places: BlockPlaces) -> Float[Tensor, " n"]:
        """Logits that drafts are accepted; nothing else learns of them."""
        return self.confidence_head.proj(
            torch.cat([places.states.float(), places.words.float()], -1).detach()
        )[:, 0].float()


def _directions(rows: Float[Tensor, "V h"], rank: int) -> Float[Tensor, "V r"]:
    """Rows in the directions in which they differ most, of unit size on average."""
    rows = rows - rows.mean(0)
    reduced = rows @ torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :rank]
    reduced = nn.functional.pad(reduced, (0, rank - reduced.shape[1]))
    return reduced / reduced.square().mean(0).sqrt().clamp(min=1e-6) * rank**-0.5


class DSparkRecipe(BlockRecipe):
    """See the module. sizes: layers, places of a block, and rank of the Markov part."""

    network = DSparkNet
    defaults: ClassVar = {"unroll": 4}
    sizes: ClassVar = {"layers": 2, "block": 4, "rank": 32}
    settings = (*BlockRecipe.settings, "slots", "in_place", "sees", "windows", "markov_rank", "markov_head_type", "enable_confidence_head",
                "confidence_head_with_markov")  # fmt: skip

    def fresh(self, material: Material) -> DSparkNet:
        """A head of its target's width, whose layers add nothing yet; keys and values are not shared: all that it knows of the target goes through them."""
        layers, block, rank = (material.sizes[name] for name in ("layers", "block", "rank"))
        form = {"slots": block, "in_place": False, "sees": ["all"] * layers, "windows": [None] * layers}
        bias = {
            "markov_rank": rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        sizes = {"block_size": block, "num_hidden_layers": layers, "model_type": "llama"}
        return DSparkNet(
            fresh_config(material.hidden_size, vocab_size=len(material.embeddings), **sizes, **form, **bias),
            material,
        )

    def started(self, material: Material, first: Any) -> DSparkNet:
        """A head as an older checkpoint has it.

        Raises:
            IncompatibleError: one of another form.
        """
        form = {"in_place": False, "markov_head_type": "vanilla", "confidence_head_with_markov": True}
        misfit = next(
            (name for name, value in form.items() if getattr(first.config, name, None) != value), None
        )
        if misfit or "mask" not in first.tensors:
            reason = (
                f"has {misfit}={getattr(first.config, misfit, None)!r}"
                if misfit
                else "has no mask of its own"
            )
            raise IncompatibleError(
                f"the head to start with {reason}; expected one that `polydraft train dspark` wrote. Start with such a head, or with none."
            )
        return self.network.of(first, material)

    def loss(self, network: Any, batch: Batch, *, steps: int, loss: Loss) -> Figures:
        """Of blocks all over the texts, whose figures these are, and of blocks where steps begin."""
        B, T = batch.tokens.shape
        device = batch.tokens.device
        text = network.injected(batch.states, torch.arange(T, device=device))
        first = torch.arange(int(torch.randint(EVERY, ())), T - 2, EVERY, device=device)
        rows = torch.arange(B, device=device).repeat_interleave(len(first))
        at = first.repeat(B)
        counted = batch.counted[rows, at + 2]
        rows = rows[counted]
        at = at[counted]
        places = network.places(batch, text, rows, at)
        figures, overlaps = _figures(network, places, network.num_depths, loss)
        if not torch.is_grad_enabled():
            return figures
        starts = at + 1 + accepted_depths(overlaps, places, len(at))
        unseen = (starts < T - 2) & ((starts - first[0]) % EVERY != 0)
        rows = rows[unseen]
        starts = starts[unseen]
        counted = batch.counted[rows, starts + 2]
        replay = network.places(batch, text, rows[counted], starts[counted])
        replayed, _ = _figures(network, replay, network.num_depths, loss)
        num_replayed = int(counted.sum())
        share = num_replayed / max(len(at) + num_replayed, 1)
        return figures._replace(loss=(1 - share) * figures.loss + share * replayed.loss)

    def finish(self, network: DSparkNet, held: Iterable[Batch]) -> dict[str, Any]:
        """Calibrate the confidence part on every other batch; errors are of the others, before and after."""
        halves: list[list[tuple[Tensor, Tensor]]] = [[], []]
        with torch.no_grad(), torch.autocast(network.fc.weight.device.type, torch.bfloat16):
            for i, batch in enumerate(held):
                drafts = _confidences(network, batch)
                for half in (
                    halves if i == 0 else [halves[i % 2]]
                ):  # one batch is both, where there is no second
                    half.append(drafts)
        (logits, overlaps), (other_logits, other_overlaps) = (
            [torch.cat(parts).float().cpu() for parts in zip(*half, strict=True)] for half in halves
        )
        scale, shift = calibration(logits, overlaps)
        proj = network.confidence_head.proj
        with torch.no_grad():
            proj.weight.mul_(scale)
            proj.bias.mul_(scale).add_(shift)
        before = calibration_error(other_logits.sigmoid(), other_overlaps)
        after = calibration_error((scale * other_logits + shift).sigmoid(), other_overlaps)
        errors = {"calibration_error_before": round(before, 4), "calibration_error": round(after, 4)}
        return {"confidence": {**errors, "drafts": len(other_logits)}}


def _confidences(network: DSparkNet, batch: Batch) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Logits of confidence in drafts all over the texts, and the overlap of each."""
    B, T = batch.tokens.shape
    device = batch.tokens.device
    text = network.injected(batch.states, torch.arange(T, device=device))
    starts = torch.meshgrid(torch.arange(B), torch.arange(0, T - 2, EVERY), indexing="ij")
    rows, at = (x.flatten().to(device) for x in starts)
    places = network.places(batch, text, rows, at)
    _, overlaps, _ = distance(network.drafted(places), places.distributions, Loss())
    return network.confidence(places), overlaps


def _figures(
    network: DSparkNet, places: BlockPlaces, depths: int, loss: Loss
) -> tuple[Figures, Float[Tensor, " n"]]:
    """Of places, and the overlap of each."""
    logits = network.drafted(places)
    total = torch.zeros((), device=places.states.device)
    overlaps = torch.zeros(len(logits), device=logits.device)
    accepted = list[float]()
    agreed = list[float]()
    for k in range(depths):
        at_k = places.depth == k
        distance_at_k, overlaps_at_k, agreement = distance(logits[at_k], places.distributions[at_k], loss)
        if len(overlaps_at_k):
            total = total + loss.decay**k * distance_at_k
            overlaps[at_k] = overlaps_at_k
        accepted.append(float(overlaps_at_k.mean()))
        agreed.append(float(agreement))
    if len(overlaps):
        total = total + binary_cross_entropy_with_logits(network.confidence(places), overlaps.clamp(0, 1))
    return Figures(total, accepted, agreed), overlaps


def accepted_depths(overlaps: Float[Tensor, " n"], places: BlockPlaces, blocks: int) -> Int[Tensor, " A"]:
    """How many drafts of each block a step accepts, each with the chance of its place, up to the first that is not."""
    accepted = torch.zeros(
        blocks, int(places.depth.max()) + 1 if len(overlaps) else 1, dtype=torch.bool, device=overlaps.device
    )
    accepted[places.block, places.depth] = torch.rand(overlaps.shape, device=overlaps.device) < overlaps
    return accepted.long().cumprod(1).sum(1)


def calibration(logits: Float[Tensor, " n"], rates: Float[Tensor, " n"]) -> tuple[float, float]:
    """Scale and shift of logits, of the lowest cross-entropy with rates; by Newton's method.

    Example:
        >>> scale, shift = calibration(torch.tensor([-2.0, 0.0, 2.0]), torch.tensor([-1.0, 0.0, 1.0]).add(0.5).sigmoid())
        >>> round(scale, 3), round(shift, 3)
        (0.5, 0.5)
    """
    x = torch.stack([logits.double(), torch.ones(len(logits), dtype=torch.float64)], 1)
    solution = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for _ in range(50):
        chance = (x @ solution).sigmoid()
        slope = x.T @ (chance - rates.double())
        curvature = (x * (chance * (1 - chance))[:, None]).T @ x + 1e-6 * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(curvature, slope)
        solution = solution - step / max(1.0, float(step.norm()))
    return float(solution[0]), float(solution[1])


def calibration_error(
    confidences: Float[Tensor, " n"], rates: Float[Tensor, " n"], *, bins: int = 10
) -> float:
    """Mean distance of confidence and acceptance rate over bins of as many drafts each, rising in confidence.

    Example:
        >>> calibration_error(torch.tensor([0.2, 0.4, 0.6, 0.8]), torch.tensor([0.0, 0.4, 1.0, 0.4]), bins=2)
        0.05
    """
    order = np.argsort(confidences.numpy(), kind="stable")
    parts = zip(*(np.array_split(x.double().numpy()[order], bins) for x in (confidences, rates)), strict=True)
    return round(float(sum(abs(c.mean() - r.mean()) * len(c) for c, r in parts if len(c)) / len(order)), 6)
