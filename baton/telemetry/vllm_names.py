"""Baton's metrics under vLLM's names, for dashboards made for vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

#: (our family, value of baton_state or gen_ai_token_type, or empty) -> vLLM's family.
FAMILIES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("baton_requests_running", ""): "vllm:num_requests_running",
        ("baton_requests_waiting", ""): "vllm:num_requests_waiting",
        ("baton_gateway_queue_length", ""): "vllm:num_requests_waiting",
        ("baton_kv_usage", ""): "vllm:kv_cache_usage_perc",
        ("baton_preemptions", ""): "vllm:num_preemptions",
        ("baton_prefix_query_tokens", ""): "vllm:prefix_cache_queries",
        ("baton_prefix_hit_tokens", ""): "vllm:prefix_cache_hits",
        ("baton_drafts", ""): "vllm:spec_decode_num_drafts",
        ("baton_draft_tokens", ""): "vllm:spec_decode_num_draft_tokens",
        ("baton_draft_accepted_tokens", ""): "vllm:spec_decode_num_accepted_tokens",
        ("baton_tokens", "input"): "vllm:prompt_tokens",
        ("baton_tokens", "output"): "vllm:generation_tokens",
        ("gen_ai_server_request_duration_seconds", ""): "vllm:e2e_request_latency_seconds",
        ("gen_ai_server_time_to_first_token_seconds", ""): "vllm:time_to_first_token_seconds",
        (
            "gen_ai_server_time_per_output_token_seconds",
            "",
        ): "vllm:request_time_per_output_token_seconds",
        ("baton_ttft_phase_seconds", "queue"): "vllm:request_queue_time_seconds",
        ("baton_ttft_phase_seconds", "prefill"): "vllm:request_prefill_time_seconds",
        ("baton_decode_duration_seconds", ""): "vllm:request_decode_time_seconds",
        ("baton_requests_finished", ""): "vllm:request_success",
    }
)
_SELECTORS = ("gen_ai_token_type", "baton_phase")


class VllmNames(Collector):
    """Collects from `source` the metrics that vLLM has a name for, with vLLM's labels."""

    def __init__(self, source: CollectorRegistry, model: str) -> None:
        self._source = source
        self._model = model

    def collect(self) -> Iterable[Metric]:
        for metric in self._source.collect():
            for (family, value), name in FAMILIES.items():
                if family == metric.name:
                    yield self._renamed(metric, name, value)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known only at collection."""
        return ()

    def _renamed(self, metric: Metric, name: str, value: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        renamed.samples = list(_merged(self._samples(metric, name, value)))
        return renamed

    def _samples(self, metric: Metric, name: str, value: str) -> Iterator[Sample]:
        for sample in metric.samples:
            labels = sample.labels
            if value and value not in {labels.get(selector) for selector in _SELECTORS}:
                continue
            kept = {"model_name": self._model, "engine": "0"}
            if "le" in labels:
                kept["le"] = labels["le"]
            if "gen_ai_response_finish_reason" in labels:
                kept["finished_reason"] = labels["gen_ai_response_finish_reason"]
            yield Sample(name + sample.name.removeprefix(metric.name), kept, sample.value)


def _merged(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Sum samples with equal labels, in the order of their first occurrence."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    add: Callable[[Sample, Sample], Sample] = lambda a, b: a._replace(value=a.value + b.value)  # noqa: E731
    for sample in samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        sums[key] = add(sums[key], sample) if key in sums else sample
    yield from sums.values()
