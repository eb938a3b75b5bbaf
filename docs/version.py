"""For the site: the version in its head and foot, and the repository where the package's metadata names one."""

from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

from polydraft import __version__


def repository() -> str | None:
    """The address that `[project.urls]` of the package gives for its repository or source."""
    try:
        urls = metadata("polydraft").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    names = {
        name.strip().lower(): address.strip() for name, _, address in (url.partition(",") for url in urls)
    }
    return names.get("repository") or names.get("source")


def on_config(config: Any, **_: Any) -> Any:
    """MkDocs calls it once."""
    config.site_name = f"polydraft {__version__}"
    config.copyright = f"polydraft {__version__}, Apache-2.0"
    if address := repository():
        config.repo_url = address
    return config
