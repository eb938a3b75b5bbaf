"""The pair's tokenizer: byte-level BPE, an alphabet of 256 bytes, one special token, merges learned from the training text.

Words keep their leading space; a run of indentation, a run of newlines and a single digit are pre-tokens of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
MAX_CONTEXT = 1024
PRE_TOKENS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+| +(?=\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Learn the merges and save a folder that `AutoTokenizer.from_pretrained` loads."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)


def encode_documents(texts: Iterable[str], folder: Path) -> np.ndarray:
    """Token ids of the documents, each preceded by the end-of-text token; uint16, shape [num_tokens]."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [END_OF_TEXT_ID]
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids += encoding.ids
        ids.append(END_OF_TEXT_ID)
    return np.asarray(ids, dtype=np.uint16)
