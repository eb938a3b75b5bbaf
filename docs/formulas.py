"""For the site: its pages set their formulas with the KaTeX that the server's page has."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

KATEX = Path(__file__).parents[1] / "src" / "polydraft" / "server" / "page" / "vendor" / "katex.js"


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls it once."""
    files.append(File.generated(config, "javascripts/katex.js", abs_src_path=str(KATEX)))
    return files
