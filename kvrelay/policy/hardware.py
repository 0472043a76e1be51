"""What is believed of a machine and a model before anything was measured. It must never be needed afterwards."""

from __future__ import annotations

from kvrelay.types import DTYPE_BYTES, PageFormat, Value

FLOPS_SHARE = 0.5
"""Share of the peak that a prefill reaches: 40 to 60 % are usual."""
BANDWIDTH_SHARE = 0.7
"""Share of the memory's peak bandwidth that a decode step reaches."""
STEP_S = 0.004
"""What an engine's step costs however small it is: scheduling, launches, sampling. vLLM: 2 to 6 ms."""
GROUPED_HEADS = 4
"""Query heads per KV head when only the KV's shape is known: 3 in SmolLM2, 4 in Llama 8B, 8 in Llama 70B."""


class Hardware(Value, frozen=True, kw_only=True):
    """Peaks of one device."""

    flops_per_s: float
    """Dense, bf16."""
    memory_bytes_per_s: float


DEVICES = {
    "A100": Hardware(flops_per_s=312e12, memory_bytes_per_s=2.04e12),
    "H100": Hardware(flops_per_s=989e12, memory_bytes_per_s=3.35e12),
    "H200": Hardware(flops_per_s=989e12, memory_bytes_per_s=4.8e12),
    "B200": Hardware(flops_per_s=2250e12, memory_bytes_per_s=7.7e12),
    "L40S": Hardware(flops_per_s=362e12, memory_bytes_per_s=0.864e12),
    "MI300X": Hardware(flops_per_s=1307e12, memory_bytes_per_s=5.3e12),
    "cpu": Hardware(flops_per_s=2e11, memory_bytes_per_s=1.5e10),
}
"""Vendors' data sheets. cpu: one core with AVX-512, where vLLM reads 380 tokens/s of a model of 135 M parameters."""
UNKNOWN_DEVICE = DEVICES["cpu"]
"""The slowest entry: a worker that is underrated is soon measured to be fast; one that is overrated attracts all
requests."""


def hardware_of(device: str) -> Hardware:
    """The peaks of ``device``, e.g. ``NVIDIA H100 80GB HBM3``."""
    return next((peaks for name, peaks in DEVICES.items() if name.lower() in device.lower()), UNKNOWN_DEVICE)


class ModelShape(Value, frozen=True, kw_only=True):
    """What decides how long a model computes."""

    parameters: int
    """Parameters that one token uses: of a mixture of experts, the active ones."""
    layers: int
    hidden: int
    kv_token_bytes: int
    """KV of one token, all layers."""
    weight_bytes: int

    @property
    def token_flops(self) -> float:
        """Floating-point operations per token, attention left out."""
        return 2.0 * self.parameters

    @property
    def attention_flops(self) -> float:
        """Operations per pair of a token and one before it: scores and their sum over V, a multiply and an add each."""
        return 4.0 * self.layers * self.hidden


def shape_of(page: PageFormat) -> ModelShape:
    """A guess from the KV's shape alone: a dense transformer has about ``12 * layers * hidden**2`` parameters."""
    hidden = GROUPED_HEADS * page.kv_heads * page.head_dim
    parameters = 12 * page.layers * hidden**2
    return ModelShape(
        parameters=parameters,
        layers=page.layers,
        hidden=hidden,
        kv_token_bytes=page.layers * page.token_layer_bytes,
        weight_bytes=parameters * DTYPE_BYTES[page.dtype],
    )
