"""The forward pass through SGLang's layers: modes, padding, faults, tracing, and SGLang's own ways round, which must agree with ours."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from askmany.engine import sglang_compat
from askmany.engine.batch import StepBatch
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_sglang import SglangModel, StreamBackend, run_lengths
from askmany.engine.step_attention import StepAttention
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from tests.helpers.sglang_models import DEVICE, FAMILIES, Loader
from tests.helpers.sglang_seams import snapshot

PREFIX, TAILS = 9, (4, 1, 6)


def branching_batch(pad: int = 0) -> StepBatch:
    """A document of `PREFIX` tokens and three streams of `TAILS` tokens below it, in one step; each stream's last row asks for logits."""
    count = PREFIX + sum(TAILS)
    rows = torch.arange(count + pad)
    positions, private, sampled = list(range(PREFIX)), [PrivateItem(0, PREFIX, rows[:PREFIX])], []
    start = PREFIX
    for tail in TAILS:
        positions += range(PREFIX, PREFIX + tail)
        private.append(PrivateItem(start, tail, rows[start : start + tail]))
        start += tail
        sampled.append(start - 1)
    private += [PrivateItem(row, 1, rows[row : row + 1]) for row in range(count, count + pad)]
    shared = (SharedItem(rows[PREFIX:count], rows[:PREFIX]),)
    places = torch.tensor(positions + [0] * pad)
    return StepBatch(rows * 31 % 97, places, rows, SplitBatch(shared, tuple(private)), torch.tensor(sampled), ())


@torch.inference_mode()
def run(model: SglangModel, batch: StepBatch, mode: str, run_lengths: Tensor | None = None) -> Tensor:
    """`batch` in a forward mode of SGLang's, whichever rows ask for logits."""
    pool = KVPool(model.kv_shape, len(batch.token_ids), DEVICE, poisoned=True)
    backend = StreamBackend(StepAttention.of(batch, pool, DEVICE, None))
    more = {} if run_lengths is None else {"extend_seq_lens": run_lengths.to(DEVICE)}
    tensors = [x.to(DEVICE) for x in (batch.token_ids, batch.positions, batch.store_slots)]
    return model._hosted.run(backend, sglang_compat._forward_batch(mode, *tensors, len(batch.token_ids), **more)).cpu()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_gives_the_rows_that_were_asked_for(load: Loader, name: str) -> None:
    loaded, _ = load(name)
    batch = branching_batch()
    all_rows = run(loaded, batch, "DECODE")
    assert all_rows.shape == (len(batch.token_ids), loaded.vocabulary)
    exact = {"rtol": 0.0, "atol": 1e-5}
    torch.testing.assert_close(run(loaded, batch, "TARGET_VERIFY"), all_rows, **exact)
    torch.testing.assert_close(run(loaded, batch, "EXTEND", torch.ones(len(batch.token_ids), dtype=torch.int32)), all_rows, **exact)
    pool = KVPool(loaded.kv_shape, len(batch.token_ids), DEVICE, poisoned=True)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.forward(batch, pool).cpu(), all_rows[batch.sampled_rows], **exact)
        shuffled = dataclasses.replace(batch, sampled_rows=batch.sampled_rows[[2, 0, 1]])
        torch.testing.assert_close(loaded.forward(shuffled, pool).cpu(), all_rows[shuffled.sampled_rows], **exact)
        nothing = dataclasses.replace(batch, sampled_rows=batch.sampled_rows[:0])
        loaded.forward(nothing, pool)


@pytest.mark.parametrize(
    ("rows", "count", "lengths"),
    [([2, 5], 6, [3, 3]), ([2, 5], 9, [3, 3, 3]), ([], 4, [4]), ([0], 1, [1]), ([0, 1, 2], 3, [1, 1, 1]), ([3], 4, [4])],
)
def test_runs_end_at_the_sampled_rows(rows: list[int], count: int, lengths: list[int]) -> None:
    found = run_lengths(torch.tensor(rows, dtype=torch.int64), count)
    assert found.tolist() == lengths
    assert int(found.sum()) == count


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_rows_change_nothing(load: Loader, name: str) -> None:
    loaded, _ = load(name)
    batch, padded = branching_batch(), branching_batch(pad=9)
    torch.testing.assert_close(run(loaded, padded, "DECODE")[: len(batch.token_ids)], run(loaded, batch, "DECODE"), rtol=0, atol=1e-5)


