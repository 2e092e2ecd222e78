"""The README says what the code says."""

from pathlib import Path

import pytest

from askmany.jobs.readme import filled, phrase

ROOT = Path(__file__).parents[2]


def test_the_generated_parts_are_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert filled(readme, ROOT) == readme, "run: python -m askmany.jobs.readme README.md"


def test_a_missing_marker_is_named() -> None:
    with pytest.raises(ValueError, match=r"<!-- config -->"):
        filled("# nothing here", ROOT)


def test_phrase_is_the_first_sentence(tmp_path: Path) -> None:
    module = tmp_path / "m.py"
    module.write_text('"""Draws tokens: v1.5 of\nthem. And more.\n\nLater."""\n')
    assert phrase(module) == "Draws tokens: v1.5 of them"
