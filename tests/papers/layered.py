"""A target of a few random layers and tokens, compiled: for drafters that run in a target's own layers and cache."""

from dataclasses import replace

import numpy as np
import torch
from transformers import LlamaForCausalLM

from polydraft import Engine, FixedPolicy
from polydraft.core import Budget, TokenTree
from polydraft.core.geometry import chain, paths
from polydraft.drafters.base import Parts
from polydraft.heads.checkpoint import embeddings, output_rows
from polydraft.heads.recipe import Material
from polydraft.methods import registry
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.torch.door import into
from polydraft.papers.hidden_transfer.network import TransferRecipe
from polydraft.sampling.softmax import softmax
from polydraft.verifiers import pairing
from tests.drafters.sessions import requests
from tests.support.tiny import llama_config


def module(V=5, layers=4, seed=0):
    """Random weights, with distributions that are far from flat and that every layer changes."""
    torch.manual_seed(seed)
    context = {"max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None}
    config = llama_config(vocab_size=V, num_hidden_layers=layers, num_key_value_heads=2, **context)
    made = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.35 if "layers" in name else 0.3)
        made.model.norm.weight.normal_(1.0, 0.2)
    return made


def target(V=5, layers=4, seed=0, seqs=4):
    return CompiledModel(module(V, layers, seed), max_num_seqs=seqs, max_model_len=64, cache_dtype="float32")


def engine(name, options, verifier="auto", depth=3, num_paths=2, eos=(), model=None, **sizes):
    """An engine over such a target with trees that drafter and rule both take."""
    model = model or target(**sizes)
    drafter = name and registry.build_drafter(name, parts(model, eos), options)
    rule = verifier if verifier != "auto" else pairing.best_for(drafter.info) if drafter else "match"
    budget = Budget.fixed(chain(depth))
    if drafter is not None:
        budget, *_ = pairing.allowed(
            [Budget.fixed(t) for t in (paths(num_paths, depth), chain(depth))],
            drafter.info,
            registry.verifier(rule).info,
        )
    return Engine.of(model, drafter=drafter, verifier=rule, policy=FixedPolicy(budget), eos_token_ids=eos)


def parts(model, eos=()):
    return Parts(model, None, None, eos)


def started(drafter, model, texts):
    """States of texts that lie in the first slots of a target, with what the drafter reads of them."""
    states = []
    for slot, text in enumerate(texts):
        model.release([slot])
        states += drafter.start([replace(requests(text)[0], slot=slot)])
        if text[:-1]:
            scores = model.prefill([slot], [text[:-1]], hidden=drafter.needs.hidden)
            states[-1:] = drafter.read(states[-1:], scores) if drafter.needs.hidden else states[-1:]
    return states


def transfer_net(model, folder, layers=(1, 2, 3)):
    """Maps with random weights over all tokens, written to a folder."""
    recipe = TransferRecipe()
    ids = np.arange(model.vocab_size)
    torch.manual_seed(0)
    material = Material(model, layers, ids, into(embeddings(model)), into(output_rows(model, ids)), {})
    net = recipe.fresh(material)
    for each in net.maps:
        each.weight.data.add_(0.3 * torch.randn_like(each.weight)).copy_(each.weight.bfloat16().float())
    recipe.export(net, material, folder)
    return net


def distribution(model, prompt, count, temperature=1.0):
    """Probability of every continuation of this length, [V] * count, in a slot of its own."""
    V = model.vocab_size
    slot = model.max_num_seqs - 1
    texts = np.array([list(prompt)])
    probs = np.ones(1)
    for _ in range(count):
        rows = []
        for text in texts.tolist():
            model.release([slot])
            if text[:-1]:
                model.prefill([slot], [text[:-1]])
            rows.append(model.score([slot], TokenTree.roots(np.array(text[-1:]))).logits[0, 0])
        distributions = softmax(np.stack(rows).astype(np.float64) / temperature)
        probs = (probs[:, None] * distributions).ravel()
        texts = np.concatenate([texts.repeat(V, 0), np.tile(np.arange(V), len(texts))[:, None]], 1)
    model.release([slot])
    return probs.reshape([V] * count)
