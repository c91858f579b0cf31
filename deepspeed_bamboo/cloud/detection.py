"""Finds out once, in threads and in bounded time, which cloud this is and where its notices come from."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deepspeed_bamboo.cloud import aws, azure, gcp
from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.cloud.notice import UNKNOWN, Identity, MetadataCloud, NoticeSource
from deepspeed_bamboo.cloud.scripted import ScriptedSource, load_script
from deepspeed_bamboo.errors import ConfigError

logger = logging.getLogger(__name__)

CLOUD_VARIABLE = "BAMBOO_CLOUD"
ZONE_VARIABLE = "BAMBOO_ZONE"
NOTICES_VARIABLE = "BAMBOO_NOTICES"
CLOUDS = ("aws", "gcp", "azure")
CHOICES = ("auto", "none", *CLOUDS)

_BUDGET_SECONDS = 1.5
_QUESTION_SECONDS = 0.45  # a token that never comes, then two answers, fit into the budget


@dataclass(frozen=True)
class Surroundings:
    """Where this process runs. ``source``: the source of notices, for a NoticeWatcher; None when there is none."""

    identity: Identity
    source: NoticeSource | None


class Detection:
    """Asks all clouds at once, from the moment it is made; :meth:`result` waits for what is left of the budget.

    ``environment``: BAMBOO_CLOUD (auto, none, aws, gcp, azure) restricts the search, and a cloud named
    there is watched for notices even if it doesn't answer now. BAMBOO_ZONE is the zone. BAMBOO_NOTICES
    (a list or the file with one, see ``scripted``) takes the place of every cloud's notices; no cloud is
    searched then unless BAMBOO_CLOUD names one. Base addresses: BAMBOO_AWS_METADATA, BAMBOO_GCP_METADATA,
    BAMBOO_AZURE_METADATA, else AWS_EC2_METADATA_SERVICE_ENDPOINT and GCE_METADATA_HOST, as other
    programs read them; AWS_EC2_METADATA_DISABLED=true leaves AWS out.
    ``zones``: the setting ``topology.zones``; anything but ``auto`` is the zone and wins over all else.
    Raises ConfigError for values that can't be used; a cloud that is absent, slow or confused is no error.
    """

    def __init__(
        self, environment: Mapping[str, str], *, zones: str = "auto", budget_seconds: float = _BUDGET_SECONDS
    ) -> None:
        self._zone = zones if zones != "auto" else environment.get(ZONE_VARIABLE, "")
        self._budget_seconds = budget_seconds
        self._choice = _choice(environment)
        script = environment.get(NOTICES_VARIABLE, "")
        self._scripted = ScriptedSource(load_script(script)) if script else None
        self._clouds = _clouds(environment, choice=self._choice, scripted=bool(script))
        self._answers: queue.SimpleQueue[tuple[MetadataCloud, Identity | MetadataError]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._result: Surroundings | None = None
        self._lock = threading.Lock()
        self._end_seconds = time.monotonic() + budget_seconds
        for cloud in self._clouds:
            threading.Thread(target=self._ask, args=(cloud,), name=f"bamboo-detect-{cloud.name}", daemon=True).start()

    def result(self) -> Surroundings:
        """The result. Waits until the budget is spent at most; later calls return the same at once."""
        with self._lock:
            if self._result is None:
                self._result = self._collect()
                self._stop.set()
            return self._result

    def _ask(self, cloud: MetadataCloud) -> None:
        try:
            self._answers.put((cloud, cloud.identify(self._stop, timeout_seconds=_QUESTION_SECONDS)))
        except MetadataError as error:
            self._answers.put((cloud, error))
        except Exception as error:  # noqa: BLE001 - whatever a metadata service does, training starts
            self._answers.put((cloud, MetadataError(f"{type(error).__name__}: {error}", answered=True)))

    def _collect(self) -> Surroundings:
        problems: dict[str, MetadataError] = {}
        while len(problems) < len(self._clouds):
            try:
                cloud, answer = self._answers.get(timeout=max(0.0, self._end_seconds - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(answer, Identity):
                identity = replace(answer, zone=self._zone or answer.zone)
                logger.info("this is %s in zone %s (%s)", identity.instance, identity.zone, identity.cloud)
                return Surroundings(identity, self._scripted or cloud)
            problems[cloud.name] = answer
        return self._nothing(problems)

    def _nothing(self, problems: Mapping[str, MetadataError]) -> Surroundings:
        """Nobody said where this is: one line in the log says so."""
        named = self._clouds[0] if self._choice in CLOUDS and self._clouds else None
        source = self._scripted or named
        zone = self._zone or UNKNOWN
        if self._clouds:
            logger.log(
                logging.INFO if self._zone else logging.WARNING,
                "%s; zone %s, notices %s%s",
                self._why(problems),
                zone,
                "off" if source is None else f"from {source.name}",
                "" if self._zone else "; set BAMBOO_ZONE or topology.zones to name the zone",
            )
        return Surroundings(Identity(zone=zone, cloud="none" if named is None else named.name), source)

    def _why(self, problems: Mapping[str, MetadataError]) -> str:
        answered = [f"{name}: {problem}" for name, problem in sorted(problems.items()) if problem.answered]
        names = ", ".join(cloud.name for cloud in self._clouds)
        return "; ".join([f"no metadata service of {names} answered within {self._budget_seconds:g} s", *answered])


def detect(
    environment: Mapping[str, str], *, zones: str = "auto", budget_seconds: float = _BUDGET_SECONDS
) -> Surroundings:
    """A :class:`Detection`, and its result: returns within ``budget_seconds``, whatever the network does."""
    return Detection(environment, zones=zones, budget_seconds=budget_seconds).result()


def _choice(environment: Mapping[str, str]) -> str:
    choice = environment.get(CLOUD_VARIABLE, "") or "auto"
    if choice not in CHOICES:
        raise ConfigError(f"{CLOUD_VARIABLE} is {choice!r}; it must be one of {', '.join(CHOICES)}")
    return choice


def _clouds(environment: Mapping[str, str], *, choice: str, scripted: bool) -> tuple[MetadataCloud, ...]:
    """The clouds to ask."""
    if choice == "none" or (choice == "auto" and scripted):
        return ()
    host = environment.get("GCE_METADATA_HOST", "")
    of_aws = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rstrip("/") or aws.BASE_URL
    of_gcp = f"http://{host}" if host else gcp.BASE_URL
    disabled = environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    clouds: dict[str, MetadataCloud] = {}
    if choice == "aws" or (choice == "auto" and not disabled):
        clouds["aws"] = aws.AwsMetadata(base_url=environment.get("BAMBOO_AWS_METADATA", "") or of_aws)
    if choice in ("auto", "gcp"):
        clouds["gcp"] = gcp.GcpMetadata(base_url=environment.get("BAMBOO_GCP_METADATA", "") or of_gcp)
    if choice in ("auto", "azure"):
        clouds["azure"] = azure.AzureMetadata(base_url=environment.get("BAMBOO_AZURE_METADATA", "") or azure.BASE_URL)
    return tuple(clouds.values())
