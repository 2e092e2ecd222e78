"""Documents and questions that come, go and change on an output that holds answers: it ends as a fresh run, and what is new is asked."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from askmany.jobs import gc
from askmany.pipeline.commit import list_shards, read_manifest
from askmany.pipeline.heartbeat import read_status
from askmany.pipeline.run_file import read_run
from askmany.pipeline.storage import ObjectStore
from tests.helpers.launches import Asked, Killed, Stream, answers_of, drained_launch, launch
from tests.helpers.runs import run_values, write_jsonl
from tests.helpers.word_model import word_model

IDS = "abcdef"
Own = tuple[tuple[str, int], ...]
Documents = dict[str, tuple[int, Own]]  # doc_id: which text, own questions (id, which text)
Questions = dict[str, int]

POLICIES = {
    "error": {"policy": "error"},
    "truncate_tail": {"policy": "truncate_tail"},
    "split": {"policy": "split", "chunk_tokens": 30, "overlap_tokens": 5},
}
CHUNKS = 3  # of 70 words in which every word is an end of its own: 0-30, 25-55, 50-70

texts = st.integers(0, 3)
own = st.lists(st.tuples(st.sampled_from(["o1", "o2"]), st.integers(0, 2)), max_size=2, unique_by=lambda pair: pair[0]).map(tuple)
documents = st.dictionaries(st.sampled_from(IDS), st.tuples(texts, own), min_size=1, max_size=6)
questions = st.dictionaries(st.sampled_from(["q1", "q2", "q3"]), st.integers(0, 2), min_size=1, max_size=3)
states = st.tuples(documents, questions)
kills = st.lists(st.integers(0, 25), max_size=3)


def values_of(folder: Path, asked: Documents, shared: Questions, output: str, **more: Any) -> dict[str, Any]:
    """A configuration whose input holds these documents. The texts differ in length: 0 is empty, 3 does not fit the context."""
    lengths = (0, 3, 5, 70)
    rows = [
        {
            "doc_id": doc_id,
            "text": " ".join(f"w{n}" for n in range(lengths[text])),
            "qs": [{"id": i, "question": f"w{t} w8"} for i, t in mine],
        }
        for doc_id, (text, mine) in asked.items()
    ]
    write_jsonl(folder / "d.jsonl", rows)
    listed = [{"id": name, "question": f"w{text} w{text}", "max_new_tokens": 2 + text} for name, text in shared.items()]
    base = {"input": {"questions": "qs"}, "output": {"uri": str(folder / output), "shard_documents": 2}, "questions": listed, **more}
    return run_values(folder, **base)


def cells(asked: Documents, shared: Questions, policy: str) -> dict[Any, Stream]:
    """Everything that an engine has to answer, by all that the answer depends on."""
    found = {}
    for doc_id, (text, mine) in asked.items():
        for name, which in [*shared.items(), *mine] if text in (1, 2) or (text == 3 and policy == "split") else ():
            found[doc_id, text, name, which] = (doc_id, name)
    return found


EDITS = st.lists(st.tuples(states, kills, st.booleans()), min_size=2, max_size=4)
Steps = list[tuple[tuple[Documents, Questions], list[int], bool]]


@pytest.mark.timeout(600)
@settings(deadline=None, max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(EDITS, st.sampled_from(sorted(POLICIES)))
def test_any_edits_and_kills_end_as_a_fresh_run_and_ask_what_is_new(steps: Steps, policy: str) -> None:
    edit_and_compare(steps, policy)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(EDITS, st.sampled_from(sorted(POLICIES)))
def test_many_edits_and_kills(steps: Steps, policy: str) -> None:
    edit_and_compare(steps, policy)


def edit_and_compare(steps: Steps, policy: str) -> None:
    """Launch after every edit, with deaths between; the output must be a fresh run's, and only new streams asked."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        word_model(folder / "model")
        known: set[Any] = set()
        for number, ((asked, shared), deaths, clean) in enumerate(steps):
            heard = Asked()
            values = values_of(folder, asked, shared, "out", long_documents=POLICIES[policy])
            for kill in deaths:
                try:
                    launch(values, heard, kill=kill)
                except Killed:
                    continue
            result = launch(values, heard)
            fresh = launch({**values, "output": {**values["output"], "uri": str(folder / f"fresh{number}")}}, Asked())
            assert answers_of(folder / "out") == answers_of(folder / f"fresh{number}")
            told = [
                (r.documents, r.records, r.planned_documents, r.planned_records, r.statuses, r.document_tokens) for r in (result, fresh)
            ]
            assert told[0] == told[1]
            check_output(folder / "out")
            wanted = cells(asked, shared, policy)
            new = {stream for cell, stream in wanted.items() if cell not in known}
            known |= set(wanted)
            if clean:  # what is out of the answers is gone then
                gc.main(ObjectStore(str(folder / "out"), {}), Console(quiet=True))
                assert not [path for path in (folder / "out").rglob("*") if path.is_file() and "former" in str(path.relative_to(folder))]
                check_output(folder / "out")
                known = set(wanted)
            if policy == "truncate_tail":  # what is left of a document depends on all its questions
                assert new <= set(heard.streams)
                continue
            assert set(heard.streams) == new
            if not deaths:
                long = 0 if policy == "error" else sum(asked[doc_id][0] == 3 for doc_id, _ in new)
                assert heard.streams.total() == len(new) + long * (CHUNKS - 1)


