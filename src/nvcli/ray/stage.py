"""`generate`: a stage of a Ray Data pipeline that answers the rows of a dataset.

    import ray
    from nvcli.ray import generate

    ds = ray.data.read_parquet("s3://bucket/questions")
    ds = generate(ds, "Qwen/Qwen3-8B", tp=1, concurrency=8, sampling={"max_tokens": 256})
    ds.write_parquet("s3://bucket/answers")

Ray chooses the machines, moves the blocks, and restarts actors that die; each actor holds one `nvcli.LLM` with its own
GPUs. This module knows Ray but not rows; `nvcli.ray.replica` knows rows but not Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.data

from nvcli.core.config import RunConfig, flag_keys
from nvcli.core.validation import is_integer, show
from nvcli.errors import ConfigError
from nvcli.llm.keywords import read_config
from nvcli.ray.replica import Replica

if TYPE_CHECKING:
    from ray.data import Dataset

BATCH_ROWS = 256
BLOCKS_AT_A_TIME = 2
"""An actor begins another block while the last rows of one are still being answered, so that it never runs empty. Ray
hands it several batches of a block at a time."""


def generate(
    ds: Dataset,
    model: str | Path | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = BATCH_ROWS,
    sampling: Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    num_gpus: float | None = None,
    actor_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Dataset:
    """Return a dataset with the rows of `ds` and their answers, computed when it is read.

    A row of `ds` is a row of nvcli: its columns `prompt`, `messages` or `prompt_token_ids`, `sampling` and
    `chat_template_kwargs` mean what they mean in a file. All columns are kept, and each row gets the columns `choices`,
    `usage` and `error`. A row that cannot be answered has an `error`, and does not fail its task.

    `model`, `tp`, `pp`, `sampling`, `config` and `settings` are those of `nvcli.LLM`. `concurrency` is the number of
    actors, or a pair of minimum and maximum. Each actor reserves `num_gpus` GPUs; None: tp × pp, or none with
    `device="cpu"`. `batch_size` rows are answered together, and `actor_options` are further keywords of
    `Dataset.map_batches`, such as `{"num_cpus": 4, "accelerator_type": "H100"}`. Raises ConfigError. An actor that
    cannot load the model fails the computation.
    """
    flags = {"--tp": tp, "--pp": pp, "--dp": 1}
    if taken := sorted(settings.keys() & {*map(flag_keys().__getitem__, flags), "dp"}):
        raise ConfigError(f"`{taken[0]}` cannot be combined with `tp`, `pp` and `concurrency`; leave it out")
    run = read_config(model, config, flags, settings | ({} if sampling is None else {"sampling": sampling}))
    options = {
        "batch_size": _at_least_one("batch_size", batch_size),
        "compute": _pool(concurrency),
        "num_gpus": _num_gpus(run) if num_gpus is None else num_gpus,
        **(actor_options or {}),
    }
    return ds.map_batches(
        Replica, fn_constructor_args=(run,), batch_format="pyarrow", udf_modifying_row_count=False, **options
    )


def _num_gpus(run: RunConfig) -> int:
    if not isinstance(run.tensor_parallel_size, int):
        raise ConfigError(f"tp={show(run.tensor_parallel_size)}: give a number, because Ray reserves the GPUs")
    return 0 if run.device == "cpu" else run.tensor_parallel_size * run.pipeline_parallel_size


def _pool(concurrency: int | tuple[int, int]) -> ray.data.ActorPoolStrategy:
    least, most = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    if _at_least_one("concurrency", least) > _at_least_one("concurrency", most):
        raise ConfigError(f"concurrency={concurrency}: the minimum is larger than the maximum")
    return ray.data.ActorPoolStrategy(
        min_size=least, max_size=most, initial_size=least, max_concurrent_calls_per_actor=BLOCKS_AT_A_TIME
    )


def _at_least_one(name: str, value: object) -> int:
    if not is_integer(value, 1):
        raise ConfigError(f"{name}={show(value)}: allowed: an integer of at least 1")
    return value
