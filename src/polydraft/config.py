"""Configuration, declared once: every setting with its help, unit, range and default.

The command line, the server, the integrations and the reference page are generated from these classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Number, Real
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from polydraft.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    from polydraft.core import Decoding, Drafter, Verifier

C = TypeVar("C", bound="Config")
Panel = Literal["Models", "Speculation", "Decoding", "Sampling", "Server", "Replicas", "Output"]
"""Of the help."""


@dataclass(frozen=True)
class Setting:
    """What a field of a configuration is.

    kind: type of a value given as text; `list` is several of type `items`, `dict` several NAME=VALUE.  unit, unset: in words; unset: what None means.
    low, high: range, both included.  choices: all values there are.  objects: types of further values, which are checked where they are used.
    flag: on the command line, "" for none; by default the field's name.  value: what a flag without a value stands for.  panel: of the help.
    rest: the field of the values behind the first one, where the option may be repeated.
    variable: of the environment, which the integration with vLLM reads.  advice: of the error.
    """

    text: str
    kind: type
    default: Any = None
    unit: str = ""
    unset: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    objects: str = ""
    flag: str | None = None
    value: Any = None
    panel: Panel | None = None
    variable: str = ""
    advice: str = ""
    items: type = str
    rest: str = ""

    @property
    def expected(self) -> str:
        """Range or choices in words, "" where anything goes."""
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        kinds = {
            str: "some text",
            Path: "a path",
            bool: "True or False",
            dict: "options by name",
            list: "a list",
        }
        number = {int: "a whole number", float: "a number"}.get(self.kind, "")
        if self.low is None or not number:
            return number or kinds.get(self.kind, "") + (f" or {self.objects}" if self.objects else "")
        return (
            f"at least {self.low}, {number}"
            if self.high is None
            else f"{number} in [{self.low}, {self.high}]"
        )

    def allows(self, value: Any) -> bool:
        """Whether a value has the type and is in the range."""
        if value is None:
            return self.default is None or bool(self.objects)
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind in (int, float):
            number: Any = Integral if self.kind is int else Real
            fits = isinstance(value, number) and not isinstance(value, bool)
            return (
                fits and (self.low is None or self.low <= value) and (self.high is None or value <= self.high)
            )
        if value == "" or (isinstance(value, Number) and self.objects in ("", "Path", "Path | Profile")):
            return False  # other objects are checked where they are used
        return bool(self.objects) or not self.choices or value in self.choices

    def described(self, default: Any = None) -> str:
        """Help, unit, range, and what None means where that is the default."""
        limits = (
            ""
            if self.low is None
            else f" >= {self.low:g}"
            if self.high is None
            else f" {self.low:g} to {self.high:g}"
        )
        extent = f"{self.unit}{',' if self.unit and limits else ''}{limits}" or (
            "" if self.value else ", ".join(self.choices)
        )
        text = f"{self.text} ({extent.strip()})." if extent else f"{self.text}."
        return f"{text} Default: {self.unset}." if self.unset and default in (None, ()) else text


def setting(
    text: str, kind: type, default: Any = None, unit: str = "", *, panel: Panel | None = None, **more: Any
) -> Any:
    """A field of a configuration; arguments as of `Setting`."""
    return field(
        default=default, metadata={"setting": Setting(text, kind, default, unit, panel=panel, **more)}
    )


def settings(config: "type[Config] | Config") -> dict[str, Setting]:
    """By name of the field, in order."""
    return {f.name: f.metadata["setting"] for f in fields(config) if "setting" in f.metadata}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings that are checked when they are made.

    Raises:
        InvalidInputError: a value of another type or outside its range.

    Example:
        >>> EngineConfig(max_num_seqs=0)
        Traceback (most recent call last):
        polydraft.errors.InvalidInputError: max_num_seqs=0 was given; expected at least 1, a whole number. Change it.
    """

    def __post_init__(self) -> None:
        for name, spec in settings(self).items():
            value = getattr(self, name)
            if value == "" and not spec.allows(value):
                raise InvalidInputError(
                    f"{name}='' was given; expected some text. Give some, or leave it out."
                )
            if not spec.allows(value):
                advice = spec.advice or (
                    f"Change it, or leave it out: {spec.unset}." if spec.unset else "Change it."
                )
                raise InvalidInputError(f"{name}={value!r} was given; expected {spec.expected}. {advice}")

    @classmethod
    def of(cls: type[C], **fields: Any) -> C:
        """Of fields by name.

        Raises:
            UnknownNameError: a field that there is not.

        Example:
            >>> EngineConfig.of(deph=4)
            Traceback (most recent call last):
            polydraft.errors.UnknownNameError: unknown option 'deph'; did you mean 'depth'? Known: ...
        """
        names = settings(cls)
        for name in fields:
            if name not in names:
                raise unknown_name("option", name, names)
        return cls(**fields)

    def part(self, config: "type[Config]") -> dict[str, Any]:
        """The values of the fields that another configuration has, too."""
        return {name: getattr(self, name) for name in settings(config)}

    def chosen(self) -> dict[str, Any]:
        """The values that are not the defaults.

        Example:
            >>> EngineConfig(depth=4).chosen()
            {'depth': 4}
        """
        return {
            name: value
            for name, spec in settings(self).items()
            if (value := getattr(self, name)) != spec.default
        }

    def with_(self: C, **changes: Any) -> C:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


