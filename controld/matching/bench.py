"""One node while a plan is made: what is still free on it, and taking from that."""

from __future__ import annotations

from dataclasses import dataclass, field

from controld.core.capacity import WHOLE_THOUSANDTHS
from controld.core.model import Device, DeviceGrant
from controld.core.spec import DeviceRequest, Resources
from controld.matching.constraints import meets
from controld.matching.port import NodeView, SpareOffer
from virialpb.reasons import Unfit


@dataclass(slots=True)
class Bench:
    """Free CPU, memory, slots and device shares of one node. `take` changes it; `copy` makes a trial."""

    view: NodeView
    cpu_millis: int
    memory_bytes: int
    slots: int
    free_thousandths: dict[str, int] = field(default_factory=dict[str, int])

    @staticmethod
    def of(view: NodeView) -> Bench:
        free = {d.device.key: d.free_thousandths for d in view.devices}
        return Bench(view, view.cpu_free_millis, view.memory_free_bytes, view.slots_free, free)

    def copy(self) -> Bench:
        return Bench(self.view, self.cpu_millis, self.memory_bytes, self.slots, dict(self.free_thousandths))

    def give_back(self, offer: SpareOffer) -> None:
        """Count what this job's own spare holds here as free for it."""
        self.cpu_millis += offer.cpu_millis
        self.memory_bytes += offer.memory_bytes
        self.slots += 1
        for grant in offer.devices:
            if grant.device_key in self.free_thousandths:
                self.free_thousandths[grant.device_key] += grant.share_thousandths

    def lacking(self, need: Resources) -> Unfit | None:
        """The first thing one rank lacks here, or None when it fits."""
        if self.cpu_millis < need.cpu_millis:
            return Unfit.CPU
        if self.memory_bytes < need.memory_bytes:
            return Unfit.MEMORY
        if self.slots < 1:
            return Unfit.SLOTS
        return Unfit.DEVICES if self._choose(need.devices) is None else None

    def take(self, need: Resources) -> tuple[DeviceGrant, ...] | None:
        """Take one rank's needs; None, and nothing taken, when it does not fit."""
        if self.cpu_millis < need.cpu_millis or self.memory_bytes < need.memory_bytes or self.slots < 1:
            return None
        grants = self._choose(need.devices)
        if grants is None:
            return None
        self.cpu_millis -= need.cpu_millis
        self.memory_bytes -= need.memory_bytes
        self.slots -= 1
        for grant in grants:
            self.free_thousandths[grant.device_key] -= grant.share_thousandths
        return grants

    def room(self, need: Resources, limit: int) -> int:
        """How many ranks fit here, counted up to `limit`."""
        trial = self.copy()
        count = 0
        while count < limit and trial.take(need) is not None:
            count += 1
        return count

    def devices_free(self, request: DeviceRequest) -> int:
        """Devices of a request's kind that could serve one unit of it."""
        return len(self._candidates(request, self.free_thousandths))

    def _choose(self, requests: tuple[DeviceRequest, ...]) -> tuple[DeviceGrant, ...] | None:
        if not requests:
            return ()
        free = dict(self.free_thousandths)
        chosen: list[DeviceGrant] = []
        # The pickiest request first: a later, looser one must not be served what only it could have used.
        if len(requests) > 1:
            requests = tuple(sorted(requests, key=lambda r: len(self._candidates(r, free))))
        for request in requests:
            found = self._candidates(request, free)
            if len(found) < request.count:
                return None
            for device in found[: request.count]:
                free[device.key] -= request.share_thousandths
                chosen.append(DeviceGrant(device.key, request.share_thousandths))
        return tuple(sorted(chosen, key=lambda g: g.device_key))

    def _candidates(self, request: DeviceRequest, free: dict[str, int]) -> list[Device]:
        """Devices that could serve `request`: shares from the tightest fit, ties by key."""
        found = [
            d.device
            for d in self.view.devices
            if d.device.kind == request.kind
            and free[d.device.key] >= request.share_thousandths
            and (not request.constraints or meets(_attributes(d.device), request.constraints) is None)
        ]
        if request.share_thousandths < WHOLE_THOUSANDTHS:
            found.sort(key=lambda d: (free[d.key], d.key))
        return found


def _attributes(device: Device) -> dict[str, str | int | bool]:
    attributes: dict[str, str | int | bool] = {"key": device.key, "name": device.name, "vendor_id": device.vendor_id}
    attributes |= dict(device.capacity)
    attributes |= dict(device.attributes)
    return attributes
