"""Files of profiles: JSON with a checksum of all that it says."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from polydraft.errors import InvalidInputError
from polydraft.files.schema import read_json

ADVICE = "ake one with `polydraft tune --save FILE`."


def checksum(fields: dict[str, Any]) -> int:
    """Of what `Profile.to_dict` gives."""
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def read_profile(path: str | os.PathLike[str]) -> tuple[dict[str, Any], bool]:
    """What a file says, and whether that adds up to its checksum.

    Raises:
        InvalidInputError: a file that cannot be read, or holds no object of JSON.
    """
    try:
        fields = read_json(Path(path).read_bytes())
        if not isinstance(fields, dict):
            raise ValueError("it holds no object of JSON")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    expected = fields.pop("checksum", None)
    return fields, expected == checksum(fields)


def unreadable(path: str | os.PathLike[str], error: Exception) -> InvalidInputError:
    """The error for a file that is no profile."""
    return InvalidInputError(f"profile {str(path)!r} was given and cannot be read ({error}); m{ADVICE}")


def changed(path: str | os.PathLike[str]) -> InvalidInputError:
    """The error for a file of another checksum."""
    return InvalidInputError(
        f"profile {str(path)!r} does not add up to its checksum: it was changed or damaged since it was written. M{ADVICE}"
    )
