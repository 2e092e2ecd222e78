"""The device half on a GPU, to be run before anything is measured: steps with and without graphs equal PyTorch's passes, tokens feed the
next step on the device, idle time is counted, deterministic mode is bitwise, and SGLang's layers run under the kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from askmany.engine.build import build_scheduler
from askmany.engine.chunk_pass import ChunkPass
from askmany.engine.config import EngineConfig
from askmany.engine.executor import TorchExecutor
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.graphs import CudaCapturer
from askmany.engine.kv_pool import KVPool
from askmany.engine.labels import label_trie
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.pipelined import PipelinedEngine
from askmany.engine.request import Document, Question, Sampling, StreamResult
from askmany.engine.sglang_compat import installed_release
from askmany.kernels.plan import Chunking
from askmany.kernels.tiles import AttentionShape
from askmany.kernels.vendor_prefill import best_prefill
from tests.engine.test_kernel_steps import refuse_passes
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.kernel_engines import kernel_engine
from tests.helpers.tiny_models import random_model
from tests.helpers.torch_engines import Key, poisoned_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA GPU and compiled kernels"),
]
LAYOUTS = ("split", "interleaved")
VOCABULARY = 512


def llama(head_dim: int = 128) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=head_dim, max_position_embeddings=4096,
    )  # fmt: skip


def model_of(dtype: torch.dtype, head_dim: int = 128, spread: float = 1.0, weights: torch.dtype | None = None) -> TransformersModel:
    """`spread` scales what `random_model` draws; weights are rounded to `weights` (default `dtype`) before they become `dtype`."""
    model = random_model(llama(head_dim))
    for parameter in model.parameters():
        parameter.data.mul_(spread if parameter.ndim > 1 else 1)
    return TransformersModel(model.to(weights or dtype).to(device="cuda", dtype=dtype))


def config_of(layout: str, **values: Any) -> EngineConfig:
    standing = {"layout": layout, "device": "cuda", "page_size": 64, "kv_tokens": 32768, "max_rows": 32, "streams": 16}
    return EngineConfig(**(standing | {"step_tokens": 512, "prefill_chunk": 256, "tail_piece": 64} | values))


def documents(seed: int, count: int = 3, questions: int = 12) -> list[Document]:
    rng = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high)))

    def asked() -> tuple[Question, ...]:
        return tuple(Question(f"q{i}", ids(3, 20), Sampling(rng.randint(1, 30))) for i in range(questions))

    instruction = ids(40, 40)
    return [Document(f"d{d}", (instruction, ids(200, 1500)), asked()) for d in range(count)]


def first_tokens(asked: list[Document], tokens: int = 1) -> list[Document]:
    """The same documents, asked for so many tokens an answer."""
    return [replace(d, questions=tuple(replace(q, sampling=Sampling(tokens)) for q in d.questions)) for d in asked]


def run(engine: Any, asked: list[Document]) -> dict[Key, StreamResult]:
    for document in asked:
        engine.submit(document)
    return {(result.document_key, result.question_id): result for result in engine.drain()}


def capturer(model: TransformersModel) -> CudaCapturer:
    return CudaCapturer(model.device, model.capture_scope)


def pipelined(model: Any, config: EngineConfig, capture: bool = True, **setting: Any) -> PipelinedEngine:
    executor = kernel_engine(model, config, capturer(model) if capture else None, nodes=64, context=4096, **setting).executor
    scheduler = build_scheduler(config)
    executor.free_pages = scheduler.tree.pool.free_pages  # type: ignore[attr-defined]
    return PipelinedEngine(scheduler, executor, FakeDetokenizer())  # type: ignore[arg-type]


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_answers_are_those_of_the_passes(layout: str, capture: bool) -> None:
    model, config, asked = model_of(torch.float32), config_of(layout), documents(1)
    wanted = run(poisoned_engine(model, config), asked)
    engine = pipelined(model, config, capture)
    if capture:
        engine.executor.steps.warm([32, 16])  # type: ignore[attr-defined]
    got = run(engine, asked)
    for key, result in wanted.items():
        assert got[key].answer_token_ids == result.answer_token_ids
        assert got[key].logprob == pytest.approx(result.logprob, abs=1e-2)
    if capture:
        assert len(engine.executor.steps.capture_s) >= 2  # type: ignore[attr-defined]
    metrics = engine.metrics
    assert metrics.device_busy_s > 0
    print(f"{layout}: idle {metrics.device_idle_ratio:.1%}, captures {engine.executor.steps.capture_s}")  # type: ignore[attr-defined]


def labelled(documents: list[Document]) -> list[Document]:
    """Two of three questions with label trees: of one chain and of many, labels of one token and of several."""
    rng = random.Random(4)
    sets = [((3,), (4,)), ((3, 5), (3, 6)), ((3, 5), (4, 6, 7), (8, 9)), ((3, 5, 6, 7), (3, 5, 8, 9), (3, 6, 9))]

    def asked(number: int, question: Question) -> Question:
        ids = rng.choice(sets)
        trie = label_trie([str(own) for own in ids], ids, None)
        return question if number % 3 == 2 else replace(question, sampling=Sampling(1), labels=trie)

    return [replace(d, questions=tuple(asked(i, q) for i, q in enumerate(d.questions))) for d in documents]


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
def test_label_trees_are_scored_as_by_the_passes(capture: bool) -> None:
    """Trees beside free answers in one step; no step leaves the kernels."""
    asked = labelled(documents(5))
    model, config = model_of(torch.float32), config_of("split")
    wanted = run(poisoned_engine(model, config), asked)
    engine = pipelined(model, config, capture)
    refuse_passes(engine.executor)
    got = run(engine, asked)
    assert got.keys() == wanted.keys()
    for key, result in wanted.items():
        scores = got[key].labels
        assert (scores is None) == (result.labels is None)
        if scores is not None and result.labels is not None:
            assert scores.logprobs == pytest.approx(result.labels.logprobs, abs=1e-2)


def test_label_trees_in_bf16_are_as_near_to_fp32_as_the_passes() -> None:
    """The kernel of 16-bit caches (on Hopper the warp-specialised one) reads a tail as a node that the same step has stored."""
    config, asked = config_of("split"), labelled(documents(5))
    rounded = model_of(torch.bfloat16, 128, spread=0.5)
    exact = run(poisoned_engine(model_of(torch.float32, 128, spread=0.5, weights=torch.bfloat16), config), asked)
    engine = pipelined(rounded, config)
    refuse_passes(engine.executor)
    found = [_label_errors(exact, run(one, asked)) for one in (engine, poisoned_engine(rounded, config))]
    ours, passes = found
    assert len(ours) > 40
    assert sum(ours) <= 1.5 * sum(passes)
    assert max(ours) <= 2 * max(passes)


def _label_errors(exact: dict[Key, StreamResult], got: dict[Key, StreamResult]) -> list[float]:
    pairs = [(result.labels, got[key].labels) for key, result in exact.items()]
    scored = [(a.logprobs, b.logprobs) for a, b in pairs if a is not None and b is not None]
    return [abs(one - other) for wanted, found in scored for one, other in zip(wanted, found, strict=True)]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_documents_through_another_librarys_prefill(layout: str, head_dim: int) -> None:
    """As near to fp32 answers of the same weights as PyTorch's passes in bf16 are; first tokens part at near-ties alone."""
    config, asked = config_of(layout), first_tokens(documents(2))
    found = best_prefill(AttentionShape(8, 2, head_dim, 64, torch.bfloat16), torch.device("cuda"))
    if found is None:
        pytest.skip("neither FlashAttention-3 nor FlashInfer is installed")
    rounded = model_of(torch.bfloat16, head_dim, spread=0.5)
    exact = run(poisoned_engine(model_of(torch.float32, head_dim, spread=0.5, weights=torch.bfloat16), config), asked)
    passes = Moved.between(exact, run(poisoned_engine(rounded, config), asked))
    ours = Moved.between(exact, run(pipelined(rounded, config, chunk_pass=ChunkPass(found[1])), asked))
    print(f"prefill by {found[0]}: {ours}, passes: {passes}")
    assert passes.most < 0.2
    assert ours.mean <= 1.5 * passes.mean
    assert ours.most <= 2 * passes.most
    assert ours.parted_margin <= 2 * passes.most


