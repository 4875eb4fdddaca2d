"""Between the immutable values of baton.types and baton.events and the protobuf messages of
baton.v1."""

from baton.wire.layouts import layout_from_proto, layout_to_proto
from baton.wire.numerics import numerics_from_proto, numerics_to_proto
from baton.wire.sequences import (
    logprobs_from_proto,
    logprobs_to_proto,
    sample_from_proto,
    sample_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    sequence_from_proto,
    sequence_to_proto,
)
from baton.wire.steps import step_from_proto, step_to_proto
from baton.wire.workers import info_from_proto, info_to_proto, load_from_proto, load_to_proto

__all__ = [
    "info_from_proto",
    "info_to_proto",
    "layout_from_proto",
    "layout_to_proto",
    "load_from_proto",
    "load_to_proto",
    "logprobs_from_proto",
    "logprobs_to_proto",
    "numerics_from_proto",
    "numerics_to_proto",
    "sample_from_proto",
    "sample_to_proto",
    "sampling_from_proto",
    "sampling_to_proto",
    "sequence_from_proto",
    "sequence_to_proto",
    "step_from_proto",
    "step_to_proto",
]
