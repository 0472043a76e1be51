"""A connector of vLLM's that loads one request synchronously, for what vLLM makes of it when the load fails."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

LOADED = "loaded"
"""Id of the request of which everything but the last token can be loaded."""


class Nothing(KVConnectorMetadata):  # type: ignore[misc]
    """Nothing is to be done."""


class SyncConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Promises a synchronous load once, and moves no byte."""

    _promised = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id != LOADED or self._promised:
            return 0, False
        self._promised = True
        return request.num_tokens - 1 - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
