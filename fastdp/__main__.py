"""`python -m fastdp` is the `fastdp` command."""

from fastdp.cli import app

app(prog_name="fastdp")
