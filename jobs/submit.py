"""`askmany submit CONFIG`: the run as a job of a Ray cluster, from any machine that reaches its job server.

The job gets the configuration as a file and this askmany as a wheel; everything else is the image's. Documents and answers never pass this
machine: the configuration must name places that the cluster can reach.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from askmany.engine.errors import ConfigError
from askmany.jobs.wheel import write_wheel
from askmany.pipeline.config import RunConfig
from askmany.pipeline.config_file import load_config
from askmany.pipeline.job_api import JobServer, auth_token, job_address
from askmany.pipeline.lock import IfRunning
from askmany.pipeline.questions import as_config, load_questions
from askmany.pipeline.result import EXIT_INTERRUPTED
from askmany.pipeline.storage import is_local
from askmany.pipeline.submission import Request, SettledError, Submitter

CONFIG = "run.yaml"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Options:
    """How to submit; see the command's help. `runtime_env` is a YAML file, `env` are NAME or NAME=VALUE; with `evaluation` the job is an
    evaluation on a schedule, with these words on its command line."""

    address: str | None = None
    run_id: str | None = None
    retries: int = 2
    again: bool = False
    shared: bool = False
    wheel: bool = True
    env: tuple[str, ...] = ()
    runtime_env: Path | None = None
    if_running: IfRunning = "fail"
    retry_errors: bool = False
    evaluation: tuple[str, ...] | None = None


def main(config: Path, overrides: Sequence[str], options: Options) -> int:
    """Submit, follow, and return the run's exit code. Leaving with Ctrl-C leaves the job running."""
    address = job_address(options.address)
    portable = ready_to_travel(load_config(config, overrides), address, options.shared)
    text = yaml.safe_dump(portable.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    config_hash = hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]
    run_id = checked_run_id(options.run_id or f"askmany-{config_hash}")
    with tempfile.TemporaryDirectory(prefix="askmany-submit-") as folder:
        env = packed(Path(folder), text, options)
        request = Request(run_id, config_hash, lambda again: command(options, again), env, options.retries, options.again)
        return carry_through(Submitter(JobServer(address, auth_token()), request, _out, _say))


def carry_through(submitter: Submitter) -> int:
    """The exit code, however the submitter ends."""
    try:
        return submitter.run()
    except SettledError as settled:
        _say(str(settled))
        return 0
    except KeyboardInterrupt:
        _say("left; the job goes on: the same command joins it again, `ray job stop` ends it")
        return EXIT_INTERRUPTED


def ready_to_travel(config: RunConfig, address: str, shared: bool) -> RunConfig:
    """The configuration as the cluster's machines can use it: questions inside, paths absolute, the cluster's own address left out.

    ConfigError for a path of this machine when the cluster is elsewhere and nobody said that the path is there too (`shared`).
    """
    here = shared or urlsplit(address).hostname in _LOOPBACK

    def placed(key: str, uri: str) -> str:
        if not is_local(uri):
            return uri
        if not here:
            raise ConfigError(
                f"{key}: {uri} is a path of this machine, which the workers at {address} may not see; "
                "name a bucket, or say --shared when every node has it at the same place"
            )
        return uri if uri.startswith(("file://", "local://")) else os.path.abspath(os.path.expanduser(uri))

    source, questions = config.input, config.questions
    if isinstance(questions, str) and is_local(questions):
        questions = as_config(load_questions(questions, config.sampling, {}), config.sampling)
    uris = tuple(placed("input.uri", uri) for uri in source.uris)
    changed = {
        "model": placed("model", config.model) if Path(config.model).expanduser().is_dir() else config.model,
        "input": source.model_copy(update={"uri": uris if len(uris) > 1 else uris[0]}),
        "output": config.output.model_copy(update={"uri": placed("output.uri", config.output.uri)}),
        "workers": config.workers.model_copy(update={"address": None}),
        "questions": questions,
    }
    return config.model_copy(update=changed)


def checked_run_id(run_id: str) -> str:
    """ConfigError for an id that cannot stand in a URL or a Kubernetes name."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,60}[A-Za-z0-9])?", run_id):
        raise ConfigError(f"--run-id {run_id!r}: up to 62 letters, digits, '.', '_' and '-', a letter or digit at both ends")
    return run_id


def packed(folder: Path, text: str, options: Options) -> dict[str, Any]:
    """The job's runtime environment; its files are written into `folder`. What the user gives is laid below our own keys."""
    job = folder / "job"
    job.mkdir()
    (job / CONFIG).write_text(text, encoding="utf-8")
    env = _given_env(options.runtime_env)
    if "working_dir" in env:
        raise ConfigError(f"--runtime-env {options.runtime_env}: working_dir is the run's own; use py_modules or env_vars")
    modules = [*env.get("py_modules", ()), *([str(write_wheel(folder))] if options.wheel else [])]
    variables = {**env.get("env_vars", {}), **dict(map(_variable, options.env))}
    return {**env, "working_dir": str(job), "py_modules": modules, "env_vars": variables}


def _given_env(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--runtime-env {path}: cannot be read: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"--runtime-env {path}: a mapping is needed")
    return dict(values)


def _variable(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not name or (not equals and name not in os.environ):
        raise ConfigError(f"--env {given}: write it as NAME=VALUE, or NAME of a variable that is set here")
    return name, value if equals else os.environ[name]


def command(options: Options, again: bool) -> str:
    """The driver's command line. A later attempt waits for the lease of the one before it to run out."""
    waiting = "wait" if again and options.if_running == "fail" else options.if_running
    if options.evaluation is not None:
        return shlex.join(["python", "-m", "askmany.jobs.cli", "evaluate", CONFIG, "--if-running", waiting, *options.evaluation])
    words = ["python", "-m", "askmany.jobs.run", CONFIG, "--if-running", waiting]
    return shlex.join([*words, *(["--retry-errors"] if options.retry_errors else [])])


def _out(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _say(line: str) -> None:
    print(f"askmany: {line}", file=sys.stderr, flush=True)
