"""A KV connector for tests: a request says what could be loaded for it, and nothing is moved."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class FakeConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads the first ``external_tokens`` of a request, which waits for them if ``is_async``."""

    requires_kv_delivery = False

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        parameters = request.kv_transfer_params or {}
        stored = min(parameters.get("external_tokens", 0), request.num_tokens - 1)
        found = max(0, stored // 32 * 32 - num_computed_tokens)
        return found, bool(found and parameters.get("is_async"))

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass
