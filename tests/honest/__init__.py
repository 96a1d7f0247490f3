"""Ordinary training programs, each with the outcome that its author may expect of `fastdp.make_private`."""
