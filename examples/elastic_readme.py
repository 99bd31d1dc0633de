"""The elastic program of the README: workers that come and go fit a line, and the result has the same bits.

taskgraph run examples/elastic_readme.py --nodes 4
taskgraph run examples/elastic_readme.py --nodes 4 -o passes=3000
"""

import numpy as np

import taskgraph as tg


@tg.elastic
def train(run, rate: float = 0.1, passes: int = 20):
    x = np.random.default_rng(0).normal(size=(2400, 3))
    y = x @ [1.0, 2.0, 3.0]
    s = run.state(theta=np.zeros(3))  # all that later steps read: a worker that joins gets it
    for step in run.steps(rows=len(x), batch=240, parts=24, passes=passes):
        for part in step:  # this worker's parts; the loop ends when the parts of all workers are summed
            part.add(grad=x[part.rows].T @ (x[part.rows] @ s.theta - y[part.rows]))
        s.theta = s.theta - rate * step["grad"] / step.size
        step.report(slope=abs(step["grad"]).max())
    return s.theta


if __name__ == "__main__":
    tg.main(train)
