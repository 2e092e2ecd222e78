import json
from dataclasses import fields

from askmany.engine.config import EngineConfig
from askmany.engine.metrics import Metrics
from tests.helpers.fake_runs import run_documents
from tests.helpers.workload import make_document


def make_config(**changes: object) -> EngineConfig:
    given = {"page_size": 4, "max_rows": 8, "step_tokens": 64, "prefill_chunk": 8, "tail_piece": 2} | changes
    return EngineConfig.model_validate(given)


def test_counters_add_field_by_field() -> None:
    first = Metrics(**{field.name: i for i, field in enumerate(fields(Metrics))})
    second = Metrics(**{field.name: 100 for field in fields(Metrics)})
    assert [getattr(first + second, field.name) for field in fields(Metrics)] == [100 + i for i in range(len(fields(Metrics)))]
    assert first + Metrics() == first


def test_derived_figures_come_from_sums() -> None:
    metrics = Metrics(
        prefill_tokens=6, tail_tokens=3, decode_tokens=1, answer_tokens=4, prefix_hit_tokens=1, prefix_missed_tokens=3,
        kv_tokens_read=10, kv_tokens_alone=35, kv_bytes_read=100, kv_bytes_alone=350, busy_s=2.0,
    )  # fmt: skip
    assert (metrics.kv_bytes_saved, metrics.kv_reads_ratio, metrics.prefix_hit_ratio) == (250, 3.5, 0.25)
    assert (metrics.fed_tokens, metrics.tokens_per_s, metrics.answer_tokens_per_s) == (10, 5.0, 2.0)
    assert json.loads(json.dumps(metrics.to_dict())) == metrics.to_dict()
    assert metrics.to_dict()["kv_reads_ratio"] == 3.5


def test_ratios_of_nothing_are_defined() -> None:
    empty = Metrics()
    assert (empty.kv_reads_ratio, empty.tokens_per_s, empty.answer_tokens_per_s, empty.prefix_hit_ratio) == (1.0, 0.0, 0.0, 0.0)


def test_split_reads_by_hand() -> None:
    """Prefix 3 + 10 tokens, three questions of 2 tokens, answers of 3: chunks (0, 3), (0, 8), (8, 10), one tail step, two decode steps."""
    metrics = run_documents(make_config(), 400, [make_document("a", [[10] * 3, [11] * 10], [2, 2, 2], max_new_tokens=3)]).engine.metrics
    chunks = 0 + 3 + (3 + 8)
    assert metrics.kv_tokens_read == chunks + 13 + (13 + 3 * 2) + (13 + 3 * 3)
    assert metrics.kv_tokens_alone == chunks + 3 * 13 + 3 * (13 + 2) + 3 * (13 + 3)
    assert (metrics.kv_bytes_read, metrics.kv_bytes_alone) == (metrics.kv_tokens_read, metrics.kv_tokens_alone)
    assert (metrics.steps, metrics.documents, metrics.streams) == (6, 1, 3)
    assert (metrics.prefill_tokens, metrics.tail_tokens, metrics.decode_tokens, metrics.answer_tokens) == (13, 6, 6, 9)
    assert metrics.busy_s > 0


def test_interleaved_reads_by_hand() -> None:
    """The same work as one request: each step reads the document once, and the whole row."""
    config = make_config(layout="interleaved", streams=3)
    metrics = run_documents(config, 400, [make_document("a", [[10] * 3, [11] * 10], [2, 2, 2], max_new_tokens=3)]).engine.metrics
    chunks = 0 + 3 + (3 + 8)
    assert metrics.kv_tokens_read == chunks + 13 + (13 + 6) + (13 + 9)
    assert metrics.kv_tokens_alone == chunks + 3 * 13 + 3 * (13 + 2) + 3 * (13 + 3)
    assert (metrics.tail_tokens, metrics.decode_tokens, metrics.answer_tokens) == (6, 6, 9)


def test_an_instruction_shared_by_documents_is_read_once_a_step() -> None:
    documents = [make_document(f"d{i}", [[10] * 8, [20 + i] * 2], [1], max_new_tokens=2) for i in range(2)]
    metrics = run_documents(make_config(), 400, documents).engine.metrics
    assert metrics.kv_tokens_read == 0 + 8 + (8 + 2 * 2) + (8 + 2 * 2 + 2)
    assert metrics.kv_tokens_alone == 0 + 2 * 8 + 2 * 10 + 2 * 11


def test_one_stream_alone_saves_nothing() -> None:
    metrics = run_documents(make_config(streams=1), 400, [make_document("a", [[10] * 9], [3, 3], max_new_tokens=4)]).engine.metrics
    assert metrics.kv_bytes_saved == 0
    assert metrics.kv_reads_ratio == 1.0
