"""Mistral (arXiv 2310.06825): Llama with a window in every layer, where its configuration has one. Files call it `llama`."""

from polydraft.models.networks.base import Network

MISTRAL = Network("mistral")
