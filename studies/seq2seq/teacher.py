"""The target of the study: a small mBART (normalised before each layer, which trains fastest) with its tokenizer, trained on the pairs, saved as a folder of transformers."""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from studies.seq2seq.corpus import Pair

VOCABULARY = 1536
PAD = 0
EOS = 1
CONTEXT = 128


def make_tokenizer(texts: Sequence[str], size: int = VOCABULARY) -> Any:
    """Byte-level BPE with single digits, which ends every text with </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # pyright: ignore
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])  # pyright: ignore
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def batches(
    pairs: Sequence[tuple[list[int], list[int]]], size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Padded sources and references without end, those of one batch of similar lengths; a task's share is that of its pairs."""
    draw = random.Random(seed)
    while True:
        pool = sorted(draw.choices(pairs, k=size * 16), key=lambda pair: (len(pair[1]), len(pair[0])))
        groups = [pool[i : i + size] for i in range(0, len(pool), size)]
        draw.shuffle(groups)
        for group in groups:
            source, target = ([torch.tensor(pair[side]) for pair in group] for side in (0, 1))
            yield (
                pad_sequence(source, batch_first=True, padding_value=PAD),
                pad_sequence(target, batch_first=True, padding_value=PAD),
            )


def scheduled(optimizer: torch.optim.Optimizer, done: float, lr: float) -> None:
    """The learning rate after this share of the training: a rise over the first twentieth, then a cosine to a hundredth."""
    for group in optimizer.param_groups:
        group["lr"] = lr * min(done / 0.05, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def train_teacher(
    pairs: Sequence[Pair],
    tokenizer: Any,
    folder: Path,
    *,
    seconds: float,
    report: Callable[[str], None],
    seed: int = 0,
    width: int = 128,
    layers: tuple[int, int] = (2, 3),
) -> Any:
    """Train for so many seconds of processor time with label smoothing 0.1; the folder holds model and tokenizer, saved every minute."""
    from transformers import MBartConfig, MBartForConditionalGeneration

    torch.manual_seed(seed)
    ids_of: Any = {
        "pad_token_id": PAD,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": PAD,
        "forced_eos_token_id": None,
    }
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 4 * width)
    config = MBartConfig(
        vocab_size=len(tokenizer), d_model=width, encoder_layers=layers[0], decoder_layers=layers[1], max_position_embeddings=CONTEXT,
        scale_embedding=True, dropout=0.05, **heads, **widths, **ids_of,
    )  # fmt: skip
    model: Any = MBartForConditionalGeneration(config)
    ids = [(tokenizer(pair.source)["input_ids"], tokenizer(pair.reference)["input_ids"]) for pair in pairs]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98))
    began = saved = time.process_time()
    model.train()
    for step, (source, target) in enumerate(batches(ids, 32, seed)):
        done = (time.process_time() - began) / seconds
        if done >= 1:
            break
        scheduled(optimizer, done, 2e-3)
        given = torch.cat([torch.full_like(target[:, :1], PAD), target[:, :-1]], 1)
        logits = model(
            input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=given
        ).logits
        loss = cross_entropy(
            logits.flatten(0, 1), target.masked_fill(target == PAD, -100).flatten(), label_smoothing=0.1
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            report(f"step {step}: loss {loss.item():.3f}, {100 * done:.0f}%")
        if time.process_time() - saved > 60:
            model.save_pretrained(folder)
            saved = time.process_time()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@torch.inference_mode()
def greedy(model: Any, sources: Sequence[list[int]], longest: int = 64) -> list[list[int]]:
    """What the model writes of each source, by transformers' `generate`."""
    found: list[list[int]] = [[] for _ in sources]
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for begin in range(0, len(order), 64):
        some = order[begin : begin + 64]
        padded = pad_sequence([torch.tensor(sources[i]) for i in some], batch_first=True, padding_value=PAD)
        out = model.generate(
            padded,
            attention_mask=(padded != PAD).long(),
            max_new_tokens=longest,
            do_sample=False,
            num_beams=1,
        )
        for i, row in zip(some, out[:, 1:].tolist(), strict=True):
            found[i] = row[: row.index(EOS) + 1] if EOS in row else row
    return found
