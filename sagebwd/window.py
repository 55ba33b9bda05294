"""Which keys a query sees: the causal mask and sliding windows, as two limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """Query i sees keys i − left … i + right, counted from the first of each; −1 is no limit.

    The causal mask is (−1, 0).
    """

    left: int
    right: int

    @classmethod
    def of(cls, is_causal: bool, window_size: Sequence[int] = (-1, -1)) -> Window:
        """Both masks at once.

        Raises:
            ValueError: ``is_causal`` is not true or false, or ``window_size`` not two integers of −1 or more.
        """
        if is_causal not in (True, False):
            raise ValueError(f"is_causal is {is_causal!r}; pass True or False")
        is_pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
        numbers = (int, torch.SymInt)
        if not is_pair or not all(isinstance(x, numbers) and not isinstance(x, bool) for x in window_size):
            raise ValueError(
                f"window_size is {window_size!r}; pass two integers, (left, right); -1 is no limit"
            )
        if min(window_size) < -1:
            raise ValueError(f"window_size is {tuple(window_size)}; pass numbers of keys, or -1 for no limit")
        left, right = window_size
        return cls(left, 0 if is_causal else right)

    @property
    def is_sliding(self) -> bool:
        """Whether there is a limit beyond that of the causal mask."""
        # any, because it branches: a tracer that has symbols for the limits then gets a constant.
        return any((self.left >= 0, self.right > 0))

    def narrowed(self, n_q: int, n_kv: int) -> Window:
        """Without limits that hide none of n_kv keys from any of n_q queries. A causal mask stays one.

        Not while traced: a graph of any length must not branch on one.
        """
        if torch.compiler.is_compiling():
            return self
        left, right = self
        if left > 0 and left >= n_q - 1:
            left = -1
        if right > 0 and right >= n_kv - 1:
            right = -1
        return Window(left, right)

    def keys_of(self, queries: slice, n_kv: int) -> slice:
        """The keys of n_kv that any of ``queries`` sees; start is stop if there are none."""
        start = 0 if self.left < 0 else max(queries.start - self.left, 0)
        stop = n_kv if self.right < 0 else min(queries.stop + self.right, n_kv)
        return slice(min(start, stop), stop)

    def sees_all(self, queries: slice, keys: slice) -> bool:
        """Whether each of ``queries`` sees all of ``keys``."""
        is_right = self.right < 0 or keys.stop - 1 <= queries.start + self.right
        return is_right and (self.left < 0 or queries.stop - 1 - self.left <= keys.start)

    def visible(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """(queries, keys) bool: whether each query sees each key."""
        query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(-1)
        key = torch.arange(keys.start, keys.stop, device=device)
        visible = torch.ones(len(query), len(key), dtype=torch.bool, device=device)
        if self.right >= 0:
            visible &= key <= query + self.right
        if self.left >= 0:
            visible &= key >= query - self.left
        return visible


#: Every query sees every key.
FULL = Window(-1, -1)

#: The causal mask.
CAUSAL = Window(-1, 0)
