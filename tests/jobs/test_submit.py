"""What `askmany submit` does and says, against a job server that is only a script: no Ray."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.errors import ConfigError
from askmany.jobs import submit
from askmany.jobs.submit import Options, carry_through, checked_run_id, command, packed, ready_to_travel
from askmany.jobs.wheel import write_wheel
from askmany.pipeline import job_api
from askmany.pipeline.job_api import JobExistsError, JobState, UnreachableError, auth_token, job_address
from askmany.pipeline.submission import CONFIG_KEY, RUN_KEY, Request, SettledError, Submitter, attempt_of, exit_code, told
from tests.helpers.runs import run_config, write_jsonl
from tests.helpers.source import FOLDERS, ROOT, python_files

Log = list[str | Exception]


@dataclass
class ScriptedServer:
    """A job server whose jobs end as `ends` says: attempt -> (status, exit code), one row of log pieces for each time it is followed."""

    ends: Mapping[int, tuple[str, int | None]] = field(default_factory=dict)
    logs: list[Log] = field(default_factory=list)
    known: dict[str, JobState] = field(default_factory=dict)
    troubles: list[Exception] = field(default_factory=list)
    submitted: list[tuple[str, str]] = field(default_factory=list)
    address: str = "http://head:8265"

    def submit(self, submission_id: str, entrypoint: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        self._trouble()
        if submission_id in self.known:
            raise JobExistsError(submission_id)
        self.submitted.append((submission_id, entrypoint))
        self.known[submission_id] = JobState(submission_id, "RUNNING", metadata=metadata)

    def jobs(self) -> list[JobState]:
        self._trouble()
        return list(self.known.values())

    def state(self, submission_id: str) -> JobState | None:
        self._trouble()
        return self.known.get(submission_id)

    def follow(self, submission_id: str) -> Iterator[str]:
        for piece in self.logs.pop(0) if self.logs else ["log\n"]:
            if isinstance(piece, Exception):
                raise piece
            yield piece
        status, code = self.ends.get(int(submission_id.rpartition("-")[2]), ("SUCCEEDED", 0))
        if status != "LOST":
            self.known[submission_id] = JobState(submission_id, status, code, metadata=self.known[submission_id].metadata)
        else:
            del self.known[submission_id]

    def _trouble(self) -> None:
        if self.troubles:
            raise self.troubles.pop(0)


@dataclass
class Told:
    """What came out."""

    code: int
    log: str
    said: list[str]
    slept: list[float]


def carried(server: ScriptedServer, **request: Any) -> Told:
    log, said, slept = io.StringIO(), list[str](), list[float]()
    now = iter(range(10_000))
    values = {"run_id": "r", "config_hash": "h", "entrypoint": lambda again: f"run {again}", "runtime_env": {}, **request}
    submitter = Submitter(server, Request(**values), log.write, said.append, slept.append, lambda: float(next(now)))  # type: ignore[arg-type]
    return Told(submitter.run(), log.getvalue(), said, slept)


def live(number: int = 1, config: str = "h", status: str = "RUNNING", code: int | None = None) -> dict[str, JobState]:
    return {f"r-{number}": JobState(f"r-{number}", status, code, metadata={RUN_KEY: "r", CONFIG_KEY: config})}


def test_a_run_is_submitted_followed_and_its_code_returned() -> None:
    server = ScriptedServer()
    told_ = carried(server)
    assert (told_.code, told_.log, server.submitted) == (0, "log\n", [("r-1", "run False")])


@pytest.mark.parametrize(
    ("end", "code", "tries"),
    [
        (("FAILED", 1), 1, 3),
        (("FAILED", -9), 137, 3),
        (("FAILED", 4), 4, 3),
        (("FAILED", None), 1, 3),
        (("LOST", None), 1, 3),
        (("FAILED", 2), 2, 1),
        (("FAILED", 3), 3, 1),
        (("FAILED", 5), 5, 1),
        (("STOPPED", None), 4, 1),
        (("STOPPED", 4), 4, 1),
        (("STOPPED", -15), 143, 1),
    ],
)
def test_what_another_try_can_mend_is_tried_again(end: tuple[str, int | None], code: int, tries: int) -> None:
    server = ScriptedServer(ends=dict.fromkeys(range(1, 9), end))
    assert carried(server, retries=2).code == code
    assert server.submitted == [("r-1", "run False"), ("r-2", "run True"), ("r-3", "run True")][:tries]


def test_the_code_is_that_of_the_last_attempt() -> None:
    server = ScriptedServer(ends={1: ("FAILED", -9), 2: ("FAILED", 3)})
    found = carried(server, retries=5)
    assert (found.code, len(server.submitted)) == (3, 2)
    assert "r-1: failed, driver ended by signal 9" in found.said


def test_a_dropped_connection_is_joined_again_and_no_line_comes_twice() -> None:
    logs: list[Log] = [["one\ntw", UnreachableError("reset")], ["one\n", "two\nthr", UnreachableError("reset")], ["one\ntwo\nthree\n"]]
    found = carried(ScriptedServer(logs=logs))
    assert found.log == "one\ntwo\nthree\n"
    assert sum("the job goes on" in line for line in found.said) == 2


def test_a_log_whose_end_is_not_told_is_left_once_the_job_is_over() -> None:
    server = ScriptedServer(known=live(), logs=[["a\n", ""]])
    server.troubles = []

    def ended(submission_id: str) -> JobState:
        return JobState(submission_id, "SUCCEEDED", 0)

    server.state = ended  # type: ignore[method-assign]
    assert carried(server).code == 0


def test_a_server_that_is_away_is_waited_for_with_growing_pauses() -> None:
    found = carried(ScriptedServer(troubles=[UnreachableError("no route")] * 6))
    assert (found.code, found.slept) == (0, [1.0, 2.0, 5.0, 10.0, 30.0, 30.0])
    assert sum("waiting for the job server" in line for line in found.said) == 1


def test_a_server_that_stays_away_is_given_up() -> None:
    with pytest.raises(UnreachableError):
        carried(ScriptedServer(troubles=[UnreachableError("no route")] * 50), patience_s=10)


def test_a_submission_whose_answer_was_lost_is_not_made_twice() -> None:
    class Forgetful(ScriptedServer):
        def submit(self, submission_id: str, *rest: Any) -> None:
            super().submit(submission_id, *rest)
            if len(self.submitted) == 1 and not self.logs:
                self.logs.append(["log\n"])
                raise UnreachableError("the answer was lost")

    server = Forgetful()
    found = carried(server)
    assert (found.code, len(server.submitted)) == (0, 1)
    assert any("there already" in line for line in found.said)


def test_a_live_run_is_joined() -> None:
    server = ScriptedServer(known=live(2))
    found = carried(server)
    assert (found.code, server.submitted) == (0, [])
    assert "joined r-2, which is running" in found.said


def test_a_live_run_of_another_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="r-1 runs with another configuration"):
        carried(ScriptedServer(known=live(config="other")))


def test_a_run_that_has_succeeded_is_left_alone_unless_again() -> None:
    server = ScriptedServer(known=live(3, status="SUCCEEDED", code=0))
    with pytest.raises(SettledError, match="r-3 has succeeded; --again"):
        carried(server)
    assert carried(server, again=True).code == 0
    assert server.submitted == [("r-4", "run True")]


def test_a_run_that_has_failed_goes_on() -> None:
    server = ScriptedServer(known=live(3, status="FAILED", code=2, config="before the mend"))
    assert (carried(server).code, server.submitted) == (0, [("r-4", "run True")])


def test_attempts_are_told_apart_from_other_runs() -> None:
    assert [attempt_of("a.b", name) for name in ("a.b-1", "a.b-12", "a.b-0", "axb-1", "a.b-1-1", "a.b", "a.b-c-1")] == [1, 12, *[None] * 5]


def test_ends_in_words() -> None:
    assert exit_code(JobState("x", "FAILED", None, "one\nruntime env failed")) == 1
    assert told(JobState("x", "FAILED", None, "one\nruntime env failed")) == "failed: runtime env failed"
    assert told(JobState("x", "STOPPED")) == "stopped"
    assert told(None) == "lost with the cluster's head"


def test_leaving_leaves_the_job_running(capsys: pytest.CaptureFixture[str]) -> None:
    server = ScriptedServer(logs=[[KeyboardInterrupt()]])  # type: ignore[list-item]

    def follow(submission_id: str) -> Iterator[str]:
        raise KeyboardInterrupt

    server.follow = follow  # type: ignore[method-assign]
    request = Request("r", "h", lambda again: "run", {})
    assert carry_through(Submitter(server, request, submit._out, submit._say)) == 4
    assert "the job goes on" in capsys.readouterr().err
    settled = ScriptedServer(known=live(status="SUCCEEDED", code=0))
    assert carry_through(Submitter(settled, request, submit._out, submit._say)) == 0


def test_the_wheel_is_importable_without_requirements_and_named_by_its_contents(tmp_path: Path) -> None:
    path = write_wheel(tmp_path / "a")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("METADATA"))
        record = wheel.read(next(name for name in names if name.endswith("RECORD"))).decode()
    assert {f"askmany/{p.relative_to(ROOT).as_posix()}" for folder in FOLDERS for p in python_files(folder)} <= names
    assert {name.split(",")[0] for name in record.splitlines()} == names
    assert {"askmany/py.typed", "askmany/pipeline/report_page.html"} <= names
    assert "Requires" not in metadata
    assert write_wheel(tmp_path / "b").read_bytes() == path.read_bytes()
    copy = tmp_path / "package"
    for folder in ("", *FOLDERS):
        (copy / folder).mkdir()
    (copy / "__init__.py").write_text("")
    assert write_wheel(tmp_path / "b", copy).name != path.name


def test_the_configuration_travels_with_its_questions_and_without_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "d", "text": "w1"}])
    (tmp_path / "q.txt").write_text("w1 w2\nw3\n")
    config = run_config(tmp_path, questions=str(tmp_path / "q.txt"), workers={"address": "10.0.0.1:6379"}, output={"uri": "out"})
    monkeypatch.chdir(tmp_path)
    found = ready_to_travel(config, "http://127.0.0.1:8265", shared=False)
    assert [question["question"] for question in found.questions or ()] == ["w1 w2", "w3"]
    assert (found.output.uri, found.workers.address) == (str(tmp_path / "out"), None)
    assert ready_to_travel(config, "http://head:8265", shared=True).output.uri == str(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"input\.uri: .*d\.jsonl is a path of this machine"):
        ready_to_travel(config, "http://head:8265", shared=False)
    remote = config.model_copy(update={"input": config.input.model_copy(update={"uri": "s3://b/in"}), "model": "smollm2"})
    with pytest.raises(ConfigError, match=r"output\.uri: out is"):
        ready_to_travel(remote, "http://head:8265", shared=False)


def test_what_a_job_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu")
    more = tmp_path / "env.yaml"
    more.write_text("env_vars: {A: '1', B: '2'}\npip: [einops]\n")
    env = packed(tmp_path, "model: m\n", Options(env=("AWS_REGION", "B=3"), runtime_env=more))
    assert env["env_vars"] == {"A": "1", "B": "3", "AWS_REGION": "eu"}
    assert env["pip"] == ["einops"]
    assert Path(env["working_dir"], "run.yaml").read_text() == "model: m\n"
    assert [Path(module).suffix for module in env["py_modules"]] == [".whl"]
    (tmp_path / "bare").mkdir()
    assert packed(tmp_path / "bare", "", Options(wheel=False))["py_modules"] == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(env=("NOT_SET_HERE",)), "--env NOT_SET_HERE"),
        (Options(env=("=1",)), "--env =1"),
        (Options(runtime_env=Path("/no/such")), "cannot be read"),
    ],
)
def test_bad_environments_are_refused(tmp_path: Path, options: Options, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        packed(tmp_path, "", options)


@pytest.mark.parametrize(("content", "text"), [("[1]", "a mapping is needed"), ("working_dir: .", "working_dir is the run's own")])
def test_bad_runtime_envs_are_refused(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "env.yaml").write_text(content)
    with pytest.raises(ConfigError, match=text):
        packed(tmp_path, "", Options(runtime_env=tmp_path / "env.yaml"))


def test_commands_of_attempts() -> None:
    assert command(Options(), again=False).endswith("run.yaml --if-running fail")
    assert command(Options(retry_errors=True), again=True).endswith("run.yaml --if-running wait --retry-errors")
    evaluation = Options(evaluation=("--date", "2026-01-01"))
    assert command(evaluation, again=False) == "python -m askmany.jobs.cli evaluate run.yaml --if-running fail --date 2026-01-01"
    assert command(Options(if_running="takeover"), again=True).endswith("--if-running takeover")


@pytest.mark.parametrize("run_id", ["", "-a", "a b", "a/b", "é", "a" * 64, "a."])
def test_run_ids_that_cannot_stand_in_a_name_are_refused(run_id: str) -> None:
    with pytest.raises(ConfigError, match="--run-id"):
        checked_run_id(run_id)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert job_address(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert job_address(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://head/")
    assert job_address(None) == "https://head"
    with pytest.raises(ConfigError, match="the job server's URL"):
        job_address("10.0.0.1:6379")


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(job_api, "TOKEN_PATH", str(tmp_path / "home"))
    assert auth_token() is None
    (tmp_path / "home").write_text("one\n")
    assert auth_token() == "one"
    (tmp_path / "named").write_text("two")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    assert auth_token() == "two"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "three")
    assert auth_token() == "three"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN_PATH: .*absent cannot be read"):
        auth_token()


def test_a_head_that_is_not_there_is_unreachable() -> None:
    pytest.importorskip("aiohttp_cors")
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9"):
        job_api.JobServer("http://127.0.0.1:9", None).jobs()
