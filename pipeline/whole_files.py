"""Readers of whole-file documents: plain text, Markdown (as it is), and the main text of HTML pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from askmany.pipeline.documents import Locator, Row
from askmany.pipeline.spool import open_decompressed
from askmany.pipeline.text import CleanText, decode


def read_whole(locator: Locator, options: Mapping[str, Any]) -> Row:
    """The file as a row of `doc_id` (its name) and `text`."""
    with open_decompressed(locator.uri, options) as stream:
        data = stream.read()
    content = main_text(data) if locator.format == "html" else decode(data)
    return Row(locator, {"doc_id": locator.name, "text": content.text}, content.flags)


def main_text(data: bytes) -> CleanText:
    """The article of an HTML page, without menus and scripts. Where none can be made out, all visible text, with a flag."""
    import trafilatura

    if not data.strip():
        return CleanText("")
    page = decode(data)
    article = trafilatura.extract(page.text, include_comments=False, include_tables=True)
    if article:
        return CleanText(article, page.flags)
    return CleanText(trafilatura.html2txt(page.text), (*page.flags, "html:whole_page"))
