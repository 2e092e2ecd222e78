"""Scheduled evaluations: what is asked anew, what it is told against, what comes out for a scheduler, the page and the webhook."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from matplotlib.image import imread
from rich.console import Console

from askmany.engine.errors import ConfigError, EngineError
from askmany.pipeline.eval_history import Entry, Metric, read_history, write_entry
from askmany.pipeline.eval_schedule import checked_date, evaluate, summary
from askmany.pipeline.eval_selection import FileState, dumped, loaded, select
from askmany.pipeline.lock import LockLostError, RunLock, RunLockedError
from askmany.pipeline.result import RunResult
from askmany.pipeline.storage import InputFile, ObjectStore
from askmany.pipeline.trend import render_trend
from askmany.pipeline.trend_charts import Point, intervals
from askmany.pipeline.webhook import check_url, post
from tests.helpers.browser import dom_of, screenshot
from tests.helpers.evaluations import Answerer, MovingInput, schedule

QUIET = Console(quiet=True)
DAYS = ("2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04")


@pytest.fixture
def moving(tmp_path: Path) -> MovingInput:
    found = MovingInput(tmp_path / "in")
    for n in range(6):
        found.put(f"d{n}")
    return found


def root_of(folder: Path) -> ObjectStore:
    return ObjectStore(str(folder / "root"), {})


def test_only_what_has_changed_is_asked_and_what_is_gone_is_not_scored(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer(wrong={"d1", "d2"})
    first = evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer)
    assert (first.verdict, first.exit_code, first.documents, first.asked_documents, first.records) == ("green", 0, 6, 6, 12)
    moving.put("d6")
    moving.put("d1", "w9 w8")
    moving.remove("d2")
    answer.wrong = set()
    second = evaluate(schedule(tmp_path, DAYS[1]), QUIET, answer)
    assert answer.asked == [["d0", "d1", "d2", "d3", "d4", "d5"], ["d1", "d6"]]
    assert (second.documents, second.asked_documents, second.records, second.against) == (6, 2, 12, first.key)
    exact = {entry.key: next(m.mean for m in entry.metrics if m.metric == "exact_match") for entry in (first, second)}
    assert exact == {first.key: pytest.approx(8 / 12), second.key: 1.0}
    third = evaluate(schedule(tmp_path, DAYS[2]), QUIET, answer)
    assert (len(answer.asked), third.documents, third.asked_documents, third.verdict) == (2, 6, 0, "green")
    table = ds.dataset(str(tmp_path / "root/history")).to_table().to_pandas()
    assert sorted(table["key"].unique()) == [first.key, second.key, third.key]
    assert set(table["metric"]) == {"exact_match", "f1", "token_recall"}


def test_without_last_success_everything_is_asked_each_time(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    for day in DAYS[:2]:
        evaluate(schedule(tmp_path, day, since="all"), QUIET, answer)
    assert [len(asked) for asked in answer.asked] == [6, 6]


def test_another_prompt_asks_everything_anew(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer)
    evaluate(schedule(tmp_path, DAYS[1], {"prompt": {"instruction": "w7"}}), QUIET, answer)
    assert [len(asked) for asked in answer.asked] == [6, 6]


def test_a_regression_is_told_until_it_is_gone(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    green = evaluate(schedule(tmp_path, DAYS[0], since="all"), QUIET, answer)
    answer.wrong = {"d0", "d1", "d2", "d3", "d4"}
    red = evaluate(schedule(tmp_path, DAYS[1], since="all"), QUIET, answer)
    assert (red.verdict, red.exit_code, red.against) == ("red", 5, green.key)
    assert {metric.name for metric in red.regressed} == {"text.exact_match", "text.f1", "text.token_recall"}
    assert red.regressed[0].difference == pytest.approx(-5 / 6)
    assert red.regressed[0].difference_high < 0  # type: ignore[operator]
    again = evaluate(schedule(tmp_path, DAYS[2], since="all"), QUIET, answer)
    assert (again.verdict, again.against) == ("red", green.key)
    tolerant = evaluate(schedule(tmp_path, DAYS[2] + "T01", since="all", smallest_drop=0.9), QUIET, answer)
    assert tolerant.verdict == "green"
    answer.wrong = set()
    assert evaluate(schedule(tmp_path, DAYS[3], since="all"), QUIET, answer).verdict == "green"
    assert [entry.verdict for entry in read_history(root_of(tmp_path))] == ["green", "red", "red", "green", "green"]


def test_a_document_that_was_edited_is_not_held_against_the_model(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    evaluate(schedule(tmp_path, DAYS[0], since="all"), QUIET, answer)
    for n in range(5):
        moving.put(f"d{n}", "w8 w8")
    answer.wrong = {f"d{n}" for n in range(5)}
    second = evaluate(schedule(tmp_path, DAYS[1], since="all"), QUIET, answer)
    assert (second.verdict, second.metrics[0].mean, second.metrics[0].difference) == ("green", pytest.approx(1 / 6), 0.0)


def test_errors_are_red_and_failures_leave_a_trace(tmp_path: Path, moving: MovingInput) -> None:
    red = evaluate(schedule(tmp_path, DAYS[0]), QUIET, Answerer(error={"d1"}))
    assert (red.verdict, red.exit_code, red.errors) == ("red", 3, 2)
    moving.put("d7")
    with pytest.raises(EngineError, match="device is gone"):
        evaluate(schedule(tmp_path, DAYS[1]), QUIET, Answerer(raises=EngineError("the device is gone")))
    moving.put("d8")
    interrupted = evaluate(schedule(tmp_path, DAYS[2]), QUIET, Answerer(state="interrupted"))
    assert (interrupted.verdict, interrupted.exit_code) == ("failed", 4)
    history = read_history(root_of(tmp_path))
    assert [(entry.verdict, entry.exit_code) for entry in history] == [("red", 3), ("failed", 1), ("failed", 4)]
    assert "the device is gone" in history[1].note
    page = (tmp_path / "root/trend.html").read_text()
    assert "the device is gone" in page
    answer = Answerer()
    again = evaluate(schedule(tmp_path, DAYS[2]), QUIET, answer)
    assert (again.key, again.verdict, answer.asked) == (interrupted.key, "green", [["d7", "d8"]])


def test_a_key_whose_work_is_done_is_not_done_again_and_a_moved_input_gets_a_number(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    first = evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer)
    assert evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer) == first
    assert len(answer.asked) == 1
    moving.put("d9")
    second = evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer)
    assert (second.key, answer.asked[1:]) == (f"{first.key}-2", [["d9"]])
    moving.remove("d9")
    assert evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer) == first
    moving.remove("d0")
    third = evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer)
    assert (third.key, third.documents, len(answer.asked)) == (f"{first.key}-3", 5, 2)


def test_one_document_in_two_files_is_refused(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer)
    (tmp_path / "in/again.jsonl").write_text((tmp_path / "in/d3.jsonl").read_text())
    with pytest.raises(ConfigError, match="doc_id 'd3' is in two files"):
        evaluate(schedule(tmp_path, DAYS[1]), QUIET, answer)


def test_while_one_works_another_is_refused(tmp_path: Path, moving: MovingInput) -> None:
    lock = RunLock(root_of(tmp_path))
    lock.acquire()
    with pytest.raises(RunLockedError):
        evaluate(schedule(tmp_path, DAYS[0]), QUIET, Answerer())
    lock.release()
    assert evaluate(schedule(tmp_path, DAYS[0]), QUIET, Answerer()).verdict == "green"


def test_another_limit_or_format_is_other_work(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    first = evaluate(schedule(tmp_path, DAYS[0], {"input": {"limit": 1}}), QUIET, answer)
    second = evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer)
    assert (first.documents, second.documents, second.key) == (1, 6, f"{first.key}-2")
    third = evaluate(schedule(tmp_path, DAYS[0], {"input": {"format": "jsonl"}}), QUIET, answer)
    assert ([len(asked) for asked in answer.asked], third.key) == ([1, 6, 6], f"{first.key}-3")
    again = evaluate(schedule(tmp_path, DAYS[0]), QUIET, answer)
    assert (again.key, len(answer.asked)) == (second.key, 3)


def test_a_limited_success_is_no_last_success_of_the_whole(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    evaluate(schedule(tmp_path, DAYS[0], {"input": {"limit": 1}}), QUIET, answer)
    assert evaluate(schedule(tmp_path, DAYS[1]), QUIET, answer).asked_documents == 6


def gold_file(folder: Path, doc_id: str = "d0") -> str:
    path = folder / f"gold-{doc_id}.jsonl"
    path.write_text(json.dumps({"doc_id": doc_id, "qid": "q0", "answers": ["w1 w2"]}))
    return str(path)


def test_a_gold_file_that_matches_nothing_is_a_failure_until_it_is_put_right(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    with pytest.raises(ConfigError, match="nothing to score: 12 no reference"):
        evaluate(schedule(tmp_path, DAYS[0], gold=gold_file(tmp_path, "renamed")), QUIET, answer)
    (failed,) = read_history(root_of(tmp_path))
    assert (failed.verdict, failed.exit_code, failed.metrics) == ("failed", 2, ())
    assert "12 no reference" in failed.note
    right = evaluate(schedule(tmp_path, DAYS[0], gold=gold_file(tmp_path)), QUIET, answer)
    assert (right.key, right.verdict, right.metrics[0].items) == (failed.key, "green", 1)


def test_references_that_are_gone_since_the_last_green_one_are_a_failure(tmp_path: Path, moving: MovingInput) -> None:
    evaluate(schedule(tmp_path, DAYS[0], gold=gold_file(tmp_path), since="all"), QUIET, Answerer(referenced=False))
    with pytest.raises(ConfigError, match="nothing to score: 12 no reference"):
        evaluate(schedule(tmp_path, DAYS[1], since="all"), QUIET, Answerer(referenced=False))
    assert [(entry.verdict, entry.exit_code) for entry in read_history(root_of(tmp_path))] == [("green", 0), ("failed", 2)]


def test_without_references_ever_an_evaluation_is_green(tmp_path: Path, moving: MovingInput) -> None:
    found = evaluate(schedule(tmp_path, DAYS[0]), QUIET, Answerer(referenced=False))
    assert (found.verdict, found.metrics) == ("green", ())


def test_where_every_record_is_an_error_the_run_says_so(tmp_path: Path, moving: MovingInput) -> None:
    found = evaluate(schedule(tmp_path, DAYS[0], gold=gold_file(tmp_path)), QUIET, Answerer(error={f"d{n}" for n in range(6)}))
    assert (found.verdict, found.exit_code, found.errors) == ("red", 3, 12)


def test_a_gold_file_is_read_before_anything_is_asked(tmp_path: Path, moving: MovingInput) -> None:
    answer = Answerer()
    with pytest.raises(ConfigError, match=r"none.jsonl: the gold file cannot be read"):
        evaluate(schedule(tmp_path, DAYS[0], gold=str(tmp_path / "none.jsonl")), QUIET, answer)
    assert (answer.asked, (tmp_path / "root").exists()) == ([], False)


def _interrupted(config: Any, console: Console, if_running: str) -> RunResult:
    """A run that the keeper's signal has drained."""
    return Answerer(state="interrupted")(config, console=console, if_running=if_running)


