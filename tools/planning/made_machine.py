"""Makes a machine of GPUs whose figures ship, and of the rates of its links."""

from __future__ import annotations

from dataclasses import replace

from paro.errors import UserError, about, check_least
from paro.machine.files import find_machine
from paro.machine.machine import (
    BandwidthSource,
    Machine,
    Nic,
    bits_per_second,
    rate_text,
)

# By the name of a GPU the shipped machine whose device it is; it also gives the links' latencies,
# and the bandwidth inside a node.
GPUS = {"a100": "a100-roce400", "a800": "a800-ib800", "h100": "dgx-h100"}


def machine_of_gpus(
    gpu: str, *, world_size: int, gpus_per_node: int, intra: str | None, inter: str | None, nic: Nic
) -> Machine:
    """Make a machine of nodes of one of `GPUS`; rates are of one direction.

    `intra` is of a GPU inside its node (default: as in the shipped machine), `inter` of a NIC. A
    `UserError` names the flag that is wrong or missing.
    """
    check_least(1, gpus_per_node=gpus_per_node)
    if inter is None and world_size > gpus_per_node:
        raise UserError(
            f"--inter is missing: the rate of a NIC, such as 100gbit, since {world_size} ranks are "
            f"more than one node of {gpus_per_node} (--gpus-per-node)"
        )
    shipped = find_machine(GPUS[gpu])
    known = shipped.sources
    sources = {field: known[field] for field in known if not field.endswith(("size", "bandwidth"))}
    links = {"intra": shipped.intra, "inter": shipped.inter}
    for name, given in (("intra", intra), ("inter", inter)):
        field, own = f"links.{name}.bandwidth", links[name]
        assert own is not None, f"{shipped.name} has both links"
        if given is not None:
            with about(f"--{name}: "):
                rate = rate_text(bits_per_second(given))
            links[name] = replace(own, bandwidth=rate, bandwidth_source=BandwidthSource.TYPED)
        sources[field] = known[field] if given is None else f"--{name} {given}"
    machine = Machine(
        name=f"{gpu}-by-{gpus_per_node}" + (f"-{inter}" if inter else ""),
        source=f"made by tools/plan.py --gpu {gpu}; other figures are those of {shipped.name}",
        world_size=gpus_per_node,
        group_size=gpus_per_node,
        nic=nic,
        intra=links["intra"] if gpus_per_node > 1 else None,
        inter=None if inter is None else links["inter"],
        device=shipped.device,
        launch_order=shipped.launch_order,
        sources=sources,
    )
    return machine.for_world(world_size, subject="--gpu")


def described(machine: Machine) -> str:
    """Write in a line the parts of a made machine, and the figure that nobody measured."""
    device = machine.device
    assert device is not None, "it was made of a device"
    whose = "a node's NIC" if machine.nic is Nic.SHARED else "a NIC for each"
    rates = [
        f"{rate_text(link.bits_per_second)} {what}"
        for link, what in ((machine.intra, "inside a node"), (machine.inter, f"by {whose}"))
        if link is not None
    ]
    source = machine.sources["device.sustained_flops"]
    return (
        ", ".join((f"nodes of {machine.group_size} {device.name}", *rates))
        + f"; {device.sustained_flops / 1e12:.0f} TFLOP/s sustained ({source})"
    )
