"""Triton kernels behind `store`: one program copies a block of one row's K or V."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_rows(k, v, k_cache, v_cache, slots, stride_k, stride_v, stride_kc, stride_vc, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_row, i_block, i_tensor = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + i_row).to(tl.int64)
    if slot >= 0:
        o_e = i_block * BLOCK + tl.arange(0, BLOCK)
        m_e = o_e < width
        if i_tensor == 0:
            b_k = tl.load(k + i_row * stride_k + o_e, mask=m_e, other=0.0)
            tl.store(k_cache + slot * stride_kc + o_e, b_k.to(k_cache.dtype.element_ty), mask=m_e)
        else:
            b_v = tl.load(v + i_row * stride_v + o_e, mask=m_e, other=0.0)
            tl.store(v_cache + slot * stride_vc + o_e, b_v.to(v_cache.dtype.element_ty), mask=m_e)


@triton.jit
def store_row_ids(ids, slot_ids, slots, rows, BLOCK: tl.constexpr):
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + o_t, mask=o_t < rows, other=-1).to(tl.int64)
    b_id = tl.load(ids + o_t, mask=o_t < rows, other=0)
    tl.store(slot_ids + slot, b_id.to(slot_ids.dtype.element_ty), mask=slot >= 0)
