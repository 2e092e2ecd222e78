"""The command line: exit codes, one line for everything that is refused, and what a user sees."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray
import yaml
from typer.testing import CliRunner

from askmany.jobs.cli import app
from askmany.jobs.run import guarded
from askmany.pipeline.config_file import load_config
from tests.helpers.runs import run_values, write_jsonl
from tests.helpers.source import ROOT
from tests.helpers.word_model import words

ROWS = [{"doc_id": "a", "text": "w1 w2"}, {"doc_id": "b", "text": "w3", "questions": [{"qid": "own", "question": "w9"}]}]


def invoke(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, list(arguments), terminal_width=200, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def config(folder: Path, rows: list[Any] | None = None, **values: Any) -> str:
    """The path of a run's configuration over these rows."""
    write_jsonl(folder / "d.jsonl", ROWS if rows is None else rows)
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(run_values(folder, **values)))
    return str(path)


def refused(*arguments: str) -> str:
    """The one line that the command is refused with."""
    code, out, err = invoke(*arguments)
    assert code == 2, (code, out, err)
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("askmany: ")
    return line


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may get as far as an engine."""

    def dispatch(*arguments: object) -> None:
        pytest.fail("an engine was to be built")

    monkeypatch.setattr("askmany.pipeline.run.dispatch", dispatch)


@pytest.mark.usefixtures("no_engine")
class TestRefused:
    """Bad input: one line, exit code 2, no model loaded."""

    def test_unknown_key(self, tmp_path: Path) -> None:
        line = refused("run", config(tmp_path), "--set", "engine.streems=4")
        assert "c.yaml: engine.streems: unknown key; did you mean 'streams'?" in line

    def test_missing_configuration(self, tmp_path: Path) -> None:
        assert "none.yaml: no such configuration file" in refused("run", str(tmp_path / "none.yaml"))

    def test_missing_input(self, tmp_path: Path) -> None:
        line = refused("run", config(tmp_path), "--set", f"input.uri={tmp_path}/nowhere.jsonl")
        assert f"{tmp_path}/nowhere.jsonl: no such file or folder" in line

    def test_missing_question_file(self, tmp_path: Path) -> None:
        assert "nowhere.yaml: no such question file" in refused("run", config(tmp_path, questions=str(tmp_path / "nowhere.yaml")))

    @pytest.mark.parametrize(
        ("text", "message"), [("", "the question set is empty"), ("- {id: x, question: A}\n- {id: x, question: B}", "'x'")]
    )
    def test_bad_question_files(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "q.yaml").write_text(text)
        line = refused("run", config(tmp_path, questions=str(tmp_path / "q.yaml")))
        assert "q.yaml" in line
        assert message in line

    def test_empty_question_set(self, tmp_path: Path) -> None:
        assert "questions: none given" in refused("run", config(tmp_path, questions=[]))

    def test_duplicate_question(self, tmp_path: Path) -> None:
        line = refused("run", config(tmp_path, questions=[{"id": "x", "question": "A"}, {"id": "x", "question": "B"}]))
        assert "questions: question id 'x' is given twice" in line

    def test_unsupported_question_type(self, tmp_path: Path) -> None:
        assert "type 'essay' is none of text, choice" in refused("run", config(tmp_path, questions=[{"question": "A", "type": "essay"}]))

    @pytest.mark.usefixtures("ray_session")
    def test_duplicate_document(self, tmp_path: Path) -> None:
        line = refused("run", config(tmp_path, rows=[*ROWS, ROWS[0]]))
        assert "doc_id 'a' occurs 2 times" in line
        assert "d.jsonl:1 and" in line
        assert "d.jsonl:3" in line

    @pytest.mark.usefixtures("ray_session")
    def test_malformed_line_when_strict(self, tmp_path: Path) -> None:
        assert "d.jsonl:3: malformed JSON" in refused("run", config(tmp_path, rows=[*ROWS, b"{oops"]), "--strict")

    def test_template_that_cannot_be_split(self, tmp_path: Path) -> None:
        path = config(tmp_path)
        template = "{% for m in messages %}{{ m['content'] }} again {{ m['content'] }}{% endfor %}"
        (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert "template" in refused("run", path)

    def test_context_too_small(self, tmp_path: Path) -> None:
        line = refused("run", config(tmp_path, sampling={"max_new_tokens": 64}))
        assert "the context of 64 tokens is too small for any question" in line

    @pytest.mark.parametrize(("name", "kind"), [("x.pdf", "PDF"), ("x.docx", "Word")])
    def test_office_files(self, tmp_path: Path, name: str, kind: str) -> None:
        source = tmp_path / "source"
        source.mkdir()
        (source / "fine.txt").write_text("w1")
        (source / name).write_bytes(b"x")
        line = refused("run", config(tmp_path, input={"uri": str(source)}))
        assert f"{name}: {kind} files are not read" in line

    def test_missing_column(self, tmp_path: Path) -> None:
        assert "input.text: " in (line := refused("run", config(tmp_path, input={"text": "txt"})))
        assert "has no column 'txt'; did you mean 'text'?" in line

    @pytest.mark.parametrize("model", ["./nowhere", "no/such/model", "someone/gated-model", "modle"])
    def test_models_that_cannot_be_had(self, tmp_path: Path, model: str) -> None:
        assert model in refused("run", config(tmp_path), "--model", model)

    def test_model_folder_without_weights(self, tmp_path: Path) -> None:
        path = config(tmp_path)
        (tmp_path / "model" / "model.safetensors").unlink()
        assert "holds no weights" in refused("run", path)

    def test_output_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "run.json").write_text("{")
        assert "run.json: not valid JSON" in refused("run", config(tmp_path))
        (tmp_path / "out" / "run.json").write_text('{"identity": 5}')
        assert "run.json: not a run's file" in refused("run", config(tmp_path))


def test_sigterm_ends_any_command_as_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        return 0

    assert guarded(stopped) == 4
    assert "interrupted; nothing is lost" in capsys.readouterr().err


@pytest.mark.usefixtures("ray_session")
def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    path = config(tmp_path, rows=[*ROWS, b"{oops", {"doc_id": "c", "text": words(99)}], input={"questions": "questions"})
    code, out, err = invoke("run", path)
    assert (code, err) == (0, "")
    assert "3 documents, 4 questions in 1 group" in out
    assert "done: 4 of 4 records (3 ok, 1 too_long)" in out
    assert "dead letters: 1 in" in out
    assert f"answers: {tmp_path}/out/answers/*.parquet" in out
    assert "times less" in out
    code, out, _ = invoke("show", str(tmp_path / "out"))
    assert code == 0
    assert "4 of 4 records: 3 ok, 1 too_long" in out
    code, out, _ = invoke("show", str(tmp_path / "out"), "--document", "b", "--question", "own", "--full")
    assert out.splitlines()[0] == "b · own · ok"
    assert "1 of 1 records: 1 ok" in out
    _, out, _ = invoke("show", str(tmp_path / "out"), "-n", "1")
    assert "1 of 4 records" in out
    assert "no answers that match" in refused("show", str(tmp_path / "out"), "--status", "error")
    assert "--status fine: one of ok" in refused("show", str(tmp_path / "out"), "--status", "fine")
    assert invoke("run", path, "--quiet") == (0, "", "")


@pytest.mark.usefixtures("ray_session")
def test_options_are_overrides(tmp_path: Path) -> None:
    code, out, _ = invoke("run", config(tmp_path), "--dry-run", "--limit", "1", "-o", str(tmp_path / "else's"), "--set", "sampling.seed=3")
    assert code == 0
    assert "1 document, 1 question in 1 group" in out
    assert not (tmp_path / "else's").exists()


@pytest.mark.usefixtures("ray_session")
def test_a_column_of_questions_in_which_nothing_stands_is_told(tmp_path: Path) -> None:
    path = config(tmp_path)
    told = "no document has questions of its own: nothing in column 'qeustions' (input.questions)"
    assert told in invoke("run", path, "--dry-run", "--set", "input.questions=qeustions")[1]
    assert "no document has questions" not in invoke("run", path, "--dry-run", "--set", "input.questions=questions")[1]


@pytest.mark.parametrize("command", ["run", "show", "status", "report", "gc", "score", "export"])
def test_an_output_below_a_file_is_refused_by_name(tmp_path: Path, command: str) -> None:
    path = config(tmp_path)
    output = str(tmp_path / "d.jsonl")
    arguments = {"run": ["run", path, "-o", output], "export": ["export", output, "long"]}.get(command, [command, output])
    assert output in (line := refused(*arguments))
    assert "Not a directory" in line


def test_a_full_disk_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/out/plan.parquet")

    monkeypatch.setattr("askmany.jobs.run.run", full)
    code, out, err = invoke("run", config(tmp_path))
    assert (code, out, err) == (1, "", "askmany: [Errno 28] No space left on device: '/out/plan.parquet'\n")


def test_show_needs_a_run(tmp_path: Path) -> None:
    assert "run.json: no such file" in refused("show", str(tmp_path))


def test_init_writes_a_configuration_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "askmany.yaml"
    code, out, _ = invoke("init", str(path))
    assert code == 0
    assert f"askmany run {path}" in out
    assert load_config(path).model == "smollm2"
    assert f"{path}: is there already" in refused("init", str(path))
    assert invoke("init", str(path), "--force")[0] == 0
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused("init", str(tmp_path / "file" / "x.yaml"))


def test_preview_shows_the_exact_prompt(tmp_path: Path) -> None:
    path = config(tmp_path, input={"questions": "questions"}, prompt={"instruction": "w7 w7"})
    code, out, _ = invoke("preview", path)
    assert code == 0
    assert "w7 w7\n\nw1 w2\n\nw1 w2\n" in out
    assert "= 6, answer at most 2, context 64" in out
    assert "BOS tokens at the start: 0" in out
    assert "equal to the whole prompt encoded in one go: yes" in out
    code, out, _ = invoke("preview", path, "--document", "b", "--question", "own")
    assert "document b · question own" in out
    assert "w3\n\nw9\n" in out
    assert "no document 'z'" in refused("preview", path, "--document", "z")
    assert "is not asked it; it is asked q-" in refused("preview", path, "--question", "z")


def test_preview_tells_why_a_question_is_not_asked(tmp_path: Path) -> None:
    path = config(tmp_path, rows=[{"doc_id": "long", "text": words(99)}, {"doc_id": "empty", "text": " "}])
    assert "not asked: too_long: 103 tokens" in invoke("preview", path)[1]
    assert "not asked: empty_document" in invoke("preview", path, "--document", "empty")[1]
    cut = invoke("preview", path, "--set", "long_documents.policy=truncate_tail")[1]
    assert "flags: truncated_tokens:39" in cut
    assert "equal to the whole prompt encoded in one go: yes" in cut


def test_models_are_listed() -> None:
    code, out, _ = invoke("models")
    assert code == 0
    assert "smollm2: " in out


@pytest.mark.usefixtures("ray_session")
def test_an_interrupted_run_keeps_its_answers_and_goes_on(tmp_path: Path) -> None:
    """Ctrl-C in the middle: exit code 4, finished answers readable; the same command then does the rest."""
    path = config(tmp_path, rows=[{"doc_id": f"d{i:02}", "text": words(10 + i)} for i in range(30)], sampling={"max_new_tokens": 20})
    program = "import sys; from askmany.pipeline.run import run; from tests.helpers.engines import slow_engine; "
    program += f"sys.exit(run({path!r}, build_engine=slow_engine).exit_code)"
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
    answers = tmp_path / "out" / "answers"
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline and (not answers.is_dir() or len(list(answers.glob("*.parquet"))) < 2):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    code, out, _ = invoke("show", str(tmp_path / "out"), "-n", "100")
    assert code == 0
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    done = record["records"]
    assert record["state"] == "interrupted"
    assert 2 <= done < 30
    assert f"{done} of {done} records: {done} ok" in out
    assert sum(pq.read_table(shard).num_rows for shard in answers.glob("*.parquet")) >= done
    code, out, err = invoke("run", path)
    assert (code, err) == (0, "")
    assert "done before" in out
    assert "done: 30 of 30 records (30 ok)" in out


def test_a_command_that_is_interrupted_before_it_began_exits_with_4(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("askmany.jobs.run.run", interrupted)
    code, _, err = invoke("run", config(tmp_path))
    assert code == 4
    assert "interrupted; nothing is lost" in err


def test_the_module_runs_by_its_name(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "askmany.jobs.run", str(tmp_path / "none.yaml")]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("askmany: ")
