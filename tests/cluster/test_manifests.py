"""Every manifest in cluster/ is valid as far as that can be told without a cluster, and a typo in each is seen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from askmany.jobs.cli import app
from askmany.pipeline.config_file import parse_config
from askmany.pipeline.metrics_endpoint import RunCollector
from askmany.pipeline.totals import Totals
from tests.helpers.manifests import CLUSTER, cluster_specs, documents, launcher_problems, problems, templates

MANIFESTS = sorted([*CLUSTER.glob("kuberay/*.yaml"), CLUSTER / "monitoring/podmonitor.yaml"])
RAY_KINDS = [CLUSTER / "kuberay" / name for name in ("raycluster.yaml", "rayjob.yaml", "raycronjob.yaml")]
NAMES = [path.name for path in MANIFESTS]


@pytest.mark.parametrize("path", MANIFESTS, ids=NAMES)
def test_a_manifest_is_valid(path: Path) -> None:
    assert [problem for document in documents(path) for problem in problems(document)] == []


def _worker(document: dict[str, Any]) -> dict[str, Any]:
    worker: dict[str, Any] = next(cluster_specs(document))["workerGroupSpecs"][0]
    return worker


def _rename(mapping: dict[str, Any], old: str, new: str) -> None:
    mapping[new] = mapping.pop(old)


def _set(mapping: dict[str, Any], key: str, value: Any) -> None:
    assert key in mapping
    mapping[key] = value


Break = Callable[[dict[str, Any]], None]
BROKEN: list[tuple[str, Break, str]] = [
    ("raycluster.yaml", lambda d: _rename(_worker(d), "maxReplicas", "maxReplica"), "maxReplica"),
    ("raycluster.yaml", lambda d: _rename(_worker(d)["template"]["spec"], "tolerations", "toleration"), "toleration"),
    ("raycluster.yaml", lambda d: _set(next(cluster_specs(d))["authOptions"], "mode", "none"), "none"),
    ("rayjob.yaml", lambda d: _set(d["spec"], "ttlSecondsAfterFinished", "600"), "'600' is not of type 'integer'"),
    ("rayjob.yaml", lambda d: _rename(d["spec"], "entrypoint", "entryPoint"), "entryPoint"),
    ("raycronjob.yaml", lambda d: _set(d["spec"], "schedule", "nightly"), "nightly"),
    ("raycronjob.yaml", lambda d: d["spec"].update(concurrencyPolicy="Forbid"), "concurrencyPolicy"),
    ("cronjob.yaml", lambda d: _set(d["spec"], "successfulJobsHistoryLimit", "seven"), "integer"),
    ("cronjob.yaml", lambda d: _rename(d["spec"], "concurrencyPolicy", "concurencyPolicy"), "concurencyPolicy"),
    ("configs.yaml", lambda d: _set(d, "data", ["run.yaml"]), "object"),
    ("podmonitor.yaml", lambda d: _set(d["spec"]["podMetricsEndpoints"][0], "interval", 15), "15"),
]


@pytest.mark.parametrize(("name", "harm", "word"), BROKEN)
def test_a_typo_is_seen(name: str, harm: Break, word: str) -> None:
    document = documents(next(path for path in MANIFESTS if path.name == name))[0]
    harm(document)
    assert word in "\n".join(problems(document))


def test_every_manifest_is_harmed_once() -> None:
    assert {name for name, _, _ in BROKEN} == set(NAMES)


@pytest.mark.parametrize("path", RAY_KINDS, ids=lambda path: path.name)
def test_clusters_are_as_the_house_wants_them(path: Path) -> None:
    (document,) = documents(path)
    (spec,) = cluster_specs(document)
    head, workers = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0", "no work on the head"
    assert spec["authOptions"] == {"mode": "token"}
    assert [worker["labels"]["ray.io/accelerator-type"] for worker in workers] == ["A100", "RTX-A6000", "H200"], "as Ray detects them"
    assert spec["enableInTreeAutoscaling"]
    for template in templates(document):
        pod = template["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == 1000
        assert {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        assert "metrics" in {port["name"] for c in pod["containers"] for port in c["ports"]}
    for worker in workers:
        pod = worker["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= 30, "time to keep what is answered"
        (model,) = pod["initContainers"]
        revision = next(variable["value"] for variable in model["env"] if variable["name"] == "MODEL_REVISION")
        assert re.fullmatch("[0-9a-f]{64}", revision), "the model is pinned by its hash"
        assert next(volume for volume in pod["volumes"] if volume["name"] == "models")["hostPath"]


def test_the_three_ray_manifests_describe_one_cluster() -> None:
    first, *others = (next(cluster_specs(documents(path)[0])) for path in RAY_KINDS)
    assert all(other == first for other in others)


def test_ray_detects_kinds_of_gpu_by_the_names_in_the_manifests() -> None:
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Manager

    found = [Manager._gpu_name_to_accelerator_type(name) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA RTX A6000", "NVIDIA H200")]
    assert found == ["A100", "RTX-A6000", "H200"]


def test_the_configurations_in_the_manifests_are_configurations() -> None:
    data = documents(CLUSTER / "kuberay/configs.yaml")[0]["data"]
    for name, text in data.items():
        config = parse_config(yaml.safe_load(text), source=name)
        assert re.fullmatch("[0-9a-f]{64}", config.model_revision or "")


def commands() -> list[list[str]]:
    """Every askmany command that a manifest runs, as words."""
    found = []
    for path in MANIFESTS:
        for document in documents(path):
            text = json.dumps(document)
            for entry in re.findall(r'"entrypoint": "python -m askmany\.jobs\.(?:cli )?([^"]*)"', text):
                found.append(entry.split())
            for pod in _pods(document):
                for container in [*pod.get("initContainers", []), *pod["containers"]]:
                    words = [*container.get("command", []), *container.get("args", [])]
                    if words[:1] == ["askmany"]:
                        found.append(words[1:])
    return found


def _pods(document: Any) -> list[Any]:
    """Every pod's spec below an object."""
    if isinstance(document, dict):
        here = [document] if "containers" in document else []
        return here + [pod for value in document.values() for pod in _pods(value)]
    return [pod for value in document for pod in _pods(value)] if isinstance(document, list) else []


