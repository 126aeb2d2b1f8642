"""What processes of `warm_process` find imported: the slow imports of the command, its engines and its ranks."""

from __future__ import annotations

import gc
import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in (
        "pytest",  # which each process of multiprocessing imports as its main module
        "transformers.models.auto.tokenization_auto",
        "nvcli.cli.main",
        "nvcli.job.run.generate",
        "nvcli.engine.engine_process",
        "nvcli.worker.executor.worker",
        "nvcli.worker.runner.model_runner",
        # What these import when they first need it, which is in each copy.
        "pydantic.type_adapter",
        "zoneinfo",
        "importlib.readers",
        "encodings.unicode_escape",
        "numpy.ma",
        "llguidance",
        "nvcli.core.config_source",
        "nvcli.demo",
        "nvcli.job.run.engine_ahead",
        "nvcli.models.linear_methods",
        "nvcli.models.linear_methods",
        "nvcli.attention.torch_segments",
    ):
        importlib.import_module(name)
gc.collect()
gc.freeze()
