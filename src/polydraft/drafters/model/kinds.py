"""Kinds of drafts from a smaller model, and what each declares; `paths` says how they are drawn."""

from polydraft.core.budget import TreeShape
from polydraft.core.drafts import FIXED, DraftSampling
from polydraft.methods.papers import method

METHODS = (
    method("model", "Smaller model, iid paths", "2310.15141", {DraftSampling.IID}, FIXED),
    method(
        "model:chain",
        "Smaller model, one chain",
        "2211.17192 2302.01318",
        {DraftSampling.IID},
        {TreeShape.CHAIN},
    ),
    method(
        "model:without_replacement",
        "Smaller model, distinct children",
        "2402.14160",
        {DraftSampling.WITHOUT_REPLACEMENT},
        FIXED,
    ),
    method(
        "model:greedy_plus_one",
        "Smaller model, top children and one sampled",
        "2502.18779",
        {DraftSampling.GREEDY_PLUS_ONE},
        FIXED,
    ),
    method(
        "model:top_k",
        "Smaller model, most probable tree",
        "2406.16858",
        {DraftSampling.POINT_MASS},
        {TreeShape.GROWN},
        ranked=True,
    ),
    method("model:coupled", "Smaller model, shared race", "2504.15475", {DraftSampling.COUPLED}, FIXED),
    method(
        "model:listed",
        "Smaller model, a race for each path",
        "2506.05632",
        {DraftSampling.LISTED},
        {TreeShape.CHAIN, TreeShape.PATHS},
    ),
    method(
        "model:systematic",
        "Smaller model, paths at equal steps of one uniform",
        "",
        {DraftSampling.SYSTEMATIC},
        FIXED,
    ),
)
KINDS = {info.name.partition(":")[2] or "paths": info for info in METHODS}