def test_the_commands_in_the_manifests_are_commands() -> None:
    """Each is given to the command line with `--help` after it: an option that does not exist is refused before help is shown."""
    found = commands()
    assert {words[0] for words in found} == {"run", "evaluate", "submit", "prefetch"}
    for words in found:
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        shown = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "300"})
        assert shown.exit_code == 0
        assert [option for option in options if option not in shown.output] == [], words


LAUNCHERS = sorted(CLUSTER.glob("launcher/*.yaml"))


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_a_launcher_configuration_is_valid_and_a_typo_is_seen(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert launcher_problems(text) == []
    for old, new in (("max_workers: ", "max_workerz: "), ("provider:\n", "provide:\n")):
        assert launcher_problems(text.replace(old, new, 1)), new


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((CLUSTER / "monitoring/grafana.json").read_text(encoding="utf-8"))
    asked = {name for panel in dashboard["panels"] for t in panel["targets"] for name in re.findall(r"\b(?:askmany|ray)_\w+", t["expr"])}
    registry = CollectorRegistry()
    totals = Totals(planned_documents=1, planned_records=1)
    registry.register(RunCollector(lambda: totals))
    ours = set(re.findall(r"^# TYPE (\w+)", generate_latest(registry).decode(), re.MULTILINE))
    assert {name for name in asked if name.startswith("askmany_")} <= ours
    import ray.dashboard.modules.reporter.reporter_agent as reporter

    assert {name.removeprefix("ray_") for name in asked if name.startswith("ray_")} <= set(reporter.METRICS_GAUGES)
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_prometheus_scrapes_what_is_served() -> None:
    scrape = yaml.safe_load((CLUSTER / "monitoring/prometheus.yaml").read_text(encoding="utf-8"))
    port = parse_config(yaml.safe_load(documents(CLUSTER / "kuberay/configs.yaml")[0]["data"]["run.yaml"])).metrics.port
    (run,) = (job for job in scrape["scrape_configs"] if job["job_name"] == "askmany-run")
    assert run["static_configs"][0]["targets"] == [f"127.0.0.1:{port}"]
    endpoints = documents(CLUSTER / "monitoring/podmonitor.yaml")[0]["spec"]["podMetricsEndpoints"]
    for path in RAY_KINDS:
        head = next(templates(documents(path)[0]))["template"]["spec"]["containers"][0]["ports"]
        ports = {one["name"]: one["containerPort"] for one in head}
        assert {endpoint["port"] for endpoint in endpoints} <= set(ports)
        assert ports["run-metrics"] == port
