"""The architectures that the compiled path runs, one a file, by model type. A new one is its file and a line here."""

from polydraft.models.compiled.architectures.base import Architecture, ModelSpec
from polydraft.models.compiled.architectures.falcon_h1 import FALCON_H1
from polydraft.models.compiled.architectures.gemma import GEMMA, GEMMA2, GEMMA3
from polydraft.models.compiled.architectures.glm4_moe import GLM4_MOE
from polydraft.models.compiled.architectures.gpt_oss import GPT_OSS
from polydraft.models.compiled.architectures.granite import GRANITE
from polydraft.models.compiled.architectures.granite_hybrid import GRANITE_HYBRID
from polydraft.models.compiled.architectures.lfm2 import LFM2
from polydraft.models.compiled.architectures.lfm2_moe import LFM2_MOE
from polydraft.models.compiled.architectures.llama import LLAMA
from polydraft.models.compiled.architectures.mistral import MISTRAL
from polydraft.models.compiled.architectures.mixtral import MIXTRAL
from polydraft.models.compiled.architectures.mixture import Mixture, Stored
from polydraft.models.compiled.architectures.phi3 import PHI3
from polydraft.models.compiled.architectures.qwen2 import QWEN2
from polydraft.models.compiled.architectures.qwen2_moe import QWEN2_MOE
from polydraft.models.compiled.architectures.qwen3 import QWEN3
from polydraft.models.compiled.architectures.qwen3_5 import QWEN3_5
from polydraft.models.compiled.architectures.qwen3_5_moe import QWEN3_5_MOE
from polydraft.models.compiled.architectures.qwen3_moe import QWEN3_MOE
from polydraft.models.compiled.architectures.qwen3_next import QWEN3_NEXT
from polydraft.models.compiled.architectures.smollm3 import SMOLLM3

__all__ = ["ARCHITECTURES", "LLAMA", "LLAMA_FAMILY", "QWEN3", "Architecture", "Mixture", "ModelSpec", "Stored"]

ALL = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    SMOLLM3,
    GRANITE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    QWEN3_MOE,
    MIXTRAL,
    QWEN2_MOE,
    GPT_OSS,
    GLM4_MOE,
    LFM2,
    LFM2_MOE,
    GRANITE_HYBRID,
    FALCON_H1,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
ARCHITECTURES = {a.model_type: a for a in ALL}
LLAMA_FAMILY = frozenset(a.model_type for a in (LLAMA, MISTRAL, QWEN2, QWEN3))
"""Those of Llama's own layers, up to biases and norms of heads."""
