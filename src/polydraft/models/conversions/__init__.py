"""Architectures of GGUF files that run through transformers, one a file, by their names there. A new one is its file and a line here."""

from polydraft.models.conversions.base import Conversion
from polydraft.models.conversions.olmo2 import OLMO2
from polydraft.models.conversions.starcoder2 import STARCODER2

__all__ = ["CONVERSIONS", "Conversion"]

CONVERSIONS = {
    "olmo2": OLMO2,
    "starcoder2": STARCODER2,
}
