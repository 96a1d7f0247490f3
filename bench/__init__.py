"""Benchmarks, one command each (`fastdp bench ...`); installed as `fastdp.bench`. Committed figures are in `results/`."""
