# An image with taskgraph, for nodes and launchers on Kubernetes. Build it in this directory:
#
#   docker build -t registry.example/taskgraph .
#
# Yours has your driver, too, and what it imports:
#
#   FROM registry.example/taskgraph
#   USER root
#   RUN pip install scikit-learn
#   USER 10001:10001
#   COPY fit.py /srv/fit/
#   WORKDIR /srv/fit

FROM python:3.13-slim AS build
RUN python -m venv /opt/taskgraph
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY taskgraph ./taskgraph
# `kubernetes`: the launcher tells why pods went, and ends the nodes. `checkpoint`: checkpoints elsewhere than in a directory.
RUN /opt/taskgraph/bin/pip install --no-cache-dir '.[kubernetes,checkpoint]'

FROM python:3.13-slim
# tini waits for processes that outlive their parents. Pods that taskgraph makes do so by shareProcessNamespace.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/taskgraph /opt/taskgraph
# Any user id works: some clusters choose one. Nobody but root can change the installed code.
ENV PATH=/opt/taskgraph/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
WORKDIR /srv/job
ENTRYPOINT ["tini", "--", "taskgraph"]
CMD ["--help"]