def test_each_layer_attends_once_a_pass(load: Loader) -> None:
    loaded, _ = load("qwen3")
    batch, calls = branching_batch(), []
    inner = StepAttention.of(batch, KVPool(loaded.kv_shape, len(batch.token_ids), DEVICE), DEVICE, None)

    class Counting:
        def attend(self, layer: int, *tensors: Any) -> Tensor:
            calls.append(layer)
            return inner.attend(layer, *tensors)

    with torch.inference_mode():
        for _ in range(3):
            loaded._run(batch, Counting())
    assert calls == [0, 1] * 3


def test_a_fault_in_a_layer_leaves_no_trace(load: Loader) -> None:
    from sglang.srt.model_executor.forward_context import has_forward_context

    loaded, _ = load("qwen2")
    batch = branching_batch()
    expected = run(loaded, batch, "DECODE")

    class Failing:
        def attend(self, layer: int, q: Tensor, *tensors: Any) -> Tensor:
            if layer == 1:
                raise RuntimeError("a fault of the device")
            return torch.full_like(q, float("nan"))

    with torch.inference_mode(), pytest.raises(RuntimeError, match="a fault of the device"):
        loaded._run(batch, Failing())
    assert not has_forward_context()
    assert torch.equal(run(loaded, batch, "DECODE"), expected)


def test_a_batch_object_can_be_used_again(load: Loader) -> None:
    """As a captured graph needs it: the same ForwardBatch, its tensors overwritten."""
    loaded, _ = load("llama-gqa")
    batch = branching_batch()
    tensors = [x.to(DEVICE) for x in (batch.token_ids.clone(), batch.positions, batch.store_slots)]
    forward_batch = sglang_compat.decode_batch(*tensors)
    pool = KVPool(loaded.kv_shape, len(batch.token_ids), DEVICE)
    with torch.inference_mode():
        backend = StreamBackend(StepAttention.of(batch, pool, DEVICE, None))
        first = loaded._hosted.run(backend, forward_batch).clone()
        tensors[0].add_(1).remainder_(97)
        second = loaded._hosted.run(backend, forward_batch).clone()
        tensors[0].sub_(1).remainder_(97)
        assert not torch.allclose(first, second)
        assert torch.equal(loaded._hosted.run(backend, forward_batch), first)


DATA_DEPENDENT = ("_local_scalar_dense", "nonzero", "masked_select", "unique")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.skipif(DEVICE.type != "cpu", reason="stands in for a captured graph where none can be captured")
def test_a_traced_pass_replays_on_other_tokens(load: Loader, name: str) -> None:
    """What Python decides from data during the trace is frozen, as it would be in a graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    loaded, _ = load(name)
    batch = branching_batch()
    pool = KVPool(loaded.kv_shape, len(batch.token_ids), DEVICE)
    backend = StreamBackend(StepAttention.of(batch, pool, DEVICE, None))

    def step(ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return loaded._hosted.run(backend, sglang_compat.decode_batch(ids, positions, slots))

    with torch.no_grad():
        traced = make_fx(step, tracing_mode="real")(batch.token_ids.clone(), batch.positions.clone(), batch.store_slots)
        ids, positions = (batch.token_ids * 7 + 3) % 97, batch.positions + 5
        got, wanted = traced(ids, positions, batch.store_slots), step(ids, positions, batch.store_slots)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    names = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    assert [name for name in names if any(op in name for op in DATA_DEPENDENT)] == []


def test_the_batch_holds_all_that_is_read(load: Loader, release: str) -> None:
    """The fields of ForwardBatch that a pass reads. A release that starts to read another one fails here."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    loaded, _ = load("llama-gqa")
    read: set[str] = set()
    fields = {field.name for field in dataclasses.fields(ForwardBatch)}

    class Watched(ForwardBatch):
        def __getattribute__(self, name: str) -> Any:
            if name in fields:
                read.add(name)
            return super().__getattribute__(name)

    batch = branching_batch()
    for made in (
        sglang_compat.decode_batch(batch.token_ids, batch.positions, batch.store_slots),
        sglang_compat.extend_batch(batch.token_ids, batch.positions, batch.store_slots, torch.tensor([len(batch.token_ids)])),
    ):
        made.__class__ = Watched
        with torch.inference_mode():
            loaded._hosted.run(StreamBackend(StepAttention.of(batch, KVPool(loaded.kv_shape, 64, DEVICE), DEVICE, None)), made)
    assert sorted(read) == snapshot(release)["fields"]


