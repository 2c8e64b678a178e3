"""What is claimed about speed, measured: ``python -m benchmarks`` (see docs/benchmarks.md)."""
