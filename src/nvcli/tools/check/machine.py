"""The GPUs that a job is estimated for, whether the model fits them, and how long the job takes there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nvcli.core.system.host_memory import available_ram
from nvcli.core.system.nvidia_smi import SmiGpu, visible_gpus
from nvcli.errors import CapacityError, ConfigError
from nvcli.job.planning.job_time import Lengths, is_known_gpu
from nvcli.job.planning.layout import Layout, choose_layout, estimate_layout, layout_as_given
from nvcli.job.run.plan import MANY_REQUESTS, QUICKLY_READ_BYTES
from nvcli.job.run.resolve import ResolvedJob
from nvcli.sizing.adapters import adapter_memory
from nvcli.sizing.memory import planned_adapters
from nvcli.sizing.ram import check_ram
from nvcli.tools.check.tally import Tally

_MIB = 1 << 20
GPUS = {
    "b200": ("NVIDIA B200", 183_359 * _MIB, (10, 0)),
    "h200": ("NVIDIA H200", 143_771 * _MIB, (9, 0)),
    "h100": ("NVIDIA H100 80GB HBM3", 81_559 * _MIB, (9, 0)),
    "a100": ("NVIDIA A100-SXM4-80GB", 81_920 * _MIB, (8, 0)),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 40_960 * _MIB, (8, 0)),
    "l40s": ("NVIDIA L40S", 46_068 * _MIB, (8, 9)),
}
"""GPUs that can be named: name, bytes of memory and compute capability, as nvidia-smi reports them."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and how the model runs on the GPUs."""

    gpus: list[str]
    """Names of the GPUs; empty: a CPU, or unknown GPUs."""
    fits: bool | None
    """Whether the model fits; None: unknown."""
    note: str
    """The layout and its reason, or why the model does not fit or this is unknown."""
    adapters_at_once: int = 0
    """LoRA adapters of rows on each device at a time; 0: there are none, or it is unknown."""
    adapter_bytes: int = 0
    """Memory that they take on each device."""
    kv_tokens: int = 0
    """Tokens that the KV cache of each copy of the model holds; 0: unknown."""
    speed_is_guessed: bool = False
    """Whether the speed of one of these GPUs is unknown."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and time of a job, for an expected answer length."""

    answer_tokens: int | None
    """Expected answer length; None: every answer runs to its limit."""
    generated_tokens: int
    seconds: float | None
    """Time once the model is loaded; None: unknown."""


def named_gpus(kind: str | None, count: int | None) -> list[SmiGpu] | None:
    """Return idle GPUs of the kind that the user named; None: none was named. Raises ConfigError."""
    if kind is None:
        if count is not None:
            raise ConfigError(f"--gpus {count} needs the kind of the GPUs: --gpu {'|'.join(GPUS)}")
        return None
    known = GPUS.get(kind.lower())
    if known is None:
        raise ConfigError(f"--gpu {kind} is unknown; known: {', '.join(GPUS)}")
    name, total_bytes, capability = known
    return [
        SmiGpu(index=index, uuid=f"{kind}-{index}", name=name, total_bytes=total_bytes, capability=capability)
        for index in range(count or 1)
    ]


def estimate_job(
    job: ResolvedJob, tally: Tally, *, gpus: Sequence[SmiGpu] | None, answer_tokens: int, num_bytes: int | None
) -> tuple[Machine, list[Forecast]]:
    """Estimate a job on `gpus`, or on those of this machine if None.

    Makes a forecast for answers of `answer_tokens`, and one for answers that all run to their limits. `num_bytes` is
    the size of the inputs; None: unknown. Raises ConfigError if the job asks for more GPUs than there are.
    """
    found: Sequence[SmiGpu] | str = (
        gpus or "no GPU is used here; estimate for other GPUs with --gpu, such as --gpu h200"
    )
    if gpus is None and job.config.device == "cuda":
        found = visible_gpus()
    if isinstance(found, str):
        return _machine_without_gpus(job, found), _forecasts(job, tally, answer_tokens, None, ())
    num_requests = sum(tally.answers.values())
    enough = job.config.max_num_seqs * MANY_REQUESTS
    is_counted = num_bytes is not None and num_bytes <= QUICKLY_READ_BYTES and num_requests < enough
    names = [gpu.name for gpu in found]
    try:
        layout = choose_layout(
            found,
            job.model,
            job.config,
            num_requests=max(1, num_requests) if is_counted else None,
            tensor_parallel_size=job.run.tensor_parallel_size,
            data_parallel_size=job.run.data_parallel_size,
        )
    except CapacityError as error:
        machine = Machine(gpus=names, fits=False, note=str(error))
        return machine, _forecasts(job, tally, answer_tokens, None, found)
    shortest = Lengths(prompt=1, computed=1, answer=1)
    room = estimate_layout(layout, found, job.model, job.config, num_requests=1, lengths=shortest)
    smallest = min(found[index].total_bytes for index in layout.gpus or range(layout.num_ranks))
    adapters = planned_adapters(layout.apply(job.config), job.model, smallest)
    machine = Machine(
        gpus=names,
        fits=room.num_tokens > 0 or None,
        note=layout.why,
        adapters_at_once=adapters.num_places,
        adapter_bytes=adapters.device_bytes,
        kv_tokens=room.num_tokens,
        speed_is_guessed=not all(map(is_known_gpu, names)),
    )
    return machine, _forecasts(job, tally, answer_tokens, layout, found)


def _machine_without_gpus(job: ResolvedJob, note: str) -> Machine:
    """Check whether the model fits into RAM. With `device: auto` the job may run on another machine."""
    if job.config.device != "cpu":
        return Machine(gpus=[], fits=None, note=note)
    try:
        num_replicas = layout_as_given(job.run).data_parallel_size
        check_ram(job.config, job.model, num_replicas=num_replicas, available=available_ram())
    except CapacityError as error:
        fits = False if job.run.device == "cpu" else None
        return Machine(gpus=[], fits=fits, note=f"{note}. On this CPU: {error}")
    adapters = adapter_memory(job.config, job.model, None)
    return Machine(
        gpus=[], fits=True, note=note, adapters_at_once=adapters.num_places, adapter_bytes=adapters.device_bytes
    )


def _forecasts(
    job: ResolvedJob, tally: Tally, answer_tokens: int, layout: Layout | None, gpus: Sequence[SmiGpu]
) -> list[Forecast]:
    num_requests = sum(tally.answers.values())
    forecasts: list[Forecast] = []
    for expected in (answer_tokens, None):
        generated = tally.answer_tokens(expected)
        if forecasts and forecasts[-1].generated_tokens == generated:
            forecasts.pop()  # no answer may be longer: the forecast at the limit says more
        seconds = None
        if layout is not None and num_requests:
            lengths = Lengths(
                prompt=tally.computed_prompt_tokens / tally.computed_rows,
                computed=(tally.computed_prompt_tokens - tally.cached_tokens) / num_requests,
                answer=generated / num_requests,
            )
            estimated = estimate_layout(layout, gpus, job.model, job.config, num_requests=num_requests, lengths=lengths)
            seconds = estimated.seconds if estimated.num_tokens else None
        forecasts.append(Forecast(answer_tokens=expected, generated_tokens=generated, seconds=seconds))
    return forecasts