@dataclass(frozen=True)
class Moved:
    """How far log-probabilities of answers lie from exact ones, and the largest exact margin among answers that differ."""

    mean: float
    most: float
    parted_margin: float

    @classmethod
    def between(cls, exact: dict[Key, StreamResult], found: dict[Key, StreamResult]) -> Moved:
        parted = [key for key in exact if exact[key].answer_token_ids != found[key].answer_token_ids]
        moved = [abs(exact[key].logprob - found[key].logprob) for key in exact if key not in parted]
        assert len(parted) < len(exact) / 4
        return cls(fmean(moved), max(moved), max((exact[key].margin for key in parted), default=0.0))


def test_deterministic_answers_are_bitwise_whatever_rides_along() -> None:
    """Products of fp32 rows in blocks of their own size; attention by pinned chunks and one tile."""
    config, asked = config_of("split", deterministic=True), documents(3, count=2)
    plain = model_of(torch.float32)._model
    model = TransformersModel(plain, deterministic=True)
    setting = {"chunking": Chunking(deterministic=True)}
    wanted = run(pipelined(model, config, **setting), asked)
    for streams in (1, 7):
        assert run(pipelined(model, config_of("split", deterministic=True, streams=streams), **setting), asked[::-1]) == wanted


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_the_same_whoever_turns_queries_and_keys(layout: str, capture: bool, tmp_path: Path) -> None:
    """SGLang's layers in bf16 (its norms know no other dtype), with our launch that turns and stores, and with SGLang's rotary embedding
    and a store: the same four tokens an answer, but for near-ties."""
    if installed_release() is None:
        pytest.skip("sglang is not installed")
    from askmany.engine.model_sglang import SglangModel

    config, asked = config_of(layout), first_tokens(documents(9), tokens=4)
    model_of(torch.bfloat16, spread=0.5)._model.save_pretrained(tmp_path)
    model = SglangModel.load(tmp_path, torch.device("cuda"), torch.bfloat16, 4096)
    try:
        assert model.rotary is not None
        ours = run(pipelined(model, config, capture), asked)
        model._own_rotary = None
        theirs = run(pipelined(model, config, capture), asked)
    finally:
        model.close()
    moved = Moved.between(theirs, ours)
    print(f"{layout}: {moved}")
    assert moved.mean < 0.05
    assert max(moved.most, moved.parted_margin) < 0.2


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Any]:
    if installed_release() is None:
        pytest.skip("sglang is not installed")
    from askmany.engine.model_sglang import SglangModel
    from askmany.jobs.bench_shapes import shape_folder

    model = SglangModel.load(shape_folder("qwen2.5-1.5b", tmp_path), torch.device("cuda"), torch.bfloat16, 16384, "dummy")
    yield model
    model.close()