def _unnoticed(config: Any, console: Console, if_running: str) -> RunResult:
    """A run that ended before the keeper looked."""
    return Answerer()(config, console=console, if_running=if_running)


def _waiting(config: Any, console: Console, if_running: str) -> RunResult:
    """A run that goes on until the keeper's signal comes."""
    time.sleep(30)
    raise AssertionError("no signal came")


@pytest.mark.parametrize("then", [_interrupted, _unnoticed, _waiting])
def test_an_evaluation_that_was_taken_over_writes_nothing_more(
    tmp_path: Path, moving: MovingInput, hook: Hook, monkeypatch: pytest.MonkeyPatch, then: Callable[..., RunResult]
) -> None:
    monkeypatch.setattr("askmany.pipeline.eval_schedule.LEASE_S", 0.4 if then is _waiting else 60.0)
    root = root_of(tmp_path)
    successor = Entry("k", DAYS[0], "m", "r", "0", "green", 0, 1.0, 1.0)

    def taken_over(config: Any, **how: Any) -> RunResult:
        RunLock(root).acquire("takeover")
        (key,) = (name.split("/")[1] for name in root.find("runs") if name.endswith("selection.json"))
        write_entry(root, replace(successor, key=key))
        root.put("trend.html", b"the successor's")
        return then(config, **how)

    with pytest.raises(LockLostError, match=r"root: epoch 1 lost the run lock to lock/00000002.json"):
        evaluate(schedule(tmp_path, DAYS[0], webhook=hook.url), QUIET, taken_over)
    (entry,) = read_history(root)
    assert (entry.verdict, root.get("trend.html"), hook.bodies) == ("green", b"the successor's", [])
    assert not any(name.endswith("evaluation.json") for name in root.find("runs"))


