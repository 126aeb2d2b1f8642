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
    ):
        importlib.import_module(name)
gc.collect()
gc.freeze()
