"""A wheel of the askmany that is running, for a cluster whose image brings the other packages: python -m askmany.jobs.wheel dist/

It names no requirements, on purpose: Ray installs a job's wheel with plain `pip install --target`, which would fetch torch and everything
else anew for each job. Its build tag is a hash of its contents, on purpose too: Ray knows a wheel by its file's name and would run an older
one of the same version. Needs no build tool and no network, and works from a checkout as from an installed package.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import askmany

FOLDERS = ("", "engine", "jobs", "kernels", "pipeline")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_wheel(folder: Path, package: Path | None = None) -> Path:
    """Write `askmany-<version>-0x<hash>-py3-none-any.whl` into `folder`. `package`: the package's folder, else that of the running one."""
    package = package or Path(askmany.__file__).parent
    stem = f"askmany-{askmany.__version__}"
    files = {f"askmany/{name}": path.read_bytes() for name, path in _sources(package)}
    files[f"{stem}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: askmany\nVersion: {askmany.__version__}\n".encode()
    files[f"{stem}.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: askmany\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = f"{stem}.dist-info/RECORD"
    files[record] = "".join([*(_recorded(name, data) for name, data in files.items()), f"{record},,\n"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-0x{hashlib.sha256(files[record]).hexdigest()[:12]}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return path


def _sources(package: Path) -> Iterator[tuple[str, Path]]:
    """Names below the package and paths, sorted: the files of its folders, not of folders below those."""
    for folder in FOLDERS:
        for path in sorted((package / folder).iterdir()):
            if path.is_file() and not path.name.startswith(".") and path.suffix != ".pyc":
                yield f"{folder}/{path.name}".lstrip("/"), path


def _recorded(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


if __name__ == "__main__":
    print(write_wheel(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")))
