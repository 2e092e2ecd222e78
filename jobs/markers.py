"""The README's made parts: each stands between `<!-- name -->` and `<!-- /name -->`, and nothing else of the README is touched."""

from __future__ import annotations


def between(readme: str, name: str, part: str) -> str:
    """`readme` with `part` between the markers of `name`. ValueError when one is missing, or they stand the other way round."""
    start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = readme.partition(start)
    _, ended, after = rest.partition(stop)
    if not found or not ended:
        raise ValueError(f"the README needs {start} and {stop}, in this order")
    return f"{before}{start}\n{part}\n{stop}{after}"
