"""A group's plan rows as one row that Ray Data carries whole.

Ray Data refuses GPUs for batches of no stated size, and would cut or join blocks to reach a stated one. A block of one row, in batches of
one, is always exactly one group.
"""

from __future__ import annotations

import pyarrow as pa

COLUMN = "block"
ROWS = 1  # the batch size to ask for


def pack(block: pa.Table) -> pa.Table:
    """A table of one row that holds the block."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, block.schema) as writer:
        writer.write_table(block)
    return pa.table({COLUMN: pa.array([sink.getvalue().to_pybytes()], pa.large_binary())})


def unpack(batch: pa.Table) -> pa.Table:
    """The block of a batch of one row. ValueError for a batch of another size."""
    if batch.num_rows != ROWS:
        raise ValueError(f"a batch of {batch.num_rows} groups, not {ROWS}")
    with pa.ipc.open_stream(pa.py_buffer(batch.column(COLUMN)[0].as_py())) as reader:
        return reader.read_all()
