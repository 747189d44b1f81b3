"""Peak rates of GPUs from data sheets, and the fractions that programs reach.

Peaks, memory and links are from NVIDIA's data sheets for SXM modules in nodes of eight, each GPU
with its own network adapter: A100 with HDR InfiniBand (200 Gbit/s), H100 and later with NDR (400
Gbit/s). The fractions are the planner's own estimates, not fitted to any run of Polyad: none has
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
"""Dense peak rates in TFLOP/s: (bf16, fp32, TF32). A V100 has no TF32, and reaches the 125
tensor-core TFLOP/s in its data sheet only in fp16."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU and its links to others."""

    name: str
    peaks: tuple[float, float, float]
    """See `PEAKS`."""
    memory: int
    """Size of its memory, in bytes."""
    bandwidth: float
    """Memory bandwidth, in bytes per second."""
    node_link: float
    """Bandwidth to other GPUs of its node, in bytes sent per second."""
    network_link: float
    """Bandwidth of its network adapter, in bytes per second."""
    processors: int
    """Number of streaming multiprocessors: tiles of a product that are computed at a time."""
    product_share: float = 0.75
    """Fraction of the peak that large products reach."""
    attention_share: float = 0.5
    """Fraction of the peak that fused attention reaches (Dao 2023, figures 4 to 6, forward and
    backward at 2,048 tokens)."""
    memory_share: float = 0.85
    """Fraction of the memory bandwidth that kernels reach."""
    link_share: float = 0.8
    """Fraction of the link bandwidth that NCCL reaches with large messages."""
    kernel_seconds: float = 3e-6
    """Minimum duration of an operation on the GPU."""
    host_seconds: float = 6e-6
    """CPU time to launch an operation: if kernels are shorter, the GPU waits."""
    node_latency: float = 6e-6
    """Latency of a collective within a node, per doubling of its ranks."""
    network_latency: float = 12e-6
    """Latency of a collective across nodes, per doubling of its ranks."""
    libraries: int = 2_000_000_000
    """Memory used by CUDA, cuBLAS and NCCL themselves, in bytes."""
    allocator_share: float = 0.05
    """Overhead of the allocator, as a fraction of the tensors."""

    def peak(self, precision: str, *, tf32: bool = False) -> float:
        """Returns the peak rate of products in FLOP/s.

        Args:
            precision: `bf16` or `fp32`.
            tf32: Whether fp32 products use TF32.
        """
        bf16, fp32, low = self.peaks
        return 1e12 * (bf16 if precision == "bf16" else low if tf32 else fp32)


DEFAULT_DEVICE = "a100-80gb"
"""The device of a plan unless another is given."""
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
