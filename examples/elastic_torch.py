"""A convolutional network learns to read digits: a PyTorch loop whose workers come and go.

The images are scikit-learn's: 1,797 handwritten digits of 8 x 8 pixels. The loop has what training loops have: a
learning rate with a schedule, dropout, clipped gradients, and an evaluation after each pass, whose images are dealt to
the workers by `run.map`. All that later steps rest on is named in `run.state`.

    pip install 'taskgraph-aio[embedded,examples,torch]'
    taskgraph run examples/elastic_torch.py --nodes 4
    taskgraph run examples/elastic_torch.py --nodes 4 -o passes=100   # time to kill something
    python examples/elastic_torch.py run --nodes 0

With `checkpoint`, the network and all else in `run.state` are kept in a directory, and another run goes on from there,
on any number of workers:

    taskgraph run examples/elastic_torch.py --nodes 4 -o checkpoint=file:///tmp/digits
    taskgraph run examples/elastic_torch.py --nodes 2 -o checkpoint=file:///tmp/digits --resume

The result has the share of the test images that are read correctly, and the checksum of all bits of the network. It is
the same on any number of workers, whatever is killed, and whoever joins.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

import taskgraph as tg

try:
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install 'taskgraph-aio[examples,torch]'") from error

TEST = 360
"""The last images are for the evaluation only."""


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images, float32, shape (1797, 1, 8, 8), and the digit on each, int64, shape (1797,)."""
    loaded = load_digits()
    return torch.tensor(loaded.images[:, None] / 16, dtype=torch.float32), torch.tensor(loaded.target)


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 10)),
    )


@tg.elastic(checkpoint_every_s=10)
def read_digits(run: tg.Run, passes: int = 8, rate: float = 0.1, checkpoint: str | None = None) -> dict[str, Any]:
    """Trains the network.

    Args:
        passes: over all images but those of the evaluation
        rate: learning rate in the beginning; it follows half a cosine to 0
        checkpoint: where checkpoints are kept, one every 10 s: file:///... or any URL that fsspec opens
    """
    images, labels = digits()
    steps = run.steps(rows=len(images) - TEST, batch=48, parts=12, passes=passes)
    model = network()
    opt = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(steps))
    s = run.state(model=model, opt=opt, schedule=schedule, best=0.0)

    def right(rows: Any) -> int:
        """How many of these images are read correctly."""
        model.eval()
        with torch.no_grad():
            return int((model(images[rows]).argmax(1) == labels[rows]).sum())

    tests = np.array_split(np.arange(len(images) - TEST, len(images)), 6)
    for step in steps:
        for part in step:
            part.backward(F.cross_entropy(model(images[part.rows]), labels[part.rows]))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        schedule.step()
        step.report(loss=step.loss, norm=norm)
        if step.ends_pass:
            accuracy = sum(run.map(right, tests)) / TEST
            s.best = max(s.best, accuracy)
            step.report(accuracy=accuracy)
    return {"best accuracy": s.best, "checksum": checksum(model)}


def checksum(model: nn.Module) -> str:
    """A checksum of all bits of a model."""
    return f"{zlib.crc32(b''.join(tensor.numpy().tobytes() for tensor in model.state_dict().values())):08x}"


if __name__ == "__main__":
    tg.main(read_digits)
