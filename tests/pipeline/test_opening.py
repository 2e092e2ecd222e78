"""Opening a run: what its output already says of it, and what of its input is refused or left out."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from askmany.engine.errors import ConfigError
from askmany.pipeline.building import build_preparer
from askmany.pipeline.hold import held
from askmany.pipeline.lock import LockKeeper, LockLostError
from askmany.pipeline.opening import open_run
from askmany.pipeline.run import as_it_stands
from askmany.pipeline.run_file import write_run
from askmany.pipeline.storage import ObjectStore
from tests.helpers.runs import opened_run, run_config, write_jsonl


def test_a_lock_lost_while_the_run_is_planned_is_no_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Losing(LockKeeper):
        def __enter__(self) -> LockKeeper:
            self._on_lost(LockLostError("epoch 1 lost the run lock to another"))
            return super().__enter__()

    monkeypatch.setattr("askmany.pipeline.hold.LockKeeper", Losing)
    opened = opened_run(tmp_path, [{"doc_id": "a", "text": "w1 w2"}])
    with pytest.raises(LockLostError, match="lost the run lock to another"), held(opened.store, 60.0, "fail"):
        time.sleep(10)


def test_a_run_that_waited_for_the_lock_takes_over_the_date_of_the_one_before(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    waiting = opened_run(tmp_path, [{"doc_id": "a", "text": "w1 w2"}])
    assert as_it_stands(waiting, config, build_preparer) is waiting
    earlier = open_run(config.model_copy(update={"date": datetime.now(UTC).replace(tzinfo=None, microsecond=0) - timedelta(days=3)}))
    assert earlier.fingerprint != waiting.fingerprint
    write_run(waiting.store, {"identity": earlier.identity})
    stands = as_it_stands(waiting, config, build_preparer)
    assert stands.fingerprint == earlier.fingerprint
    assert stands.config.date == earlier.config.date


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_of_questions_that_is_not_there_is_refused_beside_shared_questions(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"d.{kind}"
    table = pa.table({"doc_id": ["a"], "text": ["w1"], "questions": ["w2"]})
    pq.write_table(table, path) if kind == "parquet" else csv.write_csv(table, path)
    config = run_config(tmp_path, input={"uri": str(path), "questions": "qeustions"})
    with pytest.raises(ConfigError, match=r"input\.questions: .* has no column 'qeustions'; did you mean 'questions'\?"):
        open_run(config)
    open_run(run_config(tmp_path, input={"uri": str(path), "questions": "questions"}))


def test_an_output_inside_the_input_is_no_part_of_it(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.html").write_text("<p>w1</p>")
    for uri in (source, source / "**", source / "**" / "*.html"):
        config = run_config(tmp_path, input={"uri": str(uri)}, output={"uri": str(source / "out")})
        first = open_run(config).files
        ObjectStore(config.output.uri, {}).put("report.html", b"<p>w2</p>")
        ObjectStore(config.output.uri, {}).put("_STATUS.json", b"{}")
        assert open_run(config).files == first
    (source / "a.html").unlink()
    with pytest.raises(ConfigError, match=r"input\.uri: no files in .* but those below output\.uri"):
        open_run(config)


def test_an_output_that_leads_through_a_file_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "a", "text": "w1"}])
    with pytest.raises(ConfigError, match=r"output\.uri: .*d\.jsonl/run\.json: cannot be read: .*Not a directory"):
        open_run(run_config(tmp_path, output={"uri": str(tmp_path / "d.jsonl")}), own_output=False)
