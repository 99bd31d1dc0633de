"""Generated from proto/taskgraph/v1/control.proto by tools/generate_proto.py."""
