"""`askmany init`: a commented configuration to start from. Every key is there, with its default; a test keeps it so."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from askmany.engine.errors import ConfigError

STARTER = """\
# What to ask of which documents, with which model. Paths are relative to where askmany is started.
# Run it:      askmany run {name}
# Look first:  askmany preview {name}        askmany run {name} --dry-run
# One key:     askmany run {name} --set engine.streams=4

model: smollm2              # a known name (askmany models), a local folder, or a hub id
model_revision: null        # a branch, tag or commit of a hub model; run.json records the hash in any case
context_tokens: null        # narrow the model's own limit of prompt + answer
date: null                  # what a chat template that prints the date sees; null: when the run first began

prompt:
  instruction: "Answer the question from the document, in a few words."   # shared by all documents
  system: null              # the chat template's system message; null: the template's own
  document: "{{{{ document }}}}"   # jinja2, sandboxed; put words around a document here
  question: "{{{{ question }}}}"   # jinja2, sandboxed; put words around a question here
  separator: "\\n\\n"         # between instruction, document and question
  chat: auto                # the model's chat template: auto (where it has one), true, false
  template_kwargs: {{}}       # for the chat template, e.g. enable_thinking: false

input:
  uri: "documents/*.jsonl"  # a file, folder, glob or URI (s3://, gs://, abfs://, hf://), or a list of them
  format: auto              # by the file's name, or one of: jsonl, parquet, csv, txt, md, html (.gz and .zst are read)
  id: doc_id                # column of the document's id; files of text are named by their path
  text: text                # column of the text
  questions: null           # column of a document's own questions, asked after the shared ones
  keep: []                  # columns passed through to the answers, as text
  max_questions: null       # at most so many questions of a document
  only: []                  # of the files found, only these (full URIs)
  limit: null               # only the first so many documents
  strict: false             # refuse the run when a row is no document (otherwise: dead_letters.jsonl)
  storage_options: {{}}       # for the storage driver; credentials are best left to its environment

# The questions asked of every document: a file (YAML list, JSON lines, or one a line of text), or a list right here.
# A question is a string, or an object: id, question, answers (for scoring), max_new_tokens, temperature, stop, ...
# `type` makes its answers typed: choice, multi_choice, bool, int, number, date, json (schema) or regex (pattern), with settings beside it:
#  - {{id: tone, question: "What is its tone, one of: {{{{ options }}}}?", type: choice, options: [neutral, positive, negative]}}
#  - {{id: year, question: "In which year does it begin?", type: int, minimum: 1000, maximum: 2100, absent: not stated}}
questions:
  - "What is this document about?"
  - {{id: places, question: "Which places are named?", max_new_tokens: 64}}

output:
  uri: out/
  format: parquet           # parquet, jsonl or both; the Parquet shards are always there
  shard_documents: 1024     # documents whose answers share a file, at most
  shard_records: 50000      # and about so many answers
  sort: false               # answers.jsonl in order of document and question over all shards; each shard is so in any case
  storage_options: {{}}

engine:
  layout: split             # split: every document is read once a step for all its questions; interleaved: the published method
  streams: auto             # live questions of a document at most; auto: by the plan and the KV pool; 1 asks one at a time
  batching: continuous      # interleaved only: continuous, run_to_completion
  backend: auto             # auto, transformers, sglang, fake (made-up answers, to try a pipeline out)
  device: auto              # auto, cpu, cuda
  dtype: auto               # auto, float32, bfloat16, float16
  deterministic: false      # answers equal to the last bit, whatever else runs; slower
  page_size: 64             # tokens of a KV page
  kv_tokens: auto           # size of the KV pool; auto: what memory leaves
  max_rows: 256             # live questions of all documents at most
  step_tokens: 2048         # tokens of one forward pass at most
  prefill_chunk: 2048       # tokens of a document chunk at most
  tail_piece: 64            # deterministic only: tokens of a piece of a question

sampling:                   # a question may set each of these for itself
  max_new_tokens: 32
  temperature: 0            # 0: the most likely token each time
  top_k: 0                  # 0: no cut
  top_p: 1.0                # 1: no cut
  stop: []                  # strings that end an answer
  stop_token_ids: []
  seed: 0

long_documents:
  policy: error             # error (their records say too_long), truncate_head, truncate_tail, truncate_middle (flagged), split
  chunk_tokens: auto        # split: tokens of a chunk at most; auto: what the context leaves
  overlap_tokens: 128       # split: a chunk begins so many tokens before the end of the one before it

workers:
  count: auto               # how many are wanted, nodes that join later included; auto: one for each GPU, or one with all cores
  cpus: auto
  gpus: auto
  resources: {{}}             # custom resources of Ray that each takes as well
  labels: {{}}                # of the nodes they may run on: ray.io/accelerator-type: "in(A100,RTX-A6000)"
  max_attempts: 3           # worker processes that may end with a document in them before it is given up
  dispatch: ray_data        # ray_data, or direct: for GPUs of several kinds
  watchdog_s: 600.0         # a worker without a token for so long is ended; null: never
  stop_window_s: 2.0        # at SIGTERM, finished answers are kept within so many seconds
  address: null             # of a Ray cluster; null: RAY_ADDRESS, or a Ray of its own here
  context_ranks: null       # workers that together answer a document too long for one of them; null: none do
  context_above_tokens: auto   # documents of more tokens count as too long; auto: than engine.kv_tokens
  context_step_tokens: auto    # tokens of such a document in one step; auto: on GPUs 8,192 a worker, at most 32,768 in all

errors:
  max_fraction: 0.0         # a larger share of records with status error makes the exit code 3
  stop_fraction: 0.5        # a larger share ends the run early
  stop_sample: 500          # once so many records are there

metrics:
  port: null                # of a Prometheus endpoint of the driver; null: none
  host: 127.0.0.1
  heartbeat_s: 10.0         # how often _STATUS.json and the ledger in the output are written
  json_log: false           # events and groups as JSON lines on stderr
"""


def main(path: Path, force: bool, console: Console) -> int:
    """Write the starter. ConfigError when the file is there and `force` is not given, or it cannot be written."""
    if path.exists() and not force:
        raise ConfigError(f"{path}: is there already; --force writes over it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STARTER.format(name=path), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    console.print(f"{path} written; set input.uri and questions, then: askmany run {path}", markup=False, highlight=False, soft_wrap=True)
    return 0
