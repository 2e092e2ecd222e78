"""Prompts for `verify`: python -m askmany.jobs.verify_prompts --model DIR --documents FILE_OR_FOLDER --questions FILE --out FILE

Documents and questions are read, fitted and put into prompts as in a run: every input format, documents' own questions included, the
model's chat template where it has one (`--set prompt.instruction=...` and the like as in a run's configuration). Every prompt has room for
its answer, and for what stock SGLang keeps of a context. Written are token ids, a document a line: `document` and `questions`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from askmany.engine.errors import ConfigError, DocumentError
from askmany.engine.models import resolve_model
from askmany.engine.truncate import cut_document
from askmany.jobs.baselines_sglang import KEPT_TOKENS
from askmany.jobs.preview import documents
from askmany.pipeline.config import RunConfig, SamplingConfig
from askmany.pipeline.config_file import parse_config
from askmany.pipeline.documents import SourceDocument
from askmany.pipeline.opening import open_run
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.questions import as_config, load_questions
from askmany.pipeline.text import is_blank


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of a document and of its questions: a prompt is the document's and then one question's."""

    document: list[int]
    questions: list[list[int]]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return len(self.document) + max(map(len, self.questions))


def main(arguments: list[str] | None = None) -> None:
    """Write the prompts of the first documents that have any, and print what they come to. SystemExit where none has."""
    options = _parser().parse_args(arguments)
    try:
        config = configuration(options)
        found = list(islice(prompts(config, options.document_tokens, options.new_tokens), options.max_documents))
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    if not found:
        raise SystemExit("no document has a question that fits the context")
    lines = (json.dumps({"document": one.document, "questions": one.questions}) for one in found)
    options.out.write_text("\n".join(lines) + "\n")
    count, longest = sum(len(one.questions) for one in found), max(one.longest for one in found)
    print(f"{options.out}: {count} prompts of {len(found)} documents; the longest has {longest} tokens, answers {options.new_tokens}")


def configuration(options: argparse.Namespace) -> RunConfig:
    """The run that would ask this, in which a document that is too long loses its end. Raises ConfigError."""
    sampling = {"max_new_tokens": options.new_tokens, "temperature": 0.0}
    values: dict[str, Any] = {
        "model": options.model,
        "context_tokens": resolve_model(options.model, weights=False).context_tokens - KEPT_TOKENS,
        "input": {"uri": tuple(options.documents), "questions": options.question_column, "max_questions": options.max_questions},
        "questions": _shared(options.questions, SamplingConfig(**sampling)),
        "output": {"uri": f"{options.out}.run"},  # nothing is written there
        "sampling": sampling,
        "long_documents": {"policy": "truncate_tail"},
    }
    return parse_config(values, options.set, "verify_prompts")


def prompts(config: RunConfig, document_tokens: int | None, new_tokens: int) -> Iterator[Prompts]:
    """Those of every document that has any, cut to `document_tokens` before; a question whose answer may not take `new_tokens` is left
    out. Raises ConfigError for a run that would be refused."""
    opened = open_run(config, own_output=False)
    preparer = opened.preparer
    for source in documents(opened):
        try:
            prepared = preparer.prepare(_cut(preparer, source, document_tokens))
        except DocumentError:
            continue
        ids = [token for segment in prepared.segments for token in segment]
        room = preparer.context_tokens - new_tokens - len(ids)
        tails = [list(question.token_ids) for question in prepared.answerable if len(question.token_ids) <= room]
        if tails:
            yield Prompts(ids, tails)


def _shared(files: Sequence[str], sampling: SamplingConfig) -> tuple[dict[str, Any], ...] | None:
    """The questions of all files, one set. None without any."""
    asked = [question for file in files for question in load_questions(file, sampling, {})]
    return as_config(asked, sampling)


def _cut(preparer: Preparer, source: SourceDocument, tokens: int | None) -> SourceDocument:
    """The beginning of a document, `tokens` long. Raises DocumentError where not even one token's text fits."""
    if tokens is None or is_blank(source.text):
        return source
    return replace(source, text=cut_document(preparer.prompts, source.text, tokens, "truncate_tail").text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verify_prompts", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with config and tokenizer, or a known name")
    parser.add_argument("--documents", nargs="+", required=True, help="files or folders: jsonl, csv, parquet, txt, md, html")
    parser.add_argument("--questions", nargs="*", default=[], help="files whose questions every document is asked: yaml, json, jsonl, txt")
    parser.add_argument("--question-column", help="of documents that bring questions of their own")
    parser.add_argument("--document-tokens", type=int, help="cut documents to so many")
    parser.add_argument("--max-documents", type=int, default=14)
    parser.add_argument("--max-questions", type=int, default=16, help="of a document, shared ones first")
    parser.add_argument("--new-tokens", type=int, default=64, help="of every answer; as verify's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the run's configuration")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
