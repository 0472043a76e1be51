"""What ``/metrics`` of a mock worker says, under vLLM's names, so that whoever watches engines can watch mocks."""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.deploy.mock.scheduler import Scheduler


def exposition(scheduler: Scheduler, model: str) -> str:
    """Prometheus text."""
    lines: list[str] = []
    for name, kind, labels, value in _samples(scheduler):
        family = f"# TYPE {name} {kind}"
        if family not in lines:
            lines.append(family)
        shown = "".join(f',{key}="{text}"' for key, text in labels.items())
        lines.append(f'{name}{{engine="0",model_name="{model}"{shown}}} {float(value)}')
    return "\n".join(lines) + "\n"


def _samples(scheduler: Scheduler) -> Iterator[tuple[str, str, dict[str, str], float]]:
    totals = scheduler.totals
    yield "vllm:num_requests_running", "gauge", {}, scheduler.running
    yield "vllm:num_requests_waiting", "gauge", {}, scheduler.waiting
    yield "vllm:kv_cache_usage_perc", "gauge", {}, scheduler.cache.usage
    yield "vllm:num_preemptions_total", "counter", {}, totals.preemptions
    yield "vllm:prompt_tokens_total", "counter", {}, totals.computed + totals.local + totals.loaded
    yield "vllm:generation_tokens_total", "counter", {}, totals.written
    sources = {
        "local_compute": totals.computed,
        "local_cache_hit": totals.local,
        "external_kv_transfer": totals.loaded,
    }
    for source, tokens in sources.items():
        yield "vllm:prompt_tokens_by_source_total", "counter", {"source": source}, tokens
    for ending, count in totals.endings.items():
        yield "vllm:request_success_total", "counter", {"finished_reason": ending.value}, count
