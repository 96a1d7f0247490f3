"""Settings of runs, and reporters that end them."""

from dataclasses import replace

import pytest

from fastdp.finetune import Reporter, finetune

RAPFT = {"irrelevance_ratio": 0.6, "allocation": "optimal", "map_after": 1}


def classify(config, files, **settings):
    labelled = str(files / "labels.tsv")
    options = {"task": "classification", "text_column": "sentence", "labels": ["often", "seldom"]}
    return replace(config, train=labelled, eval=labelled, **options, **settings)


def public_inputs(path):
    """Every method that takes public text, with that text at a path."""
    ewft_options = {"layer": 1, "autoencoder": [8]}
    return {
        "rapft": ("rapft", {**RAPFT, "source": {"kind": "public", "data": path, "examples": 6}}),
        "autoencoder": ("ewft", ewft_options | {"public": path}),
        "rehearsal": ("ewft", ewft_options | {"rehearsal": {"public": path}}),
        "codebook": ("ewft", {"noise": "codebook", "public": path}),
        "cti": ("sap", {"eta": 20.0, "duplicates": "merge", "cti": {"public": path, "min_support": 1}}),
        "quotient": ("sap", {"epsilon": 2.0, "cti": {"form": "quotient", "cells": 3, "public": path}}),
    }


class Stopped(BaseException):
    """Ends a run at a place that a test chose, as an interrupt would; pytest takes it for a failure where it is not expected."""


def stop_after(steps, config):
    """End a run like a kill would, after some steps: nothing after the step gets to run."""

    class StopAfter(Reporter):
        def step(self, done, *_):
            if done == steps:
                raise SystemExit

    with pytest.raises(SystemExit):
        finetune(config, reporter=StopAfter())
