"""Attacks on the promise that no record moves a release by more than its bound, by public names alone.

Each attack is a short function in `data`, `mistakes`, `files` or `leaks`, registered with one sentence that is true if it
succeeds. It returns how far one record moved what was released, in units of what is allowed, or raises the refusal. `run` runs
them and draws the table of `docs/attacks.md`.
"""
