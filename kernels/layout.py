"""Tile sizes shared by the tables, the Triton kernels and the CUDA kernels."""

import torch

MAX_RANK = 32         # the paper's grid ends here; larger ranks run on the reference
SLOT_VALUES = 2048    # rows x columns of one slot that a program of write_slots makes at a time
SLOT_GROUP = 16       # candidates that it makes from the rows of U_B it holds
MERGE_COLUMNS = 128   # columns of a tile of merged_apply
LEFT_ROWS = 256       # tile of its first step, U_B C


def slot_width(rank, row_length):
    """Columns of a slot row that write_slots writes: the rank, rounded up to whole 8-column chunks.

    8 columns are one 16-byte store in 16-bit types, two in float32. Columns beyond the rank get
    zeros. row_length is vLLM's max_lora_rank; one below 8 (1, in practice) is written as it is.
    """
    width = 1 << max(rank - 1, 0).bit_length()
    return min(max(width, 8), row_length)


def merge_rows(vector):
    """Rows of a tile of merged_apply: fewer where odd sizes need an address an element."""
    return 64 if vector else 16


def slot_rows(width):
    """Rows a tile of write_slots."""
    return SLOT_VALUES // max(width, 8)


def tiles(rows, step, columns=None, column_step=None):
    """The tiles of a list of matrices, in order.

    rows: rows of each matrix; step: rows a tile. Returns int32 (n, 2): matrix, first row. With
    columns and column_step the tiles are two-dimensional, int32 (n, 3): matrix, first row, first
    column.
    """
    pieces = []
    for index, count in enumerate(rows):
        first = torch.arange(0, count, step, dtype=torch.int32)
        if columns is None:
            corners = first[:, None]
        else:
            corners = torch.cartesian_prod(first, torch.arange(0, columns[index], column_step, dtype=torch.int32))
        pieces.append(torch.cat([torch.full((len(corners), 1), index, dtype=torch.int32), corners], 1))
    return torch.cat(pieces)