def test_sglang_runs_under_the_kernels_with_graphs(hosted: Any) -> None:
    from askmany.engine.kernel_loading import load_steps

    assert hosted.rotary is not None
    config = EngineConfig(device="cuda", dtype="bfloat16", kv_tokens=65536, page_size=64, max_rows=64)
    pool = KVPool(hosted.kv_shape, config.kv_pages * config.page_size, hosted.device)
    steps = load_steps(hosted, pool, config, 16384)
    assert steps is not None
    steps.warm([64])
    engine = PipelinedEngine(build_scheduler(config), TorchExecutor(hosted, pool, 64, steps=steps), FakeDetokenizer())
    rng = random.Random(4)
    tails = [tuple(rng.randrange(1000) for _ in range(12)) for _ in range(64)]
    document = tuple(rng.randrange(1000) for _ in range(8192))
    results = run(engine, [Document("d", (document,), tuple(Question(f"q{i}", tail, Sampling(32)) for i, tail in enumerate(tails)))])
    assert [len(result.answer_token_ids) for result in results.values()] == [32] * 64
    steps.check()
    metrics = engine.metrics
    print(f"64 x 32 tokens over 8k: {metrics.busy_s:.2f} s, idle {metrics.device_idle_ratio:.1%}, captures {steps.capture_s}")
