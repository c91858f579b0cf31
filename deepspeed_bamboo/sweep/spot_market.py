"""Amazon's side of a fleet, on this machine: EC2 as moto plays it, and a metadata service for each of its instances.

The fleet is made, listed and ended by `ds_bamboo fleet`'s own code. moto takes no instance by itself and replaces none,
so that is done here, as a fleet of type `maintain` does it. Needs moto and boto3, which are imported when it is made.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from deepspeed_bamboo.cloud.fleet import ec2_client
from deepspeed_bamboo.cloud.fleet_control import FleetControl
from deepspeed_bamboo.cloud.fleet_spec import parse_fleet_spec
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.testing.fake_aws import Tokens, as_aws
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata

_NAME, _REGION, _TYPE = "trace", "us-east-1", "g4dn.xlarge"
_IMAGE = "ami-12c6146b"  # one of moto's, as is the price of this type
_POLL_SECONDS = 0.2
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class SpotMarket:
    """A fleet of spot machines. Use as a context manager, which ends the fleet. Raises BambooError without moto."""

    def __init__(self, *, machines: int) -> None:
        """A fleet that wants so many; there is none before the ``with`` block."""
        try:
            from moto.core import DEFAULT_ACCOUNT_ID
            from moto.ec2 import ec2_backends
            from moto.server import ThreadedMotoServer
        except ImportError as error:
            raise BambooError(
                f"moto plays the cloud here, and can't be imported ({error}); pip install 'moto[server]' boto3"
            ) from error
        self._wanted = machines
        self._backend: Any = ec2_backends[DEFAULT_ACCOUNT_ID][_REGION]
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._services: dict[str, tuple[FakeMetadata, Tokens]] = {}
        self._open = ExitStack()
        self._ec2: Any = None
        self._control: FleetControl | None = None
        self._fleet = ""

    def __enter__(self) -> SpotMarket:
        for name in _CREDENTIALS:
            os.environ.setdefault(name, "moto")
        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # which has a line for every call
        self._server.start()
        self._open.callback(self._server.stop)
        host, port = self._server.get_host_and_port()
        self._ec2 = ec2_client(region=_REGION, endpoint_url=f"http://{host}:{port}")
        self._control = FleetControl(self._ec2)
        subnet = self._ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        spec = {"name": _NAME, "machines": self._wanted, "instance_types": [_TYPE], "subnets": [subnet]}
        self._fleet = self._control.up(parse_fleet_spec({**spec, "image_id": _IMAGE, "command": "true"}, where=_NAME))
        self._open.callback(lambda: self.control.down(_NAME))
        self._serve()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def control(self) -> FleetControl:
        """What `ds_bamboo fleet` uses. Raises BambooError outside the ``with`` block."""
        if self._control is None:
            raise BambooError("the fleet is there in the with block alone")
        return self._control

    @property
    def instances(self) -> tuple[str, ...]:
        """All that were ever granted, in order."""
        return tuple(self._services)

    @property
    def dollars_per_hour(self) -> float:
        """Of one machine."""
        status = self.control.status(_NAME)
        return status.dollars_per_hour / status.running

    def notices(self, instance: str) -> Mapping[str, Any]:
        """The section "notices" of an instance: where its metadata service is."""
        return {"source": "aws", "base_url": self._services[instance][0].url, "poll_seconds": _POLL_SECONDS}

    def grant(self) -> str:
        """One more machine for the fleet, which wants it; its id."""
        self._backend.fleets[self._fleet].create_spot_requests(1)
        (instance,) = self._serve()
        return instance

    def notice(self, instance: str, *, seconds: float) -> None:
        """Tell an instance that it is taken so much later."""
        self._services[instance][1].take(after_seconds=seconds)

    def take(self, instance: str) -> None:
        """The instance is gone, and is billed no more."""
        self._ec2.terminate_instances(InstanceIds=[instance])

    def dollars_at(self, moment: float) -> float:
        """What the fleet had cost at ``moment`` (time.time()), since when nobody has come or gone."""
        status = self.control.status(_NAME)
        return status.dollars_so_far - status.dollars_per_hour * (time.time() - moment) / 3600.0

    def _serve(self) -> list[str]:
        """A metadata service for each instance that has none; these instances."""
        zones = {one.instance: one.zone for one in self.control.status(_NAME).machines if one.state == "running"}
        new = [instance for instance in zones if instance not in self._services]
        for instance in new:
            fake = self._open.enter_context(FakeMetadata())
            self._services[instance] = fake, as_aws(fake, instance=instance, zone=zones[instance])
        return new