def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own pools, should a test make them, of 2,047 tokens."""
    made = sglang_compat._server_arguments

    def limited(*arguments: Any) -> Any:
        server = made(*arguments)
        server.max_total_tokens, server.max_running_requests = 2047, 8
        return server

    monkeypatch.setattr(sglang_compat, "_server_arguments", limited)


class _SglangPool:
    """Our attention's view of a pool of SGLang's: their tensors, our slot numbers."""

    def __init__(self, pool: Any, layers: int) -> None:
        self.k = [pool.get_key_buffer(i) for i in range(layers)]
        self.v = [pool.get_value_buffer(i) for i in range(layers)]
        self._pool = pool

    def store(self, layer: int, slots: Any, k: Tensor, v: Tensor) -> None:
        self.k[layer][slots] = k
        self.v[layer][slots] = v


def test_sglangs_pools_hold_the_same_bits(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    small_pool(monkeypatch)
    loaded, _ = load("llama-gqa")
    batch, shape = branching_batch(), loaded.kv_shape
    expected = run(loaded, batch, "DECODE")
    runner = loaded._hosted.runner
    runner.alloc_memory_pool()
    made = MHATokenToKVPool(
        size=64, page_size=1, dtype=shape.dtype, head_num=shape.kv_heads, head_dim=shape.head_dim, layer_num=shape.layers,
        device=DEVICE.type, enable_memory_saver=False,
    )  # fmt: skip
    for pool in (runner.token_to_kv_pool, made):
        view: Any = _SglangPool(pool, shape.layers)
        tensors = [x.to(DEVICE) for x in (batch.token_ids, batch.positions, batch.store_slots)]
        with torch.inference_mode():
            got = loaded._hosted.run(StreamBackend(StepAttention.of(batch, view, DEVICE, None)), sglang_compat.decode_batch(*tensors))
        assert torch.equal(got.cpu(), expected)


def test_sglangs_runner_and_sampler_agree(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long way round: the registry builds our backend from its name, ModelRunner.forward runs it."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    batch = branching_batch()
    made: list[Any] = []

    class Registered(AttentionBackend):
        def __init__(self, runner: Any) -> None:
            super().__init__()
            self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
            made.append(self)

        def init_forward_metadata(self, forward_batch: Any) -> None:
            pool = KVPool(loaded.kv_shape, len(batch.token_ids), DEVICE, poisoned=True)
            self.forward_decode = StreamBackend(StepAttention.of(batch, pool, DEVICE, None)).forward

        def get_cuda_graph_seq_len_fill_value(self) -> int:
            return 1

    register_attention_backend("askmany")(Registered)
    small_pool(monkeypatch)
    monkeypatch.setitem(sglang_compat.STOCK_BACKEND, DEVICE.type, "askmany")
    loaded, _ = load("llama-gqa")
    runner = loaded._hosted.runner
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    assert made == [runner.attn_backend]
    tensors = [x.to(DEVICE) for x in (batch.token_ids, batch.positions, batch.store_slots)]
    with torch.inference_mode():
        output = runner.forward(sglang_compat.decode_batch(*tensors)).logits_output.next_token_logits
    expected = run(loaded, batch, "DECODE")
    assert torch.equal(output.cpu(), expected)


PLUGIN = """
def activate():
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    register_attention_backend("askmany-plugin")(lambda runner: None)
"""


def test_an_entry_point_registers_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins

    metadata = tmp_path / "askmany_probe-0.1.dist-info"
    metadata.mkdir()
    (tmp_path / "askmany_probe.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: askmany-probe\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\naskmany = askmany_probe:activate\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugins()
    assert "askmany-plugin" in ATTENTION_BACKENDS
