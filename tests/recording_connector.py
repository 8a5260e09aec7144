"""A KV connector that has some KV of some requests, and notes all that it is told. For `scheduler_pair.py`."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class Noted(KVConnectorMetadata):
    def __init__(self, step):
        self.step = step

    def __repr__(self):
        return str(self.step)


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
    """Of each third request it has a block, which it loads before a step or meanwhile; every fourth is sent on."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls, self.loading, self.sending = [], set(), set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        size = self._vllm_config.cache_config.block_size
        kind = int(request.request_id) % 6
        if kind not in (0, 3) or num_computed_tokens + size >= request.num_tokens:
            return 0, False
        return size, kind == 3

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.calls.append((request.request_id, blocks.get_block_ids(), num_external_tokens))
        if num_external_tokens and int(request.request_id) % 6 == 3:
            self.loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output):
        from scheduler_pair import plain_fields

        blocks = scheduler_output.kv_connector_block_state
        fields = plain_fields(scheduler_output)
        del fields["kv_connector_block_state"]
        tables = {name: blocks.get_block_ids(name) for name in sorted(blocks.req_ids)}
        self.calls = [(fields, tables)]
        return Noted(tables)

    def request_finished_all_groups(self, request, block_ids):
        self.calls.append((request.request_id, block_ids))
        sends = int(request.request_id) % 4 == 0 and request.num_computed_tokens > 0
        if sends:
            self.sending.add(request.request_id)
        return sends, {"sent": sends}

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...
