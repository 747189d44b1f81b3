"""What GPUs do in a second, as their makers say, and which part of that programs reach.

Peaks, memory and links are those of NVIDIA's data sheets for SXM modules in nodes of eight, each
GPU with a network adapter of its own: A100 with HDR InfiniBand (200 Gbit/s), H100 and later with
NDR (400 Gbit/s). Shares are the planner's own, and are not fitted to any run of Polyad: none has
been timed on a GPU.
"""

from dataclasses import dataclass

PEAKS: dict[str, tuple[float, float, float]] = {
    "v100": (125.0, 15.7, 15.7),
    "a100": (312.0, 19.5, 156.0),
    "h100": (989.0, 67.0, 494.0),
    "h200": (989.0, 67.0, 494.0),
    "b200": (2250.0, 80.0, 1125.0),
}
"""Dense peak rates in TFLOP/s: (bf16, fp32, TF32). A V100 has no TF32, and of the 125 tensor-core
TFLOP/s that are stated for it, fp16 has them."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, and the links to others."""

    name: str
    peaks: tuple[float, float, float]
    """See `PEAKS`."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes a second to and from its memory."""
    node_link: float
    """Bytes a second that it sends to others of its node."""
    network_link: float
    """Bytes a second of its network adapter."""
    processors: int
    """Streaming multiprocessors: tiles of a product that are computed at once."""
    product_share: float = 0.75
    """Share of the peak that large products reach."""
    attention_share: float = 0.5
    """Share of the peak that fused attention reaches (Dao 2023, figures 4 to 6, forward and
    backward at 2,048 tokens)."""
    memory_share: float = 0.85
    """Share of the bandwidth that kernels reach."""
    link_share: float = 0.8
    """Share of the links that NCCL reaches with large messages."""
    kernel_seconds: float = 3e-6
    """The least that an operation takes on the GPU."""
    host_seconds: float = 6e-6
    """That the host needs to issue one: where kernels are shorter, the GPU waits."""
    node_latency: float = 6e-6
    """Latency of a collective within a node, for each doubling of its processes."""
    network_latency: float = 12e-6
    """Latency of a collective that leaves the node, likewise."""
    libraries: int = 2_000_000_000
    """Bytes that CUDA, cuBLAS and NCCL take for themselves."""
    allocator_share: float = 0.05
    """What the allocator keeps beside the tensors, as a share of them."""

    def peak(self, precision: str, *, tf32: bool = False) -> float:
        """FLOP/s of products.

        Args:
            precision: `bf16` or `fp32`.
            tf32: Whether fp32 is multiplied as TF32.
        """
        bf16, fp32, low = self.peaks
        return 1e12 * (bf16 if precision == "bf16" else low if tf32 else fp32)


DEFAULT_DEVICE = "a100-80gb"
"""What a run is planned on unless something else is asked for."""
GB = 1_000_000_000
DEVICES = {
    device.name: device
    for device in (
        Device(
            name="a100-80gb",
            peaks=PEAKS["a100"],
            memory=80 * 2**30,
            bandwidth=2039 * GB,
            node_link=300 * GB,
            network_link=25 * GB,
            processors=108,
        ),
        Device(
            name="h100",
            peaks=PEAKS["h100"],
            memory=80 * 2**30,
            bandwidth=3350 * GB,
            node_link=450 * GB,
            network_link=50 * GB,
            processors=132,
            product_share=0.65,
            attention_share=0.4,
        ),
        Device(
            name="h200",
            peaks=PEAKS["h200"],
            memory=141 * GB,
            bandwidth=4800 * GB,
            node_link=450 * GB,
            network_link=50 * GB,
            processors=132,
            product_share=0.65,
            attention_share=0.4,
        ),
        Device(
            name="b200",
            peaks=PEAKS["b200"],
            memory=180 * GB,
            bandwidth=7700 * GB,
            node_link=900 * GB,
            network_link=50 * GB,
            processors=148,
            product_share=0.65,
            attention_share=0.3,
        ),
    )
}
