"""A Prometheus endpoint of the driver: the same totals that the heartbeat, the manifest and the report show, ready to be scraped.

Figures cover the whole output, so a resumed run goes on where the last left off. Labels are statuses and operations, never ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from askmany.engine.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from askmany.pipeline.totals import Totals

_USAGE = {
    "prefill_tokens": "Prefix tokens computed",
    "prefix_hit_tokens": "Prefix tokens found in the prefix tree",
    "tail_tokens": "Question tokens computed",
    "decode_tokens": "Answer tokens fed",
    "answer_tokens": "Answer tokens returned",
    "steps": "Engine steps",
    "busy_s": "Seconds inside engine steps",
    "kv_bytes_read": "KV bytes read",
    "kv_bytes_alone": "KV bytes that one request per question would have read",
    "unexpected_answers": "Answers that nobody waited for, dropped",
}


class RunCollector:
    """Asks for the totals whenever it is scraped."""

    def __init__(self, totals: Callable[[], Totals]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        """The metrics at this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._totals()
        yield GaugeMetricFamily("askmany_planned_records", "Records that the plan asks for", value=now.planned_records)
        yield GaugeMetricFamily("askmany_planned_documents", "Documents of the plan", value=now.planned_documents)
        yield GaugeMetricFamily("askmany_workers", "Workers that have reported", value=now.workers)
        yield CounterMetricFamily("askmany_documents", "Documents committed", value=now.documents)
        yield CounterMetricFamily("askmany_shards", "Shards committed", value=now.shards)
        yield CounterMetricFamily("askmany_repeated_groups", "Groups committed at a later than the first try", value=now.repeated)
        yield _labelled("askmany_records", "Records committed", "status", now.statuses)
        yield _labelled("askmany_io_retries", "Retried input and output", "operation", now.retries)
        yield _labelled("askmany_errors", "Error records of this launch by reason", "reason", now.errors)
        for name, text in _USAGE.items():
            yield CounterMetricFamily(
                f"askmany_{name.removesuffix('_s')}{'_seconds' if name.endswith('_s') else ''}", text, now.usage.get(name, 0)
            )


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def serve(totals: Callable[[], Totals], host: str, port: int) -> Callable[[], None]:
    """Start the endpoint; what it returns ends it. ConfigError when the port is taken."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(RunCollector(totals))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(f"metrics.port: {host}:{port} cannot be listened on: {error}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
