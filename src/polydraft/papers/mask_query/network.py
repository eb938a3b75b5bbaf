"""The Spec-Drafter's network: a deep encoder of its own and a shallow decoder whose mask queries name the next k tokens in one forward pass.

Xia et al. 2022 (SpecDec, arXiv 2203.16487).

    decoder input   committed tokens, then k query vectors, each learned and distinct, all at their positions in the output
    attention       bidirectional: queries see the committed tokens, the source, and each other
    output          row i is the distribution of the token i places behind the committed ones

The encoder is one of transformers (that of the verifier's family, from whose weights training starts); the decoder is torch's.

    config.json          `polydraft_head`: "mask-query", the sizes below, and the configuration of the encoder's family
    model.safetensors    all weights
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.errors import ModelLoadError
from polydraft.files.atomic import replacing

KIND = "mask-query"


@dataclass(frozen=True)
class QuerySizes:
    """queries: k, tokens of a draft.  layers: of the decoder.  window: last committed tokens that it reads."""

    vocab_size: int
    width: int
    heads: int
    queries: int = 8
    layers: int = 1
    window: int = 64


class MaskQueries(nn.Module):
    """See the module. sizes: of the decoder.  family: configuration of transformers whose encoder it has, as a dictionary.

    Example:
        >>> made = MaskQueries.like(QuerySizes(vocab_size=9, width=8, heads=2, queries=3))
        >>> memory, hidden = made.read(torch.tensor([[3, 1, 4]]), torch.ones(1, 3, dtype=torch.bool))
        >>> made(memory, hidden, torch.tensor([[0, 5]]), torch.tensor([2])).shape
        torch.Size([1, 3, 9])
    """

    def __init__(self, sizes: QuerySizes, family: dict[str, Any]) -> None:
        from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

        super().__init__()
        self.sizes = sizes
        self.family = family
        settings = {name: value for name, value in family.items() if name != "model_type"}
        self.encoder: Any = AutoModelForSeq2SeqLM.from_config(
            CONFIG_MAPPING[family["model_type"]](**settings)
        ).get_encoder()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.width)
        nn.init.normal_(self.embedding.weight, 0.0, sizes.width**-0.5)
        self.queries = nn.Parameter(torch.randn(sizes.queries, sizes.width))
        layer = nn.TransformerDecoderLayer(
            sizes.width, sizes.heads, 4 * sizes.width, 0.05, batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, sizes.layers, nn.LayerNorm(sizes.width))

    @classmethod
    def like(cls, sizes: QuerySizes, **family: Any) -> "MaskQueries":
        """With a fresh BART encoder of one layer, where no other is named."""
        small = {
            f"encoder_{name}": size
            for name, size in (("layers", 1), ("attention_heads", sizes.heads), ("ffn_dim", 4 * sizes.width))
        }
        base = {
            "model_type": "bart",
            "vocab_size": sizes.vocab_size,
            "d_model": sizes.width,
            "decoder_layers": 1,
            "decoder_attention_heads": 1,
        }
        return cls(sizes, base | {"pad_token_id": 0, "decoder_ffn_dim": 1} | small | family)

    def read(
        self, source: Int[Tensor, "B S"], is_token: Bool[Tensor, "B S"]
    ) -> tuple[Float[Tensor, "B S D"], Bool[Tensor, "B S"]]:
        """What the encoder makes of padded sources, and where there is none of it."""
        return self.encoder(input_ids=source, attention_mask=is_token.long()).last_hidden_state, ~is_token

    def forward(
        self,
        memory: Float[Tensor, "B S D"],
        hidden: Bool[Tensor, "B S"],
        committed: Int[Tensor, "B T"],
        lengths: Int[Tensor, " B"],
        *,
        offsets: Int[Tensor, " B"] | None = None,
        revealed: Int[Tensor, "B k"] | None = None,
        mask: Bool[Tensor, "R R"] | None = None,
    ) -> Float[Tensor, "B k V"]:
        """Logits of the k next tokens.

        committed: padded behind, `lengths` of each.  offsets: committed tokens before them, which it does not read.
        revealed: tokens that training shows in the place of queries; -1 where the query stays.  mask: True where a row may not look, for tests.
        """
        B, T = committed.shape
        k = self.sizes.queries
        known_rows = self.embedding(committed) * self.sizes.width**0.5
        query_rows = self.queries.expand(B, -1, -1)
        if revealed is not None:
            revealed_rows = self.embedding(revealed.clamp(min=0)) * self.sizes.width**0.5
            query_rows = torch.where(revealed[..., None] >= 0, revealed_rows, query_rows)
        begin = torch.zeros_like(lengths) if offsets is None else offsets
        at = (
            torch.cat([torch.arange(T).expand(B, -1), lengths[:, None] + torch.arange(k)], 1) + begin[:, None]
        )
        padding = torch.cat([torch.arange(T) >= lengths[:, None], torch.zeros(B, k, dtype=torch.bool)], 1)
        x = torch.cat([known_rows, query_rows], 1) + _waves(at, self.sizes.width).to(known_rows.dtype)
        out = self.decoder(
            x, memory, tgt_mask=mask, tgt_key_padding_mask=padding, memory_key_padding_mask=hidden
        )
        return out[:, T:] @ self.embedding.weight.T

    def save(self, folder: Path) -> None:
        """Write the folder that `load` reads."""
        from safetensors.torch import save

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in self.state_dict().items()}
        with replacing(folder / "model.safetensors") as file:
            file.write(save(tensors))
        with replacing(folder / "config.json") as file:
            file.write(
                json.dumps(
                    {"polydraft_head": KIND, **asdict(self.sizes), "encoder": self.family}, indent=2
                ).encode()
            )

    @classmethod
    def load(cls, folder: str | Path) -> "MaskQueries":
        """Read a folder.

        Raises:
            ModelLoadError: files that are missing or damaged, or of another kind.
        """
        from safetensors.torch import load_file

        folder = Path(folder).expanduser()
        try:
            settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            network = cls(
                QuerySizes(**{name: int(settings[name]) for name in QuerySizes.__dataclass_fields__}),
                settings["encoder"],
            )
            network.load_state_dict(load_file(folder / "model.safetensors"))
        except Exception as error:  # whatever these files hold
            raise ModelLoadError(
                f"{str(folder)!r} was given as a drafter of kind {KIND!r}, and cannot be read as one: {str(error)[:300]!r}. Expected a folder "
                "with config.json and model.safetensors, as `python -m studies.seq2seq` writes."
            ) from error
        return network.eval()


def _waves(positions: Int[Tensor, "B R"], width: int) -> Float[Tensor, "B R D"]:
    """Sinusoidal positions, of any length."""
    rates = 10000.0 ** -(torch.arange(0, width, 2, device=positions.device) / width)
    angles = positions[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(2)[..., :width]
