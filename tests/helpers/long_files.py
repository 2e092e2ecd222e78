"""The order in which test files start: long ones first, so that neither process is left with one at the end, and those that start many
processes beside those that compute in their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

LONG_FILES: tuple[str, ...] = (
    "jobs/test_submit_cluster.py",
    "kernels/test_stream_mask.py",
    "kernels/test_stream_attention.py",
    "engine/test_kernel_steps.py",
    "engine/test_isolation.py",
    "engine/test_graphs.py",
    "engine/test_pipelined.py",
    "pipeline/test_chaos.py",
    "engine/test_generate_oracle.py",
    "engine/test_typed_answers.py",
    "kernels/test_prefill.py",
    "kernels/test_compiled.py",
    "kernels/test_ring_kernels.py",
    "engine/test_smollm2_oracle.py",
    "pipeline/test_incremental.py",
    "pipeline/test_survival.py",
    "engine/test_context_parallel.py",
    "kernels/test_ring.py",
    "jobs/test_bench_context_parallel.py",
    "pipeline/test_run.py",
    "pipeline/test_context_groups.py",
    "pipeline/test_buckets.py",
    "jobs/test_bench_cluster.py",
    "jobs/test_bench_pipeline.py",
    "jobs/test_labelling_jobs.py",
    "jobs/test_evaluate.py",
    "jobs/test_cli.py",
    "pipeline/test_eval_bucket.py",
    "test_packaging.py",
)


def start_order(paths: Iterable[Path], tests: Path) -> dict[Path, int]:
    """Ranks of the test files of folder `tests`: named ones in the order above, then all others alike. A name without a file fails."""
    ranks = {tests / name: rank for rank, name in enumerate(LONG_FILES)}
    missing = [str(path) for path in ranks if not path.is_file()]
    if missing:
        raise pytest.UsageError(f"{__name__} names files that are not there: {', '.join(missing)}")
    return {path: ranks.get(path, len(ranks)) for path in paths}
