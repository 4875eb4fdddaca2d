"""Data sheets of devices.

Rates are peaks per second, dense (without sparsity). Links are one direction of one device:
`link_bytes_per_s` between devices of one host, `host_bytes_per_s` to the host's memory. Sources are
NVIDIA's data sheets; memory is what nvidia-smi reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from baton.errors import ConfigError

_GB, _TB, _TERA, _MIB = 1e9, 1e12, 1e12, 1 << 20
#: Seconds of one small exchange between GPUs: NCCL's latency within a host, rounded. Assumed.
_NCCL_LATENCY_S = 10e-6
#: Rows of the largest batch that counts as a decode step's.
FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds that a forward takes besides reading and products. step_s: once; sequence_s: for each
    sequence after the first; layer_s: for a layer; exchange_s: for an exchange of ranks that share
    the layer, which call its operations one by one and wait for each other."""

    step_s: float = 0.0
    sequence_s: float = 0.0
    layer_s: float = 0.0
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    kind: "cuda" or "cpu". flops_per_s: by type of the products' inputs. link_latency_s: of one
    exchange. adds_up: whether reading and computing take their sum; else the longer of both, as
    where loads run ahead of products. few_rows_share: of the peak, that products of at most
    FEW_ROWS rows reach. attention_flops_per_s: of attention, by one new token of a sequence and by
    many; None: as products. hosts: by tensor parallel degree, as far as measured. source: of the
    figures.
    """

    name: str
    kind: str
    memory_bytes: int
    read_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link_bytes_per_s: float
    host_bytes_per_s: float
    link_latency_s: float
    source: str
    adds_up: bool = False
    few_rows_share: float = 1.0
    attention_flops_per_s: tuple[float, float] | None = None
    hosts: Mapping[int, HostCosts] = field(default_factory=dict)

    def host(self, num_ranks: int) -> HostCosts:
        """Costs of the host with so many tensor parallel ranks, or with most of those measured."""
        nearest = max((size for size in self.hosts if size <= num_ranks), default=0)
        return self.hosts.get(nearest, HostCosts(exchange_s=self.link_latency_s))

    def peak(self, dtype: str, num_rows: int) -> float:
        """Operations per second in products of num_rows rows of this type, or of the 16-bit one
        that it is widened to."""
        peak = self.flops_per_s.get(dtype) or self.flops_per_s["bfloat16"]
        return peak * (self.few_rows_share if num_rows <= FEW_ROWS else 1.0)

    def attention_peak(self, dtype: str, num_rows: int, num_new: int) -> float:
        """Operations per second in attention of num_rows rows, num_new of each sequence."""
        if self.attention_flops_per_s is None:
            return self.peak(dtype, num_rows)
        return self.attention_flops_per_s[num_new > 1]

    @property
    def has_float8(self) -> bool:
        return "fp8" in self.flops_per_s


def _gpu(
    name: str,
    *,
    mib: int,
    read: float,
    flops: float,
    float32: float,
    float8: float | None,
    link: float,
    host: float,
    source: str,
) -> Device:
    peaks = {"bfloat16": flops, "float16": flops, "float32": float32}
    if float8 is not None:
        peaks["fp8"] = float8
    return Device(
        name,
        "cuda",
        mib * _MIB,
        read,
        MappingProxyType({dtype: peak * _TERA for dtype, peak in peaks.items()}),
        link * _GB,
        host * _GB,
        _NCCL_LATENCY_S,
        source,
    )


_GPUS = (
    _gpu(
        "b200",
        mib=183_359,
        read=8.0 * _TB,
        flops=2250,
        float32=75,
        float8=4500,
        link=900,
        host=64,
        source="NVIDIA DGX B200 data sheet, an eighth of it; NVLink 5, PCIe 5 x16",
    ),
    _gpu(
        "h200",
        mib=143_771,
        read=4.8 * _TB,
        flops=989,
        float32=67,
        float8=1979,
        link=450,
        host=64,
        source="NVIDIA H200 data sheet, SXM; NVLink 4, PCIe 5 x16",
    ),
    _gpu(
        "h100",
        mib=81_559,
        read=3.35 * _TB,
        flops=989,
        float32=67,
        float8=1979,
        link=450,
        host=64,
        source="NVIDIA H100 data sheet, SXM; NVLink 4, PCIe 5 x16",
    ),
    _gpu(
        "a100",
        mib=81_920,
        read=2.039 * _TB,
        flops=312,
        float32=19.5,
        float8=None,
        link=300,
        host=32,
        source="NVIDIA A100 data sheet, SXM 80 GB; NVLink 3, PCIe 4 x16",
    ),
    _gpu(
        "a100-40gb",
        mib=40_960,
        read=1.555 * _TB,
        flops=312,
        float32=19.5,
        float8=None,
        link=300,
        host=32,
        source="NVIDIA A100 data sheet, SXM 40 GB; NVLink 3, PCIe 4 x16",
    ),
    _gpu(
        "l40s",
        mib=46_068,
        read=0.864 * _TB,
        flops=362,
        float32=91.6,
        float8=733,
        link=32,
        host=32,
        source="NVIDIA L40S data sheet; no NVLink, PCIe 4 x16",
    ),
    _gpu(
        "l4",
        mib=23_034,
        read=0.3 * _TB,
        flops=121,
        float32=30.3,
        float8=242,
        link=32,
        host=32,
        source="NVIDIA L4 data sheet; no NVLink, PCIe 4 x16",
    ),
)
DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _GPUS})
#: The device that is measured, not looked up.
THIS_CPU = "cpu"


def find_device(name: str) -> Device:
    """The device of this name. Raises ConfigError."""
    if name not in DEVICES:
        raise ConfigError.of("gpu", name, f"use one of {', '.join((*DEVICES, THIS_CPU))}")
    return DEVICES[name]