class Hook(HTTPServer):
    """Takes posts; the first `refusals` are answered 500."""

    def __init__(self, refusals: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refusals = refusals
        super().__init__(("127.0.0.1", 0), _Take)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/secret-path"


class _Take(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        hook = self.server
        assert isinstance(hook, Hook)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refused = hook.refusals > 0
        hook.refusals -= refused
        if not refused:
            hook.bodies.append(body)
        self.send_response(500 if refused else 200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_webhook_hears_of_what_is_not_green_and_of_the_recovery(tmp_path: Path, moving: MovingInput, hook: Hook) -> None:
    answer = Answerer()
    given = {"since": "all", "webhook": hook.url}
    evaluate(schedule(tmp_path, DAYS[0], **given), QUIET, answer)
    assert hook.bodies == []
    answer.wrong = {f"d{n}" for n in range(6)}
    evaluate(schedule(tmp_path, DAYS[1], **given), QUIET, answer)
    answer.wrong = set()
    evaluate(schedule(tmp_path, DAYS[2], **given), QUIET, answer)
    evaluate(schedule(tmp_path, DAYS[3], **given), QUIET, answer)
    assert [(body["date"], body["verdict"], body["exit_code"]) for body in hook.bodies] == [(DAYS[1], "red", 5), (DAYS[2], "green", 0)]
    assert hook.bodies[0]["text"].startswith(f"askmany evaluation {DAYS[1]}-")
    assert "text.exact_match -100.00" in hook.bodies[0]["text"]
    assert {metric["metric"] for metric in hook.bodies[0]["metrics"]} == {"exact_match", "f1", "token_recall"}


def test_a_webhook_is_tried_again_and_its_failure_shows_no_secret(tmp_path: Path, moving: MovingInput, hook: Hook) -> None:
    hook.refusals = 2
    assert post(hook.url, {"text": "x"}, lambda seconds: None) == ""
    hook.refusals = 9
    failure = post(hook.url, {"text": "x"}, lambda seconds: None)
    assert (failure, "secret-path" in failure) == ("the webhook at 127.0.0.1 was tried 3 times: 500", False)
    for url in ("ftp://host/secret-path", "secret-path"):
        with pytest.raises(ConfigError, match=r"--webhook: an http") as caught:
            check_url(url)
        assert "secret-path" not in str(caught.value)


def test_selection() -> None:
    files = [InputFile(name, name, 3, "v1") for name in ("same", "new", "grown", "touched")]
    before = {name: FileState(3, "v1", "r1") for name in ("same", "gone")}
    before |= {"grown": FileState(2, "v1", "r1"), "touched": FileState(3, "v0", "r0")}
    found = select(files, before)
    assert ([file.uri for file in found.changed], sorted(found.kept), found.gone) == (["new", "grown", "touched"], ["same"], ("gone",))
    after = found.after("r2")
    assert {uri: state.run for uri, state in after.items()} == {"same": "r1", "new": "r2", "grown": "r2", "touched": "r2"}
    assert loaded(json.loads(json.dumps(dumped(after)))) == after


@pytest.mark.parametrize("date", ["today", "2026-1-1", "2026-01-01/..", "2026-01-01T", "2026-13-01", "2026-02-30T02"])
def test_dates_that_cannot_name_a_folder_are_refused(date: str) -> None:
    with pytest.raises(ConfigError, match=f"--date '{date}'"):
        checked_date(date)


def entry(day: str, verdict: Any = "green", exit_code: int = 0, metrics: tuple[Metric, ...] = (), **values: Any) -> Entry:
    given = {"model": "smollm2", "revision": "b179c9523d0e" * 3, "askmany": "0.1.0", "began": float(day[-2:]), "seconds": 61.0, **values}
    return Entry(f"{day}-b179c9523d0e", day, verdict=verdict, exit_code=exit_code, metrics=metrics, **given)


def metric(mean: float, name: str = "f1", **values: Any) -> Metric:
    return Metric("text", name, mean, mean - 0.03, mean + 0.02, 400, 50, **values)


HISTORY = [
    entry(DAYS[0], metrics=(metric(0.71), metric(0.5, "exact_match"))),
    entry(DAYS[1], "failed", 1, note="<b>worker</b> lost"),
    entry(
        DAYS[2],
        "red",
        5,
        (metric(0.62, difference=-0.09, difference_low=-0.12, difference_high=-0.04, regressed=True), metric(0.5, "exact_match")),
        against=f"{DAYS[0]}-b179c9523d0e",
    ),
    entry(DAYS[3], metrics=(metric(0.72, difference=0.01, difference_low=-0.01, difference_high=0.02), metric(0.51, "exact_match"))),
]


def test_the_history_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path), {})
    for one in reversed(HISTORY):
        write_entry(store, one)
    assert read_history(store) == HISTORY
    store.put("history/odd.parquet", b"no parquet")
    with pytest.raises(ConfigError, match=r"odd\.parquet: no history"):
        read_history(store)
    assert "failed (<b>worker</b> lost), exit code 1" in summary(HISTORY[1])


def test_the_trend_page_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "trend.html"
    page.write_text(render_trend(HISTORY, "s3://bucket/eval <root>"))
    dom = dom_of(page, tmp_path)
    assert dom.count('<g class="point green">') == 4
    assert dom.count('<g class="point regressed">') == 1
    assert dom.count('<g class="point beside">') == 1
    assert dom.count('<g class="point failed">') == 2
    assert dom.count('<section class="chart">') == 2
    assert "<b>worker</b>" not in dom
    assert "&lt;b&gt;worker&lt;/b&gt; lost" in dom
    assert "text.f1 -9.0" in dom
    assert "71.0 (68.0 to 73.0) over 400 answers" in dom
    pixels = imread(screenshot(page, tmp_path))[:, :, :3]
    reds = (abs(pixels - [0xD2 / 255, 0x49 / 255, 0x3F / 255]) < 0.02).all(axis=2)
    greens = (abs(pixels - [0x2E / 255, 0x9E / 255, 0x6B / 255]) < 0.02).all(axis=2)
    assert min(reds.sum(), greens.sum()) > 200


def test_charts_keep_to_their_frame_whatever_the_values() -> None:
    nan = float("nan")
    assert intervals([Point("a", None, None, None, "failed", "t")], "m") == ""
    for mean, low, high in [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.5, nan, nan), (0.999, 0.99, 1.0)]:
        drawn = intervals([Point("<a>", mean, low, high, "green", "t"), Point("b", None, None, None, "failed", "t")], "m")
        heights = [float(part.split('"')[0]) for part in drawn.split('cy="')[1:]]
        assert all(0 <= y <= 210 for y in heights)
        assert "<a>" not in drawn
