"""The folder of a job on Slurm, on a file system that all machines see. It is the user's alone.

{folder}/job.sbatch      this script
{folder}/token           the job's token
{folder}/tls/            certificates for the job's fixed name, if the user named none
{folder}/run             the id of the run, so that a first element that was requeued submits nothing again
{folder}/arrays          the array jobs, one line for each `sbatch`
{folder}/etcd/, etcd.at  data and address of the job's own etcd, if the user named none
{folder}/logs/           what the elements print, by their numbers; submit.log: of the first one's companion
{folder}/left/           what Slurm said of each element that left in good order
{folder}/result.json     the values; taskgraph/: how the job ended, and its events
{folder}/ended           how the job ended: elements that start later end at once
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Folder"]


@dataclass(frozen=True, slots=True)
class Folder:
    """The paths in a job's folder, as the table above lists them."""

    path: Path

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def tls(self) -> Path:
        return self.path / "tls"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def arrays(self) -> Path:
        return self.path / "arrays"

    @property
    def etcd(self) -> Path:
        return self.path / "etcd"

    @property
    def etcd_at(self) -> Path:
        return self.path / "etcd.at"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def left(self) -> Path:
        return self.path / "left"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def kept(self) -> Path:
        """The runtime directory of the companion, as `Runtime` takes it."""
        return self.path / "taskgraph"

    @property
    def ended(self) -> Path:
        return self.path / "ended"
