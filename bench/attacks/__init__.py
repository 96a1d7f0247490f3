"""Attacks on the promise that no record moves a release by more than its bound: one script an attack, by public names alone.

Each script's first line says what it shows when it succeeds. `attack(system)` returns how far one record moved what the
system released, in units of what it allows (1.00), or raises what the system refused it with. `run` finds the scripts, runs
them against every installed system, and draws the table of `docs/attacks.md`.
"""
