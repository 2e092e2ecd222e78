"""The README's made parts: each stands between `<!-- name -->` and `<!-- /name -->`, and nothing else of the README is touched."""

from __future__ import annotations

import argparse
from pathlib import Path


def between(readme: str, name: str, part: str) -> str:
    """`readme` with `part` between the markers of `name`. ValueError when one is missing, or they stand the other way round."""
    start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = readme.partition(start)
    _, ended, after = rest.partition(stop)
    if not found or not ended:
        raise ValueError(f"the README needs {start} and {stop}, in this order")
    return f"{before}{start}\n{part}\n{stop}{after}"


def options_of(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """What the commands that make a part from a measurement file take: `readme`, `measurements`, and `check`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("readme", type=Path)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(arguments)


def put(options: argparse.Namespace, name: str, part: str) -> int:
    """Write `part` into the README; with `check` only tell whether that would change it. The exit code."""
    held = options.readme.read_text()
    wanted = between(held, name, part)
    if not options.check:
        options.readme.write_text(wanted)
        return 0
    if held != wanted:
        print(f"{options.readme} differs from {options.measurements}")
    return int(held != wanted)
