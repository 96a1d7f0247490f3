"""The commands of `fastdp`, one file a subject; `fastdp.cli` puts them together."""
