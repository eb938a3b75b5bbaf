"""BibTeX for the papers behind the methods that were used."""

from dataclasses import dataclass
from typing import Any, Protocol

from polydraft import registry
from polydraft.core import Method
from polydraft.errors import unknown_name

__all__ = ["PAPERS", "Paper", "bibtex", "citation"]


@dataclass(frozen=True)
class Paper:
    """authors: as in BibTeX."""

    title: str
    authors: str
    year: int

    def entry(self, key: str, arxiv: str) -> str:
        return (
            f"@misc{{{key},\n  title = {{{self.title}}},\n  author = {{{self.authors}}},\n  year = {{{self.year}}},\n"
            f"  eprint = {{{arxiv}}},\n  archivePrefix = {{arXiv}}\n}}"
        )


PAPERS: dict[str, Paper] = {
    "2203.16487": Paper(
        "Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation",
        "Xia, Heming and others",
        2022,
    ),
    "2211.17192": Paper(
        "Fast Inference from Transformers via Speculative Decoding", "Leviathan, Yaniv and Kalman, Matan and Matias, Yossi", 2023
    ),
    "2302.01318": Paper("Accelerating Large Language Model Decoding with Speculative Sampling", "Chen, Charlie and others", 2023),
    "2304.04487": Paper("Inference with Reference: Lossless Acceleration of Large Language Models", "Yang, Nan and others", 2023),
    "2305.09781": Paper(
        "SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative Inference and Verification",
        "Miao, Xupeng and others",
        2023,
    ),
    "2310.15141": Paper("SpecTr: Fast Speculative Decoding via Optimal Transport", "Sun, Ziteng and others", 2023),
    "2401.06706": Paper("Multi-Candidate Speculative Decoding", "Yang, Sen and others", 2024),
    "2401.10774": Paper(
        "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", "Cai, Tianle and others", 2024
    ),
    "2311.08252": Paper("REST: Retrieval-Based Speculative Decoding", "He, Zhenyu and others", 2023),
    "2402.02057": Paper(
        "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", "Fu, Yichao and others", 2024
    ),
    "2402.13720": Paper(
        "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding", "Zhao, Weilin and others", 2024
    ),
    "2407.12021": Paper("Adaptive Draft-Verification for Efficient Large Language Model Decoding", "Liu, Xukun and others", 2024),
    "2411.04975": Paper(
        "SuffixDecoding: A Model-Free Approach to Speeding Up Large Language Model Inference", "Oliaro, Gabriele and others", 2024
    ),
    "2502.05202": Paper(
        "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
        "Timor, Nadav and others",
        2025,
    ),
    "2402.01528": Paper("Decoding Speculative Decoding", "Yan, Minghao and Agarwal, Saurabh and Venkataraman, Shivaram", 2024),
    "2402.12374": Paper("Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", "Chen, Zhuoming and others", 2024),
    "2402.14160": Paper(
        "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
        "Jeon, Wonseok and others",
        2024,
    ),
    "2403.10444": Paper("Block Verification Accelerates Speculative Decoding", "Sun, Ziteng and others", 2024),
    "2406.16858": Paper("EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", "Li, Yuhui and others", 2024),
    "2408.07978": Paper(
        "Coupling without Communication and Drafter-Invariant Speculative Decoding",
        "Daliri, Majid and Musco, Christopher and Suresh, Ananda Theertha",
        2024,
    ),
    "2410.03355": Paper(
        "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding", "Jang, Doohyuk and others", 2024
    ),
    "2410.18234": Paper(
        "Multi-Draft Speculative Sampling: Canonical Decomposition and Theoretical Limits", "Khisti, Ashish and others", 2024
    ),
    "2411.05289": Paper("SpecHub: Provable Acceleration to Multi-Draft Speculative Decoding", "Sun, Ryan and others", 2024),
    "2502.18779": Paper("Towards Optimal Multi-draft Speculative Decoding", "Hu, Zhengmian and others", 2025),
    "2504.15475": Paper("Speculative Sampling via Exponential Races", "Kobus, Szymon and Gunduz, Deniz", 2025),
    "2505.12398": Paper("Traversal Verification for Speculative Tree Decoding", "Weng, Yepeng and others", 2025),
    "2506.05632": Paper(
        "List-Level Distribution Coupling with Applications to Speculative Decoding and Lossy Compression",
        "Rowan, Joseph and Phan, Buu and Khisti, Ashish",
        2025,
    ),
    "2511.15898": Paper(
        "Global Resolution: Optimal Multi-Draft Speculative Sampling via Convex Minimization",
        "Thomas, Rahul Krishna and Pal, Arka",
        2025,
    ),
    "2602.16961": Paper(
        "Greedy Multi-Path Block Verification for Faster Decoding in Speculative Sampling", "Thomas, Rahul and Pal, Arka", 2026
    ),
}
"""arXiv id -> paper."""

