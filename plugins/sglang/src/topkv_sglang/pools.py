"""SGLang's pools where KV is topkv's: its page ids are topkv's host pages.

Slot 0 of SGLang's pool, where rows of padding write, is page 0 of topkv, which nobody has.
"""

from __future__ import annotations

from typing import Any, NoReturn

from sglang.srt.mem_cache.memory_pool import NoOpMHATokenToKVPool, ReqToTokenPool

from topkv_sglang.rows import Rows


class RowPool(Rows, ReqToTokenPool):  # type: ignore[misc]
    """SGLang's pool of requests, whatever ends them: all come by ``free_rows``.

    Args:
        page: tokens of a page.
        more: as SGLang hands them over.
    """

    def __init__(self, page: int, **more: Any) -> None:
        super().__init__(**more)
        self.page, self.ended, self.replaced = page, [], {}

    def free_rows(self, indices: list[int]) -> None:
        """Give rows back: of requests that have ended, were aborted or retracted."""
        self.note_ended(indices)
        super().free_rows(indices)

    def clear(self) -> None:
        """Give all rows back."""
        self.note_ended(range(1, self.size + 1))
        super().clear()


class PlaceholderPool(NoOpMHATokenToKVPool):  # type: ignore[misc]
    """Capacity in tokens, and an element for each of a page a layer: keys and values are topkv's.

    Args:
        more: as SGLang hands them over; nothing is ever copied within this pool.
    """

    def __init__(self, *more: Any, **named: Any) -> None:
        small = {"head_num": 1, "head_dim": 1, "v_head_dim": 1, "enable_kv_cache_copy": False}
        super().__init__(*more, **{**named, **small})

    def _refuse(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refuse to take or to show keys and values: the attention backend has topkv keep them.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "keys and values of this model are kept by topkv, and something else than its "
            "attention backend asks SGLang's pool for them; this is a bug of topkv, please "
            "report it"
        )

    set_kv_buffer = get_kv_buffer = get_key_buffer = get_value_buffer = _refuse
