"""From pictures to a folder of `papers.lantern.folder`: tokenizer, transformer over codes, draft model distilled on the guided distribution."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from polydraft.files.atomic import replacing
from polydraft.papers.lantern.folder import ImageFolder, ImageSizes, ImageTokenizer
from studies.images.data import Pictures, varied
from studies.training import train

Report = Callable[[str], None]
NO_CLASS = 0.1
"""Share of the training texts whose class is left out: Ho & Salimans 2022 (arXiv 2207.12598)."""


@dataclass(frozen=True)
class Settings:
    """Sizes and steps. copies: varied ones of each picture, in codes.  samples: texts that the target writes for the draft.  target, draft: (layers, width).  guidance: the scale of the distribution that the draft learns."""

    sizes: ImageSizes
    target: tuple[int, int] = (4, 64)
    draft: tuple[int, int] = (1, 64)
    tokenizer_steps: int = 3000
    target_steps: int = 3000
    draft_steps: int = 2500
    batch: int = 64
    copies: int = 60
    samples: int = 4096
    guidance: float = 2.0
    seed: int = 0


def train_tokenizer(settings: Settings, pictures: Pictures, report: Report) -> ImageTokenizer:
    """VQ-VAE: squared error, codebook loss and a quarter of the commitment loss; codes that nobody uses begin anew at some latent."""
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    model = ImageTokenizer(settings.sizes)
    steps = settings.tokenizer_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-5)
    plain = steps // 10
    used = torch.zeros(settings.sizes.num_codes)
    began = time.monotonic()
    for step in range(steps):
        x = varied(
            pictures.pixels[torch.randint(len(pictures.labels), (settings.batch,), generator=generator)],
            generator,
        )
        latents = model.latents(x)
        if step < plain:
            loss = (model.picture(latents) - x).square().mean() + 1e-3 * latents.square().mean()
        else:
            flat = latents.detach().flatten(0, 1)
            if step == plain or (step % 100 == 0 and step < 0.7 * steps):
                idle = (used < 1) if step > plain else torch.ones_like(used, dtype=torch.bool)
                some = flat[torch.randint(len(flat), (int(idle.sum()),), generator=generator)]
                model.codebook.data[idle] = some + 0.01 * torch.randn(some.shape, generator=generator)
                used.zero_()
            codes = model.nearest(latents.detach())
            used += torch.bincount(codes.flatten(), minlength=len(used))
            rows = model.codebook[codes]
            through = latents + (rows - latents).detach()
            kept = (rows - latents.detach()).square().mean() + 0.25 * (
                rows.detach() - latents
            ).square().mean()
            loss = (model.picture(through) - x).square().mean() + 0.1 * kept
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(steps // 5, 1) == 0:
            report(
                f"tokenizer: step {step + 1}/{steps}, loss {loss.item():.4f}, {time.monotonic() - began:.0f} s"
            )
    return model.eval()


def error(tokenizer: ImageTokenizer, pictures: Pictures) -> float:
    """Root of the mean squared error of a pixel, coded and decoded."""
    return float(
        (tokenizer.decode(tokenizer.encode(pictures.pixels)) - pictures.pixels).square().mean().sqrt()
    )


def save_folder(
    path: Path,
    tokenizer: ImageTokenizer,
    classes: Sequence[str],
    guidance: float,
    texts: Int[np.ndarray, "n S"],
) -> None:
    """Write an `ImageFolder`, all but its models, whose configurations name `tokenizer.fingerprint` as `codebook`."""
    path.mkdir(parents=True, exist_ok=True)
    card = {
        "sizes": vars(tokenizer.sizes),
        "classes": list(classes),
        "codebook": tokenizer.fingerprint,
        "guidance": guidance,
    }
    (path / "images.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    save_file(
        {name: x.contiguous() for name, x in tokenizer.state_dict().items()}, path / "tokenizer.safetensors"
    )
    save_file({"texts": torch.from_numpy(texts.astype(np.int16))}, path / "codes.safetensors")


def texts_of(tokenizer: ImageTokenizer, pixels: Tensor, labels: Tensor) -> Int[Tensor, "n S"]:
    """Class, then codes."""
    codes = torch.cat([tokenizer.encode(part) for part in pixels.split(512)])
    return torch.cat([tokenizer.sizes.num_codes + labels[:, None], codes], 1)


def llama(shape: tuple[int, int], num_tokens: int, settings: Settings, codebook: str) -> LlamaForCausalLM:
    """Fresh weights."""
    layers, width = shape
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=width,
        intermediate_size=-(-8 * width // 24) * 8,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        head_dim=32,
        max_position_embeddings=settings.sizes.num_tokens + 1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        codebook=codebook,
    )
    return LlamaForCausalLM(config)


def next_code_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross-entropy of the codes, in nats."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def guided(model: nn.Module, rows: Tensor, no_class: int, scale: float) -> Tensor:
    """Guided logits [B, S, V] along texts [B, S]: u + scale (c - u)."""
    bare = rows.clone()
    bare[:, 0] = no_class
    c, u = model(torch.cat([rows, bare]), use_cache=False).logits.chunk(2)
    return u + scale * (c - u)


@torch.no_grad()
def written(
    model: nn.Module,
    classes: Tensor,
    length: int,
    num_codes: int,
    no_class: int,
    scale: float,
    generator: torch.Generator,
) -> Tensor:
    """Texts that the guided distribution writes, [B, 1 + length]."""
    rows = classes[:, None]
    step = model(torch.cat([rows, torch.full_like(rows, no_class)]), use_cache=True)
    for _ in range(length):
        c, u = step.logits[:, -1, :num_codes].chunk(2)
        tokens = torch.multinomial((u + scale * (c - u)).softmax(-1), 1, generator=generator)
        rows = torch.cat([rows, tokens], 1)
        step = model(torch.cat([tokens, tokens]), past_key_values=step.past_key_values, use_cache=True)
    return rows


def train_models(
    settings: Settings, tokenizer: ImageTokenizer, pictures: Pictures, work: Path, report: Report
) -> tuple[Any, Any]:
    """The transformer on codes, then the draft model on the transformer's guided distribution along texts that this one writes."""
    K = settings.sizes.num_codes
    C = len(pictures.classes)
    T = settings.sizes.num_tokens
    generator = torch.Generator().manual_seed(settings.seed + 1)
    copies = [(pictures.pixels, pictures.labels)] + [
        (varied(pictures.pixels, generator), pictures.labels) for _ in range(settings.copies)
    ]
    texts = torch.cat([texts_of(tokenizer, *copy) for copy in copies])

    def batch(step: int) -> Tensor:
        one = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        rows = texts[torch.randint(len(texts), (settings.batch,), generator=one)].clone()
        rows[torch.rand(len(rows), generator=one) < NO_CLASS, 0] = K + C
        return rows

    target = llama(settings.target, K + C + 1, settings, tokenizer.fingerprint)
    steps = settings.target_steps
    options: dict[str, Any] = {"report": lambda line: report(f"target: {line}")}
    train(
        target, next_code_loss, batch, num_steps=steps, checkpoint=work / "target.pt", adam_lr=2e-3, **options
    )
    target.bfloat16().float().eval()
    report("the target writes texts for the draft")
    classes = K + torch.arange(C).repeat(-(-settings.samples // C))[: settings.samples]
    samples = written(target, classes, T, K, K + C, settings.guidance, generator)
    draft = llama(settings.draft, K + C + 1, settings, tokenizer.fingerprint)

    def seen(step: int) -> Tensor:
        one = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        return samples[torch.randint(len(samples), (settings.batch,), generator=one)]

    def distilled(model: nn.Module, rows: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = guided(target, rows[:, :-1], K + C, settings.guidance)[..., :K].log_softmax(-1)
        log_q = model(rows[:, :-1], use_cache=False).logits[..., :K].log_softmax(-1)
        p = log_p.exp()
        kl = (p * (log_p - log_q)).sum(-1).mean()
        tv = 1 - torch.minimum(p, log_q.exp()).sum(-1).mean()
        return 0.5 * (kl + tv)

    options = {"report": lambda line: report(f"draft: {line}")}
    train(
        draft,
        distilled,
        seen,
        num_steps=settings.draft_steps,
        checkpoint=work / "draft.pt",
        adam_lr=3e-3,
        **options,
    )
    return target, draft


def _tokenizer(settings: Settings, pictures: Pictures, checkpoint: Path, report: Report) -> ImageTokenizer:
    """Trained, or read where an earlier run was interrupted behind it."""
    if checkpoint.exists():
        tokenizer = ImageTokenizer(settings.sizes)
        tokenizer.load_state_dict(torch.load(checkpoint, weights_only=True))
        return tokenizer.eval()
    tokenizer = train_tokenizer(settings, pictures, report)
    with replacing(checkpoint) as file:
        torch.save(tokenizer.state_dict(), file)
    return tokenizer


def train_folder(
    settings: Settings, pictures: Pictures, work: Path, folder: Path, report: Report = print
) -> ImageFolder:
    """All of it; the folder is read back as a user reads it."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(settings, pictures, work / "tokenizer.pt", report)
    report(f"tokenizer: a pixel is off by {error(tokenizer, pictures):.4f}")
    target, draft = train_models(settings, tokenizer, pictures, work, report)
    for name, model in (("target", target), ("draft", draft)):
        model.bfloat16().save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink(missing_ok=True)
    texts = texts_of(tokenizer, pictures.pixels, pictures.labels).numpy()
    save_folder(folder, tokenizer, pictures.classes, settings.guidance, np.asarray(texts))
    return ImageFolder.load(folder)
