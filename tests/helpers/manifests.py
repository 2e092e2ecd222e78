"""Offline checks of what lies in cluster/: each returns what is wrong, a line each, nothing when it is right."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.helpers.source import ROOT

CLUSTER = ROOT / "cluster"
KUBERNETES = "1.34"
OWN_KINDS = ("RayCluster", "RayJob", "RayCronJob", "PodMonitor")


def documents(path: Path) -> list[dict[str, Any]]:
    """Every object of a manifest, aliases and merges resolved into plain values."""
    return [json.loads(json.dumps(document)) for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with one object of a manifest."""
    if document.get("kind") in OWN_KINDS:
        schema = yaml.safe_load((ROOT / "tests/cluster/kuberay_schema.yaml").read_text(encoding="utf-8"))
        found = [f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]
        return found or [problem for template in templates(document) for problem in problems(template)]
    try:
        kubernetes_validate.validate(copy.deepcopy(document), KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [str(getattr(error, "message", error))]
    return []


def templates(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of a Ray object, each as an object of its own that Kubernetes' schema knows."""
    for spec in cluster_specs(document):
        for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])):
            yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "group"}, "template": group["template"]}


def cluster_specs(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The Ray clusters that an object describes."""
    spec = document["spec"]
    if document["kind"] == "RayCluster":
        yield spec
    elif document["kind"] == "RayJob":
        yield spec["rayClusterSpec"]
    elif document["kind"] == "RayCronJob":
        yield spec["jobTemplate"]["rayClusterSpec"]


def launcher_problems(text: str) -> list[str]:
    """What Ray's own check says of a launcher configuration. It does not ask the cloud."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(yaml.safe_load(text)))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return []
