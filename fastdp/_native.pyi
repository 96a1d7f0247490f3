from typing import Any

# Built from csrc/; each function's contract stands beside it there and in the fastdp.ops module that calls it.
def __getattr__(name: str) -> Any: ...
