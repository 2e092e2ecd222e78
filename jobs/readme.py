"""Keeps the README true: python -m askmany.jobs.readme README.md writes the parts that are made from the code; `--check` only compares.

Two parts stand between markers: `<!-- config -->` holds the configuration that `askmany init` writes, `<!-- tree -->` one phrase a module,
the first sentence of its docstring.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

from askmany.jobs.init import STARTER
from askmany.jobs.markers import between

FOLDERS = {
    "jobs": "what one can run: a file a command",
    "pipeline": "documents in, answers out, on Ray; knows engines, not kernels",
    "engine": "scheduling on the host, forward passes on a device",
    "kernels": "attention; torch and triton only",
}


def phrase(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9`)])\.(?:\s|$)", first)[0]


def tree(root: Path) -> str:
    """The source folders, their files, and what each is."""
    lines = ["```"]
    for folder, purpose in FOLDERS.items():
        files = sorted((root / folder).glob("*.py"))
        width = max(len(file.name) for file in files) + 2
        lines.append(f"{folder}/".ljust(width + 2) + purpose)
        lines += [f"  {file.name.ljust(width)}{phrase(file)}" for file in files]
    return "\n".join([*lines, "```"])


def config() -> str:
    """The starter configuration as `askmany init` writes it."""
    return "```yaml\n" + STARTER.format(name="askmany.yaml").rstrip() + "\n```"


def filled(readme: str, root: Path) -> str:
    """The README with both parts made anew. ValueError when a marker is missing."""
    for name, part in (("config", config()), ("tree", tree(root))):
        readme = between(readme, name, part)
    return readme


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readme", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    before = given.readme.read_text(encoding="utf-8")
    after = filled(before, given.readme.resolve().parent)
    if given.check:
        return int(before != after)
    given.readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
