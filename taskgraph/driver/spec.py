"""Drivers, as a job carries them: a reference (file or module, function), arguments, and a fingerprint of the code.

A node whose code has another fingerprint is refused: two versions of a task must not compute one job.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from taskgraph.driver.loading import DriverRef, check_not_importing, make_job, reference_of
from taskgraph.driver.sources import fingerprint
from taskgraph.errors import DecodeError, FingerprintMismatch, JobError
from taskgraph.settings import Settings
from taskgraph.version import LOCAL_FINGERPRINT, PROTOCOL, VERSION

if TYPE_CHECKING:
    from taskgraph.jobs import Job

__all__ = ["JobSpec"]

_DEFAULTS = Settings()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A submitted job in etcd: all that a node needs to take part.

    Attributes:
        name: the job's name.
        run: a uuid of this submission; an earlier job of the same name has another uuid.
        kwargs: the job function's arguments.
        expected_nodes: the number of nodes that the launcher started: the job begins when all are registered.
        checkpoint, checkpoint_every: as in the job.
        checkpoint_series: counts the starts from epoch 0, to tell older checkpoints from newer ones.
        checkpoint_changed: checkpoints that another version of the driver wrote are used, too.
        services: how many tasks each service has, by its title, in the order of their ids.
        elastic: the job is elastic: it has sums in place of epochs, and one task for its value.
        token_mark: shows whether a token is this job's, without revealing it; "": unknown.
        version, protocol: the versions of the taskgraph that submitted the job.
    """

    name: str
    run: str
    driver: DriverRef | None
    kwargs: dict[str, Any]
    fingerprint: str
    tasks: int
    epochs: int | None
    backups: int
    min_nodes: int
    seed: int
    settings: dict[str, Any]
    expected_nodes: int = 0
    checkpoint: str | None = None
    checkpoint_every: int = 10
    checkpoint_series: int = 1
    checkpoint_changed: bool = False
    services: dict[str, int] = field(default_factory=dict)
    elastic: bool = False
    token_mark: str = ""
    version: str = VERSION
    protocol: int = PROTOCOL

    @classmethod
    def of(cls, job: Job, *, expected_nodes: int = 0, token_mark: str = "") -> JobSpec:
        """Makes the spec of a job; raises JobError if other processes could not make the job."""
        check_not_importing(job.name)
        function, kwargs = job.origin()
        made = cls._make(job, reference_of(function), kwargs, fingerprint(function))
        return dataclasses.replace(made, expected_nodes=expected_nodes, token_mark=token_mark)

    @classmethod
    def local(cls, job: Job) -> JobSpec:
        """Makes the spec of a job that stays in this process: it names no driver, and `load_job` refuses it."""
        check_not_importing(job.name)
        return cls._make(job, None, {}, LOCAL_FINGERPRINT)

    @classmethod
    def _make(cls, job: Job, driver: DriverRef | None, kwargs: dict[str, Any], print_: str) -> JobSpec:
        return cls(
            name=job.name or "job",
            run=uuid.uuid4().hex,
            driver=driver,
            kwargs=kwargs,
            fingerprint=print_,
            tasks=job.all_tasks,
            epochs=job.epochs,
            backups=job.backups,
            min_nodes=job.min_nodes,
            seed=job.seed,
            settings=dataclasses.asdict(job.settings),
            checkpoint=job.checkpoint,
            checkpoint_every=job.checkpoint_every,
            services=job.services,
            elastic=job.elastic is not None,
        )

    @property
    def own_tasks(self) -> int:
        """How many tasks the user asked for, without those of services."""
        return self.tasks - sum(self.services.values())

    @property
    def unit(self) -> str:
        """What the job's checkpoints count: "epoch", or "sum" if the job is elastic."""
        return "sum" if self.elastic else "epoch"

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JobSpec:
        try:
            raw = json.loads(data)
            names = {f.name for f in dataclasses.fields(cls)}
            driver = raw.get("driver")
            known = {k: v for k, v in raw.items() if k in names}
            return cls(**{**known, "driver": DriverRef(**driver) if driver else None})
        except (ValueError, TypeError, AttributeError) as error:
            raise DecodeError(f"not a job's spec: {data[:200]!r} ({error})") from error

    def setting(self, name: str) -> Any:
        """Returns a setting of the job, or its default if the version that submitted the job does not know it."""
        return self.settings.get(name, getattr(_DEFAULTS, name))

    def check_protocol(self) -> None:
        """Raises FingerprintMismatch if the job's nodes speak another protocol than this process."""
        if self.protocol != PROTOCOL:
            raise FingerprintMismatch(
                f"job {self.name!r} was submitted by taskgraph {self.version}, whose nodes speak protocol "
                f"{self.protocol}; taskgraph {VERSION} here speaks {PROTOCOL}. Bring both to the same version, or "
                f"submit the job again"
            )

    def load_job(self) -> Job:
        """Imports the driver and makes the job, as the submitter did.

        Raises:
            JobError: the driver cannot be imported here, or its job function raised.
            FingerprintMismatch: the driver differs from the submitted one.
        """
        self.check_protocol()
        if self.driver is None:
            raise JobError(f"job {self.name!r} lives in the process that made it")
        function = self.driver.load()
        mine = fingerprint(function)
        if mine != self.fingerprint:
            raise FingerprintMismatch(
                f"job {self.name!r} was submitted with driver {self.driver.location} of fingerprint "
                f"{self.fingerprint} (taskgraph {self.version}); here it has {mine} (taskgraph {VERSION}). Bring both "
                f"to the same version, or submit the job again"
            )
        job = make_job(function, self.kwargs)
        if job.all_tasks != self.tasks:
            raise JobError(
                f"job {self.name!r} was submitted with {self.tasks} tasks, but here {function.__name__} makes "
                f"{job.all_tasks}: it must make the same job in every process, from its arguments alone"
            )
        known = {f.name for f in dataclasses.fields(Settings)}
        settings = Settings(**{name: value for name, value in self.settings.items() if name in known})
        return dataclasses.replace(
            job,
            name=self.name,
            epochs=self.epochs,
            backups=self.backups,
            min_nodes=self.min_nodes,
            seed=self.seed,
            checkpoint=self.checkpoint,
            checkpoint_every=self.checkpoint_every,
            settings=settings,
        )
