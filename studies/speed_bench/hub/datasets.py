"""In the place of the hub's library for a client that runs offline: each of its data sets is one local file, of questions a line."""

import json
import os
from pathlib import Path
from typing import Any

FILE = "SPEED_BENCH_FILE"
"""Variable of the environment: .jsonl with `question_id`, `category` and `turns`, as SPEED-Bench and Spec-Bench have them."""


class Rows(list[dict[str, Any]]):
    """Rows, which give a column by its name, too."""

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def get_dataset_config_names(name: str) -> list[str]:
    """That of the file."""
    return [Path(os.environ[FILE]).stem]


def load_dataset(path: str, name: str, split: str) -> Rows:
    """All rows of the file. Spec-Bench numbers its questions; SPEED-Bench's have texts as names."""
    lines = Path(os.environ[FILE]).read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return Rows({**row, "question_id": str(row["question_id"])} for row in rows)
