"""The configuration: what is accepted, and the one line that everything else ends in."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from askmany.engine.errors import ConfigError
from askmany.jobs.init import STARTER
from askmany.pipeline.config import RunConfig, SamplingConfig
from askmany.pipeline.config_file import load_config, load_yaml, parse_config
from askmany.pipeline.fingerprint import differences, fingerprint, identity
from askmany.pipeline.run_file import redacted

LEAST: dict[str, Any] = {"model": "smollm2", "input": {"uri": "d.jsonl"}, "questions": ["What?"]}
DOCUMENTED = """
model: smollm2
model_revision: null
prompt: {instruction: "...", question: "{{ question }}", template_kwargs: {}}
input: {uri: "data/*.jsonl.gz", id: doc_id, text: text, questions: questions, keep: [], max_questions: null}
questions: questions.yaml
output: {uri: out/}
engine: {layout: split, streams: auto, device: auto, deterministic: false}
sampling: {max_new_tokens: 32, temperature: 0}
"""


def with_values(**values: Any) -> dict[str, Any]:
    return {**LEAST, **values}


def test_the_documented_names_and_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(DOCUMENTED)
    config = load_config(path)
    assert config.input.questions == "questions"
    assert config.output.uri == "out/"
    plain = parse_config({"model": "m", "input": {"uri": "d"}, "questions": "q.txt"})
    assert (plain.engine.layout, plain.engine.streams, plain.engine.device) == ("split", "auto", "auto")
    assert plain.sampling == SamplingConfig(max_new_tokens=32, temperature=0)
    assert plain.long_documents.policy == "error"


def test_overrides_are_read_as_yaml() -> None:
    sets = ["engine.streams=4", "input.keep=[a, b]", "output.uri=s3://b/c=d", "sampling.temperature=0.5", "model=other", "questions=null"]
    config = parse_config(with_values(input={"uri": "x", "questions": "q"}), sets)
    assert config.engine.streams == 4
    assert config.input.keep == ("a", "b")
    assert config.output.uri == "s3://b/c=d"
    assert config.sampling.temperature == 0.5
    assert config.model == "other"
    assert config.questions is None
    assert LEAST["input"] == {"uri": "d.jsonl"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (with_values(modle="x"), "c: modle: unknown key; did you mean 'model'?"),
        (with_values(engine={"streems": 4}), "c: engine.streems: unknown key; did you mean 'streams'?"),
        (with_values(input={"uri": "d", "kep": []}), "c: input.kep: unknown key; did you mean 'keep'?"),
        (with_values(prompt={"instructions": ""}), "c: prompt.instructions: unknown key; did you mean 'instruction'?"),
        (with_values(zzzzqq=1), "c: zzzzqq: unknown key; known here: model, model_revision"),
        ({"model": "m"}, "c: input: field required"),
        ({"model": "m", "input": {"uri": "d"}}, "c: questions: none given"),
        (with_values(input={"uri": ""}), "c: input.uri: a file, folder, glob or URI is needed"),
        (with_values(input={"uri": ["a", ""]}), "c: input.uri: a file, folder, glob or URI is needed"),
        (with_values(input={"uri": "d", "keep": ["a", "a"]}), "c: input.keep: column 'a' is named twice"),
        (with_values(output={"uri": ""}), "c: output.uri: a folder or URI is needed"),
        (with_values(sampling={"temperature": -1}), "c: sampling.temperature: input should be greater than or equal to 0, not -1"),
        (with_values(sampling={"top_p": 0}), "c: sampling.top_p: input should be greater than 0, not 0"),
        (with_values(sampling={"max_new_tokens": 0}), "c: sampling.max_new_tokens: input should be greater than or equal to 1, not 0"),
        (with_values(engine={"layout": "splt"}), "c: engine.layout: input should be 'split' or 'interleaved', not 'splt'"),
        (with_values(engine={"streams": 0}), "c: engine.streams: "),
        (with_values(engine="fast"), "c: engine: "),
        (with_values(long_documents={"policy": "drop"}), "c: long_documents.policy: input should be 'error', 'truncate_head'"),
        (with_values(sampling={"temperature": -1, "top_k": -1}), " (and 1 more to mend)"),
        (with_values(prompt={"question": "no variable"}), "c: prompt.question: does not use"),
        (with_values(errors={"max_fraction": 2}), "c: errors.max_fraction: "),
        (with_values(workers={"cpus": math.inf}), "c: workers.cpus: "),
        (with_values(workers={"watchdog_s": math.inf}), "c: workers.watchdog_s: "),
        (with_values(metrics={"heartbeat_s": math.nan}), "c: metrics.heartbeat_s: "),
        (with_values(sampling={"stop_token_ids": [10**30]}), "c: sampling.stop_token_ids"),
        (with_values(prompt={"instruction": "\ud800 w1"}), "c: prompt.instruction: '\\ud800 w1' holds half a character"),
        (with_values(sampling={"stop": ["a", "\udfff"]}), "c: sampling.stop: '\\udfff' holds half a character"),
    ],
)
def test_bad_values_end_in_one_line_with_their_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_config(values, source="c")
    assert "\n" not in str(caught.value)
    assert "union" not in str(caught.value)


@pytest.mark.parametrize("override", ["engine.streams", "=4", "engine..streams=4", "model.name=x"])
def test_bad_overrides_are_named(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_config(LEAST, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping of keys, not empty"),
        ("- a\n", "must be a mapping of keys, not list"),
        ("model: [", "not valid YAML"),
        ("model: a\nmodel: b\n", "key 'model' is given twice"),
        ("model: a\ninput: {uri: a, uri: b}\n", "key 'uri' is given twice"),
        ("model: a\ninput: &a {uri: x, storage_options: *a}\n", "a YAML anchor contains itself"),
        ("questions: &q [*q]\n", "a YAML anchor contains itself"),
        ("questions: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_mapping_that_holds_itself_is_refused() -> None:
    values = dict(LEAST)
    values["input"] = {"uri": "d", "storage_options": values}
    with pytest.raises(ConfigError, match="c: nested too deeply"):
        parse_config(values, source="c")


def test_anchors_are_merged_and_may_be_named_often(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    laughs = "".join(f"- &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 20))
    assert len(load_yaml(f"- &l0 [ha]\n{laughs}", "c")) == 20
    path.write_text("model: m\nquestions: [q]\ninput: {uri: d, storage_options: &o {a: 1}}\noutput: {storage_options: {<<: *o, b: 2}}\n")
    assert load_config(path).output.storage_options == {"a": 1, "b": 2}


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such configuration file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: the configuration file cannot be read"):
        load_config(tmp_path / "bytes.yaml")


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config(LEAST).model = "other"  # type: ignore[misc]


def all_keys(model: type[BaseModel], values: dict[str, Any], path: str = "") -> None:
    """Every key of the model is in `values`, with its default where it has a plain one."""
    assert list(values) == list(model.model_fields), path
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            all_keys(field.annotation, values[key], f"{path}{key}.")


def test_the_starter_shows_every_key_and_is_valid() -> None:
    values = yaml.safe_load(STARTER.format(name="askmany.yaml"))
    all_keys(RunConfig, values)
    config = parse_config(values)
    plain = parse_config({"model": config.model, "input": {"uri": config.input.uri}, "questions": values["questions"]})
    assert config.engine == plain.engine
    assert config.sampling == plain.sampling
    assert config.workers == plain.workers
    assert config.input == plain.input
    assert config.errors == plain.errors


def test_the_identity_holds_what_answers_depend_on_and_no_more() -> None:
    base = parse_config(LEAST)
    same = parse_config(LEAST, ["engine.streams=3", "workers.count=4", "output.uri=elsewhere", "input.limit=3", "errors.max_fraction=1"])
    assert fingerprint(identity(base)) == fingerprint(identity(same))
    for override in (
        "model_revision=abc",
        "prompt.instruction=Read.",
        "sampling.seed=1",
        "input.text=body",
        "engine.layout=interleaved",
        "engine.deterministic=true",
        "engine.backend=fake",
        "long_documents.policy=truncate_tail",
        "context_tokens=10",
    ):
        other = identity(parse_config(LEAST, [override]))
        assert fingerprint(other) != fingerprint(identity(base))
        (key,) = differences(identity(base), other)
        assert key == {"model_revision": "model"}.get(override.split("=")[0], override.split("=")[0])
    asking = parse_config({**LEAST, "input": {**LEAST["input"], "questions": "qs"}}, ["questions=[Other]", "input.max_questions=2"])
    assert fingerprint(identity(asking)) == fingerprint(identity(base)), "what is asked may change"


def test_secrets_are_taken_out() -> None:
    values = {"input": {"uri": "s3://b", "storage_options": {"key": "AKIA", "secret": "s"}}, "model": "m"}
    assert redacted(values) == {"input": {"uri": "s3://b", "storage_options": {"key": "***", "secret": "***"}}, "model": "m"}