def test_what_a_draining_worker_kept_is_carried_over(tmp_path: Path) -> None:
    """Its group is never committed under that name: a question more makes other groups."""
    held: Documents = {doc_id: (1 + number % 2, ()) for number, doc_id in enumerate(IDS)}
    one_at_a_time = {"engine": {"backend": "fake", "max_rows": 1}, "output": {"uri": str(tmp_path / "out")}}
    heard = Asked()
    kept = drained_launch({**values_of(tmp_path, held, {"q1": 0}, "out"), **one_at_a_time}, heard)
    assert kept
    answered = {row["doc_id"] for name in kept for row in pq.read_table(tmp_path / "out" / name).to_pylist()}
    assert 0 < len(answered) < len(IDS)
    heard.streams.clear()
    result = launch({**values_of(tmp_path, held, {"q1": 0, "q2": 1}, "out"), **one_at_a_time}, heard)
    assert set(heard.streams) == {(doc_id, "q2") for doc_id in IDS} | {(doc_id, "q1") for doc_id in set(IDS) - answered}
    assert (result.records, result.documents) == (12, 6)
    check_output(tmp_path / "out")


def test_an_object_that_is_lost_is_asked_again(tmp_path: Path) -> None:
    """A shard whose records were to be carried over, harmed between plan and fill."""
    held: Documents = dict.fromkeys(IDS, (1, ()))
    launch(values_of(tmp_path, held, {"q1": 0, "q2": 0}, "out"), Asked())
    values, heard = values_of(tmp_path, held, {"q1": 0}, "out"), Asked()
    with pytest.raises(Killed):
        launch(values, heard, kill=3)  # dead letters, former plan, plan
    there = sorted((tmp_path / "out" / "answers").glob("*.parquet"))
    there[0].write_bytes(b"half a shard")
    launch(values, heard)
    assert len(answers_of(tmp_path / "out")) == 6
    assert 0 < heard.streams.total() <= 2
    check_output(tmp_path / "out")


def check_output(output: Path) -> None:
    """Manifest, status and run.json agree, and nothing but the manifest's shards lies among the answers."""
    store = ObjectStore(str(output), {})
    manifest, status, run = read_manifest(store), read_status(store), read_run(store)
    assert manifest.complete
    assert set(list_shards(store)) == set(manifest.shards)
    assert run is not None
    assert (manifest.records, manifest.documents) == (status.done, status.documents_done) == (run["records"], run["documents"])
    assert (manifest.planned_records, status.documents) == (status.planned, run["planned_documents"])
    assert dict(manifest.statuses) == dict(status.statuses) == run["statuses"]
