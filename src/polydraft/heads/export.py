"""A model, and its EAGLE-3 head, as folders that other engines read: vLLM, SGLang, transformers.

    OUT          the model as `save_pretrained` writes it, in bfloat16; what a GGUF file holds is multiplied out
    OUT/head     the head in the authors' layout, with output rows of its own and the map t2d

A head trained here may read the state behind the target's final norm, which other engines do not hand out: its configuration then has
`norm_final_state`, and `polydraft.integrations.vllm` norms the last of the states that vLLM gives it.
"""

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.errors import InvalidInputError
from polydraft.heads.checkpoint import write_folder
from polydraft.heads.eagle.checkpoint import EagleCheckpoint
from polydraft.heads.folder import HeadFolder
from polydraft.models.load import load_tokenizer
from polydraft.models.store.hub import located
from polydraft.models.torch.door import out
from polydraft.models.torch.module import load_module


def export_model(name: str, out: str | Path) -> Any:
    """Write a model, as `load_model` names it, and its tokenizer; the module of transformers that was written.

    Raises:
        InvalidInputError: a folder that has something in it.
        ModelLoadError: as of `load_model`.
    """
    folder = Path(out).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInputError(
            f"out={str(out)!r} was given, which is not empty; expected a new folder. Give another one."
        )
    module = load_module(located(name), dtype="bfloat16")
    module.save_pretrained(folder)
    load_tokenizer(name).save_pretrained(folder)
    return module


def export_head(head: str | PathLike[str], module: Any, folder: str | Path) -> Path:
    """Write the EAGLE-3 head in a folder for the model whose module is given; where it is.

    Raises:
        ModelLoadError: no EAGLE-3 head.
    """
    own = HeadFolder.of(head)
    read = EagleCheckpoint.load(own)
    tensors = {name: tensor for name, tensor in read.tensors.items() if name != "target_probe"}
    tensors.setdefault("lm_head.weight", out(module.get_output_embeddings().weight)[read.ids])
    drafted = np.zeros(read.config.vocab_size, np.bool_)
    drafted[read.ids] = True
    tensors |= {"t2d": drafted, "d2t": read.ids - np.arange(len(read.ids))}
    layout = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16"}
    settings = own.settings | layout
    if max(read.layers, default=0) == module.config.num_hidden_layers:
        settings["norm_final_state"] = True
    write_folder(Path(folder), tensors, settings)
    return Path(folder)
