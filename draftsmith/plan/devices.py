"""Published peaks of the GPUs that a plan can be made for, from the makers' data sheets (dense, without sparsity)."""

from dataclasses import dataclass

from draftsmith.errors import UserError


@dataclass(frozen=True)
class Device:
    """name: as on the command line. flops: bf16 tensor-core FLOP/s. bandwidth: memory bytes/s. memory: bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: float


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100", 312e12, 2.04e12, 80e9),
        Device("h100", 989e12, 3.35e12, 80e9),
        Device("h200", 989e12, 4.8e12, 141e9),
        Device("b200", 2250e12, 8.0e12, 180e9),
        Device("l40s", 362e12, 0.864e12, 48e9),
        Device("rtx4090", 165e12, 1.008e12, 24e9),
        Device("mi300x", 1307e12, 5.3e12, 192e9),
    )
}


def find_device(name: str) -> Device:
    """Return the device of that name. Raises UserError for one that is not in the table."""
    if name.lower() not in DEVICES:
        raise UserError(f"--device {name!r} is not in the table: choose one of {', '.join(DEVICES)}.")
    return DEVICES[name.lower()]
