"""Add the compiled code of a checkout to a wheel that was built of it: `python deploy/warm_wheel.py WHEEL`; `make wheel WARM=1` does both.

Code of another processor, or of other sources, is never used: such a wheel is as good as any, and 35 MB larger.
"""

import base64
import hashlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
KEPT = ("*.nbi", "*.nbc", "compiled-*", "compiled_sources.json")


def compiled_files(source: Path) -> Iterator[Path]:
    """Index, code and marks below a folder of sources."""
    for pattern in KEPT:
        for file in sorted(source.rglob(f"__pycache__/{pattern}")):
            if file.suffix != ".lock":
                yield file


def add(wheel: Path, source: Path = SOURCE) -> int:
    """Write the files into the wheel, and their lines into its RECORD; returns how many."""
    files = {file.relative_to(source).as_posix(): file.read_bytes() for file in compiled_files(source)}
    with zipfile.ZipFile(wheel) as before:
        members = {name: before.read(name) for name in before.namelist()}
    (record,) = [name for name in members if name.endswith(".dist-info/RECORD")]
    lines = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    members[record] = members[record].rstrip(b"\n") + b"\n" + lines.encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as after:
        for name, data in (members | files).items():
            after.writestr(name, data)
    return len(files)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    print(f"{add(Path(sys.argv[1]))} files of compiled code added")
