"""Rows of keys: how a cache holds window keys, compressed entries and the indexer's keys."""

from __future__ import annotations

import torch

from .backend import operation


def new_keys_ref(rows: int, width: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Memory for `rows` keys of attention, [rows, width]; the definitions hold the (quantised) values in the run's dtype."""
    return torch.zeros(rows, width, dtype=dtype, device=device)


def new_window_ref(window_size: int, chunk: int, width: int, dtype: torch.dtype, device) -> torch.Tensor:
    """The window's ring for steps of up to `chunk` tokens, [window_size + chunk, width]: the key of position p in row p mod R, so that a
    step's keys overwrite none that its queries reach."""
    return new_keys(window_size + chunk, width, dtype, device)


def new_index_keys_ref(rows: int, width: int, dtype: torch.dtype, device) -> torch.Tensor:
    """The same for the indexer's keys."""
    return torch.zeros(rows, width, dtype=dtype, device=device)


new_keys = operation(new_keys_ref)
new_window = operation(new_window_ref)
new_index_keys = operation(new_index_keys_ref)
