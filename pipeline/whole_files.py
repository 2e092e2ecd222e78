"""Readers of whole-file documents: plain text, Markdown (as it is), and the main text of HTML pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from askmany.pipeline.documents import Locator, Row
from askmany.pipeline.spool import open_decompressed
from askmany.pipeline.text import CleanText, decode

_ROOT = re.compile(r"<html[\s>]", re.IGNORECASE)  # without it, the page's first element would be taken for the root, or for no HTML
_NEVER_SHOWN = ("head", "title", "script", "style", "template")


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
    decoded = decode(data)
    page = decoded.text if _ROOT.search(decoded.text) else f"<html>{decoded.text}</html>"
    article = trafilatura.extract(page, include_comments=False, include_tables=True)
    if article:
        return CleanText(article, decoded.flags)
    return CleanText(trafilatura.html2txt(page) or _all_visible(page), (*decoded.flags, "html:whole_page"))


def _all_visible(page: str) -> str:
    """What a browser would show, also of elements that seldom hold more than menus and notices."""
    from trafilatura import html2txt, load_html

    tree = load_html(page)
    if tree is None:
        return ""
    for element in list(tree.iter(*_NEVER_SHOWN)):
        element.drop_tree()
    return html2txt(tree, clean=False)
