"""Every export read back the way its users read it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.jobs import export
from askmany.pipeline.schema import Record, answer_schema
from tests.helpers.stored import labelled, stored_run

JSON = '{"p":"Ür","n":[1]}'


def stored(folder: Path) -> str:
    """Two documents; the answers about the first lie in two shards, as they do after questions were added."""
    first = [
        Record("a", "t", "ok", "Plain é", (1, 2), "stop", 10, 3, -0.5, 0.3, question="Say?", keep={"text": "Document a"}),
        labelled("a", "c", {"yes": 0.7, "no": 0.3}, [], margin=0.85, question="Is it <so>?", keep={"text": "Document a"}),
        Record("a", "i", "ok", "7", (3,), "stop", 10, 3, -0.1, 2.0, answer_type="int", value="7", value_number=7.0),
        Record("a", "j", "ok", JSON, (4,), "stop", 10, 3, -0.1, 3.0, answer_type="json", value=JSON),
        Record("a", "m", "ok", '["u"]', (4,), "stop", 10, 3, -0.1, 4.0, answer_type="multi_choice", value='["u"]'),
    ]
    second = [
        Record("b", "t", "error", error="it broke", question="Say?"),
        labelled("b", "c", {"yes": 0.49, "no": 0.51}, [], margin=0.04, legal_mass=0.01, question="Is it <so>?"),
        Record("b", "i", "invalid_output", "many", (3,), "stop", 10, 3, -0.1, 9.0, answer_type="int", error="no number"),
        Record("b", "j", "ok", "not stated", (4,), "stop", 10, 3, -0.1, 3.0, answer_type="json", value="null"),
        Record("b", "m", "length", '["u', (4,), "length", 10, 3, -0.1, 4.0, answer_type="multi_choice", error="not complete"),
    ]
    return stored_run(folder / "run", {"g1": first[:3], "g2": second, "g3": first[3:]}, keep=("text",))


def exported(folder: Path, shape: str) -> Path:
    assert export.main(stored(folder), shape, str(folder / "out"), Console(file=io.StringIO())) == 0
    return folder / "out"


def test_long_is_every_record_with_the_declared_schema(tmp_path: Path) -> None:
    table = pq.read_table(exported(tmp_path, "long") / "answers.parquet")
    assert table.schema.equals(answer_schema(("text",)))
    assert table.num_rows == 10


def test_wide_is_a_row_a_document_with_typed_columns(tmp_path: Path) -> None:
    table = pq.read_table(exported(tmp_path, "wide") / "wide.parquet")
    types = {name: table.schema.field(name).type for name in ("t", "c", "i", "j", "m")}
    assert types == {"t": pa.string(), "c": pa.string(), "i": pa.int64(), "j": pa.string(), "m": pa.list_(pa.string())}
    one, two = table.to_pylist()
    assert {name: one[name] for name in types} == {"t": "Plain é", "c": "yes", "i": 7, "j": JSON, "m": ["u"]}
    assert {name: two[name] for name in types} == {"t": None, "c": "no", "i": None, "j": None, "m": None}
    assert [two[f"{name}.status"] for name in types] == ["error", "ok", "invalid_output", "ok", "length"]


def test_wide_has_a_row_for_each_chunk_of_a_document_that_was_split(tmp_path: Path) -> None:
    records = [Record("a", q, "ok", f"{q}{chunk}", chunk=chunk, flags=(f"chunk:{chunk + 1}/2",)) for q in "xy" for chunk in (0, 1)]
    output = stored_run(tmp_path / "run", {"g1": records[:2], "g2": records[2:]})
    assert export.main(output, "wide", str(tmp_path / "out"), Console(file=io.StringIO())) == 0
    rows = pq.read_table(tmp_path / "out" / "wide.parquet").to_pylist()
    assert [(row["doc_id"], row["chunk"], row["x"], row["y"]) for row in rows] == [("a", 0, "x0", "y0"), ("a", 1, "x1", "y1")]


def test_batch_lines_have_a_custom_id_and_an_error_of_their_own(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (exported(tmp_path, "batch") / "batch.jsonl").read_text("utf-8").splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == 10
    answered = by_id["a/t"]["response"]
    assert answered["status_code"] == 200
    assert answered["body"]["choices"][0]["message"]["content"] == "Plain é"
    assert answered["body"]["usage"] == {"prompt_tokens": 13, "completion_tokens": 2, "total_tokens": 15}
    assert by_id["a/t"]["error"] is None
    assert (by_id["b/t"]["response"], by_id["b/t"]["error"]) == (None, {"code": "error", "message": "it broke"})
    assert by_id["b/i"]["error"]["code"] == "invalid_output"


def test_label_studio_tasks_and_interface_belong_together(tmp_path: Path) -> None:
    folder = exported(tmp_path, "label-studio")
    tasks = json.loads((folder / "label_studio.json").read_text("utf-8"))
    assert [task["data"]["doc_id"] for task in tasks] == ["a", "b"]
    assert tasks[0]["data"]["text"] == "Document a"
    (prediction,) = tasks[0]["predictions"]
    assert prediction["model_version"] == "tiny@0123456789ab"
    results = {result["from_name"]: result for result in prediction["result"]}
    assert (results["c"]["type"], results["c"]["value"], results["c"]["score"]) == ("choices", {"choices": ["yes"]}, 0.7)
    assert (results["i"]["type"], results["i"]["value"]) == ("number", {"number": 7.0})
    assert results["m"]["value"] == {"choices": ["u"]}
    assert prediction["score"] == min(result["score"] for result in results.values())
    second = {result["from_name"]: result for result in tasks[1]["predictions"][0]["result"]}
    assert set(second) == {"c", "i", "j", "m"}
    assert second["i"]["value"] == {"text": ["many"]}, "what is no legal value is shown as text"
    view = ElementTree.fromstring((folder / "label_studio.xml").read_text("utf-8"))
    controls = {element.get("name"): element for element in view.iter() if element.get("toName")}
    assert {name: element.tag for name, element in controls.items()} == {
        "t": "TextArea",
        "c": "Choices",
        "i": "Number",
        "j": "TextArea",
        "m": "Choices",
    }
    assert [choice.get("value") for choice in controls["c"]] == ["yes", "no"]


def test_the_dataset_folder_loads_with_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset(str(exported(tmp_path, "dataset")), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 10
    first = next(row for row in loaded if (row["doc_id"], row["question_id"]) == ("a", "c"))
    assert first["label_probabilities"] == [{"label": "yes", "probability": 0.7}, {"label": "no", "probability": 0.3}]


def test_the_review_list_begins_with_the_most_doubtful(tmp_path: Path) -> None:
    with (exported(tmp_path, "review") / "review.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    order = [(row["doc_id"], row["question_id"]) for row in rows]
    assert order[:2] == [("b", "m"), ("b", "i")], "first what is no legal answer"
    assert order[2:] == [("b", "c"), ("a", "t"), ("a", "c"), ("a", "i"), ("a", "j"), ("b", "j"), ("a", "m")]
    assert [row["rank"] for row in rows] == [str(number) for number in range(1, 10)]
    assert rows[2]["probability"] == "0.51"


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shape 'excel' is none of long, wide"):
        export.main(stored(tmp_path), "excel", None, Console())


def test_exports_go_beside_the_answers_by_default(tmp_path: Path) -> None:
    output = stored(tmp_path)
    export.main(output, "review", None, Console(file=io.StringIO()))
    assert (tmp_path / "run/exports/review/review.csv").is_file()
