"""Where this user's models, costs and compiled code are stored between runs."""

import os
import re
import stat
import tempfile
from functools import cache
from pathlib import Path

COMPILED = "compiled"
PACKED = "packed"
COSTS = re.compile("[0-9a-f]{24}.json")
"""In the folder: folders of compiled code and of packed weights, and names of files of costs."""

NO_CACHE = "POLYDRAFT_NO_CACHE"
"""In the environment: nothing is stored of models that can be found out again. `--no-cache` sets it."""


def cache_folder() -> Path | None:
    """`POLYDRAFT_CACHE`, else `XDG_CACHE_HOME`/polydraft, else ~/.cache/polydraft; None for a user without a home. It need not exist, or be writable."""
    if (setting := os.environ.get("POLYDRAFT_CACHE", "off")) not in ("", "off"):
        return Path(setting)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "polydraft"
    try:
        return Path.home() / ".cache" / "polydraft"
    except RuntimeError:
        return None


def enabled_cache_folder() -> Path | None:
    """Where costs and packed weights are stored: None where nothing is to be, as after `--no-cache` or with `POLYDRAFT_CACHE=off`."""
    return (
        None
        if os.environ.get("POLYDRAFT_CACHE") in ("", "off") or os.environ.get(NO_CACHE)
        else cache_folder()
    )


@cache
def temporary_folder() -> Path:
    """A folder that nobody else can write to, the same for all processes of this user where that is possible."""
    folder = Path(tempfile.gettempdir()) / f"polydraft-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        safe = not hasattr(os, "getuid") or (
            about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o022
        )
        if stat.S_ISDIR(about.st_mode) and safe and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="polydraft-"))