# fmt: off
QUANTIZATIONS = ("int8", "int4", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class PairConfig(Config):
    """Which models."""

    model: str | None = setting("Target model: a folder, FILE.gguf, a name of `polydraft models list`, OWNER/NAME, OWNER/NAME:Q4_K_M, or embedded, the pair inside the package", str, objects="Path", unset="the embedded pair, on the command line smollm2-135m-instruct", panel="Models")
    draft_model: str | None = setting("Draft model: a smaller model with the same vocabulary, named like --model", str, objects="Path", unset="the one listed with the target, if any", rest="further_draft_models", panel="Models")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in settings(PairConfig):
            if isinstance(place := getattr(self, name), Path):
                object.__setattr__(self, name, str(place))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """How a model is loaded."""

    dtype: Any = setting("Data type of the weights and activations, such as float32 or bfloat16", str, objects="Any", unset="float32 on a CPU, the checkpoint's own on a GPU", panel="Models")
    device: Any = setting("Device, such as cpu or cuda", str, objects="Any", unset="the first GPU, else the CPU", panel="Models")
    backend: str = setting("Backend: compiled (most architectures, on a CPU), transformers (any model and device)", str, "auto", choices=("auto", "compiled", "transformers"), panel="Models", advice="Use backend='transformers' for any model and device.")
    quantization: str | None = setting("Weight quantization of the target model, compiled backend; changes the output distribution", str, choices=QUANTIZATIONS, unset="the format of the checkpoint", panel="Models")
    activations: str | None = setting("Float32 activations with quantized weights of a GGUF file; slower", str, flag="--exact", value="float32", choices=("int8", "float32"), unset="8 bits a block", panel="Models")
    cache_dtype: str | None = setting("Data type of the target's KV cache, compiled backend; q8_0 takes a quarter of float32", str, choices=("bfloat16", "float32", "q8_0"), unset="bfloat16, with --exact float32", panel="Models")
    threads: int | None = setting("Number of CPU threads of the compiled backend", int, low=1, unset="idle physical cores, one for small models", panel="Models")
    tensor_parallel: int | None = setting("Number of processes that share the target's weights", int, low=1, unset="one process", panel="Models")
    device_map: Any = setting("Devices of the target's modules, as in transformers", dict, objects="str", flag="", unset="one device")
    max_model_len: int | None = setting("Maximum length of prompt plus output", int, unit="tokens", low=1, unset="the context of the model", panel="Models")
    max_num_seqs: int = setting("Maximum number of sequences in a batch", int, 8, low=1, panel="Models")


NEEDED = {"lead_cap": "asynchronous", "amateur": "decoding", "alpha": "decoding", "beta": "decoding", "decoding_options": "decoding"}
"""Fields that say nothing without another."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(Config):
    """How tokens are drafted and verified, and what is sampled."""

    drafter: "str | Drafter | None" = setting("Drafter: a name of `polydraft methods`, none, or auto", str, "auto", objects="Drafter | None", panel="Speculation")
    verifier: "str | Verifier" = setting("Verification method: a name of `polydraft methods`, or auto", str, "auto", objects="Verifier", panel="Speculation", variable="POLYDRAFT_VERIFIER")
    depth: int | None = setting("Speculation length: drafted tokens along a path", int, unit="tokens", low=1, unset="chosen by the speculation policy", panel="Speculation", advice="For plain decoding use drafter=None.")
    num_paths: int | None = setting("Number of drafted paths a step", int, low=1, unset="chosen by the speculation policy", panel="Speculation", advice="For plain decoding use drafter=None.")
    head: Any = setting("Folder of a draft head, or OWNER/NAME of the hub; see `polydraft train`", Path, panel="Speculation")
    index: Any = setting("File of `polydraft index build` for retrieval-based drafting", Path, panel="Speculation")
    draft_tree: str | None = setting("Draft tree of every step, as the number of children of a token at each depth, such as 3,2,1", str, unset="paths that part at the last committed token", panel="Speculation")
    drafter_options: "Mapping[str, Any] | None" = setting("Further option of the drafter, NAME=VALUE; may be repeated", dict, flag="--drafter-option", panel="Speculation", variable="POLYDRAFT_DRAFTER_OPTIONS")
    offered: "Sequence[str]" = setting("Further drafter that requests may name; may be repeated", list, (), flag="--offer", panel="Speculation")
    policy: Any = setting("Speculation policy: adaptive, fixed, or an object", str, flag="", objects="Policy", unset="adaptive, fixed with a draft shape")
    profile: Any = setting("File of `polydraft tune --save`: costs and acceptance rates for the speculation policy", str, objects="Path | Profile", unset="measured after the first answer", panel="Speculation")
    max_step_ms: float | None = setting("Maximum time of a step, to which drafts and the pieces of joining prompts are cut", float, unit="ms", low=0.01, unset="what makes the most tokens a second", panel="Speculation")
    asynchronous: bool = setting("Asynchronous drafting: the draft model runs ahead on another core or device", bool, False, flag="--asynchronous", panel="Speculation")
    lead_cap: int | None = setting("Maximum lead of the draft model with --asynchronous", int, unit="tokens", unset="the drafter's own", panel="Speculation")
    decoding: "str | Decoding | None" = setting("Decoding method: a name of `polydraft methods`, sampled exactly in place of the target distribution", str, objects="Decoding", unset="the target distribution", panel="Decoding")
    amateur: Any = setting("Weaker model of contrastive decoding, named like --model", str, objects="Target", unset="the draft model", panel="Decoding")
    alpha: float | None = setting("Plausibility threshold of contrastive decoding, relative to the most likely token, 0 to 1", float, unset="the method's own", panel="Decoding")
    beta: float | None = setting("Weight of the amateur in contrastive decoding, >= 0", float, unset="the method's own", panel="Decoding")
    decoding_options: "Mapping[str, Any] | None" = setting("Further option of the decoding method, NAME=VALUE; may be repeated", dict, flag="--decoding-option", panel="Decoding")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needed in NEEDED.items():
            value = getattr(self, name)
            if value is not None and value != {} and not getattr(self, needed):
                written = f"{name}={value}" if isinstance(value, (str, int, float)) else name
                missing = f"{needed}=True" if settings(self)[needed].kind is bool else needed
                raise InvalidInputError(f"{written} was given without {missing}, whose option it is. Add it, or drop {name}.")
        short = _set(amateur=self.amateur, alpha=self.alpha, beta=self.beta)
        if twice := next((name for name in short if name in (self.decoding_options or {})), None):
            raise InvalidInputError(
                f"{twice}={short[twice]} was given beside {twice} among decoding_options; expected it once. Drop one of them."
            )

    @property
    def all_drafter_options(self) -> dict[str, Any]:
        """`drafter_options` with the fields that are short for some of them."""
        return dict(self.drafter_options or {}) | _set(weights=self.head, index=self.index, lead_cap=self.lead_cap)

    @property
    def all_decoding_options(self) -> dict[str, Any]:
        """`decoding_options` with the fields that are short for some of them."""
        return dict(self.decoding_options or {}) | _set(amateur=self.amateur, alpha=self.alpha, beta=self.beta)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SpeculationConfig, ModelConfig, PairConfig):
    """An engine on models by name: the models, how they are loaded, and how tokens are drafted."""

    further_draft_models: "Sequence[str]" = setting("Further draft models, which draft a path each beside the first", list, (), flag="")
    draft_quantization: str | None = setting("Weight quantization of the draft model; does not change the output distribution", str, choices=(*QUANTIZATIONS, "file"), unset="int4 for a GGUF file of more bits, else the format of the checkpoint", panel="Models")
    draft_vocabulary: int | None = setting("Number of vocabulary entries, from the first, that the draft model drafts beside special tokens and those of the text; 0 for all; does not change the output distribution", int, unit="tokens", low=0, unset="32,768, compiled backend, where that is at most half of the vocabulary", panel="Models")
    prefix_cache_bytes: int | None = setting("Maximum memory of the prefix cache beside the slots", int, unit="bytes", low=0, unset="an eighth of the free memory, at most 8 GiB", panel="Models")
    prefix_cache_file: Any = setting("File in which the prefix cache outlives restarts: read at the start, written now and then and when the server ends", Path, objects="Path", unset="none", panel="Models")
    tie_margin: float | None = setting("Low precision: margin below which greedy near ties are decided by a forward pass of their own", float, unit="logits", unset="off", panel="Models")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """Sampling parameters on the command line; `SamplingParams` checks them."""

    max_tokens: int | None = setting("Maximum number of new tokens", int, unset="512", panel="Sampling")
    temperature: float | None = setting("Sampling temperature; 0 is greedy", float, unset="the model's own, else 1, or 0.7 for chats", panel="Sampling")
    top_p: float | None = setting("Top-p threshold, above 0, at most 1", float, unset="the model's own, else 1, or 0.95 for chats", panel="Sampling")
    top_k: int | None = setting("Top-k; 0 and -1 switch it off", int, unset="the model's own, else 0", panel="Sampling")
    min_p: float | None = setting("Min-p threshold, 0 to 1", float, unset="the model's own, else 0", panel="Sampling")
    repetition_penalty: float | None = setting("Repetition penalty; 1 switches it off", float, unset="the model's own, else 1", panel="Sampling")
    presence_penalty: float = setting("Presence penalty; 0 switches it off", float, 0.0, panel="Sampling")
    frequency_penalty: float = setting("Frequency penalty; 0 switches it off", float, 0.0, panel="Sampling")
    seed: int | None = setting("Random seed; it repeats a text while measured costs stay, and always with --depth, --profile or the verifier race", int, unset="drawn and reported", panel="Sampling")
    stop: "Sequence[str]" = setting("Text that ends the output; may be repeated", list, (), panel="Sampling")
    ignore_eos: bool = setting("Generation beyond the end-of-text token", bool, False, flag="--ignore-eos", panel="Sampling")
    n: int = setting("Number of independent samples", int, 1, flag="--n -n", panel="Sampling")
    logprobs: int | None = setting("Number of alternatives with log-probabilities beside each token, with --json", int, panel="Output")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Config):
    """The server around an engine."""

    host: str = setting("Address to listen on; 0.0.0.0 is every address of this machine", str, "127.0.0.1", panel="Server")
    port: int = setting("Port; 0 takes a free one", int, 8000, low=0, high=65535, panel="Server")
    served_model_name: str | None = setting("Model name in requests", str, unset="the model's own", panel="Server")
    api_key_file: Any = setting("File of API keys, one a line, beside POLYDRAFT_API_KEY", Path, unset="no key needed", panel="Server")
    cors: "Sequence[str]" = setting("Origin whose pages may send requests, or *; may be repeated", list, (), panel="Server")
    allowed_hosts: "Sequence[str]" = setting("Host name that requests to a server without a key may use, beside localhost and addresses; may be repeated", list, (), flag="--allowed-host", panel="Server")
    root_path: str | None = setting("Path below which a proxy serves it, such as /llm", str, unset="the root", panel="Server")
    max_waiting: int = setting("Maximum number of waiting samples; more are refused with status 429", int, 256, low=1, panel="Server")
    max_body: int = setting("Maximum size of a request", int, 4 << 20, unit="bytes", low=1, panel="Server")
    max_choices: int = setting("Maximum number of prompts times n of a request", int, 64, low=1, panel="Server")
    timeout: float = setting("Maximum duration of a request", float, 600.0, unit="seconds", low=0.1, panel="Server")
    reasoning: bool = setting("Separate reasoning_content of chats: what models write between <think> and </think>", bool, True, panel="Server")
    tool_format: str | None = setting("Format of tool calls by name, such as hermes, qwen_xml or mistral", str, unset="as the chat template writes them", panel="Server")
    reasoning_format: str | None = setting("Format of thinking by name, such as gpt_oss", str, unset="as the chat template writes it", panel="Server")
    otlp_endpoint: str | None = setting("Collector of OpenTelemetry spans, such as http://localhost:4318/v1/traces; needs the extra tracing", str, panel="Server")
    drain: float = setting("Time for running requests when the server is told to stop", float, 30.0, unit="seconds", low=0, panel="Server")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidInputError(f"root_path={self.root_path!r} was given; expected a path such as '/llm', which begins with / and does not end with it. Change it.")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Config):
    """Where Ray runs engines, and on what."""

    cpus: float | None = setting("CPUs of each engine, fractions too", float, low=0, unset="an equal share", panel="Replicas")
    gpus: float = setting("GPUs of each engine, fractions too", float, 0.0, low=0, panel="Replicas")
    address: str | None = setting("Address of a Ray cluster", str, unset="a cluster on this machine that ends with the command", panel="Replicas")


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(ClusterConfig):
    """Several engines behind one address, through Ray Serve."""

    replicas: int | None = setting("Number of engines behind one address, through Ray Serve", int, low=1, unset="one engine in this process", panel="Replicas")
    max_replicas: int | None = setting("Maximum number of engines under load", int, low=1, unset="--replicas", panel="Replicas")


@dataclass(frozen=True, kw_only=True)
class BatchConfig(ClusterConfig):
    """Many prompts of a file, through Ray."""

    workers: int = setting("Number of engines, each in a process of its own", int, 1, low=1, panel="Replicas")
    rows_a_part: int = setting("Number of rows in a batch, which a failing worker loses at most", int, 16, low=1, flag="--rows", panel="Replicas")
    seed: int = setting("Random seed; the row's number is added", int, 0, panel="Sampling")
    resume: bool = setting("Continuation of an earlier run", bool, False, flag="--resume", panel="Replicas")
    share: bool = setting("Suffix decoding from the outputs of all workers", bool, False, flag="--share", panel="Replicas")


# fmt: on


def _set(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def split(values: Mapping[str, Any], *kinds: type[Config]) -> list[Any]:
    """One configuration of each kind from fields of them all; what no kind has goes to the last one, which refuses it."""
    rest = dict(values)
    configs = list[Config]()
    for kind in kinds[:-1]:
        configs.append(kind(**{name: rest.pop(name) for name in settings(kind) if name in rest}))
    return [*configs, kinds[-1].of(**rest)]


def from_environment(kind: type[Config]) -> dict[str, str]:
    """Fields whose variables are set, as text."""
    return {name: environ[s.variable] for name, s in settings(kind).items() if environ.get(s.variable)}


def flag_of(config: type[Config], name: str) -> str:
    """The option of a field of a configuration.

    Example:
        >>> flag_of(SpeculationConfig, "decoding_options")
        '--decoding-option'
    """
    return (settings(config)[name].flag or flag(name)).partition(" ")[0]


def flag(name: str) -> str:
    """The option of a field.

    Example:
        >>> flag("max_tokens")
        '--max-tokens'
    """
    return f"--{name.replace('_', '-')}"
