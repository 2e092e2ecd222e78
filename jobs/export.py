"""`askmany export OUT SHAPE`: stored answers in the shape that another tool takes."""

from __future__ import annotations

from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.pipeline.export_label_studio import export_label_studio
from askmany.pipeline.export_review import export_review
from askmany.pipeline.export_shapes import Answers, Export, export_batch, export_dataset, export_long
from askmany.pipeline.export_wide import export_wide
from askmany.pipeline.storage import ObjectStore

SHAPES: dict[str, Export] = {
    "long": export_long,
    "wide": export_wide,
    "batch": export_batch,
    "label-studio": export_label_studio,
    "dataset": export_dataset,
    "review": export_review,
}


def main(output: str, shape: str, to: str | None, console: Console) -> int:
    """Write one export; by default into `exports/<shape>/` of the run's output. ConfigError for an unknown shape."""
    if shape not in SHAPES:
        raise ConfigError(f"shape {shape!r} is none of {', '.join(SHAPES)}")
    target = ObjectStore(to or f"{output.rstrip('/')}/exports/{shape}", {})
    for name in SHAPES[shape](Answers(ObjectStore(output, {})), target):
        console.print(target.uri_of(name), markup=False, highlight=False, soft_wrap=True)
    return 0
