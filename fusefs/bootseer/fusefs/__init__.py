"""FUSE operations and the worker process."""
