"""Whose KV a sequence may find: that of its own tenant and its own adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.config import DecodeOptions, ServeOptions
from baton.config.load import build_options
from baton.errors import ConfigError
from baton.types import Sampling, SequenceSpec, Slo, tenant_of
from baton.wire import sequence_from_proto, sequence_to_proto
from engine.oracle import OracleEngine, OracleOptions
from worker_core.sequence_rules import refusal

PLAIN = SequenceSpec("r", (1, 2, 3), Sampling())


def test_tenants_and_adapters_have_keys_of_their_own() -> None:
    """An adapter's name is no salt, whatever salts there are."""
    tenants = [b"", tenant_of("red"), tenant_of("blue")]
    adapters = ["", "red", "blue"]
    keys = {
        replace(PLAIN, tenant=tenant, adapter=adapter).prefix_key
        for tenant in tenants
        for adapter in adapters
    }
    assert len(keys) == len(tenants) * len(adapters)
    assert {replace(PLAIN, tenant=tenant).prefix_key for tenant in tenants} == set(tenants)


def test_the_adapter_goes_where_the_sequence_goes() -> None:
    spec = replace(PLAIN, adapter="red", num_choices=2)
    assert sequence_from_proto(sequence_to_proto(spec)) == spec
    assert spec.choice_alone(1, (5,)).adapter == "red"


@pytest.mark.parametrize("slo", [None, Slo(0.3), Slo(None, 0.03), Slo(0.3, 0.03)])
def test_so_do_the_targets_of_its_class(slo: Slo | None) -> None:
    assert sequence_from_proto(sequence_to_proto(replace(PLAIN, slo=slo))).slo == slo


def test_a_worker_without_the_adapter_refuses_the_sequence() -> None:
    spec = replace(PLAIN, adapter="red")
    with_it = OracleEngine(OracleOptions(num_blocks=4, adapters=("red",))).spec
    without = OracleEngine(OracleOptions(num_blocks=4)).spec
    assert refusal(spec, with_it) is None
    assert "adapter: 'red' is not loaded" in str(refusal(spec, without))


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ("red", "'red' is no adapter; give NAME=PATH"),
        ("=path", "'=path' is no adapter"),
        ("red=", "'red=' is no adapter"),
        ("red=a,red=b", "give each name once"),
        ("m=a", "'m' is the model's own name"),
    ],
)
def test_modules_that_name_nothing_are_refused(modules: str, text: str) -> None:
    with pytest.raises(ConfigError, match="--lora-modules") as caught:
        build_options(DecodeOptions, {"model": "m", "lora_modules": modules})
    assert text in str(caught.value)


def test_an_alias_is_no_adapter() -> None:
    values = {"model": "m", "lora_modules": "red=a", "served_model_aliases": "red"}
    with pytest.raises(ConfigError, match="one of --served-model-aliases"):
        build_options(ServeOptions, values)
    options = build_options(ServeOptions, {"model": "m", "lora_modules": ["red=a", "blue=b=c"]})
    assert options.adapter_paths == {"red": "a", "blue": "b=c"}