OURS = "@software{polydraft,\n  title = {polydraft: lossless multi-draft speculative decoding},\n  year = {2026}\n}"


def _methods() -> dict[str, Method]:
    verifiers = (registry.verifier(name).info for name in registry.names("verifier"))
    drafters = (info for name in registry.names("drafter") for info in registry.drafter(name).methods)
    return {info.name: info for info in (*verifiers, *drafters)}


def _key(paper: Paper) -> str:
    return f"{paper.authors.split(',')[0].lower()}{paper.year}{paper.title.split()[0].strip(':').lower()}"


class Used(Protocol):
    """An engine, as far as its papers go."""

    @property
    def drafter(self) -> Any: ...

    @property
    def verifier(self) -> Any: ...


def _methods_of(used: Any) -> list[Method]:
    """A mixture, a choice between drafters and their rule stand for what they are made of."""
    parts = getattr(used, "sources", None) or getattr(used, "arms", None) or list(getattr(used, "rules", {}).values())
    return [info for part in parts for info in _methods_of(part)] if parts else [used.info]


def bibtex(*used: str | Used) -> str:
    """BibTeX of the library and of the papers behind methods; all of them without arguments. See `citation`."""
    known = _methods()
    names = [one for one in used if isinstance(one, str)]
    for name in names:
        if name not in known and name not in PAPERS:
            raise unknown_name("method or arXiv id", name, (*known, *PAPERS))
    parts = [part for one in used if not isinstance(one, str) for part in (one.drafter, one.verifier) if part is not None]
    infos = [info for part in parts for info in _methods_of(part)]
    chosen = names if used else (*known, *PAPERS)
    ids = {known[name].arxiv if name in known else name for name in chosen} | {info.arxiv for info in infos}
    entries = [OURS]
    for arxiv in sorted(ids - {""}):
        plugged = next((info for info in (*known.values(), *infos) if info.arxiv == arxiv), None)
        paper = PAPERS.get(arxiv) or Paper(
            plugged.title if plugged else arxiv, plugged.authors if plugged else "", plugged.year if plugged else 0
        )
        entries.append(paper.entry(_key(paper), arxiv))
    return "\n\n".join(entries)


def citation(*used: str | Used) -> None:
    """Print BibTeX for what was used: an engine, names of verifiers and drafters, or arXiv ids; everything without arguments.

    Raises:
        UnknownNameError: with the nearest known name.

    Example:
        >>> citation("kseq")
        @software{polydraft,
          title = {polydraft: lossless multi-draft speculative decoding},
          year = {2026}
        }
        <BLANKLINE>
        @misc{sun2023spectr,
          title = {SpecTr: Fast Speculative Decoding via Optimal Transport},
          author = {Sun, Ziteng and others},
          year = {2023},
          eprint = {2310.15141},
          archivePrefix = {arXiv}
        }
    """
    print(bibtex(*used))
