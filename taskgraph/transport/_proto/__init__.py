"""Generated from `proto/taskgraph/v1/frame.proto` by `tools/generate_proto.py`: do not edit."""
