"""Makes a process seem to be on another host: Python imports this if the folder is on PYTHONPATH.

Nodes of two hosts cannot use unix sockets between them, so they use TCP, with TLS if it is asked for.
"""

import os
import platform

if name := os.environ.get("TASKGRAPH_TEST_HOST"):
    platform.node = lambda: name
