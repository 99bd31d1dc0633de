"""The `taskgraph` program, and `python -m taskgraph`."""

import sys


def entry() -> None:
    """Runs the command line and exits. Ctrl-C ends it without a traceback, also while it is still being imported."""
    try:
        from taskgraph.system.signals import obey_sigterm

        obey_sigterm()
        from taskgraph.cli import main, report_threads

        code = main()
        report_threads()
    except KeyboardInterrupt:
        print("taskgraph: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    entry()
