"""Two processes on one GPU: decode steps here beside prompts in the other, and KV handover beside
decode steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.gpu.engine_speed import inter_token, load_model, step_times
from bench.gpu.kv_speed import hand_over
from bench.gpu.load_process import beside
from bench.gpu.setting import Result, Setting


def _split(setting: Setting) -> Result:
    """Decode steps of 32 sequences beside another process's prompts, without KV handover."""
    model = load_model(setting, 48_000)
    batch = model.batch(setting.pick(32, 1), setting.pick(1023, 9), 1)
    step_times(model, batch, setting.pick(20, 1))
    with beside("prefill", setting) as end:
        times = step_times(model, batch, setting.pick(300, 1))
        prefill_tokens_per_s = end()
    return inter_token(times, prefill_tokens_per_s)


def _hand_over_beside_decoding(setting: Setting) -> Result:
    """See kv_speed.hand_over; decode_tokens_per_s: rate of the decoding process beside it."""
    with beside("decode", setting) as end:
        found = hand_over(setting)
        return {**found, "decode_tokens_per_s": end()}


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "mixed load, two processes": _split,
    "cuda_ipc 8K tokens, beside decoding": _hand_over_beside_decoding,
}
